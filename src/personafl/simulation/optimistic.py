"""Stages that are played before anybody has looked whether all numbers are finite.

To look is to wait for the device in the middle of a stage. On a GPU a stage is therefore played optimistically:
finiteness is checked after the stage, and where a number is not finite the stage is undone and played again with
checks where the numbers come up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from personafl.core import hook_checks, tree
from personafl.core.types import Params, Payload
from personafl.engine.admission import UncheckedNumbers
from personafl.engine.aggregation import aggregated, summed
from personafl.engine.server_round import ClientRecords, ServerRound


class OptimisticRound(ServerRound):
    """A stage whose numbers are checked at its end, and which can be undone."""

    unchecked: UncheckedNumbers
    placeholders: frozenset[str] | None = None
    """Tensors of the server's state that hold no numbers yet; found anew after a stage that was undone."""

    def begin(self, placeholders: frozenset[str] | None) -> None:
        """Begin to note what is to be checked and undone."""
        self.unchecked, self.placeholders = UncheckedNumbers(), placeholders
        self._former: list[tuple[ClientRecords, Tensor, Params]] = []

    def write(self, records: ClientRecords, ids: Tensor, rows: Params, former: Params) -> None:
        self._former.append((records, ids, former))
        records.scatter(ids, rows)

    def not_finite(self, loss: Tensor, upload: Payload, kept: Params) -> dict[int, str]:
        self.unchecked.add([*tree.values(upload).values(), *kept.values()])  # losses are checked by themselves
        return {}

    def _sum(self, known: Params, upload: Payload, examples: Tensor) -> tuple[Params, Params]:
        return summed(self.algorithm, self.server, known, upload, examples, self.rnd, optimistic=True)

    def _next_server(self) -> tuple[Params, str]:
        if not self.sums:
            return super()._next_server()
        if self.placeholders is None:
            self.placeholders = hook_checks.placeholders(self.server)
        new = aggregated(self.algorithm, self.server, self.sums, self.rnd)
        self.unchecked.add(hook_checks.numbers_to_check(self.server, new, self.placeholders))
        self.unchecked.reduce()
        return new, ""

    def check(self, losses: Iterable[float]) -> None:
        """Raise ArithmeticError where a number of the stage is not finite."""
        if not (all(map(math.isfinite, losses)) and self.unchecked.are_finite()):
            raise ArithmeticError("not all numbers are finite")

    def undo(self) -> None:
        """Bring the rows of clients back that were written in the stage."""
        for records, ids, rows in reversed(self._former):
            records.scatter(ids, rows)
