"""FLDA: a gate mixes a shared and a private model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from personafl import FLDA, FedAvg, Simulation
from personafl.core import tree
from tests import checks, worlds

ONE = {"local_steps": 1, "batch_size": 64, "num_rounds": 4}


def answers(sim: Simulation, x: Tensor) -> Tensor:
    ready = sim.deployed_models(sim.model, sim.everybody)
    return sim.algorithm.predict(sim.model, ready, x.expand(6, *x.shape)).detach()


def test_a_gate_of_zero_mixes_halves_of_probabilities() -> None:
    sim = checks.played(FLDA(), num_rounds=2, join_ratio=1.0)
    x = sim.federation.source.x[:4]
    ready = sim.deployed_models(sim.model, sim.everybody)
    open_gate = ready | {n: torch.zeros_like(ready[n]) for n in ("gate/weight", "gate/bias")}
    found = sim.algorithm.predict(sim.model, open_gate, x.expand(6, *x.shape)).exp()
    for c in range(6):
        private = {n: t[c] for n, t in tree.under(ready, "personal").items()}
        sides = [checks.outputs(p, x).softmax(1) for p in (sim.server, private)]
        torch.testing.assert_close(found[c], (sides[0] + sides[1]) / 2)
    assert not torch.allclose(*sides)


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_a_gate_far_to_one_side_answers_by_that_model(side: float) -> None:
    sim = checks.played(FLDA(), num_rounds=2, join_ratio=1.0)
    x = sim.federation.source.x[:4]
    ready = sim.deployed_models(sim.model, sim.everybody)
    shut = ready | {
        "gate/weight": torch.zeros_like(ready["gate/weight"]),
        "gate/bias": torch.full_like(ready["gate/bias"], 1e3 * side),
    }
    found = sim.algorithm.predict(sim.model, shut, x.expand(6, *x.shape))[2]
    model = sim.server if side > 0 else {n: t[2] for n, t in tree.under(ready, "personal").items()}
    torch.testing.assert_close(found, checks.outputs(model, x).log_softmax(1))


def test_the_gate_is_linear_in_the_shared_features() -> None:
    sim = checks.played(FLDA(), num_rounds=2, join_ratio=1.0)
    x = sim.federation.source.x[:4]
    ready = sim.deployed_models(sim.model, sim.everybody)
    assert ready["gate/weight"].abs().max() > 0
    c = 3
    a = torch.sigmoid(checks.hidden(sim.server, x) @ ready["gate/weight"][c] + ready["gate/bias"][c]).unsqueeze(1)
    private = {n: t[c] for n, t in tree.under(ready, "personal").items()}
    mixed = a * checks.outputs(sim.server, x).softmax(1) + (1 - a) * checks.outputs(private, x).softmax(1)
    torch.testing.assert_close(answers(sim, x)[c].exp(), mixed)


def test_the_private_model_and_the_gate_never_travel() -> None:
    sim, fedavg = checks.played(FLDA()), checks.played(FedAvg())
    again = worlds.simulation(FLDA())
    rnd, ids, done = checks.rehearsed(again)
    names = set(sim.model.info.shapes)
    assert set(done.upload) == set(sim.download(ids, rnd).shared) == set(sim.server) == names
    assert sim.totals.up_bytes == fedavg.totals.up_bytes
    assert {n.partition("/")[0] for n in checks.everyone(sim)} == {"personal", "gate"}


def test_all_three_learn_together_from_the_initial_model() -> None:
    """At first both models are alike, so each half of the mixture is half the gradient and the gate has none."""
    sim = worlds.simulation(FLDA(), **ONE | {"join_ratio": 1.0})
    _, ids, done = checks.rehearsed(sim)
    x, y = checks.rows_of(sim, int(ids[0]))
    g = checks.gradient(dict(sim.model.initial), x, y)
    for n, t in sim.model.initial.items():
        torch.testing.assert_close(done.local.params[n][0], t - 0.05 * g[n], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(done.local.params[f"personal/{n}"][0], t - 0.05 * g[n], rtol=1e-10, atol=1e-12)
    assert done.local.params["gate/weight"].abs().max() < 1e-15
