"""Training steps recorded as CUDA graphs and replayed.

A step of a small model is over before the next of its hundred launches has been sent off, so a GPU waits for Python.
Here a turn that is played again and again (the same losses, shapes and update rules, round after round) gets a
reel: buffers of its own for all its tensors, and one graph per number of clients still at work. A round copies its
values into the buffers, replays the graphs and copies the result out; the step and the learning rate are tensors
too, so nothing of a round is part of a recording. The first step of each number of clients runs as it is, in a lane
the first few of each size: there are as many recordings as lanes, and each takes longer than several steps.

Where a model gains nothing from a stack, clients run one at a time in lanes: each has a stream and reels of its own
for one client, so several clients keep a GPU busy, whatever their module consists of. A lane's graphs differ by the
size of a minibatch instead.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from personafl.core.local_work import ClientState
from personafl.core.torch_internals import foreach
from personafl.core.types import Batch, Moves, Params

CAPTURED = 8  # kept at a time; each holds its stacks once more
GRAPHS = 64  # of a reel
REPEATED = 4  # steps that are worth a recording
PATIENCE = 3  # steps of a size that run as they are in a lane; elsewhere one does


class Update(Protocol):
    """One update on a minibatch of the first `k` clients; their losses `[k]`."""

    def __call__(self, batch: Batch, k: int) -> Tensor: ...


Make = Callable[[ClientState, list[Moves], list[Params], list[Tensor]], Update]
"""An update over these buffers: the stack, and for each part of a turn its masks, its moments and its rate."""


class GraphCache:
    """The reels of one model on one GPU."""

    def __init__(self, lanes: int = 0, device: torch.device | None = None) -> None:
        """With so many lanes on that device, for models whose clients run one at a time."""
        self._seen: OrderedDict[Hashable, CapturedTurn | None] = OrderedDict()
        self._refused: set[Hashable] = set()
        self._pool = torch.cuda.graph_pool_handle()
        self._forgotten = 0  # graphs
        self.lanes = [Lane(stream) for stream in _streams(lanes, device)] if device is not None else []

    def reel(self, key: Hashable, make: Callable[[Any], CapturedTurn], steps: int) -> CapturedTurn | None:
        """The reel of a turn of so many steps; None the first time a short one is seen, or if it cannot be recorded."""
        if (held := self._seen.get(key)) is not None:
            self._seen.move_to_end(key)
            return held
        if key in self._refused:
            return None
        if key not in self._seen:
            self._seen[key] = None
            while len(self._seen) > 4 * CAPTURED:
                self._seen.popitem(last=False)
            if steps < REPEATED:
                return None
        self._seen.move_to_end(key)
        made = self._seen[key] = make(self._pool)
        for old in [k for k, r in self._seen.items() if r is not None][:-CAPTURED]:
            self._seen[old] = None
        return made

    def graphs(self) -> int:
        """How many have been recorded."""
        own = sum(len(reel.graphs) for reel in self._seen.values() if reel is not None)
        return self._forgotten + own + sum(lane.cache.graphs() for lane in self.lanes)

    def forget(self) -> None:
        """Give the memory of all recordings back; what is played again is recorded anew."""
        for lane in self.lanes:
            lane.cache.forget()
        self._forgotten += sum(len(reel.graphs) for reel in self._seen.values() if reel is not None)
        self._seen.clear()
        self._pool = torch.cuda.graph_pool_handle()
        gc.collect()  # a reel's update and its buffers name each other
        torch.cuda.empty_cache()

    def refuse(self, key: Hashable, reason: Exception) -> None:
        """Run this turn unrecorded from now on."""
        self._refused.add(key)
        self._seen.pop(key, None)
        self._pool = torch.cuda.graph_pool_handle()  # the one that failed may still be held
        warnings.warn(f"a training step cannot be recorded as a CUDA graph, it runs slower: {reason}", stacklevel=2)


class Lane:
    """A stream, and the reels of the clients that run on it one after the other."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream, self.cache = stream, GraphCache()


@dataclass(frozen=True)
class Step:
    """What tells the graph of one step from another's."""

    clients: int  # still at work
    size: int  # places of a minibatch
    full: bool  # whether all of them are filled


_made: dict[torch.device, list[torch.cuda.Stream]] = {}


def _streams(count: int, device: torch.device) -> list[torch.cuda.Stream]:
    """So many streams, the same ones for all models: libraries keep workspaces for every stream they ever saw."""
    held = _made.setdefault(device, [])
    held += [torch.cuda.Stream(device) for _ in range(count - len(held))]  # type: ignore[no-untyped-call]
    return held[:count]


def same(loss: Callable[..., Any]) -> Hashable:
    """What tells a loss from another one: itself, or what it was made of."""
    if isinstance(loss, functools.partial):
        made_of = [same(a) if callable(a) else a for a in loss.args]
        return (same(loss.func), *made_of, *sorted(loss.keywords.items()))
    return loss


def shapes(tensors: Params) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
    return tuple([(n, t.shape, t.dtype) for n, t in tensors.items()])


def capacity(steps: int) -> int:
    """Steps a reel is made for: a power of two, so that few sizes serve all rounds."""
    return 1 << max(steps - 1, 15).bit_length()


class Minibatches(Protocol):
    """Which rows of its data each client has in each minibatch, as `data.batches.Plan` says it."""

    @property
    def rows(self) -> Tensor: ...  # [C, S, B]

    @property
    def real(self) -> Tensor: ...  # [C, S]

    @property
    def noise(self) -> Tensor: ...  # [C, S]

    @property
    def others(self) -> Sequence[Minibatches]: ...


Fetch = Callable[[Tensor, Step], Batch]
"""The minibatch of the rows, the number of real ones and the random stream in each client's row of a tensor."""


class CapturedTurn:
    """The buffers and the graphs of a turn."""

    def __init__(
        self,
        pool: Any,
        local: ClientState,
        moves: Sequence[Moves],
        states: Sequence[Params],
        fetch: Fetch,
        plan: Minibatches,
        room: int,
        dtype: torch.dtype,
        make: Make,
        stream: torch.cuda.Stream | None = None,
        channels_last: Collection[str] = (),
    ) -> None:
        """`fetch` and `plan` are those of its first round; there is room for so many steps.

        It records on this stream, or on one of PyTorch's; these weights lie channels last.
        """
        assert local.keys is not None
        device, count = plan.rows.device, len(plan.rows)
        self.stream = stream
        params, fixed = (room_for(t, channels_last) for t in (local.params, local.fixed))
        self.local = ClientState(params, fixed, ids=None, keys=local.keys.clone())
        masks = ({n: m for n, m in part.items() if m is not None} for part in moves)
        self.masks = [
            dict.fromkeys(part) | room_for(held, channels_last) for part, held in zip(moves, masks, strict=True)
        ]
        self.states = [room_for(s, channels_last) for s in states]
        self.rates = [torch.zeros((), device=device, dtype=dtype) for _ in moves]
        # rows, how many are real, random stream; of each of a step's minibatches
        self.plans = [plan.rows.new_zeros(count, room, plan.rows.shape[2] + 2) for _ in (plan, *plan.others)]
        self._from_zero = torch.zeros(1 + count, dtype=torch.int64, device=device)  # set back for a round in one go
        self.at, self.loss = self._from_zero[:1], self._from_zero[1:].view(torch.float64)
        self._rates: list[float] = []  # the last
        self.fetch, self.pool = fetch, pool
        self.update = make(self.local, list(self.masks), self.states, self.rates)
        self.graphs: dict[Step, torch.cuda.CUDAGraph] = {}
        self.seen: Counter[Step] = Counter()

    def load(
        self,
        local: ClientState,
        moves: Sequence[Moves],
        states: Sequence[Params],
        rates: Sequence[float],
        plan: Minibatches,
    ) -> None:
        """Take over the values of a round."""
        assert local.keys is not None and self.local.keys is not None
        self.local.keys.copy_(local.keys)
        copy(self.local.params, local.params)
        copy(self.local.fixed, local.fixed)
        for state, now in zip(self.states, states, strict=True):
            copy(state, now)
        for masks, given in zip(self.masks, moves, strict=True):
            copy(masks, given)
        if self._rates != list(rates):
            for held, rate in zip(self.rates, rates, strict=True):
                held.fill_(rate)
            self._rates = list(rates)
        steps = plan.rows.shape[1]
        for held, one in zip(self.plans, (plan, *plan.others), strict=True):
            torch.cat([one.rows, one.real.unsqueeze(2), one.noise.unsqueeze(2)], 2, out=held[:, :steps])
        self._from_zero.zero_()

    def run(self, step: Step) -> None:
        """Run the next step of a plan."""
        if step in self.graphs:
            self.graphs[step].replay()
        elif self.seen[step] >= (1 if self.stream is None else PATIENCE) and len(self.graphs) < GRAPHS:
            self._record(step)
            self.graphs[step].replay()
        else:
            self.seen[step] += 1
            self._advance(step)

    def _record(self, step: Step) -> None:
        graph = torch.cuda.CUDAGraph()
        with _uncollected(), torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            self._advance(step)
        self.graphs[step] = graph

    def _advance(self, step: Step) -> None:
        """One step of the clients still at work, and on to the next."""
        batch, *others = (self._next(plan, step) for plan in self.plans)
        batch = replace(batch, others=tuple(others)) if others else batch
        self.loss[: step.clients] += self.update(batch, step.clients)
        self.at += 1

    def _next(self, plan: Tensor, step: Step) -> Batch:
        """The next minibatch of a plan."""
        return self.fetch(plan[: step.clients].index_select(1, self.at).squeeze(1), step)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the garbage collector: an old graph that it finds may not go while another is being recorded."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def room_for(tensors: Mapping[str, Tensor], channels_last: Collection[str] = ()) -> Params:
    """Memory for these tensors of clients; the weights of these convolutions, of any of a client's models, lie so."""
    if not channels_last:
        return {n: _usual(t) for n, t in tensors.items()}
    return {n: _laid(t) if _layer(n) in channels_last else _usual(t) for n, t in tensors.items()}


def _layer(name: str) -> str:
    """What a tensor is called in the model it is of, or is a moment, a mask or an anchor of."""
    return name.rpartition("/")[2]


def _usual(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _laid(t: Tensor) -> Tensor:
    """Memory for `[C, out, in, height, width]`; what a convolution's weight has of other shapes lies as usual."""
    return t.new_empty(*t.shape[:2], *t.shape[3:], t.shape[2]).movedim(4, 2) if t.dim() == 5 else _usual(t)


def copy(into: Mapping[str, Tensor | None], what: Mapping[str, Tensor | None]) -> None:
    """Write these values over those of the same name: what lies in memory alike in one launch."""
    to, alike = list[Tensor](), list[Tensor]()
    for n, t in into.items():
        if t is None or (f := what[n]) is None:
            continue
        if t.stride() == f.stride() and t.dtype == f.dtype:
            to.append(t)
            alike.append(f)
        else:
            t.copy_(f)
    if to:
        foreach("copy_", to, alike)
