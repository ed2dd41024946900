"""FedProx: FedAvg whose clients do not stray.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020.
The squared form of the paper, mu / 2 ||w - w_t||^2 with w_t the received model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm, ClientState, LocalWork, setting, whole
from personafl.core.errors import UserError
from personafl.core.types import Batch, Params, Payload, Round, Task


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
        return [self.usual_turn(whole(self.info.parameters), loss=self._near)]

    def _near(self, task: Task, local: ClientState, batch: Batch) -> Tensor:
        anchor = tree.under(local.fixed, "anchor")
        pull = tree.squared_distance(tree.select(local.params, anchor), anchor)
        return task.loss(local.params, batch) + self.proximal_weight / 2 * pull
