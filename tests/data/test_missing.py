"""Missing values of arrays."""

from __future__ import annotations

import numpy as np
import pytest

from personafl.data import custom
from personafl.data.missing import fill_missing

NAN = np.nan
PARTS = [("client a", np.array([[1.0, NAN], [3.0, 4.0]])), ("client b", np.array([[NAN, NAN]]))]


def test_the_mean_is_of_all_that_is_there() -> None:
    first, second = fill_missing("mine", PARTS, "mean")
    assert first.tolist() == [[1, 4], [3, 4]]
    assert second.tolist() == [[(1 + 3) / 2, 4]]


def test_zero_is_zero() -> None:
    assert [x.tolist() for x in fill_missing("mine", PARTS, "zero")] == [[[1, 0], [3, 4]], [[0, 0]]]


def test_what_is_whole_is_left_alone() -> None:
    whole = np.ones((2, 2))
    assert fill_missing("mine", [("", whole)], "mean")[0] is whole


def test_the_first_place_and_the_number_are_told() -> None:
    with pytest.raises(ValueError, match="mine: client a: example 0 contains NaN, the first of 3 missing values; data"):
        fill_missing("mine", PARTS, "refuse")
    with pytest.raises(ValueError, match="mine: example 1 contains NaN, the only missing value"):
        fill_missing("mine", [("", np.array([1.0, NAN]))], "refuse")


def test_a_feature_without_any_value_has_no_mean() -> None:
    bare = np.array([[[1.0, 2.0], [3.0, NAN]]])
    with pytest.raises(ValueError, match=r"mine: feature \[1\]\[1\] has no value in any example"):
        fill_missing("mine", [("", bare)], "mean")


def made_of_pairs() -> tuple[np.ndarray, np.ndarray]:
    return np.array([[1.0], [NAN], [5.0]]), np.array([0, 1, 1])


def test_all_kinds_of_own_data_can_be_filled() -> None:
    x, y = made_of_pairs()
    pairs = [list(zip(x, y, strict=True))]
    for made in (custom.convert((x, y), "mine", missing="mean"), custom.datasets(pairs, missing="mean")):
        assert made.x.tolist() == [[1], [3], [5]]
