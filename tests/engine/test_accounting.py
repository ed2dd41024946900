"""What a round adds up to."""

from __future__ import annotations

import math
import sys

import pytest

from personafl.engine.accounting import finite_mean


@pytest.mark.parametrize(
    ("losses", "mean"),
    [([1.0, 2.0], 1.5), ([1.0, math.nan, 3.0, math.inf], 2.0), ([], None), ([math.nan], None), ([1e308] * 4, 1e308)],
)
def test_the_mean_loss_is_over_clients_whose_own_is_finite(losses: list[float], mean: float | None) -> None:
    assert finite_mean(losses) == mean


def test_the_largest_numbers_have_a_mean_or_none() -> None:
    assert finite_mean([sys.float_info.max] * 3) in (None, sys.float_info.max)
