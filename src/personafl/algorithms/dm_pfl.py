"""DM-PFL and DM-PFL+: personalised models that hitchhike on a sparse global one.

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

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm, Local, Probe, Turn, setting
from personafl.core.types import Download, Masked, Moves, Params, Payload, Round, Stage
from personafl.sparse import allocation, masks, schedules


@dataclass(frozen=True, kw_only=True)
class DMPFL(Algorithm):
    """Dual-masked sparse training: a global and a personal mask, weights shared where they overlap."""

    evaluates: ClassVar[str] = "theta_c: global weights at shared positions, the client's at its own"

    sparsity: float = setting(0.5, "share of weights that are zero (S)")
    allocation: str = setting("feddst_first_dense", "how sparsity is spread over layers", tuple(allocation.RULES))
    readjust_share: float = setting(0.01, "share of active weights pruned and regrown at first (alpha_s)")
    readjust_interval: int = setting(10, "rounds between mask readjustments")
    readjust_when: str = setting(
        "before_last_epoch", "when in a session masks change", ("before_last_epoch", "after_training")
    )
    regrow_scope: str = setting("inactive", "positions regrowth may choose from", ("inactive", "all"))
    iterations: int = setting(2, "how often the phases are iterated (I); 0 trains masks only")
    personal_share: str = setting(
        "once", "personal refinement: each client its expected share at once, or when sampled", ("once", "sampled")
    )
    reset_personal: bool = setting(True, "begin personal refinement from zero at personal positions")
    vote_threshold: float = setting(0.3, "a position needs more than this share of the cohort's masks")
    votes: str = setting("counted", "whether a vote counts one or the client's examples", ("counted", "weighted"))
    uncovered: str = setting("keep", "a global position without any vote", ("keep", "drop"))
    refill: bool = setting(False, "fill a global mask below its budget with the largest other weights")

    def check(self) -> None:
        if not 0 <= self.sparsity < 1:
            raise ValueError(f"sparsity={self.sparsity}: must be in [0, 1)")
        for name in ("readjust_share", "vote_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be in [0, 1]")
        if self.readjust_interval < 1:
            raise ValueError(f"readjust_interval={self.readjust_interval}: must be at least 1")
        if self.iterations < 0:
            raise ValueError(f"iterations={self.iterations}: must not be negative")

    # Phases

    def schedule(self) -> list[Stage]:
        stages = []
        rounds = self.setup.training.num_rounds
        self._advise(rounds)
        for phase, first, end in phases(rounds, self.iterations):
            for t in range(first, end):
                if phase != "personal":
                    stages.append(Stage(number=t, phase=phase))
                elif self.personal_share == "sampled":
                    stages.append(Stage(number=t, phase=phase, up=False))
                else:
                    stages.append(Stage(number=t, phase=phase, who="all" if t == first else "nobody", up=False))
        return stages

    def _advise(self, rounds: int) -> None:
        """Warn of settings that are possible but hardly meant."""
        fit = max(1, rounds // 4)
        if self.iterations > fit:
            warnings.warn(
                f"{rounds} rounds leave room for {fit} of DM-PFL's {self.iterations} iterations", stacklevel=3
            )
        sizes = {layer.weight: layer.weights for layer in self.info.layers}
        least = 0.1 * (1 - self.sparsity)  # a tenth of the average density
        starved = {n: k / sizes[n] for n, k in self._budget().items() if k < least * sizes[n]}
        if starved:
            cells = ", ".join(f"{100 * share:.1f} % of {n}" for n, share in starved.items())
            warnings.warn(
                f"allocation={self.allocation} leaves only {cells}; another rule, such as erk, spreads it", stacklevel=3
            )

    def _refined(self, rnd: Round) -> int:
        """How many personal phases have begun by this round."""
        plan = phases(self.setup.training.num_rounds, self.iterations)
        return sum(phase == "personal" and first <= rnd.number for phase, first, _ in plan)

    # State

    def _budget(self) -> dict[str, int]:
        return allocation.RULES[self.allocation](self.info.layers, self.sparsity)

    def init_server(self, params: Params) -> Params:
        m_g = {n: masks.top_k(params[n].abs()[None], k)[0] for n, k in self._budget().items()}
        return super().init_server(params) | tree.prefixed(m_g, "mask")

    def init_clients(self, params: Params, server: Params, ids: Tensor) -> Params:
        m_g = tree.under(server, "mask")
        w_c = {n: torch.where(m, params[n], 0) for n, m in m_g.items()}
        refined = torch.zeros((), dtype=torch.int32, device=next(iter(params.values())).device)
        common = tree.prefixed(w_c, "personal") | tree.prefixed(m_g, "mask") | {"count/refined": refined}
        return super().init_clients(params, server, ids) | tree.stack(common, len(ids))

    # A round

    def download(self, server: Params, ids: Tensor, rnd: Round) -> Download:
        m_g = tree.under(server, "mask")
        refined = torch.tensor(self._refined(rnd), dtype=torch.int32, device=next(iter(server.values())).device)
        shared: Payload = {n: t for n, t in server.items() if not n.startswith("mask/")}
        return Download(shared=shared | {n: Masked(server[n], m) for n, m in m_g.items()} | {"count/refined": refined})

    def start(self, kept: Params, down: Payload, rnd: Round) -> Local:
        m_g, statistics = tree.masks(down), tree.select(kept, self._stays())
        if rnd.phase == "global":
            theta, held = self._common_weights(down), m_g
        else:
            # Phase-1 values at personal positions are the start of a later Phase 1, not of a refinement.
            theta = self._theta(kept, down, reset=rnd.phase == "personal" and self.reset_personal)
            held = tree.under(kept, "mask")
        fixed = tree.prefixed(held, "mask") | tree.prefixed({n: m & ~m_g[n] for n, m in held.items()}, "own")
        received = tree.select(tree.values(down), self.info.shapes)
        return Local(received | statistics | theta, fixed | {"count/refined": tree.values(down)["count/refined"]})

    def _common_weights(self, down: Payload) -> Params:
        return {n: t.values for n, t in down.items() if isinstance(t, Masked)}

    def _theta(self, kept: Params, down: Payload, *, reset: bool) -> Params:
        """The masked weights of theta_c, Eq. 4; with `reset`, zero at personal positions not yet refined."""
        m_c, w_c = tree.under(kept, "mask"), tree.under(kept, "personal")
        stale = (
            kept["count/refined"] < tree.values(down)["count/refined"]
            if reset
            else torch.zeros_like(kept["count/refined"], dtype=torch.bool)
        )
        theta = {}
        for n, t in down.items():
            if isinstance(t, Masked):
                own = torch.where(tree.column(stale, w_c[n]) | ~m_c[n], 0, w_c[n])
                theta[n] = torch.where(t.mask & m_c[n], t.values, torch.where(t.mask, 0, own))
        return theta

    def turns(self, local: Local, rnd: Round) -> list[Turn | Probe]:
        if rnd.phase == "personal":
            return self._refine(rnd)
        training = self.setup.training
        usual = self.session(self._moves, active=self._masks)
        share = schedules.cosine(self.readjust_share, rnd.number, training.num_rounds)
        if rnd.phase != "masks" or not share or not schedules.due(rnd.number, self.readjust_interval):
            return [usual]
        readjust = Probe(list(self._budget()), self._readjust(share), active=self._masks)
        if self.readjust_when == "after_training":
            return [usual, readjust]
        if training.local_steps:  # the last fifth, as one epoch of the paper's five
            last = -(-training.local_steps // 5)
            before, after = replace(usual, steps=training.local_steps - last), replace(usual, steps=last)
        else:
            last = min(1, training.local_epochs)
            before, after = replace(usual, epochs=training.local_epochs - last), replace(usual, epochs=last)
        return [before, readjust, after] if before.epochs or before.steps else [readjust, after]

    def _masks(self, local: Local) -> Params:
        return tree.under(local.fixed, "mask")

    def _moves(self, local: Local) -> Moves:
        held = self._masks(local)
        return {n: held.get(n) for n in self.info.parameters}

    def _readjust(self, share: float) -> Callable[[Local, Params], Local]:
        def update(local: Local, grads: Params) -> Local:
            everywhere = self.regrow_scope == "all"
            m_c = {
                n: masks.readjust(m, local.params[n], grads[n], share, among_active=everywhere)
                for n, m in self._masks(local).items()
            }
            # A position pruned and regrown at once keeps its weight; a new one starts at zero.
            w_c = {n: torch.where(m, local.params[n], 0) for n, m in m_c.items()}
            return replace(local, params=local.params | w_c, fixed=local.fixed | tree.prefixed(m_c, "mask"))

        return update

    def _refine(self, rnd: Round) -> list[Turn | Probe]:
        """Train personal positions only; biases and shared weights stand still."""

        def own(local: Local) -> Moves:
            return tree.under(local.fixed, "own")

        if self.personal_share == "sampled":
            return [self.session(own, active=self._masks)]
        # The rounds of the phase at once, at the rates those rounds would have had.
        training = self.setup.training
        plan = phases(training.num_rounds, self.iterations)
        length = next(end - first for phase, first, end in plan if phase == "personal" and first == rnd.number)
        share = length * training.cohort(self.setup.num_clients) / self.setup.num_clients  # expected sessions
        total = share * (1 if training.local_steps else training.local_epochs)
        pieces = [1.0] * int(total) + ([total % 1] if total % 1 > 1e-9 else [])
        turns: list[Turn | Probe] = []
        for i, piece in enumerate(pieces):
            rate = training.rate(rnd.number + int(i * length / total))
            steps = max(1, round(piece * training.local_steps))
            usual = Turn(own, lr=rate, active=self._masks, least=0 if i else 1)
            turns.append(replace(usual, steps=steps) if training.local_steps else replace(usual, epochs=piece))
        return turns

    def upload(self, local: Local, rnd: Round) -> Payload:
        held = self._masks(local)
        out: Payload = dict(super().upload(local, rnd))
        return out | {n: Masked(local.params[n], m, known=rnd.phase == "global") for n, m in held.items()}

    def keep(self, kept: Params, local: Local, rnd: Round) -> Params:
        kept = kept | tree.select(local.params, self._stays())
        if rnd.phase == "global":
            return kept
        m_c = self._masks(local)
        w_c = tree.select(local.params, m_c)
        own = tree.prefixed(w_c, "personal") | tree.prefixed(m_c, "mask")
        return kept | own | {"count/refined": local.fixed["count/refined"]}

    def summands(self, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        sums = super().summands(upload, weights, rnd) | {"count/clients": torch.ones_like(weights)}
        if rnd.phase == "global":
            return sums
        weights = self.weigh(weights)
        for n, m in tree.masks(upload).items():
            size = tree.column(weights, m)
            sums[f"covered/{n}"] = m * size
            sums[f"votes/{n}"] = m.to(weights.dtype) if self.votes == "counted" else m * size
        return sums

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        mean = super().aggregate(tree.exclude(server, {n for n in server if n.startswith("mask/")}), sums, rnd)
        m_g = tree.under(server, "mask")
        if rnd.phase == "global":
            return server | mean | {n: torch.where(m, mean[n], server[n]) for n, m in m_g.items()}
        new: Params = {}
        voters = sums["count/clients" if self.votes == "counted" else "count/weight"]
        for n, budget in self._budget().items():
            covered, votes = sums[f"covered/{n}"], sums[f"votes/{n}"]
            # Eq. 5; positions nobody holds keep their weight.
            target = (sums[n] / covered.clamp(min=torch.finfo(covered.dtype).tiny)).to(server[n].dtype)
            w_g = torch.where(covered > 0, self.approach(server[n], target), server[n])
            eligible = votes / voters > self.vote_threshold
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
        return received | tree.select(kept, self._stays()) | self._theta(kept, down, reset=self.reset_personal)

    def trained(self, kept: Params, local: Local, down: Payload, rnd: Round) -> Params:
        """Refining the global model leaves theta_c as it is until the refined weights are sent."""
        return self.personal(kept, down) if rnd.phase == "global" else super().trained(kept, local, down, rnd)


@dataclass(frozen=True, kw_only=True)
class DMPFLPlus(DMPFL):
    """DM-PFL with adaptive inference: per sample, theta_c or theta_g (Algorithm 4)."""

    evaluates: ClassVar[str] = "per sample theta_c or theta_g, whichever is surer (Algorithm 4)"

    inference: str = "adaptive"


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
