"""Masks of a stack of clients: exact per-client top-k, prune, regrow."""

from __future__ import annotations

import torch
from torch import Tensor

from personafl.core import tree


def top_k(scores: Tensor, k: int | Tensor) -> Tensor:
    """Each client's `k` positions of largest score, exactly `k` of them: of equal scores the earlier position wins.

    Scores are `[C, ...]`; `k` is one number or `[C]`. A score of minus infinity, or none at all (NaN), is never taken.
    """
    flat = tree.flat(scores).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    k = torch.as_tensor(k, device=flat.device).expand(flat.shape[0])
    k = torch.minimum(k, (flat > -torch.inf).sum(1))
    same = int(k[0])
    chosen = _by_threshold(flat, same) if bool((k == same).all()) else by_rank(flat, k)
    return chosen.view(scores.shape)


def by_rank(flat: Tensor, k: Tensor) -> Tensor:
    """Sort each row and take its first `k` `[C]`: plain, and for rows that take different numbers."""
    order = flat.argsort(dim=1, descending=True, stable=True)
    chosen = torch.arange(flat.shape[1], device=flat.device) < k.unsqueeze(1)
    return torch.zeros_like(chosen).scatter_(1, order, chosen)


def _by_threshold(flat: Tensor, k: int) -> Tensor:
    """The same when all rows take the same number: select the k-th largest instead of sorting."""
    if k == 0:
        return torch.zeros_like(flat, dtype=torch.bool)
    least = flat.kthvalue(flat.shape[1] - k + 1, dim=1, keepdim=True).values
    above, ties = flat > least, flat == least
    places = k - above.sum(1, keepdim=True)
    return above | (ties & (ties.cumsum(1) <= places))


def active(mask: Tensor) -> Tensor:
    """Each client's number of active positions: `[C]`."""
    return tree.flat(mask).sum(1)


def prune(mask: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """Without each client's `k` active positions of smallest magnitude."""
    return top_k(weights.abs().masked_fill(~mask, -torch.inf), active(mask) - k)


SCOPES = ("inactive", "elsewhere", "all")
"""What regrowth may choose from: positions inactive now, positions inactive before pruning, any."""


def readjust(mask: Tensor, weights: Tensor, grads: Tensor, share: float, scope: str = "inactive") -> Tensor:
    """Prune a share of the active positions (rounded up), then grow as many where the gradient is largest.

    In scope `inactive` a position just pruned may come straight back; in `elsewhere` it may not, so no more are
    pruned than can grow; in `all` a hit on an active position is lost.
    """
    k = (share * active(mask).double() - 1e-9).ceil().long()  # 0.07 of 100 is 7, not 8
    if scope == "elsewhere":
        k = torch.minimum(k, active(~mask))
    left = prune(mask, weights, k)
    barred = {"inactive": left, "elsewhere": mask, "all": torch.zeros_like(mask)}[scope]
    return left | top_k(grads.abs().masked_fill(barred, -torch.inf), k)
