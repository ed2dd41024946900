"""What a server asks of a client, checked before anything is made of it: `UserError` where it cannot be meant."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from personafl.core.errors import UserError
from personafl.core.types import Stage
from personafl.deployment.federation_spec import MOST_CLIENTS

MOST_STAGES = 10**6  # a state's file has its stage in six digits


def number(told: Mapping[str, Any]) -> int:
    """The number of the client that is asked."""
    return _whole("number", told.get("number"), 0, MOST_CLIENTS)


def check_work(told: Mapping[str, Any], blobs: int, schedule: Sequence[Stage], welcome: str) -> None:
    """Refuse to play what no stage of this schedule and no newcomer's session is; `blobs` is how many there are."""
    number(told)
    _whole("acknowledged", told.get("acknowledged"), -1, MOST_STAGES)
    if (begin := told.get("begin")) not in ("fresh", "newcomer", "kept"):
        raise UserError(f"begin {begin!r:.40}: neither fresh nor newcomer nor kept")
    if begin == "newcomer":
        _whole("given", told.get("given"), 0, blobs)
    plays = told.get("plays", [])
    if not isinstance(plays, list):
        raise UserError(f"plays {plays!r:.40}: no list")
    possible = {_kind(s) for s in schedule} | {(welcome, "all", True, False)}
    for play in plays:
        _check_play(play, blobs, possible)
    for name in ("evaluate", "close"):
        if (asked := told.get(name)) is not None:
            _whole(f"{name}.down", _table(name, asked).get("down"), 0, blobs)


def _check_play(play: Any, blobs: int, possible: set[tuple[str, str, bool, bool]]) -> None:
    _whole("position", _table("plays", play).get("position"), 0, MOST_STAGES)
    stage = _stage(play.get("stage"))
    if _kind(stage) not in possible:
        raise UserError(f"stage {stage!r:.200}: none of this method")
    lr = play.get("lr")
    if not isinstance(lr, int | float) or isinstance(lr, bool) or not 0 <= lr <= 1e300 or not math.isfinite(lr):
        raise UserError(f"lr {lr!r:.40}: no learning rate")
    if stage.down:
        _whole("down", play.get("down"), 0, blobs)
    if play.get("judged") is not None:
        _table("judged", play["judged"])


def _kind(stage: Stage) -> tuple[str, str, bool, bool]:
    """What hooks go by; its number may be another where training has stopped early."""
    return stage.phase, stage.who, stage.down, stage.up


def _stage(told: Any) -> Stage:
    table = _table("stage", told)
    names = {f.name: type(f.default) for f in dataclasses.fields(Stage) if f.name != "number"}
    if table.keys() != {"number", *names} or any(type(table[n]) is not kind for n, kind in names.items()):
        raise UserError(f"stage {told!r:.200}: not a stage")
    _whole("stage.number", table["number"], 0, MOST_STAGES)
    return Stage(**table)


def _table(name: str, told: Any) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise UserError(f"{name} {told!r:.40}: no table")
    return told


def _whole(name: str, value: Any, least: int, end: int) -> int:
    if type(value) is not int or not least <= value < end:
        raise UserError(f"{name} {value!r:.40}: must be a whole number from {least} to {end - 1}")
    return value
