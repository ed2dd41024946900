"""The `robust` slot: a mean over clients that some of them cannot pull anywhere.

Before clients are weighed, the uploads of the cohort are changed so that the method's own weighted mean becomes a
robust one. With C uploads, f = floor(share C), and at each position only the n clients that hold it (where clients send
some positions of a tensor only, those of its mask):

    clip           an upload further from the server's model than a bound is pulled back to that distance (Sun,
                   Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?", 2019)
    median         each holder's value becomes the median of the n (Yin, Chen, Ramchandran, Bartlett,
                   "Byzantine-Robust Distributed Learning", ICML 2018)
    trimmed-mean   or the mean of what is left without the floor(share n) largest and smallest (the same)
    krum           the f uploads furthest from their C - f - 2 nearest others are left out (multi-Krum: Blanchard, El
                   Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries", NeurIPS 2017)

Only parameters that the server averages are looked at and changed: running statistics, masks, votes and counters are
the method's. Ranks, distances and norms count every client once, whatever its weight. The distance of two uploads is
the mean square over positions that both hold, so a client is not near because it shares little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.types import Masked, Params, Payload, Round
from personafl.plugins.wrapper import TrainingWrapper, responsible

RULES = ("clip", "median", "trimmed-mean", "krum")


@dataclass(frozen=True)
class Robust:
    """How the server's mean is made robust."""

    rule: str = field(default="median", metadata={"help": f"one of {', '.join(RULES)}"})
    share: float = field(
        default=0.2, metadata={"help": "of the clients, cut at either end (trimmed-mean) or left out (krum)"}
    )
    bound: float = field(
        default=0.0, metadata={"help": "largest distance from the server's model (clip); 0: the cohort's median"}
    )

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise UserError(f"rule={self.rule!r}: possible are {', '.join(RULES)}")
        if not 0 <= self.share < 0.5:
            raise UserError(f"share={self.share}: must be in [0, 0.5)")
        if not 0 <= self.bound < math.inf:
            raise UserError(f"bound={self.bound}: must be finite and not negative")

    def around(self, method: Algorithm) -> RobustAggregation:
        if method.not_averaged():
            name = responsible(method, lambda part: part.not_averaged())
            raise UserError(
                f"{name} cannot be combined with robust={self.rule!r}, because with its settings the server does not "
                "compute a weighted mean of the uploads, or needs that mean unchanged. Remove robust."
            )
        return RobustAggregation.around(method, slot=self)


@dataclass(frozen=True, kw_only=True)
class RobustAggregation(TrainingWrapper):
    """A method whose server takes a robust mean."""

    prefix: ClassVar[str] = "robust"

    slot: Robust

    def needs_uploads(self) -> bool:
        return True

    def screen(self, server: Params, upload: Payload, rnd: Round) -> tuple[Tensor | None, Payload]:
        averaged = {n: server[n] for n, t in tree.values(upload).items() if self._averaged(n, t, server)}
        rule, sent = self.slot.rule, tree.select(upload, averaged)
        if rule == "krum":
            rows = nearest(sent, averaged, self.slot.share)
            return (None, upload) if rows is None else (rows, tree.rows_of(upload, rows))
        if rule == "clip":
            return None, upload | clipped(sent, averaged, self.slot.bound)
        return None, upload | middle(sent, None if rule == "median" else self.slot.share)

    def _averaged(self, name: str, t: Tensor, server: Params) -> bool:
        model = name not in self.info.buffers and not name.startswith("aux/")
        return model and name in server and t.is_floating_point()


def clipped(upload: Payload, server: Params, bound: float = 0.0) -> Payload:
    """Uploads no further from the server's model than a bound, or than the median of their distances."""
    moved = _moved(upload, server)
    norms = torch.stack([tree.flat(t).double().square().sum(1) for t in moved.values()]).sum(0).sqrt()  # [C]
    limit = torch.as_tensor(bound, dtype=norms.dtype, device=norms.device) if bound else _mean_of_middle(norms)
    scale = (limit / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)
    out: Payload = {}
    for n, entry in upload.items():
        sent = entry.values if isinstance(entry, Masked) else entry
        share = tree.column(scale, sent)
        out[n] = _like(entry, torch.where(share < 1, server[n] + share.to(sent.dtype) * moved[n], sent))
    return out


def middle(upload: Payload, share: float | None) -> Payload:
    """Uploads whose every value is the mean of all clients' at its position, without a share of them at either end.

    Without a share all but the middle one or two are left out: the median.
    """
    out: Payload = {}
    for n, entry in upload.items():
        values, mask = (entry.values, entry.mask) if isinstance(entry, Masked) else (entry, None)
        out[n] = _like(entry, _mean_of_middle(values, mask, share).to(values.dtype).expand_as(values))
    return out


def _mean_of_middle(values: Tensor, mask: Tensor | None = None, share: float | None = None) -> Tensor:
    """Over the first axis and those within the mask, in float64."""
    if mask is None:
        held, ordered = torch.tensor(len(values), device=values.device), values.sort(0).values
    else:
        held, ordered = mask.sum(0), values.masked_fill(~mask, torch.inf).sort(0).values
    cut = (held - 1) // 2 if share is None else (held * share + 1e-9).floor().long()
    place = tree.column(torch.arange(len(values), device=values.device), values)
    inside = (place >= cut) & (place < held - cut)
    return torch.where(inside, ordered, 0).sum(0, dtype=torch.float64) / (held - 2 * cut).clamp(min=1)


def nearest(upload: Payload, server: Params, share: float) -> Tensor | None:
    """The rows that multi-Krum keeps, in their order; None for all."""
    moved, masks = _moved(upload, server), tree.masks(upload)
    count = len(next(iter(moved.values())))
    faulty = int(share * count + 1e-9)
    if not faulty:
        return None
    apart, common = torch.zeros(2, count, count, dtype=torch.float64, device=next(iter(moved.values())).device)
    for n, t in moved.items():
        a = tree.flat(t).double()
        held = tree.flat(masks[n]).double() if n in masks else torch.ones_like(a)
        square = a.square() @ held.T
        apart += square + square.T - 2 * a @ a.T
        common += held @ held.T
    distance = torch.where(common > 0, apart.clamp(min=0) / common.clamp(min=1), torch.inf)
    distance.fill_diagonal_(torch.inf)
    near = distance.sort(1).values[:, : max(count - faulty - 2, 1)].sum(1)
    return near.argsort(stable=True)[: count - faulty].sort().values


def _moved(upload: Payload, server: Params) -> Params:
    """How far each upload is from the server's model, where the client sent anything."""
    masks = tree.masks(upload)
    out = {n: t - server[n] for n, t in tree.values(upload).items()}
    return {n: tree.masked(t, masks[n]) if n in masks else t for n, t in out.items()}


def _like(entry: Tensor | Masked, values: Tensor) -> Tensor | Masked:
    """These values in the form an upload had."""
    return Masked(values, entry.mask, entry.known) if isinstance(entry, Masked) else values
