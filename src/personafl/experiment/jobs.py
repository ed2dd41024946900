"""Calls that go side by side, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from personafl.core.errors import UserError

T = TypeVar("T")


def side_by_side(calls: Sequence[Callable[[], T]], jobs: int) -> Iterator[tuple[int, T]]:
    """What each call gives, with its place, in the order they end; so many at a time, with one job in this process.

    Where one fails, those that wait are not begun.
    """
    if jobs == 1:
        for i, call in enumerate(calls):
            yield i, call()
        return
    for call in calls:
        try:
            pickle.dumps(call)
        except Exception as e:
            raise UserError(f"jobs {jobs}: other processes cannot be given these parts ({e}); use one job") from None
    with ProcessPoolExecutor(min(jobs, len(calls)), multiprocessing.get_context("spawn"), _begun) as pool:
        waiting = {pool.submit(call): i for i, call in enumerate(calls)}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _begun() -> None:
    """A process ends by Ctrl-C as others do, also where the one that began it ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
