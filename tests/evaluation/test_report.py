"""Comparisons as Markdown, LaTeX and HTML."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from personafl.evaluation import comparison_notes, comparison_table, report
from tests.evaluation.summaries import CURVES, corrupted, summary


def test_what_is_missing_is_said_with_every_form_of_the_table() -> None:
    done, gone = [summary("local", 0, 0.9, 0.5)], [("local", 1), ("ditto", 0), ("ditto", 1)]
    line = "Partial: 3 of 4 runs are not finished: local (seed 1), ditto (seeds 0, 1)."
    assert line in report.markdown(done, gone).splitlines()
    assert f"% {line}" in report.latex(done, gone)
    assert f'<p class="concern">{line}</p>' in report.html(done, CURVES, title="x", missing=gone)
    assert "Partial" not in report.markdown(done)


def test_latex_and_html_escape_what_they_print() -> None:
    one = [summary("a_b", 0, 0.9, 0.5)]
    assert r"a\_b & 0.1 & 90.0 $\pm$ 5.0" in report.latex(one)
    page = report.html(one, {("a_b", 0): [{"round": 0, "personal": {"mean": 0.5}}]}, title="x < y")
    assert "theirs &amp; &lt;ours&gt;" in page
    assert "<title>x &lt; y</title>" in page
    assert page.count("<svg") == 2


def test_corruptions_are_summed_up_below_the_table_and_shown_on_the_page() -> None:
    runs = [summary("ditto", s, 0.9, 0.5, robustness=corrupted(0.5 + s / 10, 0.25)) for s in (0, 1)]
    runs.append(summary("local", 0, 0.9, 0.5))
    (line,) = comparison_notes.remarks(runs)
    # 0.375 and 0.425: mean 0.4, deviation 0.05 / sqrt(2), half width 12.71 * 0.05 / 2
    assert line == "Mean over corruptions and severities: ditto 40.0 ± 3.5."
    assert comparison_notes.remarks(runs, "ci") == ["Mean over corruptions and severities: ditto 40.0 ± 31.8."]
    assert report.markdown(runs).endswith(line)
    page = report.html(runs, CURVES, title="x")
    # 0.55 over seeds at severity 1: 255 - 0.55 * (164, 100, 42) = 165, 200, 232
    assert '<td style="background: rgb(165, 200, 232)">55.0</td>' in page
    assert "ditto, by severity" in page
    assert "local, by severity" not in page
    assert comparison_notes.remarks(runs[2:]) == []
    assert "Corrupted images" not in report.html(runs[2:], CURVES, title="x")


def test_corruptions_of_the_whole_test_set_stand_behind_those_of_own_images() -> None:
    whole = {f"whole_{n}": v for n, v in corrupted(0.3, 0.1).items()} | {"whole_clean": {"mean": 0.45, "std": 0.05}}
    one = [summary("ditto", 0, 0.9, 0.5, robustness=corrupted(0.5, 0.25) | whole), summary("local", 0, 0.9, 0.5)]
    assert comparison_notes.remarks(one) == [
        "Mean over corruptions and severities: ditto 37.5 ± 10.0.",
        "Every model on the whole test set: ditto 45.0 ± 5.0.",
        "Mean over corruptions and severities, every model on the whole test set: ditto 20.0 ± 10.0.",
    ]
    page = report.html(one, CURVES, title="x")
    own, _, of_all = page.partition("<h2>Corrupted images, every model on the whole test set</h2>")
    assert "<h2>Corrupted images</h2>" in own and ">25.0</td>" in own and ">10.0</td>" not in own
    assert "ditto, by severity" in of_all and ">10.0</td>" in of_all and ">25.0</td>" not in of_all
    alone = [summary("ditto", 0, 0.9, 0.5, robustness=whole)]
    assert "<h2>Corrupted images</h2>" not in report.html(alone, CURVES, title="x")
    assert len(comparison_notes.remarks(alone)) == 2


def test_rotations_and_matrices_are_drawn() -> None:
    turned = {"rotations": {a: {"mean": 0.5, "std": 0.1} for a in ("-15.0", "0.0", "15.0")}}
    one = [summary("ditto", 0, 0.9, 0.5, robustness=turned)]
    square = {"client_accuracy": np.eye(4)[[1, 3]], "ids": np.array([1, 3])}  # a sample of two of four clients
    page = report.html(one, CURVES, title="x", evaluations={("ditto", 0): square, ("local", 0): {"ids": np.arange(4)}})
    assert page.count("<svg") == 4
    assert "Every model on every client" in page


def test_different_corruptions_are_compared_where_both_have_them() -> None:
    two = corrupted(0.5, 0.1)  # fog at severities 1 and 2
    one = corrupted(0.3) | {"corruptions": {"fog": {"1": {"mean": 0.3, "std": 0.1}}, "snow": {"1": {"mean": 0.9}}}}
    runs = [summary("ditto", 0, 0.9, 0.5, robustness=two), summary("local", 0, 0.9, 0.5, robustness=one)]
    line = "Mean over corruptions and severities all have (1): ditto 50.0, local 30.0."
    assert comparison_notes.remarks(runs) == [line]  # fog at severity 1
    page = report.html(runs, CURVES, title="x")
    assert "Mean over severities that all have" in page
    assert page.count("snow") == 1  # in the method's own table
    apart = {"corruptions": {"snow": {"1": {"mean": 0.9}}}, "corruption_average": {"mean": 0.9, "std": 0.1}}
    runs[1] = summary("local", 0, 0.9, 0.5, robustness=apart)
    assert comparison_notes.remarks(runs) == []
    assert "Mean over severities" not in report.html(runs, CURVES, title="x")


def test_the_expectation_stands_beside_what_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {"expected": {"0.0": {"mean": 0.9, "std": 0.1}, "1.0": {"mean": 0.103, "std": 0.02}}}
    drawn = {"protocol": "donor", **summary("local", 0, 0.9, 0.03)["shift"]}
    runs = [summary("local", 0, 0.9, 0.03, robustness=expected, shift=drawn), summary("ditto", 0, 0.9, 0.5)]
    assert comparison_notes.remarks(runs) == ["Full donor shift, expected over all donors: local 10.3 ± 2.0."]
    figures = []
    monkeypatch.setattr(report, "_drawn", lambda figure: figures.append(figure) or "")
    report.html(runs, CURVES, title="x")
    dashed = [line for line in figures[1].axes[0].lines if line.get_linestyle() == "--"]
    assert [list(line.get_xdata()) for line in dashed] == [[0, 100]]
    assert list(dashed[0].get_ydata()) == pytest.approx([90.0, 10.3])


def test_the_rule_below_the_head_has_its_columns() -> None:
    head, rule, row, *_ = report.markdown([summary("ditto", 0, 0.9, 0.5)]).splitlines()
    assert set(rule) == {"|", "-"}
    edges = [[i for i, c in enumerate(line) if c == "|"] for line in (head, rule, row)]
    assert edges[0] == edges[1] == edges[2]
    assert len(edges[0]) == len(comparison_table.columns([summary("ditto", 0, 0.9, 0.5)])) + 1


def test_curves_are_drawn_over_rounds_from_one_and_in_per_cent(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(report, "_drawn", lambda figure: figures.append(figure) or "")
    curve: list[dict[str, Any]] = [
        {"round": 0, "personal": {"mean": 0.5}},
        {"round": 4},
        {"round": 9, "personal": {"mean": 0.75}},
    ]
    report.html([summary("ditto", 0, 0.9, 0.25)], {("ditto", 0): curve}, title="x")
    (over_rounds,), (over_degrees,) = (figure.axes[0].lines for figure in figures)
    assert (list(over_rounds.get_xdata()), list(over_rounds.get_ydata())) == ([1, 10], [50, 75])
    assert (list(over_degrees.get_xdata()), list(over_degrees.get_ydata())) == ([0, 100], [90, 25])


def test_a_metric_of_which_lower_is_better_is_written_in_its_own_unit() -> None:
    mse = {"name": "mse", "better": "lower"}
    runs = [summary("ditto", 0, 12.34567, 0.5, metric=mse, robustness=corrupted(1.0, 3.0, 2.0))]
    (row,) = comparison_table.rows(runs)
    assert row[2:6] == ("12.35 ± 0.05", "0.5 ± 0.2", "6.423", "12.25")
    assert "Mse (lower is better), mean ± deviation over clients" in report.markdown(runs)
    page = report.html(runs, CURVES, title="x")
    # the least is the best and has the full colour, the largest the worst and is white, 2 is half way
    for colour, number in (("91, 155, 213", "1"), ("255, 255, 255", "3"), ("173, 205, 234", "2")):
        assert f'<td style="background: rgb({colour})">{number}</td>' in page
    assert "Mse over the degree of shift" in page and "mse (lower is better)" in page


NASTY = r"$x_{&}$ |<b>`^~#%\\[1]"


def test_names_are_no_markup_in_any_form_of_the_table() -> None:
    one = [summary(NASTY, 0, 0.9, 0.5)]
    page = report.html(one, {(NASTY, 0): [{"round": 0, "phase": "train", "personal": {"mean": 0.5}}]}, NASTY)
    assert "<b>" not in page and "&lt;b&gt;" in page and page.count("<svg") == 2
    row = report.markdown(one).splitlines()[2]
    assert row.startswith(r"| $x_{&}$ \|\<b>\`^~#%\\\\\[1] |") and row.replace(r"\|", "").count("|") == 11
    told = report.markdown(one, [(NASTY, 1)]).splitlines()[4]
    assert told == r"Partial: 1 of 2 runs are not finished: $x_{&}$ \|\<b>\`^~#%\\\\\[1] (seed 1)."
    tex = report.latex(one).splitlines()[4]
    back = r"\textbackslash{}"
    assert tex.startswith(
        rf"\$x\_\{{\&\}}\$ |<b>`\textasciicircum{{}}\textasciitilde{{}}\#\%{back}{back}[1] & 0.1 & 90.0 $\pm$ 5.0"
    )
