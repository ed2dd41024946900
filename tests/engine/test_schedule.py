"""Schedules that end early, and what of one a client has missed."""

from __future__ import annotations

from personafl.core.types import Stage
from personafl.engine.schedule import ended_after, missed

FOUR = [Stage(number=i) for i in range(4)]
CLOSING = Stage(number=4, phase="fine-tune", who="all", up=False)


def test_closing_stages_follow_the_last_round_at_once() -> None:
    found = ended_after([*FOUR, CLOSING], 4, 2)
    assert [(s.number, s.phase) for s in found] == [(0, "train"), (1, "train"), (2, "fine-tune")]
    assert ended_after([*FOUR, CLOSING], 4, 4) == [*FOUR, CLOSING]


def test_ending_twice_is_ending_once() -> None:
    once = ended_after([*FOUR, CLOSING], 4, 2)
    assert ended_after(once, 2, 2) == once


def test_only_stages_of_all_clients_are_missed() -> None:
    every = Stage(number=1, phase="hand-over", who="all", up=False)
    nobody = Stage(number=2, who="nobody")
    schedule = [FOUR[0], every, FOUR[1], nobody, every, FOUR[3], CLOSING]
    assert missed(schedule, -1, 7) == [1, 4, 6]
    assert missed(schedule, 1, 6) == [4]  # neither the one it has played nor the present one
    assert missed(schedule, 5, 6) == [] and missed(schedule, 3, 3) == []
