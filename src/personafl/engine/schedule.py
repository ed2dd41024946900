"""Schedules: what is evaluated when, schedules that end early, and what of one a client has missed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from personafl.core.types import Stage


def ended_after(schedule: Sequence[Stage], rounds: int, count: int) -> list[Stage]:
    """A schedule of so many rounds without those behind `count`; closing stages (fine-tuning) follow at once."""
    closing = [s for s in schedule if s.number >= rounds]
    moved = [dataclasses.replace(s, number=s.number - rounds + count) for s in closing]
    return [s for s in schedule if s.number < count] + moved


def missed(schedule: Sequence[Stage], last: int, now: int) -> list[int]:
    """The stages of all clients that one has not played whose last stage is known, before this one."""
    return [at for at in range(last + 1, now) if schedule[at].who == "all"]


def is_evaluated(schedule: Sequence[Stage], place: int, every: int) -> bool:
    """Return whether the stage at this place is followed by an evaluation, where every `every`-th round is."""
    stage = schedule[place]
    return (stage.evaluated and (stage.number + 1) % every == 0) or place + 1 == len(schedule)


def cohort_is_evaluated(schedule: Sequence[Stage], place: int, every: int) -> bool:
    """Return whether the cohort of the stage at this place is the one of the next evaluation after local training."""
    while not is_evaluated(schedule, place, every) and schedule[place + 1].who == "nobody":
        place += 1
    return is_evaluated(schedule, place, every)


def last_evaluated_cohort(schedule: Sequence[Stage], played: int) -> Stage:
    """Return the last stage before this place whose cohort can be evaluated."""
    return next(s for s in reversed(schedule[:played]) if s.who != "nobody" and s.evaluated)
