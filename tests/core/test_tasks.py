"""What targets say about the task."""

from __future__ import annotations

import pytest
import torch

from personafl.core import tasks

BITS = [[0, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("targets", "task"),
    [
        (torch.tensor([0, 3]), "classification"),
        (torch.tensor([True, False]), "classification"),
        (torch.tensor([0.5, 3.0]), "regression"),
        (torch.tensor([1.0, 3.0]), "regression"),  # the type decides, not the values
        (torch.zeros(2, 7, dtype=torch.float64), "regression"),
        (torch.tensor(BITS, dtype=torch.bool), "multilabel"),
        (torch.tensor(BITS, dtype=torch.uint8), "multilabel"),
        (torch.tensor(BITS), "sequence"),
        (torch.tensor([[0, 200], [3, 4]], dtype=torch.uint8), "sequence"),
        (torch.tensor([[0, -100], [3, 4]]), "sequence"),
    ],
)
def test_type_and_shape_of_targets_tell_the_task(targets: torch.Tensor, task: str) -> None:
    assert tasks.infer_task(targets) == task
    made = tasks.as_targets(targets, task)
    tasks.check_targets(made, task, tasks.count_outputs(made, task))
    assert made.tolist() == targets.tolist()


def test_outputs_are_classes_or_numbers_of_a_target() -> None:
    assert tasks.count_outputs(torch.tensor([0, 6]), "classification") == 7
    assert tasks.count_outputs(torch.tensor([[0, -100], [6, 2]]), "sequence") == 7
    assert tasks.count_outputs(torch.zeros(2), "regression") == 1
    assert tasks.count_outputs(torch.zeros(2, 4), "regression") == 4
    assert tasks.count_outputs(torch.zeros(2, 4, dtype=torch.uint8), "multilabel") == 4


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.zeros(2, 1, dtype=torch.int64), r"shape \(2, 1\) and type int64 are of no task.*give them shape \(N,\)"),
        (torch.zeros(2, 3, 4), r"shape \(2, 3, 4\) and type float32 are of no task"),
    ],
)
def test_targets_of_no_task_are_refused(targets: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tasks.infer_task(targets)


@pytest.mark.parametrize(
    ("targets", "task", "message"),
    [
        (torch.tensor([0.0, 0.5]), "classification", "target 0.5 of example 1 is no whole number, as classification"),
        (torch.tensor([0.0, float("nan")]), "classification", "target nan of example 1 is no whole number"),
        (torch.zeros(2, 2), "classification", "needs one whole number per example, the targets have shape"),
        (torch.tensor([[0, 1], [1, 2]]), "multilabel", "target 2 of example 1 is neither 0 nor 1"),
        (torch.tensor([0, 1]), "multilabel", "needs a row of 0 and 1 per example"),
        (torch.tensor([0, 1]), "sequence", "needs a row of whole numbers per example"),
    ],
)
def test_targets_that_are_not_the_task_s_are_refused(targets: torch.Tensor, task: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tasks.as_targets(targets, task)


@pytest.mark.parametrize(
    ("targets", "task", "outputs", "message"),
    [
        (torch.tensor([0.0, float("inf")]), "regression", 1, "target inf of example 1 is not finite"),
        (torch.tensor([0, 1]), "regression", 1, "regression needs one number or a row of numbers .* are int64"),
        (torch.zeros(2, 3), "regression", 2, r"2 outputs for targets of shape \(2, 3\)"),
        (torch.tensor([[0, -1], [0, 0]]), "sequence", 3, r"target -1 of example 0 is not in 0\.\.2, nor -100 for none"),
        (torch.tensor([[0, 1], [3, 0]]), "sequence", 3, r"target 3 of example 1 is not in 0\.\.2"),
    ],
)
def test_wrong_targets_are_named(targets: torch.Tensor, task: str, outputs: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tasks.check_targets(targets, task, outputs)
