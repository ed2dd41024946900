"""How often a run is saved."""

from __future__ import annotations

from typing import Any

import pytest

from personafl.core.errors import UserError
from personafl.experiment.checkpoint_interval import DEFAULT, Every, every


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (None, DEFAULT),
        (10, Every(rounds=10)),
        ("10", Every(rounds=10)),
        ("90s", Every(seconds=90.0)),
        ("1.5m", Every(seconds=90.0)),
        ("2h", Every(seconds=7200.0)),
    ],
)
def test_how_often_is_told_in_rounds_or_time(told: str | int | None, found: Every) -> None:
    assert every(told) == found


@pytest.mark.parametrize(
    "told", ["", "0", "-1", "x", "1d", "5 rounds", "nan", "1.5", True, "infs", "nanm", "99999999999"]
)
def test_how_often_is_refused_where_it_is_neither(told: Any) -> None:
    with pytest.raises(UserError, match=r"checkpoint_every=.*must be rounds, such as 10, or time"):
        every(told)


def test_by_default_a_minute_passes_or_fifty_times_what_saving_took() -> None:
    assert not DEFAULT.due(rounds=1000, seconds=59.0, cost=0.1)
    assert DEFAULT.due(rounds=1, seconds=60.0, cost=0.1)
    assert not DEFAULT.due(rounds=1, seconds=60.0, cost=2.0)
    assert DEFAULT.due(rounds=1, seconds=100.0, cost=2.0)
    assert Every(seconds=10.0).due(rounds=1, seconds=10.0, cost=9.0)  # who asks for it gets it
    assert [Every(rounds=3).due(n, 1e6, 0.0) for n in (2, 3)] == [False, True]
