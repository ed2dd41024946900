"""Calls side by side in processes."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from personafl.core.errors import UserError
from personafl.experiment.jobs import side_by_side
from personafl.experiment.stopping import Stopped, StopRequest


def told(value: int) -> tuple[int, int]:
    return value, os.getpid()


def fails(path: Path) -> None:
    raise UserError(f"{path}: no")


def test_one_job_runs_here_in_order() -> None:
    assert list(side_by_side([partial(told, v) for v in (3, 1, 2)], 1)) == [
        (i, (v, os.getpid())) for i, v in enumerate((3, 1, 2))
    ]


@pytest.mark.slow
def test_several_run_elsewhere_and_are_told_apart_by_their_place() -> None:
    found = dict(side_by_side([partial(told, v) for v in (3, 1, 2)], 2))
    assert {i: v for i, (v, _) in found.items()} == {0: 3, 1: 1, 2: 2}
    assert os.getpid() not in {pid for _, pid in found.values()}


def test_what_is_wrong_in_one_is_said_here(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gone: no"):
        list(side_by_side([partial(fails, tmp_path / "gone")] * 3, 2))


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_process_that_is_killed_is_told_in_a_line() -> None:
    with pytest.raises(UserError, match="a process ended before its work did"):
        list(side_by_side([killed, partial(told, 1)], 2))


def test_a_request_to_stop_that_a_call_could_not_heed_ends_it_behind_the_call() -> None:
    begun: list[int] = []

    def call(value: int) -> int:
        begun.append(value)
        with StopRequest(told=False):  # as a run in its last stage
            os.kill(os.getpid(), signal.SIGTERM)
        return value

    with pytest.raises(Stopped) as stopped:
        list(side_by_side([partial(call, 1), partial(call, 2)], 1))
    assert (begun, stopped.value.code) == ([1], 143)


def test_between_calls_it_ends_at_once() -> None:
    going = side_by_side([partial(told, 1), partial(told, 2)], 1)
    next(going)
    with pytest.raises(Stopped):
        os.kill(os.getpid(), signal.SIGINT)
    going.close()  # type: ignore[attr-defined]


def variable(name: str) -> str | None:
    return os.environ.get(name)


def test_processes_have_the_environment_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they are forked from is kept, and was there before the variable."""
    assert dict(side_by_side([partial(variable, "PERSONAFL_TOLD")] * 2, 2)) == {0: None, 1: None}
    monkeypatch.setenv("PERSONAFL_TOLD", "now")
    assert dict(side_by_side([partial(variable, "PERSONAFL_TOLD")] * 2, 2)) == {0: "now", 1: "now"}
