"""One process at a time in a folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from personafl.core.errors import UserError

LOCK = ".lock"
"""The file that the process writing to a folder holds; the lock is free once that process has ended, however it did."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to a folder.

    Raises:
        UserError: another process writes to the folder, or the lock file cannot be opened.
    """
    path = folder / LOCK
    if not folder.is_dir():  # filelock would create it
        raise UserError(f"{folder}: no such folder")
    # The time is for a file that its last holder removes just now. Any thread may release the lock.
    lock = FileLock(path, timeout=0.2, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        try:
            holder = path.read_text(errors="replace")[:200].strip()
        except OSError:  # it has just ended, or the file is another user's
            holder = ""
        raise UserError(f"{folder}: {holder or 'another process'} is writing to this folder") from None
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}") from None
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is still ours
        lock.release()
