"""Pools in which clients vanish or come late, around a pool of clients that are there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.faults import Faults
from personafl.engine import admission, cost
from personafl.engine.accounting import Refused, Totals
from personafl.engine.admission import Update
from personafl.engine.late_results import LateResults
from personafl.engine.server_round import ClientPool, ServerRound
from personafl.engine.stage_results import StackResult, StageReport
from personafl.simulation.placement import Placement
from personafl.storage.store import Store


class SlowPool(ClientPool, Protocol):
    """A pool in which results can come after the end of their stage."""

    def present(self, stage: ServerRound, ids: Tensor) -> Tensor:
        """Return those of these clients that are there for the stage."""
        ...

    def late_results(self) -> LateResults | None:
        """Return the results that come a stage later, of all clients; None where there are none."""
        ...


def split_late_results(
    late: LateResults | None, stage: ServerRound, sizes: list[int]
) -> tuple[LateResults | None, list[Refused]]:
    """Split the late results of the stage before into those that can be used in this one and those that cannot.

    Args:
        late: The results.
        stage: The stage in which they come.
        sizes: How many examples each of their clients trains on.
    """
    if late is None:
        return None, []
    if not stage.rnd.stage.up or late.phase != stage.rnd.phase:
        why = f"a late update of phase {late.phase} in phase {stage.rnd.phase}"
        return None, [Refused(c, why) for c in late.ids.tolist()]
    taken, refused = [], []
    for row, client in enumerate(late.ids.tolist()):
        update = Update(client, late.stage, tree.row_of(late.upload, row), sizes[row])
        if why := admission.refusal(update, stage.schema, stage.place, sizes[row], oldest=late.stage):
            refused.append(Refused(client, f"late: {why}"))
        else:
            taken.append(row)
    return (late.rows(torch.tensor(taken)) if taken else None), refused


class LatePool:
    """A pool in which results of the stage before come as well."""

    def __init__(self, pool: SlowPool, late: LateResults, store: Store) -> None:
        """`late` are those of this pool's clients; what they keep goes to the store once they have come."""
        self.pool, self.late, self.store = pool, late, store

    def play(self, stage: ServerRound, ids: Tensor) -> Iterator[StackResult]:
        """Have these clients play a stage, then take what came late; see `ClientPool`."""
        yield from self.pool.play(stage, ids)
        if len(self.late.ids):
            self.store.scatter(self.late.ids, self.late.kept)
            yield StackResult(self.late.ids, self.late.upload, is_late=True)

    def present(self, stage: ServerRound, ids: Tensor) -> Tensor:
        return self.pool.present(stage, ids)

    def late_results(self) -> LateResults | None:
        return self.pool.late_results()

    def report(self) -> StageReport:
        return self.pool.report()


class FaultyPool:
    """A pool from which clients vanish, and in which some are still busy with the stage before.

    Args:
        pool: The clients that are there.
        faults: What goes wrong.
        seed: The seed of the run.
        stale: The clients whose results of the stage before come in this one: they were busy when it began.
        refused: Late results that cannot be used.
        placement: Which clients are whose; a rank knows the rows of its own clients alone.
    """

    def __init__(
        self,
        pool: SlowPool,
        faults: Faults,
        seed: int,
        stale: Tensor,
        refused: list[Refused],
        placement: Placement,
    ) -> None:
        self.pool, self.faults, self.seed, self.stale, self.refused = pool, faults, seed, stale, refused
        self.placement = placement
        self.counts: dict[str, int] = {}
        self.lost = Totals()

    def play(self, stage: ServerRound, ids: Tensor) -> Iterator[StackResult]:
        """Have those of these clients that are there play a stage; see `ClientPool`."""
        if stage.rnd.stage.up and self.faults.damage:
            _ = stage.schema  # found here, before stacks of clients are at work on threads
        there = self.present(stage, ids)
        if stage.rnd.stage.up and (self.faults.drop_rate or self.faults.straggler_ratio):
            busy, dropped = self._absent(stage, ids)
            late = self.faults.straggling(self.seed, stage.rnd.number, there)
            counts = {"dropped": dropped, "busy": busy, "late": late}
            self.counts = {k: int(v.sum()) for k, v in counts.items()} | {"stale": len(self.stale)}
            self._count_lost(stage, self.placement.mine(ids[dropped]))
        yield from self.pool.play(stage, there)

    def _absent(self, stage: ServerRound, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which of these clients are still busy with the stage before, and which vanish: `[C]` bool each."""
        busy = torch.isin(ids, self.stale)
        return busy, self.faults.dropped(self.seed, stage.rnd.number, ids) & ~busy

    def present(self, stage: ServerRound, ids: Tensor) -> Tensor:
        """Those of these clients that train in the stage."""
        if not stage.rnd.stage.up or not (self.faults.drop_rate or self.faults.straggler_ratio):
            return ids
        busy, dropped = self._absent(stage, ids)
        return ids[~busy & ~dropped]

    def _count_lost(self, stage: ServerRound, gone: Tensor) -> None:
        """Count what clients of this rank received that then vanished."""
        if gone.numel() and stage.rnd.stage.down:
            traffic = cost.traffic(stage.rnd.stage, stage.download(gone), {}, len(gone))
            self.lost.down_bytes += traffic.down
            self.lost.paper_bytes += traffic.paper

    def late_results(self) -> LateResults | None:
        return self.pool.late_results()

    def report(self) -> StageReport:
        found = self.pool.report()
        for lost in self.placement.ranks.gather(self.lost):
            found.totals.add(lost)
        late = [{"client": r.client, "why": r.why} for r in self.refused]
        found.columns = {**self.counts, "quarantined": by_client([*late, *found.columns["quarantined"]])}
        return found


def by_client(updates: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Updates that were not taken, in the order of their clients."""
    return sorted(updates, key=lambda update: int(update["client"]))
