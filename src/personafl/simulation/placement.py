"""Clients over ranks: who plays whom, and how what was found of each comes together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.types import Payload
from personafl.simulation.profile import NoClock
from personafl.simulation.ranks import SingleProcess, balanced
from personafl.storage.store import HOST, Store

T = TypeVar("T")


class Placement:
    """The rank of each client: always the same one where something is kept of clients, else dealt anew by work."""

    def __init__(
        self, ranks: SingleProcess, clock: NoClock, steps: Callable[[Tensor], Tensor], clients: int, *, owned: bool
    ) -> None:
        """`steps` are the minibatches of an epoch of these clients, which is what their work goes by."""
        self.ranks, self.clock, self.steps = ranks, clock, steps
        self.owners: Tensor | None = None  # the rank of each client
        if owned and ranks.size > 1:
            self.owners = balanced(steps(torch.arange(clients)), ranks.size)
        self._loads = torch.zeros(2, dtype=torch.float64)  # steps of the busiest rank and of the mean one, so far

    def places(self, ids: Tensor) -> Tensor:
        """The rank of each of these clients."""
        return balanced(self.steps(ids), self.ranks.size) if self.owners is None else self.owners[ids]

    def mine(self, ids: Tensor) -> Tensor:
        """Those of these clients that are this rank's, in the same order."""
        return ids if self.ranks.size == 1 else ids[self.places(ids) == self.ranks.rank]

    def together(self, ids: Tensor, found: list[T]) -> list[T]:
        """Something of each of these clients on every rank, from what each found of its own."""
        if self.ranks.size == 1:
            return found
        with self.clock("waiting"):
            parts = [iter(part) for part in self.ranks.gather(found)]
        return [next(parts[r]) for r in self.places(ids).tolist()]

    def stacked(self, ids: Tensor, senders: Tensor, mine: Payload, device: torch.device) -> tuple[Tensor, Payload]:
        """Those of a cohort whose payload there is, in its order, and their payloads as one stack.

        From this rank's `senders` with theirs, and those of the others.
        """
        if self.ranks.size == 1:
            return senders, mine
        with self.clock("waiting"):
            found = [part for part in self.ranks.gather((senders, tree.moved(mine, HOST))) if len(part[0])]
        row = {c: i for i, c in enumerate(c for part, _ in found for c in part.tolist())}
        came = torch.tensor([c for c in ids.tolist() if c in row], dtype=torch.int64)
        if not found:
            return came, {}
        order = torch.tensor([row[c] for c in came.tolist()])
        return came, tree.moved(tree.rows_of(tree.gathered(p for _, p in found), order), device)

    def weigh(self, ids: Tensor) -> None:
        """Note how the work of a cohort lies over the ranks."""
        if self.ranks.size > 1:
            held = torch.zeros(self.ranks.size, dtype=torch.float64)
            held.index_add_(0, self.places(ids), self.steps(ids).double())
            self._loads += torch.stack([held.max(), held.mean()])

    @property
    def balance(self) -> float:
        """How busy the ranks were beside the busiest of each round: 1 where all had as many steps."""
        return float(self._loads[1] / self._loads[0]) if self._loads[0] else 1.0

    def collect(self, *stores: Store) -> None:
        """Bring all rows to the first rank, some at a time."""
        if self.owners is None:
            return
        for store in stores:
            parts = store.parts() if self.ranks.rank else iter(())
            while any(self.ranks.gather((part := next(parts, None)) is not None)):
                sent = part and (part[0], {n: t.cpu() for n, t in part[1].items()})
                for came in filter(None, self.ranks.first(sent)):
                    store.scatter(*came)
