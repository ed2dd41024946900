"""LocalOnly: every client trains alone. The baseline no federation should lose to.

Choice: a client trains only in rounds that select it, so that its budget is that of the other methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from personafl.core.algorithm import Algorithm
from personafl.core.types import Stage


@dataclass(frozen=True, kw_only=True)
class LocalOnly(Algorithm):
    """Nothing travels; each client keeps the model it trained."""

    evaluates: ClassVar[str] = "the client's own model"
    newcomers: ClassVar[str] = "nothing: it trains the initial model for a session"

    def private(self) -> frozenset[str]:
        return frozenset(self.info.shapes)

    def not_averaged(self) -> bool:
        return True  # clients send nothing

    def schedule(self) -> list[Stage]:
        return [Stage(number=t, down=False, up=False) for t in range(self.setup.training.num_rounds)]
