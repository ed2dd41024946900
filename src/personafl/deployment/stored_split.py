"""Which part of a client's data each row is in, stored so that the data may grow.

A row that was divided once stays in its part: a row that was trained on never becomes a test row, and no test row is
ever trained on. Rows are known by digests of their contents, so the order of rows and the names of files do not matter.
Digests are 16 bytes of BLAKE2b, of which a row has two: of its inputs, and of its inputs and target together.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import rng
from personafl.core.errors import UserError
from personafl.data import Source
from personafl.data.federated import Split, split_client
from personafl.data.ragged import Indices
from personafl.storage import files

log = logging.getLogger("personafl")
SPLIT = "split"  # file of it, among what the client keeps
PARTS: tuple[Split, ...] = ("train", "validation", "test")
_WIDTH = 16  # bytes of a digest
_BLOCK = 2**26  # bytes of rows that are copied together
_FORMAT = 1


@dataclass(frozen=True)
class StoredSplit:
    """Every row that was ever divided, by part: the digest of its inputs, then the one of inputs and target."""

    parts: Mapping[Split, Sequence[bytes]]

    def write(self, path: Path) -> None:
        """Write it in place of what is there."""
        body = b"".join(row for part in PARTS for row in self.parts[part])
        rows = [len(self.parts[part]) for part in PARTS]
        about = {"format": _FORMAT, "rows": rows, "sha256": _checksum(rows, body)}
        files.write(path, json.dumps(about).encode() + b"\n" + body)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The split in a file; None where there is no file.

        Raises:
            UserError: The file cannot be read or is damaged. A fresh split would mix test rows into training.
        """
        try:
            with os.fdopen(files.open_regular(path), "rb") as file:
                header, _, body = file.read().partition(b"\n")
        except FileNotFoundError:
            return None
        except OSError as e:
            raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
        try:
            about = json.loads(header)
            ends = (np.cumsum([0, *about["rows"]]) * 2 * _WIDTH).tolist()
            if about["format"] != _FORMAT or about["sha256"] != _checksum(about["rows"], body) or len(body) != ends[-1]:
                raise ValueError
            bounds = zip(PARTS, ends[:-1], ends[1:], strict=True)
            return cls({part: _pieces(body[begin:end], 2 * _WIDTH) for part, begin, end in bounds})
        except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
            raise UserError(
                f"{path}: the file is damaged, so it is not known which rows the client trained on. Restore the file "
                "from a copy. If you remove it, the data are divided afresh, and rows that were trained on may become "
                "test rows"
            ) from None


def _checksum(rows: Sequence[int], body: bytes) -> str:
    return hashlib.sha256(json.dumps(rows).encode() + body).hexdigest()


def _pieces(body: bytes, width: int) -> list[bytes]:
    return [body[i : i + width] for i in range(0, len(body), width)]


# Digests


def digest_rows(source: Source, missing: NDArray[np.bool_] | None = None) -> list[bytes]:
    """The digests of every row of a data set.

    They do not change with other rows: labels and categories count by name, and `missing` values `[N, ...]` count as
    missing, whatever they were filled with.
    """
    holes = None if missing is None else torch.from_numpy(missing)
    size = max(1, _BLOCK // max(1, source.x[0].numel() * source.x.element_size()))
    found: list[bytes] = []
    for start in range(0, len(source.x), size):
        rows = slice(start, start + size)
        inputs = source.x[rows]
        if holes is not None:
            inputs = inputs.masked_fill(holes[rows], torch.nan)
        for row, target in zip(_input_bytes(source, inputs), _target_bytes(source, rows), strict=True):
            digest = hashlib.blake2b(row, digest_size=_WIDTH)
            of_inputs = digest.digest()
            digest.update(target)
            found.append(of_inputs + digest.digest())
    return found


def _input_bytes(source: Source, inputs: Tensor) -> NDArray[np.uint8]:
    """Inputs as bytes `[N, width]`; those of a table by the names of its columns.

    A text is the digest of its category, and zeros where it is missing.
    """
    if source.columns is None:
        return _bytes_of(inputs)
    begins = np.cumsum([0, *(c.width for c in source.columns)]).tolist()
    in_order = sorted(zip(source.columns, begins[:-1], strict=True))
    pieces = [_bytes_of(inputs[:, [begin for column, begin in in_order if column.categories is None]])]
    for column, begin in in_order:
        if column.categories is not None:
            one_hot = inputs[:, begin : begin + column.width] == 1
            codes = torch.where(one_hot.any(1), one_hot.int().argmax(1), column.width).numpy()
            pieces.append(np.vstack([_name_digests(column.categories), np.zeros((1, _WIDTH), np.uint8)])[codes])
    return np.hstack(pieces)


def _target_bytes(source: Source, rows: slice) -> NDArray[np.uint8]:
    if source.class_names is None:
        return _bytes_of(source.y[rows])
    found: NDArray[np.uint8] = _name_digests(source.class_names)[source.y[rows].numpy()]
    return found


def _name_digests(names: Iterable[str]) -> NDArray[np.uint8]:
    """Digests of names `[names, 16]`."""
    each = b"".join(hashlib.blake2b(n.encode(), digest_size=_WIDTH).digest() for n in names)
    return np.frombuffer(each, np.uint8).reshape(-1, _WIDTH)


def _bytes_of(rows: Tensor) -> NDArray[np.uint8]:
    """Numbers as bytes `[N, width]`; 0.0 and -0.0 are the same."""
    flat = (rows + 0.0 if rows.is_floating_point() else rows).reshape(len(rows), -1)
    return flat.contiguous().view(torch.uint8).numpy()


# Dividing


@dataclass(frozen=True)
class Shares:
    """How much of the rows is drawn for what; 0: nothing is."""

    test: float
    validation: float

    def drawn(self) -> list[Split]:
        """The parts that rows are divided into."""
        return [part for part in PARTS if {"train": 1.0, "validation": self.validation, "test": self.test}[part]]

    def wanted(self, rows: int) -> dict[Split, int]:
        """How many of so many rows are in the parts besides training."""
        shares: dict[Split, float] = {"test": self.test, "validation": self.validation}
        return {part: max(1, round(share * rows)) for part, share in shares.items() if share}


def divide(
    client: int,
    rows: Indices,
    digests: Sequence[bytes],
    seed: int,
    shares: Shares,
    groups: NDArray[np.int64] | None,
    stored: StoredSplit | None,
    where: str,
) -> tuple[dict[Split, Indices], StoredSplit]:
    """Divide a client's rows: those that were divided before stay in their part, and the others are drawn.

    Where no row was divided before, all are drawn as client `client` of a simulation draws them.

    Args:
        client: The number of the client, by which rows are drawn.
        rows: The rows to divide.
        digests: The digests of all rows of the data set, by row.
        seed: The seed of the experiment.
        shares: How much is drawn for testing and for validation.
        groups: The group of every row, where rows of a group must not be split apart.
        stored: What was divided before.
        where: The name of the data, for messages.

    Returns:
        The rows of each part, and the split to be stored: the same object as `stored` where nothing is new in it.

    Raises:
        UserError: No row is left for training or for testing.
    """
    parts = shares.drawn()
    entries = {part: list(stored.parts[part]) if stored else [] for part in PARTS}
    entry_of = _find_rows(rows.tolist(), digests, [entry for part in parts for entry in entries[part]])
    if not entry_of:
        if stored is not None:
            log.warning("%s: none of its rows is one that was divided before, so all are divided afresh", where)
        fresh = split_client(client, rows, seed, shares.test, shares.validation, groups)
        for part, indices in fresh.items():
            entries[part] += [digests[i] for i in indices]
        return fresh, StoredSplit(entries)
    assert stored is not None
    in_part: dict[Split, list[int]] = {}
    in_order = sorted(entry_of, key=entry_of.__getitem__)
    begin = 0
    for part in parts:
        end = begin + len(entries[part])
        in_part[part] = [row for row in in_order if begin <= entry_of[row] < end]
        for row in in_part[part]:  # its target may have been corrected
            entries[part][entry_of[row] - begin] = digests[row]
        begin = end
    new = [row for row in rows.tolist() if row not in entry_of]
    draw = rng.generator(seed, "split", client, sum(map(len, entries.values())))
    for part, drawn in _draw_new(new, digests, shares, groups, entries, in_part, draw).items():
        in_part[part] += drawn
        entries[part] += [digests[i] for i in drawn]
    if bare := next((part for part in parts if part != "validation" and not in_part[part]), None):
        name = {"train": "training", "test": "test"}[bare]
        raise UserError(
            f"{where}: no {name} row is left of those that were divided before. Add rows to the data, or remove the "
            f"file {SPLIT!r} in the client's folder of the experiment: then all rows are divided afresh"
        )
    unchanged = all(list(stored.parts[part]) == entries[part] for part in PARTS)
    result = {part: np.array(in_part.get(part, []), np.int64) for part in PARTS}
    return result, stored if unchanged else StoredSplit(entries)


def _find_rows(rows: Sequence[int], digests: Sequence[bytes], entries: Sequence[bytes]) -> dict[int, int]:
    """The place of each row among what is stored: that of equal inputs and target, else of equal inputs.

    Equal rows are found in the order of the entries, and each entry once.
    """
    found: dict[int, int] = {}
    for key in (slice(_WIDTH, None), slice(_WIDTH)):
        taken = set(found.values())
        first: dict[bytes, int] = {}  # the first entry of each content
        following = [-1] * len(entries)  # the next one of the same content
        for i in reversed(range(len(entries))):
            if i not in taken:
                content = entries[i][key]
                following[i] = first.get(content, -1)
                first[content] = i
        for row in rows:
            if row not in found and (place := first.get(content := digests[row][key], -1)) >= 0:
                found[row] = place
                first[content] = following[place]
        if len(found) == len(rows):
            break
    return found


def _draw_new(
    new: Sequence[int],
    digests: Sequence[bytes],
    shares: Shares,
    groups: NDArray[np.int64] | None,
    entries: Mapping[Split, Sequence[bytes]],
    in_part: Mapping[Split, Sequence[int]],
    draw: np.random.Generator,
) -> dict[Split, list[int]]:
    """Draw the parts of new rows, so that each part comes as near to its share of all rows as new rows allow.

    Rows with equal inputs, or of one group, go to the part that others of them are in; where there are none of them
    they are drawn together. Where others are in several parts, each row is drawn by itself.
    """

    def kinship(row: int) -> bytes | int:
        return digests[row][:_WIDTH] if groups is None else int(groups[row])

    if not new:
        return {}
    homes: dict[bytes | int, set[Split]] = {}
    for part, held in in_part.items():
        for row in held:
            homes.setdefault(kinship(row), set()).add(part)
        if groups is None:
            for entry in entries[part]:  # also of rows that are gone
                homes.setdefault(entry[:_WIDTH], set()).add(part)
    together: dict[bytes | int, list[int]] = {}
    alone: list[list[int]] = []
    out: dict[Split, list[int]] = {part: [] for part in in_part}
    for row in new:
        known = homes.get(kinship(row), set())
        if len(known) == 1:
            out[next(iter(known))].append(row)
        elif known:
            alone.append([row])
        else:
            together.setdefault(kinship(row), []).append(row)
    wanted = shares.wanted(sum(map(len, in_part.values())) + len(new))
    lacking = {part: n - len(in_part[part]) - len(out[part]) for part, n in wanted.items()}
    units = [*together.values(), *alone]
    for i in draw.permutation(len(units)).tolist():
        part = next((p for p, n in lacking.items() if n > 0 and len(units[i]) <= 2 * n), "train")
        out[part] += units[i]
        if part in lacking:
            lacking[part] -= len(units[i])
    return out
