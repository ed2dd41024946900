"""Run records to tables and figures."""

from __future__ import annotations

import html as escaping
import io
import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from personafl.evaluation import final
from personafl.evaluation.final import Arrays

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from personafl.evaluation.figures import Curve

Summary = Mapping[str, Any]
RoundRows = Sequence[Mapping[str, Any]]
"""Of metrics.jsonl."""
Key = tuple[str, int]
"""Label and seed."""

COLUMNS = ("Method", "No shift", "Full shift", "Average", "Worst", "MiB", "GFLOP", "Seconds", "Evaluated model")
NOTE = (
    "Accuracies in %, mean ± deviation over clients; with several seeds mean ± 95 % interval over seeds. "
    "Average: over all degrees of shift. Worst: of all clients. MiB (up + down) and GFLOP per client and run."
)


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
        from scipy.special import stdtrit  # as scipy.stats.t.ppf, in a quarter of its import time

        spread = stdtrit(len(values) - 1, 0.975) * stdev(values) / math.sqrt(len(values))
    return f"{100 * mean(values):.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def markdown(summaries: Sequence[Summary]) -> str:
    """The comparison as a Markdown table."""
    cells = [columns(summaries), *rows(summaries)]
    widths = [max(len(r[i]) for r in cells) for i in range(len(cells[0]))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) + " |" for r in cells]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:], "", NOTE, *remarks(summaries)])


def remarks(summaries: Sequence[Summary]) -> list[str]:
    """What a run that was asked for more has to say below the table."""
    corrupted, expected = [], []
    cells, differ = _in_common(summaries)
    for label, seeds in groups(summaries).items():
        robust = [s.get("robustness", {}) for s in seeds]
        tried = [r for r in robust if "corruptions" in r]
        if tried and cells:
            means = [mean(r["corruptions"][k][s]["mean"] for k, s in cells) for r in tried]
            corrupted.append(f"{label} {_cell(means, None if differ else tried[0]['corruption_average']['std'])}")
        full = [r["expected"]["1.0"] for r in robust if "1.0" in r.get("expected", {})]
        if full:
            expected.append(f"{label} {_cell([f['mean'] for f in full], full[0]['std'])}")
    which = f"corruptions and severities all have ({len(cells)})" if differ else "corruptions and severities"
    return [
        *([f"Mean over {which}: {', '.join(corrupted)}."] if corrupted else []),
        *([f"Full donor shift, expected over all donors: {', '.join(expected)}."] if expected else []),
    ]


def _in_common(summaries: Sequence[Summary]) -> tuple[list[tuple[str, str]], bool]:
    """Kinds and severities of corruption that all have who have any, and whether some have more."""
    tried = [s["robustness"]["corruptions"] for s in summaries if "corruptions" in s.get("robustness", {})]
    cells = [[(kind, severity) for kind, by in t.items() for severity in by] for t in tried]
    common = [c for c in cells[0] if all(c in other for other in cells)] if cells else []
    return common, any(len(c) > len(common) for c in cells)


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
    by_seed: dict[int, list[Summary]] = {}
    for s in summaries:
        by_seed.setdefault(s["seed"], []).append(s)
    differ: dict[tuple[str, ...], list[int]] = {}  # what differs, and the seeds it does for
    for seed, same in by_seed.items():
        whats = ("split", "cohorts", "init", "shift", "data")
        if unlike := tuple(w for w in whats if len({s["hashes"][w] for s in same if w in s["hashes"]}) > 1):
            differ.setdefault(unlike, []).append(seed)
    for unlike, seeds in differ.items():
        which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        found.append(f"{which}: the methods did not see the same {', '.join(unlike)}; their numbers are not comparable")
    return found


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }}
th, td {{ padding: .35rem .7rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }}
th:first-child, td:first-child, .methods th:last-child, .methods td:last-child, caption {{ text-align: left; }}
.methods td:last-child {{ white-space: normal; min-width: 14rem; }} caption {{ font-weight: bold; }}
.curves {{ display: flex; flex-wrap: wrap; gap: 1rem; }} .curves svg {{ width: 34rem; max-width: 100%; height: auto; }}
.maps {{ display: flex; flex-wrap: wrap; gap: 0 2rem; }} .heat {{ font-size: 13px; }}
.heat th, .heat td {{ padding: .1rem .5rem; }} .square svg {{ max-width: 100%; height: auto; }}
p.note, p.concern {{ color: #555; }} p.concern {{ color: #a33; }}
</style></head><body><h1>{title}</h1>
{table}
<p class="note">{note}</p>{concerns}
<div class="curves">{curves}</div>{corruptions}{clients}</body></html>
"""

_MATRIX = '<h2>Every model on every client\'s test set</h2><div class="square">'


def html(
    summaries: Sequence[Summary],
    curves: Mapping[Key, RoundRows],
    title: str,
    evaluations: Mapping[Key, Arrays] | None = None,
) -> str:
    """A page of its own: the table, accuracy over rounds and degrees of shift, and what else the run was asked for.

    `curves` are rows of metrics.jsonl, `evaluations` arrays of evaluations.npz.
    """
    esc = escaping.escape
    svg = {
        what: "" if (found := figure(what, summaries, curves, evaluations or {})) is None else _drawn(found)
        for what in FIGURES
    }
    return _PAGE.format(
        title=esc(title),
        table=html_table(summaries),
        note=esc(" ".join([NOTE, *remarks(summaries)])),
        concerns="".join(f'<p class="concern">{esc(c)}</p>' for c in concerns(summaries)),
        curves="".join(svg[what] for what in ("rounds", "shift", "rotations", "clients")),
        corruptions=_corruptions(summaries),
        clients=f"{_MATRIX}{svg['matrix']}</div>" if svg["matrix"] else "",
    )


def html_table(summaries: Sequence[Summary]) -> str:
    """The comparison as an HTML table."""
    esc = escaping.escape
    head = "".join(f"<th>{esc(c)}</th>" for c in columns(summaries))
    body = "".join("<tr>" + "".join(f"<td>{esc(c)}</td>" for c in r) + "</tr>" for r in rows(summaries))
    return f'<table class="methods"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


FIGURES = ("rounds", "shift", "clients", "matrix", "rotations")
"""What can be drawn of a comparison."""


def figure(
    what: str, summaries: Sequence[Summary], curves: Mapping[Key, RoundRows], evaluations: Mapping[Key, Arrays]
) -> Figure | None:
    """One of `FIGURES`; None where these runs have nothing to draw in it."""
    from personafl.evaluation import figures  # slow to import

    by_label = groups(summaries)
    if what == "matrix":
        several = len({seed for _, seed in evaluations}) > 1
        squares = {
            f"{label}, seed {seed}" if several else label: a
            for (label, seed), a in evaluations.items()
            if "client_accuracy" in a
        }
        return figures.matrix(squares) if squares else None
    if what == "clients":
        found = {
            label: [final.own_accuracy(a) for s in seeds if "scores" in (a := evaluations.get((label, s["seed"]), {}))]
            for label, seeds in by_label.items()
        }
        boxes = {label: np.concatenate(v) for label, v in found.items() if v}
        return figures.clients(boxes, "Clients' accuracy without shift") if boxes else None
    across, title = _AXES[what]
    lines = {label: c for label, seeds in by_label.items() if (c := _curve(what, seeds, curves)) is not None}
    dashed = {n: c for n, s in by_label.items() if what == "shift" and (c := _curve("expected", s, curves)) is not None}
    title += " (dashed: expected over all donors)" if dashed else ""
    return figures.curves(lines, across, title, dashed, among=list(by_label)) if lines else None


_AXES = {
    "rounds": ("round", "Accuracy without shift, over rounds"),
    "shift": ("degree of shift, %", "Accuracy over the degree of shift"),
    "rotations": ("rotation, degrees", "Accuracy on turned images"),
}


def _curve(what: str, seeds: Sequence[Summary], curves: Mapping[Key, RoundRows]) -> Curve | None:
    """What the seeds of a method give for an axis, None where one of them has nothing."""
    from personafl.evaluation.figures import Curve  # slow to import

    if what == "rounds":
        return _over_rounds(seeds, curves)
    robust = [s.get("robustness", {}) for s in seeds]
    if what == "shift":
        cells = [(s["shift"] or {}).get("degrees") for s in seeds]
    elif what == "expected":
        donor = all((s["shift"] or {}).get("protocol") == "donor" for s in seeds)
        cells = [r.get("expected") if donor else None for r in robust]
    else:
        cells = [r.get(what) for r in robust]
    scale = 1 if what == "rotations" else 100
    found = [{scale * float(p): v["mean"] for p, v in c.items()} for c in cells if c]
    return Curve.over_seeds(found) if len(found) == len(seeds) else None


def _over_rounds(seeds: Sequence[Summary], curves: Mapping[Key, RoundRows]) -> Curve | None:
    """Accuracy after rounds, counted from one; a stage behind the last round stands apart."""
    from personafl.evaluation.figures import Curve  # slow to import

    by_round, final_stages = [], []
    for s in seeds:
        rows = [r for r in curves.get((s["label"], s["seed"]), ()) if "personal" in r]
        if not rows:
            return None
        by_round.append({r["round"] + 1: r["personal"]["mean"] for r in rows if r["round"] < s["rounds"]})
        if (last := rows[-1])["round"] >= s["rounds"]:
            final_stages.append((last["phase"], s["rounds"], last["personal"]["mean"]))
    return Curve.over_seeds(by_round, final_stages)


def _corruptions(summaries: Sequence[Summary]) -> str:
    """Methods side by side, kind by kind; then each method's accuracy by kind and severity."""
    found: dict[str, dict[str, dict[str, float]]] = {}  # method, kind, severity
    for label, seeds in groups(summaries).items():
        cells = [s["robustness"]["corruptions"] for s in seeds if "corruptions" in s.get("robustness", {})]
        if cells:
            found[label] = {k: {s: mean(c[k][s]["mean"] for c in cells) for s in v} for k, v in cells[0].items()}
    if not found:
        return ""
    cells, differ = _in_common(summaries)
    severities = {kind: [s for k, s in cells if k == kind] for kind, _ in cells}
    rows = {k: [mean(by[k][s] for s in of) for by in found.values()] for k, of in severities.items()}
    rows["mean"] = [mean(by[k][s] for k, s in cells) for by in found.values()] if cells else []
    out = "<h2>Corrupted images</h2>"
    if cells:
        out += _heat(f"Mean over severities{' that all have' if differ else ''}", list(found), rows)
    maps = []
    for label, by_kind in found.items():
        head = list(next(iter(by_kind.values())))
        maps.append(_heat(f"{label}, by severity", head, {k: list(v.values()) for k, v in by_kind.items()}))
    return f'{out}<div class="maps">{"".join(maps)}</div>'


def _heat(caption: str, head: Sequence[str], rows: Mapping[str, Sequence[float]]) -> str:
    """A table of accuracies on a ground that darkens from 0 to 100 %."""
    esc = escaping.escape

    def cell(value: float) -> str:
        ground = ", ".join(str(round(255 + (full - 255) * value)) for full in (91, 155, 213))
        return f'<td style="background: rgb({ground})">{100 * value:.1f}</td>'

    body = "".join(
        f"<tr><td>{esc(name.replace('_', ' '))}</td>{''.join(map(cell, values))}</tr>" for name, values in rows.items()
    )
    top = "".join(f"<th>{esc(h)}</th>" for h in head)
    head_row = f"<caption>{esc(caption)}</caption><thead><tr><th></th>{top}</tr></thead>"
    return f'<table class="heat">{head_row}<tbody>{body}</tbody></table>'


def _drawn(figure: Figure) -> str:
    """A figure as a piece of HTML."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg") :]
