"""Pages of headings, words, tables and one picture, as Markdown and as HTML."""

from __future__ import annotations

import base64
import io
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from personafl.core.html_elements import Html, element
from personafl.core.table import Table, marked_html
from personafl.core.types import Summary
from personafl.evaluation import html_page, stream_change
from personafl.experiment import measures
from personafl.experiment.comparison import FAR, Cell, Comparison, Item, Verdict, interval
from personafl.experiment.targets import Claim

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE = "figure.png"
CAPTION = "What was measured, with the published numbers dashed where there are some"
WIDE = 10  # columns of a table
MANY = 12  # comparisons of a claim that are all told
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0;display:block;overflow-x:auto}"
    "td,th{padding:.25rem .6rem;border-bottom:1px solid #ddd;text-align:left;vertical-align:top}"
    "img{max-width:100%}code{background:#f4f4f4}"
)


@dataclass
class Page:
    """A title, and blocks: a heading is text that begins with `## `."""

    title: str
    blocks: list[str | Table] = field(default_factory=list)
    picture: Figure | None = None

    def markdown(self) -> str:
        parts = [f"# {self.title}"]
        for block in self.blocks:
            parts.append(block.markdown() if isinstance(block, Table) else block)
        if self.picture is not None:
            parts.append(f"![{CAPTION}]({PICTURE})")
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        parts = []
        for block in self.blocks:
            if isinstance(block, Table):
                parts.append(block.html())
            elif block.startswith("## "):
                parts.append(element("h2", block[3:]))
            else:
                parts.append(element("p", marked_html(block)))
        if self.picture is not None:
            out = io.BytesIO()
            self.picture.savefig(out, format="png", dpi=120, metadata={"Software": None})
            data = base64.b64encode(out.getvalue()).decode()
            parts.append(Html(f'<img alt="{CAPTION}" src="data:image/png;base64,{data}">'))
        return html_page.page(self.title, _STYLE, *parts)


# Of a target


def reproduced(found: Comparison, seeds: Sequence[int]) -> Page:
    """A target's page."""
    target, several, smoke = found.target, len(seeds) > 1, found.rehearsal
    page = Page(target.title)
    if smoke:
        page.blocks.append("**A rehearsal on other data, with few rounds: the numbers say nothing.**")
    over = f"mean of seeds {', '.join(map(str, seeds))} ± half of its 95 % interval" if several else f"seed {seeds[0]}"
    page.blocks.append(
        f"Published, then measured ({over}), then the difference where an accuracy is more than {FAR:g} points away."
        if found.printed
        else f"Measured: {over}."
    )
    page.blocks += target.notes
    if target.claims:
        page.blocks += ["## Claims", _claims(found.verdicts(), several=several)]
    for setting in target.settings:
        rows = found.rows(setting)
        if not rows:
            continue
        cells = [[found.cell(setting.name, row, c) for c in target.columns] for row in rows]
        shown = [i for i in range(len(target.columns)) if any(r[i].printed or r[i].values for r in cells)]
        head = ["method", *(target.columns[i] for i in shown)]
        body = [
            [
                target.shown(row) + (" (diverged)" if found.diverged(setting.name, row) else ""),
                *(_cell(of[i], judged=not smoke, beside=bool(found.printed)) for i in shown),
            ]
            for row, of in zip(rows, cells, strict=True)
        ]
        if len(head) > WIDE:  # a row for each column then
            head, *body = [list(line) for line in zip(head, *body, strict=True)]
            head[0] = ""
        page.blocks += [f"## {setting.name}", Table(head, body, marked=True)]
    page.blocks += ["## How it was run", *_conditions(found, seeds)]
    page.picture = _picture(found)
    return page


def _number(value: float) -> str:
    if abs(value) >= 1:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"
    return f"{value:.2g}" if 0 < abs(value) < 0.01 else f"{value:.3f}"


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else ''}{_number(value)}"


def _cell(cell: Cell, *, judged: bool, beside: bool) -> str:
    """As published and as measured; `beside`: a table has published numbers at all."""
    printed = "–" if cell.printed is None else _number(cell.printed.value)
    if cell.printed is not None and cell.printed.std is not None:
        printed += f" ± {_number(cell.printed.std)}"
    if cell.mean is None:
        return printed
    half = interval(cell.values)
    measured = _number(cell.mean) + ("" if half is None else f" ± {_number(half)}")
    away = f" ({cell.difference:+.1f})" if cell.far and judged else ""
    return f"{printed} / **{measured}**{away}" if beside else measured


def _claims(verdicts: Sequence[Verdict], *, several: bool) -> Table:
    rows = []
    for v in verdicts:
        verdict, told = (v.status, "") if v.rehearsed else (f"**{v.status}**", "; ".join(_told(v)))
        rows.append([v.claim.says, verdict, told])
    return Table(["claim", "verdict" if several else "verdict, of one seed", "by how much"], rows, marked=True)


def _told(verdict: Verdict) -> list[str]:
    """The comparisons a claim consists of; of many, the one that speaks most and the one that speaks least for it."""
    run = [i for i in verdict.items if i.mean is not None]
    if len(run) <= MANY or len(run) < len(verdict.items):
        return [_item(i, verdict.claim) for i in verdict.items]
    by = sorted(run, key=lambda i: i.mean or 0.0)
    return [f"{len(run)} comparisons, from {_item(by[0], verdict.claim)}", f"to {_item(by[-1], verdict.claim)}"]


def _item(item: Item, claim: Claim) -> str:
    if item.mean is None:
        return f"{item.setting}: {item.ours}, or what it is compared with, not run"
    half = interval(item.ahead)
    by = _signed(item.mean) + (f" ± {_number(half)}" if half is not None else "")
    than = f" against {item.other}" if item.other else f" from {_number_of(claim):g}"
    printed = "" if item.printed is None else f" (published {_signed(item.printed)})"
    return f"{item.setting}: {item.ours} {by}{than}{printed}"


def _number_of(claim: Claim) -> float:
    """The number a claim is held to."""
    return next(n for n in (claim.near, claim.least, claim.most) if n is not None)


def _conditions(found: Comparison, seeds: Sequence[int]) -> list[str | Table]:
    every = [s for of in found.summaries.values() for s in of]
    if not every:
        return ["Nothing was run."]
    seconds = [float(s["time"]["seconds"]) for s in every]
    facts: dict[str, list[Any]] = {
        "seeds": list(seeds),
        "hardware": _distinct(s["environment"]["hardware"] for s in every),
        "precision": _distinct(s["environment"]["precision"] for s in every),
        "torch": _distinct(s["environment"]["torch"] for s in every),
        "personafl": _distinct(f"{s['environment']['version']} ({_commit(s)})" for s in every),
        "rounds": _distinct(s["rounds"] for s in every),
        "split of the data, by seed": _hashes(every, seeds, "split"),
        "initial weights, by seed": _hashes(every, seeds, "init"),
    }
    rows = [[name, ", ".join(map(str, values))] for name, values in facts.items()]
    spent = f"{sum(seconds):,.0f} s added up, {statistics.fmean(seconds):.1f} s a run"
    rows.append(["training and evaluation", f"{spent}; runs side by side slow each other"])
    options = " --smoke" if found.rehearsal else ""
    usual = found.target.seeds[:1] if found.rehearsal else found.target.seeds
    options += "" if tuple(seeds) == usual else f" --seeds {','.join(map(str, seeds))}"
    rows.append(["command", f"`personafl reproduce {found.target.name}{options}`"])
    told: dict[tuple[str, str], list[str]] = {}  # the settings a method ran with, and where
    for (setting, label), of in found.summaries.items():
        own = {k: str(v) for k, v in of[0]["settings"].items()} | found.target.changes(setting, label)
        told.setdefault((label, ", ".join(f"{k}={v}" for k, v in own.items())), []).append(setting)
    settings = [[label, "; ".join(where), words] for (label, words), where in told.items()]
    return [Table(["", ""], rows, marked=True), Table(["method", "in", "settings"], settings, marked=True)]


def _distinct(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))


def _commit(summary: Summary) -> str:
    commit = summary["environment"].get("commit")
    return str(commit)[:7] if commit else "no commit"


def _hashes(every: Sequence[Summary], seeds: Sequence[int], name: str) -> list[str]:
    return [" ".join(_distinct(s["hashes"][name] for s in every if s["seed"] == seed)) for seed in seeds]


def _frontier(found: Comparison) -> Figure | None:
    """Of the first setting that ran."""
    from personafl.evaluation import figures

    target = found.target
    setting = next((s.name for s in target.settings if found.rows(s)), None)
    points, printed = {}, {}
    for row in target.methods if setting is not None else ():
        own, shifted, traffic = (
            found.cell(setting or "", row, c) for c in ("w/o shift", "100% shift", "communication relative to FedAvg")
        )
        if own.mean is not None and shifted.mean is not None:
            points[target.shown(row)] = own.mean, shifted.mean, traffic.mean or 0.0
            if own.printed is not None and shifted.printed is not None:
                printed[target.shown(row)] = own.printed.value, shifted.printed.value
    return figures.frontier(points, printed) if points else None


def _along_streams(found: Comparison) -> Figure | None:
    """Means along a stream that changes, of every method that has one, in the first setting that ran."""
    from personafl.evaluation import figures

    lines = {}
    for (setting, label), seeds in found.summaries.items():
        told = [s.get("robustness", {}).get("change") for s in seeds]
        if all(told) and setting == next(iter(found.summaries))[0]:
            curves = [stream_change.smoothed(t) for t in told]
            means = {x: 100 * statistics.fmean(c[x] for c in curves) for x in list(curves[0])[::4]}
            lines[found.target.shown(label)] = {x: (y, None) for x, y in means.items()}
    return figures.beside_published({"input": lines}, "accuracy, %") if lines else None


def _picture(found: Comparison) -> Figure | None:
    """Over degrees of shift, over the settings of a sweep, or of pairs of clients; None where there is nothing such."""
    from personafl.evaluation import figures

    target = found.target
    if target.picture == "frontier":
        return _frontier(found)
    if target.picture == "change":
        return _along_streams(found)
    alike = {
        f"{s.name}, seed {of[0]['seed']}": pairs
        for s in target.settings
        for of in [found.summaries.get((s.name, next(iter(target.methods))), ())]
        if of and (pairs := of[0].get("masks", {}).get("pairs"))
    }
    if alike and any(c.startswith("similarity") for c in target.columns):
        return figures.similarity(alike)
    degrees = {c: 100 * d for c in target.columns if (d := measures.degree(c)) is not None}
    if len(degrees) > 2:
        setting = next((s for s in target.settings if found.rows(s)), None)
        if setting is None:
            return None
        lines = {
            target.shown(row): {
                at: (found.cell(setting.name, row, c).mean, found.cell(setting.name, row, c).printed)
                for c, at in degrees.items()
            }
            for row in found.rows(setting)
        }
        return figures.beside_published({"degree of shift, %": lines}, "accuracy, %")
    numbered = [(s, m[1], float(m[2])) for s in target.settings if (m := re.fullmatch(r"(\w+) = ([\d.]+)", s.name))]
    if len(numbered) < 3:
        return None
    panels: dict[str, dict[str, dict[float, Any]]] = {}
    for setting, symbol, at in numbered:
        for row in found.rows(setting):
            for column in degrees:
                cell = found.cell(setting.name, row, column)
                name = f"{target.shown(row)}, {column}"
                panels.setdefault(symbol, {}).setdefault(name, {})[at] = (cell.mean, cell.printed)
    drawn = {symbol: lines for symbol, lines in panels.items() if max(map(len, lines.values())) > 1}
    return figures.beside_published(drawn, "accuracy, %") if drawn else None
