"""What comes from outside is spelt out, and no spreadsheet runs it."""

from __future__ import annotations

import pytest

from personafl.core.plain_text import (
    from_spreadsheet_cell,
    harmless,
    list_names,
    spreadsheet_cell,
    spreadsheet_row,
)

SPELT = [
    ("\x1b[31mred", r"\x1b[31mred"),
    ("a\x07b\rc\x00", r"a\x07b\rc\x00"),
    ("\x9b2J", r"\x9b2J"),  # the control sequence introducer in one character
    ("user\u202etxt.exe", r"user\u202etxt.exe"),
    ("caf\udce9", r"caf\udce9"),  # a file name that is no UTF-8
    ("one\ntwo\t", r"one\ntwo\t"),
    ("Müller, 東京, 😀 ± –", "Müller, 東京, 😀 ± –"),
]


@pytest.mark.parametrize(("text", "spelt"), SPELT, ids=[s for _, s in SPELT])
def test_active_characters_are_spelt_out_and_others_stay(text: str, spelt: str) -> None:
    assert harmless(text) == spelt


FORMULAS = [
    '=HYPERLINK("http://x", "y")',
    "+SUM(A1)",
    "-2+3",
    "@A1",
    "\t=1",
    "\r=1",
    "\n=1",
    "＝1",
    "+1_000",
    "'=1",
    "'",
    "-",
]


@pytest.mark.parametrize("text", FORMULAS)
def test_a_spreadsheet_takes_no_text_for_a_formula(text: str) -> None:
    assert spreadsheet_cell(text) == f"'{text}"
    assert from_spreadsheet_cell(f"'{text}") == text


@pytest.mark.parametrize("value", ["anna", "a=b", "", "-5", "+0.25", "-1e-3", "7", -0.5, 3, None, True])
def test_other_cells_stay(value: object) -> None:
    assert spreadsheet_cell(value) is value
    assert not isinstance(value, str) or from_spreadsheet_cell(value) == value


def test_names_of_columns_are_cells_too() -> None:
    assert spreadsheet_row({"=x": -1.5, "name": "=y"}) == {"'=x": -1.5, "name": "'=y"}


@pytest.mark.parametrize(("count", "end"), [(1, "c0"), (20, "c19"), (21, "c19 and 1 more"), (99, "c19 and 79 more")])
def test_a_list_of_twenty_names_at_most_counts_the_others(count: int, end: str) -> None:
    line = list_names([f"c{i}" for i in range(count)], 20)
    assert line.startswith("c0") and line.endswith(end) and line.count(",") == min(count, 20) - 1
