"""FedPHP: FedAvg whose clients each keep an inherited private model.

Li, Zhan, Shao, Li, Song, "FedPHP: Federated Personalization with Inherited Private Models", ECML-PKDD 2021. The
inherited model itself is a part any method can have, `plugins/inherited.py`; its settings are `inherit = { transfer =
"mmd", weight = 0.01, ... }`. The paper averages uniformly (its code by example count: the same in its scenes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.plugins import Inherit


@dataclass(frozen=True, kw_only=True)
class FedPHP(Algorithm):
    """FedAvg with an inherited private model that teaches the downloaded one and answers for the client."""

    evaluates: ClassVar[str] = "the client's inherited private model"
    newcomers: ClassVar[str] = "the global model, after a session of its own"

    inherit: Inherit | None = Inherit()
    weights: str = "uniform"

    def check(self) -> None:
        if self.inherit is None:
            raise UserError("inherit: FedPHP without an inherited model is fedavg")
