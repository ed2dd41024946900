"""Ranks that end together: each shows the others that it runs, and none outlives its launcher.

A thread of every rank counts up a number in a store that rank 0 holds, and looks at those of the others. Numbers are
counted however long a computation takes, and stand still where a process is stopped or its machine is gone. Who finds
one that stood still for too long says so and ends its process at once: the main thread may be waiting for the other
rank within a collective, which nothing interrupts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from personafl.core.errors import UserError

TIMEOUT = 60.0  # seconds
VARIABLE = "PERSONAFL_HEARTBEAT_TIMEOUT"
BEATS = 6  # within the timeout
LEFT = -(2**40)  # added to the number of a rank that leaves: it is negative from then on
PARENT = os.getppid()  # when this was imported; another one later means that it is gone. The package imports it first


def timeout() -> float:
    """How long a rank may give no sign of life, in seconds."""
    given = os.environ.get(VARIABLE, "")
    try:
        seconds = float(given or TIMEOUT)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise UserError(f"{VARIABLE}={given}: must be a number of seconds greater than 0")
    return seconds


def ended(rank: int, message: str) -> None:
    """Say why and end this process with exit code 1, whatever its other threads are at."""
    if rank:
        time.sleep(2)  # where the first rank found the same, torchrun ends this one before it says so again
    sys.stderr.write(f"personafl: {message}\n")  # at once, so that it does not mix with what other ranks write
    sys.stderr.flush()
    os._exit(1)


def launcher_gone() -> bool:
    """Whether `torchrun` started this process and is no more."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != PARENT


def die_with_launcher() -> None:
    """End this process if the `torchrun` that started it is gone; on Linux, have the system do so from now on."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)
    if launcher_gone():  # while this process imported what it needs
        ended(0, "the launcher of this rank is gone")


class Store(Protocol):
    """What is used of PyTorch's stores."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number that begins at 0; the sum."""


class Heartbeat:
    """The signs of life of one rank, and its look at those of the others, from `start` to `stop`."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: float,
        end: Callable[[int, str], None] = ended,
    ) -> None:
        self.store, self.rank, self.size, self.timeout, self.end = store, rank, size, timeout, end
        self._done = threading.Event()
        self._counts = dict.fromkeys(range(size), 0)
        self._reset()
        # Two: the one that asks the store waits for as long as rank 0 gives no answer.
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._beat, self._watch)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Leave: no other rank waits for signs of this one from now on."""
        self._done.set()
        for thread in self._threads:
            thread.join(self.timeout)

    def _reset(self) -> None:
        now = monotonic()
        self._answered = now  # when the store last answered
        self._changed = dict.fromkeys(range(self.size), now)  # when the number of each rank was last another one

    def _beat(self) -> None:
        try:
            while not self._done.wait(self.timeout / BEATS):
                self.exchange()
            self.store.add(str(self.rank), LEFT)
        except RuntimeError:  # rank 0 has left, or is gone, which the next collective tells
            self._done.set()

    def exchange(self) -> None:
        """Give a sign of life, and look at those of the others."""
        self.store.add(str(self.rank), 1)
        for rank, before in self._counts.items():
            self._counts[rank] = self.store.add(str(rank), 0)
            if self._counts[rank] != before:
                self._changed[rank] = monotonic()
        self._answered = monotonic()

    def _watch(self) -> None:
        before = monotonic()
        while not self._done.wait(self.timeout / BEATS):
            before, late = monotonic(), monotonic() - before
            if (why := self.trouble(late)) is not None:
                self.end(self.rank, f"rank {self.rank} of {self.size}: {why}")
                return

    def trouble(self, late: float) -> str | None:
        """Why this rank is to end, if it is, when it last looked so many seconds ago."""
        if late > self.timeout / 2:  # this process was stopped itself, and others perhaps with it
            self._reset()
        if launcher_gone():
            return "its launcher is gone"
        silent = self._silent()
        about = f"no sign of life for {self.timeout:g} seconds ({VARIABLE})"
        return None if silent is None else f"rank {silent} is silent: {about}"

    def _silent(self) -> int | None:
        if monotonic() - self._answered > self.timeout:
            return 0  # it holds the store
        late = (r for r, t in self._changed.items() if self._counts[r] >= 0 and self._answered - t > self.timeout)
        return next(late, None)
