"""Losses of single examples, entropy and divergence; and the gradients of losses that are known in closed form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from personafl.core.types import LOSSES, Batch, Criterion, CriterionGradient

IGNORE_INDEX = -100  # the target of a position that counts for nothing


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of logits `[M, K]`: `[M]`."""
    return F.cross_entropy(out, y, reduction="none")


def sequence_cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of logits `[M, L, K]`, the mean over an example's positions that have a target, 0 without any."""
    if out.dim() != 3 or out.shape[:2] != y.shape:
        raise ValueError(f"one prediction per position is needed, for targets of shape {tuple(y.shape)}")
    each = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none", ignore_index=IGNORE_INDEX).view(y.shape)
    return each.sum(1) / (y != IGNORE_INDEX).sum(1).clamp(min=1)


def mse(out: Tensor, y: Tensor) -> Tensor:
    """Squared error, the mean over an example's numbers: `[M]`."""
    return _mean(error(out, y).square())


def mae(out: Tensor, y: Tensor) -> Tensor:
    """Absolute error, the mean over an example's numbers: `[M]`."""
    return _mean(error(out, y).abs())


def huber(out: Tensor, y: Tensor) -> Tensor:
    """Half the square of errors up to 1, and |error| - 1/2 beyond, the mean over an example's numbers: `[M]`."""
    far = error(out, y)
    return _mean(F.huber_loss(far, torch.zeros_like(far), reduction="none"))


def bce(out: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy of logits `[M, T]`, the mean over labels: `[M]`."""
    _require_alike(out, y)
    return F.binary_cross_entropy_with_logits(out.view(y.shape), y.to(out.dtype), reduction="none").mean(1)


def error(out: Tensor, y: Tensor) -> Tensor:
    """Outputs less targets, in the shape of the targets; never one of each pair of examples, as `[M, 1] - [M]` is."""
    _require_alike(out, y)
    return out.reshape(y.shape) - y


def _require_alike(out: Tensor, y: Tensor) -> None:
    if out.shape[0] != y.shape[0] or out.numel() != y.numel():
        raise ValueError(f"as many numbers as targets are needed, for targets of shape {tuple(y.shape)}")


def _mean(values: Tensor) -> Tensor:
    return values if values.dim() == 1 else values.flatten(1).mean(1)


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


LOSSES |= {
    "classification": {"cross_entropy": cross_entropy},
    "regression": {"mse": mse, "mae": mae, "huber": huber},
    "multilabel": {"bce": bce},
    "sequence": {"cross_entropy": sequence_cross_entropy},
}
CRITERION_GRADIENTS: dict[Criterion, CriterionGradient] = {cross_entropy: _of_cross_entropy}
