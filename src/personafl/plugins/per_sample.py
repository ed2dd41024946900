"""`inference = "per-sample"`: of a client's own model and the global one, the surer answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.criteria import entropy
from personafl.core.plugin_points import Answers
from personafl.core.types import Batch, Model, Params, Sweep


@dataclass(frozen=True)
class PerSample:
    """DM-PFL's Algorithm 4: per sample, the model that is surer than it usually is.

    Zhang et al., "Hitchhiking Generic Federated Learning for Efficient Shift-Robust
    Personalization", KDD 2023, section 3.4. Choices: the base entropies BE are means over the
    client's own training data, the only unshifted data it has when it predicts; the similarity is
    the cosine of raw logits, since that of log-probabilities is always near one.
    """

    together: ClassVar[bool] = False
    in_turn: ClassVar[bool] = False
    class_labels_for: ClassVar[str] = "the entropy of class probabilities"

    @property
    def asks_global(self) -> bool:
        return True

    @property
    def asks_validation(self) -> str:
        return ""

    def words(self, own: str) -> str:
        return f"per sample the surer of the global model and {own}"

    def measure(self, method: Answers, deployed: Params, sweep: Sweep) -> Params:
        def entropies(model: Model, batch: Batch) -> Params:
            now = tree.take(deployed, slice(batch.x.shape[0]))
            both = zip(("own", "global"), method.both_answers(model, now, batch.x, batch.valid), strict=True)
            return {n: batch.mean(entropy(z)) * batch.count for n, z in both} | {"count": batch.count}

        total = sweep(entropies)
        return {f"base_entropy/{n}": total[n] / total["count"] for n in ("own", "global")}

    def decide(
        self, deployed: Params, own: Tensor, common: Tensor, valid: Tensor | None = None
    ) -> tuple[Tensor, Params]:
        be_c, be_g = (deployed[f"base_entropy/{n}"].to(own.dtype).unsqueeze(1) for n in ("own", "global"))
        doubt = 1 - torch.cosine_similarity(own, common, dim=-1)  # [C, B]
        prefer_own = entropy(own) - doubt * be_c < entropy(common) - doubt * be_g
        return torch.where(prefer_own.unsqueeze(-1), own, common), {}
