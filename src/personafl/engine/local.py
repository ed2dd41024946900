"""The local-training loop: the only one, for the simulator and for a deployed client alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import torch
from torch import Tensor

from personafl.accel.cuda_graphs import CapturedTurn, GraphCache, Lane, Step, capacity, copy, room_for, same, shapes
from personafl.core import hook_checks, optim, rng, tree
from personafl.core.algorithm import Algorithm
from personafl.core.criteria import CRITERION_GRADIENTS
from personafl.core.errors import UserError
from personafl.core.local_work import (
    ClientState,
    DataPass,
    GradientPass,
    LocalWork,
    Loss,
    Pull,
    StateUpdate,
    Turn,
    own_loss,
)
from personafl.core.model_wrapper import ModelAround
from personafl.core.plain_text import list_names
from personafl.core.torch_internals import foreach
from personafl.core.types import (
    Batch,
    Download,
    Examples,
    Model,
    Moves,
    Params,
    Payload,
    Round,
    Task,
    TrainedTask,
    Training,
)
from personafl.data import batches
from personafl.engine import cost, model_calls
from personafl.engine.model_calls import ModelCall

T = TypeVar("T", Tensor, Tensor | None)
Clock = Callable[[str], AbstractContextManager[None]]
"""Told which part of a session is at work; time inside belongs to it."""

FEW = 2
"""Sizes of short minibatches among the clients of a stack that are worth a recording each."""

STREAMS = ("draws", "batches", "noise")
"""Random streams that nearly every session asks for."""

MOST_OBSERVED = 256  # losses whose calls of the model are held on to
_OBSERVED: dict[Hashable, tuple[ModelCall, ...]] = {}

_NOTHING = nullcontext()
_OVER = object()


def untimed(part: str) -> AbstractContextManager[None]:
    return _NOTHING


@dataclass(frozen=True)
class Work:
    """What a session of local training cost its clients: `[C]` float64 each, on the host but for the loss."""

    flops: Tensor
    dense_flops: Tensor
    loss: Tensor  # summed over the session's steps, on the device: to read it is to wait for them
    steps: Tensor


@dataclass(frozen=True)
class Outcome:
    """A stack of clients after its part of a round."""

    kept: Params
    upload: Payload
    local: ClientState
    work: Work


def client_round(
    algorithm: Algorithm,
    task: TrainedTask,
    data: Examples,
    kept: Params,
    down: Download,
    rnd: Round,
    *,
    train: bool = True,
    graph_cache: GraphCache | None = None,
    clock: Clock = untimed,
) -> Outcome:
    """The client's side of a round, for a stack of clients sorted by size, largest first.

    Without `train` nothing is computed but the cost: hooks, payloads and masks are real. On a GPU a `graph_cache`
    replays what was played before.
    """
    payload = tree.received(down, data.ids.shape[0])
    hook_checks.check_kept(algorithm, "init_clients", kept)
    local = algorithm.start(kept, payload, rnd)
    hook_checks.check_local_model(algorithm, local.params)
    turns, training = _listed(algorithm, algorithm.turns(local, rnd)), algorithm.training_at(rnd.stage)
    local, work = run_local_work(
        task,
        local,
        turns,
        data,
        training,
        rnd,
        train=train,
        graph_cache=graph_cache,
        clock=clock,
        method=algorithm.called,
    )
    upload = algorithm.upload(local, rnd) if rnd.stage.up else {}
    hook_checks.check_upload(algorithm, upload, payload)
    kept = algorithm.keep(kept, local, rnd)
    hook_checks.check_kept(algorithm, "keep", kept)
    return Outcome(kept, upload, local, work)


def _listed(algorithm: Algorithm, turns: object) -> Sequence[LocalWork]:
    """What a method's `turns` gave, if the loop can play it."""
    name = algorithm.called
    if not isinstance(turns, (list, tuple)):
        kind = "a single one" if isinstance(turns, LocalWork) else "nothing" if turns is None else repr(turns)
        raise UserError(f"{name}.turns must return a list of turns; it gave {kind}")
    for turn in turns:
        if isinstance(turn, type):
            raise UserError(f"{name}.turns gave the class {turn.__name__}; give an object of it, {turn.__name__}(...)")
        if not isinstance(turn, LocalWork):
            kinds = ", ".join(c.__name__ for c in get_args(LocalWork))
            raise UserError(f"{name}.turns gave {turn!r}; each must be one of {kinds}")
        for part in _chain(turn) if isinstance(turn, Turn) else ():
            if not isinstance(part.pulls, tuple) or not all(isinstance(p, Pull) for p in part.pulls):
                raise UserError(f"{name}.turns: pulls={part.pulls!r}: must be a tuple of Pull, such as (Pull(...),)")
    return turns


def run_local_work(
    task: TrainedTask,
    local: ClientState,
    turns: Sequence[LocalWork],
    data: Examples,
    training: Training,
    rnd: Round,
    *,
    train: bool = True,
    graph_cache: GraphCache | None = None,
    clock: Clock = untimed,
    method: str = "Algorithm",
) -> tuple[ClientState, Work]:
    """Run a list of turns over a stack of clients; without `train`, only count what it would cost."""
    at_work = _Session(task, local, data, training, rnd, train, graph_cache, clock, method)
    for turn in turns:
        match turn:
            case Turn():
                at_work.train(turn)
            case GradientPass():
                at_work.gradient_pass(turn)
            case DataPass():
                at_work.data_pass(turn)
            case StateUpdate():
                at_work.local = turn.update(at_work.local)
    return at_work.finished()


class _Session:
    """A stack of clients between its first and its last turn."""

    def __init__(
        self,
        task: TrainedTask,
        local: ClientState,
        data: Examples,
        training: Training,
        rnd: Round,
        train: bool,
        graph_cache: GraphCache | None,
        clock: Clock,
        method: str,
    ) -> None:
        self.method = method  # its name, for messages
        self.task, self.data, self.training, self.rnd, self.really = task, data, training, rnd, train
        self.graph_cache, self.clock = graph_cache, clock
        self.count, self.dtype = data.ids.shape[0], tree.floating(local.params)
        usual = rng.keys(training.seed, STREAMS, rnd.number, data.ids).unbind()
        self.streams = dict(zip(STREAMS, usual, strict=True))
        keys = tree.sent(self._stream("draws"), data.rows.device)
        self.local = ClientState(local.params, local.fixed, local.steps, data.ids, keys)
        self.played: dict[str, list[Tensor]] = {}  # [C] steps of each turn so far, per stream
        self.none = torch.zeros(self.count, dtype=torch.int64)
        self.flops, self.dense = torch.zeros(2, self.count, dtype=torch.float64).unbind()
        self.loss = torch.zeros(self.count, dtype=torch.float64, device=data.rows.device)
        # Moments live from turn to turn of a stream, not from round to round: a side with minibatches of its own counts
        # its own steps.
        self.state: dict[tuple[str, optim.Optimizer], Params] = {}

    def finished(self) -> tuple[ClientState, Work]:
        local, steps = self.local, sum((n for turns in self.played.values() for n in turns), self.none)
        played = ClientState(local.params, local.fixed, steps, local.ids, local.keys)
        return played, Work(self.flops, self.dense, self.loss, steps.double())

    def train(self, turn: Turn) -> None:
        """Minibatch steps on the turn's loss, over the clients that still have some."""
        size = self.training.batch_size
        length: dict[str, Any] = {"steps": turn.steps} if turn.steps else {"epochs": turn.epochs, "least": turn.least}
        length |= {"first": self._epochs(turn.stream), "passed": self._steps(turn.stream)}
        further = [f"{turn.stream} {i}" for i in range(2, turn.minibatches + 1)]
        with self.clock("data"):
            plan, *others = (
                batches.plan(self.data, size, self._stream(stream), noise=self._noise(stream), **length)
                for stream in (turn.stream, *further)
            )
        plan = replace(plan, others=tuple(others)) if others else plan
        parts = self._moving(list(_chain(turn)), plan)
        if parts:
            self._run(_Stack(self.local, parts, plan, self.loss, capacity(len(plan.active))))
        self.played.setdefault(turn.stream, []).append(plan.steps)

    def _noise(self, stream: str) -> Tensor:
        """The random streams of the steps of a stream of minibatches."""
        return self._stream("noise" if stream == "batches" else f"noise {stream}")

    def _steps(self, stream: str) -> int | Tensor:
        """Steps of a stream behind each client: `[C]`, or 0."""
        return sum(self.played.get(stream, ()))

    def _epochs(self, stream: str) -> int | Tensor:
        """Epochs of a stream that are over: each turn begins with the next whole one. `[C]`, or 0."""
        if stream not in self.played:
            return 0
        per_epoch = batches.steps_per_epoch(self.data.count, self.training.batch_size)
        return sum(-(-steps // per_epoch) for steps in self.played[stream])

    def _moving(self, parts: list[Turn], plan: batches.Plan) -> list[_MinibatchUpdate]:
        """What is done with each minibatch, one after the other; nothing where nothing is to move."""
        moves = [part.moves(self.local) if callable(part.moves) else part.moves for part in parts]
        for part, names in zip(parts, moves, strict=True):
            self._charge(part, list(names), plan, regrow=False)
            for pull in part.pulls if names else ():
                pull.anchors(self.local.fixed, names)  # refused before anything is trained
        if not self.really or not any(moves):
            return []
        return [
            _MinibatchUpdate(
                part.loss,
                names,
                rule := self._rule(part),
                self._moments(part, rule, names),
                self.rnd.lr if part.lr is None else part.lr,
                part.added,
                tuple(pull for pull in part.pulls if pull.weight),
            )
            for part, names in zip(parts, moves, strict=True)
            if names
        ]

    def _run(self, stack: _Stack) -> None:
        """Train as one stack, or a client after the other; from recordings where there are some."""
        at_hand = self.data.x.device == stack.plan.rows.device  # what is recorded fetches examples itself
        cache = self.graph_cache if at_hand and stack.plan.active else None
        if self.task.model.one_by_one:
            if cache is not None and cache.lanes:
                self._in_lanes(self._owned(stack, self.task.model.channels_last), cache.lanes)
            else:
                for one in self._owned(stack).clients():
                    self._step_by_step(one)
        elif cache is None or not self._replayed_as_one(stack, cache):
            self._step_by_step(self._owned(stack))

    def _owned(self, stack: _Stack, channels_last: Collection[str] = ()) -> _Stack:
        """The stack over memory of its own for what training changes."""
        mine = room_for(self._changing(stack), channels_last)
        copy(mine, self.local.params)
        self.local = replace(self.local, params=self.local.params | mine)
        return replace(stack, local=self.local)

    def _in_lanes(self, stack: _Stack, lanes: Sequence[Lane]) -> None:
        """Clients one at a time in each lane, the largest first.

        Lanes take steps in turn: a GPU takes only so much work in advance, and none of them must use that up alone.
        """
        sizes, steps = stack.plan.sizes.tolist(), stack.plan.steps.tolist()
        short = {n for row, count in zip(sizes, steps, strict=True) for n in row[:count]} - {stack.plan.rows.shape[2]}
        exact = not self.task.model.pads or len(short) <= FEW
        clients = stack.clients()  # what a lane reads is held until it has done so
        now = torch.cuda.current_stream()
        for lane in lanes:
            lane.stream.wait_stream(now)
        at_work: dict[Lane, Iterator[None]] = dict.fromkeys(lanes, iter(()))
        waiting = iter(clients)
        while at_work:
            for lane, going in list(at_work.items()):
                with torch.cuda.stream(lane.stream):
                    if next(going, _OVER) is not _OVER:
                        continue
                coming = next(waiting, None)
                if coming is None:
                    del at_work[lane]
                else:
                    own = _of_client(coming.plan, exact)
                    at_work[lane] = self._replayed(coming, lane.cache, own, lane.stream)
        for lane in lanes:
            now.wait_stream(lane.stream)
        usual = {n: t.contiguous() for n, t in self._changing(stack).items()}
        self.local = replace(self.local, params=self.local.params | usual)

    def _step_by_step(self, stack: _Stack) -> None:
        """Play the steps as they are."""
        update = self._update(stack.parts, stack.local)
        coming = batches.minibatches(self.data, stack.plan, self.dtype)
        for k in stack.plan.active:
            with self.clock("data"):
                batch = next(coming)
            stack.loss[:k].add_(update(batch, k))

    def _update(self, parts: Sequence[_MinibatchUpdate], local: ClientState) -> _Update:
        return _Update([_Steps(self.task, local, part) for part in parts])

    def _replayed_as_one(self, stack: _Stack, cache: GraphCache) -> bool:
        """Run a plan from recordings of all clients' steps; False, and nothing has changed, where there can be none."""
        steps = _of_stack(stack.plan)
        reel = self._reel(stack, cache, len(steps), None)
        if reel is None:
            return False
        try:
            for step in steps:
                reel.run(step)
        except RuntimeError as e:
            cache.refuse(self._key(stack), e)
            return False
        mine = room_for(self._changing(stack))
        self._take_out(mine, stack, reel)
        self.local = replace(self.local, params=self.local.params | mine)
        return True

    def _replayed(
        self, stack: _Stack, cache: GraphCache, steps: list[Step], stream: torch.cuda.Stream
    ) -> Iterator[None]:
        """Run a client's plan from recordings of these steps, one at each turn; as it is where there can be none."""
        reel = self._reel(stack, cache, len(steps), stream)
        if reel is None:
            self._step_by_step(stack)
            return
        try:
            for step in steps:
                reel.run(step)
                yield
        except RuntimeError as e:
            cache.refuse(self._key(stack), e)
            self._step_by_step(stack)
        else:
            self._take_out(self._changing(stack), stack, reel)

    def _key(self, stack: _Stack) -> Hashable:
        """What tells the recordings of a turn from another's."""
        local, parts, plan = stack.local, stack.parts, stack.plan
        rules = [
            (same(p.loss), p.added, p.pulls, p.rule, tuple(p.moves), *[n for n, m in p.moves.items() if m is not None])
            for p in parts
        ]
        held = [shapes(t) for t in (local.params, local.fixed, *[p.state for p in parts])]
        sizes = (plan.rows.shape[0], stack.room, plan.rows.shape[2], len(plan.others), self.data.x.data_ptr())
        return (self.task.model, self.task.criterion, sizes, *rules, *held)

    def _reel(
        self, stack: _Stack, cache: GraphCache, steps: int, stream: torch.cuda.Stream | None
    ) -> CapturedTurn | None:
        """The recordings of a turn with the values of this round; None where there are none."""
        local, parts, plan = stack.local, stack.parts, stack.plan
        split = [p.moves for p in parts], [p.state for p in parts]

        def make(local: ClientState, masks: list[Moves], states: list[Params], rates: list[Tensor]) -> _Update:
            own = zip(parts, masks, states, rates, strict=True)
            return self._update([replace(p, moves=m, state=s, lr=r) for p, m, s, r in own], local)

        def recorder(pool: Any) -> CapturedTurn:
            last = () if stream is None else self.task.model.channels_last  # as the stacks that lanes take them from
            fetch = functools.partial(_fetch, self.data, self.dtype)
            return CapturedTurn(pool, local, *split, fetch, plan, stack.room, self.dtype, make, stream, last)

        reel = cache.reel(self._key(stack), recorder, steps)
        if reel is not None:
            reel.load(local, *split, [float(p.lr) for p in parts], plan)
        return reel

    def _take_out(self, into: Params, stack: _Stack, reel: CapturedTurn) -> None:
        """What the recordings made of a stack: of these tensors, its moments and its losses."""
        copy(into, reel.local.params)
        for part, state in zip(stack.parts, reel.states, strict=True):
            copy(part.state, state)
        stack.loss.add_(reel.loss)

    def _rule(self, turn: Turn) -> optim.Optimizer:
        return turn.optimizer or optim.default(self.training)

    def _moments(self, turn: Turn, rule: optim.Optimizer, moves: Moves) -> Params:
        """The optimiser's state: fresh, as an earlier turn left it, or as the method kept it."""
        fresh = rule.init(tree.select(self.local.params, moves))
        if not turn.memory:
            key = turn.stream, rule
            state = self.state[key] = fresh | self.state.get(key, {})
            return state
        found = {n: t.clone() for n, t in tree.under(self.local.fixed, turn.memory).items() if n in fresh}
        self.local = replace(self.local, fixed=self.local.fixed | tree.prefixed(fresh | found, turn.memory))
        return fresh | found

    def gradient_pass(self, turn: GradientPass) -> None:
        """The gradient on one minibatch of every client, for the turn's update to use."""
        stream, epoch = ("batches", self._epochs("batches")) if turn.first else ("probe", 0)
        plan = batches.plan(self.data, self.training.batch_size, self._stream(stream), steps=1, first=epoch)
        self._charge(turn, turn.names, plan, regrow=True)
        if not self.really:
            return
        keys = tree.sent(rng.extend(self._stream("noise"), -1), plan.rows.device)
        batch = batches.minibatch(self.data, plan, 0, keys, self.dtype)
        leaves = {n: self.local.params[n].detach().requires_grad_() for n in turn.names}
        statistics = tree.copied(self._statistics(self.local))  # not the probe's to change
        seen = self.local.params | statistics | leaves
        task = _with_added(self.task, self.local, turn.added)
        loss = _each(turn.loss(task, replace(self.local, params=seen), batch), self.count, turn.loss)
        grads = torch.autograd.grad(loss.sum(), list(leaves.values()), materialize_grads=True)
        self.local = turn.update(self.local, dict(zip(leaves, grads, strict=True)))

    @torch.no_grad()
    def data_pass(self, turn: DataPass) -> None:
        """Sums over each client's training data, for the turn's update to use."""
        work = self._of_data_pass(turn) * self.data.count.double()
        self.flops += work
        self.dense += work
        if not self.really:
            return

        def measured(batch: Batch) -> Params:
            k = batch.x.shape[0]
            return turn.measure(self.task, _prefix(self.local, k), batch)

        self.local = turn.update(self.local, batches.sums(self.data, batches.SWEEP, self.dtype, measured))

    def _stream(self, purpose: str) -> Tensor:
        if purpose not in self.streams:
            self.streams[purpose] = rng.key(self.training.seed, purpose, self.rnd.number, self.data.ids)
        return self.streams[purpose]

    def _changing(self, stack: _Stack) -> Params:
        """What training changes of a stack: the tensors that move, and running statistics."""
        return tree.select(stack.local.params, stack.moving) | self._statistics(stack.local)

    def _statistics(self, local: ClientState) -> Params:
        found = self.task.model.info.buffers
        return {n: t for n, t in local.params.items() if n.rpartition("/")[2] in found} if found else {}

    def _charge(self, turn: Turn | GradientPass, names: Collection[str], plan: batches.Plan, *, regrow: bool) -> None:
        hook_checks.check_moves(self.method, names, self.local.params)
        active = turn.active(self.local) if callable(turn.active) else turn.active
        info, observed = self.task.model.info, self._calls_of_step(turn, names, plan)
        if observed is None:
            masked, full = cost.step(info, names, active, self.count, regrow=regrow)
        else:
            masked, full = cost.calls(info, observed, active, self.count, regrow=regrow)
        if turn.flops:
            masked, full = masked + turn.flops, full + turn.flops
        whole = full * plan.examples
        self.flops += masked * plan.examples if active else whole
        self.dense += whole

    def _calls_of_step(
        self, turn: Turn | GradientPass, names: Collection[str], plan: batches.Plan
    ) -> tuple[ModelCall, ...] | None:
        """The calls of the model in a step; None where it is one training step of what moves."""
        if turn.loss is own_loss or not turn.count_calls or not names or not plan.active or not len(self.data.x):
            return None

        def run(model: Model, local: ClientState) -> int:
            keys = rng.extend(self._stream("noise"), -1)[:1]
            batch = batches.minibatch(self.data, plan.client(0), 0, tree.sent(keys, plan.rows.device), self.dtype)
            task = _with_added(Task(model, self.task.criterion, self.task.metric), local, turn.added)
            loss = turn.loss(task, local, batch)
            if isinstance(loss, Tensor):  # else it is refused when it is trained
                _require_graph(loss, turn.loss, names)
                torch.autograd.grad(loss.sum(), [local.params[n] for n in names], allow_unused=True)
            return batch.x.shape[1]

        key = (turn.added, len(plan.others), plan.rows.shape[2], tuple(names))
        return self._observe_calls(turn.loss, key, names, run)

    def _of_data_pass(self, turn: DataPass) -> float:
        """FLOP of one example in a pass."""
        if not len(self.data.x):
            return 0.0
        data, most = self.data, batches.SWEEP
        few = data.rows[:1, :most], data.count[:1].clamp(max=most), data.ids[:1]
        data = replace(data, rows=few[0], count=few[1], ids=few[2])

        def run(model: Model, local: ClientState) -> int:
            batch, _ = next(batches.in_order(data, most, self.dtype))
            turn.measure(Task(model, self.task.criterion, self.task.metric), local, batch)
            return batch.x.shape[1]

        observed = self._observe_calls(turn.measure, (), (), run)
        return float(cost.calls(self.task.model.info, observed, {}, 1)[1])

    def _observe_calls(
        self,
        loss: Callable[..., object],
        key: Hashable,
        moving: Collection[str],
        run: Callable[[Model, ClientState], int],
    ) -> tuple[ModelCall, ...]:
        """The calls of the model when a loss is run for the first client of a stack; looked up if it was run before.

        It is run on copies, and leaves PyTorch's own generator as it was: training begins as if it had not been run.
        """
        model, local = self.task.model, self.local
        known = (model_calls.identity(part) for part in (loss, model.info, self.task.criterion))
        key = (*known, tuple(local.params), tuple(local.fixed), key)
        if (calls := _OBSERVED.get(key)) is not None:
            return calls
        error: Exception | None = None
        with rng.torch_generator(self.data.rows.device):
            first = self._copy_of_first(moving)
            try:
                calls = model_calls.observe(model, first.fixed | first.params, lambda noting: run(noting, first))
            except Exception as e:  # what notes the calls is to stand in no traceback
                error = e
            if error is not None:
                run(model, self._copy_of_first(moving))
                raise error
        assert calls is not None
        if len(_OBSERVED) >= MOST_OBSERVED:
            _OBSERVED.clear()
        _OBSERVED[key] = calls
        return calls

    def _copy_of_first(self, moving: Collection[str]) -> ClientState:
        """The first client of the stack in memory of its own, with leaves of autograd for what moves."""
        first = _rows(self.local, slice(1))
        params, fixed = tree.copied(first.params), tree.copied(first.fixed)
        ids, keys = (None if t is None else t.clone() for t in (first.ids, first.keys))
        leaves = {n: params[n].detach().requires_grad_() for n in moving}
        return ClientState(params | leaves, fixed, ids=ids, keys=keys)


def _fetch(data: Examples, dtype: torch.dtype, now: Tensor, step: Step) -> Batch:
    """A minibatch whose rows, number of real rows and random stream stand in each client's row of `now`."""
    return batches.gather(data, now[:, : step.size], now[:, -2], step.full, now[:, -1], dtype)


def _of_stack(plan: batches.Plan) -> list[Step]:
    """Steps told apart by how many clients are at work; all may be padded."""
    return [Step(k, plan.rows.shape[2], False) for k in plan.active]


def _of_client(plan: batches.Plan, exact: bool) -> list[Step]:
    """Steps of one client, told apart by the size of a minibatch; a short one is padded if sizes need not be exact."""
    width = plan.rows.shape[2]
    return [Step(1, n, True) if exact or n == width else Step(1, width, False) for n in plan.sizes[0].tolist()]


def _chain(turn: Turn) -> Iterator[Turn]:
    """A turn and those that follow it on the same minibatches."""
    yield turn
    if turn.then is not None:
        yield from _chain(turn.then)


def _each_row(tree: Mapping[str, T], count: int) -> list[dict[str, T]]:
    """A tree of stacks as one tree for each of so many clients; what is None is so for all."""
    rows = {n: (t,) * count if t is None else t.chunk(count) for n, t in tree.items()}
    return [{n: of_all[c] for n, of_all in rows.items()} for c in range(count)]


def _prefix(local: ClientState, k: int) -> ClientState:
    """The first `k` clients of a stack."""
    return _rows(local, slice(k))


def _rows(local: ClientState, rows: slice) -> ClientState:
    ids, keys = (None if t is None else t[rows] for t in (local.ids, local.keys))
    return ClientState(tree.take(local.params, rows), tree.take(local.fixed, rows), ids=ids, keys=keys)


@dataclass(frozen=True)
class _MinibatchUpdate:
    """One of the updates a turn makes on each minibatch."""

    loss: Loss
    moves: Moves
    rule: optim.Optimizer
    state: Params
    lr: float | Tensor
    added: str = ""
    pulls: tuple[Pull, ...] = ()


@dataclass(frozen=True)
class _Stack:
    """Clients, what is done with each of their minibatches, and which these are."""

    local: ClientState
    parts: list[_MinibatchUpdate]
    plan: batches.Plan
    loss: Tensor  # [C] sums so far, written to
    room: int  # steps that recordings are made for

    @property
    def moving(self) -> set[str]:
        """The tensors that any part moves."""
        return {n for part in self.parts for n in part.moves}

    def clients(self) -> list[_Stack]:
        """Each of them alone, over the same memory."""
        count = len(self.plan.rows)
        params, fixed = (_each_row(t, count) for t in (self.local.params, self.local.fixed))
        moves = [_each_row(p.moves, count) for p in self.parts]
        states = [_each_row(p.state, count) for p in self.parts]
        found = []
        for c in range(count):
            own = slice(c, c + 1)
            ids, keys = (None if t is None else t[own] for t in (self.local.ids, self.local.keys))
            local = ClientState(params[c], fixed[c], ids=ids, keys=keys)
            parts = [replace(p, moves=m[c], state=s[c]) for p, m, s in zip(self.parts, moves, states, strict=True)]
            found.append(replace(self, local=local, parts=parts, plan=self.plan.client(c), loss=self.loss[own]))
        return found


class _Update:
    """All updates on a minibatch, one after the other, each with random streams of its own."""

    def __init__(self, steps: list[_Steps]) -> None:
        self.steps = steps

    def __call__(self, batch: Batch, k: int) -> Tensor:
        """The losses `[k]` of the last one."""
        loss = self.steps[0].step(batch, k)
        for i, after in enumerate(self.steps[1:], 1):
            loss = after.step(_with_own_keys(batch, i), k)
        return loss


def _with_own_keys(batch: Batch, place: int) -> Batch:
    """A minibatch with the random streams of the update at this place."""
    others = tuple(_with_own_keys(other, place) for other in batch.others)
    return replace(batch, keys=rng.extend(rng.extend(batch.keys, "then"), place), others=others)


class _Steps:
    """Optimiser steps over the active prefix of a stack; the views are made anew only when it shrinks."""

    def __init__(self, task: TrainedTask, local: ClientState, part: _MinibatchUpdate) -> None:
        self.task, self.local, self.part = task, local, part
        self.active = -1
        self.slope = CRITERION_GRADIENTS.get(task.criterion) if part.loss is own_loss else None

    def _shrink(self, k: int) -> None:
        self.active = k
        self.now = _prefix(self.local, k)
        self.masks = {n: m if m is None else m[:k] for n, m in self.part.moves.items()}
        self.slots = tree.take(self.part.state, slice(k))
        self.anchors = {pull: pull.anchors(self.now.fixed, self.masks) for pull in self.part.pulls}
        self.leaves: Params = {}  # made where autograd is asked

    def _look(self) -> None:
        """Make what autograd sees of the active clients."""
        self.leaves = {n: self.now.params[n].detach().requires_grad_() for n in self.part.moves}
        self.seen = replace(self.now, params=self.now.params | self.leaves)
        self.seen_task = _with_added(self.task, self.now, self.part.added)

    def step(self, batch: Batch, k: int) -> Tensor:
        """One step of the first `k` clients; their losses `[k]`."""
        if k != self.active:
            self._shrink(k)
        self.untouched: Mapping[str, Collection[int]] = {}
        loss, grads = self._in_closed_form(batch) or self._by_autograd(batch)
        with torch.no_grad():
            for pull in self.part.pulls:
                loss, grads = self._pulled(loss, grads, pull)
            kept = self._rows_without_gradient()
            self.part.rule.step(self.now.params, grads, self.slots, self.masks, self.part.lr)
            for tensor, clients, values in kept:
                tensor[clients] = values
        return loss

    def _rows_without_gradient(self) -> list[tuple[Tensor, list[int], Tensor]]:
        """Copy the weights and the optimiser's state of clients whose part of a tensor has no gradient in this step."""
        kept = []
        for name, clients in self.untouched.items():
            if any(name in anchors for anchors in self.anchors.values()):
                continue  # the proximal term has a gradient
            states = [t for n, t in self.slots.items() if n.partition("/")[2] == name]
            rows = list(clients)
            kept += [(t, rows, t[rows]) for t in (self.now.params[name], *states)]
        return kept

    def _in_closed_form(self, batch: Batch) -> tuple[Tensor, Params] | None:
        """Losses and gradients where those of the criterion and of the model are known in closed form."""
        if self.slope is None:
            return None
        return self.task.model.closed_form_gradients(self.now.params, self.masks, batch, self._slope)

    def _slope(self, out: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The criterion's loss and gradient of outputs."""
        assert self.slope is not None
        return self.slope(out if not self.part.added else out + self.now.fixed[self.part.added].unsqueeze(1), batch)

    def _pulled(self, loss: Tensor, grads: Params, pull: Pull) -> tuple[Tensor, Params]:
        """A loss and its gradients with a proximal term."""
        held = self.anchors[pull]
        away = foreach("sub", [self.now.params[n] for n in held], list(held.values()))
        before = [grads[n] if n in grads else torch.zeros_like(t) for n, t in held.items()]
        steeper = foreach("add", before, away, alpha=pull.weight)
        far = torch.stack([torch.linalg.vector_norm(tree.flat(d), dim=1) for d in away]).square().sum(0)
        return loss + pull.weight / 2 * far, grads | dict(zip(held, steeper, strict=True))

    def _by_autograd(self, batch: Batch) -> tuple[Tensor, Params]:
        """Compute losses and gradients. A tensor the loss does not depend on has none and, as in PyTorch, stays as it
        is: weight decay and momentum do not move it either."""
        if not self.leaves:
            self._look()
        loss = _each(self.part.loss(self.seen_task, self.seen, batch), self.active, self.part.loss)
        _require_graph(loss, self.part.loss, self.leaves)
        grads, self.untouched = self.task.model.differentiate(loss.sum(), self.leaves)
        if batch.x.is_cuda:
            grads = {n: _laid_as(g, self.leaves[n]) for n, g in grads.items()}
        return loss.detach(), grads


class _Added(ModelAround):
    """A model whose outputs have these numbers `[C, K]` added."""

    def __init__(self, model: Model, numbers: Tensor) -> None:
        super().__init__(model)
        self.numbers = numbers.unsqueeze(1)

    def given(self, out: Tensor) -> Tensor:
        return out + self.numbers


def _with_added(task: Task, local: ClientState, added: str) -> Task:
    """The task a loss sees: outputs have what the turn adds to them."""
    return Task(_Added(task.model, local.fixed[added]), task.criterion, task.metric) if added else task


def _laid_as(grad: Tensor, weight: Tensor) -> Tensor:
    """A gradient in memory as its weights lie: a fused update takes no other."""
    return grad if grad.stride() == weight.stride() else torch.empty_like(weight).copy_(grad)


def _each(loss: object, count: int, of: Loss) -> Tensor:
    """A loss, if it has one number for each client: a mean over clients would train at a fraction of the rate."""
    if isinstance(loss, Tensor) and loss.shape == (count,):
        return loss
    made = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
    raise UserError(
        f"the loss {_name_of(of)} must give one number for each client, shape ({count},), and gave {made}; "
        "use batch.mean(...) for the mean over a client's examples, and nothing over clients"
    )


def _require_graph(loss: Tensor, of: Loss, names: Collection[str]) -> None:
    """Refuse a loss that no gradient can be taken of."""
    if not loss.requires_grad:
        raise UserError(
            f"the loss {_name_of(of)} depends on nothing that trains ({list_names(names)}): it is detached, or "
            "computed under torch.no_grad()"
        )


def _name_of(loss: Loss) -> str:
    """Return what a loss is called in messages."""
    return str(getattr(loss, "__qualname__", None) or getattr(getattr(loss, "func", loss), "__qualname__", repr(loss)))
