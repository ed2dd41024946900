"""Comparisons as Markdown, LaTeX and HTML."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING

from personafl.core.html_elements import Html, element, join_html
from personafl.core.table import Table
from personafl.core.types import Summary
from personafl.evaluation.comparison_figures import FIGURES, Key, RoundRows, figure
from personafl.evaluation.comparison_notes import CORRUPTED, Missing, alerts, concerns, in_common, note, remarks
from personafl.evaluation.comparison_table import groups, table
from personafl.evaluation.final import Arrays
from personafl.evaluation.html_page import page
from personafl.evaluation.metric_format import Shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def markdown(summaries: Sequence[Summary], missing: Missing = (), spread: str | None = None) -> str:
    """The comparison as a Markdown table."""
    warned = alerts(summaries, missing)
    notes = [*warned, *([""] if warned else []), note(summaries, spread), *remarks(summaries, spread)]
    return replace(table(summaries, spread), notes=notes).markdown()


def latex(summaries: Sequence[Summary], missing: Missing = (), spread: str | None = None) -> str:
    """The comparison as a LaTeX tabular (booktabs), what is below the table as comments."""
    notes = [*alerts(summaries, missing), note(summaries, spread)]
    return replace(table(summaries, spread, evaluated_model=False), notes=notes).latex()


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, .methods th:last-child, .methods td:last-child, caption { text-align: left; }
.methods td:last-child { white-space: normal; min-width: 14rem; } caption { font-weight: bold; }
.curves { display: flex; flex-wrap: wrap; gap: 1rem; } .curves svg { width: 34rem; max-width: 100%; height: auto; }
.maps { display: flex; flex-wrap: wrap; gap: 0 2rem; } .heat { font-size: 13px; }
.heat th, .heat td { padding: .1rem .5rem; } .square svg { max-width: 100%; height: auto; }
p.note, p.concern { color: #555; } p.concern { color: #a33; }
"""


def html(
    summaries: Sequence[Summary],
    curves: Mapping[Key, RoundRows],
    title: str,
    evaluations: Mapping[Key, Arrays] | None = None,
    missing: Missing = (),
    spread: str | None = None,
) -> str:
    """A page of its own: the table, the metric over rounds and degrees of shift, and what else the run was asked for.

    `curves` are rows of metrics.jsonl, `evaluations` arrays of evaluations.npz.
    """
    svg = {
        what: "" if (found := figure(what, summaries, curves, evaluations or {})) is None else _drawn(found)
        for what in FIGURES
    }
    matrix = element("h2", "Every model on every client's test set"), element("div", svg["matrix"], class_="square")
    return page(
        title,
        _STYLE,
        html_table(summaries, spread),
        element("p", " ".join([note(summaries, spread), *remarks(summaries, spread)]), class_="note"),
        *(element("p", c, class_="concern") for c in (*alerts(summaries, missing), *concerns(summaries))),
        element("div", *(svg[what] for what in ("rounds", "shift", "change", "rotations", "clients")), class_="curves"),
        *(_corruptions(summaries, which) for which in CORRUPTED),
        *(matrix if svg["matrix"] else ()),
    )


def html_table(summaries: Sequence[Summary], spread: str | None = None) -> Html:
    """The comparison as an HTML table."""
    return table(summaries, spread).html("methods")


def _corruptions(summaries: Sequence[Summary], which: str) -> Html:
    """Methods side by side, kind by kind; then each method's numbers by kind and severity."""
    shown = Shown.of(summaries)
    found: dict[str, dict[str, dict[str, float]]] = {}  # method, kind, severity
    for label, seeds in groups(summaries).items():
        cells = [c for s in seeds if (c := s.get("robustness", {}).get(f"{which}corruptions"))]
        if cells:
            found[label] = {k: {s: mean(c[k][s]["mean"] for c in cells) for s in v} for k, v in cells[0].items()}
    if not found:
        return Html("")
    cells, differ = in_common(summaries, which)
    severities = {kind: [s for k, s in cells if k == kind] for kind, _ in cells}
    rows = {k: [mean(by[k][s] for s in of) for by in found.values()] for k, of in severities.items()}
    rows["mean"] = [mean(by[k][s] for k, s in cells) for by in found.values()] if cells else []
    out = [element("h2", f"Corrupted images{CORRUPTED[which]}")]
    if cells:
        out.append(_heat(f"Mean over severities{' that all have' if differ else ''}", list(found), rows, shown))
    maps = []
    for label, by_kind in found.items():
        head = list(next(iter(by_kind.values())))
        maps.append(_heat(f"{label}, by severity", head, {k: list(v.values()) for k, v in by_kind.items()}, shown))
    return join_html([*out, element("div", *maps, class_="maps")])


def _heat(caption: str, head: Sequence[str], rows: Mapping[str, Sequence[float]], shown: Shown) -> Html:
    """A table of numbers on a ground that darkens from 0 to 100 %, or from the table's worst to its best."""
    numbers = list(rows.values())
    values = [v for of in numbers for v in of]
    worst, best = (0.0, 1.0) if shown.percent or not values else (min(values), max(values))
    if shown.better == "lower":
        worst, best = best, worst

    def ground(row: int, column: int) -> str:
        if row < 0 or column == 0:
            return ""
        share = (numbers[row][column - 1] - worst) / (best - worst) if best != worst else 0.0
        return f"background: rgb({', '.join(str(round(255 + (full - 255) * share)) for full in (91, 155, 213))})"

    body = [[name.replace("_", " "), *map(shown.number, of)] for name, of in rows.items()]
    return Table(("", *head), body, "lr", caption=caption).html("heat", ground)


def _drawn(figure: Figure) -> Html:
    """A figure as a piece of HTML."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return Html(out.getvalue()[out.getvalue().index("<svg") :])
