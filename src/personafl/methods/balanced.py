"""FedLC and Fed-RoD: local training that makes up for how uneven a client's classes are.

Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022
(FedLC): in the local loss a class has a margin, the larger the rarer it is at the client. Chen, Chao, "On Bridging
Generic and Personalized Federated Learning for Image Classification", ICLR 2022 (Fed-RoD): the shared model is trained
for balanced risk, and beside its head every client has one of its own, trained for its own data, whose outputs are
added.

Choices. FedLC's softmax is over all classes, the true one included, so that the loss is never negative; the margins of
classes a client lacks are those of 1e-8 examples, which takes them out of it. Fed-RoD's balanced risk is that of
balanced softmax; frequencies are smoothed by one example of each class, as in the slot `prior_free`. Its own head is
linear, begins at zero, and sees the features as they are: its loss moves neither body nor shared head. Both losses are
of the same forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm, ClientState, LocalWork, setting, whole
from personafl.core.errors import UserError
from personafl.core.labels import label_pass, log_frequencies
from personafl.core.types import Batch, Model, Params, Payload, Round, Task, per_example

BY_CLASS = "labels/by_class"  # where in `fixed` what is made of label counts is
FEWEST = 1e-8  # examples a class is taken to have for FedLC's margin, where a client has none


@dataclass(frozen=True, kw_only=True)
class FedLC(Algorithm):
    """FedAvg with margins in the local loss that are larger for classes rare at a client."""

    evaluates: ClassVar[str] = "the global model"
    class_labels_for: ClassVar[str] = "how often it occurs"

    margin: float = setting(1.0, "how large margins are (tau)")

    def check(self) -> None:
        _refuse_prior_free(self)
        if self.margin < 0:
            raise UserError(f"margin={self.margin}: must not be negative")

    def margins(self, counts: Tensor) -> Tensor:
        """What is added to outputs in the loss, `[C, K]`."""
        return -self.margin * counts.clamp(min=FEWEST) ** -0.25

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        counting = label_pass(BY_CLASS, self.info.outputs, self.margins)
        return [counting, self.usual_turn(whole(self.info.parameters), added=BY_CLASS)]


@dataclass(frozen=True, kw_only=True)
class FedRoD(Algorithm):
    """A shared model for balanced risk, and every client's own head for its own data; outputs are added."""

    evaluates: ClassVar[str] = "the global model with the client's own head, outputs added"
    newcomers: ClassVar[str] = "the global model with a head of zeros, which it trains for a session"
    compares_features: ClassVar[bool] = True
    class_labels_for: ClassVar[str] = "how often it occurs"

    def check(self) -> None:
        _refuse_prior_free(self)
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


def _refuse_prior_free(method: Algorithm) -> None:
    if method.prior_free:
        raise UserError(f"prior_free: {method.called} makes up for label frequencies in its own way")
