"""The local-training loop: the only one, for the simulator and for a deployed client alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from personafl.core import batches, cost, optim, rng, tree
from personafl.core.algorithm import Algorithm, Local, Loss, Probe, Turn
from personafl.core.types import Batch, Download, Examples, Moves, Params, Payload, Round, Task, Training


@dataclass(frozen=True)
class Work:
    """What a session of local training cost its clients, on the host: `[C]` float64 each."""

    flops: Tensor
    dense_flops: Tensor
    loss: Tensor  # mean over the session's steps, nan for a client without any


@dataclass(frozen=True)
class Outcome:
    """A stack of clients after its part of a round."""

    kept: Params
    upload: Payload
    local: Local
    work: Work


def session(
    algorithm: Algorithm, task: Task, data: Examples, kept: Params, down: Download, rnd: Round, *, train: bool = True
) -> Outcome:
    """The client's side of a round, for a stack of clients sorted by size, largest first.

    Without `train` nothing is computed but the cost: hooks, payloads and masks are real.
    """
    payload = tree.received(down, len(data.ids))
    local = algorithm.start(kept, payload, rnd)
    local, work = play(task, local, algorithm.turns(local, rnd), data, algorithm.setup.training, rnd, train=train)
    upload = algorithm.upload(local, rnd) if rnd.stage.up else {}
    return Outcome(algorithm.keep(kept, local, rnd), upload, local, work)


def play(
    task: Task,
    local: Local,
    turns: Sequence[Turn | Probe],
    data: Examples,
    training: Training,
    rnd: Round,
    *,
    train: bool = True,
) -> tuple[Local, Work]:
    """Play a list of turns over a stack of clients; without `train`, only count what it would cost."""
    at_work = _Session(task, local, data, training, rnd, train)
    for turn in turns:
        at_work.probe(turn) if isinstance(turn, Probe) else at_work.train(turn)
    return at_work.finished()


class _Session:
    """A stack of clients between its first and its last turn."""

    def __init__(self, task: Task, local: Local, data: Examples, training: Training, rnd: Round, train: bool) -> None:
        self.task, self.local, self.data, self.training, self.rnd, self.really = task, local, data, training, rnd, train
        self.count, self.dtype = len(data.ids), floating(local.params)
        self.steps, self.epochs = torch.zeros(2, self.count, dtype=torch.int64)  # behind each client
        self.flops, self.dense = torch.zeros(2, self.count, dtype=torch.float64)
        self.loss = torch.zeros(self.count, dtype=torch.float64, device=data.rows.device)
        self.state: dict[optim.Optimizer, Params] = {}  # moments live from turn to turn, not from round to round

    def finished(self) -> tuple[Local, Work]:
        return replace(self.local, steps=self.steps), Work(self.flops, self.dense, self.loss.cpu() / self.steps)

    def train(self, turn: Turn) -> None:
        """Minibatch steps on the turn's loss, over the clients that still have some."""
        moves = turn.moves(self.local) if callable(turn.moves) else turn.moves
        size = self.training.batch_size
        length: dict[str, Any] = {"steps": turn.steps} if turn.steps else {"epochs": turn.epochs, "least": turn.least}
        plan = batches.plan(self.data, size, self._stream("batches"), first=self.epochs, **length)
        self._charge(turn, list(moves), plan, regrow=False)
        if self.really and moves:
            self.local = replace(self.local, params=self.local.params | self._writable(moves))
            rule = turn.optimizer or optim.default(self.training)
            moments = rule.init(tree.select(self.local.params, moves)) | self.state.get(rule, {})
            self.state[rule] = moments
            rate = self.rnd.lr if turn.lr is None else turn.lr
            steps = _Steps(self.task, self.local, turn.loss, moves, rule, moments, rate)
            passed = self.steps.unsqueeze(1) + torch.arange(len(plan.active))
            noise = rng.extend(self._stream("noise").unsqueeze(1), passed).to(plan.rows.device)  # [C, S]
            for s, k in enumerate(plan.active):
                self.loss[:k] += steps.step(batches.minibatch(self.data, plan, s, noise[:k, s], self.dtype), k)
        self.steps += plan.steps
        self.epochs += -(-plan.steps // batches.steps_per_epoch(self.data.count, size))

    def probe(self, turn: Probe) -> None:
        """The gradient on one minibatch of every client, for the turn's update to use."""
        stream, epoch = ("batches", self.epochs) if turn.first else ("probe", 0)
        plan = batches.plan(self.data, self.training.batch_size, self._stream(stream), steps=1, first=epoch)
        self._charge(turn, turn.names, plan, regrow=True)
        if not self.really:
            return
        keys = rng.extend(self._stream("noise"), -1).to(plan.rows.device)
        batch = batches.minibatch(self.data, plan, 0, keys, self.dtype)
        leaves = {n: self.local.params[n].detach().requires_grad_() for n in turn.names}
        seen = self.local.params | self._writable(()) | leaves  # running statistics are not the probe's to change
        loss = turn.loss(self.task, replace(self.local, params=seen), batch)
        grads = torch.autograd.grad(loss.sum(), list(leaves.values()), materialize_grads=True)
        self.local = turn.update(self.local, dict(zip(leaves, grads, strict=True)))

    def _stream(self, purpose: str) -> Tensor:
        return rng.key(self.training.seed, purpose, self.rnd.number, self.data.ids)

    def _writable(self, names: Collection[str]) -> Params:
        """Own copies of these tensors, and of running statistics, which change in the forward pass."""
        statistics = self.task.model.info.buffers
        mine = {n: t for n, t in self.local.params.items() if n in names or n.rpartition("/")[2] in statistics}
        return {n: t.clone(memory_format=torch.contiguous_format) for n, t in mine.items()}

    def _charge(self, turn: Turn | Probe, names: Collection[str], plan: batches.Plan, *, regrow: bool) -> None:
        active = turn.active(self.local) if callable(turn.active) else turn.active
        info = self.task.model.info
        masked, full = cost.step(info, names, active, self.count, regrow=regrow)
        watched = turn.teachers * cost.forward_pass(info) if isinstance(turn, Turn) else 0.0
        self.flops += (masked + watched) * plan.examples
        self.dense += (full + watched) * plan.examples


class _Steps:
    """Optimiser steps over the active prefix of a stack; the views are made anew only when it shrinks."""

    def __init__(
        self, task: Task, local: Local, loss: Loss, moves: Moves, rule: optim.Optimizer, state: Params, lr: float
    ) -> None:
        self.task, self.local, self.loss, self.moves = task, local, loss, moves
        self.rule, self.state, self.lr = rule, state, lr
        self.active = -1

    def _shrink(self, k: int) -> None:
        self.active = k
        self.now = Local(tree.take(self.local.params, slice(k)), tree.take(self.local.fixed, slice(k)))
        self.leaves = {n: self.now.params[n].detach().requires_grad_() for n in self.moves}
        self.seen = replace(self.now, params=self.now.params | self.leaves)
        self.masks = {n: m if m is None else m[:k] for n, m in self.moves.items()}
        self.slots = tree.take(self.state, slice(k))

    def step(self, batch: Batch, k: int) -> Tensor:
        """One step of the first `k` clients; their losses `[k]`."""
        if k != self.active:
            self._shrink(k)
        loss = self.loss(self.task, self.seen, batch)
        grads = torch.autograd.grad(loss.sum(), list(self.leaves.values()), materialize_grads=True)
        with torch.no_grad():
            self.rule.step(self.now.params, dict(zip(self.leaves, grads, strict=True)), self.slots, self.masks, self.lr)
        return loss.detach()


def floating(params: Params) -> torch.dtype:
    """The floating-point type of a model."""
    return next(t.dtype for t in params.values() if t.is_floating_point())
