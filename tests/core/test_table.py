"""The same table as Markdown, as LaTeX and as HTML; `tests/cli/test_terminal.py` has it printed."""

from __future__ import annotations

from personafl.core.table import Table

TABLE = Table(("name", "score"), [("a|b", "90 ± 1"), ("c_<d>", "5")], "lr", ["A [note]."], "Scores")


def test_markdown_is_padded_and_escaped() -> None:
    assert TABLE.markdown().splitlines() == [
        r"| name   | score  |",
        r"|--------|--------|",
        r"| a\|b   | 90 ± 1 |",
        r"| c_\<d> | 5      |",
        "",
        r"A \[note].",
    ]


def test_marked_cells_keep_their_code_and_bold() -> None:
    table = Table(("what",), [("`a|b` is **<c>**",)], marked=True)
    assert table.markdown() == "| what |\n| --- |\n| `a\\|b` is **<c>** |"
    assert "<td><code>a|b</code> is <b>&lt;c&gt;</b></td>" in table.html()


def test_latex_has_columns_aligned_and_notes_as_comments() -> None:
    assert TABLE.latex().splitlines() == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"name & score \\",
        r"\midrule",
        r"a|b & 90 $\pm$ 1 \\",
        r"c\_<d> & 5 \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"% A [note].",
    ]


def test_html_is_escaped_and_styled_by_cell() -> None:
    page = TABLE.html("wide", lambda row, column: f"order: {row}" if column else "")
    assert page == (
        '<table class="wide"><caption>Scores</caption>'
        '<thead><tr><th>name</th><th style="order: -1">score</th></tr></thead>'
        '<tbody><tr><td>a|b</td><td style="order: 0">90 ± 1</td></tr>'
        '<tr><td>c_&lt;d&gt;</td><td style="order: 1">5</td></tr></tbody></table>'
    )
    assert Table((), [("1",)]).html() == "<table><tbody><tr><td>1</td></tr></tbody></table>"


def test_the_last_letter_aligns_all_further_columns() -> None:
    assert [Table((), [], "lcr").alignment(i) for i in range(4)] == ["l", "c", "r", "r"]
