"""What a round adds up to: the stacks of its cohort, what they cost, and the sums the server works with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from personafl.core import cost
from personafl.core.local import Work
from personafl.core.types import Params, Payload
from personafl.sim.late_results import LateResults


@dataclass
class Totals:
    """What a run has cost so far, over all clients."""

    up_bytes: int = 0
    down_bytes: int = 0
    paper_bytes: float = 0.0
    flops: float = 0.0
    dense_flops: float = 0.0


class Refused(NamedTuple):
    """A client with an update that is not taken."""

    client: int
    why: str
    diverged: bool = False  # whether training itself gave numbers that are not finite
    counts: bool = False  # whether another update of it was taken


@dataclass(frozen=True)
class Stack:
    """What a stack of clients came to in its part of a round."""

    ids: Tensor
    traffic: cost.Traffic
    work: Work
    senders: Tensor  # the clients whose update the server takes
    upload: Payload  # theirs
    refused: list[Refused]
    late: LateResults | None  # what comes a stage later
    before: list[Tensor]  # scores of what the clients came with, where they are judged right after training
    trained: Params  # and what they then predict with


@dataclass
class Spent:
    """What the stacks of a round cost so far."""

    totals: Totals
    losses: Tensor  # [clients of the round], summed over steps, on the device
    steps: Tensor  # [clients of the round]
    clients: int = 0
    refused: list[Refused] = field(default_factory=list)
    late: list[LateResults] = field(default_factory=list)

    def add(self, stack: Stack) -> None:
        self.totals.up_bytes += stack.traffic.up
        self.totals.down_bytes += stack.traffic.down
        self.totals.paper_bytes += stack.traffic.paper
        self.totals.flops += float(stack.work.flops.sum())
        self.totals.dense_flops += float(stack.work.dense_flops.sum())
        here = slice(self.clients, self.clients + len(stack.ids))
        self.losses[here], self.steps[here] = stack.work.loss, stack.work.steps
        self.clients = here.stop
        self.refused += stack.refused
        self.late += [] if stack.late is None else [stack.late]

    def means(self) -> Tensor:
        """The mean loss of each client that trained."""
        return (self.losses.cpu() / self.steps)[self.steps > 0]


def finite_mean(losses: Tensor) -> float | None:
    """The mean over clients that trained and whose loss is still finite; None where there are none."""
    mean = float(losses[losses.isfinite()].mean()) if len(losses) else math.nan
    return mean if math.isfinite(mean) else None
