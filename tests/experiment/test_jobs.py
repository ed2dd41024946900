"""Calls side by side in processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_between_calls_it_ends_at_once(number: signal.Signals) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts behind it has it ignored
    try:
        going = side_by_side([partial(told, 1), partial(told, 2)], 1)
        next(going)
        with pytest.raises(Stopped):
            os.kill(os.getpid(), number)
        going.close()  # type: ignore[attr-defined]
    finally:
        signal.signal(signal.SIGINT, before)


def variable(name: str) -> str | None:
    return os.environ.get(name)


def ignores_hangup() -> bool:
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_processes_have_the_environment_of_now_and_ignore_a_closed_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system sends SIGHUP to all processes of a terminal; those at work hear of it from this one alone."""
    names = ["PERSONAFL_TOLD", "PYTHONSAFEPATH", "PYTHONPATH"]
    monkeypatch.setenv("PERSONAFL_TOLD", "now")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    calls: list[Callable[[], object]] = [*(partial(variable, name) for name in names), ignores_hangup]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it may be ignored here, as under nohup
    try:
        found = dict(side_by_side(calls, 2))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    assert found == {0: "now", 1: None, 2: os.environ.get("PYTHONPATH"), 3: True}


@pytest.mark.slow
def test_two_threads_may_have_processes_at_once() -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda v: sorted(_values(v)), (10, 20)))
    assert found == [[10, 11, 12], [20, 21, 22]]


def _values(first: int) -> list[int]:
    return [value for _, (value, _) in side_by_side([partial(told, first + i) for i in range(3)], 2)]


def drawn() -> float:
    return float(torch.rand(()))


@pytest.mark.slow
def test_processes_draw_numbers_of_their_own() -> None:
    assert len(set(dict(side_by_side([drawn] * 4, 4)).values())) > 1


SCRIPT = """
import sys, time
sys.path.insert(0, {modules!r})
import mine
from personafl.experiment.jobs import side_by_side

if __name__ == "__main__":
    print("begins", flush=True)
    print(dict(side_by_side([mine.where] * 2, 2)) == {{0: mine.where(), 1: mine.where()}})
"""


def script(tmp_path: Path) -> tuple[Path, Path]:
    """One that has a module elsewhere, and a working directory with a file called like one of the standard library."""
    modules, here = tmp_path / "modules", tmp_path / "here"
    for folder in (modules, here):
        folder.mkdir()
    (modules / "mine.py").write_text("import personafl\ndef where(): return __file__, personafl.__file__\n")
    (here / "statistics.py").write_text("raise RuntimeError('not this one')\n")
    (tmp_path / "script.py").write_text(SCRIPT.format(modules=str(modules)))
    return tmp_path / "script.py", here


@pytest.mark.slow
def test_processes_find_modules_where_the_program_does(tmp_path: Path) -> None:
    path, here = script(tmp_path)
    found = subprocess.run([sys.executable, path], cwd=here, capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == "begins\nTrue\n"


@pytest.mark.slow
@pytest.mark.parametrize("wait", [0.05, 0.5, 1.5])
def test_a_program_that_is_stopped_while_processes_begin_ends_with_all_of_them(tmp_path: Path, wait: float) -> None:
    path, here = script(tmp_path)
    program = subprocess.Popen(
        [sys.executable, path],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None and program.stdout.readline() == "begins\n"
    time.sleep(wait)
    program.terminate()
    _, err = program.communicate(timeout=60)  # whoever of them were left would hold its pipes open
    assert "Stopped" in err or not err
