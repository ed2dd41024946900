"""The four tasks: what their targets look like, and how many numbers a model gives for an example.

| task | targets | outputs of a model |
|---|---|---|
| `classification` | whole numbers `[N]` in 0..K-1 | `[M, K]` |
| `regression` | floats `[N]` or `[N, T]` | `[M, 1]` or `[M]`; `[M, T]` |
| `multilabel` | 0 or 1 `[N, T]`, bytes or truth values | `[M, T]` |
| `sequence` | whole numbers `[N, L]` in 0..K-1, one per position; -100 where there is none | `[M, L, K]` |

Losses and metrics of each are in `evaluation/metrics.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from personafl.core.criteria import IGNORE_INDEX
from personafl.core.errors import UserError
from personafl.core.types import TaskName

MOST_CLASSES = 10**6  # a label past this is an identifier or a number, not one of so many classes

_WANTED: dict[TaskName, str] = {
    "classification": "one whole number per example",
    "regression": "one number or a row of numbers per example",
    "multilabel": "a row of 0 and 1 per example",
    "sequence": "a row of whole numbers per example",
}

Place = Callable[[int], str]
_PLACE: Place = "example {}".format


def infer_task(y: Tensor) -> TaskName:
    """The task of targets, by their type and shape."""
    if y.is_floating_point() and y.dim() in (1, 2):
        return "regression"
    if y.dim() == 1:
        return "classification"
    if y.dim() == 2 and (y.dtype == torch.bool or (y.dtype == torch.uint8 and bool((y <= 1).all()))):
        return "multilabel"
    if y.dim() == 2 and y.shape[1] > 1:
        return "sequence"
    hint = "; for one class per example give them shape (N,)" if y.dim() == 2 else ""
    raise UserError(
        f"targets of shape {tuple(y.shape)} and type {_type(y)} are of no task: possible are whole numbers (N,) or "
        f"(N, positions), floats (N,) or (N, outputs), truth values (N, labels){hint}"
    )


def as_targets(y: Tensor, task: TaskName) -> Tensor:
    """Targets in the type of a task: float32, uint8 for multilabel, else int64; refused if that would change them."""
    _require_shape(y, task)
    if task == "regression":
        return y.float()
    if task == "multilabel":
        _refuse((y != 0) & (y != 1), y, "target {} of {} is neither 0 nor 1")
        return y.to(torch.uint8)
    if y.is_floating_point():
        _refuse(y != y.round(), y, "target {} of {} is no whole number, as " + task + " needs")
    return y.long()


def count_outputs(y: Tensor, task: TaskName) -> int:
    """How many classes targets `as_targets` gave have, or how many numbers each of them is."""
    if task in ("classification", "sequence"):
        return count_classes(y)
    return 1 if y.dim() == 1 else y.shape[1]


def count_classes(y: Tensor) -> int:
    """How many classes there are, or tokens, if the highest is the last."""
    top = int(y.max()) if y.numel() else 0
    if top >= MOST_CLASSES:
        raise UserError(
            f"{top} is no class: they are numbered from 0, and there may be {MOST_CLASSES:,}; number them anew, or "
            "training.task=regression takes labels for numbers"
        )
    return max(top + 1, 1)


def check_targets(y: Tensor, task: TaskName, outputs: int, place: Place = _PLACE) -> None:
    """Refuse targets that are not a task's, or are more than its `outputs`; `place` names an example in messages."""
    kind = {"regression": torch.float32, "multilabel": torch.uint8}.get(task, torch.int64)
    if y.dtype != kind and not (task == "regression" and y.dtype == torch.float64):
        raise UserError(f"{task} needs {_WANTED[task]}, the targets are {_type(y)}")
    _require_shape(y, task)
    if task == "regression":
        _refuse(~torch.isfinite(y), y, "target {} of {} is not finite", place)
    elif task == "multilabel":
        _refuse(y > 1, y, "target {} of {} is neither 0 nor 1", place)
    else:
        if outputs > MOST_CLASSES:
            largest = place(int((y == y.max()).nonzero()[0, 0]))
            raise UserError(
                f"{outputs} classes, at most {MOST_CLASSES} are possible (the largest target is {int(y.max())}, of "
                f"{largest}); number them from 0, or give labels as text"
            )
        what, rest = ("label", "") if task == "classification" else ("target", f", nor {IGNORE_INDEX} for none")
        wrong = (y < 0) | (y >= outputs)
        wrong = wrong if task == "classification" else wrong & (y != IGNORE_INDEX)
        _refuse(wrong, y, what + f" {{}} of {{}} is not in 0..{outputs - 1}{rest}", place)
    if task in ("regression", "multilabel") and count_outputs(y, task) != outputs:
        raise UserError(f"{outputs} outputs for targets of shape {tuple(y.shape)}")


def _require_shape(y: Tensor, task: TaskName) -> None:
    if y.dim() not in {"classification": (1,), "regression": (1, 2)}.get(task, (2,)):
        raise UserError(f"{task} needs {_WANTED[task]}, the targets have shape {tuple(y.shape)}")


def _refuse(wrong: Tensor, y: Tensor, message: str, place: Place = _PLACE) -> None:
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise UserError(message.format(y[at].item(), place(at[0])))


def _type(y: Tensor) -> str:
    return str(y.dtype).removeprefix("torch.")
