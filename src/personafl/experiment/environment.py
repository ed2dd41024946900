"""Where a run is played, and what a result says about that place."""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Any

import torch

from personafl.simulation.simulator import Simulation
from personafl.version import __version__


def environment(sim: Simulation) -> dict[str, Any]:
    """Where a result was made."""
    gpu = sim.device.type == "cuda"
    return {
        "device": str(sim.device),
        "hardware": torch.cuda.get_device_name(sim.device) if gpu else f"{cpu()}, {sim.threads} threads",
        "threads": sim.threads,
        "precision": "float32" if sim.training.precision == "tf32" and not gpu else sim.training.precision,
        "execution": str(sim.model.execution),
        "torch": torch.__version__,
        "version": __version__,
        "commit": _commit(),
    }


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@functools.cache
def _commit() -> str | None:
    """The commit this code stood at when it was first asked for, if it runs from a checkout."""
    git = Path(__file__).parents[3] / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        return (git / head[5:]).read_text().strip() if head.startswith("ref: ") else head
    except OSError:
        return None
