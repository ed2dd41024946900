"""The defaults of a method: what travels and what stays."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from personafl import FedRep, StackedModel
from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.types import Params, Round, Stage
from tests import worlds


@dataclass(frozen=True, kw_only=True)
class Diary(Algorithm):
    """FedAvg whose clients keep a second head and a number; it says of neither that it travels."""

    told: frozenset[str] = frozenset()

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        own = tree.prefixed(tree.select(params, self.own_head()), "own") | {"own/rounds": torch.zeros(())}
        return super().init_clients(params, ids) | tree.stack(own, len(ids))

    def travels(self) -> frozenset[str]:
        return super().travels() | self.told


def sent(algorithm: Algorithm) -> set[str]:
    """The names the first cohort uploads."""
    sim = worlds.simulation(algorithm, num_rounds=1)
    names: set[str] = set()
    upload = type(sim.algorithm).upload

    def seen(self: Algorithm, local, rnd):  # type: ignore[no-untyped-def]
        out = upload(self, local, rnd)
        names.update(out)
        return out

    type(sim.algorithm).upload = seen  # type: ignore[method-assign]
    try:
        sim.run()
    finally:
        type(sim.algorithm).upload = upload  # type: ignore[method-assign]
    return names


def test_what_a_method_adds_stays_on_the_client_unless_it_says_that_it_travels() -> None:
    model = set(worlds.stacked("mlp").info.shapes)
    assert sent(Diary()) == model
    assert sent(Diary(told=frozenset({"own/head.bias"}))) == model | {"own/head.bias"}


def test_added_state_is_kept_over_rounds() -> None:
    sim = worlds.simulation(Diary(), num_rounds=2)
    sim.run()
    assert {"own/head.weight", "own/head.bias", "own/rounds"} <= sim.store.gather(sim.everybody).keys()


@dataclass(frozen=True, kw_only=True)
class Uniform(Algorithm):
    """A method with another default for a setting all methods have."""

    weights: str = "uniform"


def test_a_setting_with_another_default_keeps_its_words_and_choices() -> None:
    mine, first = ({f.name: f for f in cls.settings()}["weights"] for cls in (Uniform, Algorithm))
    assert (mine.default, first.default) == ("uniform", "examples")
    assert mine.metadata == first.metadata
    assert mine.metadata["help"]
    with pytest.raises(UserError, match="weights='many': possible are examples, uniform"):
        Uniform(weights="many")


def test_a_head_may_be_a_single_tensor() -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3, bias=False))
    sim = worlds.simulation(FedRep(), model=StackedModel(module, torch.zeros(2, 6)))
    assert sim.algorithm.own_head() == {"2.weight"}
    assert sim.server.keys() == {"0.weight", "0.bias"}


def test_the_servers_streams_are_functions_of_seed_purpose_round_and_phase() -> None:
    def stream(purpose: str, rnd: Round | None, seed: int = 0) -> int:
        method = worlds.simulation(Diary(), seed=seed).algorithm
        return int(method.server_stream(purpose, rnd))

    rounds = [None, Round(Stage(0), 0.1), Round(Stage(1), 0.1), Round(Stage(0, phase="tune"), 0.1)]
    drawn = [stream(purpose, rnd, seed) for purpose in ("mask", "noise") for rnd in rounds for seed in (0, 1)]
    assert len(set(drawn)) == len(drawn)
    assert stream("mask", Round(Stage(1), 0.3, predicting=True)) == stream("mask", rounds[2])
