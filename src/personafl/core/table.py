"""A table of text, and how it is written as Markdown, LaTeX and HTML; `cli/terminal.py` prints it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from personafl.core.html_elements import Html, element, join_html
from personafl.core.plain_text import harmless

_MARKDOWN = str.maketrans({c: f"\\{c}" for c in "\\|<`["})
_TEX = str.maketrans(
    {c: f"\\{c}" for c in "_%&$#{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--"}
)
"""What stands for characters that Markdown and LaTeX would take for their own."""


def marked_html(text: str) -> Html:
    """Text with `code` and **bold** as Markdown has them."""
    return Html(re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", re.sub(r"`(.+?)`", r"<code>\1</code>", join_html([text]))))


@dataclass(frozen=True)
class Table:
    """Rows of text below the names of their columns."""

    columns: Sequence[str]  # none for a table without a head
    rows: Sequence[Sequence[str]]
    align: str = "l"  # l or r for each column; the last letter stands for all further ones
    notes: Sequence[str] = ()  # lines below the table
    caption: str = ""
    marked: bool = False  # cells have Markdown's `code` and **bold**, and Markdown is not padded for reading as text

    def alignment(self, column: int) -> str:
        return self.align[min(column, len(self.align) - 1)]

    def markdown(self) -> str:
        """Columns of equal width, for reading as text, too."""
        escapes = str.maketrans({"|": "\\|"}) if self.marked else _MARKDOWN
        cells = [[harmless(c).translate(escapes) for c in row] for row in (self.columns, *self.rows)]
        widths = [0 if self.marked else max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        lines = [f"| {' | '.join(c.ljust(w) for c, w in zip(row, widths, strict=True))} |" for row in cells]
        gap = " " if self.marked else "-"
        rule = f"|{gap}{f'{gap}|{gap}'.join('-' * (w or 3) for w in widths)}{gap}|"
        notes = ["", *(note.translate(escapes) for note in self.notes)] if self.notes else []
        return "\n".join([lines[0], rule, *lines[1:], *notes])

    def latex(self) -> str:
        """A tabular of the package booktabs, with the notes as comments."""
        head, *body = (" & ".join(c.translate(_TEX) for c in row) + r" \\" for row in (self.columns, *self.rows))
        align = "".join(map(self.alignment, range(len(self.columns))))
        rules = [rf"\begin{{tabular}}{{{align}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
        return "\n".join([*rules, r"\end{tabular}", *(f"% {note}" for note in self.notes)])

    def html(self, class_: str = "", style: Callable[[int, int], str] = lambda row, column: "") -> Html:
        """A table without its notes; `style` gives the CSS of a cell by row and column, of the head by row -1."""

        def line(tag: str, row: int, cells: Sequence[str]) -> Html:
            parts = (marked_html(c) if self.marked and tag == "td" else c for c in cells)
            return element("tr", *(element(tag, c, style=style(row, i)) for i, c in enumerate(parts)))

        top = [element("caption", self.caption)] if self.caption else []
        top += [element("thead", line("th", -1, self.columns))] if self.columns else []
        body = element("tbody", *(line("td", i, row) for i, row in enumerate(self.rows)))
        return element("table", *top, body, class_=class_)
