"""Ctrl-C and SIGTERM during a run: it ends behind the present stage, saved, and can go on from there."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A run that was asked to stop, and has saved where it was."""

    def __init__(self, number: int, folder: Path | None = None) -> None:
        super().__init__("stopped" if folder is None else f"stopped; personafl.resume({str(folder)!r}) goes on")
        self.code = 128 + number


class StopRequest:
    """Whether the run that is inside was asked to stop. The second time it ends at once."""

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
        if self.signal:
            raise Stopped(number)
        self.signal = number
        if self._told:
            print("stopping behind this round; once more ends it at once", file=sys.stderr, flush=True)


class StopAtOnce(StopRequest):
    """The same around several runs: between them it ends at once."""

    def _asked(self, number: int, frame: FrameType | None) -> None:
        raise Stopped(number)
