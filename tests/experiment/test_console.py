"""What comes from outside does nothing to a terminal."""

from __future__ import annotations

import io

import pytest
from rich.table import Table

from personafl.core.plain_text import harmless
from personafl.experiment.console import Console


@pytest.mark.parametrize("text", ["[bold]loud[/bold]", "[/]", ":x: :smile:", "\x1b]0;title\x07", "\\[x]", "[link=x]"])
def test_text_is_printed_as_it_is_spelt_by_itself_and_in_tables(text: str) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", width=80)
    console.print(text)
    table = Table("head", box=None, pad_edge=False, show_header=False)
    table.add_row(text)
    console.print(table)
    console.print("a\nb\tc")
    first, second, *rest = out.getvalue().splitlines()
    assert first == harmless(text) and second.rstrip() == harmless(text)
    assert rest == ["a", "b       c"]
