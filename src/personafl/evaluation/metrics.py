"""Losses and scores of single examples, and what a list of client accuracies comes to."""

from __future__ import annotations

import torch
from torch import Tensor

from personafl.core.criteria import cross_entropy
from personafl.core.types import LOSSES, Criterion

__all__ = ["LOSSES", "METRICS", "accuracy", "cross_entropy", "over_clients"]


def accuracy(out: Tensor, y: Tensor) -> Tensor:
    """1 where the largest logit is the label's and finite, else 0: `[M]`.

    So a model that diverged is wrong, and does not answer with the first class. Some logits may be -inf.
    """
    return ((out.argmax(-1) == y) & out.amax(-1).isfinite()).to(torch.float32)


METRICS: dict[str, Criterion] = {"accuracy": accuracy}


def over_clients(scores: Tensor, sizes: Tensor) -> dict[str, float]:
    """What per-client scores `[C]` come to: mean and population deviation, mean by size, 10th percentile, worst."""
    s, n = scores.double(), sizes.double()
    return {
        "mean": float(s.mean()),
        "std": float(s.std(unbiased=False)),
        "weighted": float((s * n).sum() / n.sum()),
        "p10": float(s.quantile(0.1)),
        "worst": float(s.min()),
    }
