"""The state of a run: all that a simulation carries from one stage to the next, but for the rows of its stores.

Random streams are keyed by seed, purpose, round and client, so none of them has a state. What a simulation was made of
(recipe, data, model, machine, plan) is the same on both sides of a checkpoint and no part of it either.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.types import Params, Row
from personafl.engine.accounting import Totals
from personafl.engine.late_results import LateResults


@dataclass
class RunState:
    """What a simulation is after some of its stages."""

    server: Params
    rounds: int  # of training; fewer than asked once it was stopped
    played: int = 0  # stages behind us
    totals: Totals = field(default_factory=Totals)
    rows: list[Row] = field(default_factory=list)  # one for each stage
    left: dict[int, float] = field(default_factory=dict)  # the score each client ended its last scored session with
    diverged: set[int] = field(default_factory=set)  # clients whose loss or evaluated model was not finite at some time
    trained_cohort: tuple[Tensor, Params] | None = None
    """The last cohort before aggregation, where that is scored: its clients, and the rows of those of this rank."""
    late: LateResults | None = None  # those of all ranks

    def copy(self) -> Self:
        """The state at this moment, for a stage that may have to be undone; rows are only added at its end."""
        return dataclasses.replace(
            self, totals=dataclasses.replace(self.totals), left=dict(self.left), diverged=set(self.diverged)
        )

    def packed(self) -> tuple[Row, Params]:
        """The same but for `rows` as what JSON takes and as named tensors on the host."""
        numbers: Row = {
            "rounds": self.rounds,
            "played": self.played,
            "totals": dataclasses.asdict(self.totals),
            "diverged": sorted(self.diverged),
        }
        tensors = tree.prefixed(self.server, "server")
        tensors["left/ids"] = torch.tensor(list(self.left), dtype=torch.int64)
        tensors["left/scores"] = torch.tensor(list(self.left.values()), dtype=torch.float64)
        if self.trained_cohort is not None:
            ids, models = self.trained_cohort
            tensors |= {"cohort/ids": ids} | tree.prefixed(models, "cohort/models")
        if self.late is not None:
            numbers["late"], late = self.late.packed()
            tensors |= tree.prefixed(late, "late")
        return numbers, {n: t.detach().cpu().contiguous() for n, t in tensors.items()}

    @classmethod
    def unpacked(cls, numbers: Row, tensors: Params, rows: list[Row], device: torch.device) -> Self:
        """The state that `packed` gave, after these rows."""
        cohort = tree.under(tensors, "cohort")
        scores = zip(tensors["left/ids"].tolist(), tensors["left/scores"].tolist(), strict=True)
        return cls(
            server=_placed(tree.under(tensors, "server"), device),
            rounds=numbers["rounds"],
            played=numbers["played"],
            totals=Totals(**numbers["totals"]),
            rows=rows,
            left=dict(scores),
            diverged=set(numbers["diverged"]),
            trained_cohort=(cohort["ids"], _placed(tree.under(cohort, "models"), device)) if cohort else None,
            late=LateResults.unpacked(numbers["late"], tree.under(tensors, "late"), device)
            if "late" in numbers
            else None,
        )


def _placed(tensors: Params, device: torch.device) -> Params:
    """On the device, each in memory of its own."""
    return {n: t.to(device) for n, t in tree.copied(tensors).items()}
