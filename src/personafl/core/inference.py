"""How a client with a model of its own and the global model answers: the `inference` slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.types import Batch, Model, Params, Sweep


class Answers(Protocol):
    """A method's outputs `[C, B, K]`: of a client's own model and of the global one."""

    def answer(self, model: Model, own: Params, x: Tensor, valid: Tensor | None = None) -> Tensor: ...

    def common_answer(self, model: Model, common: Params, x: Tensor, valid: Tensor | None = None) -> Tensor: ...


class Inference(Protocol):
    """A rule that joins the outputs of `deployed` (own model) and `deployed["global/..."]`."""

    def measure(self, method: Answers, deployed: Params, sweep: Sweep) -> Params:
        """Per-client numbers the rule needs, taken from the training data."""
        ...

    def predict(self, method: Answers, model: Model, deployed: Params, x: Tensor) -> Tensor: ...


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy in nats of the softmax over the last axis."""
    log_p = torch.log_softmax(logits, -1)
    return -(log_p.exp() * log_p).sum(-1)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(softmax(teacher) || softmax(student)) of logits over the last axis, the teacher held fixed."""
    log_p, log_q = torch.log_softmax(teacher.detach(), -1), torch.log_softmax(student, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@dataclass(frozen=True)
class Adaptive:
    """DM-PFL's Algorithm 4: per sample, the model that is surer than it usually is.

    Zhang et al., "Hitchhiking Generic Federated Learning for Efficient Shift-Robust
    Personalization", KDD 2023, section 3.4. Choices: the base entropies BE are means over the
    client's own training data, the only unshifted data it has when it predicts; the similarity is
    the cosine of raw logits, since that of log-probabilities is always near one.
    """

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


INFERENCE: dict[str, Inference | None] = {"own": None, "adaptive": Adaptive()}
