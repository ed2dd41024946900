"""Text from outside, shown as it is spelt: in messages, in figures and in spreadsheets."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

# Control characters, marks that turn the direction of text, halves of surrogate pairs.
_ACTIVE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

IN_FIGURES: dict[Any, Any] = {"text.usetex": False, "text.parse_math": False}
"""Settings of matplotlib under which no text is a formula or a program of TeX's."""


def harmless(text: str, keep: str = "") -> str:
    """The text with characters that a terminal obeys, or that no file can hold, spelt out, as `\\x1b`, but for some."""
    return _ACTIVE.sub(lambda c: c[0] if c[0] in keep else c[0].encode("unicode_escape").decode(), text)


def is_text(value: str) -> bool:
    """Whether files can hold it and be called by it: it is UTF-8, and has no zero byte."""
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""What a spreadsheet takes for the beginning of a formula."""

_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?(e[-+]?[0-9]+)?", re.IGNORECASE)


def spreadsheet_cell(value: Any) -> Any:
    """A cell of a .csv file that no spreadsheet runs: text that looks like a formula begins with an apostrophe.

    That is what OWASP advises against CSV injection. Numbers stay, also as text. `from_spreadsheet_cell` leads back.
    """
    if not isinstance(value, str) or not value.startswith((*_FORMULA, "'")) or _NUMBER.fullmatch(value):
        return value
    return f"'{value}"


def from_spreadsheet_cell(text: str) -> str:
    """The text that `spreadsheet_cell` was given."""
    return text.removeprefix("'")


def spreadsheet_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a .csv file with such cells, and such names of columns."""
    return {spreadsheet_cell(name): spreadsheet_cell(value) for name, value in row.items()}


def list_names(names: Collection[str], most: int = 6) -> str:
    """Join names for a message; of many, the first ones and how many there are besides."""
    first = ", ".join(list(names)[:most])
    return first if len(names) <= most else f"{first} and {len(names) - most} more"


def count(number: int, noun: str) -> str:
    """A number and what it counts, such as "1 client" and "2 clients"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
