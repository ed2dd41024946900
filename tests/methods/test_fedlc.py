"""FedLC: margins by label counts in the local loss."""

from __future__ import annotations

import pytest
import torch

from personafl import FedLC
from personafl.core.errors import UserError
from personafl.core.types import Setup
from tests import worlds


def test_margins_are_larger_for_rarer_classes() -> None:
    """tau n^(-1/4): 1/2 for 16 examples, 1 for one, and for none so much that the class is out."""
    added = FedLC(margin=1.0).margins(torch.tensor([[16.0, 1.0, 0.0]], dtype=torch.float64))
    assert added[0].tolist() == pytest.approx([-0.5, -1.0, -100.0])


def test_other_tasks_and_a_second_correction_are_refused() -> None:
    with pytest.raises(UserError, match=r"prior_free: .* makes up for label frequencies in its own way"):
        FedLC(prior_free=True)
    with pytest.raises(UserError, match="needs one class per example for class frequencies"):
        FedLC().bind(Setup(worlds.model().info, worlds.training(task="regression"), 6))


def test_a_negative_margin_is_refused() -> None:
    with pytest.raises(UserError, match=r"margin=-1\.0: must not be negative"):
        FedLC(margin=-1.0)
