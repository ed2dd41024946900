"""FedProx: FedAvg whose clients do not stray.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020.
The squared form of the paper, mu / 2 ||w - w_t||^2 with w_t the received model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, LocalWork, Pull, whole
from personafl.core.settings import setting
from personafl.core.types import Params, Payload, Round


@dataclass(frozen=True, kw_only=True)
class FedProx(Algorithm):
    """FedAvg with a pull of each local model to the received one."""

    evaluates: ClassVar[str] = "the global model"

    proximal_weight: float = setting(0.05, "how strongly a local model is pulled to the received one (mu)")

    def check(self) -> None:
        if self.proximal_weight < 0:
            raise UserError(f"proximal_weight={self.proximal_weight}: must not be negative")

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        received = tree.select(tree.values(down), self.info.parameters)
        return ClientState(params=tree.values(down) | kept, fixed=tree.prefixed(received, "anchor"))

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        return [self.usual_turn(whole(self.info.parameters), pulls=(Pull("anchor", self.proximal_weight),))]
