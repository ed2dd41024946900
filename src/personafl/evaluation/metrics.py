"""Losses and metrics of each task, and what a list of clients' numbers comes to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from personafl.core.criteria import IGNORE_INDEX, cross_entropy, error, mae, mse
from personafl.core.errors import UserError
from personafl.core.types import LOSSES, Better, Criterion, Metric, TaskName

__all__ = ["LOSSES", "METRICS", "accuracy", "cross_entropy", "default_loss", "default_metric", "over_clients"]

PERCENT = frozenset({"accuracy", "macro_f1"})
"""The metrics that are shown in per cent."""


def accuracy(out: Tensor, y: Tensor) -> Tensor:
    """1 where the largest logit is the label's and finite, else 0: `[M]`.

    So a model that diverged is wrong, and does not answer with the first class. Some logits may be -inf.
    """
    return ((out.argmax(-1) == y) & out.amax(-1).isfinite()).to(torch.float32)


# Metrics that are no mean over examples: what is kept of each example, and what that of a client's comes to. Where a
# client has nothing to be scored on (no positions, no positives), it has the best score.


def _positions(out: Tensor, y: Tensor) -> Tensor:
    """Positions that are right and positions that have a target: `[M, 2]`."""
    if out.dim() != 3 or out.shape[:2] != y.shape:
        raise ValueError(f"one prediction per position is needed, for targets of shape {tuple(y.shape)}")
    there = y != IGNORE_INDEX
    return torch.stack([((out.argmax(-1) == y) & there).sum(1), there.sum(1)], 1).to(torch.float32)


def _right_of_all(found: Tensor) -> Tensor:
    right, all_ = found.sum(0).unbind(-1)
    return torch.where(all_ > 0, right / all_.clamp(min=1), 1.0)


def _errors_and_targets(out: Tensor, y: Tensor) -> Tensor:
    """`[M, 2 T]`."""
    return torch.cat([error(out, y).reshape(len(y), -1), y.reshape(len(y), -1)], 1)


def _r2(found: Tensor) -> Tensor:
    """1 - sum e^2 / sum (y - mean y)^2, the mean over outputs; for constant targets 1 without error, else 0."""
    errors, targets = found.chunk(2, -1)
    missed, spread = errors.square().sum(0), (targets - targets.mean(0)).square().sum(0)
    constant = torch.where(missed == 0, 1.0, 0.0)
    return torch.where(spread > 0, 1 - missed / torch.where(spread > 0, spread, 1), constant).mean(-1)


def _hits(out: Tensor, y: Tensor) -> Tensor:
    """True positives, false positives and false negatives at probability 1/2: `[M, 3 T]`."""
    said, true = _alike(out, y) > 0, y > 0
    return torch.cat([said & true, said & ~true, ~said & true], 1).to(torch.float32)


def _macro_f1(found: Tensor) -> Tensor:
    """The mean over labels that occur or are predicted."""
    tp, fp, fn = found.sum(0).chunk(3, -1)
    counted = tp + fp + fn > 0
    f1 = torch.where(counted, 2 * tp / (2 * tp + fp + fn).clamp(min=1), 0)
    return torch.where(counted.any(-1), f1.sum(-1) / counted.sum(-1).clamp(min=1), 1.0)


def _scores_and_labels(out: Tensor, y: Tensor) -> Tensor:
    """`[M, 2 T]`."""
    return torch.cat([_alike(out, y), y.to(out.dtype)], 1)


def _mean_average_precision(found: Tensor) -> Tensor:
    """Per label the mean over positives of the precision among all scored as high or higher; the mean over labels."""
    scores, labels = found.chunk(2, -1)
    scores, order = scores.sort(0, descending=True)
    labels = labels.gather(0, order)
    place = torch.arange(len(scores), dtype=torch.int64, device=scores.device).view(-1, *[1] * (scores.dim() - 1))
    last = torch.ones_like(scores, dtype=torch.bool)  # of those with its score
    last[:-1] = scores[:-1] != scores[1:]
    end = torch.where(last, place, len(scores)).flip(0).cummin(0).values.flip(0)
    precision = labels.cumsum(0).gather(0, end) / (end + 1)
    positives = labels.sum(0)
    average = (precision * labels).sum(0) / positives.clamp(min=1)
    counted = positives > 0
    return torch.where(counted.any(-1), average.sum(-1) / counted.sum(-1).clamp(min=1), 1.0)


def _alike(out: Tensor, y: Tensor) -> Tensor:
    if out.shape != y.shape:
        raise ValueError(f"one logit per label is needed, for targets of shape {tuple(y.shape)}")
    return out


METRICS: Mapping[TaskName, Mapping[str, Metric]] = {
    "classification": {"accuracy": Metric(accuracy)},
    "regression": {
        "mse": Metric(mse, better="lower"),
        "mae": Metric(mae, better="lower"),
        "r2": Metric(_errors_and_targets, "r2", reduce=_r2),
    },
    "multilabel": {
        "macro_f1": Metric(_hits, "macro_f1", reduce=_macro_f1),
        "map": Metric(_scores_and_labels, "map", reduce=_mean_average_precision),
    },
    "sequence": {"accuracy": Metric(_positions, "accuracy", reduce=_right_of_all)},
}
"""The metrics of each task by name, the first its default."""


def default_loss(task: TaskName) -> str:
    return next(iter(LOSSES[task]))


def default_metric(task: TaskName) -> str:
    return next(iter(METRICS[task]))


def chosen(name: str | Metric | Criterion, known: Mapping[str, Any], key: str) -> Any:
    """A loss or metric of a task by name, `auto` for its default, or a function as it is."""
    if not isinstance(name, str):
        return name
    if name != "auto" and name not in known:
        raise UserError(f"{key}={name!r}: possible here are {', '.join(known)}, or a function; a path is for recipes")
    return next(iter(known.values())) if name == "auto" else known[name]


def names(known: Mapping[TaskName, Mapping[str, Any]]) -> list[str]:
    """All names of `LOSSES` or `METRICS`."""
    return list(dict.fromkeys(name for of_task in known.values() for name in of_task))


def over_clients(scores: Tensor, sizes: Tensor, better: Better = "higher") -> dict[str, float]:
    """What clients' numbers `[C]` come to: mean and population deviation, mean by size, the worst tenth's edge, worst.

    `p10` is the 10th percentile where higher is better and the 90th where lower is.
    """
    s, n = scores.double(), sizes.double()
    higher = better == "higher"
    return {
        "mean": float(s.mean()),
        "std": float(s.std(unbiased=False)),
        "weighted": float((s * n).sum() / n.sum()),
        "p10": float(s.quantile(0.1 if higher else 0.9)),
        "worst": float(s.min() if higher else s.max()),
    }
