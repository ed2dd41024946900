"""Fed-RoD: the balanced shared model, and the clients' own heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from personafl import FedAvg, FedRoD, Inherit
from personafl.core.errors import UserError
from personafl.core.types import Setup
from tests import checks, worlds


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


def test_other_tasks_and_a_second_correction_are_refused() -> None:
    with pytest.raises(UserError, match=r"prior_free: .* makes up for label frequencies in its own way"):
        FedRoD(prior_free=True)
    with pytest.raises(UserError, match="needs one class per example for class frequencies"):
        FedRoD().bind(Setup(worlds.model().info, worlds.training(task="regression"), 6))


@pytest.mark.parametrize("changes", [{"inherit": Inherit()}, {"weights": "cowa"}], ids=str)
def test_what_runs_the_model_alone_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="not with inherit or weights by contribution"):
        FedRoD(**changes)
