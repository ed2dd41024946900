"""A personal model of the same shape beside the shared one: what Ditto, APFL, FML and FLDA have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.local_work import ClientState, Loss, Turn, whole
from personafl.core.types import Params, Payload, Round


@dataclass(frozen=True, kw_only=True)
class TwoModels(Algorithm):
    """The shared model travels as in FedAvg; the personal one, from the same start, stays."""

    newcomers: ClassVar[str] = "the global model as its personal one, after a session of its own"

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        return super().init_clients(params, ids) | tree.stack(tree.prefixed(params, "personal"), len(ids))

    def welcome(self) -> str:
        return "newcomer"

    def both(self, loss: Loss) -> Turn:
        """A usual session that moves both models; they share no parameter, so one step is a step of each."""
        names = self.info.parameters
        return self.usual_turn(whole([*names, *(f"personal/{n}" for n in names)]), loss=loss)

    def personal(self, kept: Params, down: Payload) -> Params:
        return tree.under(kept, "personal")

    def after_training(self, kept: Params, local: ClientState, down: Payload, rnd: Round) -> Params:
        return tree.under(local.params, "personal")
