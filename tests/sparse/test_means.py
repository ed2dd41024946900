"""Means over clients that hold different positions."""

from __future__ import annotations

import torch

from personafl.core.types import Masked, Params
from personafl.sparse import means

HELD = torch.tensor([[True, True, False, False], [True, False, True, False]])
VALUES = torch.tensor([[1.0, 2.0, 0.0, 0.0], [5.0, 0.0, 3.0, 0.0]])


def summed(weights: list[float], rows: list[int]) -> Params:
    w, upload = torch.tensor(weights, dtype=torch.float64)[rows], {"w": Masked(VALUES[rows], HELD[rows])}
    terms = means.covered(upload, w) | {"w": upload["w"].values * w.unsqueeze(1)}
    return {n: t.sum(0, dtype=torch.float64) for n, t in terms.items()}


def test_a_position_is_averaged_over_its_holders_by_weight() -> None:
    mean, held = means.mean("w", summed([1.0, 3.0], [0, 1]), VALUES[0])
    assert mean.tolist() == [(1 * 1 + 3 * 5) / 4, 2.0, 3.0, 0.0]
    assert held.tolist() == [True, True, True, False]


def test_the_mean_has_the_type_of_what_it_replaces_and_is_always_a_number() -> None:
    mean, _ = means.mean("w", summed([1.0, 3.0], [0, 1]), VALUES[0])
    assert mean.dtype == torch.float32
    assert mean.isfinite().all()


def test_a_holder_of_no_weight_is_no_holder() -> None:
    mean, held = means.mean("w", summed([0.0, 3.0], [0, 1]), VALUES[0])
    assert held.tolist() == [True, False, True, False]
    assert mean[0] == 5.0


def test_sums_of_chunks_are_the_sums_of_all() -> None:
    whole, parts = summed([1.0, 3.0], [0, 1]), [summed([1.0, 3.0], [i]) for i in (0, 1)]
    for n in whole:
        torch.testing.assert_close(whole[n], parts[0][n] + parts[1][n])


def test_dense_entries_are_covered_by_all_and_not_counted() -> None:
    assert means.covered({"bias": VALUES}, torch.ones(2)) == {}
