"""Means over clients that hold different positions of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.types import Params, Payload


def covered(upload: Payload, weights: Tensor) -> Params:
    """Per-client terms of how much weight stands behind each position of an upload's masked tensors."""
    return {f"covered/{n}": m * tree.column(weights, m) for n, m in tree.masks(upload).items()}


def mean(name: str, sums: Params, like: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over those who hold a position (DM-PFL's Eq. 5), and which positions anybody holds."""
    total = sums[f"covered/{name}"]
    return (sums[name] / total.clamp(min=torch.finfo(total.dtype).tiny)).to(like.dtype), total > 0
