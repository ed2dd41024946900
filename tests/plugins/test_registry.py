"""What fills a slot is registered in a line, from anywhere, and then has its place in recipes, checks and `info`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from personafl import Algorithm, Ditto, FedAvg, Inherit, config
from personafl.cli import app
from personafl.core import tree
from personafl.core.errors import UserError
from personafl.core.plugin_points import INFERENCE, INHERIT, ROBUST, WEIGHTS, Answers
from personafl.core.types import Params, Payload, Round, Sweep
from personafl.plugins.wrapper import MethodWrapper
from tests import checks, worlds


@dataclass(frozen=True, kw_only=True)
class SquaredSizes(MethodWrapper):
    """Clients count by the square of their number of examples."""

    prefix: ClassVar[str] = "squared"

    def weigh(self, server: Params, known: Params, upload: Payload, examples: Tensor, rnd: Round) -> Tensor:
        return super().weigh(server, known, upload, examples, rnd) ** 2


@dataclass(frozen=True)
class Nothing:
    """A filling of `inherit` that changes nothing but notes what it was put around."""

    times: int = 1

    def around(self, method: Any) -> Any:
        SEEN.append((self.times, type(method).__name__))
        return method


@dataclass(frozen=True)
class Mean:
    """Answer with the mean of both models' outputs."""

    together: ClassVar[bool] = False
    in_turn: ClassVar[bool] = False
    class_labels_for: ClassVar[str] = ""

    share: float = 0.5

    @property
    def asks_global(self) -> bool:
        return True

    @property
    def asks_validation(self) -> str:
        return ""

    def words(self, own: str) -> str:
        return f"the mean of the global model and {own}"

    def measure(self, method: Answers, deployed: Params, sweep: Sweep) -> Params:
        return {}

    def decide(
        self, deployed: Params, own: Tensor, common: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, Params]:
        return self.share * own + (1 - self.share) * common, {}


SEEN: list[tuple[int, str]] = []


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WEIGHTS, "squared", SquaredSizes.around)
    monkeypatch.setitem(INHERIT, "nothing", Nothing)
    monkeypatch.setitem(INFERENCE, "mean", Mean)
    SEEN.clear()


def test_weights_of_ones_own_reach_the_mean() -> None:
    sims = [worlds.simulation(FedAvg(weights=w), num_rounds=1, join_ratio=1.0) for w in ("examples", "squared")]
    uploads: list[Tensor] = []
    plain = sims[0].algorithm.summands(
        {"w": torch.tensor([[1.0], [0.0]])}, torch.tensor([3.0, 1.0]), Round(sims[0].schedule[0], 0.1)
    )
    assert float(plain["w"].sum() / plain["aux/weight"].sum()) == 0.75
    examples = torch.tensor([3.0, 1.0])
    counted = sims[1].algorithm.weigh({}, {}, {}, examples, Round(sims[1].schedule[0], 0.1))
    assert counted.tolist() == [9.0, 1.0]  # so the mean of 1 and 0 would be 9 / 10
    for sim in sims:
        sim.run()
        uploads.append(sim.server["head.weight"])
    assert not torch.equal(*uploads)


@dataclass(frozen=True)
class FirstOnly:
    """A filling of `robust`: the server takes the first upload alone."""

    def around(self, method: Algorithm) -> Algorithm:
        return TakesFirst.around(method)


@dataclass(frozen=True, kw_only=True)
class TakesFirst(MethodWrapper):
    prefix: ClassVar[str] = "first"

    def needs_uploads(self) -> bool:
        return True

    def screen(self, server: Params, upload: Payload, rnd: Round) -> tuple[Tensor | None, Payload]:
        return torch.tensor([0]), tree.rows_of(upload, torch.tensor([0]))


def test_a_robust_mean_of_ones_own_sees_all_uploads_and_leaves_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROBUST, "first", FirstOnly)
    method = config.method({"name": "fedavg", "robust": {"name": "first"}}).algorithm
    assert method == FedAvg(robust=FirstOnly())
    sim, alone = (worlds.simulation(m, num_rounds=1, join_ratio=1.0) for m in (method, FedAvg()))
    largest = alone.cohort(alone.schedule[0])[:1]
    monkeypatch.setattr(alone, "cohort", lambda stage: largest)
    sim.run()
    alone.run()
    checks.assert_agree(sim.server, alone.server, 1e-12)


def test_a_recipe_names_a_filling_and_the_resolved_one_keeps_the_name() -> None:
    entry = {"name": "fedavg", "inherit": {"name": "nothing", "times": 3}}
    method = config.method(entry)
    assert method.algorithm.inherit == Nothing(times=3)
    assert config.settings(method.algorithm)["inherit"] == {"name": "nothing", "times": 3}
    assert config.method({"name": "fedavg", "inherit": {"transfer": "kd"}}).algorithm.inherit == Inherit(transfer="kd")
    worlds.simulation(method.algorithm)
    assert SEEN == [(3, "FedAvg")]
    with pytest.raises(UserError, match=r"inherit.name='nothin': no such choice; did you mean nothing\?"):
        config.method({"name": "fedavg", "inherit": {"name": "nothin"}})


def test_inference_of_ones_own_joins_both_models() -> None:
    sim = worlds.simulation(Ditto(inference="mean"), num_rounds=2)
    sim.run()
    ids = torch.tensor([0, 5])
    ready = sim.deployed_models(sim.model, ids)
    x = sim.federation.source.x[:4].expand(2, -1, -1)
    own = sim.model({n: t for n, t in ready.items() if "/" not in n}, x)
    common = sim.model({n.removeprefix("global/"): t for n, t in ready.items() if n.startswith("global/")}, x)
    torch.testing.assert_close(sim.algorithm.predict(sim.model, ready, x), (own + common) / 2)
    assert sim.algorithm.evaluated("after_aggregation").startswith("the mean of the global model and ")


def test_a_table_has_a_rules_settings_and_a_name_its_usual_ones() -> None:
    named, told = (
        config.method({"name": "ditto", "inference": value}).algorithm
        for value in ("mean", {"name": "mean", "share": 0.2})
    )
    assert (named.inference, named.rule) == ("mean", Mean()) and told.inference == told.rule == Mean(share=0.2)
    assert config.settings(told)["inference"] == {"name": "mean", "share": 0.2}
    assert config.method({"name": "ditto", **config.settings(told)}).algorithm == told
    for value, why in (
        ("men", "inference='men': possible are own, "),
        ({"name": "men"}, r"inference.name='men': no such choice; did you mean mean\?"),
        ({"name": "own"}, "inference.name='own': it has no settings; give the name alone"),
        ({"name": "mean", "shar": 1}, "inference.shar=1: no such setting"),
        (7, "inference=7: must be text"),
    ):
        with pytest.raises(UserError, match=why):
            config.method({"name": "ditto", "inference": value})


def test_a_table_without_a_name_is_asked_for_it() -> None:
    with pytest.raises(UserError, match=r"inference\.share=1: a setting of .*batch, stream.*; say which .* name = "):
        FedAvg(inference={"share": 1})


def test_what_is_registered_is_possible_and_shown() -> None:
    with pytest.raises(ValueError, match=r"possible are examples, uniform, cowa, .*, squared"):
        FedAvg(weights="square")
    shown = CliRunner().invoke(app, ["info", "fedavg"])
    assert "squared" in shown.output and "mean" in shown.output
