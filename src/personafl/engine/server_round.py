"""The server's side of one stage, whoever plays the clients: what it sends, takes, and makes of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.types import Download, Params, Payload, Round, Row, TrainedTask
from personafl.engine import admission
from personafl.engine.accounting import Totals, finite_mean
from personafl.engine.aggregation import add, next_server, summed
from personafl.engine.local import Clock, untimed
from personafl.engine.stage_results import StackResult, StageReport


class ClientRecords(Protocol):
    """What the server knows of each client."""

    def gather(self, ids: Tensor) -> Params:
        """Return the rows of these clients, `[C, ...]`."""
        ...

    def scatter(self, ids: Tensor, rows: Params) -> None:
        """Store the rows of these clients."""
        ...


@dataclass(frozen=True)
class Method:
    """What a method is played with: the algorithm, its task and the model all clients began with."""

    algorithm: Algorithm
    task: TrainedTask
    initial: Params


class ServerRound:
    """One stage: `play` it with a pool of clients, then `aggregate` what they sent."""

    def __init__(
        self,
        method: Method,
        rnd: Round,
        place: int,
        server: Params,
        records: ClientRecords,
        examples: Callable[[Tensor], Tensor],
        clock: Clock = untimed,
    ) -> None:
        """Begin a stage.

        Args:
            method: The method, its task and its first model.
            rnd: The stage and its learning rate.
            place: The place of the stage in the schedule.
            server: The server's state before the stage.
            records: What the server knows of each client.
            examples: How many examples each of these clients trains on, float64 `[C]` on the server's device.
            clock: Where the time of the parts of the stage is noted.
        """
        self.method, self.rnd, self.place, self.server, self.records = method, rnd, place, server, records
        self.examples, self.clock = examples, clock
        self.sums: Params = {}
        self._uploads: list[StackResult] = []

    @property
    def algorithm(self) -> Algorithm:
        return self.method.algorithm

    @property
    def device(self) -> torch.device:
        """Where the server's tensors are."""
        return next(iter(self.method.initial.values())).device

    @property
    def takes_updates(self) -> bool:
        """Whether clients send something in this stage."""
        return self.rnd.stage.up and self.rnd.stage.who != "nobody"

    @functools.cached_property
    def schema(self) -> admission.Schema:
        """What an update of this stage must look like."""
        return admission.expected(self.algorithm, self.method.task, self.method.initial, self.server, self.rnd)

    def download(self, ids: Tensor) -> Download:
        """Return what the server sends these clients; nothing in a stage without a download."""
        if not self.rnd.stage.down:
            return Download()
        return self.algorithm.download(self.server, self.records.gather(ids), self.rnd)

    def receive(self, upload: Payload, download: Download, rows: Tensor | None, count: int) -> Payload:
        """Return the updates of a stack as they reach the server.

        Args:
            upload: The updates, `[C, ...]`.
            download: What the stack was sent.
            rows: The rows of the stack that these updates are of, on its device; None for all.
            count: How many clients the stack has.
        """
        return upload

    def play(self, pool: ClientPool, ids: Tensor) -> list[StackResult]:
        """Have clients play the stage and add up what they send.

        Returns:
            The results that hold scores or models of clients, without their updates.
        """
        scored = []
        for result in pool.play(self, ids):
            self.take(result)
            if result.before or result.trained:
                scored.append(result)
            del result  # nothing else outlives its stack
        return scored

    def take(self, result: StackResult) -> None:
        """Add what a stack of clients sent."""
        if self.takes_updates and not result.is_reduced and result.senders.numel():
            if self.algorithm.needs_uploads():
                self._uploads += [StackResult(result.senders, result.upload)] if result.upload else []
            else:
                with self.clock("aggregation"):
                    result.sums = self.reduce(result.senders, result.upload)
        if result.sums:
            with self.clock("aggregation"):
                add(self.sums, result.sums)
        result.sums, result.upload = {}, {}

    def reduce(self, ids: Tensor, upload: Payload) -> Params:
        """Sum the updates of a stack, and record what the server learns of its clients.

        Args:
            ids: The clients, in the order of their rows.
            upload: Their updates, `[C, ...]`.

        Returns:
            The sums that the method's `aggregate` works with.
        """
        if self.algorithm.needs_uploads():
            rows, upload = self.algorithm.screen(self.server, upload, self.rnd)
            ids = ids if rows is None else ids[rows.cpu()]
        return self.sum_updates(ids, upload)

    def sum_updates(self, ids: Tensor, upload: Payload) -> Params:
        """Sum updates that have passed the method's screening, and record what the server learns of their clients."""
        known = self.records.gather(ids)
        new, sums = self._sum(known, upload, self.examples(ids))
        self.write(self.records, ids, new, known)
        return sums

    def write(self, records: ClientRecords, ids: Tensor, rows: Params, former: Params) -> None:
        """Store rows of clients; `former` are the rows that were read for them, or for more clients."""
        records.scatter(ids, rows)

    def not_finite(self, loss: Tensor, upload: Payload, kept: Params) -> dict[int, str]:
        """Return the rows of a stack whose numbers are not all finite, and where each is not."""
        return admission.not_finite(loss, upload, kept)

    def _sum(self, known: Params, upload: Payload, examples: Tensor) -> tuple[Params, Params]:
        return summed(self.algorithm, self.server, known, upload, examples, self.rnd)

    def aggregate(self) -> tuple[Params, str]:
        """Return the server's next state, and why it stayed as it was; an empty reason where it did not."""
        if not self.takes_updates:
            return self.server, ""
        with self.clock("aggregation"):
            if self._uploads:
                ids = torch.cat([r.senders for r in self._uploads])
                upload = tree.gathered(r.upload for r in self._uploads)
                self._uploads = []
                add(self.sums, self.reduce(ids, upload))
            return self._next_server()

    def _next_server(self) -> tuple[Params, str]:
        return next_server(self.algorithm, self.server, self.sums, self.rnd)

    def row(self, report: StageReport, totals: Totals, server: Params, **more: Any) -> Row:
        """Return the row of the stage for the table of rounds.

        Args:
            report: What the stage came to.
            totals: What the run has cost so far, this stage included.
            server: The server's state after the stage.
            **more: Further columns on what went wrong; those without a value are left out.
        """
        stage = self.rnd.stage
        columns = {"diverged": len(report.diverged), **report.columns, **more}
        return {
            "round": stage.number,
            "phase": stage.phase,
            "clients": report.clients,
            "lr": self.rnd.lr,
            "loss": finite_mean(report.losses),
            **{name: value for name, value in columns.items() if value},
            "up_bytes": totals.up_bytes,
            "down_bytes": totals.down_bytes,
            "gflop": totals.flops / 1e9,
            **self.algorithm.notes(server),
        }


class ClientPool(Protocol):
    """Clients that can be asked to play a stage: stacks in this process, or nodes somewhere else."""

    def play(self, stage: ServerRound, ids: Tensor) -> Iterator[StackResult]:
        """Have these clients play a stage.

        Args:
            stage: The server's side of the stage: what it sends (`download`) and what it accepts (`schema`).
            ids: The clients, largest first.

        Yields:
            One result for each stack of clients, as they come.
        """
        ...

    def report(self) -> StageReport:
        """Return what the stage that was played last came to; on a GPU this waits for the device."""
        ...
