"""CO-PFL: contribution-weighted aggregation, parameter-wise personal masks, mask-aware momentum.

"CO-PFL: Contribution-Oriented Personalized Federated Learning for Heterogeneous Networks". Client n has a personal
mask m_n (at first nowhere), values p_n there, and the server's w_0 elsewhere. Algorithm 2: train the personal
positions, train the shared ones from the same point (MAMO: Adam with one pair of moments for each side, which live on
over rounds), then let the positions that moved most turn personal (PWPM), as long as no more than gamma d are. The
server averages a position over those who share it, weighed by contribution (COWA, `plugins/contribution.py`; `weights =
"uniform"` leaves it out). A client predicts with all it last trained, as Algorithm 1 returns it.

Repairs of the paper's equations, as docs/algorithms/co-pfl.md says: beta_2 in the second moment, bias corrected by
the number of updates, `server_rule = "renormalised"` by default, since the literal rule freezes every position
anybody keeps, and `budget = "reached"`: d counts the positions at which the client has ever had a gradient. Counting
all positions of a network of which many never get one, everything that trains would turn personal.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from personafl.core import optim, tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.local_work import ClientState, LocalWork, StateUpdate
from personafl.core.settings import setting
from personafl.core.tree import choose
from personafl.core.types import Download, Masked, Moves, Params, Payload, Round
from personafl.sparse import masks, means

SIDES = ("shared", "personal")

NEARLY_ALL = 0.999
"""The personal share of a client's trained weights from which it is said to share nothing any more."""


@dataclass(frozen=True, kw_only=True)
class COPFL(Algorithm):
    """Clients keep the positions that move most and count by what they contribute."""

    evaluates: ClassVar[str] = "the client's model after its last session, shared and personal positions alike"
    newcomers: ClassVar[str] = "the global model, after a session of its own"

    select_share: float = setting(0.25, "share of the positions in the budget that turns personal in a round (p)")
    personal_bound: float = setting(0.5, "the largest share of them that may be personal (gamma)")
    budget: str = setting(
        "reached",
        "which positions p and gamma are shares of",
        ("reached", "all"),
    )
    selection: str = setting("global", "rank positions over the whole model or per tensor", ("global", "tensor"))
    ranking: str = setting(
        "shared", "top p among the positions still shared, or among all as Eq. 6 prints", ("shared", "all")
    )
    phases: str = setting(
        "parallel", "train both sides from the same point, or shared after personal", ("parallel", "sequential")
    )
    server_rule: str = setting(
        "renormalised", "mean over those who share, or only where all share", ("renormalised", "literal")
    )
    moments: bool = setting(True, "MAMO; without it the recipe's optimiser under the same masks")
    beta1: float = setting(0.9, "decay of the first moment")
    beta2: float = setting(0.999, "decay of the second moment")
    eps: float = setting(1e-8, "added to the root of the second moment")
    answers: str = setting(
        "own", "whose shared part predicts: the client's (Algorithm 1, line 8) or the server's", ("own", "server")
    )
    weights: str = "cowa"
    weight_decay: float | None = setting(None, "weight decay of MAMO, 0 for none (none: 0, whatever the recipe says)")
    grad_clip: float | None = setting(None, "largest norm of a gradient in MAMO, 0 for any (none: 0, as above)")

    def check(self) -> None:
        if self.moments and (self.optimizer is not None or self.momentum is not None):
            name = "optimizer" if self.optimizer is not None else "momentum"
            raise UserError(
                f"{name}={getattr(self, name)!r}: MAMO is the optimiser, its moments are beta1 and beta2; "
                "moments=False takes another"
            )
        for name in ("select_share", "personal_bound"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)}: must be in [0, 1]")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be in [0, 1)")

    def private(self) -> frozenset[str]:
        return self.info.buffers

    def welcome(self) -> str:
        return "newcomer"

    def _mamo(self) -> optim.Adam:
        """MAMO, Eqs. 4 and 5."""
        return optim.Adam(self.beta1, self.beta2, self.eps, self.weight_decay or 0.0, self.grad_clip or 0.0)

    # State

    def init_server(self, params: Params) -> Params:
        zero = torch.zeros((), dtype=torch.float64, device=next(iter(params.values())).device)
        return super().init_server(params) | dict.fromkeys(("aux/union", "aux/personal", "aux/unsharing"), zero)

    def init_coverage(self, params: Params) -> Params:
        kind = torch.bool if self.server_rule == "literal" else None  # there a position is averaged over all or stays
        return {n: torch.ones_like(params[n], dtype=kind) for n in self.info.parameters}

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        model = tree.stack({n: params[n] for n in self.info.parameters}, len(ids))
        nothing = {n: torch.zeros_like(t, dtype=torch.bool) for n, t in model.items()}
        mine = tree.prefixed(model, "own") | tree.prefixed(nothing, "mask") | tree.prefixed(nothing, "reached")
        mine["aux/seen"] = torch.zeros(len(ids), dtype=torch.bool, device=next(iter(params.values())).device)
        for side in SIDES if self.moments else ():
            mine |= tree.prefixed(self._mamo().init(model), f"moments-{side}")
        return super().init_clients(params, ids) | mine

    # A round

    def _own_model(self, kept: Params, down: Payload) -> Params:
        """w_0 at shared positions, p_n at personal ones."""
        received, own = tree.values(down), tree.under(kept, "own")
        model = {n: torch.where(m, own[n], received[n]) for n, m in tree.under(kept, "mask").items()}
        return model | tree.select(kept, self.stays_on_client())

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        model = self._own_model(kept, down)
        fixed = {n: t for n, t in kept.items() if n.startswith(("mask/", "reached/", "moments-"))}
        return ClientState(model, fixed | tree.prefixed(model, "begin"))

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        rule = self._mamo() if self.moments else optim.default(self.training_at(rnd.stage))
        record = optim.GradientRecord(rule)
        shared = self.usual_turn(self._shared, optimizer=record, memory="moments-shared")
        if rnd.number == 0 or not self.select_share:  # nobody has anything personal yet
            return [shared]
        memory = "moments-personal" if self.moments else ""
        personal = self.usual_turn(self._personal, optimizer=rule, memory=memory, stream="personal")
        if self.phases == "sequential":
            return [personal, StateUpdate(self._without_personal_phase), shared]
        return [personal, StateUpdate(self._set_aside), shared, StateUpdate(self._rejoined)]

    def _personal(self, local: ClientState) -> Moves:
        return tree.under(local.fixed, "mask")

    def _shared(self, local: ClientState) -> Moves:
        return {n: ~m for n, m in tree.under(local.fixed, "mask").items()}

    def _without_personal_phase(self, local: ClientState) -> ClientState:
        """Clients with nothing personal have no personal phase: their running statistics are as before it."""
        begin = tree.select(tree.under(local.fixed, "begin"), self.info.buffers)
        now = tree.select(local.params, begin)
        return replace(local, params=local.params | choose(_any(self._personal(local)), now, begin))

    def _set_aside(self, local: ClientState) -> ClientState:
        """Back to where the session began, parameters and running statistics alike."""
        trained = tree.prefixed(tree.select(local.params, self.info.shapes), "aside")
        return replace(local, params=local.params | tree.under(local.fixed, "begin"), fixed=local.fixed | trained)

    def _rejoined(self, local: ClientState) -> ClientState:
        """Each side as its own phase left it; running statistics are those of the shared phase, where there is one."""
        aside, mask = tree.under(local.fixed, "aside"), tree.under(local.fixed, "mask")
        model = {n: torch.where(m, aside[n], local.params[n]) for n, m in mask.items()}
        statistics = tree.select(local.params, self.info.buffers)
        return replace(local, params=local.params | model | choose(_any(self._shared(local)), statistics, aside))

    def _reached_positions(self, local: ClientState) -> Params:
        """Where clients have had a gradient by now. A rehearsal trains nothing and counts all positions."""
        before, now = (tree.under(local.fixed, prefix) for prefix in ("reached", "moments-shared/reached"))
        return {n: m | now[n] if n in now else torch.ones_like(m) for n, m in before.items()}

    def _selected(self, local: ClientState) -> Params:
        """PWPM: the masks from now on, grown by the shared positions that moved most."""
        mask, begin = tree.under(local.fixed, "mask"), tree.under(local.fixed, "begin")
        moved = {n: (begin[n] - local.params[n]).abs() for n in mask}
        counted = (
            self._reached_positions(local)
            if self.budget == "reached"
            else {n: torch.ones_like(m) for n, m in mask.items()}
        )
        if self.selection == "tensor":
            return {n: m | self._grown(moved[n], m, counted[n]) for n, m in mask.items()}
        joint = (torch.cat([tree.flat(t[n]) for n in mask], 1) for t in (moved, mask, counted))  # [C, d]
        pieces = torch.split(self._grown(*joint), [m[0].numel() for m in mask.values()], 1)
        return {n: m | piece.view(m.shape) for (n, m), piece in zip(mask.items(), pieces, strict=True)}

    def _grown(self, moved: Tensor, mask: Tensor, counted: Tensor) -> Tensor:
        """The positions that join a mask, `[C, ...]`, among those that count."""
        size = masks.active(counted).double()
        step, bound = ((share * size + 1e-9).long() for share in (self.select_share, self.personal_bound))
        room = torch.minimum(bound - masks.active(mask), step).clamp(min=0)
        moved = moved.masked_fill(~counted, -torch.inf)
        if self.ranking == "all":  # what is personal already takes up places
            top = masks.top_k(moved, step) & ~mask
            return masks.top_k(moved.masked_fill(~top, -torch.inf), room)
        return masks.top_k(moved.masked_fill(mask, -torch.inf), room)

    def upload(self, local: ClientState, rnd: Round) -> Payload:
        mask, reached = self._selected(local), self._reached_positions(local)
        shared = {n: Masked(local.params[n], ~m) for n, m in mask.items()}
        personal, all_reached = (
            torch.stack([masks.active(t[n]) for n in mask]).sum(0).double()
            for t in ({n: m & reached[n] for n, m in mask.items()}, reached)
        )
        return dict(super().upload(local, rnd)) | shared | {"aux/personal": personal / all_reached.clamp(min=1)}

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
        mask = self._selected(local)
        new = tree.prefixed({n: local.params[n] for n in mask}, "own") | tree.prefixed(mask, "mask")
        new |= tree.prefixed(self._reached_positions(local), "reached")
        new["aux/seen"] = torch.ones_like(kept["aux/seen"])
        return kept | tree.select(local.params, self.stays_on_client()) | new | self._moments(kept, local, mask)

    def _moments(self, kept: Params, local: ClientState, mask: Params) -> Params:
        """Both sides' moments for the next session."""
        before = tree.under(local.fixed, "mask")
        personal, shared = _any(before), _any({n: ~m for n, m in before.items()})  # a side of nothing made no updates
        new = {}
        for name in kept:
            if name.startswith("moments-"):
                side, kind, n = name.split("/", 2)
                moved = shared if side == "moments-shared" else personal
                t = torch.where(tree.column(moved, kept[name]), local.fixed[name], kept[name])
                # A position that changed sides starts at zero in its new moments and leaves nothing in the old ones.
                gone = mask[n] if side == "moments-shared" else ~mask[n]
                new[name] = t if kind == "steps" else torch.where(gone, 0, t)
        return new

    def summands(self, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        one = torch.ones_like(weights)
        sharing = {f"sharing/{n}": m * tree.column(one, m) for n, m in tree.masks(upload).items()}
        personal = tree.values(upload)["aux/personal"]
        counts = {"aux/clients": one, "aux/personal": personal, "aux/unsharing": (personal >= NEARLY_ALL).to(one)}
        sums = super().summands(tree.without(upload, "aux"), weights, rnd) | means.covered(upload, weights)
        return sums | sharing | counts

    def _shared_by_all(self, sums: Params) -> Params:
        return {n: sums[f"sharing/{n}"] == sums["aux/clients"] for n in self.info.parameters}

    def coverage(self, sums: Params) -> Params:
        return super().coverage(sums) if self.server_rule == "renormalised" else self._shared_by_all(sums)

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        new: Params = {}
        kept_by_some = torch.zeros_like(server["aux/union"])
        for n, everybody in self._shared_by_all(sums).items():
            mean, held = means.mean(n, sums, server[n])
            kept_by_some = kept_by_some + (~everybody).sum()
            use = held if self.server_rule == "renormalised" else everybody
            new[n] = torch.where(use, self.approach(server[n], mean), server[n])
        size = sum(new[n].numel() for n in new)
        first_time = server["aux/unsharing"] == 0
        counts = {
            "aux/union": kept_by_some / size,
            "aux/personal": sums["aux/personal"] / sums["aux/clients"],
            "aux/unsharing": torch.where(first_time, sums["aux/unsharing"], -1),  # positive in one round only
        }
        return server | new | tree.converted(counts, server)

    def without_uploads(self, server: Params, rnd: Round) -> Params:
        unsharing = server["aux/unsharing"]
        return super().without_uploads(server, rnd) | {"aux/unsharing": torch.where(unsharing > 0, -1, unsharing)}

    def notes(self, server: Params) -> dict[str, float]:
        if (clients := int(server["aux/unsharing"])) > 0:
            warnings.warn(
                f"CO-PFL: at {clients} of this round's clients, at least {100 * NEARLY_ALL:g} % of the weights that "
                "training can move are personal now. These clients share almost nothing any more, so for them the "
                "method has become local training. "
                f"A smaller personal_bound (it is {self.personal_bound}) keeps weights shared"
                + ("; budget=reached applies it to the weights that can move." if self.budget == "all" else "."),
                stacklevel=2,
            )
        return {"union_of_masks": float(server["aux/union"]), "personal_share": float(server["aux/personal"])}

    def download(self, server: Params, known: Params, rnd: Round) -> Download:
        return super().download(tree.without(server, "aux"), known, rnd)

    # Prediction

    def client_masks(self, kept: Params, down: Payload) -> Params:
        """Which positions are personal."""
        return tree.under(kept, "mask")

    def personal(self, kept: Params, down: Payload) -> Params:
        """(g_n, p_n) of its last session, or p_n with the server's newest shared part; w_0 before any session."""
        joined = self._own_model(kept, down)
        if self.answers == "server":
            return joined
        own = tree.under(kept, "own")
        return joined | choose(kept["aux/seen"], own, tree.select(joined, own))

    def evaluated(self, when: str) -> str:
        own = super().evaluated(when)
        server = "the global model at shared positions, the client's own at personal ones"
        return own.replace(self.evaluates, server) if self.answers == "server" else own


def _any(mask: Moves) -> Tensor:
    """Which clients have any position in their masks, `[C]`."""
    return torch.stack([tree.flat(m).any(1) for m in mask.values() if m is not None]).any(0)
