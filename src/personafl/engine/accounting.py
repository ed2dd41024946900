"""What a stage and a run cost: bytes, FLOP, losses, and updates that are not taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from personafl.engine import cost
from personafl.engine.late_results import LateResults
from personafl.engine.local import Work


@dataclass
class Totals:
    """What a run has cost so far, over all clients."""

    up_bytes: int = 0
    down_bytes: int = 0
    paper_bytes: float = 0.0
    flops: float = 0.0
    dense_flops: float = 0.0

    def add(self, more: Totals) -> None:
        self.up_bytes += more.up_bytes
        self.down_bytes += more.down_bytes
        self.paper_bytes += more.paper_bytes
        self.flops += more.flops
        self.dense_flops += more.dense_flops


class Refused(NamedTuple):
    """A client with an update that is not taken."""

    client: int
    why: str
    diverged: bool = False  # whether training itself gave numbers that are not finite
    counts: bool = False  # whether another update of it was taken


@dataclass
class StackCost:
    """What a stage cost a stack of clients, and what is not taken of what they sent."""

    clients: int
    traffic: cost.Traffic
    work: Work
    refused: list[Refused]
    late: LateResults | None = None  # what comes a stage later


@dataclass
class Spent:
    """What the stacks of a stage cost so far."""

    clients: int = 0
    totals: Totals = field(default_factory=Totals)
    losses: list[Tensor] = field(default_factory=list)  # of each stack's clients, summed over steps, on the device
    steps: list[Tensor] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    late: list[LateResults] = field(default_factory=list)

    def add(self, stack: StackCost) -> None:
        """Add what one more stack cost."""
        self.clients += stack.clients
        self.totals.up_bytes += stack.traffic.up
        self.totals.down_bytes += stack.traffic.down
        self.totals.paper_bytes += stack.traffic.paper
        self.totals.flops += float(stack.work.flops.sum())
        self.totals.dense_flops += float(stack.work.dense_flops.sum())
        self.losses.append(stack.work.loss)
        self.steps.append(stack.work.steps)
        self.refused += stack.refused
        self.late += [] if stack.late is None else [stack.late]

    def means(self) -> list[float]:
        """The mean loss of each client that trained."""
        if not self.losses:
            return []
        joined = (held[0] if len(held) == 1 else torch.cat(held) for held in (self.losses, self.steps))
        losses, steps = (t.tolist() for t in joined)
        return [loss / count for loss, count in zip(losses, steps, strict=True) if count]


def finite_mean(losses: Sequence[float]) -> float | None:
    """The mean over clients that trained and whose loss is still finite; None where there are none."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    try:
        return math.fsum(loss / len(finite) for loss in finite) if finite else None
    except OverflowError:  # by rounding, of the largest there are
        return None
