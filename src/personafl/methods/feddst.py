"""FedDST: one sparse model for all, whose mask the clients help to find.

Bibikar, Vikalo, Wang, Chen, "Federated Dynamic Sparse Training: Computing Less, Communicating Less, Yet Learning
Better", AAAI 2022, Algorithm 1. Clients train under the server's mask; in readjustment rounds each prunes and regrows
its copy. The server averages every position over those who hold it and prunes back to the budget. The paper's method,
not its released code: growth chooses among positions that were inactive, and the share of changed positions is
annealed (cosine, over half the rounds). Layer sparsities as DM-PFL's experiments have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.local_work import ClientState, LocalWork
from personafl.core.types import Download, Masked, Params, Payload, Round, Stage
from personafl.methods.masked_training import MaskedTraining
from personafl.sparse import masks, means


@dataclass(frozen=True, kw_only=True)
class FedDST(MaskedTraining):
    """Federated training of a sparse model under a mask that moves."""

    evaluates: ClassVar[str] = "the sparse global model"

    readjust_until: float = 0.5
    regrow_scope: str = "elsewhere"

    def schedule(self) -> list[Stage]:
        self.warn_of_starved_layers()
        return super().schedule()

    def init_server(self, params: Params) -> Params:
        mask = self.first_masks(params)
        sparse = {n: tree.masked(params[n], m) for n, m in mask.items()}
        return super().init_server(params) | sparse | tree.prefixed(mask, "mask")

    def download(self, server: Params, known: Params, rnd: Round) -> Download:
        mask = tree.under(server, "mask")
        dense: Payload = dict(tree.without(server, "mask"))
        return Download(shared=dense | {n: Masked(server[n], m) for n, m in mask.items()})

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        return ClientState(params=tree.values(down) | kept, fixed=tree.prefixed(tree.masks(down), "mask"))

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        return self.masked_turns(rnd)

    def upload(self, local: ClientState, rnd: Round) -> Payload:
        mine = self.masks_of(local)
        known = not self.readjusted(rnd)  # then the mask is the one just received
        return dict(super().upload(local, rnd)) | {n: Masked(local.params[n], m, known) for n, m in mine.items()}

    def summands(self, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        return super().summands(upload, weights, rnd) | means.covered(upload, weights)

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        new: Params = {}
        for n, budget in self.budget().items():
            mean, held = means.mean(n, sums, server[n])
            w = torch.where(held, self.approach(server[n], mean), 0)
            mask = masks.top_k(w.abs().masked_fill(~held, -torch.inf)[None], budget)[0]
            new |= {n: tree.masked(w, mask), f"mask/{n}": mask}
        return super().aggregate(tree.exclude(server, new), sums, rnd) | new
