"""Metrics of single clients and what a list of them comes to."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics

from personafl.core.types import Metric
from personafl.evaluation.metrics import LOSSES, METRICS, accuracy, cross_entropy, over_clients


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


def test_where_lower_is_better_the_largest_is_the_worst() -> None:
    found = over_clients(torch.tensor([0.5, 1.0, 0.0]), torch.tensor([1, 1, 1]), "lower")
    assert found["p10"] == pytest.approx(0.9)  # four fifths of the way from 0.5 to 1
    assert found["worst"] == 1.0


def in_minibatches(metric: Metric, out: torch.Tensor, y: torch.Tensor) -> float:
    """A client's number, its examples scored three at a time."""
    parts = [metric.per_example(o, t) for o, t in zip(out.split(3), y.split(3), strict=True)]
    return float(metric.of_client(torch.cat(parts)))


DRAW = np.random.default_rng(0)
TARGETS, GUESSES = DRAW.normal(100, 2, (20, 3)), DRAW.normal(100, 2, (20, 3))
LABELS, LOGITS = DRAW.random((20, 4)) < 0.3, DRAW.normal(size=(20, 4)).round(1)  # so coarse that some are alike


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        ("mse", sklearn_metrics.mean_squared_error),
        ("mae", sklearn_metrics.mean_absolute_error),
        ("r2", sklearn_metrics.r2_score),
    ],
)
def test_metrics_of_regression_are_scikit_learn_s(name: str, truth: object) -> None:
    found = in_minibatches(METRICS["regression"][name], torch.from_numpy(GUESSES), torch.from_numpy(TARGETS))
    assert found == pytest.approx(truth(TARGETS, GUESSES))


def test_metrics_of_labels_are_scikit_learn_s() -> None:
    out, y = torch.from_numpy(LOGITS), torch.from_numpy(LABELS).to(torch.uint8)
    f1 = sklearn_metrics.f1_score(LABELS, LOGITS > 0, average="macro")
    assert in_minibatches(METRICS["multilabel"]["macro_f1"], out, y) == pytest.approx(f1)
    precision = sklearn_metrics.average_precision_score(LABELS, LOGITS, average="macro")
    assert len(np.unique(LOGITS[:, 0])) < 20  # there are ties
    assert in_minibatches(METRICS["multilabel"]["map"], out, y) == pytest.approx(precision)


def test_several_sets_are_reduced_at_once() -> None:
    """The shifted test sets of a client are one tensor, [n, draws, degrees, S]."""
    for task, out, y in (
        ("regression", torch.from_numpy(GUESSES), torch.from_numpy(TARGETS)),
        ("multilabel", torch.from_numpy(LOGITS), torch.from_numpy(LABELS).to(torch.uint8)),
    ):
        for metric in METRICS[task].values():
            found = metric.per_example(out, y)
            sets = torch.stack([found, found.roll(1, 0), found[:1].expand_as(found), found], 1)
            sets = sets.view(20, 2, 2, *found.shape[1:])
            alone = [metric.of_client(sets[:, i, j]) for i in range(2) for j in range(2)]
            assert metric.of_client(sets).flatten().tolist() == pytest.approx([float(a) for a in alone])


def test_labels_a_client_has_not_do_not_count() -> None:
    """The first label occurs and is found, the second does not occur; a third is predicted in vain."""
    y = torch.tensor([[1, 0, 0], [0, 0, 0]], dtype=torch.uint8)
    out = torch.tensor([[1.0, -1.0, -1.0], [-1.0, -1.0, 1.0]])
    f1, ap = METRICS["multilabel"]["macro_f1"], METRICS["multilabel"]["map"]
    assert in_minibatches(f1, out, y) == pytest.approx((1 + 0) / 2)
    assert in_minibatches(ap, out, y) == pytest.approx(1.0)
    nothing = torch.zeros_like(y)
    assert in_minibatches(f1, torch.full_like(out, -1.0), nothing) == 1.0  # nothing to find and nothing said
    assert in_minibatches(ap, out, nothing) == 1.0


def test_r2_of_targets_that_are_all_alike() -> None:
    y = torch.full((4, 1), 0.1)
    r2 = METRICS["regression"]["r2"]
    assert in_minibatches(r2, y.clone(), y) == 1.0
    assert in_minibatches(r2, y + 1, y) == 0.0


def test_accuracy_of_positions_is_a_ratio_of_sums() -> None:
    """Two of three right in one example, none of one in another, no position in the last: 2 of 4, not (2/3 + 0) / 2."""
    y = torch.tensor([[0, 1, 1], [1, -100, -100], [-100, -100, -100]])
    out = torch.nn.functional.one_hot(torch.tensor([[0, 1, 0], [0, 1, 1], [0, 0, 0]]), 2).float()
    metric = METRICS["sequence"]["accuracy"]
    assert in_minibatches(metric, out, y) == 0.5
    assert in_minibatches(metric, out[2:], y[2:]) == 1.0
    with pytest.raises(ValueError, match="one prediction per position"):
        metric.per_example(out[:, 0], y)


def test_every_task_has_losses_and_metrics_and_their_names_are_unlike() -> None:
    assert LOSSES.keys() == METRICS.keys()
    for of_task in METRICS.values():
        assert [m.name for m in of_task.values()] == list(of_task)
