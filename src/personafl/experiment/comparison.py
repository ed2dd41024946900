"""Published and measured numbers side by side, and what that says of a paper's claims."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from personafl.config.recipe import Recipe
from personafl.core.types import Summary
from personafl.evaluation import comparison_table
from personafl.experiment import measures
from personafl.experiment.targets import Claim, Printed, Setting, Target

Summaries = Mapping[tuple[str, str], Sequence[Summary]]
"""Of each setting and label, one for every seed, in the order of the seeds."""
Status = Literal["holds", "does not hold", "undecided", "not run", "not judged"]
ROUNDING = 1e-9
FAR = 2.0  # points between a published and a measured accuracy that are worth a word


def interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of a mean over seeds; None for one seed."""
    return None if len(values) < 2 else comparison_table.interval(values)


@dataclass(frozen=True)
class Cell:
    """A number of a table: as printed, and as each seed has it."""

    printed: Printed | None
    values: tuple[float, ...]
    clients: float | None = None  # deviation over clients, mean over seeds

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def difference(self) -> float | None:
        """Measured less published."""
        return None if self.printed is None or self.mean is None else self.mean - self.printed.value

    @property
    def far(self) -> bool:
        """Whether an accuracy is further from the published one than that is worth a word."""
        known = self.difference is not None and self.printed is not None and self.printed.unit == "accuracy %"
        return known and abs(self.difference or 0.0) > FAR


@dataclass(frozen=True)
class Item:
    """One of the comparisons a claim consists of: by how much ours is ahead, in each seed."""

    setting: str
    ours: str
    other: str  # a label, a setting or a column; empty where a number is given
    ahead: tuple[float, ...]
    printed: float | None
    status: Status

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.ahead) if self.ahead else None


@dataclass(frozen=True)
class Verdict:
    """What the runs say of a claim."""

    claim: Claim
    items: tuple[Item, ...]
    rehearsed: bool = False  # then they say nothing

    @property
    def status(self) -> Status:
        found = {i.status for i in self.items}
        order: tuple[Status, ...] = ("does not hold", "not run", "undecided", "holds")
        status: Status = next((s for s in order if s in found), "not run")
        return "not judged" if self.rehearsed and status != "not run" else status


@dataclass(frozen=True)
class Comparison:
    """A target's published numbers and those of its runs."""

    target: Target
    summaries: Summaries
    rehearsal: bool = False

    @cached_property
    def printed(self) -> Mapping[tuple[str, str, str], Printed]:
        return self.target.printed()

    @cached_property
    def recipes(self) -> Mapping[str, Recipe]:
        """By setting, that of the first method."""
        first = next(iter(self.target.methods))
        return {s.name: self.target.recipe_of(s, first) for s in self.target.settings}

    def rows(self, setting: Setting) -> list[str]:
        """Labels that ran in a setting, and the names that stand for the best of several."""
        ran = [label for label in self.target.methods if (setting.name, label) in self.summaries]
        return [*ran, *(n for n, of in self.target.best.items() if set(of) & set(ran))]

    def cell(self, setting: str, row: str, column: str) -> Cell:
        printed = self.printed.get((setting, row, column))
        if row in self.target.best:
            found = [self._values(setting, label, column) for label in self.target.best[row]]
            return Cell(printed, max(found, key=statistics.fmean) if all(found) else ())
        return Cell(printed, self._values(setting, row, column), self._clients(setting, row, column))

    def cells(self) -> Iterator[tuple[str, str, str, Cell]]:
        for setting in self.target.settings:
            for row in self.rows(setting):
                for column in self.target.columns:
                    yield setting.name, row, column, self.cell(setting.name, row, column)

    def verdicts(self) -> list[Verdict]:
        return [Verdict(claim, tuple(self._items(claim)), self.rehearsal) for claim in self.target.claims]

    def _values(self, setting: str, label: str, column: str) -> tuple[float, ...]:
        own = self.summaries.get((setting, label), ())
        base = self.summaries.get((setting, measures.REFERENCE), ())
        recipe = self.recipes[setting]
        groups = recipe.data.partition_settings.get("groups", ())
        found = []
        for place, summary in enumerate(own):
            beside = base[place] if place < len(base) else None
            asked = recipe.evaluation
            value = measures.measure(column, summary, beside, groups, asked.degrees, expected=asked.matrix)
            if value is None:
                return ()
            found.append(value)
        return tuple(found)

    def _clients(self, setting: str, label: str, column: str) -> float | None:
        found = [measures.spread(column, s) for s in self.summaries.get((setting, label), ())]
        known = [f for f in found if f is not None]
        return statistics.fmean(known) if known else None

    def _items(self, claim: Claim) -> Iterator[Item]:
        for setting in claim.settings or [s.name for s in self.target.settings]:
            for label in claim.ours:
                for column in claim.columns or (claim.column,):
                    item = self._item(replace(claim, column=column), setting, label)
                    yield replace(item, setting=f"{setting}, {column}") if claim.columns else item

    def _item(self, claim: Claim, setting: str, label: str) -> Item:
        own = self.cell(setting, label, claim.column)
        if claim.near is not None:
            ahead = tuple(v - claim.near for v in own.values)
            printed = None if own.printed is None else own.printed.value - claim.near
            return Item(setting, label, "", ahead, printed, _near(ahead, claim.within))
        if (bound := claim.least if claim.most is None else claim.most) is not None:
            away = tuple(v - bound for v in own.values)
            printed = None if own.printed is None else own.printed.value - bound
            status = self._kept(setting, label, away if claim.most is None else tuple(-a for a in away))
            return Item(setting, label, "", away, printed, status)
        rows = [r for row in claim.than or (label,) for r in self.target.best.get(row, (row,))]
        others = {
            claim.against or claim.than_column or row: self.cell(
                claim.against or setting, row, claim.than_column or claim.column
            )
            for row in rows
        }
        known = {n: c for n, c in others.items() if len(c.values) == len(own.values) and c.values}
        stands = [self.cell(setting, row, claim.column).printed for row in claim.than if row in self.target.best]
        printed = _ahead(own.printed, [*stands, *(c.printed for c in others.values())])
        if not own.values or len(known) < len(others):
            return Item(setting, label, "", (), printed, "not run")
        by = {n: tuple(a - b for a, b in zip(own.values, c.values, strict=True)) for n, c in known.items()}
        found = {_status(ahead, claim.margin) for ahead in by.values()}
        order: tuple[Status, ...] = ("does not hold", "undecided", "holds")
        status = next(s for s in order if s in found)  # ahead of every one of them, or not
        if status == "holds" and self._diverged(setting, [label, *rows]):
            status = "undecided"
        deciding = [n for n in by if _status(by[n], claim.margin) == status] or list(by)
        nearest = min(deciding, key=lambda n: statistics.fmean(by[n]))
        return Item(setting, label, nearest, by[nearest], printed, status)

    def _kept(self, setting: str, label: str, ahead: Sequence[float]) -> Status:
        """Whether a bound is kept, by the interval over seeds; undecided where models diverged."""
        if not ahead:
            return "not run"
        status = _status(ahead, -ROUNDING)
        return "undecided" if status == "holds" and self.diverged(setting, label) else status

    def _diverged(self, setting: str, labels: Sequence[str]) -> bool:
        return any(self.diverged(setting, label) for label in labels)

    def diverged(self, setting: str, label: str) -> bool:
        """Whether clients were left with models that are not finite, in any seed."""
        return any(s.get("diverged", {}).get("final") for s in self.summaries.get((setting, label), ()))


def _ahead(own: Printed | None, others: Sequence[Printed | None]) -> float | None:
    known = [o.value for o in others if o is not None]
    return None if own is None or not known else own.value - max(known)


def _status(ahead: Sequence[float], margin: float) -> Status:
    """By the interval over seeds; with one seed by its number."""
    mean, half = statistics.fmean(ahead), interval(ahead) or 0.0
    if mean - half > margin:
        return "holds"
    return "does not hold" if mean + half <= margin else "undecided"


def _near(away: Sequence[float], within: float) -> Status:
    if not away:
        return "not run"
    return "holds" if abs(statistics.fmean(away)) <= within else "does not hold"
