"""What clients keep between rounds, by client id.

Rows come into being when a client first takes part; until then a client is what `fresh` says it is. So a round
costs what its cohort costs, however many clients there are. Truth values are kept as bits.

Rows have one of three homes: the device that trains, main memory, or a folder (`store_files.py` has its files). In a
folder a state can be committed and gone back to; elsewhere `save` and `load` take all rows to a file and back.
"""

from __future__ import annotations

import json
import math
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from personafl.core import tree
from personafl.core.errors import UserError
from personafl.core.types import Params
from personafl.storage import files, store_files
from personafl.storage.files import Stamp
from personafl.storage.store_files import Form, StoreFiles

FEWEST = 1024  # rows a file begins with
PART = 2**26  # bytes of rows that are taken through memory at a time
MOST_CLIENTS = 2**28  # the index has a place for every client up to the last
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
        self._files = StoreFiles(home) if isinstance(home, Path) else None
        self._ids = torch.zeros(0, dtype=torch.int64)  # [capacity] the client of each row
        self._sums = torch.zeros(0, dtype=torch.int64)  # [capacity] in a folder, what each row's bytes add up to
        self._checked = False  # whether rows are checked when they are read

    def __getstate__(self) -> dict[str, Any]:
        """What a copy and a pickle hold: all rows in memory, also those on disk, whose files stay the original's."""
        with self._lock:
            state = self.__dict__ | {"_lock": None}
            if self._files is not None:
                rows = len(self._index)
                if self._checked:
                    self._check(np.arange(rows))
                columns = {n: _Column(c.shape, c.dtype, c.rows[:rows].clone()) for n, c in self._columns.items()}
                state |= {"home": HOST, "_files": None, "_columns": columns, "_ids": self._ids[:rows].clone()}
                state |= {"_sums": self._sums[:0].clone(), "_checked": False}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_lock": threading.Lock()}

    @classmethod
    def opened(cls, fresh: Callable[[Tensor], Params], folder: Path, *, device: torch.device | None = None) -> Store:
        """The rows in a folder as they were last committed; what is stored later does not reach the files."""
        files = StoreFiles(folder, kept=True, write=False)
        if files.changed_since_commit():
            raise UserError(f"{folder}: the store was written to behind its last checkpoint, and not to the end")
        out = cls._over(files, fresh, device, files.commits[max(files.commits)])
        out._checked = True
        return out

    @classmethod
    def reopened(
        cls, fresh: Callable[[Tensor], Params], folder: Path, commit: int, *, device: torch.device | None = None
    ) -> Store:
        """The rows in a folder as they were at this commit, to be written to; what came after it is lost."""
        files = StoreFiles(folder, kept=True)
        if commit not in files.commits:
            there = ", ".join(map(str, files.commits)) or "none"
            raise UserError(f"{folder}: no way back to checkpoint {commit}; those there are: {there}")
        out = cls._over(files, fresh, device, files.commits[max(files.commits)])
        for number in sorted(files.commits, reverse=True):
            if number >= commit:
                out._undo(number)
        out = cls._over(files, fresh, device, files.commits[commit])
        out._check(np.arange(len(out)))
        files.went_back(commit)
        return out

    @classmethod
    def _over(
        cls, files: StoreFiles, fresh: Callable[[Tensor], Params], device: torch.device | None, count: int
    ) -> Store:
        """A store over files that are there, with so many rows."""
        out = cls(fresh, device=device)
        out._files, out.home = files, files.folder
        for name, (shape, dtype) in files.header().items():
            out._columns[name] = _Column(shape, dtype, files.rows(store_files.file(name), *_stored(shape, dtype)))
        if not out._columns:
            return out
        out._ids, out._sums = (files.rows(name, (), torch.int64) for name in ("ids.bin", "sums.bin"))
        ids = out._check_opened(count)
        out._index.add(ids)
        return out

    def _check_opened(self, count: int) -> NDArray[np.int64]:
        """The clients of so many rows; refused where files do not have them, or are not of this method and model."""
        sizes = {"ids.bin": len(self._ids), "sums.bin": len(self._sums)}
        sizes |= {store_files.file(n): len(c.rows) for n, c in self._columns.items()}
        for name, have in sizes.items():
            if count > have:
                raise UserError(f"{self.home}/{name}: it has room for {have} rows, {count} are in use")
        ids = self._ids[:count]
        wrong = ids[(ids < 0) | (ids >= MOST_CLIENTS)]
        if len(wrong):
            raise UserError(f"{self.home}/ids.bin: client {int(wrong[0])} is not in 0..{MOST_CLIENTS - 1}")
        if len(torch.unique(ids)) < count:
            raise UserError(f"{self.home}/ids.bin: a client has two rows")
        for n, t in self.fresh(ids[:1]).items() if count else ():
            there = self._columns[n].shape if n in self._columns else None
            if there != (mine := tuple(t.shape[1:])):
                raise UserError(f"{self.home}: not the rows of this model: {n} has shape {mine} here and {there} there")
        return ids.numpy()

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
        if not len(self._index):
            return self.fresh(ids)
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
        if self._checked:
            self._check(rows)
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
        numbers = ids.numpy()
        before = len(self._index)
        rows = self._index.add(numbers)
        self._grow(len(self._index), kept)
        at = torch.from_numpy(rows)
        if self._files is not None:
            self._files.note(rows, self._sums, [c.rows for _, c in self._by_name])
        new = torch.from_numpy(numbers[rows >= before])
        self._ids[before : before + len(new)] = new
        places = dict[torch.device, Tensor]()
        for n, t in kept.items():
            column = self._columns[n]
            here = column.rows.device
            places.setdefault(here, tree.sent(at, here))
            values = _packed(t.detach().to(column.dtype)).to(here)
            column.rows.index_copy_(0, places[here], values)
        if self._files is not None:
            self._sums[at] = self._summed(rows)
        self._touched(len(rows))

    @property
    def _by_name(self) -> list[tuple[str, _Column]]:
        return sorted(self._columns.items())

    def _summed(self, rows: NDArray[np.int64]) -> Tensor:
        """What the bytes of these rows add up to."""
        columns = [c.raw.numpy() for _, c in self._by_name]
        out = np.zeros(len(rows), np.int64)
        for i, row in enumerate(rows.tolist()):
            crc = 0
            for column in columns:
                crc = zlib.crc32(column[row], crc)
            out[i] = crc
        return torch.from_numpy(out)

    def _check(self, rows: NDArray[np.int64]) -> None:
        """Refuse rows that are not what was written."""
        for part in np.array_split(rows, max(1, len(rows) * max(self.row_bytes, 1) // PART)):
            wrong = (self._summed(part) != self._sums[torch.from_numpy(part)]).numpy()
            if wrong.any():
                clients = self._ids[torch.from_numpy(part[wrong])].tolist()
                told = ", ".join(map(str, clients[:5])) + (", ..." if len(clients) > 5 else "")
                raise UserError(f"{self.home}: damaged, the rows of clients {told} are not what was written")
            self._touched(len(part))

    def _undo(self, number: int) -> None:
        """Give rows back what they held at this commit."""
        assert self._files is not None
        columns = [c.raw for _, c in self._by_name]
        for rows, sums, held in self._files.entries(number, [c.shape[1] for c in columns]):
            if len(rows) and (rows.min() < 0 or rows.max() >= len(self._sums)):
                raise UserError(f"{self.home}: damaged, an undo file names row {rows.max()}")
            at = torch.from_numpy(rows)
            for column, raw in zip(columns, held, strict=True):
                column[at] = (
                    torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(len(rows), -1) if raw else column[at]
                )
            self._sums[at] = torch.from_numpy(sums)

    def commit(self, number: int) -> None:
        """In a folder: put all rows on the disk, as a state there is a way back to until it is forgotten."""
        if self._files is not None:
            with self._lock:
                if not self._columns:
                    self._files.folder.mkdir(parents=True, exist_ok=True)
                    self._files.write_header({})
                self._files.commit(number, len(self._index))

    def forget(self, before: int) -> None:
        """In a folder: give up the way back to what was committed before this."""
        if self._files is not None:
            with self._lock:
                self._files.forget(before)

    def _grow(self, count: int, kept: Params) -> None:
        """Make room for so many rows of these tensors."""
        capacity = len(self._ids)
        if capacity < count:
            capacity = max(count, 2 * capacity, self._expected, FEWEST if self._files else 0)
            self._ids = self._room("ids.bin", self._ids, (), torch.int64, capacity, HOST)
            if self._files is not None:
                self._sums = self._room("sums.bin", self._sums, (), torch.int64, capacity, HOST)
            for n, column in self._columns.items():
                column.rows = self._room(store_files.file(n), column.rows, *column.form, capacity)
        new = {n: t for n, t in kept.items() if n not in self._columns}
        if new:
            self._check_names(kept)
        for n, t in new.items():
            shape = tuple(t.shape[1:])
            form, dtype = _stored(shape, t.dtype)
            self._columns[n] = _Column(shape, t.dtype, self._room(store_files.file(n), None, form, dtype, capacity))
        if self._files is None or not self._files.write:
            return
        for name, each in (
            ("ids.bin", 8),
            ("sums.bin", 8),
            *((store_files.file(n), c.bytes) for n, c in self._by_name),
        ):
            self._files.take_room(name, each, count, capacity)
        if new:
            self._files.write_header({n: (c.shape, c.dtype) for n, c in self._columns.items()})

    def _check_names(self, kept: Params) -> None:
        """Refuse names other than those of fresh clients: a checkpoint of such rows could not be gone on from."""
        begun = self.fresh(torch.zeros(1, dtype=torch.int64))
        if other := sorted(kept.keys() ^ begun.keys()):
            how = "keep it but do not begin with it" if other[0] in kept else "begin with it but do not keep it"
            raise UserError(
                f"{other[0]!r}: clients {how}; what is kept has the names of init_clients, what the server knows of "
                "clients those of init_known, in every round"
            )

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

    def save(self, path: Path) -> Stamp:
        """Write all rows by rising id as a safetensors file, a part at a time; `ids` are the clients."""
        count = len(self)
        ids = self._ids[:count].sort().values
        columns = {"ids": ((), torch.int64)} | {n: (c.shape, c.dtype) for n, c in self._columns.items()}
        order = sorted(columns, key=lambda n: (-columns[n][1].itemsize, n))  # so that all of them are aligned
        names = json.dumps(list(self._columns))  # sums over tensors go by their order
        header: dict[str, object] = {"__metadata__": {"names": names}}
        end = 0
        for n in order:
            shape, dtype = columns[n]
            begin, end = end, end + count * math.prod(shape) * dtype.itemsize
            header[n] = {"dtype": _LETTERS[dtype], "shape": [count, *shape], "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with files.Writer(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for n in order:
                shape, dtype = columns[n]
                size = max(1, PART // max(math.prod(shape) * dtype.itemsize, 1))
                for part in torch.split(ids, size) if count else ():
                    _write(file, part if n == "ids" else self._one(n, part))
        return file.stamp

    def load(self, path: Path) -> None:
        """Store all rows of a file that `save` wrote, a part at a time."""
        try:
            files.check_regular(path)
            with safe_open(path, "pt") as file:
                ids = file.get_tensor("ids")
                order = {n: i for i, n in enumerate(json.loads((file.metadata() or {}).get("names", "[]")))}
                names = sorted((n for n in file.keys() if n != "ids"), key=lambda n: order.get(n, len(order)))  # noqa: SIM118
                held = {n: file.get_slice(n) for n in names}
                self._check_saved(path, ids, {n: tuple(t.get_shape()) for n, t in held.items()})
                each = sum(math.prod(t.get_shape()[1:]) * 8 for t in held.values())
                size = max(1, PART // max(each, 1))
                for a in range(0, len(ids), size):
                    rows = {n: t[a : a + size].to(self._device) for n, t in held.items()}
                    self.scatter(ids[a : a + size], rows)
        except UserError:
            raise
        except (OSError, SafetensorError, ValueError, TypeError, RecursionError) as e:
            raise UserError(f"{path}: cannot be read: {e}") from None

    def _check_saved(self, path: Path, ids: Tensor, shapes: dict[str, tuple[int, ...]]) -> None:
        """Refuse rows of no clients, or of another method and model."""
        if ids.dtype != torch.int64 or ids.dim() != 1 or len(torch.unique(ids)) < len(ids):
            raise UserError(f"{path}: ids are not of clients, each with one row")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < MOST_CLIENTS:
            raise UserError(f"{path}: a client is not in 0..{MOST_CLIENTS - 1}")
        wanted = {n: (len(ids), *t.shape[1:]) for n, t in self.fresh(torch.zeros(1, dtype=torch.int64)).items()}
        if len(ids) and shapes != wanted:
            at = next(n for n in shapes | wanted if shapes.get(n) != wanted.get(n))
            raise UserError(
                f"{path}: not the rows of this model: {at} has shape {wanted.get(at, 'none')} here and "
                f"{shapes.get(at, 'none')} there"
            )

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
    def form(self) -> Form:
        """Shape and type of one client's row as stored."""
        return _stored(self.shape, self.dtype)

    @property
    def raw(self) -> Tensor:
        """The bytes of each row."""
        return self.rows.view(len(self.rows), math.prod(self.form[0])).view(torch.uint8)

    @property
    def bytes(self) -> int:
        form, dtype = self.form
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
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


# Truth values as bits


def _stored(shape: tuple[int, ...], dtype: torch.dtype) -> Form:
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


def _write(file: files.Writer, rows: Tensor) -> None:
    file.write(rows.contiguous().view(-1).view(torch.uint8).numpy().data)
