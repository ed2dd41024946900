"""DM-PFL: personalised models that hitchhike on a sparse global one.

Zhang, Zhou, Tong, et al., "Hitchhiking Generic Federated Learning for Efficient Shift-Robust
Personalization", KDD 2023. The server has dense weights w_g and a mask m_g, client c weights w_c and a
mask m_c. Their models are

    theta_g = w_g * m_g
    theta_c = w_g * (m_g and m_c) + w_c * (m_c and not m_g)                               (Eq. 4)

Phase `masks` (Algorithm 1) trains w_c under m_c, prunes and regrows m_c, and elects m_g; phase `global`
(Algorithm 2) refines w_g at m_g; phase `personal` (Algorithm 3) refines w_c where only the client has a
position. A run of T rounds iterates the three, half, a quarter and a quarter of its rounds each.
What the paper leaves open is a setting; docs/algorithms/dm-pfl.md says which reading is the default and why.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, LocalWork, Turn
from personafl.core.method_settings import FROM_TRAINING
from personafl.core.settings import setting
from personafl.core.types import Download, Masked, Moves, Params, Payload, Round, Stage
from personafl.methods.masked_training import MaskedTraining
from personafl.sparse import masks, means


@dataclass(frozen=True, kw_only=True)
class DMPFL(MaskedTraining):
    """Dual-masked sparse training: a global and a personal mask, weights shared where they overlap."""

    evaluates: ClassVar[str] = "theta_c: global weights at shared positions, the client's at its own"
    from_recipe: ClassVar[tuple[str, ...]] = (*FROM_TRAINING, "personal_epochs", "personal_lr")
    newcomers: ClassVar[str] = "theta_g and m_g; it readjusts the mask once and refines what is then its own"

    iterations: int = setting(2, "how often the phases are iterated (I); 0 trains masks only")
    personal_share: str = setting(
        "once", "personal refinement: each client its expected share at once, or when sampled", ("once", "sampled")
    )
    personal_epochs: float | None = setting(
        None, "epochs of each personal refinement (recipe: a client's expected share of its rounds)"
    )
    personal_lr: float | None = setting(None, "learning rate of personal refinement (recipe: that of its rounds)")
    reset_personal: bool = setting(True, "begin personal refinement from zero at personal positions")
    vote_threshold: float = setting(0.3, "a position needs more than this share of the cohort's masks")
    votes: str = setting("counted", "whether a vote counts one or the client's examples", ("counted", "weighted"))
    uncovered: str = setting("keep", "a global position without any vote", ("keep", "drop"))
    refill: bool = setting(False, "fill a global mask below its budget with the largest other weights")
    averaged: str = setting(
        "covered", "global weights that become the cohort's mean: where any client has the position, or enough vote",
        ("covered", "voted"),
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        if not 0 <= self.vote_threshold <= 1:
            raise UserError(f"vote_threshold={self.vote_threshold}: must be in [0, 1]")
        if self.iterations < 0:
            raise UserError(f"iterations={self.iterations}: must not be negative")
        for name in ("personal_epochs", "personal_lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{name}={value}: must be positive")
        if self.personal_epochs is not None and self.personal_share == "sampled":
            raise UserError(f"personal_epochs={self.personal_epochs}: goes with personal_share=once")

    # Phases

    def needs_all_rounds(self) -> bool:
        return True

    def schedule(self) -> list[Stage]:
        stages = []
        rounds = self.setup.training.num_rounds
        fit = max(1, rounds // 4)
        if self.iterations > fit:
            warnings.warn(
                f"{rounds} rounds leave room for {fit} of DM-PFL's {self.iterations} iterations", stacklevel=2
            )
        self.warn_of_starved_layers()
        for phase, first, end in phases(rounds, self.iterations):
            for t in range(first, end):
                if phase != "personal":
                    stages.append(Stage(number=t, phase=phase))
                elif self.personal_share == "sampled":
                    stages.append(Stage(number=t, phase=phase, up=False))
                else:
                    stages.append(Stage(number=t, phase=phase, who="all" if t == first else "nobody", up=False))
        return stages

    def _refined(self, rnd: Round) -> int:
        """How many personal phases have begun by this round."""
        plan = phases(self.setup.training.num_rounds, self.iterations)
        return sum(phase == "personal" and first <= rnd.number for phase, first, _ in plan)

    # State

    def init_server(self, params: Params) -> Params:
        return super().init_server(params) | tree.prefixed(self.first_masks(params), "mask")

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        return super().init_clients(params, ids) | self._begin(params, self.first_masks(params), ids)

    def _begin(self, params: Params, m_g: Params, ids: Tensor) -> Params:
        """A client begins with the global mask and the weights there."""
        w_c = {n: tree.masked(params[n], m) for n, m in m_g.items()}
        refined = torch.zeros((), dtype=torch.int32, device=next(iter(params.values())).device)
        common = tree.prefixed(w_c, "personal") | tree.prefixed(m_g, "mask") | {"aux/refined": refined}
        return tree.stack(common, len(ids))

    def newcomer(self, params: Params, down: Download, ids: Tensor) -> Params:
        received = tree.values(down.shared)
        return super().newcomer(params, down, ids) | self._begin(received, tree.masks(down.shared), ids)

    def welcome(self) -> str:
        return "newcomer"

    # A round

    def download(self, server: Params, known: Params, rnd: Round) -> Download:
        m_g = tree.under(server, "mask")
        refined = torch.tensor(self._refined(rnd), dtype=torch.int32, device=next(iter(server.values())).device)
        shared: Payload = {n: t for n, t in server.items() if not n.startswith("mask/")}
        return Download(shared=shared | {n: Masked(server[n], m) for n, m in m_g.items()} | {"aux/refined": refined})

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        m_g, statistics = tree.masks(down), tree.select(kept, self.stays_on_client())
        if rnd.phase == "global":
            theta, held = self._common_weights(down), m_g
        else:
            # Phase-1 values at personal positions are the start of a later Phase 1, not of a refinement.
            theta = self._theta(kept, down, reset=rnd.phase == "personal" and self.reset_personal)
            held = tree.under(kept, "mask")
        fixed = tree.prefixed(held, "mask") | tree.prefixed(m_g, "global")
        received = tree.select(tree.values(down), self.info.shapes)
        return ClientState(received | statistics | theta, fixed | {"aux/refined": tree.values(down)["aux/refined"]})

    def _common_weights(self, down: Payload) -> Params:
        return {n: t.values for n, t in down.items() if isinstance(t, Masked)}

    def _theta(self, kept: Params, down: Payload, *, reset: bool) -> Params:
        """The masked weights of theta_c, Eq. 4; with `reset`, zero at personal positions not yet refined."""
        m_c, w_c = tree.under(kept, "mask"), tree.under(kept, "personal")
        stale = (
            kept["aux/refined"] < tree.values(down)["aux/refined"]
            if reset
            else torch.zeros_like(kept["aux/refined"], dtype=torch.bool)
        )
        theta = {}
        for n, t in down.items():
            if isinstance(t, Masked):
                own = torch.where(tree.column(stale, w_c[n]) | ~m_c[n], 0, w_c[n])
                theta[n] = torch.where(t.mask & m_c[n], t.values, torch.where(t.mask, 0, own))
        return theta

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        if rnd.phase == "personal":
            return self._refine(rnd)
        if rnd.phase == "newcomer":  # a mask of its own, then Algorithm 3
            return [self.readjustment(self.readjust_share), self._refinement()]
        return self.masked_turns(rnd, readjusts=rnd.phase == "masks")

    def _own_positions(self, local: ClientState) -> Moves:
        m_g = tree.under(local.fixed, "global")
        return {n: m & ~m_g[n] for n, m in self.masks_of(local).items()}

    def _refine(self, rnd: Round) -> list[LocalWork]:
        """Train personal positions only; biases and shared weights stand still."""
        if self.personal_share == "sampled":
            return [self._refinement()]
        # The rounds of the phase at once, at the rates those rounds would have had.
        training = self.setup.training
        plan = phases(training.num_rounds, self.iterations)
        length = next(end - first for phase, first, end in plan if phase == "personal" and first == rnd.number)
        share = length * training.cohort(self.setup.num_clients) / self.setup.num_clients  # expected sessions
        by_steps = training.local_steps and self.personal_epochs is None
        total = self.personal_epochs or share * (1 if by_steps else training.local_epochs)
        pieces = [1.0] * int(total) + ([total % 1] if total % 1 > 1e-9 else [])
        turns: list[LocalWork] = []
        for i, piece in enumerate(pieces):
            rate = self.personal_lr or training.rate(rnd.number + int(i * length / total))
            steps = max(1, round(piece * training.local_steps))
            usual = Turn(self._own_positions, lr=rate, active=self.masks_of, least=0 if i else 1)
            turns.append(replace(usual, steps=steps) if by_steps else replace(usual, epochs=piece))
        return turns

    def _refinement(self) -> Turn:
        """A usual session at personal positions."""
        usual = self.usual_turn(self._own_positions, active=self.masks_of)
        return usual if self.personal_lr is None else replace(usual, lr=self.personal_lr)

    def upload(self, local: ClientState, rnd: Round) -> Payload:
        held = self.masks_of(local)
        out: Payload = dict(super().upload(local, rnd))
        return out | {n: Masked(local.params[n], m, known=rnd.phase == "global") for n, m in held.items()}

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
        kept = kept | tree.select(local.params, self.stays_on_client())
        if rnd.phase == "global":
            return kept
        m_c = self.masks_of(local)
        w_c = tree.select(local.params, m_c)
        own = tree.prefixed(w_c, "personal") | tree.prefixed(m_c, "mask")
        return kept | own | {"aux/refined": local.fixed["aux/refined"]}

    def summands(self, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        sums = super().summands(upload, weights, rnd) | {"aux/clients": torch.ones_like(weights)}
        if rnd.phase == "global":
            return sums
        vote = torch.ones_like(weights) if self.votes == "counted" else weights
        votes = {n: m * tree.column(vote, m) for n, m in tree.masks(upload).items()}
        return sums | means.covered(upload, weights) | tree.prefixed(votes, "votes")

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        mean = super().aggregate(tree.exclude(server, {n for n in server if n.startswith("mask/")}), sums, rnd)
        m_g = tree.under(server, "mask")
        if rnd.phase == "global":
            return server | mean | {n: torch.where(m, mean[n], server[n]) for n, m in m_g.items()}
        new: Params = {}
        voters = sums["aux/clients" if self.votes == "counted" else "aux/weight"]
        for n, budget in self.budget().items():
            votes = sums[f"votes/{n}"]
            mean_n, held = means.mean(n, sums, server[n])
            eligible = votes / voters > self.vote_threshold
            if self.averaged == "voted":
                held = held & eligible
            w_g = torch.where(held, self.approach(server[n], mean_n), server[n])  # others keep their weight
            if self.uncovered == "keep":
                eligible = eligible | ((votes == 0) & m_g[n])
            elected = masks.top_k(w_g.abs().masked_fill(~eligible, -torch.inf)[None], budget)
            if self.refill:
                rest = w_g.abs().masked_fill(elected[0], -torch.inf)[None]
                elected = elected | masks.top_k(rest, budget - masks.active(elected))
            new |= {n: w_g, f"mask/{n}": elected[0]}
        return server | mean | new

    # Prediction

    def personal(self, kept: Params, down: Payload) -> Params:
        received = tree.select(tree.values(down), self.info.shapes)
        return received | tree.select(kept, self.stays_on_client()) | self._theta(kept, down, reset=self.reset_personal)

    def client_masks(self, kept: Params, down: Payload) -> Params:
        """m_c and m_g."""
        return tree.under(kept, "mask") | tree.prefixed(tree.masks(down), "global")

    def after_training(self, kept: Params, local: ClientState, down: Payload, rnd: Round) -> Params:
        """Refining the global model leaves theta_c as it is until the refined weights are sent."""
        return self.personal(kept, down) if rnd.phase == "global" else super().after_training(kept, local, down, rnd)


def phases(rounds: int, iterations: int) -> list[tuple[str, int, int]]:
    """The phases of a run: name, first round, round after the last; empty ones left out.

    Shares of half, a quarter and a quarter, by cumulative rounding. Fewer iterations if there are not
    four rounds for each; below four rounds the phases that fit, masks first.
    """
    names = ("masks", "global", "personal")
    if not iterations:
        return [("masks", 0, rounds)]
    if rounds < 4:
        return [(names[t], t, t + 1) for t in range(rounds)]
    fit = min(iterations, rounds // 4)
    cuts = [round(rounds * (i + share) / fit) for i in range(fit) for share in (0, 0.5, 0.75)] + [rounds]
    return [(names[j % 3], a, b) for j, (a, b) in enumerate(pairwise(cuts)) if b > a]
