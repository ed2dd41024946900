"""MOON: local features held near the received model's and away from the client's previous ones.

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021. Choices: features are what enters the head, by default
without the paper's projection, so that the architecture is everybody's; with it (`projection`) two more layers stand
before the head, as wide as what enters it, which travel and are averaged with the model; the contrast is off until a
client has a previous model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import rng, tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, LocalWork, whole
from personafl.core.settings import setting
from personafl.core.types import Batch, Model, Params, Payload, Round, Task, per_example

_PROJECTION = tuple(f"projection/{n}" for n in ("hidden_weight", "hidden_bias", "output_weight", "output_bias"))


@dataclass(frozen=True, kw_only=True)
class MOON(Algorithm):
    """FedAvg with a contrast: features like the received model's, unlike the client's previous model's."""

    evaluates: ClassVar[str] = "the global model"
    compares_features: ClassVar[bool] = True

    contrast_weight: float = setting(5.0, "weight of the contrast (mu)")
    temperature: float = setting(0.5, "temperature of the contrast (tau)")
    projection: bool = setting(False, "two more layers before the head, whose output is contrasted")

    def check(self) -> None:
        if self.projection and (self.inherit is not None or self.weights.startswith("cowa")):
            raise UserError("projection=True: not with inherit or weights by contribution, which run the model alone")
        if self.contrast_weight < 0 or self.temperature <= 0:
            raise UserError(
                f"contrast_weight={self.contrast_weight}, temperature={self.temperature}: must be at least and above 0"
            )

    def check_task(self) -> None:
        super().check_task()
        if self.projection and self.setup.training.task == "sequence":
            raise UserError("projection=True: its layers mix the positions of a sequence; use projection=False")

    def _begin(self, params: Params) -> Params:
        """The projection before training, as PyTorch's linear layers begin: uniform within 1 / sqrt(width)."""
        if not self.projection:
            return {}
        size, like, out = self.features(), next(iter(params.values())), {}
        for i, name in enumerate(_PROJECTION):
            shape = (size, size) if name.endswith("weight") else (size,)
            draw = rng.uniform(rng.key(self.setup.training.seed, "projection", i), torch.Size(shape).numel())
            out[name] = ((2 * draw - 1) / size**0.5).view(shape).to(like.device, like.dtype)
        return out

    def _represented(
        self, model: Model, params: Params, x: Tensor, valid: Tensor | None = None, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What is contrasted, `[C, B, D]`, and the outputs."""
        if not self.projection:
            return model.features(params, x, valid, keys)
        seen: list[Tensor] = []

        def projected(z: Tensor) -> Tensor:
            w, b, v, c = (params[n] for n in _PROJECTION)
            hidden = torch.baddbmm(b.unsqueeze(1), z, w.transpose(1, 2)).relu()
            seen.append(torch.baddbmm(c.unsqueeze(1), hidden, v.transpose(1, 2)))
            return seen[-1]

        _, out = model.features(params, x, valid, keys, projected)
        return seen[-1], out

    def _model(self, params: Params) -> Params:
        """The model and its projection, where there is one."""
        return tree.select(params, [*self.info.shapes, *(_PROJECTION if self.projection else ())])

    def travels(self) -> frozenset[str]:
        return super().travels() | (frozenset(_PROJECTION) if self.projection else frozenset())

    def init_server(self, params: Params) -> Params:
        return super().init_server(params) | self._begin(params)

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        seen = {"aux/seen": torch.zeros((), dtype=torch.bool, device=next(iter(params.values())).device)}
        own = tree.stack(tree.prefixed(params | self._begin(params), "previous") | seen, len(ids))
        return super().init_clients(params, ids) | own

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        model = tree.values(down) | tree.select(kept, self.stays_on_client())
        fixed = tree.prefixed(model, "received") | tree.prefixed(tree.under(kept, "previous"), "previous")
        return ClientState(params=model, fixed=fixed | {"aux/seen": kept["aux/seen"]})

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        moving, work = list(self.info.parameters), 0
        if self.projection:
            moving += _PROJECTION
            work = (3 + 2) * 2 * (2 * self.features() ** 2 + self.features())  # trained, and run for two teachers
        return [self.usual_turn(whole(moving), loss=self._contrast, flops=work)]

    def _contrast(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        z, out = self._represented(task.model, local.params, batch.x, batch.valid, batch.keys)
        with torch.no_grad():
            z_glob, _ = self._represented(task.model, tree.under(local.fixed, "received"), batch.x, batch.valid)
            z_prev, _ = self._represented(task.model, tree.under(local.fixed, "previous"), batch.x, batch.valid)
        near, far = (torch.cosine_similarity(z, other, dim=-1) / self.temperature for other in (z_glob, z_prev))
        term = torch.where(local.fixed["aux/seen"].unsqueeze(1), torch.nn.functional.softplus(far - near), 0)
        return batch.mean(per_example(task.criterion, out, batch.y) + self.contrast_weight * term)

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
        previous = tree.prefixed(self._model(local.params), "previous")
        return super().keep(kept, local, rnd) | previous | {"aux/seen": torch.ones_like(kept["aux/seen"])}

    # Prediction

    def personal(self, kept: Params, down: Payload) -> Params:
        return self._model(tree.values(down) | kept)

    def common(self, down: Payload) -> Params | None:
        return None if super().common(down) is None else self._model(tree.values(down))

    def after_training(self, kept: Params, local: ClientState, down: Payload, rnd: Round) -> Params:
        return self._model(local.params)

    def answer(self, model: Model, own: Params, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self._represented(model, own, x, valid)[1] if self.projection else model(own, x, valid)

    def common_answer(self, model: Model, common: Params, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.answer(model, common, x, valid)
