"""Plots of who holds what."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from personafl.data.partition_plot import plot_partition


@pytest.mark.parametrize(("clients", "classes"), [(20, 10), (100, 10), (500, 10), (3, 100)])
def test_every_federation_can_be_drawn(tmp_path: Path, clients: int, classes: int) -> None:
    counts = np.random.default_rng(0).integers(0, 9, (clients, classes))
    plot_partition(counts, tmp_path / "p.png", "title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"p\.xyz: Format 'xyz' is not supported"):
        plot_partition(counts, tmp_path / "p.xyz", "title")


@pytest.mark.parametrize("clients", [3, 100])
def test_classes_are_called_by_their_names(tmp_path: Path, clients: int) -> None:
    plot_partition(np.ones((clients, 2), np.int64), tmp_path / "p.svg", "title", ("walk", "run"))
    drawn = (tmp_path / "p.svg").read_text()
    assert "<!-- walk -->" in drawn and "<!-- run -->" in drawn  # a comment at each text that is drawn as paths
