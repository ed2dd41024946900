"""Schedules that end early, and what of one a client has missed."""

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
