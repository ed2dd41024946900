"""Optimisers as stacked updates under a mask.

An optimiser is a frozen object; its state is a dict of named tensors that travels outside it, so
a method can keep moments over rounds. A position outside the mask keeps its value and its moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.torch_internals import foreach, subtract_scaled
from personafl.core.types import Moves, Params, Training


class Optimizer(Protocol):
    """Updates stacked parameters in place."""

    def init(self, params: Mapping[str, Tensor]) -> Params:
        """Fresh state for these stacked parameters."""
        ...

    def step(self, params: Params, grads: Params, state: Params, moves: Moves, lr: float | Tensor) -> None:
        """Move `params` and `state` in place; only entries of `grads`, only positions of `moves`.

        The rate is a tensor where the step is being recorded, to be replayed at other rates.
        """
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with PyTorch's momentum, weight decay and clipping by norm.

    A decayed position is one that may move. The clip bounds the norm of what may move, of each model
    of each client by itself, before decay; with `joint_clip` of all of a client's models together.
    """

    momentum: float = 0.0
    weight_decay: float = 0.0
    grad_clip: float = 0.0
    joint_clip: bool = False

    def init(self, params: Mapping[str, Tensor]) -> Params:
        if not self.momentum:
            return {}
        return {f"momentum/{n}": torch.zeros_like(p) for n, p in params.items()}

    def step(self, params: Params, grads: Params, state: Params, moves: Moves, lr: float | Tensor) -> None:
        grads = _prepared(self, params, grads, moves)
        names = list(grads)
        if self.momentum:
            for n in names:
                buffer, mask = state[f"momentum/{n}"], moves[n]
                fresh = buffer * self.momentum + grads[n]
                if mask is None:
                    grads[n] = buffer.copy_(fresh)
                else:
                    buffer.copy_(torch.where(mask, fresh, buffer))
                    grads[n] = tree.masked(fresh, mask)
        _descend([params[n] for n in names], [grads[n] for n in names], lr)


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma, Ba, ICLR 2015), bias-corrected by each client's own number of steps."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 0.0
    joint_clip: bool = False
    decoupled: bool = False  # decay the weights themselves, at the learning rate, as AdamW does

    def init(self, params: Mapping[str, Tensor]) -> Params:
        state: Params = {}
        for n, p in params.items():
            state[f"first/{n}"] = torch.zeros_like(p)
            state[f"second/{n}"] = torch.zeros_like(p)
            state[f"steps/{n}"] = torch.zeros(p.shape[0], dtype=torch.float64, device=p.device)
        return state

    def step(self, params: Params, grads: Params, state: Params, moves: Moves, lr: float | Tensor) -> None:
        grads = _prepared(self, params, grads, moves)
        for n, g in grads.items():
            first, second, mask = state[f"first/{n}"], state[f"second/{n}"], moves[n]
            steps = state[f"steps/{n}"].add_(1)
            m = first * self.beta1 + g * (1 - self.beta1)
            v = second * self.beta2 + g * g * (1 - self.beta2)
            m_hat = m / tree.column(1 - self.beta1**steps, m).to(m.dtype)
            v_hat = v / tree.column(1 - self.beta2**steps, v).to(v.dtype)
            update = m_hat / (v_hat.sqrt() + self.eps)
            if self.decoupled and self.weight_decay:
                update = update.add(params[n], alpha=self.weight_decay)
            if mask is not None:
                update = tree.masked(update, mask)
                m, v = torch.where(mask, m, first), torch.where(mask, v, second)
            first.copy_(m)
            second.copy_(v)
            _descend([params[n]], [update], lr)


ROUNDING = 64
"""Machine epsilons of a client's largest gradient up to which another one may be a zero that was rounded."""


@dataclass(frozen=True)
class GradientRecord:
    """Another optimiser, and a record of the positions at which each client had a gradient.

    The record is `reached/NAME` in the state, True where a gradient inside the mask was larger than rounding errors in
    any step. It looks at gradients before weight decay, which also moves weights that the loss does not depend on.
    """

    rule: Optimizer

    def init(self, params: Mapping[str, Tensor]) -> Params:
        nowhere = {f"reached/{n}": torch.zeros_like(p, dtype=torch.bool) for n, p in params.items()}
        return self.rule.init(params) | nowhere

    def step(self, params: Params, grads: Params, state: Params, moves: Moves, lr: float | Tensor) -> None:
        sizes = {n: (g if (m := moves[n]) is None else tree.masked(g, m)).abs() for n, g in grads.items()}
        if sizes:
            largest = torch.stack([tree.flat(t).amax(1) for t in sizes.values()]).amax(0)  # [C]
            bound = ROUNDING * torch.finfo(largest.dtype).eps * largest
            for n, t in sizes.items():
                state[f"reached/{n}"].logical_or_(t > tree.column(bound, t))
        self.rule.step(params, grads, state, moves, lr)


def _descend(params: list[Tensor], along: list[Tensor], lr: float | Tensor) -> None:
    if not isinstance(lr, Tensor):
        foreach("add_", params, along, alpha=-lr)
    else:
        subtract_scaled(params, along, lr)


def default(training: Training, joint_clip: bool = False) -> Optimizer:
    """The optimiser a recipe asks for."""
    if training.optimizer in ("adam", "adamw"):
        return Adam(
            weight_decay=training.weight_decay,
            grad_clip=training.grad_clip,
            joint_clip=joint_clip,
            decoupled=training.optimizer == "adamw",
        )
    return SGD(training.momentum, training.weight_decay, training.grad_clip, joint_clip)


def _prepared(rule: SGD | Adam, params: Params, grads: Params, moves: Moves) -> Params:
    """Gradients as the update rule wants them: clipped per client, decayed, zero where nothing may move."""
    if rule.grad_clip:
        grads = _clipped(grads, moves, rule.grad_clip, rule.joint_clip)
    if rule.weight_decay and not (isinstance(rule, Adam) and rule.decoupled):
        grads = {n: g.add(params[n], alpha=rule.weight_decay) for n, g in grads.items()}
    masked = {n: tree.masked(grads[n], m) for n in grads if (m := moves[n]) is not None}
    return grads | masked


def _clipped(grads: Params, moves: Moves, bound: float, joint: bool) -> Params:
    """Scale each model of each client, or all of a client's, so that the moving gradient has at most this norm."""
    out: Params = {}
    models = dict.fromkeys("" if joint else tree.prefix_of(n) for n in grads)
    for prefix in models:
        group = {n: g for n, g in grads.items() if joint or tree.prefix_of(n) == prefix}
        seen = {n: g if (m := moves[n]) is None else tree.masked(g, m) for n, g in group.items()}
        norm = torch.stack([tree.flat(g).square().sum(1) for g in seen.values()]).sum(0).sqrt()
        scale = (bound / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        out |= {n: g * tree.column(scale, g) for n, g in group.items()}
    return out
