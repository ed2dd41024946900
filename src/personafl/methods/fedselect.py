"""FedSelect: personal positions, chosen where a client's weights move most.

Tamirisa, Xie, Bao, Zhou, Arel, Shamsian, "FedSelect: Personalized Federated Learning with Customized Selection of
Parameters for Fine-Tuning", CVPR 2024, with the authors' code. A client's mask m (1 = personal, at first nowhere)
grows every few rounds by the weights that changed most since the last time. LocalAlt trains personal and shared
positions in alternating epochs. The server averages a position over those who share it. Choices: epochs on personal
positions shuffle by a stream of their own, so that without any the method is FedAvg; the share that joins is rounded
up. As in the code, the aggregation uses the masks from before their update, the last round has none, only weights
(not biases) can become personal, and running statistics never leave the client.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, LocalWork
from personafl.core.settings import setting
from personafl.core.tree import choose
from personafl.core.types import Download, Masked, Moves, Params, Payload, Round, Stage
from personafl.sparse import masks, means

NEARLY_ALL = 0.999


@dataclass(frozen=True, kw_only=True)
class FedSelect(Algorithm):
    """Each client keeps the positions that move most; the others are averaged over those who share them."""

    evaluates: ClassVar[str] = "the client's model after its last session"
    newcomers: ClassVar[str] = "the global model, after a session of its own"

    select_share: float = setting(0.25, "share of a tensor's shared positions that turns personal at a time (p)")
    personal_bound: float = setting(0.8, "a tensor with more personal positions than this share gets no more")
    select_interval: int = setting(3, "rounds between selections")
    weights: str = "uniform"

    def check(self) -> None:
        for name in ("select_share", "personal_bound"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)}: must be in [0, 1]")
        if self.inference != "own":
            raise UserError(
                f"inference={self.inference!r} needs a global model, and FedSelect sends a client only what it shares"
            )
        if self.select_interval < 1:
            raise UserError(f"select_interval={self.select_interval}: must be at least 1")

    def not_averaged(self) -> bool:
        return True  # the server must take the mask of every upload

    def private(self) -> frozenset[str]:
        return self.info.buffers

    def _weights(self) -> list[str]:
        matrices = {layer.weight for layer in self.info.layers}
        return [n for n in self.info.parameters if "weight" in n.rpartition(".")[2] or n in matrices]

    def schedule(self) -> list[Stage]:
        *rounds, last = super().schedule()
        return [*rounds, Stage(number=last.number, up=False)]

    def _selects(self, rnd: Round) -> bool:
        return rnd.phase == "train" and rnd.number % self.select_interval == 0 and rnd.number != 0

    # State

    def _nothing(self, params: Params) -> Params:
        return tree.prefixed({n: torch.zeros_like(params[n], dtype=torch.bool) for n in self._weights()}, "mask")

    def init_server(self, params: Params) -> Params:
        zero = torch.zeros((), dtype=torch.float64, device=next(iter(params.values())).device)
        return super().init_server(params) | {"aux/unsharing": zero}

    def init_coverage(self, params: Params) -> Params:
        return {n: torch.ones_like(params[n]) for n in self._weights()}

    def init_known(self, params: Params, ids: Tensor) -> Params:
        return tree.stack(self._nothing(params), len(ids))

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        model, weights = tree.select(params, self.info.shapes), tree.select(params, self._weights())
        seen = torch.zeros((), dtype=torch.bool, device=next(iter(model.values())).device)
        mine = tree.prefixed(model, "own") | tree.prefixed(weights, "snapshot") | self._nothing(params)
        return tree.stack(mine | {"aux/seen": seen}, len(ids))

    def welcome(self) -> str:
        return "newcomer"

    # A round

    def download(self, server: Params, known: Params, rnd: Round) -> Download:
        mine, server = tree.under(known, "mask"), tree.without(server, "aux")
        own: Payload = {n: Masked(server[n].expand_as(m), ~m) for n, m in mine.items()}
        return Download(shared=dict(tree.exclude(server, own)), own=own)

    def _own_model(self, kept: Params, down: Payload) -> Params:
        """Own values at personal positions, the received ones elsewhere."""
        own, mask = tree.under(kept, "own"), tree.under(kept, "mask")
        received = {n: own[n] for n in self.info.buffers} | tree.select(tree.values(down), self.info.shapes)
        return received | {n: torch.where(m, own[n], received[n]) for n, m in mask.items()}

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        fixed = {n: t for n, t in kept.items() if n.startswith(("mask/", "snapshot/"))}
        return ClientState(params=self._own_model(kept, down), fixed=fixed)

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        training = self.setup.training
        length = {"epochs": None} if training.local_steps else {"epochs": 1.0}
        shared = self.usual_turn(self._shared, **length)
        personal = self.usual_turn(lambda now: tree.under(now.fixed, "mask"), stream="personal", **length)
        # Before the first selection nobody has anything personal.
        one = [personal, shared] if rnd.number > self.select_interval and self.select_share else [shared]
        return list(one * (1 if training.local_steps else training.local_epochs))

    def _shared(self, local: ClientState) -> Moves:
        mask = tree.under(local.fixed, "mask")
        return {n: ~mask[n] if n in mask else None for n in self.info.parameters}

    def _selected(self, local: ClientState, rnd: Round) -> Params:
        """The masks from now on."""
        mask = tree.under(local.fixed, "mask")
        if not self._selects(rnd):
            return mask
        out = {}
        for n, m in mask.items():
            moved = (local.params[n] - local.fixed[f"snapshot/{n}"]).abs().masked_fill(m, -torch.inf)
            more = (self.select_share * masks.active(~m).double() - 1e-9).ceil().long()
            room = masks.active(m) <= self.personal_bound * m[0].numel()
            out[n] = m | masks.top_k(moved, torch.where(room, more, 0))
        return out

    def _personal_share(self, local: ClientState, mask: Params) -> Tensor:
        """The share of the weights that have moved since the last selection, but for rounding, that are personal."""
        personal = moving = torch.zeros((), dtype=torch.float64)
        for n, m in mask.items():
            before, now = local.fixed[f"snapshot/{n}"].flatten(1), local.params[n].flatten(1)
            rounding = 64 * torch.finfo(now.dtype).eps * now.abs().amax(1, keepdim=True)
            moved = (now - before).abs() > rounding
            personal, moving = personal + (moved & m.flatten(1)).sum(1), moving + moved.sum(1)
        return personal / moving.clamp(min=1)

    def upload(self, local: ClientState, rnd: Round) -> Payload:
        before = tree.under(local.fixed, "mask")
        out: Payload = dict(super().upload(local, rnd))
        out |= {n: Masked(local.params[n], ~m, known=True) for n, m in before.items()}
        if not self._selects(rnd):
            return out
        now = self._selected(local, rnd)
        return out | dict(tree.prefixed(now, "mask")) | {"aux/personal": self._personal_share(local, now)}

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
        new = tree.prefixed(tree.select(local.params, self.info.shapes), "own")
        new |= tree.prefixed(self._selected(local, rnd), "mask") | {"aux/seen": torch.ones_like(kept["aux/seen"])}
        if self._selects(rnd):
            new |= tree.prefixed(tree.select(local.params, self._weights()), "snapshot")
        return kept | new

    def remember(self, known: Params, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        return known | tree.select(tree.values(upload), known)

    def summands(self, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        sums = super().summands(tree.without(tree.without(upload, "mask"), "aux"), weights, rnd)
        sums |= means.covered(upload, weights)
        if self._selects(rnd):
            sums["aux/unsharing"] = (tree.values(upload)["aux/personal"] >= NEARLY_ALL).to(weights)
        return sums

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        new: Params = {}
        for n in self._weights():
            mean, held = means.mean(n, sums, server[n])
            new[n] = torch.where(held, self.approach(server[n], mean), server[n])
        new["aux/unsharing"] = self._warned(server)
        if "aux/unsharing" in sums:
            counted = sums["aux/unsharing"].to(server["aux/unsharing"])
            new["aux/unsharing"] = torch.where(server["aux/unsharing"] == 0, counted, -1)
        return super().aggregate(tree.exclude(server, new), sums, rnd) | new

    def without_uploads(self, server: Params, rnd: Round) -> Params:
        return super().without_uploads(server, rnd) | {"aux/unsharing": self._warned(server)}

    def _warned(self, server: Params) -> Tensor:
        """The count of clients is positive after one round only, and negative from then on."""
        return torch.where(server["aux/unsharing"] > 0, -1, server["aux/unsharing"])

    def notes(self, server: Params) -> dict[str, float]:
        if (clients := int(server["aux/unsharing"])) > 0:
            warnings.warn(
                f"FedSelect: at {clients} of this round's clients, at least {100 * NEARLY_ALL:g} % of the weights that "
                "have moved since the last selection are personal now. These clients share almost no weight that "
                "training moves, so for them the method has become local training but for biases. Shares are of all "
                f"positions of a tensor, moving or not: a smaller select_share (it is {self.select_share}) or "
                f"personal_bound (it is {self.personal_bound}) keeps weights shared.",
                stacklevel=2,
            )
        return {}

    def client_masks(self, kept: Params, down: Payload) -> Params:
        """Which positions are personal."""
        return tree.under(kept, "mask")

    def personal(self, kept: Params, down: Payload) -> Params:
        return choose(kept["aux/seen"], tree.under(kept, "own"), self._own_model(kept, down))

    def common(self, down: Payload) -> Params | None:
        return None if self.info.buffers else super().common(down)
