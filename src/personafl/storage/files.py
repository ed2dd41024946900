"""Files that are whole or not there, and what they are checked by.

A file is written beside its name, put on the disk, then renamed; so is a folder of files. Whoever looks, also after a
crash, finds the old one or the new one. A stamp, size and SHA-256, tells whether a file is still what was written:
against accidents, not against somebody who can write both.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from personafl.core.errors import UserError

PART = ".part"  # behind the name of what is not whole yet
BLOCK = 2**20
LARGEST_TEXT = 2**28  # bytes of a file of JSON, lines or cells


class Stamp(NamedTuple):
    """What a file is known by."""

    bytes: int
    sha256: str

    @classmethod
    def read(cls, told: Any) -> Self:
        """From what JSON made of one."""
        size, digest = told
        return cls(int(size), str(digest))


class Writer:
    """A new file that is hashed as it is written; at the end it is on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._hash, self._size = hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> None:
        write_all(self._number, data)
        self._hash.update(data)
        self._size += memoryview(data).nbytes

    @property
    def stamp(self) -> Stamp:
        """Of what was written so far."""
        return Stamp(self._size, self._hash.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self._number)
        finally:
            os.close(self._number)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file; a pipe or a device in its place is refused, since reading or writing it may not end."""
    number = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if stat.S_ISREG(os.fstat(number).st_mode):
        return number
    os.close(number)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def check_regular(path: Path) -> None:
    """Refuse what is not a file, for readers that would wait for it."""
    os.close(open_regular(path))


def write_all(number: int, data: bytes | memoryview) -> None:
    """Write to an open file until all of it is written."""
    left = memoryview(data).cast("B")
    while len(left):
        left = left[os.write(number, left) :]


def allocate(number: int, offset: int, length: int) -> None:
    """Take room on the disk for this part of an open file, which holds nothing yet."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(number, offset, length)
        return
    for at in range(offset, offset + length, BLOCK):  # macOS has no such call
        os.pwrite(number, bytes(min(BLOCK, offset + length - at)), at)


def sync(number: int) -> None:
    """Put the contents of an open file on the disk."""
    getattr(os, "fdatasync", os.fsync)(number)


def write(path: Path, data: bytes | str) -> Stamp:
    """Write a whole file in place of the one there may be."""
    part = path.with_name(path.name + PART)
    with Writer(part) as out:
        out.write(data.encode() if isinstance(data, str) else data)
    publish(part, path)
    return out.stamp


def publish(part: Path, path: Path) -> None:
    """Give a file or folder that is on the disk its name."""
    os.replace(part, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put the names in a folder on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have no such thing
            raise
    finally:
        os.close(number)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there; a folder at once, as far as others see."""
    if path.is_dir() and not path.is_symlink():
        gone = path if path.name.endswith(PART) else path.with_name(path.name + PART)
        if gone != path:
            if gone.exists():
                shutil.rmtree(gone)
            os.replace(path, gone)
        shutil.rmtree(gone)
    else:
        path.unlink(missing_ok=True)


def read_text(path: Path) -> str:
    """A text of moderate size."""
    with os.fdopen(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > LARGEST_TEXT:
            raise OSError(errno.EFBIG, f"larger than {LARGEST_TEXT >> 20} MiB", str(path))
        return file.read().decode()


def stamp(path: Path, size: int | None = None) -> Stamp:
    """The stamp of a file, or of so many bytes it begins with."""
    found, left = hashlib.sha256(), os.stat(path).st_size if size is None else size
    read = 0
    with os.fdopen(open_regular(path), "rb") as file:
        while block := file.read(min(BLOCK, left - read)):
            found.update(block)
            read += len(block)
    return Stamp(read, found.hexdigest())


def check(folder: Path, stamps: Mapping[str, Stamp]) -> None:
    """Refuse files that are not there, or not what was written."""
    for name, known in stamps.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: is missing")
        if (size := path.stat().st_size) < known.bytes:
            raise UserError(f"{path}: is cut short, {size} of {known.bytes} bytes are there")
        if size > known.bytes or stamp(path) != known:
            raise UserError(f"{path}: is damaged, it is not what was written (its SHA-256 differs)")


@contextmanager
def full_disk_told(command: str) -> Iterator[None]:
    """Say of a write that failed for want of room by which command to go on once there is some."""
    try:
        yield
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(e.errno, f"{os.strerror(e.errno)}; make room, then go on: {command}") from e
