"""What a round adds up to: the stacks of its cohort, what they cost, and the sums the server works with."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from personafl.core import cost
from personafl.core.local import Work
from personafl.core.types import Params, Payload


@dataclass
class Totals:
    """What a run has cost so far, over all clients."""

    up_bytes: int = 0
    down_bytes: int = 0
    paper_bytes: float = 0.0
    flops: float = 0.0
    dense_flops: float = 0.0


@dataclass(frozen=True)
class Stack:
    """What a stack of clients came to in its part of a round."""

    ids: Tensor
    traffic: cost.Traffic
    work: Work
    upload: Payload
    before: list[Tensor]  # scores of what the clients came with, where they are judged right after training
    trained: Params  # and what they then predict with


@dataclass
class Spent:
    """What the stacks of a round cost so far."""

    ids: Tensor  # the clients of the round
    totals: Totals
    losses: Tensor  # [clients of the round], summed over steps, on the device
    steps: Tensor  # [clients of the round]
    clients: int = 0

    def add(self, stack: Stack) -> None:
        self.totals.up_bytes += stack.traffic.up
        self.totals.down_bytes += stack.traffic.down
        self.totals.paper_bytes += stack.traffic.paper
        self.totals.flops += float(stack.work.flops.sum())
        self.totals.dense_flops += float(stack.work.dense_flops.sum())
        here = slice(self.clients, self.clients + len(stack.ids))
        self.losses[here], self.steps[here] = stack.work.loss, stack.work.steps
        self.clients = here.stop

    def means(self) -> tuple[Tensor, Tensor]:
        """The clients that trained, and the mean loss of each."""
        trained = self.steps > 0
        return self.ids[trained], (self.losses.cpu() / self.steps)[trained]


def total(t: Tensor) -> Tensor:
    """The sum over a stack of clients for `add`: in float64, but for a lone client's term, which stays as it is."""
    if len(t) == 1:
        return t.squeeze(0)
    if t.is_cuda or t[0].numel() < 2**15:
        return t.sum(0, dtype=torch.float64)
    out = t[0].to(torch.float64, copy=True)
    for row in t[1:]:  # less than half the time, beyond the cache
        out.add_(row)
    return out


def add(sums: Params, more: Params) -> None:
    """Add those of one more stack, in float64."""
    for n, t in more.items():
        sums[n] = sums[n].add_(t) if n in sums else t.to(torch.float64, copy=True)


def finite_mean(losses: Tensor) -> float | None:
    """The mean over clients that trained and whose loss is still finite; None where there are none."""
    mean = float(losses[losses.isfinite()].mean()) if len(losses) else math.nan
    return mean if math.isfinite(mean) else None
