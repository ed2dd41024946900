"""FedPer: the body is shared, the head is private, and both train together.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from personafl.core.algorithm import Algorithm


@dataclass(frozen=True, kw_only=True)
class FedPer(Algorithm):
    """Average the body; each client keeps its head. Both train together."""

    evaluates: ClassVar[str] = "the global body under the client's own head"
    newcomers: ClassVar[str] = "the global body under the initial head, which it trains for a session"

    def private(self) -> frozenset[str]:
        return self.own_head()
