"""A pool whose clients are spread over the processes (ranks) of a run."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.types import Params, Payload
from personafl.engine.accounting import Totals
from personafl.engine.aggregation import add
from personafl.engine.late_results import LateResults, joined_results
from personafl.engine.server_round import ServerRound
from personafl.engine.stage_results import StackResult, StageReport
from personafl.simulation.faulty_pool import SlowPool, by_client
from personafl.simulation.placement import Placement
from personafl.storage.store import HOST


class RankPool:
    """Plays a stage with the clients of every rank: each rank plays its own, and what they send comes together."""

    def __init__(self, pool: SlowPool, placement: Placement, stale: Tensor, device: torch.device) -> None:
        """Make a pool for one stage.

        Args:
            pool: The clients of this rank.
            placement: Which clients are whose.
            stale: The clients of all ranks whose results of the stage before come in this one.
            device: Where the server's tensors are.
        """
        self.pool, self.placement, self.stale, self.device = pool, placement, stale, device

    def play(self, stage: ServerRound, ids: Tensor) -> Iterator[StackResult]:
        """Have these clients play a stage; see `ClientPool`."""
        self.placement.weigh(ids)
        sums: Params = {}
        uploads: dict[bool, list[StackResult]] = {False: [], True: []}
        for result in self.pool.play(stage, self.placement.mine(ids)):
            if result.senders.numel() and stage.takes_updates and not result.is_reduced:
                if stage.algorithm.needs_uploads():
                    uploads[result.is_late] += [StackResult(result.senders, result.upload)] if result.upload else []
                else:
                    with stage.clock("aggregation"):
                        result.sums = stage.reduce(result.senders, result.upload)
            if result.sums:
                with stage.clock("aggregation"):
                    add(sums, result.sums)
            result.sums, result.upload, result.is_reduced = {}, {}, True
            yield result
            del result
        if not stage.takes_updates:
            return
        if stage.algorithm.needs_uploads():
            for order, parts in ((ids, uploads[False]), (self.stale, uploads[True])):
                senders, upload = self._gather(order, parts)
                if len(senders):
                    yield StackResult(senders, upload)
        else:
            with stage.clock("aggregation"), stage.clock("waiting"):
                sums = self.placement.ranks.sum(sums)
            yield StackResult(sums=sums, is_reduced=True)

    def _gather(self, order: Tensor, parts: list[StackResult]) -> tuple[Tensor, Payload]:
        senders = torch.cat([p.senders for p in parts]) if parts else order[:0]
        upload = tree.gathered(p.upload for p in parts) if parts else {}
        return self.placement.stacked(order, senders, upload, self.device)

    def present(self, stage: ServerRound, ids: Tensor) -> Tensor:
        """Those of these clients that are there."""
        return self.pool.present(stage, ids)

    def late_results(self) -> LateResults | None:
        """The results of all ranks that come a stage later."""
        mine = self.pool.late_results()
        found = self.placement.ranks.gather(None if mine is None else mine.moved(HOST))
        return joined_results([part for part in found if part is not None])

    def report(self) -> StageReport:
        """What the stage came to over all ranks."""
        with self.placement.clock("waiting"):
            parts = self.placement.ranks.gather(self.pool.report())
        totals = Totals()
        for part in parts:
            totals.add(part.totals)
        return StageReport(
            sum(part.clients for part in parts),
            totals,
            [loss for part in parts for loss in part.losses],
            {"quarantined": by_client(update for part in parts for update in part.columns["quarantined"])},
            {client for part in parts for client in part.diverged},
        )
