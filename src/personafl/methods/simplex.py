"""The smallest value of a quadratic form over the simplex."""

from __future__ import annotations

import torch
from torch import Tensor


def least(form: Tensor) -> Tensor:
    """The weights a >= 0, sum a = 1, that minimise a' P a for a positive semidefinite P: `[n]` float64.

    An active-set method (after Wolfe, "Finding the nearest point in a polytope", 1976): solve on a support, step back
    to the boundary where a weight would turn negative, take in the coordinate of steepest descent until there is
    none.
    """
    p = form.double().cpu()
    p = p / max(float(p.abs().max()), 1e-300)  # the minimiser does not change, the numerics do
    n, tolerance = len(p), 1e-12
    a = torch.zeros(n, dtype=torch.float64)
    a[int(p.diagonal().argmin())] = 1.0
    for _ in range(50 * n):
        slope = p @ a
        value = float(a @ slope)
        j = int(slope.argmin())
        if float(slope[j]) >= value - tolerance:
            break
        support = (a > 0) | (torch.arange(n) == j)
        while True:
            target = _on(p, support)
            if bool((target[support] > 0).all()):
                a = target
                break
            falling = support & (target <= 0)
            step = float((a[falling] / (a[falling] - target[falling]).clamp(min=1e-300)).min())
            a = a + min(step, 1.0) * (target - a)
            support = support & (a > 1e-15)
            a = torch.where(support, a, 0)
    return a / a.sum()


def _on(p: Tensor, support: Tensor) -> Tensor:
    """The minimiser on the plane sum a = 1 of the coordinates of a support, of either sign."""
    at = support.nonzero().flatten()
    size = len(at)
    system = torch.zeros(size + 1, size + 1, dtype=torch.float64)
    system[:size, :size] = 2 * p[at][:, at]
    system[:size, size] = system[size, :size] = 1.0
    right = torch.zeros(size + 1, dtype=torch.float64)
    right[size] = 1.0
    solved = torch.linalg.lstsq(system, right[:, None], driver="gelsd").solution[:size, 0]
    return torch.zeros(len(p), dtype=torch.float64).index_put((at,), solved)
