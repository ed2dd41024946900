"""Run records to tables and figures."""

from __future__ import annotations

import html as escaping
import io
import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Summary = Mapping[str, Any]

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
<table class="methods"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>
<p class="note">{note}</p>{concerns}
<div class="curves">{rounds}{degrees}{angles}</div>{corruptions}{clients}</body></html>
"""

_MATRIX = '<h2>Every model on every client\'s test set</h2><div class="square">'


def html(
    summaries: Sequence[Summary],
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    title: str,
    evaluations: Mapping[str, Mapping[str, NDArray[Any]]] | None = None,
) -> str:
    """A page of its own: the table, accuracy over rounds and degrees of shift, and what else the run was asked for.

    `curves` are rows of metrics.jsonl, `evaluations` arrays of evaluations.npz, both by name.
    """
    from personafl.evaluation import figures  # slow to import

    esc = escaping.escape
    by_round = {
        name: (
            [r["round"] + 1 for r in rows if "personal" in r],
            [r["personal"]["mean"] for r in rows if "personal" in r],
        )
        for name, rows in curves.items()
    }
    by_degree, by_angle, expected = {}, {}, {}
    for label, seeds in groups(summaries).items():
        if all(s["shift"] for s in seeds):
            x, y = _curve([s["shift"]["degrees"] for s in seeds])
            by_degree[label] = ([100 * d for d in x], y)
            if all(s["shift"].get("protocol") == "donor" and "expected" in s.get("robustness", {}) for s in seeds):
                x, y = _curve([s["robustness"]["expected"] for s in seeds])
                expected[label] = ([100 * d for d in x], y)
        if all("rotations" in s.get("robustness", {}) for s in seeds):
            by_angle[label] = _curve([s["robustness"]["rotations"] for s in seeds])
    title_of_shift = "Accuracy over the degree of shift" + (" (dashed: expected over all donors)" if expected else "")
    squares = {n: a for n, a in (evaluations or {}).items() if "client_accuracy" in a}
    return _PAGE.format(
        title=esc(title),
        head="".join(f"<th>{esc(c)}</th>" for c in columns(summaries)),
        body="".join("<tr>" + "".join(f"<td>{esc(c)}</td>" for c in r) + "</tr>" for r in rows(summaries)),
        note=esc(" ".join([NOTE, *remarks(summaries)])),
        concerns="".join(f'<p class="concern">{esc(c)}</p>' for c in concerns(summaries)),
        rounds=_drawn(figures.curves(by_round, "round", "Accuracy without shift, over rounds")),
        degrees=_drawn(figures.curves(by_degree, "degree of shift, %", title_of_shift, expected)) if by_degree else "",
        angles=_drawn(figures.curves(by_angle, "rotation, degrees", "Accuracy on turned images")) if by_angle else "",
        corruptions=_corruptions(summaries),
        clients=f"{_MATRIX}{_drawn(figures.matrix(squares))}</div>" if squares else "",
    )


def _curve(seeds: Sequence[Mapping[str, Mapping[str, float]]]) -> tuple[list[float], list[float]]:
    """Places in order, and the mean over seeds at each."""
    places = sorted(seeds[0], key=float)
    return [float(p) for p in places], [mean(s[p]["mean"] for s in seeds) for p in places]


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
