"""The trials of a sweep: what each is judged by, which is chosen, and both as tables, a plot and files."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from personafl.config.recipe import SECTIONS
from personafl.core.display import Displayed
from personafl.core.plain_text import spreadsheet_row
from personafl.core.table import Table
from personafl.core.types import Better, Row, Summary
from personafl.evaluation.metric_format import Shown, deviation
from personafl.evaluation.rounds import better
from personafl.storage import files

Point = Mapping[str, str]
"""A value, as overrides have it, for each key."""


@dataclass(frozen=True)
class Trial:
    """A method with a point, and what came of it with each seed."""

    label: str
    number: int
    point: Point
    summaries: tuple[Summary, ...] = field(repr=False)

    @property
    def words(self) -> str:
        """Its settings in a line."""
        return ", ".join(f"{k}={v}" for k, v in self.point.items()) or "as it is"

    @property
    def scores(self) -> list[float]:
        """What each seed is judged by."""
        return [score(s) for s in self.summaries]

    @property
    def score(self) -> float:
        """The mean over seeds; not a number where a run diverged to none."""
        return statistics.fmean(self.scores)

    @property
    def diverged(self) -> bool:
        """Whether clients are left with models that are not finite."""
        return any(s.get("diverged", {}).get("final") for s in self.summaries) or math.isnan(self.score)

    def at(self, degree: float) -> float | None:
        """Accuracy at a degree of shift, the mean over seeds."""
        found = [s["shift"]["degrees"].get(str(degree)) for s in self.summaries if s["shift"]]
        return statistics.fmean(f["mean"] for f in found) if found and all(found) else None


def score(summary: Summary) -> float:
    """The mean over the degrees of shift, or over clients on their own data where there is none."""
    shift = summary["shift"]
    return float(shift["average"] if shift else summary["accuracy"]["personal"]["mean"])


@dataclass(frozen=True, repr=False)
class Sweep(Displayed):
    """The trials of every method, and what they chose."""

    trials: Mapping[str, Sequence[Trial]]  # by label
    folder: Path | None = None
    recipes: Mapping[str, str] = field(default_factory=dict)  # what was chosen, as TOML by the name of its file

    def _facts(self) -> dict[str, object]:
        return {label: t.words for label, t in self.best.items()}

    @property
    def shown(self) -> Shown:
        return Shown.of([s for found in self.trials.values() for t in found for s in t.summaries])

    @property
    def best(self) -> dict[str, Trial]:
        """The trial of each method with the best score, the first of equals; those that diverged come last."""
        return {label: self._first(found) for label, found in self.trials.items()}

    @property
    def at_equal_budget(self) -> dict[str, Trial]:
        """The same of methods with keys of their own, had those stayed at their first values: as many trials as all."""
        out = {}
        for label, found in self.trials.items():
            own = {k: v for k, v in found[0].point.items() if k.partition(".")[0] not in SECTIONS}
            mine = [t for t in found if own.items() <= t.point.items()]
            common = {tuple(v for k, v in t.point.items() if k not in own) for t in found}
            if own and len(mine) == len(common):  # else points were drawn, and there is no such grid
                out[label] = self._first(mine)
        return out

    def _first(self, found: Sequence[Trial]) -> Trial:
        which: Better = "higher" if self.shown.better == "higher" else "lower"
        best = found[0]
        for t in found[1:]:
            ahead = better(t.score, best.score, which)
            if (best.diverged and not t.diverged) or (best.diverged == t.diverged and ahead):
                best = t
        return best

    def rows(self) -> list[Row]:
        """A row for every trial."""
        keys = dict.fromkeys(k for found in self.trials.values() for t in found for k in t.point)
        best = self.best
        return [
            {"label": t.label, "trial": t.number}
            | {k: t.point.get(k, "") for k in keys}
            | {"score": t.score, "std": _spread(t.scores), "seeds": len(t.scores), "own": _own(t)}
            | {"shift_1": t.at(1.0), "diverged": t.diverged, "chosen": t is best[t.label]}
            for found in self.trials.values()
            for t in found
        ]

    def markdown(self) -> str:
        """A table of what was chosen, and one of all trials."""
        shown, best = self.shown, self.best
        head = ["method", "trials", "chosen", "score", "own data", "full shift"]
        chosen = []
        for label, t in best.items():
            numbers = [_number(t.scores, shown), *_sides(t, shown)]
            chosen.append([label, str(len(self.trials[label])), t.words, *numbers])
            if (other := self.at_equal_budget.get(label)) is not None and other is not t:
                numbers = [_number(other.scores, shown), *_sides(other, shown)]
                chosen.append([f"{label}, without keys of its own", "", other.words, *numbers])
        every = [
            [t.label, str(t.number), t.words, _number(t.scores, shown), *_sides(t, shown), _alert(t)]
            for found in self.trials.values()
            for t in found
        ]
        seeds = len(next(iter(best.values())).summaries)
        note = (
            f"{shown.heading}, on validation data. Score: the mean over the degrees of shift, or over clients' own "
            f"data where there is none; mean of {seeds} seed{'s' if seeds > 1 else ''}"
            f"{' ± their standard deviation' if seeds > 1 else ''}."
        )
        parts = [
            "# Sweep",
            note,
            Table(head, chosen).markdown(),
            "## All trials",
            Table([*head[:1], "trial", *head[2:], ""], every).markdown(),
        ]
        return "\n\n".join(parts) + "\n"

    def figure(self) -> Any:
        """For every key, the best score at each of its values; without any, that of each method."""
        from personafl.evaluation import figures

        keys = list(dict.fromkeys(k for found in self.trials.values() for t in found for k in t.point))
        if not keys:
            return figures.sweep({"method": {"": [(n, t.score) for n, t in self.best.items()]}}, self.shown)
        lines: dict[str, dict[str, list[tuple[str, float]]]] = {k: {} for k in keys}
        for key in keys:
            for label, found in self.trials.items():
                values = dict.fromkeys(t.point[key] for t in found if key in t.point)
                lines[key][label] = [
                    (v, self._first([t for t in found if t.point.get(key) == v]).score) for v in values
                ]
        return figures.sweep({k: {n: at for n, at in of.items() if at} for k, of in lines.items()}, self.shown)


# Files and tables


def write(ended: Sweep, folder: Path) -> None:
    """All of a sweep but its trials, as files."""
    rows, table = ended.rows(), io.StringIO()
    writer = csv.DictWriter(table, spreadsheet_row(rows[0]).keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(spreadsheet_row, rows))
    files.write(folder / "trials.csv", table.getvalue())
    files.write(folder / "sweep.md", ended.markdown())
    picture = io.BytesIO()
    ended.figure().savefig(picture, format="png", dpi=120, metadata={"Software": None})
    files.write(folder / "sweep.png", picture.getvalue())
    for name, text in ended.recipes.items():
        files.write(folder / name, text)


def _own(t: Trial) -> float:
    return statistics.fmean(s["accuracy"]["personal"]["mean"] for s in t.summaries)


def _spread(values: Sequence[float]) -> float:
    return deviation(values) if len(values) > 1 else 0.0


def _number(values: Sequence[float], shown: Shown) -> str:
    text = shown.number(statistics.fmean(values))
    return f"{text} ± {shown.number(_spread(values))}" if len(values) > 1 else text


def _sides(t: Trial, shown: Shown) -> list[str]:
    shifted = t.at(1.0)
    return [shown.number(_own(t)), "" if shifted is None else shown.number(shifted)]


def _alert(t: Trial) -> str:
    return "diverged" if t.diverged else ""
