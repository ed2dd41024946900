"""Clients' files of named columns, .csv and .parquet, as examples and labels.

Columns go by their names. Those of text are one-hot encoded, over the sorted values of all clients.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from personafl.core.errors import UserError
from personafl.core.plain_text import list_names
from personafl.data.client_data import ClientData
from personafl.data.columns import MOST_CATEGORIES, Column
from personafl.data.dataset import Array
from personafl.data.missing import HELP, Missing

LABELS = ("label", "y", "target")  # what a label's column is called, where nothing else is asked for
MISSING = frozenset({"", "na", "n/a", "nan", "null"})  # cells that hold no value, in any case
MOST_LISTED = 50  # columns whose names a message has
_BLOCK = 10_000  # rows of a .csv file converted together


@dataclass(frozen=True)
class Table:
    """A file of columns: numbers as float64, NaN where one is missing; text as objects, None where it is."""

    path: Path
    columns: Mapping[str, Array]  # [n] each
    lines: NDArray[np.int64]  # [n] where in the file each row is
    unit: str = "line"  # what `lines` counts

    def place(self, row: int, column: str) -> str:
        return f"{self.path}, {self.unit} {self.lines[row]}, column {column}"

    def is_text(self, column: str) -> bool:
        return bool(self.columns[column].dtype == np.object_)

    def holes(self, column: str) -> NDArray[np.bool_]:
        """Which values are missing."""
        values = self.columns[column]
        return np.array([v is None for v in values], np.bool_) if self.is_text(column) else np.isnan(values)


# Reading


def read_csv(path: Path) -> Table:
    """A .csv file in UTF-8: a line of column names, then one of cells per example."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = csv.reader(file)
            names = _header(path, next(header, []))
            return _cells(path, names, file.readlines(), header.line_num)
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a readable .csv file: it is not UTF-8 text") from None
    except csv.Error as e:
        raise UserError(f"{path}: not a readable .csv file: {e}") from None


def _header(path: Path, cells: Sequence[str]) -> list[str]:
    names = [n.strip() for n in cells]
    if len(names) < 2 or any(re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", n, re.I) for n in names):
        raise UserError(
            f"{path}: the first line must name the columns, two or more, separated by commas; "
            f"it is {repr(','.join(names)[:60]) if names else 'empty'}"
        )
    _check_names(path, names, "to_csv(index=False)")
    return names


def _cells(path: Path, names: Sequence[str], text: Sequence[str], before: int) -> Table:
    """What stands below the names, `before` lines from the top."""
    filled = [i for i, line in enumerate(text, before + 1) if line.strip()]
    numbers = _all_numbers([text[i - before - 1] for i in filled], len(names))
    if numbers is not None:
        return Table(path, dict(zip(names, numbers.T, strict=True)), np.array(filled, np.int64))
    columns = [_CsvColumn(path, n) for n in names]
    lines: list[int] = []
    rows = _rows(path, text, before, len(names))
    while block := list(itertools.islice(rows, _BLOCK)):
        at = [n for n, _ in block]
        for column, cells in zip(columns, zip(*(row for _, row in block), strict=True), strict=True):
            column.add(cells, at)
        lines += at
    return Table(path, {c.name: c.values() for c in columns}, np.array(lines, np.int64))


def _all_numbers(lines: Sequence[str], width: int) -> Array | None:
    """The usual case at once: `[n, width]`, or nothing where a cell is empty or text, or their number is wrong."""
    try:
        found = (
            np.loadtxt(lines, delimiter=",", quotechar='"', comments=None, ndmin=2) if lines else np.zeros((0, width))
        )
    except ValueError:
        return None
    return found if found.shape[1] == width else None


def _rows(path: Path, text: Sequence[str], before: int, width: int) -> Iterator[tuple[int, list[str]]]:
    """Each row with the number of its last line; empty lines are passed over."""
    reader = csv.reader(text)
    for row in reader:
        line = before + reader.line_num
        if len(row) == width:
            yield line, row
        elif len(row) > 1 or (row and row[0].strip()):
            raise UserError(f"{path}, line {line}: {len(row)} cells, but there are {width} column names")


def _check_names(path: Path, names: Sequence[str], without_index: str) -> None:
    seen: set[str] = set()  # tables may have 100,000 columns
    for i, name in enumerate(names):
        if name in ("", "__index_level_0__"):
            hint = f"pandas writes its index so; {without_index} leaves it out"
            raise UserError(f"{path}: column {i + 1} has no name ({hint})")
        if name in seen:
            raise UserError(f"{path}: two columns are called {name!r}")
        seen.add(name)


class _CsvColumn:
    """The cells of a column as they are read: all of them numbers, or all of them text."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.blocks: list[Array] = []
        self.first: dict[bool, tuple[int, str]] = {}  # number or not: the first such cell and its line
        self.seen: dict[str, str] = {}  # so that equal cells are one object

    def add(self, cells: Sequence[str], lines: Sequence[int]) -> None:
        try:
            if "_" in "".join(cells):
                raise ValueError  # float takes 1_000 for a number
            values = np.array([float(c) for c in cells])
        except ValueError:
            self._add_one_by_one([c.strip() for c in cells], lines)
            return
        known = np.flatnonzero(~np.isnan(values))
        if len(known):
            self._note(True, lines[known[0]], cells[known[0]])
        self.blocks.append(values)

    def _add_one_by_one(self, cells: Sequence[str], lines: Sequence[int]) -> None:
        numbers, text = np.full(len(cells), np.nan), np.full(len(cells), None)
        for i, cell in enumerate(cells):
            if cell.lower() in MISSING:
                continue
            value = _number(cell)
            self._note(value is not None, lines[i], cell)
            if value is None:
                text[i] = self.seen.setdefault(cell, cell)
            else:
                numbers[i] = value
        self.blocks.append(text if False in self.first else numbers)

    def _note(self, number: bool, line: int, cell: str) -> None:
        self.first.setdefault(number, (line, cell.strip()))
        if len(self.first) == 2:
            (at, text), (other, figure) = self.first[False], self.first[True]
            raise UserError(
                f"{self.path}, line {at}, column {self.name}: {text[:40]!r} is no number, but line {other} has "
                f"{figure[:40]}; a column must hold numbers only or text only"
            )

    def values(self) -> Array:
        if False not in self.first:
            return np.concatenate(self.blocks) if self.blocks else np.zeros(0)
        return np.concatenate([b if b.dtype == np.object_ else np.full(len(b), None) for b in self.blocks])


def _number(cell: str) -> float | None:
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def read_parquet(path: Path) -> Table:
    """A .parquet file; strings and dictionaries of strings are text, all else must be numbers or truth values."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(f'{path}: reading .parquet needs pyarrow: pip install "personafl[parquet]"') from None
    try:
        held = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as e:
        raise UserError(f"{path}: not a readable .parquet file: {str(e).splitlines()[0]}") from None
    names = [str(n) for n in held.column_names]
    if len(names) < 2:
        raise UserError(f"{path}: two columns or more are needed; it has {', '.join(names) or 'none'}")
    _check_names(path, names, "to_parquet(index=False)")
    columns = {n: _parquet_column(path, n, held.column(i)) for i, n in enumerate(names)}
    return Table(path, columns, np.arange(1, held.num_rows + 1), "row")


def _parquet_column(path: Path, name: str, values: Any) -> Array:
    import pyarrow as pa

    kind = values.type
    if pa.types.is_dictionary(kind):
        values, kind = values.cast(kind.value_type), kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.array(values.to_pylist(), np.object_)
    plain = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal, pa.types.is_null)
    if not any(is_kind(kind) for is_kind in plain):
        raise UserError(f"{path}: column {name} holds {kind}; numbers, truth values and text can be read")
    return np.asarray(values.cast(pa.float64(), safe=False).to_numpy(), np.float64)


READERS = {".csv": read_csv, ".parquet": read_parquet}


# From columns to examples


def encode(
    tables: Sequence[tuple[str, Table]], label: Sequence[str] = (), missing: Missing = "refuse"
) -> tuple[list[ClientData], tuple[Column, ...]]:
    """Clients and their tables as examples `[n, features]` and labels, and the columns the features are of.

    Features are in the order of the first file. A missing value is NaN, or refused with its place; in a column of
    text it makes all features of that column NaN. A missing label is refused.
    """
    held = [t for _, t in tables]
    _check_columns(held)
    labels = _label_columns(held, label)
    of_label = set(labels)
    features = [n for n in held[0].columns if n not in of_label]
    if not features:
        raise UserError(f"{held[0].path}: no column is left beside the label's")
    text = {n for n in held[0].columns if _is_text(n, held)}
    _refuse_holes(held, labels, "label", "take such rows out of the files")
    if missing == "refuse":
        _refuse_holes(held, features, "value", HELP)
    categories = {n: _categories(n, held) for n in features if n in text}
    for t in held:
        _refuse_infinity(t, [n for n in held[0].columns if n not in text])
    parts = [ClientData(c, _features(t, features, categories), _labels(t, labels, text)) for c, t in tables]
    return parts, tuple(Column(n, categories.get(n)) for n in features)


def _check_columns(tables: Sequence[Table]) -> None:
    first = tables[0]
    for t in tables[1:]:
        if lacking := next((n for n in first.columns if n not in t.columns), None):
            there = list_names(t.columns, MOST_LISTED)
            raise UserError(f"{t.path}: no column {lacking!r}, which {first.path} has; it has {there}")
        if extra := next((n for n in t.columns if n not in first.columns), None):
            there = list_names(first.columns, MOST_LISTED)
            raise UserError(f"{t.path}: column {extra!r} is not in {first.path}; it has {there}")


def _label_columns(tables: Sequence[Table], asked: Sequence[str]) -> list[str]:
    first = tables[0]
    there = list(first.columns)
    for n in asked:
        if n not in first.columns:
            columns = list_names(there, MOST_LISTED)
            raise UserError(f"{first.path}: no column {n!r}, which data.label names; it has {columns}")
    if asked:
        return list(asked)
    usual = next((n for wanted in LABELS for n in there if n.lower() == wanted), None)
    if usual is not None:
        return [usual]
    for t in tables:
        if (last := list(t.columns)[-1]) != there[-1]:
            raise UserError(
                f"{t.path}: no column is called {', '.join(LABELS)}, and its last is {last!r} while that of "
                f"{first.path} is {there[-1]!r}; data.label says which is the label's"
            )
    return there[-1:]


def _is_text(name: str, tables: Sequence[Table]) -> bool:
    """Whether a column holds text; that must be so at all clients that have values in it."""
    first: dict[bool, Table] = {}
    for t in tables:
        if not t.holes(name).all():
            first.setdefault(t.is_text(name), t)
    if len(first) == 2:
        raise UserError(
            f"{first[True].path}: column {name} holds text, but numbers in {first[False].path}; "
            "a column must hold the same at all clients"
        )
    return True in first


def _refuse_holes(tables: Sequence[Table], names: Sequence[str], what: str, way_out: str) -> None:
    """Refuse missing values: the first row that has one, and how many there are in all files."""
    found = [(t, np.stack([t.holes(n) for n in names], axis=1)) for t in tables]
    total = sum(int(holes.sum()) for _, holes in found)
    if total:
        table, holes = next(f for f in found if f[1].any())
        row, column = np.argwhere(holes)[0]
        count = "the only missing one" if total == 1 else f"one of {total} that are"
        raise UserError(f"{table.place(row, names[column])}: the {what} is missing, {count}; {way_out}")


def _refuse_infinity(table: Table, names: Sequence[str]) -> None:
    for n in names:
        if not table.is_text(n) and (wrong := np.isinf(table.columns[n])).any():
            raise UserError(f"{table.place(int(wrong.argmax()), n)}: the value is infinite")


def _categories(name: str, tables: Sequence[Table]) -> tuple[str, ...]:
    found = tuple(sorted({v for t in tables if t.is_text(name) for v in t.columns[name] if v is not None}))
    if len(found) > MOST_CATEGORIES:
        raise UserError(
            f"{tables[0].path}: column {name} holds text, {len(found)} different values such as {found[0][:40]!r}; "
            f"categories are {MOST_CATEGORIES} at most: leave the column out of the files"
        )
    return found


def _features(table: Table, names: Sequence[str], categories: Mapping[str, Sequence[str]]) -> Array:
    columns: list[Array] = []
    for n in names:
        if n not in categories:
            columns.append(table.columns[n] if not table.is_text(n) else np.full(len(table.lines), np.nan))
            continue
        codes = {c: i for i, c in enumerate(categories[n])}
        one_hot = np.zeros((len(table.lines), len(codes)), np.float32)
        if table.is_text(n):
            known = np.flatnonzero(~table.holes(n))
            one_hot[known, [codes[v] for v in table.columns[n][known]]] = 1
        one_hot[table.holes(n)] = np.nan
        columns.append(one_hot)
    return np.column_stack([c.astype(np.float32) for c in columns])


def _labels(table: Table, names: Sequence[str], text: set[str]) -> Array:
    if len(names) > 1:
        if wrong := next((n for n in names if n in text), None):
            raise UserError(f"{table.path}: column {wrong} holds text; several label columns must all hold numbers")
        return np.column_stack([table.columns[n] for n in names])
    (name,) = names
    values = table.columns[name]
    if name in text and len(values):
        return values.astype(np.str_)
    whole = values.dtype.kind == "f" and bool((values == np.round(values)).all())  # text has no types
    whole = whole and bool((np.abs(values) < 2**63).all())
    return values.astype(np.int64) if whole else values
