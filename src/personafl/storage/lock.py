"""One process at a time in a folder."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from personafl.core.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""Held by the process that writes to a folder; free once that has ended, however it did."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to a folder while this lasts."""
    number = _lock(folder)
    try:
        os.ftruncate(number, 0)
        os.write(number, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)  # still ours
        os.close(number)


def _lock(folder: Path) -> int:
    """The open lock file of a folder, locked; another process that has it is named."""
    path = folder / LOCK
    while True:
        try:
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as e:
            raise UserError(f"{path}: {e.strerror}") from None
        try:
            if fcntl is not None:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(number), os.stat(path)):
                    return number
        except BlockingIOError:
            who = os.read(number, 200).decode(errors="replace").strip() or "another process"
            os.close(number)
            raise UserError(f"{folder}: {who} is writing to this folder") from None
        os.close(number)  # whoever had it has just removed it
