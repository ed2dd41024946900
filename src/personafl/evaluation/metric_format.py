"""How the numbers of a metric are written and drawn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from personafl.core.types import Summary
from personafl.evaluation.metrics import PERCENT


@dataclass(frozen=True)
class Shown:
    """How the numbers of a metric are written."""

    name: str = "accuracy"
    better: str = "higher"

    @classmethod
    def of(cls, summaries: Sequence[Summary]) -> Shown:
        """The metric of these runs."""
        return next((cls(m["name"], m["better"]) for s in summaries if (m := s.get("metric"))), cls())

    @property
    def percent(self) -> bool:
        return self.name in PERCENT

    @property
    def words(self) -> str:
        return self.name.rpartition(":")[2].replace("_", " ")

    @property
    def axis(self) -> str:
        return f"{self.words}, %" if self.percent else f"{self.words} ({self.better} is better)"

    @property
    def title(self) -> str:
        return self.words[:1].upper() + self.words[1:]

    @property
    def heading(self) -> str:
        """What the numbers of a table are."""
        if self.name == "accuracy":
            return "Accuracies in %"
        return f"{self.title}{' in %' if self.percent else ''} ({self.better} is better)"

    def scaled(self, value: float) -> float:
        return 100 * value if self.percent else value

    def number(self, value: float) -> str:
        return f"{100 * value:.1f}" if self.percent else f"{value:.4g}"

    def target(self, value: float) -> str:
        """A number that a user gave, with all of its digits."""
        return f"{self.words} {self.scaled(value):.6g}{' %' if self.percent else ''}"

    def text(self, value: float) -> str:
        """A number by itself, as while a run goes on."""
        return f"{self.words} {self.number(value)}{' %' if self.percent else ''}"


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of two values or more; NaN where one is not finite, as of a model that diverged."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
