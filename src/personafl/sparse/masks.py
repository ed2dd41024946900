"""Masks of a stack of clients: exact per-client top-k, prune, regrow."""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(scores: Tensor, k: int | Tensor) -> Tensor:
    """Each client's `k` positions of largest score, exactly `k` of them: of equal scores the earlier position wins.

    Scores are `[C, ...]`; `k` is one number or `[C]`. A score of minus infinity is never taken.
    """
    flat = scores.flatten(1)
    k = torch.as_tensor(k, device=flat.device).expand(flat.shape[0])
    k = torch.minimum(k, (flat > -torch.inf).sum(1))
    order = flat.argsort(dim=1, descending=True, stable=True)
    chosen = torch.arange(flat.shape[1], device=flat.device) < k.unsqueeze(1)  # by rank
    return torch.zeros_like(chosen).scatter_(1, order, chosen).view(scores.shape)


def active(mask: Tensor) -> Tensor:
    """Each client's number of active positions: `[C]`."""
    return mask.flatten(1).sum(1)


def prune(mask: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """Without each client's `k` active positions of smallest magnitude."""
    return top_k(weights.abs().masked_fill(~mask, -torch.inf), active(mask) - k)


def regrow(mask: Tensor, grads: Tensor, k: Tensor, *, among_active: bool = False) -> Tensor:
    """With the `k` positions of largest gradient, among the inactive ones or (changing nothing where it hits) among all."""
    scores = grads.abs()
    if not among_active:
        scores = scores.masked_fill(mask, -torch.inf)
    return mask | top_k(scores, k)


def readjust(mask: Tensor, weights: Tensor, grads: Tensor, share: float, *, among_active: bool = False) -> Tensor:
    """Prune a share of the active positions (rounded up) and regrow as many; a pruned one may come straight back."""
    k = (share * active(mask).double()).ceil().long()
    return regrow(prune(mask, weights, k), grads, k, among_active=among_active)
