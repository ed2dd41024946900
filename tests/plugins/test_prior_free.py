"""Local training that leaves out how often classes occur at a client."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl import (
    APFL,
    COPFL,
    DMPFL,
    FML,
    MOON,
    Algorithm,
    Ditto,
    FedAvg,
    FedAvgFT,
    FedDST,
    Federation,
    FedPeWS,
    FedProx,
    FedRep,
    Inherit,
    Scaffold,
    Source,
)
from personafl.core.errors import UserError
from personafl.core.labels import log_frequencies
from personafl.core.types import Model, Params, Setup, Sweep
from personafl.plugins.prior_free import PriorFree
from tests import checks, worlds


def frequencies(y: Tensor, classes: int = 3) -> Tensor:
    """(n_k + 1) / (n + K), as the slot's text has it."""
    counts = torch.tensor([(y == k).sum() + 1.0 for k in range(classes)], dtype=torch.float64)
    return counts / counts.sum()


def by_hand(sim_seed_model: nn.Module, x: Tensor, y: Tensor, steps: int, lr: float) -> dict[str, Tensor]:
    """Full-batch steps on CE(z + log pi), in plain PyTorch."""
    module = sim_seed_model.double()
    offset = frequencies(y).log()
    for _ in range(steps):
        loss = F.cross_entropy(module(x.double()) + offset, y)
        grads = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for p, g in zip(module.parameters(), grads, strict=True):
                p -= lr * g
    return {n: t.detach() for n, t in module.named_parameters()}


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_a_client_trains_on_its_logits_with_its_log_frequencies(kind: str) -> None:
    """One client with all its data in a batch: an MLP goes by gradients in closed form, a CNN by autograd."""
    fed = worlds.federation(kind, sizes=(40,))
    sim = worlds.simulation(
        FedAvg(prior_free=True), kind, fed, num_rounds=1, join_ratio=1.0, local_epochs=4, batch_size=64
    )
    sim.run()
    data = fed.examples("train", torch.tensor([0]))
    rows = data.rows[0, : int(data.count[0])]
    assert len(set(fed.source.y[rows].bincount().tolist())) > 1  # classes are not equally frequent
    wanted = by_hand(worlds.module(kind), fed.source.x[rows], fed.source.y[rows], 4, 0.1)
    for n, t in wanted.items():
        torch.testing.assert_close(sim.server[n], t, rtol=0, atol=1e-12)
    plain = worlds.simulation(FedAvg(), kind, fed, num_rounds=1, join_ratio=1.0, local_epochs=4, batch_size=64)
    plain.run()
    assert max(float((plain.server[n] - t).abs().max()) for n, t in wanted.items()) > 1e-4


def balanced() -> Federation:
    """Clients with as many examples of each class."""
    draw = torch.Generator().manual_seed(1)
    y = torch.arange(72) % 3
    x = torch.randn(72, 6, generator=draw) + y.view(-1, 1)
    whole = np.arange(72).reshape(4, 18)
    return Federation.build(Source("even", x, y, 3), [w[:12] for w in whole], 0, tests=[w[12:] for w in whole])


METHODS: dict[str, Algorithm] = {
    "fedavg": FedAvg(),
    "fedavg-ft": FedAvgFT(),
    "fedprox": FedProx(),
    "scaffold": Scaffold(),
    "fedrep": FedRep(),
    "ditto": Ditto(),
    "apfl": APFL(),
    "fml": FML(),
    "moon": MOON(),
    "feddst": FedDST(readjust_interval=1, readjust_share=0.3),
    "dm-pfl": DMPFL(readjust_interval=1, readjust_share=0.3, iterations=1),
    "co-pfl": COPFL(lr=0.02),
    "fedpews": FedPeWS(base=FedAvg(), warmup_share=0.5),
    "inherited": FedAvg(inherit=Inherit(weight=0.2)),
    "by contribution": FedAvg(weights="cowa"),
}


@pytest.mark.parametrize("name", METHODS)
def test_with_equal_frequencies_nothing_changes_and_with_others_something_does(name: str) -> None:
    """log(1 / K) is the same for all classes, and a constant changes no gradient of cross-entropy."""
    method = METHODS[name]
    free = dataclasses.replace(method, prior_free=True)
    even = [worlds.simulation(m, fed=balanced(), num_rounds=4) for m in (method, free)]
    ragged = [worlds.simulation(m, num_rounds=4) for m in (method, free)]
    for sim in (*even, *ragged):
        sim.run()
    checks.assert_agree(even[0].server, even[1].server, 1e-9)
    assert any(
        t.is_floating_point() and float((t - ragged[1].server[n]).abs().max()) > 1e-6
        for n, t in ragged[0].server.items()
    )


def test_it_costs_nothing_and_sends_nothing() -> None:
    rows = []
    for free in (False, True):
        sim = worlds.simulation(Ditto(prior_free=free), num_rounds=2)
        sim.run()
        rows.append(sim.totals)
        assert not any("prior" in n for n in (*sim.server, *sim.store.gather(torch.arange(1))))
    assert rows[0] == rows[1]


def test_log_frequencies_are_smooth() -> None:
    found = log_frequencies(torch.tensor([[7.0, 0.0, 0.0], [2.0, 2.0, 2.0]]))
    assert found[0].tolist() == pytest.approx([math.log(0.8), math.log(0.1), math.log(0.1)])
    assert found[1].tolist() == pytest.approx([math.log(1 / 3)] * 3)


def test_other_tasks_are_refused() -> None:
    setup = Setup(worlds.model().info, worlds.training(task="regression"), 6)
    with pytest.raises(UserError, match="prior_free needs one class per example for class frequencies"):
        FedAvg(prior_free=True).bind(setup)


def test_the_slot_stands_innermost() -> None:
    sim = worlds.simulation(FedAvg(prior_free=True, weights="cowa", inherit=Inherit()))
    assert isinstance(sim.algorithm.base.base, PriorFree)  # type: ignore[attr-defined]


class Doubled(FedAvg):
    """FedAvg whose clients measure something before they predict, and answer in a way of their own."""

    def calibrate(self, deployed: Params, sweep: Sweep) -> Params:
        return deployed | {"aux/examples": sweep(lambda model, batch: {"n": batch.count})["n"]}

    def predict(self, model: Model, deployed: Params, x: Tensor) -> Tensor:
        return 2 * super().predict(model, deployed, x)


def test_prediction_is_the_methods_own() -> None:
    sim = worlds.simulation(Doubled(prior_free=True), num_rounds=1)
    sim.run()
    ready = sim.deployed_models(sim.model, torch.tensor([0, 1]))
    assert ready["aux/examples"].tolist() == [28, 6]
    x = torch.ones(2, 3, 6, dtype=torch.float64)
    assert torch.equal(sim.algorithm.predict(sim.model, ready, x), 2 * sim.model(ready, x))
