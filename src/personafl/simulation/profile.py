"""Where the time of a run goes.

At any moment a run is at work on one part, so the parts add up to its time; `other` is what no part claims. Where
stacks of clients run side by side in threads, the time that passes is shared out as the threads spent theirs.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from personafl.core.table import Table
from personafl.core.types import Row

PARTS = {
    "training": "local steps: forward, backward, update",
    "data": "who has which examples, batch orders, minibatches",
    "evaluation": "scores of personal and global models, also under shift",
    "aggregation": "the server's sums and its new state",
    "store": "clients' kept rows, read and written",
    "wire": "what travels, and its size in bytes",
    "waiting": "for other ranks",
    "setup": "model, data on the device, first state",
    "files": "checkpoint, tables and reports",
    "other": "the rest",
}

_NOTHING = nullcontext()


class NoClock:
    """Nobody asked."""

    def __call__(self, part: str) -> AbstractContextManager[None]:
        """Time spent inside belongs to this part, unless a part inside claims it."""
        return _NOTHING

    def lap(self, row: Row | None = None) -> None:
        """A round ends here, the one this row of metrics is about; without one, it begins."""

    def report(self) -> Row:
        """Seconds of each part, in all and per round."""
        return {}


class Clock(NoClock):
    """Seconds spent on each part since the clock was made.

    On a GPU it waits at every change of part for the work given out before, so a run with a clock is a little slower.
    """

    def __reduce__(self) -> tuple[type[NoClock], tuple[()]]:
        """A copy of what is timed is not timed."""
        return NoClock, ()

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self._device = torch.device(device)
        self._lock = threading.Lock()
        self._main = threading.get_ident()
        self._now, self._since = "other", time.perf_counter()
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._beside: dict[str, float] = {}  # by threads, since the main one last looked
        self._thread = threading.local()
        self._mark = dict(self._parts)
        self._rounds: list[Row] = []

    def __call__(self, part: str) -> AbstractContextManager[None]:
        return self._inside(part) if threading.get_ident() == self._main else self._in_thread(part)

    @contextmanager
    def _inside(self, part: str) -> Iterator[None]:
        before = self._switch(part)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, part: str) -> str:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        passed, before = now - self._since, self._now
        with self._lock:
            beside, self._beside = self._beside, {}
        whole = sum(beside.values())
        for name, seconds in beside.items() if whole else ((before, 1.0),):
            self._parts[name] += passed * seconds / (whole or 1.0)
        self._now, self._since = part, now
        return before

    @contextmanager
    def _in_thread(self, part: str) -> Iterator[None]:
        stack: list[tuple[str, float]] = self._thread.__dict__.setdefault("stack", [])
        self._pause(stack)
        stack.append((part, time.perf_counter()))
        try:
            yield
        finally:
            self._pause(stack)
            stack.pop()
            if stack:
                stack[-1] = (stack[-1][0], time.perf_counter())

    def _pause(self, stack: list[tuple[str, float]]) -> None:
        """Put down what the thread's present part took."""
        if stack:
            name, since = stack[-1]
            with self._lock:
                self._beside[name] = self._beside.get(name, 0.0) + time.perf_counter() - since

    def lap(self, row: Row | None = None) -> None:
        self._switch(self._now)
        spent = {n: s - self._mark[n] for n, s in self._parts.items()}
        self._mark = dict(self._parts)
        if row is not None:
            about = {"round": row["round"], "phase": row["phase"], "seconds": sum(spent.values())}
            self._rounds.append(about | {"parts": spent})

    def report(self) -> Row:
        self._switch(self._now)
        return {"seconds": sum(self._parts.values()), "parts": dict(self._parts), "rounds": list(self._rounds)}


def merged(reports: Sequence[Row]) -> Row:
    """The report of a run from those of its ranks: their means, and each rank's own parts."""
    if len(reports) == 1:
        return reports[0]
    laps = zip(*(r["rounds"] for r in reports), strict=True)
    return {
        **_mean(reports),
        "rounds": [{"round": lap[0]["round"], "phase": lap[0]["phase"], **_mean(lap)} for lap in laps],
        "ranks": [r["parts"] for r in reports],
    }


def _mean(reports: Sequence[Row]) -> Row:
    parts = {n: sum(r["parts"][n] for r in reports) / len(reports) for n in reports[0]["parts"]}
    return {"seconds": sum(parts.values()), "parts": parts}


def table(reports: Mapping[str, Row]) -> Table:
    """A row for each report, shares in per cent; parts that are small everywhere are counted as `other`."""
    shown = [n for n in PARTS if n == "other" or any(r["parts"][n] >= 0.005 * r["seconds"] for r in reports.values())]
    rows = []
    for name, r in reports.items():
        shares = {n: 100 * r["parts"][n] / r["seconds"] for n in shown}
        shares["other"] = 100 - sum(s for n, s in shares.items() if n != "other")
        rows.append([name, f"{r['seconds']:.2f}", _round(r["rounds"]), *(f"{s:.0f} %" for s in shares.values())])
    note = "Round: the median of those with training, without evaluation. Shares are of all seconds."
    return Table(["Time", "Seconds", "Round", *shown], rows, "lr", [note])


def _round(rounds: Sequence[Row]) -> str:
    spent = [sum(s for n, s in r["parts"].items() if n != "evaluation") for r in rounds if r["parts"]["training"]]
    return f"{1000 * statistics.median(spent):.1f} ms" if spent else "–"
