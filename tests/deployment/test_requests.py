"""What a server may ask: all that one asks, and nothing that cannot be meant."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from personafl.core.errors import UserError
from personafl.core.types import Stage
from personafl.deployment import requests

SCHEDULE = [Stage(0, "masks"), Stage(1, "train"), Stage(2, "tune", who="all", up=False)]
WELCOME = Stage(3, "welcome", who="all", up=False)


def play(of: Stage, /, **changes: Any) -> dict[str, Any]:
    made = {"position": 1, "stage": dataclasses.asdict(of), "lr": 0.1, "down": 0, "judged": None}
    return made | changes


def work(**changes: Any) -> dict[str, Any]:
    made = {"number": 3, "acknowledged": -1, "begin": "fresh", "plays": [play(SCHEDULE[1])], "close": None}
    return made | changes


def check(told: dict[str, Any]) -> None:
    before = copy.deepcopy(told)
    requests.check_work(told, 2, SCHEDULE, "welcome")
    assert told == before


@pytest.mark.parametrize(
    "told",
    [
        work(),
        work(plays=[]),
        work(begin="newcomer", given=1, plays=[play(WELCOME), play(SCHEDULE[0], judged={"train_loss": True})]),
        work(begin="kept", acknowledged=1, evaluate={"down": 1, "train_loss": False}, close={"down": 0}),
        work(plays=[play(dataclasses.replace(SCHEDULE[2], number=1))]),  # a closing stage after training stopped early
        work(plays=[play(SCHEDULE[1], lr=0)]),
    ],
)
def test_what_servers_ask_is_taken(told: dict[str, Any]) -> None:
    check(told)
    assert requests.number(told) == 3


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no number": ({"number": None}, "number None: must be a whole number from 0 to 999999"),
    "a truth value": ({"number": True}, "number True"),
    "a negative number": ({"number": -1}, "number -1"),
    "a stage before the first": ({"acknowledged": -2}, "acknowledged -2"),
    "a file of seven digits": ({"acknowledged": 10**6}, "acknowledged 1000000"),
    "another beginning": ({"begin": "again"}, "begin 'again'"),
    "a list for a beginning": ({"begin": []}, r"begin \[\]"),
    "a newcomer with nothing": ({"begin": "newcomer"}, "given None"),
    "a blob that is not there": ({"begin": "newcomer", "given": 2}, "given 2: must be a whole number from 0 to 1"),
    "no list": ({"plays": {}}, r"plays \{\}: no list"),
    "no table": ({"plays": [5]}, "plays 5: no table"),
    "no position": ({"plays": [play(SCHEDULE[1], position="1")]}, "position '1'"),
    "no stage": ({"plays": [play(SCHEDULE[1], stage=None)]}, "stage None: no table"),
    "half a stage": ({"plays": [play(SCHEDULE[1], stage={"number": 1})]}, "not a stage"),
    "a number for a flag": ({"plays": [play(dataclasses.replace(SCHEDULE[1], up=1))]}, "not a stage"),  # type: ignore[arg-type]
    "a stage of no number": ({"plays": [play(dataclasses.replace(SCHEDULE[1], number=-1))]}, r"stage\.number -1"),
    "another phase": ({"plays": [play(Stage(1, "global"))]}, "none of this method"),
    "another direction": ({"plays": [play(Stage(1, "train", up=False))]}, "none of this method"),
    "no rate": ({"plays": [play(SCHEDULE[1], lr=float("nan"))]}, "lr nan: no learning rate"),
    "an endless rate": ({"plays": [play(SCHEDULE[1], lr=10**400)]}, "no learning rate"),
    "a rate in words": ({"plays": [play(SCHEDULE[1], lr="0.1")]}, "lr '0.1'"),
    "no download": ({"plays": [play(SCHEDULE[1], down=2)]}, "down 2"),
    "judged in words": ({"plays": [play(SCHEDULE[1], judged="yes")]}, "judged 'yes': no table"),
    "scored without a model": ({"evaluate": {}}, r"evaluate\.down None"),
    "ended in words": ({"close": "now"}, "close 'now': no table"),
}


@pytest.mark.parametrize("which", BAD)
def test_what_cannot_be_meant_is_refused(which: str) -> None:
    changes, words = BAD[which]
    with pytest.raises(UserError, match=words) as e:
        check(work(**changes))
    assert "\n" not in str(e.value) and len(str(e.value)) < 300
