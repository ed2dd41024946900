"""DM-PFL and DM-PFL+ of `tests/reference.py`, with the interface of the other references."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from personafl.core.types import Layer, Training
from personafl.data.federated import Federation
from personafl.sparse.allocation import RULES
from tests import reference
from tests.references.base import Reference


class DMPFL(Reference):
    """Clients answer with theta_c, the server with theta_g."""

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        allocation: str = "feddst_first_dense",
        sparsity: float = 0.5,
        readjust_share: float = 0.01,
        readjust_interval: int = 10,
        iterations: int = 2,
    ) -> None:
        super().__init__(module, federation, training)
        settings = reference.Settings(
            sparsity=sparsity,
            readjust_share=readjust_share,
            readjust_interval=readjust_interval,
            iterations=iterations,
        )
        layers = []
        for name, w in self.initial.items():
            if w.dim() > 1:  # neither biases nor norms are masked
                layers.append(Layer(name, name.replace("weight", "bias"), tuple(w.shape), macs=0, outputs=0))
        budget = RULES[allocation](layers, sparsity)
        self.slow = reference.DMPFL(module, federation, training, settings, budget)
        self.acted = self.slow.acted

    def keep_statistics(self) -> None:
        """A client has one set, for its own model and for the global one it trains."""
        super().keep_statistics()
        self.slow.statistics_stay = True

    def play(self, number: int) -> None:
        """One round of whatever phase it belongs to."""
        self.slow.play(number)

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """theta_c, Eq. 4."""
        return self.logits(self.slow.theta_c(c), x)

    def common(self, x: Tensor) -> Tensor | None:
        """theta_g, which without running statistics is not complete."""
        if self.own_statistics is not None:
            return None
        return self.logits(self.slow.theta_g() | self.slow.statistics, x)


class DMPFLPlus(DMPFL):
    """Algorithm 4 chooses between theta_c and theta_g, sample by sample."""

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """The logits of the model that is surer than it usually is on the client's training data."""
        theta_c, theta_g = self.slow.theta_c(c), self.slow.theta_g()
        train = self.x[self.rows(c)]
        be_c = reference.base_entropy(self.slow.network, theta_c, train)
        be_g = reference.base_entropy(self.slow.network, theta_g, train)
        out = []
        for z_c, z_g in zip(self.logits(theta_c, x), self.logits(theta_g, x), strict=True):
            out.append(z_c if reference.chooses_own(z_c.tolist(), z_g.tolist(), be_c, be_g) else z_g)
        return torch.stack(out)
