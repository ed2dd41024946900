"""Folders and files that other users of a machine cannot read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def make_private(path: Path) -> bool:
    """Make a folder that only its owner can enter, also where it is there already with a looser mode.

    Returns:
        Whether nobody else can enter it; a folder of another user, or on some network drives, stays as it is.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.name == "nt":  # access lists, which a mode says nothing about
        return True
    if path.stat().st_mode & 0o077:
        with contextlib.suppress(PermissionError):
            path.chmod(0o700)
    return not path.stat().st_mode & 0o077


def write_new(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file that does not exist yet, with its mode from the first moment."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Let no other user read what this process and those that it starts write."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
