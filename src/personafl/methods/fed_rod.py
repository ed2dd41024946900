"""Fed-RoD: a shared model for balanced risk, and beside its head every client has one of its own.

Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022. The client's
own head is trained for the client's own data; its outputs are added to those of the shared head.

Choices. The balanced risk is that of balanced softmax; frequencies are smoothed by one example of each class, as in the
plug-in point `prior_free`. The own head is linear, begins at zero, and sees the features as they are: its loss moves
neither the body nor the shared head. Both losses come from the same forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.labels import label_pass, log_frequencies
from personafl.core.local_work import ClientState, LocalWork, whole
from personafl.core.types import Batch, Model, Params, Payload, Round, Task, per_example

BY_CLASS = "labels/by_class"  # where in `fixed` what the classes' log frequencies are


@dataclass(frozen=True, kw_only=True)
class FedRoD(Algorithm):
    """A shared model for balanced risk, and every client's own head for its own data; outputs are added."""

    evaluates: ClassVar[str] = "the global model with the client's own head, outputs added"
    newcomers: ClassVar[str] = "the global model with a head of zeros, which it trains for a session"
    compares_features: ClassVar[bool] = True
    class_labels_for: ClassVar[str] = "class frequencies"

    def check(self) -> None:
        if self.prior_free:
            raise UserError(f"prior_free: {self.called} makes up for label frequencies in its own way")
        if self.inherit is not None or self.weights.startswith("cowa"):
            raise UserError("FedRoD: not with inherit or weights by contribution, which run the model alone")

    def _head(self, state: Params) -> Params:
        return {n: t for n, t in state.items() if n.startswith("own/")}

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        like, classes = next(iter(params.values())), self.info.outputs
        head = {"own/weight": like.new_zeros(classes, self.features()), "own/bias": like.new_zeros(classes)}
        return super().init_clients(params, ids) | tree.stack(head, len(ids))

    def welcome(self) -> str:
        return "newcomer"

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        head = list(self._head(local.params))
        names = head if rnd.phase == "newcomer" else [*self.info.parameters, *head]
        work = 3 * 2 * self.features() * self.info.outputs
        counting = label_pass(BY_CLASS, self.info.outputs, log_frequencies)
        return [counting, self.usual_turn(whole(names), loss=self._both, flops=work)]

    def _both(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        """The balanced risk of the shared model, and the risk of both heads together, by which the own one moves."""
        z, out = task.model.features(local.params, batch.x, batch.valid, batch.keys)
        balanced = out + local.fixed[BY_CLASS].unsqueeze(1)
        together = out.detach() + self._of_head(local.params, z.detach())
        first, second = (per_example(task.criterion, o, batch.y) for o in (balanced, together))
        return batch.mean(first + second)

    def _of_head(self, params: Params, z: Tensor) -> Tensor:
        return torch.baddbmm(params["own/bias"].unsqueeze(1), z, params["own/weight"].transpose(1, 2))

    def personal(self, kept: Params, down: Payload) -> Params:
        return super().personal(kept, down) | self._head(kept)

    def after_training(self, kept: Params, local: ClientState, down: Payload, rnd: Round) -> Params:
        return super().after_training(kept, local, down, rnd) | self._head(local.params)

    def answer(self, model: Model, own: Params, x: Tensor, valid: Tensor | None = None) -> Tensor:
        z, out = model.features(own, x, valid)
        return out + self._of_head(own, z)
