"""Calls that go side by side, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

import torch

from personafl.core.errors import UserError
from personafl.experiment.stopping import HANGUP, StopAtOnce, Stopped

T = TypeVar("T")


def checked(jobs: Any) -> int:
    if type(jobs) is not int or jobs < 1:
        raise UserError(f"jobs {jobs}: must be a whole number, at least 1")
    return jobs


def share_threads(conditions: dict[str, Any], jobs: int) -> None:
    """Divide the threads among so many processes, where nobody says how many each has."""
    if jobs > 1 and conditions.get("threads") is None:
        conditions["threads"] = max(1, torch.get_num_threads() // jobs)


def side_by_side(calls: Sequence[Callable[[], T]], jobs: int) -> Iterator[tuple[int, T]]:
    """What each call gives, with its place, in the order they end; so many at a time, with one job in this process.

    Where one fails, or the process is asked to stop, those that wait are not begun, and those at work are asked too.
    """
    with StopAtOnce(told=False) as stop:
        if jobs > 1 and calls:
            yield from _elsewhere(calls, jobs)
            return
        for i, call in enumerate(calls):
            yield i, call()
            if stop.signal and i + 1 < len(calls):  # it was asked when there was nothing left to stop in the call
                raise Stopped(stop.signal)


def _elsewhere(calls: Sequence[Callable[[], T]], jobs: int) -> Iterator[tuple[int, T]]:
    for call in calls:
        try:
            pickle.dumps(call)
        except Exception as e:
            raise UserError(f"jobs {jobs}: other processes cannot be given these parts ({e}); use one job") from None
    with (
        _context() as context,
        ProcessPoolExecutor(min(jobs, len(calls)), context, _begun, (dict(os.environ),)) as pool,
    ):
        try:
            waiting = {pool.submit(_called, call): i for i, call in enumerate(calls)}
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BrokenProcessPool:
            raise UserError(
                f"jobs {jobs}: a process ended before its work did: it was killed, ran out of memory, or the script it "
                'came from has no `if __name__ == "__main__":`; what is finished is kept'
            ) from None
        except BaseException:
            for process in list((pool._processes or {}).values()):
                process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


_one_server = threading.Lock()


@contextmanager
def _context() -> Iterator[BaseContext]:
    """How processes begin: forked from one that has imported everything and done nothing else, where that is possible.

    So PyTorch is imported once for all of them, and none inherits threads or a GPU's context of this process. What they
    are forked from is there for one pool: a later one may have other variables and other files to write to. Where there
    is one already, another thread's or the program's own, each of them begins by itself.
    """
    possible = "forkserver" in multiprocessing.get_all_start_methods()
    if not possible or not _one_server.acquire(blocking=False):
        yield multiprocessing.get_context("spawn")
        return
    try:
        server: Any = forkserver._forkserver  # the one there is in a process
        if server._forkserver_pid:
            yield multiprocessing.get_context("spawn")
        else:
            yield from _served(server)
    finally:
        _one_server.release()


def _served(server: Any) -> Iterator[BaseContext]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["personafl", "personafl.experiment.reproduction", "personafl.experiment.tuning"])
    with _same_path(), _hangup_ignored():
        server.ensure_running()
    try:
        yield context
    finally:
        os.kill(server._forkserver_pid, signal.SIGKILL)  # it would wait for a process that nobody waits for any more
        server._stop()
        context.set_forkserver_preload(["__main__"])  # as it was


@contextmanager
def _hangup_ignored() -> Iterator[None]:
    """A program begun now ignores a closed terminal: this process asks those that work for it to stop."""
    if HANGUP is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(HANGUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(HANGUP, before)


@contextmanager
def _same_path() -> Iterator[None]:
    """A program begun now looks for modules where this one does, which a fork server does not do by itself."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    os.environ["PYTHONSAFEPATH"] = "1"  # and not in the working directory first
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _called(call: Callable[[], T]) -> T:
    try:
        return call()
    except KeyboardInterrupt:
        os._exit(130)  # the pool would begin the next call


def _begun(environ: dict[str, str]) -> None:
    """A process has the environment of the one that began it, says notes in a line, and ends with it."""
    os.environ.clear()  # that of what it was forked from is another
    os.environ.update(environ)
    torch.default_generator.seed()  # or all of them would draw the same
    warnings.showwarning = lambda message, *_, **__: print(f"note: {message}", file=sys.stderr, flush=True)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
