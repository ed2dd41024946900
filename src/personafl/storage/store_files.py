"""The files of a store in a folder: every tensor has one, mapped into memory, of which only rows in use are touched.

    store.json      {"format": 2, "tensors": {name: {"file", "shape", "dtype"}}}; dtype "bool" is kept as bits
    commits.json    {"format": 2, "rows": {commit: rows in use}}: the states there is a way back to
    ids.bin         int64: the client of each row
    sums.bin        int64: CRC-32 of each row's bytes, tensors by name
    <name>.rows     the rows of one tensor behind one another; "/" in a name is "%2F"
    undo-N.bin      since commit N: rows as they were, each before it was first written over

Rows are written in place. What they were is on the disk before, so a state that was committed can be gone back to
until it is forgotten, whenever the process ends. Files are made longer by doubling and are sparse; room on the disk is
taken before rows are written, since a mapped page without room ends the process.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core.errors import UserError
from personafl.storage import files

FORMAT: Final = 2
RESIDENT = 2**26  # bytes of mapped files a process holds on to
AHEAD = 2**18  # bytes of a file that room is taken for at a time, at least
DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_ENTRY: Final = struct.Struct("<4sIQI")  # of an undo file: magic, rows, bytes behind this, their CRC-32
_MAGIC: Final = b"undo"

Form = tuple[tuple[int, ...], torch.dtype]
Places = NDArray[np.int64]


class StoreFiles:
    """The files of a store; nothing is created before something is stored or committed."""

    def __init__(self, folder: Path, *, kept: bool = False, write: bool = True) -> None:
        """`kept` for a store that is there, which is read only unless `write`."""
        self.folder, self.write = folder, write
        self._maps: dict[str, mmap.mmap] = {}
        self._since = 0  # bytes touched since mapped pages were last let go
        self._room: dict[str, int] = {}  # rows there is room on the disk for
        self.commits: dict[int, int] = {}  # rows in use at each
        self._undo: int | None = None  # the open undo file
        self._close: Callable[[], object] | None = None
        self._changed = False  # whether anything was written since the last commit
        self._undone = np.zeros(0, bool)  # rows whose former contents are in it
        if kept:
            self.header()
            self.commits = self._read_commits()
        elif folder.exists() and any(folder.iterdir()):
            raise UserError(f"store={str(folder)!r}: the folder is not empty; choose another")

    # What there is

    def header(self) -> dict[str, Form]:
        """Shape and type of each tensor."""
        path = self.folder / "store.json"
        return {n: _form(path, n, told) for n, told in _json(path, "tensors")["tensors"].items()}

    def write_header(self, tensors: dict[str, Form]) -> None:
        held = {
            n: {"file": file(n), "shape": shape, "dtype": str(dtype).removeprefix("torch.")}
            for n, (shape, dtype) in tensors.items()
        }
        files.write(self.folder / "store.json", json.dumps({"format": FORMAT, "tensors": held}, indent=1) + "\n")

    def rows(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, capacity: int = 0) -> Tensor:
        """A file's rows, mapped; with `capacity` it is first made that long."""
        each = max(1, math.prod(shape) * dtype.itemsize)
        number = self._open(name)
        try:
            size = os.fstat(number).st_size
            if capacity * each > size and self.write:
                os.ftruncate(number, size := capacity * each)
            if not size or size % each:
                raise UserError(f"{self.folder / name}: {size} bytes are no whole number of rows of {each}")
            access = mmap.ACCESS_WRITE if self.write else mmap.ACCESS_COPY
            held = self._maps[name] = mmap.mmap(number, size, access=access)
        finally:
            os.close(number)
        if not math.prod(shape):
            return torch.zeros((size, *shape), dtype=dtype)  # a byte in the file for each, so that they are counted
        return torch.frombuffer(held, dtype=dtype, count=size // each * math.prod(shape)).view(-1, *shape)

    def take_room(self, name: str, each: int, count: int, capacity: int) -> None:
        """See that the disk has room for so many rows of so many bytes."""
        have = self._room.get(name, 0)
        if count <= have or not each:
            return
        more = min(max(count, have + AHEAD // each), capacity)
        number = self._open(name)
        try:
            files.allocate(number, have * each, (more - have) * each)
        finally:
            os.close(number)
        self._room[name] = more

    def _open(self, name: str) -> int:
        if self.write:
            self.folder.mkdir(parents=True, exist_ok=True)
        return _opened(self.folder / name, (os.O_RDWR | os.O_CREAT) if self.write else os.O_RDONLY)

    def touched(self, count: int) -> None:
        """Let mapped pages go once there are many; what was written is in the file."""
        self._since += count
        if self._since > RESIDENT and self.write:
            for held in self._maps.values():
                held.madvise(mmap.MADV_DONTNEED)
            self._since = 0

    def size(self) -> int:
        return sum(p.stat().st_blocks * 512 for p in self.folder.iterdir()) if self.folder.exists() else 0

    # The way back

    def _read_commits(self) -> dict[int, int]:
        found = _json(self.folder / "commits.json", "rows")
        try:
            return {_whole(n): _whole(rows) for n, rows in sorted((int(n), r) for n, r in found["rows"].items())}
        except (TypeError, ValueError, AttributeError):
            raise UserError(f"{self.folder / 'commits.json'}: damaged") from None

    def _write_commits(self) -> None:
        held = {str(n): rows for n, rows in self.commits.items()}
        files.write(self.folder / "commits.json", json.dumps({"format": FORMAT, "rows": held}) + "\n")

    def commit(self, number: int, rows: int) -> None:
        """Put all there is on the disk, as a state there is a way back to."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for held in self._maps.values():
            held.flush()
        self._begin_undo(number, rows)
        self.commits[number] = rows
        self._write_commits()

    def forget(self, before: int) -> None:
        """Give up the way back to commits before this one."""
        old = [n for n in self.commits if n < before]
        if not old:
            return
        for n in old:
            del self.commits[n]
        self._write_commits()
        for n in old:
            files.remove(self._undo_file(n))

    def _undo_file(self, number: int) -> Path:
        return self.folder / f"undo-{number}.bin"

    def _begin_undo(self, number: int, rows: int) -> None:
        """Begin to note what rows were at this commit."""
        if self._close is not None:
            self._close()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._undo = files.open_regular(self._undo_file(number), flags)
        self._close = weakref.finalize(self, os.close, self._undo)
        self._undone = np.zeros(rows, bool)
        self._changed = False

    def note(self, rows: Places, sums: Tensor, columns: Sequence[Tensor]) -> None:
        """Before these rows are written: put what they were on the disk, where that is not there yet."""
        if self._undo is None:
            return
        old = rows[rows < len(self._undone)]
        old = old[~self._undone[old]]
        if not len(old) and self._changed:
            return
        at = torch.from_numpy(old)
        held = [old.tobytes(), _bytes(sums.index_select(0, at)), *(_bytes(c.index_select(0, at)) for c in columns)]
        body = b"".join(held)
        files.write_all(self._undo, _ENTRY.pack(_MAGIC, len(old), len(body), zlib.crc32(body)) + body)
        files.sync(self._undo)
        self._undone[old] = True
        self._changed = True

    def entries(self, number: int, each: Sequence[int]) -> Iterator[tuple[Places, NDArray[np.int64], list[bytes]]]:
        """What rows were at a commit, with their sums and bytes by tensor, where they have been written since."""
        path = self._undo_file(number)
        with os.fdopen(_opened(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while head := file.read(_ENTRY.size):
                if len(head) < _ENTRY.size or not any(head):  # cut short, before a row was written over
                    return
                magic, count, length, crc = _ENTRY.unpack(head)
                if file.tell() + length > size and magic == _MAGIC:
                    return
                body = file.read(length) if magic == _MAGIC and length == count * (16 + sum(each)) else b""
                if len(body) != length or magic != _MAGIC or zlib.crc32(body) != crc:
                    raise UserError(f"{path}: damaged")
                rows, sums = np.frombuffer(body, np.int64, 2 * count).reshape(2, count).copy()
                ends = np.cumsum([16 * count, *(count * n for n in each)]).tolist()
                yield rows, sums, [body[a:b] for a, b in itertools.pairwise(ends)]

    def changed_since_commit(self) -> bool:
        """Whether rows were written behind the last commit."""
        if not self.commits:
            return True
        path = self._undo_file(max(self.commits))
        try:
            return path.stat().st_size > 0
        except OSError as e:
            raise UserError(f"{path}: {e.strerror}") from None

    def went_back(self, number: int) -> None:
        """Forget what came behind a commit, now that rows are as they were then."""
        for held in self._maps.values():
            held.flush()
        self.commits = {n: rows for n, rows in self.commits.items() if n <= number}
        self._write_commits()
        kept = {self._undo_file(n) for n in self.commits}
        for path in self.folder.glob("undo-*.bin"):
            if path not in kept:
                files.remove(path)
        self._begin_undo(number, self.commits[number])


def file(name: str) -> str:
    """The file of a tensor's rows."""
    return f"{quote(name, safe='')}.rows"


def _opened(path: Path, flags: int = os.O_RDONLY) -> int:
    try:
        return files.open_regular(path, flags)
    except OSError as e:
        raise UserError(f"{path}: {e.strerror}") from None


def _form(path: Path, name: str, told: object) -> Form:
    """Shape and type of a tensor as the header has them."""
    shape, kind = (told.get("shape"), told.get("dtype")) if isinstance(told, dict) else (None, None)
    whole = isinstance(shape, list) and len(shape) <= 16 and all(type(n) is int and 0 <= n < 2**40 for n in shape)
    if not isinstance(kind, str) or kind not in DTYPES or not isinstance(shape, list) or not whole:
        raise UserError(f"{path}: {name[:60]!r} has no shape and type that can be read")
    if math.prod(n for n in shape if n) >= 2**40:
        raise UserError(f"{path}: {name[:60]!r} has no shape and type that can be read")
    return tuple(shape), DTYPES[kind]


def _bytes(t: Tensor) -> bytes:
    return t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _whole(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(number)
    return number


def _json(path: Path, part: str) -> dict[str, Any]:
    try:
        found = json.loads(files.read_text(path))
    except (OSError, ValueError, RecursionError):
        raise UserError(f"{path.parent}: no store here, {path.name} is missing or not readable") from None
    held = found if isinstance(found, dict) else {}
    if held.get("format") != FORMAT:
        raise UserError(f"{path}: format {str(held.get('format'))[:20]}, this version reads format {FORMAT}")
    if not isinstance(held.get(part), dict):
        raise UserError(f"{path}: it names no {part}")
    return held
