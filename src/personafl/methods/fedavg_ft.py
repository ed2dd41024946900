"""FedAvg+FT: FedAvg followed by local fine-tuning.

As DM-PFL's Table 4 costs it: one more session of `local_epochs`, all layers, at the end.
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
from personafl.core.tree import choose
from personafl.core.types import Params, Payload, Round, Stage


@dataclass(frozen=True, kw_only=True)
class FedAvgFT(Algorithm):
    """FedAvg, then every client fine-tunes the final model and keeps the result.

    Departure: the download that brings the final model to all clients counts as real traffic; the
    papers leave it out, as they leave out the one that brings FedAvg's final model to its users.
    """

    evaluates: ClassVar[str] = "the global model, fine-tuned by the client"
    newcomers: ClassVar[str] = "the global model, which it fine-tunes"

    finetune_epochs: float = setting(
        0.0, "epochs of fine-tuning at the end; 0 takes the recipe's local epochs or steps"
    )

    def check(self) -> None:
        if self.finetune_epochs < 0:
            raise UserError(f"finetune_epochs={self.finetune_epochs}: must not be negative")

    def schedule(self) -> list[Stage]:
        rounds = super().schedule()
        return [*rounds, Stage(number=len(rounds), phase="finetune", who="all", up=False, in_paper=False)]

    def welcome(self) -> str:
        return "finetune"

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        untuned = torch.zeros(len(ids), dtype=torch.bool, device=next(iter(params.values())).device)
        return tree.stack(params, len(ids)) | {"aux/tuned": untuned}

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        statistics = tree.select(kept, self.stays_on_client())
        return ClientState(params=tree.values(down) | statistics)

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        epochs = self.finetune_epochs if rnd.phase == "finetune" and self.finetune_epochs else None
        return [self.usual_turn(whole(self.info.parameters), epochs)]

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
        if rnd.phase == "finetune":
            return local.params | {"aux/tuned": torch.ones_like(kept["aux/tuned"])}
        return kept | tree.select(local.params, self.stays_on_client())

    def personal(self, kept: Params, down: Payload) -> Params:
        own = tree.select(kept, self.info.shapes)
        received = tree.values(down) | tree.select(kept, self.stays_on_client())
        return choose(kept["aux/tuned"], own, tree.select(received, own))
