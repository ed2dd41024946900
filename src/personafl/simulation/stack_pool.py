"""The clients of a simulation as a pool: stacks of them in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from personafl.accel.cuda_graphs import GraphCache
from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.types import Download, Examples, Params, Payload, TrainedTask
from personafl.engine import cost
from personafl.engine.accounting import Refused, Spent, StackCost
from personafl.engine.late_results import LateResults, joined_results
from personafl.engine.local import Outcome, client_round
from personafl.engine.server_round import ServerRound
from personafl.engine.stage_results import StackResult, StageReport
from personafl.evaluation.evaluate import Held, deployed
from personafl.models.stacked import StackedModel
from personafl.simulation.evaluator import Evaluator
from personafl.simulation.faulty_clients import Misbehaviour
from personafl.simulation.profile import NoClock
from personafl.storage.store import Store

P = TypeVar("P")
T = TypeVar("T")


class Stacks(Protocol):
    """Run work over stacks of clients, largest first, several at a time where there are threads."""

    def __call__(
        self, ids: Tensor, work: Callable[[StackedModel, P], T], prepare: Callable[[Tensor], P]
    ) -> Iterator[T]: ...


@dataclass(frozen=True)
class Clients:
    """What simulated clients are made of, whichever stage they play.

    Args:
        algorithm: The method they play.
        task: Its task; a stack may bring a model of its own over the same tensors.
        store: What clients keep from stage to stage.
        examples: What these clients train on.
        held: What these clients may be asked for before they predict.
        evaluator: Scores models right after training.
        stacks: Runs work over stacks.
        device: Where they train.
        graph_cache: Recorded training steps, on a GPU.
        clock: Where the time of the parts of a stage is noted.
    """

    algorithm: Algorithm
    task: TrainedTask
    store: Store
    examples: Callable[[Tensor], Examples]
    held: Callable[[Tensor], Held]
    evaluator: Evaluator
    stacks: Stacks
    device: torch.device
    graph_cache: GraphCache | None
    clock: NoClock

    def task_with(self, model: StackedModel) -> TrainedTask:
        """The task with this model, which may be another one over the same tensors."""
        return self.task if model is self.task.model else dataclasses.replace(self.task, model=model)


@dataclass
class _Session:
    """A stack of clients between its training and the server: what it got, what it did, and who counts."""

    model: StackedModel
    ids: Tensor
    kept: Params  # before
    received: Download
    done: Outcome
    rows: Tensor | None  # whose session counts now, on the device; None for all


class StackPool:
    """Plays a stage with stacks of simulated clients."""

    def __init__(self, clients: Clients, misbehaviour: Misbehaviour, *, scores: bool) -> None:
        """Make a pool for one stage.

        Args:
            clients: What the clients are made of.
            misbehaviour: What faulty and slow clients do.
            scores: Whether clients are scored right after training.
        """
        self.clients, self.misbehaviour, self.scores = clients, misbehaviour, scores
        self.spent = Spent()

    def play(self, stage: ServerRound, ids: Tensor) -> Iterator[StackResult]:
        """Have stacks of these clients play a stage; see `ClientPool`."""
        clock, reduces = self.clients.clock, stage.takes_updates and not stage.algorithm.needs_uploads()

        def prepare(chunk: Tensor) -> tuple[Tensor, Download]:
            with clock("wire"):
                return chunk, stage.download(chunk)

        def work(model: StackedModel, given: tuple[Tensor, Download]) -> tuple[StackResult, StackCost]:
            result, spent = self._play_stack(model, *given, stage)
            if reduces and result.senders.numel():
                with clock("aggregation"):  # of its stack alone, beside others at work
                    result.sums, result.upload = stage.reduce(result.senders, result.upload), {}
                result.is_reduced = True
            return result, spent

        for result, spent in self.clients.stacks(ids, work, prepare):
            self.spent.add(spent)
            yield result
            del result, spent  # nothing else outlives its stack

    def present(self, stage: ServerRound, ids: Tensor) -> Tensor:
        """All of these clients."""
        return ids

    def late_results(self) -> LateResults | None:
        """The results that come a stage later."""
        return joined_results(self.spent.late)

    def report(self) -> StageReport:
        """Return what the stage came to; this waits for the device."""
        refused = sorted(self.spent.refused, key=lambda r: r.client)
        columns = {"quarantined": [{"client": r.client, "why": r.why} for r in refused]}
        diverged = {r.client for r in refused if r.diverged}
        return StageReport(self.spent.clients, self.spent.totals, self.spent.means(), columns, diverged)

    def _play_stack(
        self, model: StackedModel, ids: Tensor, received: Download, stage: ServerRound
    ) -> tuple[StackResult, StackCost]:
        """Play the stage with one stack: nothing here is the server's."""
        clients, rnd, count = self.clients, stage.rnd, ids.numel()
        clock, task, store = clients.clock, clients.task_with(model), clients.store
        with clock("data"):
            data = clients.examples(ids)
        with clock("store"):
            kept = store.gather(ids)
        with clock("training"):
            done = client_round(
                clients.algorithm, task, data, kept, received, rnd, graph_cache=clients.graph_cache, clock=clock
            )
            upload = self.misbehaviour.attack(clients.algorithm, ids, done, kept, received, rnd)
        with clock("wire"):
            traffic = cost.traffic(rnd.stage, received, upload, count)
            new = {n: t for n, t in done.kept.items() if t is not kept.get(n)}
            refused, more = self._refused(stage, ids, done.work.loss, upload, new)
            if more:
                traffic = dataclasses.replace(traffic, up=traffic.up + more)
            rows, late = self.misbehaviour.split_by_time(stage, ids, refused, upload, done.kept)
            took = done.kept
            if rows is not None:
                rows = rows.to(clients.device)
                upload, took = tree.rows_of(upload, rows), tree.take(took, rows)
            upload = stage.receive(upload, received, rows, count)
        senders = ids if rows is None else ids[rows.cpu()]
        with clock("store"):
            if senders.numel():
                stage.write(store, senders, took, kept)
        result = StackResult(senders, upload)
        if self.scores:
            with clock("evaluation"):
                self._score(_Session(model, ids, kept, received, done, rows), stage, result)
        return result, StackCost(count, traffic, done.work, refused, late)

    def _refused(
        self, stage: ServerRound, ids: Tensor, loss: Tensor, upload: Payload, kept: Params
    ) -> tuple[list[Refused], int]:
        """Whose updates are not taken, and how many bytes more than their uploads all clients sent."""
        broken = stage.not_finite(loss, upload, kept)
        refused = [Refused(int(ids[row]), why, diverged=True) for row, why in broken.items()]
        damaged, more = self.misbehaviour.refuse_damaged(stage, ids, upload, broken)
        return refused + damaged, more

    def _score(self, session: _Session, stage: ServerRound, result: StackResult) -> None:
        """Score the models that a stack of clients downloaded and trained."""
        algorithm, rnd, done, kept = self.clients.algorithm, stage.rnd, session.done, session.kept
        model, ids, rows = session.model, session.ids, session.rows
        task, payload = self.clients.task_with(model), tree.received(session.received, ids.numel())

        def predicting(own: Params) -> Params:
            return deployed(algorithm, task, own, payload, self.clients.held(ids))

        def unless_refused(new: Params, old: Params) -> Params:  # whose session does not count has the old
            if rows is None:
                return new
            return new | tree.choose(rows_among(ids, rows), tree.select(new, old), tree.select(old, new))

        came = predicting(algorithm.personal(kept, payload))
        model_sent = algorithm.downloaded_model(kept, payload, rnd)
        sent = came if model_sent is None else predicting(model_sent)
        result.before = self.clients.evaluator.on_test(model, sent, ids)
        own = predicting(algorithm.after_training(done.kept, done.local, payload, rnd))
        result.trained = unless_refused(own, came)
        model_trained = algorithm.personalised_model(done.kept, done.local, payload, rnd)
        result.after = [None] * ids.numel()
        if model_trained is not None:
            after = unless_refused(predicting(model_trained), sent)
            result.after = [*self.clients.evaluator.on_test(model, after, ids)]


def rows_among(ids: Tensor, rows: Tensor) -> Tensor:
    """Which of these clients have these rows: `[C]` bool on the device of `rows`."""
    return torch.zeros(len(ids), dtype=torch.bool, device=rows.device).index_fill(0, rows, True)
