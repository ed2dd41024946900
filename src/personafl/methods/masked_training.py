"""Training under masks that are pruned and regrown: what DM-PFL and FedDST have in common."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, GradientPass, LocalWork, Turn
from personafl.core.settings import setting
from personafl.core.types import Moves, Params, Round
from personafl.sparse import allocation, masks, schedules


@dataclass(frozen=True, kw_only=True)
class MaskedTraining(Algorithm):
    """The weight matrices of a model run under masks, kept in `local.fixed["mask/..."]`."""

    sparsity: float = setting(0.5, "share of weights that are zero (S)")
    allocation: str = setting("feddst_first_dense", "how sparsity is spread over layers", tuple(allocation.RULES))
    readjust_share: float = setting(0.01, "share of active weights pruned and regrown at first (alpha_s)")
    readjust_interval: int = setting(10, "rounds between mask readjustments")
    readjust_until: float = setting(1.0, "share of the rounds over which that share is annealed to nothing")
    readjust_when: str = setting(
        "before_last_epoch", "when in a session masks change", ("before_last_epoch", "after_training")
    )
    regrow_scope: str = setting(
        "inactive", "positions regrowth may choose from: pruned ones too, those inactive before, any", masks.SCOPES
    )
    readjust_head: bool = setting(True, "whether the mask of the last layer is readjusted like the others")

    def check(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise UserError(f"sparsity={self.sparsity}: must be in [0, 1)")
        for name in ("readjust_share", "readjust_until"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)}: must be in [0, 1]")
        if self.readjust_interval < 1:
            raise UserError(f"readjust_interval={self.readjust_interval}: must be at least 1")

    def needs_all_rounds(self) -> bool:
        return self.readjust_share > 0  # the share is annealed over the rounds

    def budget(self) -> dict[str, int]:
        """How many weights of each layer are active."""
        if not self.info.layers:
            raise UserError(f"{self.called} masks weight matrices; this model multiplies by none")
        return allocation.RULES[self.allocation](self.info.layers, self.sparsity)

    def warn_of_starved_layers(self) -> None:
        sizes = {layer.weight: layer.weights for layer in self.info.layers}
        least = 0.1 * (1 - self.sparsity)  # a tenth of the average density
        starved = {n: k / sizes[n] for n, k in self.budget().items() if k < least * sizes[n]}
        if starved:
            cells = ", ".join(f"{100 * share:.1f} % of {n}" for n, share in starved.items())
            warnings.warn(
                f"allocation={self.allocation} leaves only {cells}; another rule, such as erk, spreads it", stacklevel=3
            )

    def first_masks(self, params: Params) -> Params:
        """The largest weights of the common initial model."""
        return {n: masks.top_k(params[n].abs()[None], k)[0] for n, k in self.budget().items()}

    def init_coverage(self, params: Params) -> Params:
        return {n: torch.ones_like(params[n]) for n in self.budget()}

    def masks_of(self, local: ClientState) -> Params:
        return tree.under(local.fixed, "mask")

    def moves_of(self, local: ClientState) -> Moves:
        """All that may move: masked weights at their positions, everything else whole."""
        held = self.masks_of(local)
        return {n: held.get(n) for n in self.info.parameters}

    def readjusted(self, rnd: Round) -> float:
        """The share of each mask that is readjusted in this round, annealed; 0 when it is not due."""
        end = self.readjust_until * self.setup.training.num_rounds
        due = schedules.due(rnd.number, self.readjust_interval)
        return schedules.cosine(self.readjust_share, rnd.number, end) if due else 0.0

    def masked_turns(self, rnd: Round, *, readjusts: bool = True) -> list[LocalWork]:
        """A usual session under the masks, in whose course they are readjusted when that is due."""
        training, share = self.setup.training, self.readjusted(rnd)
        usual = self.usual_turn(self.moves_of, active=self.masks_of)
        if not readjusts or not share or not self._readjusts():
            return [usual]
        if self.readjust_when == "after_training":
            return [usual, self.readjustment(share)]
        if training.local_steps:  # the last fifth, as one epoch of the paper's five
            last = -(-training.local_steps // 5)
            before, after = replace(usual, steps=training.local_steps - last), replace(usual, steps=last)
        else:
            last = min(1, training.local_epochs)
            before, after = replace(usual, epochs=training.local_epochs - last), replace(usual, epochs=last)
        first: list[Turn] = [before] if before.epochs or before.steps else []
        return [*first, self.readjustment(share), after]

    def _readjusts(self) -> list[str]:
        """The tensors whose masks change."""
        return [n for n in self.budget() if self.readjust_head or n not in self.info.head]

    def readjustment(self, share: float) -> GradientPass:
        """Prune and regrow a share of every client's mask, by the dense gradient on a minibatch of its own."""
        return GradientPass(self._readjusts(), self._readjusted(share), active=self.masks_of)

    def _readjusted(self, share: float) -> Callable[[ClientState, Params], ClientState]:
        def update(local: ClientState, grads: Params) -> ClientState:
            new = {
                n: masks.readjust(m, local.params[n], grads[n], share, scope=self.regrow_scope)
                for n, m in self.masks_of(local).items()
                if n in grads
            }
            # A position pruned and regrown at once keeps its weight; a new one starts at zero.
            weights = {n: tree.masked(local.params[n], m) for n, m in new.items()}
            return replace(local, params=local.params | weights, fixed=local.fixed | tree.prefixed(new, "mask"))

        return update
