"""The table of a comparison: a row for each method, with means and spreads over its seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from personafl.core.errors import UserError
from personafl.core.table import Table
from personafl.core.types import Summary
from personafl.evaluation.metric_format import Shown, deviation

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


def table(summaries: Sequence[Summary], spread: str | None = None, *, evaluated_model: bool = True) -> Table:
    """The comparison, with or without its last and longest column."""
    end = None if evaluated_model else -1
    return Table(columns(summaries)[:end], [row[:end] for row in rows(summaries, spread)], "lr")


def _cells(summaries: Sequence[Summary], spread: str | None) -> dict[str, Callable[[list[Summary]], str]]:
    """The columns: what each has of the seeds of a method. Newcomers and validation have one where there are any."""
    kind, shown = spread_of(summaries, spread), Shown.of(summaries)

    def cell(what: Callable[[Summary], Any]) -> Callable[[list[Summary]], str]:
        """Of a mean with its deviation over clients, or of a number."""

        def of(seeds: list[Summary]) -> str:
            found = [what(s) for s in seeds]
            return "–" if None in found else mean_with_spread(found, kind, shown)

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


def mean_with_spread(found: Sequence[Any], kind: str, shown: Shown) -> str:
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
    return f"{mean_with_spread([s['validation']['personal'] for s in seeds], kind, shown)} ({which})"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}" if value < 100 else f"{value:,.0f}"
