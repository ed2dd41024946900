"""The least value of a quadratic form over the simplex, against all supports."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from personafl.methods.simplex import least


def brute(p: Tensor) -> float:
    """The least value over every face of the simplex whose stationary point lies on it."""
    n, best = len(p), float(p.diagonal().min())
    for size in range(2, n + 1):
        for face in combinations(range(n), size):
            q = p[list(face)][:, list(face)]
            if torch.linalg.matrix_rank(q) < size:
                continue  # flat: as small a value lies on its boundary
            a = torch.linalg.solve(q, torch.ones(size, dtype=torch.float64))
            a = a / a.sum()
            if bool((a >= 0).all()):
                best = min(best, float(a @ q @ a))
    return best


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rank", [1, 2, 8])
def test_no_support_does_better(n: int, rank: int) -> None:
    draw = torch.Generator().manual_seed(10 * n + rank)
    for _ in range(8):
        root = torch.randn(n, rank, generator=draw, dtype=torch.float64)
        p = root @ root.T + (0.0 if rank < n else 1e-3) * torch.eye(n, dtype=torch.float64)
        a = least(p)
        assert a.min() >= 0
        assert float(a.sum()) == pytest.approx(1.0)
        value = float(a @ p @ a)
        if rank >= n:
            assert value == pytest.approx(brute(p), rel=1e-8, abs=1e-12)
        # Stationary on the simplex: no corner lies downhill.
        assert float((p @ a).min()) >= value - 1e-9 * max(1.0, float(p.abs().max()))


def test_a_diagonal_form_is_shared_inversely() -> None:
    """min sum d_i a_i^2: a_i proportional to 1 / d_i, here 6 : 3 : 2."""
    found = least(torch.diag(torch.tensor([1.0, 2.0, 3.0])))
    assert found.tolist() == pytest.approx([6 / 11, 3 / 11, 2 / 11])


def test_two_by_two_by_hand() -> None:
    """a = (q - r) / (p + q - 2 r) of [[p, r], [r, q]] where that lies between 0 and 1, else a corner."""
    assert least(torch.tensor([[2.0, 0.5], [0.5, 1.0]])).tolist() == pytest.approx([0.25, 0.75])
    assert least(torch.tensor([[5.0, 2.0], [2.0, 1.0]])).tolist() == pytest.approx([0.0, 1.0])


def test_a_form_of_nothing_is_content_with_any_weights() -> None:
    a = least(torch.zeros(4, 4))
    assert a.min() >= 0
    assert float(a.sum()) == pytest.approx(1.0)


def test_scale_does_not_matter() -> None:
    draw = torch.Generator().manual_seed(0)
    root = torch.randn(5, 5, generator=draw, dtype=torch.float64)
    p = root @ root.T
    for scale in (1e-12, 1e12):
        torch.testing.assert_close(least(scale * p), least(p), rtol=1e-6, atol=1e-8)
