"""Simulate a federation: sample, download, train, upload, aggregate, evaluate, record."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from personafl import accel
from personafl.accel.cuda_graphs import GraphCache
from personafl.core import hook_checks, rng, torch_state, tree, wire
from personafl.core.algorithm import Algorithm, choose
from personafl.core.display import Displayed
from personafl.core.errors import UserError
from personafl.core.faults import Faults
from personafl.core.types import (
    Criterion,
    Download,
    Examples,
    Metric,
    Params,
    Payload,
    Round,
    Setup,
    Stage,
    TrainedTask,
    Training,
)
from personafl.data.batches import steps_per_epoch
from personafl.data.federated import Federation
from personafl.data.shift import Shift, draw
from personafl.engine import admission, cost, sampling
from personafl.engine.accounting import Refused, Spent, Stack, Totals, finite_mean
from personafl.engine.admission import Hopes, Schema, Update
from personafl.engine.aggregation import add, aggregated, next_server, summed
from personafl.engine.checks import check_calibration, check_data, checked_parts
from personafl.engine.late_results import LateResults, joined_results
from personafl.engine.local import Outcome, client_round
from personafl.engine.schedule import ended_after
from personafl.evaluation import final, masks, metrics, rounds, stream_change
from personafl.evaluation.evaluate import Held, deployed
from personafl.evaluation.settings import Evaluation
from personafl.models.stacked import StackedModel
from personafl.plugins.assemble import assembled
from personafl.simulation import execution_plan, faulty_clients, wire_transfer
from personafl.simulation.evaluator import Evaluator, since_left
from personafl.simulation.machine import Machine, chosen_device, with_precision
from personafl.simulation.placement import Placement
from personafl.simulation.profile import NoClock
from personafl.simulation.ranks import SingleProcess, check_same_weights
from personafl.simulation.state import Row, RunState
from personafl.storage.store import HOST, Store, row_bytes

P = TypeVar("P")
T = TypeVar("T")
KEPT = 2**20  # rows of a cohort's examples that are held on to


class Simulation(Displayed):
    """One algorithm over one federation: explicit state, advanced stage by stage."""

    def __init__(
        self,
        federation: Federation,
        model: StackedModel | nn.Module,
        algorithm: Algorithm | type[Algorithm],
        training: Training,
        evaluation: Evaluation | None = None,
        *,
        criterion: Criterion | None = None,
        metric: Criterion | Metric | None = None,
        machine: Machine | None = None,
        shift: Shift | None = None,
        faults: Faults | None = None,
    ) -> None:
        """`criterion` and `metric` are one's own, or None for what the sections and the data's task say.

        `machine` is what it runs on; `shift` what was drawn for another method of the same federation and seed;
        `faults` what goes wrong with clients, by default nothing.
        """
        model, algorithm = checked_parts(federation, model, algorithm, training, evaluation, faults)
        self.machine = machine or Machine()
        self._divided, federation = federation, federation.judged_by((evaluation or Evaluation()).split)
        self.threads = torch.get_num_threads()  # as many as PyTorch had when the simulation was made
        self.evaluation = evaluation or Evaluation()
        self.faults = faults or Faults()
        check_data(federation, training, self.evaluation)
        check_calibration(int(federation.splits["validation"].offsets[-1]), algorithm, self.evaluation)
        self.device = torch.device(chosen_device(self.machine.device))
        training = with_precision(training, self.device)
        dtype = torch.float64 if training.precision == "float64" else torch.float32
        self.data_hash = federation.source.digest
        self.federation = federation.to(self.device, dtype, self.machine.data_on)
        self.model = model.copy().to(self.device, dtype, training.arithmetic)
        check_same_weights(self.model, self.machine.ranks)
        kind = federation.source.task
        if training.task not in ("auto", kind):
            raise UserError(f"training.task={training.task!r}: the targets of {federation.source.name} are of {kind}")
        training = dataclasses.replace(training, task=kind)
        judged = metric or metrics.chosen(self.evaluation.metric, metrics.METRICS[kind], "evaluation.metric")
        self.task = TrainedTask(
            self.model,
            criterion or metrics.chosen(training.loss, metrics.LOSSES[kind], "training.loss"),
            judged if isinstance(judged, Metric) else Metric(judged),
        )
        stream_change.check(self.evaluation, self.task.metric)
        examples = int(federation.sizes("train")[: federation.num_clients].sum())
        self.algorithm = assembled(algorithm, Setup(model.info, training, federation.num_clients, examples))
        self.training = self.algorithm.setup.training
        self.faulty = self.faults.faulty(self.training.seed, federation.num_clients)  # [clients] bool
        server = hook_checks.check_initial_server(self.algorithm, self.algorithm.init_server(self.model.initial))
        self.state = RunState(server, self.training.num_rounds)
        self.schedule = self.algorithm.schedule()
        self._open_stores()
        captures = accel.ENABLED and self.machine.capture and self.device.type == "cuda" and not self.model.random
        self.graph_cache = GraphCache(self.plan.lanes, self.device) if captures else None
        self.placement = self._placement()
        self.evaluator = Evaluator(
            self.federation,
            self.task,
            self.algorithm,
            self.evaluation,
            self.placement,
            self.each,
            self.plan.activations,
        )
        self.shift = shift or self._shift()
        self._recurrent = any(isinstance(m, nn.RNNBase) for m in self.model.module.modules())
        self._last_data: tuple[Federation, Examples, Tensor] | None = None  # trained on, and how many, on the device
        self._all_clients: Tensor | None = None
        self._hopes: Hopes | None = None  # of a stage whose numbers are looked at behind it
        self._placeholders: frozenset[str] | None = None  # of the server's state, since a stage was last looked at
        self._former: list[tuple[Store, Tensor, Params]] = []  # rows of stores before the stage

    def __getstate__(self) -> dict[str, Any]:
        """What a copy and a pickle hold: a simulation of its own, of one process and without what only saves time."""
        machine = dataclasses.replace(self.machine, ranks=SingleProcess(), clock=NoClock(), spill=None)
        return self.__dict__ | {"machine": machine, "graph_cache": None, "_last_data": None}

    def _facts(self) -> dict[str, object]:
        return {
            "method": self.algorithm.called,
            "data": self.federation.source.name,
            "clients": self.federation.num_clients,
            "stages": f"{self.played} of {len(self.schedule)}",
            "device": self.device,
        }

    @property
    def server(self) -> Params:
        return self.state.server

    @property
    def played(self) -> int:
        """Stages behind us."""
        return self.state.played

    @property
    def rounds(self) -> int:
        """Rounds of training: fewer than asked once it was stopped."""
        return self.state.rounds

    @property
    def totals(self) -> Totals:
        return self.state.totals

    @property
    def rows(self) -> list[Row]:
        """What was found after each stage."""
        return self.state.rows

    @property
    def ranks(self) -> SingleProcess:
        """The processes that share the work."""
        return self.machine.ranks

    @property
    def clock(self) -> NoClock:
        return self.machine.clock

    def _open_stores(self) -> None:
        """Find a home for what clients keep and for what the server knows of them, and lay stacks over what is left."""

        fresh = functools.partial(self.algorithm.init_clients, self.model.initial)
        unknown = functools.partial(self.algorithm.init_known, self.model.initial)
        where = self.machine
        one = torch.zeros(1, dtype=torch.int64)
        kept, known = fresh(one), unknown(one)
        rows = self.touched()
        each = row_bytes(kept) + row_bytes(known)
        home, room = execution_plan.store_location(where.store, rows, each, self.device, where.memory, where.spill)
        homes = (home / "clients", home / "known") if isinstance(home, Path) else (home, home)
        self.store = Store(fresh, homes[0], device=self.device, expected=rows)
        self.known = Store(unknown, homes[1], device=self.device, expected=rows)
        held = sum(t.numel() * t.element_size() for t in (*kept.values(), *known.values()))
        sizes = self.federation.sizes("train")
        self.plan = where.plan or execution_plan.choose(
            self.model,
            self.training,
            self.device,
            sizes,
            where.chunk,
            kept=held,
            room=room,
            threads=self.threads,
            threads_per_client=where.threads_per_client,
        )

    def _placement(self) -> Placement:
        one = torch.zeros(1, dtype=torch.int64)
        owned = bool(self.store.gather(one) or self.known.gather(one))
        return Placement(self.ranks, self.clock, self._steps, self.federation.everybody, owned=owned)

    # Who

    def touched(self) -> int:
        """How many clients a run comes across, at most."""
        clients = self.federation.num_clients
        if any(s.who == "all" for s in self.schedule):
            return clients
        return min(clients, self.training.cohort(clients) * sum(s.who == "sampled" for s in self.schedule))

    @property
    def everybody(self) -> Tensor:
        return torch.arange(self.federation.num_clients)

    def cohort(self, stage: Stage) -> Tensor:
        """The clients of a stage, largest first: a function of seed and round, the same for every method."""
        if self._size(stage) < self.federation.num_clients:
            return sampling.cohort(self.federation, self.training, stage)
        if self._all_clients is None:
            self._all_clients = sampling.cohort(self.federation, self.training, stage)
        return self._all_clients.clone()  # its own, to do with as one likes

    def evaluated_clients(self, stage: Stage) -> Tensor:
        """The clients that are evaluated after a stage."""
        if self.state.trained_cohort is not None:
            return self.state.trained_cohort[0]
        which = self.evaluation.clients
        if which == "selected":
            behind = self.schedule[: self.played] or [stage]
            return self.cohort(next(s for s in reversed(behind) if s.who != "nobody" and s.evaluated))
        return sampling.evaluated(self.federation, self.training, sys.maxsize if which == "all" else which)

    def each(self, ids: Tensor, work: Callable[[StackedModel, Tensor], T]) -> Iterator[T]:
        """Apply work without training to stacks of these clients, in their order."""
        return self._stacks(self.plan.sweep_threads, ids, work, lambda part: part)

    def _stacks(
        self, threads: int, ids: Tensor, work: Callable[[StackedModel, P], T], prepare: Callable[[Tensor], P]
    ) -> Iterator[T]:
        plan = self.plan if threads == self.plan.threads else dataclasses.replace(self.plan, threads=threads)
        with torch_state.products(self.training.arithmetic, self.device, recurrent=self._recurrent):
            yield from execution_plan.each(plan, self.model, ids, work, prepare)

    def alone(self) -> AbstractContextManager[None]:
        """One thread for what is computed outside of stacks too: no number may depend on how many there are."""
        return torch_state.threads(self.plan.operations)

    def _steps(self, ids: Tensor) -> Tensor:
        """Minibatches of an epoch of these clients."""
        if self.training.local_steps:
            return torch.ones_like(ids)
        return steps_per_epoch(self.federation.splits["train"].lengths(ids), self.training.batch_size)

    def collect(self) -> None:
        """Bring all that is kept of clients to the first rank."""
        everywhere = self.algorithm.needs_uploads()  # then every rank remembered what the server knows
        self.placement.collect(self.store, *(() if everywhere else (self.known,)))

    # A round

    def step(self) -> Row:
        """Run the next stage."""
        with self.alone():
            return self._step()

    def _step(self) -> Row:
        """The next stage; on a GPU first in the hope that all numbers will be finite, which is known behind it.

        To look at them earlier is to wait for the device in the middle of a round. What the hope was wrong about is
        played again from the state before, and looked at where it comes up.
        """
        if not self._may_hope():
            return self._stage()
        state = self.state
        before = dataclasses.replace(
            state, totals=dataclasses.replace(state.totals), left=dict(state.left), diverged=set(state.diverged)
        )
        self._hopes, self._former = Hopes(), []
        try:
            return self._stage()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # numbers that are not finite may make hooks fail in ways of their own
            former, self._hopes, self._former = self._former, None, []
            for store, ids, rows in reversed(former):
                store.scatter(ids, rows)
            self.state, self._placeholders = before, None
            return self._stage()
        finally:
            self._hopes, self._former = None, []

    def _may_hope(self) -> bool:
        """Whether a stage is one stack of honest clients on a GPU."""
        stage = self.schedule[self.played]
        alone = self.ranks.size == 1 and not self.machine.through_wire and self.state.late is None
        return self.device.type == "cuda" and alone and not self.faults.active and self._size(stage) <= self.plan.chunk

    def _size(self, stage: Stage) -> int:
        """How many clients a stage has."""
        clients = self.federation.num_clients
        return 0 if stage.who == "nobody" else clients if stage.who == "all" else self.training.cohort(clients)

    def _stage(self) -> Row:
        self.clock.lap()
        begun = time.perf_counter()
        stage = self.schedule[self.played]
        rnd = Round(stage, self.algorithm.rate(stage))
        arrived, refused = self._arrived(rnd)
        ids, gone, absent = self._present(rnd, arrived)
        parts: list[Stack] = []
        sums: Params = {}
        self.placement.weigh(ids)
        mine = self.placement.mine(ids)
        spent = Spent(Totals())
        self._charge_dropped(self.placement.mine(gone), rnd, spent.totals)
        together = self.algorithm.needs_uploads()
        wanted = self._schema(rnd) if stage.up and self.faults.damage else {}

        def prepare(chunk: Tensor) -> tuple[Tensor, Download]:
            with self.clock("wire"):
                return chunk, self.download(chunk, rnd) if rnd.stage.down else Download()

        def work(model: StackedModel, given: tuple[Tensor, Download]) -> Stack:
            part = self._client_side(model, *given, rnd, wanted)
            if together or not stage.up or not part.senders.numel():
                return part
            with self.clock("aggregation"):  # of its stack alone, beside others at work
                part.sums, part.upload = self._server_side(part.senders, part.upload, rnd), {}
            return part

        for part in self._stacks(self.plan.threads, mine, work, prepare):
            spent.add(part)
            if part.sums:
                with self.clock("aggregation"):
                    add(sums, part.sums)
                part.sums = {}
            if part.before or part.trained or part.upload:
                parts.append(part)
            del part  # nothing else outlives its stack
        kept_model = self._aggregate(ids, parts, sums, arrived, rnd) if stage.up and stage.who != "nobody" else ""
        self._put_off(spent.late)
        judged = ids.numel() > 0 and self._evaluated_next()
        if judged:
            self.state.trained_cohort = ids, tree.join(p.trained for p in parts) if parts else {}
        self.state.played += 1
        found: Row = {}
        if self._due(self.played - 1):
            with self.clock("evaluation"):
                pairs = [pair for p in parts for pair in zip(p.before, p.after, strict=True)]
                found = self._evaluated(self.placement.together(ids, pairs) if judged else [])
        losses, more = self._count(spent)  # waits for the device, so it comes last
        if self._hopes is not None and not (all(map(math.isfinite, losses)) and self._hopes.hold()):
            raise ArithmeticError("not all numbers are finite")
        diverged = {r.client for r in more if r.diverged}
        self.state.diverged |= diverged
        refused = sorted([*refused, *more], key=lambda r: r.client)
        told = {
            "diverged": len(diverged),
            **absent,
            "quarantined": [{"client": r.client, "why": r.why} for r in refused],
            "kept_model": kept_model,
        }
        row: Row = {
            "round": stage.number,
            "phase": stage.phase,
            "clients": ids.numel(),
            "lr": rnd.lr,
            "loss": finite_mean(losses),
            **{k: v for k, v in told.items() if v},
            "up_bytes": self.totals.up_bytes,
            "down_bytes": self.totals.down_bytes,
            "gflop": self.totals.flops / 1e9,
            **self.algorithm.notes(self.server),
            **found,
        }
        row["seconds"] = time.perf_counter() - begun
        self.rows.append(row)
        self._stop(row)
        self.clock.lap(row)
        return row

    # Who is there, and whose update is taken

    def _schema(self, rnd: Round) -> Schema:
        """What an upload of this round must be."""
        return admission.expected(self.algorithm, self.task, self.model.initial, self.server, rnd)

    def _arrived(self, rnd: Round) -> tuple[LateResults | None, list[Refused]]:
        """The late results of the stage before that can be used in this one, and those that cannot."""
        late, self.state.late = self.state.late, None
        if late is None:
            return None, []
        if not rnd.stage.up or late.phase != rnd.phase:
            why = f"a late update of phase {late.phase} in phase {rnd.phase}"
            return None, [Refused(c, why) for c in late.ids.tolist()]
        wanted, taken, refused = self._schema(rnd), [], []
        sizes = self._examples(late.ids).tolist()
        for row, client in enumerate(late.ids.tolist()):
            update = Update(client, late.stage, tree.row_of(late.upload, row), sizes[row])
            if why := admission.refusal(update, wanted, self.played, sizes[row], oldest=late.stage):
                refused.append(Refused(client, f"late: {why}"))
            else:
                taken.append(row)
        return (late.rows(torch.tensor(taken)) if taken else None), refused

    def _present(self, rnd: Round, arrived: LateResults | None) -> tuple[Tensor, Tensor, Row]:
        """The clients of a stage that train, those that vanish once they have received something, and their numbers.

        Whose result of the stage before arrives in this one was still busy with it when this one began.
        """
        ids = self.cohort(rnd.stage)
        if not rnd.stage.up or not (self.faults.drop_rate or self.faults.straggler_ratio):
            return ids, ids[:0], {}
        stale = torch.zeros(0, dtype=torch.int64) if arrived is None else arrived.ids
        busy = torch.isin(ids, stale)
        dropped = self.faults.dropped(self.training.seed, rnd.number, ids) & ~busy
        ids, gone = ids[~busy & ~dropped], ids[dropped]
        late = self.faults.straggling(self.training.seed, rnd.number, ids)
        counts = {"dropped": dropped, "busy": busy, "late": late}
        return ids, gone, {k: int(v.sum()) for k, v in counts.items()} | {"stale": len(stale)}

    def _charge_dropped(self, gone: Tensor, rnd: Round, totals: Totals) -> None:
        """Count what clients received that then vanished."""
        if gone.numel() and rnd.stage.down:
            lost = cost.traffic(rnd.stage, self.download(gone, rnd), {}, len(gone))
            totals.down_bytes += lost.down
            totals.paper_bytes += lost.paper

    def _put_off(self, late: list[LateResults]) -> None:
        """Keep late results for the next stage, on every rank those of all."""
        if self.faults.late != "stale" or not self.faults.straggler_ratio:
            return
        mine = joined_results(late)
        if self.ranks.size > 1:
            found = self.ranks.gather(None if mine is None else mine.moved(HOST))
            mine = joined_results([part for part in found if part is not None])
        self.state.late = None if mine is None else mine.moved(self.device)

    def _stop(self, row: Row) -> None:
        """End training after this row if it is time to, and say so in it."""
        here, asked, which = row["round"] + 1, self.training, self.task.metric.better
        clients = self.federation.num_clients
        if here < self.rounds and (why := rounds.stop(self.rows, asked.patience, asked.target, clients, which)):
            if "personal" not in row:  # a run ends with an evaluation
                with self.clock("evaluation"):
                    row |= self._evaluated([])
            row["stopped"] = why
            self.end_after(here)

    def end_after(self, count: int) -> None:
        """Leave out the rounds behind this many; closing stages, such as fine-tuning, follow at once."""
        self.schedule = ended_after(self.schedule, self.rounds, count)
        self.state.rounds = count

    def resume(self, state: RunState) -> None:
        """Go on from the state another simulation of the same parts was in; stores are brought there by the caller."""
        self.end_after(state.rounds)
        self.state, self._placeholders = state, None

    def _aggregate(self, ids: Tensor, parts: list[Stack], sums: Params, arrived: LateResults | None, rnd: Round) -> str:
        """The server's new state, from what came from each chunk; why it stayed as it was, or nothing."""
        with self.clock("aggregation"):
            if arrived is not None:
                own = torch.isin(arrived.ids, self.placement.mine(arrived.ids)).nonzero().flatten()
                mine = arrived.rows(own)
                if len(own):
                    self.store.scatter(mine.ids, mine.kept)
            if self.algorithm.needs_uploads():
                senders = torch.cat([p.senders for p in parts]) if parts else ids[:0]
                upload = tree.gathered(p.upload for p in parts) if parts else {}
                senders, upload = self.placement.stacked(ids, senders, upload, self.device)
                if arrived is not None:
                    upload = tree.gathered([*([upload] if len(senders) else []), arrived.upload])
                    senders = torch.cat([senders, arrived.ids])
                if len(senders):
                    add(sums, self._server_side(senders, upload, rnd))
            else:
                if arrived is not None and len(own):
                    add(sums, self._server_side(mine.ids, mine.upload, rnd))
                with self.clock("waiting"):
                    sums = self.ranks.sum(sums)
            if self._hopes is not None and sums:
                server = self.server
                if self._placeholders is None:
                    self._placeholders = hook_checks.placeholders(server)
                self.state.server = aggregated(self.algorithm, server, sums, rnd)
                self._hopes.add(hook_checks.numbers_to_check(server, self.server, self._placeholders))
                self._hopes.reduce()
                return ""
            self.state.server, why = next_server(self.algorithm, self.server, sums, rnd)
            return why

    def _count(self, spent: Spent) -> tuple[list[float], list[Refused]]:
        """Add up what a round cost; the losses of clients that trained, and whose updates were not taken."""
        with self.clock("waiting"):
            found = self.ranks.gather((spent.totals, spent.means(), spent.refused))
        for totals, _, _ in found:
            self.totals.add(totals)
        return [mean for _, means, _ in found for mean in means], [r for _, _, refused in found for r in refused]

    def _due(self, place: int) -> bool:
        """Whether the stage at this place of the schedule is followed by an evaluation."""
        stage = self.schedule[place]
        often = stage.evaluated and (stage.number + 1) % self.evaluation.eval_every == 0
        return often or place + 1 == len(self.schedule)

    def _evaluated_next(self) -> bool:
        """Whether the cohort of the present stage is the one of the next evaluation after local training."""
        if self.evaluation.when != "after_local":
            return False
        place = self.played
        while not self._due(place) and self.schedule[place + 1].who == "nobody":
            place += 1
        return self._due(place)

    def _client_side(self, model: StackedModel, ids: Tensor, down: Download, rnd: Round, wanted: Schema) -> Stack:
        """What a stack of clients does in a round, and whose session counts: nothing here is the server's."""
        task, clock, count = self._task(model), self.clock, ids.numel()
        with clock("data"):
            data = self._training_data(ids)
        through = self.machine.through_wire
        with clock("wire"):
            received = wire_transfer.delivered(down, count, self.device) if through else down
        with clock("store"):
            kept = self.store.gather(ids)
        with clock("training"):
            done = client_round(
                self.algorithm, task, data, kept, received, rnd, graph_cache=self.graph_cache, clock=clock
            )
            upload = self._attacked(ids, done, kept, received, rnd)
        with clock("wire"):
            traffic = cost.traffic(rnd.stage, down, upload, count)
            new = {n: t for n, t in done.kept.items() if t is not kept.get(n)}
            refused, more = self._refused(ids, done.work.loss, upload, new, rnd, wanted)
            if more:
                traffic = dataclasses.replace(traffic, up=traffic.up + more)
            rows, late = self._in_time(ids, refused, upload, done.kept, rnd)
            took = done.kept
            if rows is not None:
                upload, took = tree.rows_of(upload, rows), tree.take(took, rows)
            if through and rnd.stage.up:
                upload = wire_transfer.returned(upload, received, rows, count, self.device)
        senders = ids if rows is None else ids[rows.cpu()]
        with clock("store"):
            if senders.numel():
                self._scatter(self.store, senders, kept, took)
        before: list[Tensor] = []
        after: list[Tensor | None] = []
        trained: Params = {}
        if self._evaluated_next():
            with clock("evaluation"):
                payload = tree.received(received, count)

                def predicting(own: Params) -> Params:
                    return deployed(self.algorithm, task, own, payload, self._held(ids))

                def unless_refused(new: Params, old: Params) -> Params:  # whose session does not count has the old
                    if rows is None:
                        return new
                    return new | choose(self._among(ids, rows), tree.select(new, old), tree.select(old, new))

                came = predicting(self.algorithm.personal(kept, payload))
                model_sent = self.algorithm.downloaded_model(kept, payload, rnd)
                sent = came if model_sent is None else predicting(model_sent)
                before = self.evaluator.on_test(model, sent, ids)
                own = predicting(self.algorithm.after_training(done.kept, done.local, payload, rnd))
                trained = unless_refused(own, came)
                model_trained = self.algorithm.personalised_model(done.kept, done.local, payload, rnd)
                after = [None] * count
                if model_trained is not None:
                    after = [*self.evaluator.on_test(model, unless_refused(predicting(model_trained), sent), ids)]
        return Stack(ids, traffic, done.work, senders, upload, refused, late, before, after, trained)

    def _scatter(self, store: Store, ids: Tensor, former: Params, rows: Params) -> None:
        """Store rows; what they were is held on to for as long as there is hope."""
        if self._hopes is not None:
            self._former.append((store, ids, former))
        store.scatter(ids, rows)

    def _among(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Which of these clients have these rows: `[C]` bool on the device."""
        return torch.zeros(len(ids), dtype=torch.bool, device=self.device).index_fill(0, rows, True)

    def _attacked(self, ids: Tensor, done: Outcome, kept: Params, received: Download, rnd: Round) -> Payload:
        """What the clients of a stack send, those that attack in the same form as the others."""
        if not (rnd.stage.up and self.faults.attack and (which := self.faulty[ids]).any()):
            return done.upload
        begun = self.algorithm.start(kept, tree.received(received, len(ids)), rnd).params
        begun = {n: t for n, t in begun.items() if n in self.algorithm.info.parameters}
        keys = rng.key(self.training.seed, "attack", rnd.number, ids)
        which, keys = which.to(self.device), keys.to(self.device)
        return self.algorithm.upload(faulty_clients.attacking(self.faults, begun, done.local, which, keys), rnd)

    def _refused(
        self, ids: Tensor, loss: Tensor, upload: Payload, kept: Params, rnd: Round, wanted: Schema
    ) -> tuple[list[Refused], int]:
        """Whose updates are not taken, and how many bytes more than their uploads all clients sent."""
        if self._hopes is not None:
            self._hopes.add([*tree.values(upload).values(), *kept.values()])  # losses are looked at by themselves
            return [], 0
        found = admission.not_finite(loss, upload, kept)
        refused, more = [Refused(int(ids[row]), why, diverged=True) for row, why in found.items()], 0
        damaged = self.faulty[ids].nonzero().flatten().tolist() if rnd.stage.up and self.faults.damage else []
        sizes = self._examples(ids).tolist() if damaged else []
        for row in damaged:
            if row in found:
                continue
            honest = Update(int(ids[row]), self.played, tree.row_of(upload, row), sizes[row])
            taken: list[int] = []
            for update in faulty_clients.sent(self.faults.fault, honest):
                more += wire.size(update.payload)
                if why := admission.refusal(update, wanted, self.played, sizes[row], taken=taken):
                    refused.append(Refused(update.client, why, counts=bool(taken)))
                else:
                    assert update.payload is honest.payload
                    taken.append(update.client)
            more -= wire.size(honest.payload)
        return refused, more

    def _in_time(
        self, ids: Tensor, refused: list[Refused], upload: Payload, kept: Params, rnd: Round
    ) -> tuple[Tensor | None, LateResults | None]:
        """The rows of a stack whose session counts now, None for all, on the device; and what comes a stage later."""
        if not refused and not (rnd.stage.up and self.faults.straggler_ratio):
            return None, None
        late = self.faults.straggling(self.training.seed, rnd.number, ids) & rnd.stage.up
        out = torch.isin(ids, torch.tensor([r.client for r in refused if not r.counts], dtype=torch.int64))
        rows = (~out & ~late).nonzero().flatten()
        if self.faults.late != "stale" or not (put_off := (~out & late).nonzero().flatten()).numel():
            return rows.to(self.device), None
        all_of_them = LateResults(self.played, rnd.phase, ids, upload, kept)
        return rows.to(self.device), all_of_them.rows(put_off)

    def _examples(self, ids: Tensor) -> Tensor:
        """How many examples each of these clients trains on, as it tells with its upload."""
        return self.federation.train_sizes(ids)

    def _task(self, model: StackedModel) -> TrainedTask:
        """The task with this model, which may be another one over the same tensors."""
        return self.task if model is self.model else dataclasses.replace(self.task, model=model)

    def _training_data(self, ids: Tensor) -> Examples:
        """What these clients train on; kept for the next round, which where all take part is of the same ones."""
        if held := self._kept_data(ids):
            return dataclasses.replace(held[0], ids=ids)  # which a method may write to
        found = self.federation.examples("train", ids, augment=self.training.augment != "none")
        sizes = tree.sent(found.count, self.device)
        kept = dataclasses.replace(found, ids=ids.clone())
        self._last_data = (self.federation, kept, sizes) if found.rows.numel() <= KEPT else None
        return found

    def _kept_data(self, ids: Tensor) -> tuple[Examples, Tensor] | None:
        """What the last round kept, if it was of these clients in this order."""
        last = self._last_data
        return last[1:] if last and last[0] is self.federation and torch.equal(last[1].ids, ids) else None

    def _server_side(self, ids: Tensor, upload: Payload, rnd: Round) -> Params:
        """The sums over these clients that the server works with; what it will know of them."""
        if self.algorithm.needs_uploads():
            rows, upload = self.algorithm.screen(self.server, upload, rnd)
            ids = ids if rows is None else ids[rows.cpu()]
        held = self._kept_data(ids)
        examples = held[1].double() if held else tree.sent(self._examples(ids).double(), self.device)
        known = self.known.gather(ids)
        optimistic = self._hopes is not None
        now, sums = summed(self.algorithm, self.server, known, upload, examples, rnd, optimistic=optimistic)
        self._scatter(self.known, ids, known, now)
        return sums

    def download(self, ids: Tensor, rnd: Round) -> Download:
        """What the server sends these clients."""
        return self.algorithm.download(self.server, self.known.gather(ids), rnd)

    # What clients predict with
    #
    # `scored` says who is evaluated, `judged` with what: with what they predict with (`ready`), or, where
    # `evaluation.when` is "after_local", with what the last cohort came to by its training (`trained`), before the
    # server's next model. `_evaluated_next` tells a cohort at work that it is this one.

    @property
    def now(self) -> Round:
        """The round as the clients last saw it, for them to predict after."""
        stage = self.schedule[max(self.played - 1, 0)]
        return Round(stage, self.algorithm.rate(stage), predicting=True)

    def deployed_models(self, model: StackedModel, ids: Tensor) -> Params:
        """What these clients predict with now."""
        task = self._task(model)
        down = tree.received(self.download(ids, self.now), len(ids))
        own = self.algorithm.personal(self.store.gather(ids), down)
        return deployed(self.algorithm, task, own, down, self._held(ids))

    def newcomer_models(self, model: StackedModel, ids: Tensor) -> Params:
        """What newcomers predict with: what they are given, after the session their method has for them."""
        task = self._task(model)
        data = self._training_data(ids)
        known = self.algorithm.init_known(self.model.initial, ids)
        down = self.algorithm.download(self.server, known, self.now)
        kept = self.algorithm.newcomer(self.model.initial, down, ids)
        hook_checks.check_kept(self.algorithm, "newcomer", kept)
        if phase := self.algorithm.welcome():
            stage = Stage(number=self.schedule[-1].number + 1, phase=phase, who="all", up=False)
            rnd = Round(stage, self.algorithm.rate(self.schedule[-1]))
            done = client_round(self.algorithm, task, data, kept, down, rnd)
            kept, before = done.kept, kept
            if broken := admission.not_finite(done.work.loss, {}, kept):  # then it has what it was given
                kept = choose(~self._among(ids, torch.tensor(list(broken), device=self.device)), kept, before)
        received = tree.received(down, len(ids))
        return deployed(self.algorithm, task, self.algorithm.personal(kept, received), received, self._held(ids))

    def _held(self, ids: Tensor) -> Held:
        """What these clients may be asked for before they predict."""
        return lambda split: self.federation.examples(split, ids)

    def evaluated_models(self, model: StackedModel, ids: Tensor) -> Params:
        """What these clients are scored with: what they predict with, or what their last training gave."""
        if self.state.trained_cohort is None:
            return self.deployed_models(model, ids)
        have, rows = self.state.trained_cohort
        place = {c: i for i, c in enumerate(self.placement.mine(have).tolist())}
        return tree.take(rows, torch.tensor([place[c] for c in ids.tolist()], device=self.device))

    def common(self) -> Params | None:
        """The server's model, as a stack of one; None where the method has no complete one."""
        known = self.algorithm.init_known(self.model.initial, torch.zeros(1, dtype=torch.int64))
        return self.algorithm.common(tree.received(self.algorithm.download(self.server, known, self.now), 1))

    def _shift(self) -> Shift | None:
        if self.evaluation.shift == "none":
            return None
        return draw(self.federation, self.evaluation.shift, self.training.seed, self.evaluation.draws)

    def evaluate(self) -> Row:
        """Accuracy of the personal models and of the global one, over clients."""
        with self.alone():
            return self._evaluated([])

    def _evaluated(self, around_training: list[tuple[Tensor, Tensor | None]]) -> Row:
        """The same; with scores from before and after training (`Stack`), also how the former compare with the last."""
        ids = self.evaluated_clients(self.now.stage)
        row, own, finite = self.evaluator.after_round(ids, self.evaluated_models, self.common())
        if broken := ids[~finite].tolist():
            row["nonfinite_models"] = len(broken)
            self.state.diverged.update(broken)
        if around_training:
            before = [b for b, _ in around_training]
            after = [o if a is None else a for (_, a), o in zip(around_training, own, strict=True)]
            gained, left = since_left(ids, before, after, self.state.left, self.task.metric)
            self.state.left |= left
            row |= gained
        return row

    def evaluations(self) -> final.Arrays:
        """The scores of all scored clients under all that was asked for; `evaluation/final.py` has the names."""
        with self.alone():
            return self.evaluator.at_end(
                self.evaluated_clients(self.now.stage), self.evaluated_models, self.shift, self.newcomer_models
            )

    def masks(self) -> Row | None:
        """How alike the evaluated clients' masks are (`evaluation/masks.py`); None where the method gives them none."""
        method, one = self.algorithm, torch.zeros(1, dtype=torch.int64)
        fresh, known = (begin(self.model.initial, one) for begin in (method.init_clients, method.init_known))
        if not method.client_masks(fresh, tree.received(method.download(self.server, known, self.now), 1)):
            return None  # without a look at anybody's rows
        ids = self.evaluated_clients(self.now.stage)
        few = len(ids) <= masks.LIMIT

        def work(model: StackedModel, part: Tensor) -> tuple[Params, list[masks.ClientMasks]]:
            held = method.client_masks(self.store.gather(part), tree.received(self.download(part, self.now), len(part)))
            return masks.sums(held), masks.each_client(held) if few else []

        total: Params = {}
        clients: list[masks.ClientMasks] = []
        with self.clock("evaluation"):
            for found, own in self.each(self.placement.mine(ids), work):
                for n, t in found.items():
                    total[n] = total[n] + t if n in total else t
                clients += own
            if few:
                clients = self.placement.together(ids, clients)
            return masks.summary(self.ranks.sum(total), ids.tolist(), clients)

    def newcomers(self, found: final.Arrays | None = None) -> Row | None:
        """Accuracy of the clients held out, as newcomers; None where there are none."""
        if not self.federation.unseen:
            return None
        with self.alone():
            held = self.evaluator.of_newcomers(self.newcomer_models) if found is None else final.newcomers(found)
            return self.evaluator.newcomers(held)

    def clients_table(self, found: final.Arrays | None = None) -> tuple[list[Row], Row | None]:
        """The final accuracy of every scored client, and the accuracy at each degree of shift."""
        found = self.evaluations() if found is None else found
        train = self.federation.sizes("train")[torch.from_numpy(found["ids"])]
        return final.table(found, train.numpy(), self.task.metric), final.shift_summary(found, self.evaluation)

    # A run

    def run(self, on_round: Callable[[Row], None] | None = None) -> None:
        """Run what is left of the schedule."""
        while self.played < len(self.schedule):
            row = self.step()
            if on_round is not None:
                on_round(row)

    def identity(self) -> dict[str, str | None]:
        """Hashes of what a run begins with: data, split, first weights."""
        return {"split": self._divided.digest(), "init": self.model.initial_hash(), "data": self.data_hash}

    def hashes(self) -> dict[str, str | None]:
        """What all methods of a comparison must have in common."""
        cohorts = hashlib.sha256()
        for t in range(self.training.num_rounds):
            cohorts.update(self.cohort(Stage(number=t)).numpy().tobytes())
        began = self.identity()
        return {
            "split": began["split"],
            "cohorts": cohorts.hexdigest()[:16],
            "init": began["init"],
            "shift": None if self.shift is None else self.shift.digest(),
            "data": began["data"],
        }
