"""FedAvg with adaptive inference: FedAvg with two plug-ins."""

from __future__ import annotations

import pytest
import torch

from personafl import FedAvg, FedAvgAdaptive
from personafl.core.errors import UserError
from personafl.core.types import Setup
from tests import worlds


def test_adaptive_inference_by_name_is_fedavg_with_two_slots() -> None:
    named = worlds.simulation(FedAvgAdaptive())
    composed = worlds.simulation(FedAvg(prior_free=True, inference="batch"))
    for sim in (named, composed):
        sim.run()
    assert all(torch.equal(t, composed.server[n]) for n, t in named.server.items())
    assert [row["personal"] for row in named.rows if "personal" in row] == [
        row["personal"] for row in composed.rows if "personal" in row
    ]
    assert named.algorithm.evaluated("after_aggregation") == composed.algorithm.evaluated("after_aggregation")


def test_adaptive_inference_needs_classes() -> None:
    with pytest.raises(UserError, match="FedAvgAdaptive needs one class per example for class frequencies"):
        FedAvgAdaptive().bind(Setup(worlds.model().info, worlds.training(task="regression"), 6))
