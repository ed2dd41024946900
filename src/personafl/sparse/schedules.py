"""When masks change and by how much."""

from __future__ import annotations

import math


def due(rnd: int, interval: int) -> bool:
    """Whether a round (counted from 0) readjusts: the first one and every `interval`-th after it."""
    return rnd % interval == 0


def cosine(start: float, rnd: int, end: float) -> float:
    """The share to readjust, annealed from `start` to nothing at round `end`."""
    return start / 2 * (1 + math.cos(math.pi * rnd / end)) if rnd < end else 0.0
