"""The figures of a comparison: which lines, boxes and squares the runs give; `figures.py` draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from personafl.core.types import Row, Summary
from personafl.evaluation import final, stream_change
from personafl.evaluation.comparison_table import groups
from personafl.evaluation.final import Arrays
from personafl.evaluation.metric_format import Shown
from personafl.evaluation.metrics import METRICS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from personafl.evaluation.figures import Curve

RoundRows = Sequence[Row]
"""Of metrics.jsonl."""

Key = tuple[str, int]
"""Label and seed."""

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
