"""A plot of which client holds how many examples of which class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from personafl.core.errors import UserError
from personafl.core.plain_text import IN_FIGURES

_BARS = 40  # clients that stacked bars can show
_COLOURS = 10  # classes that colours can tell apart
_NAMES = 40  # of classes that can be read beside the map


def plot_partition(
    counts: NDArray[np.int64], path: str | Path, title: str, class_names: Sequence[str] | None = None
) -> None:
    """Plot class counts `[clients, K]`: stacked bars where they can be told apart, else sizes above a map of shares."""
    from matplotlib import rc_context  # slow to import

    with rc_context(IN_FIGURES):
        _plot(counts, path, title, class_names)


def _plot(counts: NDArray[np.int64], path: str | Path, title: str, class_names: Sequence[str] | None) -> None:
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    clients, classes = counts.shape
    bars = clients <= _BARS and classes <= _COLOURS
    figure = Figure(figsize=(max(6.0, min(0.3 * clients, 14)), 4 if bars else 6), layout="constrained")
    if bars:
        axes = figure.subplots()
        below = np.zeros(clients)
        for k in range(classes):
            axes.bar(
                range(clients), counts[:, k], bottom=below, label=class_names[k] if class_names else str(k), width=0.9
            )
            below += counts[:, k]
        axes.set(xlabel="client", ylabel="samples", title=title)
        axes.locator_params(axis="x", integer=True)
        axes.legend(title="class", loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    else:
        top, axes = figure.subplots(2, sharex=True, height_ratios=[1, 3])
        sizes = counts.sum(1)
        top.fill_between(np.arange(clients + 1) - 0.5, np.append(sizes, sizes[-1]), step="post", color="tab:blue")
        top.set(ylabel="samples", ylim=(0, None), title=title)
        shares = counts / sizes.clip(min=1)[:, None]
        scale = PowerNorm(0.5, vmin=0, vmax=shares.max())  # small shares are to be seen as well
        shown = axes.imshow(shares.T, aspect="auto", interpolation="nearest", cmap="Blues", norm=scale)
        axes.set(xlabel="client", ylabel="class", xlim=(-0.5, clients - 0.5))
        axes.locator_params(axis="both", integer=True)
        if class_names and classes <= _NAMES:
            axes.set_yticks(range(classes), class_names)
        figure.colorbar(shown, ax=axes, label="share of the client's samples")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as e:  # matplotlib names the formats it knows
        raise UserError(f"{path}: {e}") from None
