"""Ctrl-C, SIGTERM and a closed terminal during a run: it ends after the present stage, saved, and can be resumed."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

HANGUP = getattr(signal, "SIGHUP", None)  # sent when a terminal or an SSH session is closed; not known to Windows
SIGNALS = (signal.SIGINT, signal.SIGTERM, *([HANGUP] if HANGUP else []))


class Stopped(KeyboardInterrupt):
    """A run that was asked to stop, and has saved where it was."""

    def __init__(self, number: int, folder: Path | None = None) -> None:
        super().__init__("stopped" if folder is None else f"stopped; personafl.resume({str(folder)!r}) goes on")
        self.code = 128 + number


class StopRequest:
    """Whether the run that is inside was asked to stop. The second time it ends at once.

    A closed terminal never counts as the second time: the shell and the system may both send SIGHUP, and a process
    that runs several others asks them with SIGTERM as well. Signals that are ignored, as under `nohup`, stay ignored.
    """

    def __init__(self, *, told: bool) -> None:
        self.signal = 0
        self._told = told
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heard = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
            self._before = {n: signal.signal(n, self._asked) for n in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        around = getattr(self._before.get(self.signal), "__self__", None)
        if kind is None and isinstance(around, StopRequest):
            around.signal = self.signal  # it came when there was nothing left to stop here

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.signal and HANGUP not in (number, self.signal):
            raise Stopped(number)
        repeated, self.signal = bool(self.signal), self.signal if number == HANGUP and self.signal else number
        if self._told and not repeated:
            with suppress(OSError):  # the terminal may be gone
                print("Stopping after this round. Press Ctrl-C again to quit now.", file=sys.stderr, flush=True)
        if number == HANGUP:
            _leave_terminal()


class StopAtOnce(StopRequest):
    """The same around several runs: between them it ends at once."""

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if number == HANGUP:
            _leave_terminal()
            if self.signal:
                return
            self.signal = number
        raise Stopped(number)


def _leave_terminal() -> None:
    """Drop what is printed from now on to a terminal: it is closed or about to be, and writing to it would fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in (sys.__stdout__, sys.__stderr__):
            with suppress(OSError, ValueError):  # closed, or not a file
                if stream is not None and _is_device(stream.fileno()):
                    os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


def _is_device(file: int) -> bool:
    """Whether a file is a terminal, or was one: of a closed terminal `os.isatty` says that it is none."""
    return stat.S_ISCHR(os.fstat(file).st_mode)
