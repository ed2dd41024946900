"""Drawings of a comparison; importing this imports matplotlib, which is slow."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Self

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from numpy.typing import NDArray

from personafl.core.plain_text import IN_FIGURES
from personafl.evaluation.metric_format import Shown, deviation

MARKERS = "os^v"  # ten colours each


class NotebookFigure(Figure):
    """A figure that a notebook shows, without pyplot."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png", dpi=80, metadata={"Software": None})
        return out.getvalue()


@dataclass(frozen=True)
class Curve:
    """Values of a method over something: the mean over seeds, and their deviation where there are several seeds.

    `final` is what came of a last stage that is no round: its name, the place it is drawn at, and the value.
    """

    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] = ()
    final: tuple[str, float, float] | None = None

    @classmethod
    def over_seeds(cls, seeds: Sequence[Mapping[float, float]], final: Sequence[tuple[str, float, float]] = ()) -> Self:
        """From each seed's values by place; places that not all seeds have are left out."""
        places = sorted(p for p in seeds[0] if all(p in s for s in seeds))
        values = [[s[p] for s in seeds] for p in places]
        spread = [deviation(v) for v in values] if len(seeds) > 1 else []
        last = (*final[0][:2], mean(v for *_, v in final)) if final else None
        return cls(places, [mean(v) for v in values], spread, last)


Curves = Mapping[str, Curve]
"""By label."""


@rc_context(IN_FIGURES)
def curves(
    lines: Curves,
    across: str,
    title: str,
    shown: Shown,
    dashed: Curves | None = None,
    among: Sequence[str] | None = None,
) -> Figure:
    """A metric over something: a line for each label, in a band where there are several seeds.

    A label has the colour and the marker of its place `among` all labels.
    """
    figure = NotebookFigure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    order, unit = list(among or lines), shown.scaled(1.0)
    for label, curve in lines.items():
        place = order.index(label)
        colour, marker = f"C{place % 10}", MARKERS[place // 10 % len(MARKERS)]
        y = unit * np.array(curve.y)
        axes.plot(curve.x, y, marker=marker, markersize=3, color=colour, label=label)
        if len(curve.spread):
            spread = unit * np.array(curve.spread)
            axes.fill_between(curve.x, y - spread, y + spread, color=colour, alpha=0.2, linewidth=0)
        if curve.final is not None:
            stage, x, value = curve.final
            axes.plot([*curve.x[-1:], x], [*y[-1:], unit * value], linestyle=":", color=colour)
            axes.plot([x], [unit * value], marker="D", linestyle="", color=colour, label=f"{label}, {stage} stage")
        if dashed and label in dashed:
            other = dashed[label]
            axes.plot(other.x, unit * np.array(other.y), linestyle="--", linewidth=1, color=colour)
    banded = any(len(c.spread) for c in lines.values())
    axes.set(xlabel=across, ylabel=shown.axis)
    axes.set_title(
        "\n".join([title, *(["mean of the seeds ± their standard deviation"] if banded else [])]), fontsize=11
    )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return figure


@rc_context(IN_FIGURES)
def clients(values: Mapping[str, NDArray[np.float64]], title: str, shown: Shown) -> Figure:
    """How numbers are spread over clients: a box for each label, from the worst client to the best."""
    figure = NotebookFigure(figsize=(max(4.0, 0.5 * len(values) + 2.4), 4), layout="constrained")
    axes = figure.subplots()
    axes.boxplot([shown.scaled(1.0) * v for v in values.values()], whis=(0, 100), widths=0.6)
    axes.set_xticks(range(1, len(values) + 1), list(values), rotation=30, ha="right", fontsize=8)
    axes.set(ylabel=shown.axis, title=title)
    axes.grid(axis="y", alpha=0.3)
    return figure


@rc_context(IN_FIGURES)
def matrix(squares: Mapping[str, Mapping[str, NDArray[Any]]], shown: Shown) -> Figure:
    """Every model on every client's test set, as pictures on one scale."""
    across = min(3, len(squares))
    down = -(-len(squares) // across)
    figure = NotebookFigure(figsize=(3.4 * across + 0.8, 3.2 * down), layout="constrained")
    every = [shown.scaled(1.0) * found["client_accuracy"] for found in squares.values()]
    low, high = (0, 100) if shown.percent else (min(e.min() for e in every), max(e.max() for e in every))
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for axes in grid[len(squares) :]:
        axes.set_axis_off()
    for axes, (name, found) in zip(grid, squares.items(), strict=False):
        square, ids = shown.scaled(1.0) * found["client_accuracy"], found["ids"]
        image = axes.imshow(square, vmin=low, vmax=high, aspect="auto", interpolation="nearest", cmap="viridis")
        axes.set_title(name, fontsize=9)
        axes.set(xlabel="test set of client", ylabel="model of client")
        axes.locator_params(axis="x", integer=True)
        axes.set_yticks(rows := np.unique(np.linspace(0, len(ids) - 1, 8).round().astype(int)), ids[rows])
    figure.colorbar(image, ax=grid.tolist(), label=shown.axis)
    return figure


@rc_context(IN_FIGURES)
def sweep(panels: Mapping[str, Mapping[str, Sequence[tuple[str, float]]]], shown: Shown) -> Figure:
    """For every key, each label's scores at its values, which stand side by side as they were given."""
    figure = NotebookFigure(figsize=(max(3.6 * len(panels), 4.8), 3.8), layout="constrained")
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    for axes, (key, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        values = list(dict.fromkeys(v for at in lines.values() for v, _ in at))
        for label, at in lines.items():
            place = labels.index(label)
            x, y = [values.index(v) for v, _ in at], [shown.scaled(s) for _, s in at]
            axes.plot(
                x, y, f"{MARKERS[place // 10 % len(MARKERS)]}-", color=f"C{place % 10}", markersize=4, label=label
            )
        axes.set_xticks(range(len(values)), values, fontsize=8, rotation=90 if len(values) > 6 else 0)
        axes.set(xlabel=key, ylabel=shown.axis)
        axes.grid(alpha=0.3)
    return _titled(figure, "best score on validation data at each value")


@rc_context(IN_FIGURES)
def beside_published(panels: Mapping[str, Mapping[str, Mapping[float, tuple[float | None, Any]]]], unit: str) -> Figure:
    """For every axis, lines of measured numbers by place, and dashed those published (with a `value`)."""
    figure = NotebookFigure(figsize=(max(6.4 * len(panels), 6.4), 4.6), layout="constrained")
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    for axes, (across, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for label, at in lines.items():
            place = labels.index(label)
            colour = colormaps["tab20"](place % 20) if len(labels) > 10 else f"C{place}"
            style = {"color": colour, "marker": MARKERS[place % len(MARKERS)], "markersize": 4}
            measured = [(x, y) for x, (y, _) in at.items() if y is not None]
            printed = [(x, p.value) for x, (_, p) in at.items() if p is not None]
            axes.plot(*zip(*measured, strict=True), **style, label=label) if measured else None
            axes.plot(*zip(*printed, strict=True), **style, linestyle="--", alpha=0.6) if printed else None
        axes.set(xlabel=across, ylabel=unit)
        axes.grid(alpha=0.3)
    known = any(p is not None for lines in panels.values() for at in lines.values() for _, p in at.values())
    return _titled(figure, "measured, and dashed what was published" if known else "measured")


@rc_context(IN_FIGURES)
def frontier(points: Mapping[str, tuple[float, float, float]], printed: Mapping[str, tuple[float, float]]) -> Figure:
    """Own accuracy against that at full shift, each method a disc as large as its traffic; crosses were published."""
    figure = NotebookFigure(figsize=(8.2, 6.4), layout="constrained")
    axes = figure.subplots()
    heights = _apart({name: (own, shifted) for name, (own, shifted, _) in points.items()})
    for place, (name, (own, shifted, traffic)) in enumerate(points.items()):
        colour = colormaps["tab20" if place < 20 else "tab20b"](place % 20)
        axes.scatter(own, shifted, s=12 + 1.2 * traffic, color=colour, alpha=0.85, label=name)
        axes.annotate(name, (own, heights[name]), fontsize=6.5, xytext=(7, -2), textcoords="offset points")
        if name in printed:
            axes.plot(*zip((own, shifted), printed[name], strict=True), color=colour, linewidth=0.6, linestyle=":")
            axes.scatter(*printed[name], marker="x", s=28, color=colour)
    axes.set(xlabel="accuracy on own data, %", ylabel="accuracy at full shift, %")
    left, right = axes.get_xlim()
    axes.set_xlim(left, right + 0.16 * (right - left))  # names are to the right of discs
    axes.grid(alpha=0.3)
    figure.suptitle("discs: measured, as large as their traffic; crosses: published", fontsize=11)
    return figure


def _apart(points: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Heights for names beside points, from the top: one that would lie over another goes below it."""
    xs, ys = zip(*points.values(), strict=True)
    wide, high = 0.25 * (max(xs) - min(xs)), 0.024 * (max(ys) - min(ys))
    placed: dict[str, float] = {}
    for name, (x, y) in sorted(points.items(), key=lambda of: -of[1][1]):
        beside = sorted((placed[n] for n in placed if abs(points[n][0] - x) < wide), reverse=True)
        for other in beside:
            if abs(other - y) < high:
                y = other - high
        placed[name] = y
    return placed


def _titled(figure: Figure, title: str) -> Figure:
    """With a title, and one legend for the lines of all panels."""
    figure.suptitle(title, fontsize=11)
    handles = {t: h for a in figure.axes for h, t in zip(*a.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


@rc_context(IN_FIGURES)
def similarity(squares: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """How alike the masks of each two clients are, a square for each name; the diagonal is left out."""
    figure = NotebookFigure(figsize=(4.4 * len(squares) + 1, 4.2), layout="constrained")
    values = [np.where(np.eye(len(s), dtype=bool), np.nan, np.array(s)) for s in squares.values()]
    low, high = min(np.nanmin(v) for v in values), max(np.nanmax(v) for v in values)
    grid = figure.subplots(1, len(squares), squeeze=False)[0]
    for axes, name, value in zip(grid, squares, values, strict=True):
        image = axes.imshow(value, vmin=low, vmax=high, interpolation="nearest", cmap="viridis")
        axes.set_title(name, fontsize=10)
        axes.set(xlabel="client", ylabel="client")
        axes.locator_params(integer=True)
    figure.colorbar(image, ax=grid.tolist(), label="share of equal mask entries")
    return figure
