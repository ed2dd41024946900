"""Drawings of a comparison; importing this imports matplotlib, which is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

Lines = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Places and values by name."""


def curves(lines: Lines, across: str, title: str, dashed: Lines | None = None) -> Figure:
    """Accuracies over something, a line each."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for name, (x, y) in lines.items():
        (line,) = axes.plot(x, [100 * v for v in y], marker="o", markersize=3, label=name)
        if name in (dashed or {}):
            x, y = (dashed or {})[name]
            axes.plot(x, [100 * v for v in y], linestyle="--", linewidth=1, color=line.get_color())
    axes.set(xlabel=across, ylabel="accuracy, %", title=title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return figure


def matrix(squares: Mapping[str, Mapping[str, NDArray[Any]]]) -> Figure:
    """Every model on every client's test set, as pictures on one scale."""
    across = min(3, len(squares))
    down = -(-len(squares) // across)
    figure = Figure(figsize=(3.4 * across + 0.8, 3.2 * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for axes in grid[len(squares) :]:
        axes.set_axis_off()
    for axes, (name, found) in zip(grid, squares.items(), strict=False):
        square, ids = 100 * found["client_accuracy"], found["ids"]
        image = axes.imshow(square, vmin=0, vmax=100, aspect="auto", interpolation="nearest", cmap="viridis")
        axes.set_title(name, fontsize=9)
        axes.set(xlabel="test set of client", ylabel="model of client")
        axes.locator_params(axis="x", integer=True)
        axes.set_yticks(rows := np.unique(np.linspace(0, len(ids) - 1, 8).round().astype(int)), ids[rows])
    figure.colorbar(image, ax=grid.tolist(), label="accuracy, %")
    return figure
