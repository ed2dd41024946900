"""Losses of logits, entropy and divergence; and the gradients of losses that are known in closed form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from personafl.core.types import LOSSES, Batch, Criterion, CriterionGradient


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of logits `[M, K]`: `[M]`."""
    return F.cross_entropy(out, y, reduction="none")


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy in nats of the softmax over the last axis."""
    log_p = torch.log_softmax(logits, -1)
    return -(log_p.exp() * log_p).sum(-1)


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(softmax(teacher) || softmax(student)) of logits over the last axis, the teacher held fixed."""
    log_p, log_q = torch.log_softmax(teacher.detach(), -1), torch.log_softmax(student, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _of_cross_entropy(out: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The difference of what is predicted and what is true; PyTorch's softmax is slow over few classes."""
    label = batch.y.unsqueeze(2)
    above = out - out.amax(2, keepdim=True)
    there = above.gather(2, label)
    share = above.exp_()
    total = share.sum(2, keepdim=True)
    each = total.log().sub_(there).squeeze(2)
    grad = share.div_(total).scatter_add_(2, label, torch.full_like(there, -1.0))
    if batch.valid is None:
        return each.mean(1), grad.div_(out.shape[1])
    weight = batch.valid / batch.count.clamp(min=1).to(out.dtype).unsqueeze(1)
    return batch.mean(each), grad.mul_(weight.unsqueeze(2))


LOSSES["cross_entropy"] = cross_entropy
CRITERION_GRADIENTS: dict[Criterion, CriterionGradient] = {cross_entropy: _of_cross_entropy}
