"""The `inference` slot: per sample, the surer of a client's own model and the global one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.criteria import entropy
from personafl.core.slots import Answers
from personafl.core.types import Batch, Model, Params, Sweep


@dataclass(frozen=True)
class Adaptive:
    """DM-PFL's Algorithm 4: per sample, the model that is surer than it usually is.

    Zhang et al., "Hitchhiking Generic Federated Learning for Efficient Shift-Robust
    Personalization", KDD 2023, section 3.4. Choices: the base entropies BE are means over the
    client's own training data, the only unshifted data it has when it predicts; the similarity is
    the cosine of raw logits, since that of log-probabilities is always near one.
    """

    class_labels_for: ClassVar[str] = "the entropy of its probabilities"

    def measure(self, method: Answers, deployed: Params, sweep: Sweep) -> Params:
        own, common = _models(deployed)

        def entropies(model: Model, batch: Batch) -> Params:
            k = batch.x.shape[0]
            out = method.answer(model, tree.take(own, slice(k)), batch.x, batch.valid)
            shared = method.common_answer(model, tree.take(common, slice(k)), batch.x, batch.valid)
            sums = {n: batch.mean(entropy(z)) * batch.count for n, z in (("own", out), ("global", shared))}
            return sums | {"count": batch.count}

        total = sweep(entropies)
        return {f"base_entropy/{n}": total[n] / total["count"] for n in ("own", "global")}

    def predict(self, method: Answers, model: Model, deployed: Params, x: Tensor) -> Tensor:
        own, common = _models(deployed)
        z_c, z_g = method.answer(model, own, x), method.common_answer(model, common, x)  # [C, B, K]
        be_c, be_g = (deployed[f"base_entropy/{n}"].to(z_c.dtype).unsqueeze(1) for n in ("own", "global"))
        doubt = 1 - torch.cosine_similarity(z_c, z_g, dim=-1)  # [C, B]
        prefer_own = entropy(z_c) - doubt * be_c < entropy(z_g) - doubt * be_g
        return torch.where(prefer_own.unsqueeze(-1), z_c, z_g)


def _models(deployed: Params) -> tuple[Params, Params]:
    return tree.without(tree.without(deployed, "global"), "base_entropy"), tree.under(deployed, "global")
