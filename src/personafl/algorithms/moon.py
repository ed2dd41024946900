"""MOON and FedMMD: local features held near the received model's.

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021: features are pulled to the received model's and
pushed from those of the client's previous one. Yao, Huang, Sun, "Two-Stream Federated Learning", 2018: features
match the received model's in maximum mean discrepancy. Choices: features are what enters the head, without MOON's
projection, so that the architecture is everybody's; MOON's term is off until a client has a previous model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm, ClientState, LocalWork, setting, whole
from personafl.core.errors import UserError
from personafl.core.types import Batch, Params, Payload, Round, Task, per_example
from personafl.slots.mmd import mmd


@dataclass(frozen=True, kw_only=True)
class MOON(Algorithm):
    """FedAvg with a contrast: features like the received model's, unlike the client's previous model's."""

    evaluates: ClassVar[str] = "the global model"
    compares_features: ClassVar[bool] = True

    contrast_weight: float = setting(5.0, "weight of the contrast (mu)")
    temperature: float = setting(0.5, "temperature of the contrast (tau)")

    def check(self) -> None:
        if self.contrast_weight < 0 or self.temperature <= 0:
            raise UserError(
                f"contrast_weight={self.contrast_weight}, temperature={self.temperature}: must be at least and above 0"
            )

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        seen = {"aux/seen": torch.zeros((), dtype=torch.bool, device=next(iter(params.values())).device)}
        own = tree.stack(tree.prefixed(params, "previous") | seen, len(ids))
        return super().init_clients(params, ids) | own

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        model = tree.values(down) | tree.select(kept, self.stays_on_client())
        fixed = tree.prefixed(model, "received") | tree.prefixed(tree.under(kept, "previous"), "previous")
        return ClientState(params=model, fixed=fixed | {"aux/seen": kept["aux/seen"]})

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        return [self.usual_turn(whole(self.info.parameters), loss=self._contrast, teachers=2)]

    def _contrast(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        z, out = task.model.features(local.params, batch.x, batch.valid, batch.keys)
        with torch.no_grad():
            z_glob, _ = task.model.features(tree.under(local.fixed, "received"), batch.x, batch.valid)
            z_prev, _ = task.model.features(tree.under(local.fixed, "previous"), batch.x, batch.valid)
        near, far = (torch.cosine_similarity(z, other, dim=-1) / self.temperature for other in (z_glob, z_prev))
        term = torch.where(local.fixed["aux/seen"].unsqueeze(1), torch.nn.functional.softplus(far - near), 0)
        return batch.mean(per_example(task.criterion, out, batch.y) + self.contrast_weight * term)

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
        previous = tree.prefixed(tree.select(local.params, self.info.shapes), "previous")
        return super().keep(kept, local, rnd) | previous | {"aux/seen": torch.ones_like(kept["aux/seen"])}


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
        return [self.usual_turn(whole(self.info.parameters), loss=self._matched, teachers=1)]

    def _matched(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        h, out = task.model.features(local.params, batch.x, batch.valid, batch.keys)
        with torch.no_grad():
            h_g, _ = task.model.features(tree.under(local.fixed, "received"), batch.x, batch.valid)
        loss = batch.mean(per_example(task.criterion, out, batch.y))
        return loss + self.discrepancy_weight * mmd(h, h_g, batch)
