"""Columns of a table as features: one feature for a column of numbers, one for each category of a column of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

MOST_CATEGORIES = 1000  # of a column; one with more is a name or free text


class Column(NamedTuple):
    """A column of a table."""

    name: str
    categories: tuple[str, ...] | None = None  # where it holds text: its different values, sorted

    @property
    def width(self) -> int:
        """How many features the column has."""
        return 1 if self.categories is None else len(self.categories)


def name_features(columns: Sequence[Column]) -> Iterator[str]:
    """The names of the features of these columns, in order."""
    for name, categories in columns:
        yield from [name] if categories is None else (f"{name}={c}" for c in categories)


def unite_columns(tables: Sequence[Sequence[Column]]) -> tuple[Column, ...]:
    """The columns of tables that have the same ones: in the order of the first, with the sorted categories of all."""
    categories: dict[str, set[str]] = {column.name: set() for column in tables[0]}
    for name, held in (column for table in tables for column in table):
        categories[name].update(held or ())
    return tuple(c if c.categories is None else Column(c.name, tuple(sorted(categories[c.name]))) for c in tables[0])


def unknown_category(columns: Sequence[Column], agreed: Sequence[Column]) -> tuple[str, str] | None:
    """The first column and category that are not among the agreed ones; None where all are."""
    known = {column.name: set(column.categories or ()) for column in agreed}
    for name, held in columns:
        if other := next((c for c in held or () if c not in known[name]), None):
            return name, other
    return None


def feature_places(columns: Sequence[Column], agreed: Sequence[Column]) -> list[int]:
    """For each feature of these columns its place among the features of the agreed ones, which have all categories."""
    at: dict[tuple[str, str | None], int] = {}
    for name, held in agreed:
        for category in [None] if held is None else held:
            at[name, category] = len(at)
    return [at[name, category] for name, held in columns for category in ([None] if held is None else held)]
