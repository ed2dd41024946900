"""Simulate a federation: sample, download, train, upload, aggregate, evaluate, record."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
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
from personafl.core import hook_checks, torch_state, tree
from personafl.core.algorithm import Algorithm
from personafl.core.display import Displayed
from personafl.core.errors import UserError
from personafl.core.faults import Faults
from personafl.core.types import (
    Criterion,
    Download,
    Examples,
    Metric,
    Params,
    Round,
    Row,
    Setup,
    Stage,
    TrainedTask,
    Training,
)
from personafl.data.batches import steps_per_epoch
from personafl.data.federated import Federation
from personafl.data.shift import Shift, draw
from personafl.engine import admission, sampling
from personafl.engine.accounting import Totals
from personafl.engine.checks import check_calibration, check_data, checked_parts
from personafl.engine.local import client_round
from personafl.engine.schedule import cohort_is_evaluated, ended_after, is_evaluated, last_evaluated_cohort
from personafl.engine.server_round import Method, ServerRound
from personafl.evaluation import final, masks, metrics, rounds, stream_change
from personafl.evaluation.evaluate import Held, deployed
from personafl.evaluation.settings import Evaluation
from personafl.models.stacked import StackedModel
from personafl.plugins.assemble import assembled
from personafl.simulation import execution_plan
from personafl.simulation.evaluator import Evaluator, since_left
from personafl.simulation.faulty_clients import Misbehaviour
from personafl.simulation.faulty_pool import FaultyPool, LatePool, SlowPool, split_late_results
from personafl.simulation.machine import Machine, chosen_device, with_precision
from personafl.simulation.optimistic import OptimisticRound
from personafl.simulation.placement import Placement
from personafl.simulation.profile import NoClock
from personafl.simulation.rank_pool import RankPool
from personafl.simulation.ranks import SingleProcess, check_same_weights
from personafl.simulation.stack_pool import Clients, StackPool, rows_among
from personafl.simulation.state import RunState
from personafl.simulation.wire_transfer import WireRound
from personafl.storage.store import Store, row_bytes

P = TypeVar("P")
T = TypeVar("T")
R = TypeVar("R", bound=ServerRound)
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
        self._placeholders: frozenset[str] | None = None  # of the server's state, since a stage was last checked

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
            return self.cohort(last_evaluated_cohort(behind, len(behind)))
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
        """The next stage, optimistically where that saves waiting for a GPU."""
        if not self._plays_optimistically():
            return self._stage(self._begin(WireRound if self.machine.through_wire else ServerRound))
        before = self.state.copy()
        stage = self._begin(OptimisticRound)
        stage.begin(self._placeholders)
        try:
            row = self._stage(stage)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # numbers that are not finite may make hooks fail in ways of their own
            stage.undo()
            self.state, self._placeholders = before, None
            return self._stage(self._begin(ServerRound))
        self._placeholders = stage.placeholders
        return row

    def _plays_optimistically(self) -> bool:
        """Whether a stage is one stack of honest clients on a GPU."""
        stage = self.schedule[self.played]
        alone = self.ranks.size == 1 and not self.machine.through_wire and self.state.late is None
        return self.device.type == "cuda" and alone and not self.faults.active and self._size(stage) <= self.plan.chunk

    def _size(self, stage: Stage) -> int:
        """How many clients a stage has."""
        clients = self.federation.num_clients
        return 0 if stage.who == "nobody" else clients if stage.who == "all" else self.training.cohort(clients)

    def _begin(self, kind: type[R]) -> R:
        """The server's side of the next stage."""
        stage = self.schedule[self.played]
        rnd = Round(stage, self.algorithm.rate(stage))
        method = Method(self.algorithm, self.task, self.model.initial)
        return kind(method, rnd, self.played, self.server, self.known, self._trained_examples, self.clock)

    def _pool(self, stage: ServerRound) -> SlowPool:
        """The clients of a stage: stacks in this process, those of other ranks, and what goes wrong with them."""
        clients = Clients(
            self.algorithm,
            self.task,
            self.store,
            self._training_data,
            self._held,
            self.evaluator,
            functools.partial(self._stacks, self.plan.threads),
            self.device,
            self.graph_cache,
            self.clock,
        )
        seed = self.training.seed
        behaviour = Misbehaviour(self.faults, self.faulty, seed, self.federation.train_sizes)
        pool: SlowPool = StackPool(clients, behaviour, scores=self._cohort_is_scored())
        held, self.state.late = self.state.late, None  # or they would be held twice while clients train
        sizes = [] if held is None else self.federation.train_sizes(held.ids).tolist()
        late, refused = split_late_results(held, stage, sizes)
        stale = torch.zeros(0, dtype=torch.int64) if late is None else late.ids
        if late is not None:
            own = torch.isin(late.ids, self.placement.mine(late.ids)).nonzero().flatten()
            pool = LatePool(pool, late.rows(own), self.store)
        if self.ranks.size > 1:
            pool = RankPool(pool, self.placement, stale, self.device)
        if self.faults.active or refused:
            pool = FaultyPool(pool, self.faults, seed, stale, refused, self.placement)
        return pool

    def _stage(self, stage: ServerRound) -> Row:
        self.clock.lap()
        begun = time.perf_counter()
        state, judged = self.state, self._cohort_is_scored()
        ids, pool = self.cohort(stage.rnd.stage), self._pool(stage)
        results = stage.play(pool, ids)
        state.server, kept_model = stage.aggregate()
        stale = self.faults.late == "stale" and self.faults.straggler_ratio
        late = pool.late_results() if stale else None
        state.late = None if late is None else late.moved(self.device)
        ids = pool.present(stage, ids)
        judged = judged and ids.numel() > 0
        if judged:
            state.trained_cohort = ids, tree.join(r.trained for r in results) if results else {}
        state.played += 1
        found: Row = {}
        if is_evaluated(self.schedule, self.played - 1, self.evaluation.eval_every):
            with self.clock("evaluation"):
                pairs = [pair for r in results for pair in zip(r.before, r.after, strict=True)]
                found = self._evaluated(self.placement.together(ids, pairs) if judged else [])
        report = pool.report()  # waits for the device, so it comes last
        if isinstance(stage, OptimisticRound):
            stage.check(report.losses)
        state.totals.add(report.totals)
        state.diverged |= report.diverged
        row = stage.row(report, state.totals, self.server, kept_model=kept_model) | found
        row["seconds"] = time.perf_counter() - begun
        self.rows.append(row)
        self._stop(row)
        self.clock.lap(row)
        return row

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

    def _cohort_is_scored(self) -> bool:
        """Whether the cohort of the next stage is the one of the next evaluation after local training."""
        after_local = self.evaluation.when == "after_local"
        return after_local and cohort_is_evaluated(self.schedule, self.played, self.evaluation.eval_every)

    def _trained_examples(self, ids: Tensor) -> Tensor:
        """How many examples each of these clients trains on, float64 on the device."""
        held = self._kept_data(ids)
        return held[1].double() if held else tree.sent(self.federation.train_sizes(ids).double(), self.device)

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

    def download(self, ids: Tensor, rnd: Round) -> Download:
        """What the server sends these clients."""
        return self.algorithm.download(self.server, self.known.gather(ids), rnd)

    # What clients predict with
    #
    # `scored` says who is evaluated, `judged` with what: with what they predict with (`ready`), or, where
    # `evaluation.when` is "after_local", with what the last cohort came to by its training (`trained`), before the
    # server's next model. `_cohort_is_scored` tells a cohort at work that it is this one.

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
                kept = tree.choose(~rows_among(ids, torch.tensor(list(broken), device=self.device)), kept, before)
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
