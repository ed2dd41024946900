"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from personafl.experiment import stopping
from personafl.experiment.stopping import StopAtOnce, Stopped, StopRequest


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """That of the tests stays as it is, and so do handlers: what a shell starts behind it ignores Ctrl-C."""
    monkeypatch.setattr(stopping, "_leave_terminal", lambda: None)
    before = {n: signal.signal(n, signal.SIG_DFL) for n in stopping.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_request_ends_a_run_at_once(number: int) -> None:
    with StopRequest(told=False) as stop:
        send(number)
        assert stop.signal == number
        with pytest.raises(Stopped) as stopped:
            send(number)
    assert stopped.value.code == 128 + number


@pytest.mark.parametrize(
    ("numbers", "last"),
    [
        ([signal.SIGHUP, signal.SIGHUP], signal.SIGHUP),  # from the system and from the shell
        ([signal.SIGHUP, signal.SIGTERM], signal.SIGTERM),  # from the terminal, and from a process that has several
        ([signal.SIGTERM, signal.SIGHUP], signal.SIGTERM),
    ],
)
def test_a_closed_terminal_is_never_the_second_request(numbers: list[int], last: int) -> None:
    with StopRequest(told=False) as stop:
        send(*numbers)
        assert stop.signal == last


def test_between_runs_a_terminal_is_closed_once() -> None:
    with StopAtOnce(told=False):
        with pytest.raises(Stopped) as stopped:
            send(signal.SIGHUP)
        send(signal.SIGHUP)  # while what is at work is asked to stop
    assert stopped.value.code == 129


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest(told=False) as stop:
        send(signal.SIGHUP)
        assert not stop.signal
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
