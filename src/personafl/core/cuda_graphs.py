"""Training steps recorded as CUDA graphs and replayed.

A step of a small model is over before the next of its hundred launches has been sent off, so a GPU waits for Python.
Here a turn that is played again and again (the same losses, shapes and update rules, round after round) gets a
reel: buffers of its own for all its tensors, and one graph per number of clients still at work. A round copies its
values into the buffers, replays the graphs and copies the result out; the step and the learning rate are tensors
too, so nothing of a round is part of a recording. A turn seen for the first time, and the first step of each
number of clients, run as they are.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from personafl.core import batches
from personafl.core.algorithm import ClientState
from personafl.core.types import Batch, Examples, Moves, Params

CAPTURED = 8  # kept at a time; each holds its stacks once more
GRAPHS = 64  # of a reel


class Update(Protocol):
    """One update on a minibatch of the first `k` clients; their losses `[k]`."""

    def __call__(self, batch: Batch, k: int) -> Tensor: ...


Make = Callable[[ClientState, list[Moves], list[Params], list[Tensor]], Update]
"""An update over these buffers: the stack, and for each part of a turn its masks, its moments and its rate."""


class GraphCache:
    """The reels of one model on one GPU."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, CapturedTurn | None] = OrderedDict()
        self._refused: set[Hashable] = set()
        self._pool = torch.cuda.graph_pool_handle()

    def reel(self, key: Hashable, make: Callable[[Any], CapturedTurn]) -> CapturedTurn | None:
        """The reel of a turn; None the first time it is seen, and where it cannot be recorded."""
        if key in self._refused:
            return None
        if key not in self._seen:
            self._seen[key] = None
            while len(self._seen) > 4 * CAPTURED:
                self._seen.popitem(last=False)
            return None
        self._seen.move_to_end(key)
        found = self._seen[key]
        if found is None:
            found = self._seen[key] = make(self._pool)
            for old in [k for k, r in self._seen.items() if r is not None][:-CAPTURED]:
                self._seen[old] = None
        return found

    def graphs(self) -> int:
        """How many have been recorded."""
        return sum(len(reel.graphs) for reel in self._seen.values() if reel is not None)

    def refuse(self, key: Hashable, reason: Exception) -> None:
        """Run this turn unrecorded from now on."""
        self._refused.add(key)
        self._seen.pop(key, None)
        warnings.warn(f"a training step cannot be recorded as a CUDA graph, it runs slower: {reason}", stacklevel=2)


def same(loss: Callable[..., Any]) -> Hashable:
    """What tells a loss from another one: itself, or what it was made of."""
    if isinstance(loss, functools.partial):
        made_of = [same(a) if callable(a) else a for a in loss.args]
        return (same(loss.func), *made_of, *sorted(loss.keywords.items()))
    return loss


def shapes(tensors: Params) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
    return tuple((n, tuple(t.shape), t.dtype) for n, t in tensors.items())


def capacity(steps: int) -> int:
    """Steps a reel is made for: a power of two, so that few sizes serve all rounds."""
    return 1 << max(steps - 1, 15).bit_length()


class CapturedTurn:
    """The buffers and the graphs of a turn."""

    def __init__(
        self,
        pool: Any,
        local: ClientState,
        moves: Sequence[Moves],
        states: Sequence[Params],
        data: Examples,
        plan: batches.Plan,
        dtype: torch.dtype,
        make: Make,
    ) -> None:
        assert local.keys is not None
        device, count = plan.rows.device, len(data.ids)
        self.local = ClientState(_blank(local.params), _blank(local.fixed), ids=None, keys=local.keys.clone())
        self.masks = [{n: None if m is None else torch.empty_like(m) for n, m in part.items()} for part in moves]
        self.states = [_blank(s) for s in states]
        self.rates = [torch.zeros((), device=device, dtype=dtype) for _ in moves]
        long = capacity(plan.rows.shape[1])
        self.plan = plan.rows.new_zeros(count, long, plan.rows.shape[2] + 2)  # rows, how many are real, random stream
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.loss = torch.zeros(count, dtype=torch.float64, device=device)
        self.data, self.dtype, self.pool = data, dtype, pool
        self.update = make(self.local, list(self.masks), self.states, self.rates)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.warm: set[int] = set()

    def load(
        self,
        local: ClientState,
        moves: Sequence[Moves],
        states: Sequence[Params],
        rates: Sequence[float],
        plan: batches.Plan,
        noise: Tensor,
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
        for held, rate in zip(self.rates, rates, strict=True):
            held.fill_(rate)
        steps = plan.rows.shape[1]
        self.plan[:, :steps] = torch.cat([plan.rows, plan.real.unsqueeze(2), noise.unsqueeze(2)], 2)
        self.at.zero_()
        self.loss.zero_()

    def run(self, active: Sequence[int]) -> None:
        """Run the steps of a plan."""
        for k, run in itertools.groupby(active):
            for _ in run:
                if k in self.graphs:
                    self.graphs[k].replay()
                elif k in self.warm and len(self.graphs) < GRAPHS:
                    self._record(k)
                    self.graphs[k].replay()
                else:
                    self.warm.add(k)
                    self._advance(k)

    def _record(self, k: int) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self._advance(k)
        self.graphs[k] = graph

    def _advance(self, k: int) -> None:
        """One step of the first `k` clients, and on to the next."""
        now = self.plan[:k].index_select(1, self.at).squeeze(1)
        batch = batches.gather(self.data, now[:, :-2], now[:, -2], False, now[:, -1], self.dtype)
        self.loss[:k] += self.update(batch, k)
        self.at += 1


def _blank(tensors: Params) -> Params:
    return {n: torch.empty_like(t, memory_format=torch.contiguous_format) for n, t in tensors.items()}


def copy(into: Mapping[str, Tensor | None], what: Mapping[str, Tensor | None]) -> None:
    """Write these values over those of the same name."""
    pairs = [(t, f) for n, t in into.items() if t is not None and (f := what[n]) is not None]
    if pairs:
        torch._foreach_copy_([t for t, _ in pairs], [f for _, f in pairs])
