"""How objects are shown: short, and as tables in a notebook."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import personafl
from personafl.core.display import Displayed
from personafl.experiment import Client, MethodResult


class Thing(Displayed):
    def _facts(self) -> dict[str, object]:
        return {"a_size": 3, "b": "<x>"}


def test_facts_are_a_line_and_an_escaped_table() -> None:
    assert repr(Thing()) == "Thing(a_size=3, b=<x>)"
    page = Thing()._repr_html_()
    assert "<caption>Thing</caption>" in page
    assert re.findall(r"<td[^>]*>([^<]*)</td>", page) == ["a size", "3", "b", "&lt;x&gt;"]


def test_a_method_shows_what_is_not_its_default_and_can_be_read_back() -> None:
    assert repr(personafl.Ditto()) == "Ditto()"
    mine = personafl.FedPeWS(lr=0.5, base=personafl.FedProx(proximal_weight=0.25))
    assert repr(mine) == "FedPeWS(lr=0.5, base=FedProx(proximal_weight=0.25))"
    assert eval(repr(mine), {n: getattr(personafl, n) for n in personafl.__all__}) == mine
    page = personafl.Ditto(proximal_weight=0.75)._repr_html_()
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page)
    shown = dict(zip(cells[::3], cells[1::3], strict=True))
    assert shown["proximal_weight"] == "0.75" and shown["lr"] == "recipe" and shown["weights"] == "examples"


def test_a_method_of_ones_own_is_shown_alike_unless_it_says_otherwise() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(personafl.FedAvg):
        strength: float = 1.0

    @dataclass(frozen=True, kw_only=True)
    class Loud(personafl.FedAvg):
        def __repr__(self) -> str:
            return "LOUD"

    assert repr(Mine(strength=2.0)) == "Mine(strength=2.0)"
    assert repr(Loud()) == "LOUD"


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """Forty samples of two named clients, 15 and 25; a quarter, 4 and 6, are for testing."""
    rng = np.random.default_rng(0)
    clients = np.array(["anna", "ben"])[np.repeat([0, 1], [15, 25])]
    x, y = rng.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2
    training = {"num_rounds": 1, "local_steps": 1}
    data = personafl.arrays(x, y, clients, name="watch")
    result = personafl.run(data=data, model=torch.nn.Linear(3, 2), algorithms="fedavg", training=training)
    method = result["fedavg"]
    sim = method.simulation
    return {
        "result": result, "method": method, "client": method.client("ben"), "simulation": sim,
        "federation": sim.federation, "source": sim.federation.source, "model": sim.model,
    }  # fmt: skip


def test_objects_of_a_run_are_told_in_a_line(objects: dict[str, Any]) -> None:
    own = 100 * objects["method"].summary["accuracy"]["personal"]["mean"]
    assert {name: repr(thing) for name, thing in objects.items()} == {
        "result": "Result(recipe=own, labels=['fedavg'], seeds=[0])",
        "method": f"MethodResult(label=fedavg, seed=0, accuracy={own:.1f} %, clients=2)",
        "client": "Client(id=1, name=ben, method=FedAvg, train=19, test=6)",
        "simulation": "Simulation(method=FedAvg, data=watch, clients=2, stages=1 of 1, device=cpu)",
        "federation": "Federation(data=watch, clients=2, train=30, test=10, train_per_client=11 to 19)",
        "source": "Source(name=watch, examples=40, shape=(3,), classes=2, clients=2)",
        "model": "StackedModel(module=Linear, parameters=8, head=weight, bias)",
    }


def test_objects_of_a_run_are_tables_in_a_notebook(objects: dict[str, Any]) -> None:
    for thing in objects.values():
        page = thing._repr_html_()
        assert page.startswith("<table") and len(page) < 2500
    assert isinstance(objects["client"], Client) and isinstance(objects["method"], MethodResult)
    (row,) = re.findall(r"<tbody><tr><td>(.*?)</tr></tbody>", objects["result"]._repr_html_())
    cells = row.removesuffix("</td>").split("</td><td>")
    told = [c.strip() for c in objects["result"].table().splitlines()[2].strip("|").split("|")]
    assert cells == told
    assert row in objects["method"]._repr_html_()
