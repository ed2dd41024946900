"""FedPeWS-Fixed: a warm-up in which every client trains a fixed part of each hidden layer, then any method.

Tastan, Horvath, Takac, Nandakumar, "FedPeWS: Personalized Warmup via Subnetworks for Enhanced Heterogeneous Federated
Learning", 2024. Every client has a fixed share of each layer's units, where FedPeWS learns which units are a client's.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState
from personafl.core.settings import setting
from personafl.core.types import Download, Masked, Params, Payload, Round, Setup
from personafl.methods.warmup import WarmUp
from personafl.sparse import units


@dataclass(frozen=True, kw_only=True)
class FedPeWSFixed(WarmUp):
    """A warm-up in which every client has its own part of each hidden layer."""

    shares: tuple[float, ...] = setting((), "each client's share of the units, as (0.25, 0.75); empty: equal shares")

    def check(self) -> None:
        super().check()
        if self.shares and (min(self.shares) <= 0 or abs(sum(self.shares) - 1) > 1e-6):
            raise UserError(f"shares={list(self.shares)}: must be positive and sum to 1")

    def bind(self, setup: Setup) -> Self:
        if self.shares and len(self.shares) != setup.num_clients:
            raise UserError(f"shares: {len(self.shares)} given for {setup.num_clients} clients")
        bound = super().bind(setup)
        few = next((layer for layer in bound.hidden if layer.shape[0] < setup.num_clients), None)
        if few is not None:
            warnings.warn(
                f"{few.weight} has {few.shape[0]} units for {setup.num_clients} clients: some get none", stacklevel=3
            )
        return bound

    def _groups(self, params: Params, ids: Tensor) -> Params:
        """Each client's units, which it and the server know."""
        count = self.setup.num_clients
        shares = torch.tensor(self.shares or [1 / count] * count, dtype=torch.float64)
        edges = torch.cat([torch.zeros(1, dtype=torch.float64), shares.cumsum(0)])
        device = next(iter(params.values())).device
        at = ids.long().clamp(max=count - 1)
        mine = {}
        for layer in self.hidden:
            first, end = ((layer.shape[0] * edges[i]).round().unsqueeze(1) for i in (at, at + 1))
            place = torch.arange(layer.shape[0])
            mine[layer.weight] = ((place >= first) & (place < end)).to(device)
        return self.own(tree.prefixed(mine, "unit"))

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        return super().init_clients(params, ids) | self._groups(params, ids)

    def init_known(self, params: Params, ids: Tensor) -> Params:
        return super().init_known(params, ids) | self._groups(params, ids)

    def newcomer(self, params: Params, down: Download, ids: Tensor) -> Params:
        return super().newcomer(params, down, ids) | self._groups(params, ids)

    def download(self, server: Params, known: Params, rnd: Round) -> Download:
        """Masked too: a client receives the subnetwork it trains, and nothing else of the model."""
        down = super().download(server, known, rnd)
        if rnd.phase != "warm-up" or rnd.predicting:
            return down
        inside = units.positions(self.layers, tree.under(self.mine(known), "unit"))
        whole_ones = tree.values(down.shared)
        own: Payload = {n: Masked(whole_ones[n].expand_as(m), m) for n, m in inside.items()}
        return Download({n: t for n, t in down.shared.items() if n not in own}, own)

    def upload(self, local: ClientState, rnd: Round) -> Payload:
        out = super().upload(local, rnd)
        if rnd.phase != "warm-up":
            return out
        return {n: replace(t, known=True) if isinstance(t, Masked) else t for n, t in out.items()}

    def _units(self, local: ClientState, keys: Tensor) -> Params:
        return self._odds(local)

    def _odds(self, local: ClientState) -> Params:
        """Truth values: on or off in every step."""
        return tree.under(self.mine(local.fixed), "unit")
