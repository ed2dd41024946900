"""Dealt equally."""

import numpy as np

from personafl.data.partition import partition
from tests.data.partition.common import assert_covers, balanced, request


def test_iid_deals_equally():
    labels = balanced(103)
    rows = partition("iid", request(labels, 4)).rows
    assert_covers(rows, 1030)
    assert sorted(map(len, rows)) == [257, 257, 258, 258]
    for own in rows:  # about 26 of each class, deviation below 5
        assert np.abs(np.bincount(labels[own], minlength=10) - 26).max() < 25
