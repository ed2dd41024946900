"""APFL: a learnt mixture of a private and the global model.

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", 2020, Algorithm 1. Per minibatch w steps on
F(w) and v with alpha times the gradient of F at vbar = alpha v + (1 - alpha) w; alpha steps by <v - w, grad F(vbar)>,
clipped to [0, 1], once per round on the first minibatch. Choices: the prediction mixes with the latest received
global model; the regularisation of alpha in the authors' code is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, GradientPass, LocalWork
from personafl.core.settings import setting
from personafl.core.types import Batch, Params, Payload, Round, Task
from personafl.methods.two_models import TwoModels


@dataclass(frozen=True, kw_only=True)
class APFL(TwoModels):
    """FedAvg, and beside it a private model; a client answers with their mixture."""

    evaluates: ClassVar[str] = "alpha times the private model plus 1 - alpha times the global one"

    alpha: float = setting(0.5, "share of the private model at first")
    learn_alpha: bool = setting(True, "whether each client adapts its share")

    def check(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UserError(f"alpha={self.alpha}: must be in [0, 1]")

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        like = next(iter(params.values()))
        alpha = {"aux/alpha": torch.full((), self.alpha, dtype=like.dtype, device=like.device)}
        return super().init_clients(params, ids) | tree.stack(alpha, len(ids))

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        def adapt(now: ClientState, grads: Params) -> ClientState:
            alpha = (now.params["aux/alpha"] - rnd.lr * grads["aux/alpha"]).clamp(0, 1)
            return replace(now, params=now.params | {"aux/alpha": alpha})

        both = self.both(self._losses)
        learn = GradientPass(["aux/alpha"], adapt, first=True, loss=self._mixed)
        return [learn, both] if self.learn_alpha else [both]

    def _mixture(self, params: Params, common: Params) -> Params:
        """vbar; running statistics are the private model's."""
        private, alpha = tree.under(params, "personal"), params["aux/alpha"]
        mixed = {}
        for n in self.info.parameters:
            share = tree.column(alpha, private[n])
            mixed[n] = share * private[n] + (1 - share) * common[n]
        return private | mixed

    def _mixed(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        fixed = {n: local.params[n].detach() for n in self.info.parameters}
        return task.loss(self._mixture(local.params, fixed), batch)

    def _losses(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        return task.loss(local.params, batch) + self._mixed(task, local, batch)

    def personal(self, kept: Params, down: Payload) -> Params:
        return self._mixture(kept, tree.values(down))

    def after_training(self, kept: Params, local: ClientState, down: Payload, rnd: Round) -> Params:
        return self._mixture(local.params, local.params)
