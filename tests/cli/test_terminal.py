"""Tables on a terminal: nothing of a cell is lost, and nothing of it is markup."""

from __future__ import annotations

import io

import pytest

from personafl.cli import terminal
from personafl.core.table import Table
from personafl.experiment.console import Console


def printed(table: Table, monkeypatch: pytest.MonkeyPatch, width: int = 40) -> list[str]:
    out = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=out, width=width))
    terminal.print_table(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_columns_are_aligned_and_notes_stand_below(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(("name", "score"), [("[b]a[/b]", "1"), ("c", "10")], "lr", ["A note."])
    assert printed(table, monkeypatch) == ["name      score", "[b]a[/b]      1", "c            10", "A note."]


def test_a_table_without_a_head_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(Table((), [("a", "b")]), monkeypatch) == ["a  b"]


def test_a_cell_that_is_too_wide_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert printed(Table(("n",), [("abcdefgh",)]), monkeypatch, 4) == ["n", "abcd", "efgh"]
