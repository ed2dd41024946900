"""Ditto: a personal model pulled towards the global one.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
Algorithm 1. Both solvers see the same minibatches, as in the authors' code; the pull is towards the
model received this round. Choice: the global model is the FedAvg mean by example count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from personafl.core import tree
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, LocalWork, Pull
from personafl.core.settings import setting
from personafl.core.types import Batch, Params, Payload, Round, Task
from personafl.methods.two_models import TwoModels


@dataclass(frozen=True, kw_only=True)
class Ditto(TwoModels):
    """FedAvg on the global model, and beside it a personal one that stays near."""

    evaluates: ClassVar[str] = "the client's personal model"

    proximal_weight: float = setting(0.1, "how strongly the personal model is pulled to the global one (lambda)")

    def check(self) -> None:
        if self.proximal_weight < 0:
            raise UserError(f"proximal_weight={self.proximal_weight}: must not be negative")

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        received = tree.values(down)
        return ClientState(
            params=received | kept, fixed=tree.prefixed(tree.select(received, self.info.parameters), "anchor")
        )

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        return [replace(self.both(self._losses), pulls=(Pull("anchor", self.proximal_weight, of="personal"),))]

    def _losses(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        """The global solver's loss, and the personal solver's."""
        return task.loss(local.params, batch) + task.loss(tree.under(local.params, "personal"), batch)
