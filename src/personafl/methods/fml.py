"""FML (FedDML): a private model and a shared meme teach each other.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu, "Federated Mutual Learning", 2020. Per minibatch

    L_private = alpha CE + (1 - alpha) KL(p_meme || p_private)
    L_meme    = beta CE + (1 - beta) KL(p_private || p_meme)

each teacher held fixed, temperature 1. Memes are averaged uniformly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from personafl.core import tree
from personafl.core.criteria import divergence
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, LocalWork
from personafl.core.settings import setting
from personafl.core.types import Batch, Round, Task, per_example
from personafl.methods.two_models import TwoModels


@dataclass(frozen=True, kw_only=True)
class FML(TwoModels):
    """Only the meme travels; each client keeps the private model that learns from it."""

    evaluates: ClassVar[str] = "the client's private model"
    class_labels_for: ClassVar[str] = "probabilities of classes"

    alpha: float = setting(0.5, "weight of the private model's own loss against the meme's teaching")
    beta: float = setting(0.5, "weight of the meme's own loss against the private model's teaching")
    weights: str = "uniform"

    def check(self) -> None:
        for name in ("alpha", "beta"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)}: must be in [0, 1]")

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        return [self.both(self._mutual)]

    def _mutual(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        meme = task.model(local.params, batch.x, batch.valid, batch.keys)
        private = task.model(tree.under(local.params, "personal"), batch.x, batch.valid, batch.keys)
        ce_meme, ce_private = (per_example(task.criterion, out, batch.y) for out in (meme, private))
        learn = self.alpha * ce_private + (1 - self.alpha) * divergence(meme, private)
        teach = self.beta * ce_meme + (1 - self.beta) * divergence(private, meme)
        return batch.mean(learn + teach)
