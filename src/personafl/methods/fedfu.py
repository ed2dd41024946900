"""FedFu: the head sees a fusion of the local features and those of the received body.

Yao, Huang, Wu, Zhang, Sun, "Towards Faster and Better Federated Learning: A Feature Fusion Approach", ICIP 2019. The
received body is not trained. Choices: what is fused is what enters the head, each number of it a channel, so that
`conv` is a linear map of both; it begins as their mean, not at random.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import optim, tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, LocalWork, whole
from personafl.core.settings import setting
from personafl.core.types import Batch, Model, Params, Payload, Round, Task, per_example


@dataclass(frozen=True, kw_only=True)
class FedFu(Algorithm):
    """FedAvg with a module, averaged too, that fuses the received model's features into the local ones."""

    evaluates: ClassVar[str] = "the global model, its features fused with the received body's"

    fusion: str = setting("conv", "linear map of both, a share per feature, or one share", ("conv", "multi", "single"))
    smoothing: float = setting(0.9, "how much of its shares the server keeps in a round, for multi and single")
    weights: str = "uniform"

    def check(self) -> None:
        if self.inherit is not None or self.weights.startswith("cowa"):
            raise UserError("FedFu: not with inherit or weights by contribution, which run the model alone")
        if not 0 <= self.smoothing < 1:
            raise UserError(f"smoothing={self.smoothing}: must be in [0, 1)")

    def check_task(self) -> None:
        super().check_task()
        if self.fusion == "conv" and self.setup.training.task == "sequence":
            raise UserError("fusion='conv': its linear map mixes the positions of a sequence; use multi or single")

    def _begin(self, like: Tensor) -> Params:
        size = self.features()
        if self.fusion == "conv":
            half = torch.eye(size, dtype=like.dtype, device=like.device) / 2
            return {"fusion/weight": torch.cat([half, half], 1), "fusion/bias": like.new_zeros(size)}
        return {"fusion/gamma": like.new_zeros(size if self.fusion == "multi" else 1)}

    def _fused(self, params: Params, z_g: Tensor, z: Tensor) -> Tensor:
        """F(E_g(x), E_l(x)), `[C, B, D]`."""
        if self.fusion == "conv":
            joint = torch.cat([z_g, z], -1)
            return torch.baddbmm(params["fusion/bias"].unsqueeze(1), joint, params["fusion/weight"].transpose(1, 2))
        gamma = params["fusion/gamma"].unsqueeze(1)
        return gamma * z_g + (1 - gamma) * z

    def travels(self) -> frozenset[str]:
        return super().travels() | {"fusion/weight", "fusion/bias", "fusion/gamma"}

    def init_server(self, params: Params) -> Params:
        return super().init_server(params) | self._begin(next(iter(params.values())))

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        model = tree.values(down) | kept
        return ClientState(params=model, fixed=tree.prefixed(tree.select(model, self.info.shapes), "received"))

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        names = [n for n in local.params if n.startswith("fusion/")]
        size = self.features()
        work = 3 * 2 * 2 * size * size if self.fusion == "conv" else 3 * 3 * size
        moving = whole([*self.info.parameters, *names])
        rule = optim.default(self.setup.training, joint_clip=True)  # the fusion is a part of the model
        return [self.usual_turn(moving, loss=self._loss, optimizer=rule, flops=work)]

    def _loss(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        with torch.no_grad():
            z_g, _ = task.model.features(tree.under(local.fixed, "received"), batch.x, batch.valid)
        _, out = task.model.features(
            local.params, batch.x, batch.valid, batch.keys, lambda z: self._fused(local.params, z_g, z)
        )
        return batch.mean(per_example(task.criterion, out, batch.y))

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        new = super().aggregate(server, sums, rnd)
        if "fusion/gamma" in new:
            new["fusion/gamma"] = torch.lerp(new["fusion/gamma"], server["fusion/gamma"], self.smoothing)
        return new

    # Prediction

    def _with_received(self, model: Params, received: Params) -> Params:
        fusion = {n: t for n, t in model.items() if n.startswith("fusion/")}
        return tree.select(model, self.info.shapes) | fusion | tree.prefixed(received, "received")

    def personal(self, kept: Params, down: Payload) -> Params:
        model = tree.values(down) | kept
        return self._with_received(model, tree.select(model, self.info.shapes))

    def common(self, down: Payload) -> Params | None:
        model = tree.values(down)
        return (
            None if super().common(down) is None else self._with_received(model, tree.select(model, self.info.shapes))
        )

    def after_training(self, kept: Params, local: ClientState, down: Payload, rnd: Round) -> Params:
        return self._with_received(local.params, tree.under(local.fixed, "received"))

    def answer(self, model: Model, own: Params, x: Tensor, valid: Tensor | None = None) -> Tensor:
        z_g, _ = model.features(tree.under(own, "received"), x, valid)
        return model.features(own, x, valid, change=lambda z: self._fused(own, z_g, z))[1]

    def common_answer(self, model: Model, common: Params, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.answer(model, common, x, valid)
