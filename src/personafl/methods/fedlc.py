"""FedLC: margins in the local loss that make up for how uneven a client's classes are.

Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022. In
the local loss a class has a margin; the rarer the class is at the client, the larger the margin.

Choices. The softmax is over all classes, the true one included, so that the loss is never negative. A class that a
client lacks has the margin of 1e-8 examples, which takes it out of the softmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.labels import label_pass
from personafl.core.local_work import ClientState, LocalWork, whole
from personafl.core.settings import setting
from personafl.core.types import Round

BY_CLASS = "labels/by_class"  # where in `fixed` what the classes' margins are
FEWEST = 1e-8  # examples a class is taken to have for its margin, where a client has none


@dataclass(frozen=True, kw_only=True)
class FedLC(Algorithm):
    """FedAvg with margins in the local loss that are larger for classes rare at a client."""

    evaluates: ClassVar[str] = "the global model"
    class_labels_for: ClassVar[str] = "class frequencies"

    margin: float = setting(1.0, "how large margins are (tau)")

    def check(self) -> None:
        if self.prior_free:
            raise UserError(f"prior_free: {self.called} makes up for label frequencies in its own way")
        if self.margin < 0:
            raise UserError(f"margin={self.margin}: must not be negative")

    def margins(self, counts: Tensor) -> Tensor:
        """What is added to outputs in the loss, `[C, K]`."""
        return -self.margin * counts.clamp(min=FEWEST) ** -0.25

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        counting = label_pass(BY_CLASS, self.info.outputs, self.margins)
        return [counting, self.usual_turn(whole(self.info.parameters), added=BY_CLASS)]
