"""Run records to tables and figures."""

from __future__ import annotations

import html as escaping
import io
import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

Summary = Mapping[str, Any]

COLUMNS = ("Method", "No shift", "Full shift", "Average", "Worst", "MiB", "GFLOP", "Seconds", "Evaluated model")
NOTE = (
    "Accuracies in %, mean ± deviation over clients; with several seeds mean ± 95 % interval over seeds. "
    "Average: over all degrees of shift. Worst: of all clients. MiB (up + down) and GFLOP per client and run."
)
# Two-sided 95 % quantiles of Student's t by degrees of freedom.
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09)


def groups(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """The seeds of each method, in the order they came."""
    out: dict[str, list[Summary]] = {}
    for s in summaries:
        out.setdefault(s["label"], []).append(s)
    return out


def columns(summaries: Sequence[Summary]) -> tuple[str, ...]:
    """The heads of the table; newcomers have a column where clients were held out."""
    unseen = any("unseen" in s["accuracy"] for s in summaries)
    return (*COLUMNS[:5], "Newcomers", *COLUMNS[5:]) if unseen else COLUMNS


def rows(summaries: Sequence[Summary]) -> list[tuple[str, ...]]:
    """The cells of the comparison, a row per method."""
    out: list[tuple[str, ...]] = []
    newcomers = len(columns(summaries)) > len(COLUMNS)
    for label, seeds in groups(summaries).items():
        own = [s["accuracy"]["personal"] for s in seeds]
        shift = [s["shift"] for s in seeds if s["shift"]]
        full = [d["degrees"].get("1.0") for d in shift]
        unseen = [s["accuracy"]["unseen"] for s in seeds if "unseen" in s["accuracy"]]
        joined = _cell([u["mean"] for u in unseen], unseen[0]["std"]) if unseen else "–"
        out.append(
            (
                label,
                _cell([o["mean"] for o in own], own[0]["std"]),
                _cell([f["mean"] for f in full], full[0]["std"]) if full and all(full) else "–",
                _cell([d["average"] for d in shift], None) if shift else "–",
                _cell([o["worst"] for o in own], None),
                *([joined] if newcomers else []),
                _number(mean(s["communication"]["mib_per_client"] for s in seeds)),
                _number(mean(s["compute"]["flops_per_client"] for s in seeds) / 1e9),
                _number(mean(s["time"]["seconds"] for s in seeds)),
                seeds[0]["evaluated_model"],
            )
        )
    return out


def _cell(values: Sequence[float], spread: float | None) -> str:
    """One seed: the value and its deviation over clients; several: their mean and 95 % interval."""
    if len(values) > 1:
        spread = _T[min(len(values) - 2, len(_T) - 1)] * stdev(values) / math.sqrt(len(values))
    return f"{100 * mean(values):.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def markdown(summaries: Sequence[Summary]) -> str:
    """The comparison as a Markdown table."""
    cells = [columns(summaries), *rows(summaries)]
    widths = [max(len(r[i]) for r in cells) for i in range(len(cells[0]))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in cells]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:], "", NOTE])


def latex(summaries: Sequence[Summary]) -> str:
    """The comparison as a LaTeX tabular (booktabs)."""

    def clean(cell: str) -> str:
        for raw, tex in (
            ("\\", r"\textbackslash "),
            ("_", r"\_"),
            ("%", r"\%"),
            ("&", r"\&"),
            ("±", r"$\pm$"),
            ("–", "--"),
        ):
            cell = cell.replace(raw, tex)
        return cell

    body = [" & ".join(map(clean, r[:-1])) + r" \\" for r in (columns(summaries), *rows(summaries))]
    return "\n".join(
        [
            r"\begin{tabular}{l" + "r" * (len(columns(summaries)) - 2) + "}",
            r"\toprule",
            body[0],
            r"\midrule",
            *body[1:],
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def concerns(summaries: Sequence[Summary]) -> list[str]:
    """What a reader of the comparison should be told."""
    found = []
    missing = [n for n in ("local", "fedavg-ft") if n not in {s["algorithm"] for s in summaries}]
    if missing:
        found.append(
            f"no {' and no '.join(missing)} among the methods: without them a personalised method cannot be judged"
        )
    seeds: dict[int, list[Summary]] = {}
    for s in summaries:
        seeds.setdefault(s["seed"], []).append(s)
    for seed, same in seeds.items():
        for what in ("split", "cohorts", "init", "shift"):
            if len({s["hashes"][what] for s in same}) > 1:
                found.append(f"seed {seed}: the methods did not see the same {what}; their numbers are not comparable")
    return found


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }}
th, td {{ padding: .35rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }}
th:first-child, td:first-child, th:last-child, td:last-child {{ text-align: left; }}
td:last-child {{ white-space: normal; min-width: 14rem; }}
.curves {{ display: flex; flex-wrap: wrap; gap: 1rem; }} .curves svg {{ width: 34rem; max-width: 100%; height: auto; }}
p.note, p.concern {{ color: #555; }} p.concern {{ color: #a33; }}
</style></head><body><h1>{title}</h1>
<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>
<p class="note">{note}</p>{concerns}
<div class="curves">{rounds}{degrees}</div></body></html>
"""


def html(summaries: Sequence[Summary], curves: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> str:
    """A page of its own: the table, accuracy over rounds, accuracy over degrees of shift."""
    esc = escaping.escape
    by_round = {
        name: (
            [r["round"] + 1 for r in rows if "personal" in r],
            [r["personal"]["mean"] for r in rows if "personal" in r],
        )
        for name, rows in curves.items()
    }
    by_degree = {}
    for label, seeds in groups(summaries).items():
        if all(s["shift"] for s in seeds):
            degrees = list(seeds[0]["shift"]["degrees"])
            means = [mean(s["shift"]["degrees"][d]["mean"] for s in seeds) for d in degrees]
            by_degree[label] = ([100 * float(d) for d in degrees], means)
    return _PAGE.format(
        title=esc(title),
        head="".join(f"<th>{esc(c)}</th>" for c in columns(summaries)),
        body="".join("<tr>" + "".join(f"<td>{esc(c)}</td>" for c in r) + "</tr>" for r in rows(summaries)),
        note=esc(NOTE),
        concerns="".join(f'<p class="concern">{esc(c)}</p>' for c in concerns(summaries)),
        rounds=_svg(by_round, "round", "Accuracy without shift, over rounds"),
        degrees=_svg(by_degree, "degree of shift, %", "Accuracy over the degree of shift") if by_degree else "",
    )


def _svg(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]], across: str, title: str) -> str:
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for name, (x, y) in lines.items():
        axes.plot(x, [100 * v for v in y], marker="o", markersize=3, label=name)
    axes.set(xlabel=across, ylabel="accuracy, %", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]
