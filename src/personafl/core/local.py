"""The local-training loop: the only one, for the simulator and for a deployed client alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    """Play a list of turns over a stack of clients."""
    count = len(data.ids)
    flops, dense = torch.zeros(2, count, dtype=torch.float64)
    losses = torch.zeros(count, dtype=torch.float64, device=data.rows.device)
    taken = torch.zeros(count, dtype=torch.int64)
    per_epoch = batches.steps_per_epoch(data.count, training.batch_size)
    streams = {p: rng.key(training.seed, p, rnd.number, data.ids) for p in ("batches", "probe", "noise")}
    state: dict[optim.Optimizer, Params] = {}
    epoch = 0
    for turn in turns:
        active = turn.active(local) if callable(turn.active) else turn.active
        if isinstance(turn, Probe):
            plan = batches.plan(data, training.batch_size, streams["probe"], steps=1)
            masked, full = cost.step(task.model.info, turn.names, active, count, regrow=True)
            if train:
                local = turn.update(local, _gradient(task, local, turn, plan, data, streams["noise"]))
        else:
            moves = turn.moves(local) if callable(turn.moves) else turn.moves
            length = {"steps": turn.steps} if turn.steps else {"epochs": turn.epochs}
            plan = batches.plan(data, training.batch_size, streams["batches"], first=epoch, **length)
            masked, full = cost.step(task.model.info, moves.keys(), active, count)
            epoch += int((-(-plan.steps // per_epoch)).max())
            if train:
                # Running statistics change in the forward pass, so they are owned along with what moves.
                owned = {
                    n: t
                    for n, t in local.params.items()
                    if n in moves or n.rpartition("/")[2] in task.model.info.buffers
                }
                local = replace(
                    local,
                    params=local.params | {n: t.clone(memory_format=torch.contiguous_format) for n, t in owned.items()},
                )
                rule = turn.optimizer or optim.default(training)
                if rule not in state:
                    state[rule] = {}
                state[rule] = rule.init(tree.select(local.params, moves)) | state[rule]
                rate = rnd.lr if turn.lr is None else turn.lr
                steps = _Steps(task, local, turn.loss, moves, rule, state[rule], rate)
                noise = rng.extend(
                    streams["noise"].unsqueeze(1), taken.unsqueeze(1) + torch.arange(max(len(plan.active), 1))
                )
                for s, k in enumerate(plan.active):
                    batch = batches.gather(
                        data,
                        plan.rows[:k, s],
                        plan.real[:k, s],
                        plan.full[s],
                        noise[:k, s].to(plan.rows.device),
                        steps.dtype,
                    )
                    losses[:k] += steps.step(batch, k)
            taken += plan.steps
        flops += masked * plan.examples
        dense += full * plan.examples
    return replace(local, steps=taken), Work(flops, dense, losses.cpu() / taken)


class _Steps:
    """Optimiser steps over the active prefix of a stack; the views are made anew only when it shrinks."""

    def __init__(
        self, task: Task, local: Local, loss: Loss, moves: Moves, rule: optim.Optimizer, state: Params, lr: float
    ) -> None:
        self.task, self.local, self.loss, self.moves = task, local, loss, moves
        self.rule, self.state, self.lr = rule, state, lr
        self.active = -1
        self.dtype = floating(local.params)

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


def _gradient(task: Task, local: Local, probe: Probe, plan: batches.Plan, data: Examples, noise: Tensor) -> Params:
    """The gradient on one minibatch of every client. Dropout and running statistics are those of a step -1."""
    keys = rng.extend(noise, -1).to(plan.rows.device)
    batch = batches.gather(data, plan.rows[:, 0], plan.real[:, 0], plan.full[0], keys, floating(local.params))
    leaves = {n: local.params[n].detach().requires_grad_() for n in probe.names}
    spare = {n: t.clone() for n, t in local.params.items() if n.rpartition("/")[2] in task.model.info.buffers}
    loss = probe.loss(task, replace(local, params=local.params | leaves | spare), batch)
    grads = torch.autograd.grad(loss.sum(), list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def floating(params: Params) -> torch.dtype:
    """The floating-point type of a model."""
    return next(t.dtype for t in params.values() if t.is_floating_point())
