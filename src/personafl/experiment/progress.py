"""How far a run has come, shown while it goes on: in a notebook, on a terminal, or as lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from personafl.core.html_elements import element, join_html
from personafl.core.plain_text import harmless
from personafl.core.types import Row
from personafl.evaluation.metric_format import Shown
from personafl.experiment.console import Console

Watch = Callable[[str, int, int, Row], None]
"""Told after every stage: label, seed, number of stages, and the row of metrics.jsonl with the metric it is in."""


@dataclass(frozen=True)
class Step:
    """A stage that is behind us, in words."""

    name: str  # the method, and the seed where there are several
    stage: str  # `round 3/80 (train)`, or `finetune stage` behind the last round
    score: str  # the last score; nothing before the first
    scored: bool  # whether it is of this stage
    done: int  # rounds, over all methods and seeds


class Display(Protocol):
    """What shows steps."""

    def start(self) -> None: ...

    def show(self, step: Step) -> None: ...

    def stop(self) -> None: ...


class ProgressDisplay:
    """Shows a run while it is inside: a `Watch` that is told of every stage."""

    def __init__(self, runs: int, seeds: int, rounds: int, *, quiet: bool | None = None) -> None:
        """`runs` methods and seeds of so many rounds. By default silent unless on a terminal or in a notebook."""
        self.rounds, self.several = rounds, seeds > 1
        self.begun: dict[tuple[str, int], None] = {}  # methods and seeds, in order
        self.score, self.done = "", 0
        self.display = _display(runs * rounds, quiet)

    def __enter__(self) -> Self:
        if self.display is not None:
            self.display.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.display is not None:
            self.display.stop()

    def __call__(self, label: str, seed: int, stages: int, row: Row) -> None:
        if self.display is None:
            return
        if (label, seed) not in self.begun:
            self.begun[label, seed] = None
            self.score = ""
        if scored := "personal" in row:
            self.score = _score(row)
        at = row["round"] + 1
        inside = at <= self.rounds
        stage = f"round {at}/{self.rounds} ({row['phase']})" if inside else f"{row['phase']} stage"
        name = f"{label}, seed {seed}" if self.several else label
        here = self.rounds if "stopped" in row else min(at, self.rounds)
        self.done = max(self.done, (len(self.begun) - 1) * self.rounds + here)
        self.display.show(Step(name, stage, self.score, scored, self.done))


def _score(row: Row) -> str:
    """The metric of a row, and what else is to be known about it."""
    text = Shown(**row["metric"]).text(row["personal"]["mean"])
    if broken := max(row.get("diverged", 0), row.get("nonfinite_models", 0)):
        text += f" ({broken} clients diverged)"
    if "stopped" not in row:
        return text
    diverged = row["stopped"] == "diverged"
    return f"{text} ({'stopped: everybody has diverged' if diverged else 'stopped by training.' + row['stopped']})"


def _display(total: int, quiet: bool | None) -> Display | None:
    console = Console()
    if quiet or (quiet is None and not (console.is_jupyter or console.is_terminal)):
        return None
    if console.is_jupyter:
        return _Notebook(total)
    return _Bar(console, total) if console.is_terminal else _Lines(console, total)


def _left(spent: float, done: int, total: int) -> str:
    """How long the rest will take if it goes on as it began; nothing before there is anything to go by."""
    seconds = spent * (total - done) / done if done else 0.0
    units = ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"))
    size, unit = next((u for u in units if seconds >= 2 * u[0]), units[-1])
    return f"about {seconds / size:.0f} {unit} left" if seconds else ""


class _Bar:
    """A bar on a terminal, with accuracy and time left."""

    PERIOD = 3600.0  # seconds that the time left goes by: two rounds have to be in it

    def __init__(self, console: Console, total: int) -> None:
        words = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[score]}", markup=False),
        )
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self.bar = Progress(*words, *times, console=console, speed_estimate_period=self.PERIOD)
        self.task = self.bar.add_task("starting", total=total, score="")

    def start(self) -> None:
        self.bar.start()

    def show(self, step: Step) -> None:
        words = harmless(f"{step.name}, {step.stage}")
        self.bar.update(self.task, completed=step.done, description=words, score=step.score)

    def stop(self) -> None:
        self.bar.stop()


class _Lines:
    """A line per evaluation, for files; and one after the first rounds where the rest takes more than a minute."""

    FIRST = 3  # rounds

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total, self.told = console, total, False

    def start(self) -> None:
        self.begun = time.monotonic()

    def show(self, step: Step) -> None:
        if step.scored:
            self.console.print(f"{step.name}, {step.stage}: {step.score}", soft_wrap=True)
        if not self.told and step.done >= self.FIRST:
            self.told, spent = True, time.monotonic() - self.begun
            if spent * (self.total - step.done) > 60 * step.done:
                line = f"{step.done} of {self.total} rounds in {spent:.0f} s, {_left(spent, step.done, self.total)}"
                self.console.print(line, soft_wrap=True)

    def stop(self) -> None:
        pass


class _Notebook:
    """A bar of HTML in the output of a cell, which needs no widgets; what is left of it at the end is a line."""

    EVERY = 0.2  # seconds between two updates, each of which is a message to the browser

    def __init__(self, total: int) -> None:
        self.total = total
        self.last: Step | None = None
        self.begun = self.shown = time.monotonic()

    def start(self) -> None:
        from IPython.display import display  # in a notebook it is there

        self.handle: Any = display(self._page("starting", 0), display_id=True)

    def show(self, step: Step) -> None:
        self.last, now = step, time.monotonic()
        if now - self.shown >= self.EVERY:
            self.shown = now
            self.handle.update(self._page(", ".join(filter(None, (step.name, step.stage, step.score))), step.done))

    def stop(self) -> None:
        done = 0 if self.last is None else self.last.done
        self.handle.update(self._page("", done))

    def _page(self, words: str, done: int) -> Any:
        from IPython.display import HTML

        spent = time.monotonic() - self.begun
        left = f", {_left(spent, done, self.total)}" if words and 0 < done < self.total else ""
        parts = [element("progress", value=str(done), max=str(self.total)), f" {words}, "] if words else []
        return HTML(join_html([*parts, f"{done} of {self.total} rounds in {spent:.0f} s{left}"]))
