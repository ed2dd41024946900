"""Maximum mean discrepancy between two batches of features.

A sum of five Gaussians exp(-d^2 / b_i), b_i = b 2^i / 4 for i = 0..4, with b the mean squared distance of different
points of the joint batch, held constant; the biased estimator. As the FedPHP authors' code has it, save that one
example has no distribution to speak of: its discrepancy is 0, where the kernel, as wide as the one distance there is,
would give a constant and a gradient that grows as the features come together.

Everything is computed in float64, whatever the model's precision. Squared distances come from dot products, which need
no memory for differences `[C, 2B, 2B, D]`; near the received model, where sessions begin, those of a pair are far
smaller than the squares they are left over from, and in float32 (let alone tf32) half the gradient would be rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from personafl.core.types import Batch


def mmd(a: Tensor, b: Tensor, batch: Batch) -> Tensor:
    """Each client's squared discrepancy between features `[C, B, D]` of the same real examples: `[C]`."""
    joint = torch.cat([a, b], 1).double()  # [C, 2B, D]
    real = torch.ones_like(joint[:, : a.shape[1], 0]) if batch.valid is None else batch.valid.double()
    both = torch.cat([real, real], 1)
    # Distances do not change with the origin, but cancel least around the middle.
    middle = (joint * both.unsqueeze(2)).sum(1, keepdim=True) / both.sum(1).clamp(min=1).view(-1, 1, 1)
    joint = joint - middle.detach()
    square = joint.square().sum(-1)
    distance = (square.unsqueeze(2) + square.unsqueeze(1) - 2 * joint @ joint.transpose(1, 2)).clamp(min=0)
    pairs = both.unsqueeze(2) * both.unsqueeze(1)  # [C, 2B, 2B]
    n = batch.count.clamp(min=1).double()
    width = ((distance * pairs).sum((1, 2)) / (4 * n * n - 2 * n)).detach()
    several = (batch.count > 1) & (width > torch.finfo(a.dtype).tiny)
    width = torch.where(several, width, 1)  # all points in one place: the discrepancy is 0, and so is its gradient
    power = torch.exp(-distance / (4 * width).view(-1, 1, 1))  # the widest Gaussian; each next one is the last squared
    kernel = power
    for _ in range(4):
        power = power.square()
        kernel = kernel + power
    sign = torch.cat([real, -real], 1)  # XX + YY - XY - YX
    found = (kernel * sign.unsqueeze(2) * sign.unsqueeze(1)).sum((1, 2)) / (n * n)
    return torch.where(several, found, 0).to(a.dtype)
