"""Lists of row numbers in two tensors."""

import numpy as np
import pytest
import torch

from personafl.data.ragged import Ragged


def test_rows_behave_as_a_list_of_arrays():
    parts = [np.array([5, 2]), np.array([], int), np.array([9, 1, 4])]
    rows = Ragged.of(parts)
    assert len(rows) == 3 and [r.tolist() for r in rows] == [p.tolist() for p in parts]
    assert rows[-1].tolist() == [9, 1, 4] and rows.sizes.tolist() == [2, 0, 3]
    assert rows.holders().tolist() == [0, 0, 2, 2, 2]
    assert [r.tolist() for r in rows.sorted()] == [[2, 5], [], [1, 4, 9]]
    assert [r.tolist() for r in rows.select(np.array([2, 0, 1]))] == [[9, 1, 4], [5, 2], []]
    assert [r.tolist() for r in rows[1:]] == [[], [9, 1, 4]]
    with pytest.raises(IndexError):
        rows[3]


def test_ragged_rows_may_be_empty_in_between():
    ragged = Ragged.of([np.array([7, 8]), np.array([], np.int64), np.array([9])])
    assert ragged.lengths(torch.tensor([0, 1, 2])).tolist() == [2, 0, 1]
    rows, count = ragged.padded(torch.tensor([0, 1, 2]))
    assert rows.tolist() == [[7, 8], [0, 0], [9, 0]]
    assert count.tolist() == [2, 0, 1]
