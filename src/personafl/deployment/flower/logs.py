"""Logs of a deployment: bounded in size, and in how fast they grow, whatever comes from the network."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path

LINE_CHARACTERS = 1000
BURST, PER_SECOND = 300, 1.0  # lines


class BoundedLog:
    """A log file of lines with the time, of which a bounded amount is kept.

    `burst` lines may come at once and `per_second` from then on. Of more, the log says how many were left out, so a
    flood of requests cannot push out what stood in the log before.
    """

    def __init__(
        self,
        file: Path,
        megabytes: int,
        burst: int = BURST,
        per_second: float = PER_SECOND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open a log of which at most `megabytes` MB are kept, in five files."""
        self._handler = RotatingFileHandler(
            file, maxBytes=megabytes * 200_000, backupCount=4, encoding="utf-8", errors="replace", delay=True
        )
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._log = logging.Logger(f"personafl.{file}", logging.INFO)
        self._log.addHandler(self._handler)
        self._burst, self._per_second, self._clock = burst, per_second, clock
        self._allowance, self._then = float(burst), clock()
        self._left_out = 0

    def write(self, line: str) -> None:
        """Write a line, or count it where too many came."""
        now = self._clock()
        self._allowance = min(self._burst, self._allowance + (now - self._then) * self._per_second)
        self._then = now
        if self._allowance < 1:
            self._left_out += 1
            return
        self._allowance -= 1
        self._say_what_is_left_out()
        self._log.info("%s", line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]} ...")

    def close(self) -> None:
        """Close the file."""
        self._say_what_is_left_out()
        self._handler.close()

    def _say_what_is_left_out(self) -> None:
        if self._left_out:
            self._log.info("(%d lines were left out here: too many came at once)", self._left_out)
            self._left_out = 0
