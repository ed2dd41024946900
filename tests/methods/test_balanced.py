"""FedLC and Fed-RoD: label counts in the local loss."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from personafl import Algorithm, FedAvg, FedLC, FedRoD, Inherit
from personafl.core.errors import UserError
from personafl.core.types import Setup
from tests import checks, worlds


def test_margins_are_larger_for_rarer_classes() -> None:
    """tau n^(-1/4): 1/2 for 16 examples, 1 for one, and for none so much that the class is out."""
    added = FedLC(margin=1.0).margins(torch.tensor([[16.0, 1.0, 0.0]], dtype=torch.float64))
    assert added[0].tolist() == pytest.approx([-0.5, -1.0, -100.0])


def test_the_shared_model_of_fed_rod_does_not_know_of_own_heads() -> None:
    """It is FedAvg's, trained without label frequencies."""
    checks.assert_agree(checks.played(FedRoD()).server, checks.played(FedAvg(prior_free=True)).server, 1e-11)


def test_an_own_head_learns_what_the_shared_model_leaves_out() -> None:
    sim = checks.played(FedRoD(), num_rounds=20, join_ratio=1.0)
    kept = sim.store.gather(torch.arange(6))
    assert kept["own/weight"].shape[1:] == (3, 8) and bool((kept["own/weight"].abs().amax((1, 2)) > 1e-3).all())
    own, common = [], []
    for c in range(6):
        x, y = checks.rows_of(sim, c)
        (ready,) = sim.each(torch.tensor([c]), sim.deployed_models)
        loss = torch.nn.functional.cross_entropy
        own.append(float(loss(sim.algorithm.predict(sim.model, ready, x[None])[0], y)))
        common.append(float(loss(sim.model(ready, x[None])[0], y)))
    assert all(a < b for a, b in zip(own, common, strict=True))  # on the data it was trained for


@pytest.mark.parametrize("method", [FedLC(), FedRoD()], ids=str)
def test_other_tasks_and_a_second_correction_are_refused(method: Algorithm) -> None:
    with pytest.raises(UserError, match=r"prior_free: .* makes up for label frequencies in its own way"):
        dataclasses.replace(method, prior_free=True)
    with pytest.raises(UserError, match=r"needs one class per example \(how often it occurs\)"):
        method.bind(Setup(worlds.model().info, worlds.training(task="regression"), 6))


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(UserError, match=r"margin=-1\.0: must not be negative"):
        FedLC(margin=-1.0)
    for changes in ({"inherit": Inherit()}, {"weights": "cowa"}):
        with pytest.raises(UserError, match="not with inherit or weights by contribution"):
            FedRoD(**changes)  # type: ignore[arg-type]
