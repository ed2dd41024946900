"""What clients keep between rounds, by client id.

Rows come into being when a client first takes part; until then a client is what `fresh` says it is. So a round
costs what its cohort costs, however many clients there are. Truth values are kept as bits.

Rows have one of three homes: the device that trains, main memory, or a folder. In a folder every tensor has a file of
its own, mapped into memory, of which only the rows in use are ever read or written:

    store.json      {"format": 1, "tensors": {name: {"file", "shape", "dtype"}}}; dtype "bool" is kept as bits
    state.bin       three int64: rows in use, writes begun, writes done
    ids.bin         int64: the client of each row
    <name>.rows     the rows of one tensor behind one another; "/" in a name is "%2F"

Files grow by doubling and are sparse. Where more writes were begun than done, the last one was cut short.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from personafl.core import tree
from personafl.core.errors import UserError
from personafl.core.types import Params

FORMAT = 1
FEWEST = 1024  # rows a file begins with
RESIDENT = 2**26  # bytes of mapped files a process holds on to
MOST_CLIENTS = 2**28  # the index has a place for every client up to the last
PART = 2**26  # bytes of rows that are taken through memory at a time
HOST = torch.device("cpu")


class Store:
    """Client rows: on a device, in main memory, or in a folder."""

    def __init__(
        self,
        fresh: Callable[[Tensor], Params],
        home: torch.device | Path = HOST,
        *,
        device: torch.device | None = None,
        expected: int = 0,
    ) -> None:
        """`device` is where rows are wanted; room for the `expected` number of rows is made at once."""
        self.fresh = fresh
        self.home = home
        self._device = device or (HOST if isinstance(home, Path) else home)
        self._expected = expected
        self._lock = threading.Lock()  # stacks may run in several threads
        self._index = _Index()
        self._columns: dict[str, _Column] = {}
        self._files = _Files(home) if isinstance(home, Path) else None
        self._ids = torch.zeros(0, dtype=torch.int64)  # [capacity] the client of each row

    @classmethod
    def opened(
        cls,
        fresh: Callable[[Tensor], Params],
        folder: Path,
        *,
        device: torch.device | None = None,
        write: bool = False,
    ) -> Store:
        """The rows in a folder; without `write` what is stored later does not reach the files."""
        out = cls(fresh, device=device)
        files = out._files = _Files(folder, kept=True, write=write)
        out.home = folder
        for name, (shape, dtype) in files.header().items():
            out._columns[name] = _Column(shape, dtype, files.rows(_file(name), *_stored(shape, dtype)))
        out._ids = files.rows("ids.bin", (), torch.int64)
        out._check_opened(folder, count := int(files.state[0]))
        out._index.add(out._ids[:count].numpy())
        return out

    def _check_opened(self, folder: Path, count: int) -> None:
        """Refuse files that do not have the rows they should, of clients that can be."""
        for name, have in (("ids.bin", len(self._ids)), *((_file(n), len(c.rows)) for n, c in self._columns.items())):
            if not 0 <= count <= have:
                raise UserError(f"{folder / name}: it has room for {have} rows, state.bin says that {count} are in use")
        ids = self._ids[:count]
        wrong = ids[(ids < 0) | (ids >= MOST_CLIENTS)]
        if len(wrong):
            raise UserError(f"{folder / 'ids.bin'}: client {int(wrong[0])} is not in 0..{MOST_CLIENTS - 1}")
        if len(torch.unique(ids)) < count:
            raise UserError(f"{folder / 'ids.bin'}: a client has two rows")
        for n, t in self.fresh(ids[:1]).items() if count else ():
            there = self._columns[n].shape if n in self._columns else None
            if there != (mine := tuple(t.shape[1:])):
                raise UserError(f"{folder}: not the rows of this model: {n} has shape {mine} here and {there} there")

    @property
    def ids(self) -> list[int]:
        """The clients that have a row."""
        return [int(c) for c in self._ids[: len(self._index)]]

    def __len__(self) -> int:
        return len(self._index)

    @property
    def row_bytes(self) -> int:
        """Bytes of one client's row."""
        return sum(c.bytes for c in self._columns.values())

    def gather(self, ids: Tensor) -> Params:
        """The rows of these clients, `[C, ...]`, not to be written to; clients without a row are fresh ones."""
        with self._lock:
            return self._gather(ids)

    def _gather(self, ids: Tensor) -> Params:
        rows = self._index.find(ids.numpy())
        known = rows >= 0
        if len(rows) and known.all():
            return self._read(rows)
        out = self.fresh(ids)
        if not known.any() or not out:
            return out
        at, held = torch.from_numpy(np.flatnonzero(known)), self._read(rows[known])
        out = {n: t.clone() for n, t in out.items()}
        for n, t in out.items():
            t[at.to(t.device)] = held[n].to(t.dtype)
        return out

    def _read(self, rows: NDArray[np.int64]) -> Params:
        at, places = torch.from_numpy(rows), dict[torch.device, Tensor]()
        out = {}
        for n, column in self._columns.items():
            here = column.rows.device
            places.setdefault(here, tree.sent(at, here))
            found = tree.sent(column.rows.index_select(0, places[here]), self._device)
            out[n] = _unpacked(found, column.shape, column.dtype)
        self._touched(len(rows))
        return out

    def scatter(self, ids: Tensor, kept: Params) -> None:
        """Store these clients' rows."""
        if kept:
            with self._lock:
                self._scatter(ids, kept)

    @torch.no_grad()
    def _scatter(self, ids: Tensor, kept: Params) -> None:
        if self._files is not None:
            self._files.begin()
        numbers = ids.numpy()
        before = len(self._index)
        rows = self._index.add(numbers)
        self._grow(len(self._index), kept)
        new = torch.from_numpy(numbers[rows >= before])
        self._ids[before : before + len(new)] = new
        at = torch.from_numpy(rows)
        places = dict[torch.device, Tensor]()
        for n, t in kept.items():
            column = self._columns[n]
            here = column.rows.device
            places.setdefault(here, tree.sent(at, here))
            values = _packed(t.detach().to(column.dtype)).to(here)
            column.rows.index_copy_(0, places[here], values)
        self._touched(len(rows))
        if self._files is not None:
            self._files.end(len(self._index))

    def _grow(self, count: int, kept: Params) -> None:
        """Make room for so many rows of these tensors."""
        capacity = len(self._ids)
        if capacity < count:
            capacity = max(count, 2 * capacity, self._expected, FEWEST if self._files else 0)
            self._ids = self._room("ids.bin", self._ids, (), torch.int64, capacity, HOST)
            for n, column in self._columns.items():
                column.rows = self._room(_file(n), column.rows, *_stored(column.shape, column.dtype), capacity)
        new = {n: t for n, t in kept.items() if n not in self._columns}
        for n, t in new.items():
            shape = tuple(t.shape[1:])
            form, dtype = _stored(shape, t.dtype)
            self._columns[n] = _Column(shape, t.dtype, self._room(_file(n), None, form, dtype, capacity))
        if new and self._files is not None and self._files.write:
            self._files.write_header({n: (c.shape, c.dtype) for n, c in self._columns.items()})

    def _room(
        self,
        file: str,
        have: Tensor | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        capacity: int,
        home: torch.device | None = None,
    ) -> Tensor:
        """Room for so many rows, those there are in the same places."""
        if self._files is not None and self._files.write:
            return self._files.rows(file, shape, dtype, capacity)
        out = _zeros((capacity, *shape), dtype, home or (HOST if isinstance(self.home, Path) else self.home))
        if have is not None:
            out[: len(have)] = have
        return out

    def _touched(self, count: int) -> None:
        if self._files is not None:
            self._files.touched(count * self.row_bytes)

    # All rows

    def parts(self, most: int = PART) -> Iterator[tuple[Tensor, Params]]:
        """All clients with a row by rising id, and their rows, so many bytes of them at a time."""
        ids = self._ids[: len(self._index)].sort().values
        size = max(1, most // max(self.row_bytes, 1))
        for part in torch.split(ids, size) if len(ids) else ():
            yield part, self.gather(part)

    def save(self, path: Path) -> None:
        """Write all rows by rising id as a safetensors file, a part at a time; `ids` are the clients."""
        count = len(self)
        ids = self._ids[:count].sort().values
        columns = {"ids": ((), torch.int64)} | {n: (c.shape, c.dtype) for n, c in self._columns.items()}
        order = sorted(columns, key=lambda n: (-columns[n][1].itemsize, n))  # so that all of them are aligned
        header, end = {}, 0
        for n in order:
            shape, dtype = columns[n]
            begin, end = end, end + count * math.prod(shape) * dtype.itemsize
            header[n] = {"dtype": _LETTERS[dtype], "shape": [count, *shape], "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for n in order:
                shape, dtype = columns[n]
                size = max(1, PART // max(math.prod(shape) * dtype.itemsize, 1))
                for part in torch.split(ids, size) if count else ():
                    _write(file, part if n == "ids" else self._one(n, part))

    def load(self, path: Path) -> None:
        """Store all rows of a file that `save` wrote, a part at a time."""
        with safe_open(path, "pt") as file:
            ids = file.get_tensor("ids")
            held = {n: file.get_slice(n) for n in file.keys() if n != "ids"}  # noqa: SIM118
            each = sum(math.prod(t.get_shape()[1:]) * 8 for t in held.values())
            size = max(1, PART // max(each, 1))
            for a in range(0, len(ids), size):
                rows = {n: t[a : a + size].to(self._device) for n, t in held.items()}
                self.scatter(ids[a : a + size], rows)

    def _one(self, name: str, ids: Tensor) -> Tensor:
        """One tensor of these clients."""
        with self._lock:
            column, rows = self._columns[name], torch.from_numpy(self._index.find(ids.numpy()))
            found = column.rows.index_select(0, rows.to(column.rows.device))
            if self._files is not None:
                self._files.touched(len(ids) * column.bytes)
            return _unpacked(found, column.shape, column.dtype).cpu()

    def disk_bytes(self) -> int:
        """Bytes of disk the rows take up; 0 in memory."""
        return 0 if self._files is None else self._files.size()


def row_bytes(row: Params) -> int:
    """Bytes a store needs for one client, given the rows of some."""
    return sum(
        math.prod(form) * dtype.itemsize for form, dtype in (_stored(t.shape[1:], t.dtype) for t in row.values())
    )


@dataclass
class _Column:
    """One tensor of all clients."""

    shape: tuple[int, ...]  # of one client's
    dtype: torch.dtype
    rows: Tensor  # [capacity, ...] as stored

    @property
    def bytes(self) -> int:
        form, dtype = _stored(self.shape, self.dtype)
        return math.prod(form) * dtype.itemsize


class _Index:
    """Row numbers by client id, in an array: a million clients are no million dictionary entries."""

    def __init__(self) -> None:
        self._next = np.zeros(0, np.int32)  # by id, the row behind its own; 0: it has none, and memory is untouched
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of these clients, -1 where there is none."""
        out = np.full(len(ids), -1, np.int64)
        inside = ids < len(self._next)
        out[inside] = self._next[ids[inside]].astype(np.int64) - 1
        return out

    def add(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Their rows; those without one get the next."""
        top = int(ids.max(initial=-1)) + 1
        if top > len(self._next):
            grown = np.zeros(1 << (top - 1).bit_length(), np.int32)
            grown[: len(self._next)] = self._next
            self._next = grown
        new = ids[self._next[ids] == 0]
        self._next[new] = np.arange(self._count + 1, self._count + 1 + len(new))
        self._count += len(new)
        return self.find(ids)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the host only what is written to takes up memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


# Truth values as bits


def _stored(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of a row as it is kept."""
    return ((-(-math.prod(shape) // 8),), torch.uint8) if dtype == torch.bool else (tuple(shape), dtype)


def _packed(rows: Tensor) -> Tensor:
    """`[C, ...]` as it is kept, on its device."""
    if rows.dtype != torch.bool:
        return rows
    flat = rows.reshape(len(rows), -1)
    if flat.device.type == "cpu":
        return torch.from_numpy(np.packbits(flat.numpy(), axis=1, bitorder="little"))
    flat = torch.nn.functional.pad(flat.to(torch.uint8), (0, -flat.shape[1] % 8)).view(len(flat), -1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=flat.device)).sum(2, dtype=torch.uint8)


def _unpacked(rows: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The inverse of `_packed`."""
    if dtype != torch.bool:
        return rows
    numel = math.prod(shape)
    if rows.device.type == "cpu":
        found = np.unpackbits(rows.numpy(), axis=1, count=numel, bitorder="little")
        return torch.from_numpy(found.view(np.bool_)).view(len(rows), *shape)
    bits = (rows.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=rows.device)) & 1
    return bits.view(len(rows), -1)[:, :numel].to(torch.bool).reshape(len(rows), *shape)


# In a folder


def _file(name: str) -> str:
    return f"{quote(name, safe='')}.rows"


class _Files:
    """The files of a store; nothing is created before something is stored."""

    def __init__(self, folder: Path, *, kept: bool = False, write: bool = True) -> None:
        self.folder, self.write = folder, write
        self._maps: dict[str, mmap.mmap] = {}
        self._since = 0  # bytes touched since mapped pages were last let go
        self.state = torch.zeros(0, dtype=torch.int64)  # rows in use, writes begun, writes done
        if kept:
            self.header()
            self.state = self.rows("state.bin", (), torch.int64)
            if len(self.state) != 3:
                raise UserError(f"{folder / 'state.bin'}: {len(self.state)} numbers, not 3")
            _, begun, done = self.state.tolist()
            if begun != done:
                raise UserError(f"{folder}: the store was cut short while it was written to ({done} of {begun} writes)")
        elif folder.exists() and any(folder.iterdir()):
            raise UserError(f"store={str(folder)!r}: the folder is not empty; choose another")

    def begin(self) -> None:
        if not len(self.state):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.state = self.rows("state.bin", (), torch.int64, 3)
        self.state[1] += 1

    def end(self, rows: int) -> None:
        self.state[0] = rows
        self.state[2] = self.state[1]

    def header(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        path = self.folder / "store.json"
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError):
            raise UserError(f"{self.folder}: no store here, store.json is missing or not readable") from None
        held = found if isinstance(found, dict) else {}
        if held.get("format") != FORMAT:
            raise UserError(f"{path}: format {str(held.get('format'))[:20]}, this version reads format {FORMAT}")
        if not isinstance(tensors := held.get("tensors"), dict):
            raise UserError(f"{path}: it names no tensors")
        return {n: _column(path, n, t) for n, t in tensors.items()}

    def write_header(self, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        held = {
            n: {"file": _file(n), "shape": shape, "dtype": str(dtype).removeprefix("torch.")}
            for n, (shape, dtype) in tensors.items()
        }
        part = self.folder / "store.json.part"
        part.write_text(json.dumps({"format": FORMAT, "tensors": held}, indent=1) + "\n")
        part.replace(self.folder / "store.json")

    def rows(self, file: str, shape: tuple[int, ...], dtype: torch.dtype, capacity: int = 0) -> Tensor:
        """A file's rows, mapped; with `capacity` it is first made that long."""
        each = max(1, math.prod(shape) * dtype.itemsize)
        flags = (os.O_RDWR | os.O_CREAT) if self.write else os.O_RDONLY
        try:
            number = os.open(self.folder / file, flags, 0o666)
        except OSError as e:
            raise UserError(f"{self.folder / file}: {e.strerror}") from None
        try:
            size = os.fstat(number).st_size
            if capacity * each > size and self.write:
                os.ftruncate(number, size := capacity * each)
            if not size or size % each:
                raise UserError(f"{self.folder / file}: {size} bytes are no whole number of rows of {each}")
            access = mmap.ACCESS_WRITE if self.write else mmap.ACCESS_COPY
            held = self._maps[file] = mmap.mmap(number, size, access=access)
        finally:
            os.close(number)
        return torch.frombuffer(held, dtype=dtype, count=size // each * math.prod(shape)).view(-1, *shape)

    def touched(self, count: int) -> None:
        """Let mapped pages go once there are many; what was written is in the file."""
        self._since += count
        if self._since > RESIDENT and self.write:
            for held in self._maps.values():
                held.madvise(mmap.MADV_DONTNEED)
            self._since = 0

    def size(self) -> int:
        return sum(p.stat().st_blocks * 512 for p in self.folder.iterdir()) if self.folder.exists() else 0


def _column(path: Path, name: str, told: object) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of a tensor as the header has them."""
    shape, kind = (told.get("shape"), told.get("dtype")) if isinstance(told, dict) else (None, None)
    dtype = next((d for d in _LETTERS if str(d) == f"torch.{kind}"), None)
    whole = isinstance(shape, list) and len(shape) <= 16 and all(type(n) is int and 0 <= n < 2**40 for n in shape)
    if dtype is None or not isinstance(shape, list) or not whole or math.prod(n for n in shape if n) >= 2**40:
        raise UserError(f"{path}: {name[:60]!r} has no shape and type that can be read")
    return tuple(shape), dtype


# As safetensors

_LETTERS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def _write(file: BinaryIO, rows: Tensor) -> None:
    file.write(rows.contiguous().view(-1).view(torch.uint8).numpy().data)
