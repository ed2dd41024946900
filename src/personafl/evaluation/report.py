"""Run records to tables and figures."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from personafl.core.errors import UserError
from personafl.core.html_elements import Html, element, join_html
from personafl.core.table import Table
from personafl.core.types import Row, Summary
from personafl.evaluation import final, stream_change
from personafl.evaluation.final import Arrays
from personafl.evaluation.html_page import page
from personafl.evaluation.metric_format import Shown, deviation
from personafl.evaluation.metrics import METRICS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from personafl.evaluation.figures import Curve

RoundRows = Sequence[Row]
"""Of metrics.jsonl."""
Key = tuple[str, int]
"""Label and seed."""

Missing = Sequence[tuple[str, int]]
"""Methods and seeds a comparison was asked for and has not."""

SPREADS = ("std", "ci")


def groups(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """The seeds of each method, in the order they came."""
    out: dict[str, list[Summary]] = {}
    for s in summaries:
        out.setdefault(s["label"], []).append(s)
    return out


def columns(summaries: Sequence[Summary]) -> tuple[str, ...]:
    """The heads of the table."""
    return tuple(_cells(summaries, None))


def rows(summaries: Sequence[Summary], spread: str | None = None) -> list[tuple[str, ...]]:
    """The cells of the comparison, a row per method."""
    cells = _cells(summaries, spread)
    return [tuple(cell(seeds) for cell in cells.values()) for seeds in groups(summaries).values()]


def _cells(summaries: Sequence[Summary], spread: str | None) -> dict[str, Callable[[list[Summary]], str]]:
    """The columns: what each has of the seeds of a method. Newcomers and validation have one where there are any."""
    kind, shown = spread_of(summaries, spread), Shown.of(summaries)

    def cell(what: Callable[[Summary], Any]) -> Callable[[list[Summary]], str]:
        """Of a mean with its deviation over clients, or of a number."""

        def of(seeds: list[Summary]) -> str:
            found = [what(s) for s in seeds]
            return "–" if None in found else _cell(found, kind, shown)

        return of

    def number(what: Callable[[Summary], float]) -> Callable[[list[Summary]], str]:
        return lambda seeds: _number(mean(map(what, seeds)))

    own = cell(lambda s: s["accuracy"]["personal"])
    unseen, validated = any("unseen" in s["accuracy"] for s in summaries), any("validation" in s for s in summaries)
    return {
        "Method": lambda seeds: str(seeds[0]["label"]),
        "LR": lambda seeds: ", ".join(dict.fromkeys(f"{s['lr']:g}" for s in seeds)),
        "No shift": lambda seeds: own(seeds) + _mark(seeds),
        **({"By validation": lambda seeds: _by_validation(seeds, kind, shown)} if validated else {}),
        "Full shift": cell(lambda s: s["shift"] and s["shift"]["degrees"].get("1.0")),
        "Average": cell(lambda s: s["shift"] and s["shift"]["average"]),
        "Worst": cell(lambda s: s["accuracy"]["personal"]["worst"]),
        **({"Newcomers": cell(lambda s: s["accuracy"].get("unseen"))} if unseen else {}),
        "MiB": number(lambda s: s["communication"]["mib_per_client"]),
        "GFLOP": number(lambda s: s["compute"]["flops_per_client"] / 1e9),
        "Seconds": number(lambda s: s["time"]["seconds"]),
        "Evaluated model": lambda seeds: str(seeds[0]["evaluated_model"]),
    }


def spread_of(summaries: Sequence[Summary], asked: str | None = None) -> str:
    """What stands behind ±: `clients`, or over seeds their deviation `std` or a 95 % interval `ci`.

    With several seeds it is what was asked for, else the interval where every method has three seeds or more.
    """
    if asked is not None and asked not in SPREADS:
        raise UserError(f"spread {asked!r}: possible are {', '.join(SPREADS)}")
    counts = [len(seeds) for seeds in groups(summaries).values()]
    if max(counts, default=1) == 1:
        return "clients"
    return asked or ("ci" if min(n for n in counts if n > 1) > 2 else "std")


def _cell(found: Sequence[Any], kind: str, shown: Shown) -> str:
    """Means, or plain numbers, of the seeds of a method; a single seed among several has no ±."""
    values = [f["mean"] if isinstance(f, Mapping) else f for f in found]
    text = shown.number(mean(values))
    if kind == "clients":
        with_std = isinstance(found[0], Mapping) and "std" in found[0]
        return f"{text} ± {shown.number(found[0]['std'])}" if with_std else text
    if len(values) == 1:
        return text
    return f"{text} ± {shown.number(interval(values) if kind == 'ci' else deviation(values))}"


def interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean over two seeds or more."""
    from scipy.special import stdtrit  # as scipy.stats.t.ppf, in a quarter of its import time

    return float(deviation(values) * stdtrit(len(values) - 1, 0.975) / math.sqrt(len(values)))


def _mark(seeds: Sequence[Summary]) -> str:
    """What follows the accuracy of a method that diverged."""
    wild = sum("diverged" in s for s in seeds)
    return "" if not wild else " (diverged)" if wild == len(seeds) else f" ({wild} of {len(seeds)} seeds diverged)"


def _by_validation(seeds: Sequence[Summary], kind: str, shown: Shown) -> str:
    """Test accuracy at the round that validation data chose, and which that is."""
    if not all("validation" in s for s in seeds):
        return "–"
    chosen = sorted({s["validation"]["best_round"] for s in seeds})
    which = f"round {chosen[0]}" if len(chosen) == 1 else f"rounds {chosen[0]}–{chosen[-1]}"
    return f"{_cell([s['validation']['personal'] for s in seeds], kind, shown)} ({which})"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def note(summaries: Sequence[Summary], spread: str | None = None) -> str:
    """What the columns are, below the table."""
    kind, counts = spread_of(summaries, spread), sorted({len(seeds) for seeds in groups(summaries).values()})
    seeds = "seeds" if not counts else f"{counts[0]} seeds" if len(counts) == 1 else f"{counts[0]}–{counts[-1]} seeds"
    few = ", too few for an interval" if spread is None else ""
    over = {
        "clients": "deviation over clients",
        "std": f"standard deviation over {seeds}{few}",
        "ci": f"95 % interval over {seeds}",
    }[kind]
    chosen = "By validation: at the evaluated round with the best validation score. "
    return (
        f"{Shown.of(summaries).heading}, mean ± {over}. {chosen if 'By validation' in columns(summaries) else ''}"
        "Average: over all degrees of shift. Worst: of all clients. MiB (up + down) and GFLOP per client and run."
    )


def table(summaries: Sequence[Summary], spread: str | None = None, *, evaluated_model: bool = True) -> Table:
    """The comparison, with or without its last and longest column."""
    end = None if evaluated_model else -1
    return Table(columns(summaries)[:end], [row[:end] for row in rows(summaries, spread)], "lr")


def markdown(summaries: Sequence[Summary], missing: Missing = (), spread: str | None = None) -> str:
    """The comparison as a Markdown table."""
    warned = alerts(summaries, missing)
    notes = [*warned, *([""] if warned else []), note(summaries, spread), *remarks(summaries, spread)]
    return replace(table(summaries, spread), notes=notes).markdown()


def alerts(summaries: Sequence[Summary], missing: Missing = ()) -> list[str]:
    """Why the table is not what it looks like: runs that are missing, that diverged, or that left updates out."""
    found = []
    if missing:
        by_label: dict[str, list[int]] = {}
        for label, seed in missing:
            by_label.setdefault(label, []).append(seed)
        told = ", ".join(f"{n} (seed{'s' * (len(s) > 1)} {', '.join(map(str, s))})" for n, s in by_label.items())
        whole = len({*missing, *((s["label"], s["seed"]) for s in summaries)})
        found.append(f"Partial: {len(missing)} of {whole} runs are not finished: {told}.")
    for seeds in groups(summaries).values():
        if wild := [s for s in seeds if "diverged" in s]:
            found.append(_diverged(wild, len(seeds)))
        found += _quarantined([s for s in seeds if "faults" in s])
    return found


def _diverged(wild: Sequence[Summary], seeds: int) -> str:
    """A line about a method, from the summaries of the seeds that diverged."""
    told = [s["diverged"] for s in wild]
    clients, final = max(d["clients"] for d in told), max(d["final"] for d in told)
    which = f" in seed{'s' * (len(wild) > 1)} {', '.join(str(s['seed']) for s in wild)}" if seeds > 1 else ""
    most = "up to " if len(wild) > 1 else ""
    line = (
        f"{wild[0]['label']} diverged{which}: loss or model of {most}{clients} of {told[0]['of']} clients was not "
        f"finite, first in round {min(d['first_round'] for d in told)}; try a learning rate below "
        f"{wild[0]['lr']:g}, or grad_clip."
    )
    if ends := sorted(s["stopped"]["rounds"] for s in wild if has_stopped_diverged(s)):
        when = f"{ends[0]}" if ends[0] == ends[-1] else f"{ends[0]}–{ends[-1]}"
        line += (
            f" Training stopped after round {when}, since no client's training was finite any more; data.normalize "
            "and data.normalize_targets bring inputs and targets to a common scale."
        )
    return f"{line} The final models of {most}{final} clients are not finite and count as wrong." if final else line


def _quarantined(failed: Sequence[Summary]) -> list[str]:
    """A line about the updates of a method that were not taken, over its seeds."""
    told = [s["faults"]["quarantined"] for s in failed if "quarantined" in s["faults"]]
    kept = sum(len(s["faults"].get("kept_model", ())) for s in failed)
    if not told and not kept:
        return []
    why: Counter[str] = Counter()
    for t in told:
        why.update(t["why"])
    reasons = "; ".join(f"{text}, {n} times" if n > 1 else text for text, n in why.most_common(3))
    more = f"; {len(why) - 3} other reasons" if len(why) > 3 else ""
    clients = max((len(t["clients"]) for t in told), default=0)
    most = "up to " if len(told) > 1 else ""
    line = (
        f"{sum(why.values())} updates of {most}{clients} clients were left out, first in round "
        f"{min(t['first_round'] for t in told)} ({reasons}{more})"
        if told
        else ""
    )
    same = f"after {kept} rounds the server's model was what it had been before" if kept else ""
    return [f"{failed[0]['label']}: {'; '.join(filter(None, (line, same)))}."]


def remarks(summaries: Sequence[Summary], spread: str | None = None) -> list[str]:
    """What a run that was asked for more has to say below the table."""
    expected, clean = [], []
    kind, shown = spread_of(summaries, spread), Shown.of(summaries)
    for label, seeds in groups(summaries).items():
        robust = [s.get("robustness", {}) for s in seeds]
        full = [r["expected"]["1.0"] for r in robust if "1.0" in r.get("expected", {})]
        if full:
            expected.append(f"{label} {_cell(full, kind, shown)}")
        as_it_is = [r["whole_clean"] for r in robust if "whole_clean" in r]
        if as_it_is:
            clean.append(f"{label} {_cell(as_it_is, kind, shown)}")
    return [
        *_stopped(summaries),
        *_absent(summaries),
        *_targets(summaries),
        *_over_corruptions(summaries, "", kind, shown),
        *([f"Every model on the whole test set: {', '.join(clean)}."] if clean else []),
        *_over_corruptions(summaries, "whole_", kind, shown),
        *([f"Full donor shift, expected over all donors: {', '.join(expected)}."] if expected else []),
        *_executions(summaries),
    ]


def _executions(summaries: Sequence[Summary]) -> list[str]:
    """How clients went through the model: stacked, layer by layer or client by client, and why."""
    labels: dict[str, list[str]] = {}
    for label, seeds in groups(summaries).items():
        for mode in dict.fromkeys(s.get("environment", {}).get("execution") for s in seeds):
            if mode:
                labels.setdefault(mode, []).append(label)
    if len(labels) == 1:
        return [f"The model runs {mode}." for mode in labels]
    return [f"The model of {', '.join(names)} runs {mode}." for mode, names in labels.items()]


_CORRUPTED = {"": "", "shift_": ", at full shift", "whole_": ", every model on the whole test set"}
"""Fields of a summary's corruptions by what they begin with, and words for the images these are of."""


def _over_corruptions(summaries: Sequence[Summary], which: str, kind: str, shown: Shown) -> list[str]:
    """The mean over the corruptions and severities that all have, by method."""
    cells, differ = _in_common(summaries, which)
    out = []
    for label, seeds in groups(summaries).items():
        tried = [r for s in seeds if (r := s.get("robustness", {})).get(f"{which}corruptions")]
        if tried and cells:
            over = {} if differ else tried[0].get(f"{which}corruption_average", {})
            means = [{"mean": mean(r[f"{which}corruptions"][k][s]["mean"] for k, s in cells)} for r in tried]
            means[0] = over | means[0]
            out.append(f"{label} {_cell(means, kind, shown)}")
    those = f" all have ({len(cells)})" if differ else ""
    return [f"Mean over corruptions and severities{those}{_CORRUPTED[which]}: {', '.join(out)}."] if out else []


def has_stopped_diverged(summary: Summary) -> bool:
    """Whether training stopped early since everybody had diverged."""
    return bool(summary.get("stopped", {}).get("by") == "diverged")


def _stopped(summaries: Sequence[Summary]) -> list[str]:
    """Which methods stopped early, by what, and after how many rounds."""
    told: dict[str, list[str]] = {}
    for label, seeds in groups(summaries).items():
        early = [s["stopped"] for s in seeds if "stopped" in s and not has_stopped_diverged(s)]
        for by, on in dict.fromkeys((s["by"], s["on"]) for s in early):
            ends = sorted(s["stopped"]["rounds"] for s in seeds if s.get("stopped", {}).get("by") == by)
            when = f"{ends[0]}" if ends[0] == ends[-1] else f"{ends[0]}–{ends[-1]}"
            some = "" if len(ends) == len(seeds) else f" ({len(ends)} of {len(seeds)} seeds)"
            told.setdefault(f"training.{by} on {on} data", []).append(f"{label} after {when} rounds{some}")
    return [f"Stopped by {why}: {', '.join(who)}." for why, who in told.items()]


_ABSENT = {"dropped": "vanished", "late": "came late", "stale": "of these were used a round later"}


def _absent(summaries: Sequence[Summary]) -> list[str]:
    """How many results did not arrive in time, by method."""
    out = []
    for label, seeds in groups(summaries).items():
        counts = {words: sum(s.get("faults", {}).get(k, 0) for s in seeds) for k, words in _ABSENT.items()}
        if any(counts.values()):
            out.append(f"{label}: " + ", ".join(f"{n} {words}" for words, n in counts.items() if n))
    return [f"Results of clients: {'; '.join(out)}."] if out else []


def _targets(summaries: Sequence[Summary]) -> list[str]:
    """Rounds to each target, for clients' own models and the global one."""
    targets = dict.fromkeys(t for s in summaries for t in s.get("rounds_to_target", ()))
    out = []
    metric = Shown.of(summaries)
    for model, which in (("personal", ""), ("global", " of the global model")):
        for target in targets:
            cells = {}
            for label, seeds in groups(summaries).items():
                asked = [s["rounds_to_target"][target] for s in seeds if target in s.get("rounds_to_target", ())]
                cells[label] = _reached([a[model] for a in asked])
            if model == "personal" or set(cells.values()) != {"–"}:
                told = ", ".join(f"{label} {cell}" for label, cell in cells.items())
                out.append(f"Rounds to the target {metric.target(float(target))}{which}: {told}.")
    return out


def _reached(seeds: Sequence[int | None]) -> str:
    """The mean round over the seeds that reached a target, and how many did where not all."""
    found = [t for t in seeds if t is not None]
    if not found:
        return "–"
    return f"{round(mean(found), 1):g}" + ("" if len(found) == len(seeds) else f" ({len(found)} of {len(seeds)} seeds)")


def _in_common(summaries: Sequence[Summary], which: str) -> tuple[list[tuple[str, str]], bool]:
    """Kinds and severities of corruption that all have who have any, and whether some have more."""
    tried = [cells for s in summaries if (cells := s.get("robustness", {}).get(f"{which}corruptions"))]
    cells = [[(kind, severity) for kind, by in t.items() for severity in by] for t in tried]
    common = [c for c in cells[0] if all(c in other for other in cells)] if cells else []
    return common, any(len(c) > len(common) for c in cells)


def latex(summaries: Sequence[Summary], missing: Missing = (), spread: str | None = None) -> str:
    """The comparison as a LaTeX tabular (booktabs), what is below the table as comments."""
    notes = [*alerts(summaries, missing), note(summaries, spread)]
    return replace(table(summaries, spread, evaluated_model=False), notes=notes).latex()


def concerns(summaries: Sequence[Summary]) -> list[str]:
    """What a reader of the comparison should be told."""
    found = []
    missing = [n for n in ("local", "fedavg-ft") if n not in {s["algorithm"] for s in summaries}]
    if missing:
        found.append(
            f"no {' and no '.join(missing)} among the methods: without them a personalised method cannot be judged"
        )
    judged = {Shown.of([s]) for s in summaries}
    if len(judged) > 1:
        found.append(f"the runs are judged by {' and '.join(sorted(j.words for j in judged))}: not comparable")
    peeked = [s["label"] for s in summaries if s.get("stopped", {}).get("on") == "test"]
    if peeked:
        which = ", ".join(dict.fromkeys(peeked))
        found.append(
            f"{which} stopped by the score on test data: set data.validation_share to stop without a look at test data"
        )
    have = {label: sorted({s["seed"] for s in of}) for label, of in groups(summaries).items()}
    if len(set(map(tuple, have.values()))) > 1:
        told = "; ".join(f"{label}: {', '.join(map(str, seeds))}" for label, seeds in have.items())
        found.append(f"the methods do not have the same seeds ({told}); their means are over different runs")
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
        *(_corruptions(summaries, which) for which in _CORRUPTED),
        *(matrix if svg["matrix"] else ()),
    )


def html_table(summaries: Sequence[Summary], spread: str | None = None) -> Html:
    """The comparison as an HTML table."""
    return table(summaries, spread).html("methods")


FIGURES = ("rounds", "shift", "change", "clients", "matrix", "rotations")
"""What can be drawn of a comparison."""


def figure(
    what: str, summaries: Sequence[Summary], curves: Mapping[Key, RoundRows], evaluations: Mapping[Key, Arrays]
) -> Figure | None:
    """One of `FIGURES`; None where these runs have nothing to draw in it."""
    from personafl.evaluation import figures  # slow to import

    by_label, shown = groups(summaries), Shown.of(summaries)
    if what == "matrix":
        several = len({seed for _, seed in evaluations}) > 1
        squares = {
            f"{label}, seed {seed}" if several else label: a
            for (label, seed), a in evaluations.items()
            if "client_accuracy" in a
        }
        return figures.matrix(squares, shown) if squares else None
    if what == "clients":
        found = {
            label: [v for s in seeds if (v := _of_clients(evaluations.get((label, s["seed"]), {}), shown)) is not None]
            for label, seeds in by_label.items()
        }
        boxes = {label: np.concatenate(v) for label, v in found.items() if v}
        return figures.clients(boxes, f"Clients' {shown.words} without shift", shown) if boxes else None
    across, title = _AXES[what]
    lines = {label: c for label, seeds in by_label.items() if (c := _curve(what, seeds, curves)) is not None}
    dashed = {n: c for n, s in by_label.items() if what == "shift" and (c := _curve("expected", s, curves)) is not None}
    title += " (dashed: expected over all donors)" if dashed else ""
    title = title.format(shown.title)
    return figures.curves(lines, across, title, shown, dashed, among=list(by_label)) if lines else None


def _of_clients(found: Arrays, shown: Shown) -> NDArray[np.float64] | None:
    """Each client's number on its own test set; None where scores are not there, or are of a metric of one's own."""
    if "scores" not in found:
        return None
    if found["scores"].ndim == 1:
        return final.own_accuracy(found, None)
    known = (of_task.get(shown.name) for of_task in METRICS.values())
    metric = next((m for m in known if m is not None and m.reduce is not None), None)
    return None if metric is None else final.own_accuracy(found, metric)


_AXES = {
    "rounds": ("round", "{} without shift, over rounds"),
    "shift": ("degree of shift, %", "{} over the degree of shift"),
    "change": ("input", "{} along a stream: own data, another's, own again"),
    "rotations": ("rotation, degrees", "{} on turned images"),
}


def _curve(what: str, seeds: Sequence[Summary], curves: Mapping[Key, RoundRows]) -> Curve | None:
    """What the seeds of a method give for an axis, None where one of them has nothing."""
    from personafl.evaluation.figures import Curve  # slow to import

    if what == "rounds":
        return _over_rounds(seeds, curves)
    robust = [s.get("robustness", {}) for s in seeds]
    if what == "change":
        along = [stream_change.smoothed(r["change"]) for r in robust if "change" in r]
        return Curve.over_seeds(along) if len(along) == len(seeds) else None
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
    cells, differ = _in_common(summaries, which)
    severities = {kind: [s for k, s in cells if k == kind] for kind, _ in cells}
    rows = {k: [mean(by[k][s] for s in of) for by in found.values()] for k, of in severities.items()}
    rows["mean"] = [mean(by[k][s] for k, s in cells) for by in found.values()] if cells else []
    out = [element("h2", f"Corrupted images{_CORRUPTED[which]}")]
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
