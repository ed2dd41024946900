"""Ditto: a personal model pulled towards the global one.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
Algorithm 1. Both solvers see the same minibatches, as in the authors' code; the pull is towards the
model received this round. Choice: the global model is the FedAvg mean by example count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm, Local, Probe, Turn, setting, whole
from personafl.core.types import Batch, Params, Payload, Round, Task


@dataclass(frozen=True, kw_only=True)
class Ditto(Algorithm):
    """FedAvg on the global model, and beside it a personal one that stays near."""

    evaluates: ClassVar[str] = "the client's personal model"

    proximal_weight: float = setting(0.1, "how strongly the personal model is pulled to the global one (lambda)")

    def check(self) -> None:
        if self.proximal_weight < 0:
            raise ValueError(f"proximal_weight={self.proximal_weight}: must not be negative")

    def init_clients(self, params: Params, server: Params, ids: Tensor) -> Params:
        return super().init_clients(params, server, ids) | tree.stack(tree.prefixed(params, "personal"), len(ids))

    def start(self, kept: Params, down: Payload, rnd: Round) -> Local:
        received = tree.values(down)
        return Local(params=received | kept, fixed=tree.prefixed(tree.select(received, self.info.parameters), "anchor"))

    def turns(self, local: Local, rnd: Round) -> list[Turn | Probe]:
        names = self.info.parameters
        return [self.session(whole([*names, *(f"personal/{n}" for n in names)]), loss=self._both)]

    def _both(self, task: Task, local: Local, batch: Batch) -> Tensor:
        """The two models share no parameter, so one step on the sum is a step of each solver."""
        personal, anchor = tree.under(local.params, "personal"), tree.under(local.fixed, "anchor")
        pull = tree.squared_distance(tree.select(personal, anchor), anchor)
        return task.loss(local.params, batch) + task.loss(personal, batch) + self.proximal_weight / 2 * pull

    def upload(self, local: Local, rnd: Round) -> Payload:
        return dict(tree.select(super().upload(local, rnd), self.info.shapes))

    def personal(self, kept: Params, down: Payload) -> Params:
        return tree.under(kept, "personal")

    def trained(self, local: Local) -> Params:
        return tree.under(local.params, "personal")
