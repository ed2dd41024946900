"""`inference = "mixture"`: the client's own model and the global one, mixed by whose inputs these seem to be.

Are these inputs of the client's own kind, or of anybody's? Under the first, classes have the client's own frequencies
pi, under the second equal ones. How well inputs fit each class says the global model (`prior_free` where it was
trained so), s_i = softmax(z_global / T), so the odds of the first to the second are

    odds = sum_i strength * log(K sum_k s_ik pi_k)

and both models' probabilities are mixed with the weight sigmoid(odds + log(trust / (1 - trust))) on the client's own.
It goes by the inputs given at once, without labels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core.errors import UserError
from personafl.core.plugin_points import Answers
from personafl.core.types import Params, Sweep
from personafl.plugins.label_prior import PRIOR, measured_frequencies


@dataclass(frozen=True)
class Mixture:
    """Mixes a client's own model and the global one by how likely the inputs are the client's own."""

    together: ClassVar[bool] = True
    in_turn: ClassVar[bool] = False
    class_labels_for: ClassVar[str] = "class frequencies"

    trust: float = field(default=0.5, metadata={"help": "that inputs are the client's own, before any is seen"})
    strength: float = field(default=0.1, metadata={"help": "how much each input counts, for inputs are much alike"})
    temperature: float = field(default=2.0, metadata={"help": "by which the global model's outputs are divided (T)"})

    def __post_init__(self) -> None:
        if not 0 < self.trust < 1:
            raise UserError(f"trust={self.trust}: must be in (0, 1)")
        for name in ("strength", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name}={getattr(self, name)}: must be positive")

    @property
    def asks_global(self) -> bool:
        return True

    @property
    def asks_validation(self) -> str:
        return ""

    def words(self, own: str) -> str:
        return f"the global model and {own}, mixed by how likely the batch is the client's own"

    def measure(self, method: Answers, deployed: Params, sweep: Sweep) -> Params:
        return measured_frequencies(sweep)

    def decide(
        self, deployed: Params, own: Tensor, common: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, Params]:
        fit = torch.log_softmax(common / self.temperature, -1)
        each = math.log(common.shape[2]) + torch.logsumexp(fit + deployed[PRIOR].to(fit.dtype).unsqueeze(1), -1)
        odds = self.strength * (each if valid is None else torch.where(valid, each, 0)).sum(1) + math.log(
            self.trust / (1 - self.trust)
        )
        sides = (
            torch.nn.functional.logsigmoid(odds).view(-1, 1, 1) + torch.log_softmax(own, -1),
            torch.nn.functional.logsigmoid(-odds).view(-1, 1, 1) + torch.log_softmax(common, -1),
        )
        return torch.logaddexp(*sides), {}
