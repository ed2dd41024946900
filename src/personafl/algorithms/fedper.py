"""FedPer and LG-FedAvg: one part of the model is shared, the other private, and both train together.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", 2019: the body is shared.
Liang, Liu, Ziyin, Salakhutdinov, Morency, "Think Locally, Act Globally", 2020: the last layers are shared.
Choices for LG-FedAvg: the final linear layer is shared and there is no FedAvg warm start, as DM-PFL's numbers imply;
heads are averaged uniformly, as the authors' code does (which by its order of names shares the convolutions instead).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from personafl.core.algorithm import Algorithm, setting
from personafl.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class FedPer(Algorithm):
    """Average the body; each client keeps its head. Both train together."""

    evaluates: ClassVar[str] = "the global body under the client's own head"
    newcomers: ClassVar[str] = "the global body under the initial head, which it trains for a session"

    def private(self) -> frozenset[str]:
        return self.own_head()


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(Algorithm):
    """Average the last layers; each client keeps its own features below them."""

    evaluates: ClassVar[str] = "the client's own features under the global head"
    newcomers: ClassVar[str] = "the global head over the initial features, which it trains for a session"

    shared_layers: int = setting(1, "how many of the last layers are shared")
    weights: str = "uniform"

    def check(self) -> None:
        if self.shared_layers < 1:
            raise UserError(f"shared_layers={self.shared_layers}: must be at least 1")

    def private(self) -> frozenset[str]:
        if self.shared_layers == 1:
            return frozenset(self.info.shapes) - self.own_head()
        shared = {n for layer in self.info.layers[-self.shared_layers :] for n in layer.names}
        if shared >= set(self.info.parameters):
            raise UserError(f"shared_layers={self.shared_layers}: that is all of the model; fedavg shares it all")
        return frozenset(self.info.shapes) - shared
