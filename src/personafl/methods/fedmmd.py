"""FedMMD: local features whose distribution is held near the received model's.

Yao, Huang, Sun, "Two-Stream Federated Learning", 2018: features match the received model's in maximum mean discrepancy.
Choice: features are what enters the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, LocalWork, whole
from personafl.core.settings import setting
from personafl.core.types import Batch, Params, Payload, Round, Task, per_example
from personafl.plugins.mmd import mmd


@dataclass(frozen=True, kw_only=True)
class FedMMD(Algorithm):
    """FedAvg with features that keep the distribution the received model gives them."""

    evaluates: ClassVar[str] = "the global model"
    compares_features: ClassVar[bool] = True

    discrepancy_weight: float = setting(0.01, "weight of the discrepancy (lambda)")

    def check(self) -> None:
        if self.discrepancy_weight < 0:
            raise UserError(f"discrepancy_weight={self.discrepancy_weight}: must not be negative")

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        model = tree.values(down) | kept
        return ClientState(params=model, fixed=tree.prefixed(model, "received"))

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        return [self.usual_turn(whole(self.info.parameters), loss=self._matched)]

    def _matched(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        h, out = task.model.features(local.params, batch.x, batch.valid, batch.keys)
        with torch.no_grad():
            h_g, _ = task.model.features(tree.under(local.fixed, "received"), batch.x, batch.valid)
        loss = batch.mean(per_example(task.criterion, out, batch.y))
        return loss + self.discrepancy_weight * mmd(h, h_g, batch)
