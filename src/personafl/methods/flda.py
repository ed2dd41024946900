"""FLDA: a gate mixes the probabilities of a shared and of a private model.

Peterson, Kanani, Marathe, "Private Federated Learning with Domain Adaptation", 2019. Choices: the gate is linear in the
shared model's features and begins at one half; the private model begins as the initial one; no noise is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import optim, tree
from personafl.core.local_work import ClientState, LocalWork, whole
from personafl.core.types import Batch, Model, Params, Payload, Round, Task, per_example
from personafl.methods.two_models import TwoModels


@dataclass(frozen=True, kw_only=True)
class FLDA(TwoModels):
    """FedAvg's model and a private one, mixed example by example by a private gate; all three learn together."""

    evaluates: ClassVar[str] = "the gate's mixture of the global and the private model"
    class_labels_for: ClassVar[str] = "probabilities of classes"

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        like = next(iter(params.values()))
        gate = {"gate/weight": like.new_zeros(self.features()), "gate/bias": like.new_zeros(())}
        return super().init_clients(params, ids) | tree.stack(gate, len(ids))

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        names = self.info.parameters
        moving = [*names, *(f"personal/{n}" for n in names), "gate/weight", "gate/bias"]
        rule = optim.default(self.setup.training, joint_clip=True)  # one loss trains all three
        return [self.usual_turn(whole(moving), loss=self._loss, optimizer=rule, flops=3 * 2 * self.features())]

    def _mixed(
        self, model: Model, params: Params, x: Tensor, valid: Tensor | None = None, keys: Tensor | None = None
    ) -> Tensor:
        """log(a p_G + (1 - a) p_P), with a = sigmoid(u z + b) of the shared features z."""
        z, shared = model.features(params, x, valid, keys)
        private = model(tree.under(params, "personal"), x, valid, keys)
        gate = (z @ params["gate/weight"].unsqueeze(2)).squeeze(2) + params["gate/bias"].unsqueeze(1)  # [C, B]
        log = torch.nn.functional.logsigmoid
        sides = [log(gate).unsqueeze(2) + shared.log_softmax(-1), log(-gate).unsqueeze(2) + private.log_softmax(-1)]
        return torch.logsumexp(torch.stack(sides), 0)

    def _loss(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        out = self._mixed(task.model, local.params, batch.x, batch.valid, batch.keys)
        return batch.mean(per_example(task.criterion, out, batch.y))

    def personal(self, kept: Params, down: Payload) -> Params:
        return tree.values(down) | kept

    def after_training(self, kept: Params, local: ClientState, down: Payload, rnd: Round) -> Params:
        return dict(local.params)

    def answer(self, model: Model, own: Params, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self._mixed(model, own, x, valid)
