"""What a list of client scores comes to."""

from __future__ import annotations

import math

import pytest
import torch

from personafl.evaluation.metrics import accuracy, cross_entropy, over_clients


def test_numbers_over_clients_by_hand() -> None:
    found = over_clients(torch.tensor([0.5, 1.0, 0.0]), torch.tensor([2, 1, 1]))
    assert found["mean"] == pytest.approx(0.5)
    assert found["std"] == pytest.approx(math.sqrt((0.0 + 0.25 + 0.25) / 3))  # population, as the papers' code
    assert found["weighted"] == pytest.approx((2 * 0.5 + 1.0 + 0.0) / 4)
    assert found["p10"] == pytest.approx(0.1)  # a fifth of the way from 0 to 0.5
    assert found["worst"] == 0.0


def test_outputs_that_are_no_numbers_are_wrong() -> None:
    nan, inf = math.nan, math.inf
    out = torch.tensor([[nan, nan], [1.0, nan], [inf, 0.0], [-inf, -inf], [1.0, -inf]])
    assert accuracy(out, torch.zeros(5, dtype=torch.int64)).tolist() == [0, 0, 0, 0, 1]  # -inf is a probability of 0


def test_accuracy_and_loss_are_per_example() -> None:
    out, y = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]]), torch.tensor([0, 0, 0])
    assert accuracy(out, y).tolist() == [1.0, 0.0, 1.0]
    expected = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(1)), math.log(1 + math.exp(-3))]
    assert cross_entropy(out, y).tolist() == pytest.approx(expected)
