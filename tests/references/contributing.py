"""CO-PFL: contribution-weighted averages (COWA), personal coordinates (PWPM), moments per side (MAMO)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from personafl.core.types import Training
from personafl.data.federated import Federation
from tests import reference
from tests.reference import Params
from tests.references.base import Reference

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8


@dataclass
class Moments:
    """u, v and the number of updates s of one phase."""

    u: Tensor
    v: Tensor
    s: int = 0


@dataclass
class Upload:
    """What is remembered of a client's last session."""

    number: int
    received: Tensor  # the w_0 it started from
    shared: Tensor  # 1 - m_n, as uploaded
    values: Tensor  # w_n at the shared coordinates, zero elsewhere
    update: Tensor  # delta_n
    score: float = 0.0  # Gamma_n


@dataclass
class Member:
    """m_n, p_n and g_n, where the client ever had a gradient, the two moment pairs and the last upload."""

    personal: Tensor
    reached: Tensor
    values: Tensor  # w_n as last trained
    moments: dict[str, Moments]
    last: Upload | None = None


def cosine(a: Tensor, b: Tensor) -> float | None:
    """The cosine of two vectors, None where one of them is zero."""
    if not a.any() or not b.any():
        return None
    return float((a * b).sum()) / math.sqrt(float((a * a).sum())) / math.sqrt(float((b * b).sum()))


class COPFL(Reference):
    """CO-PFL; a model is one vector of d coordinates in the order of the module's parameters.

    `events` counts what happened, so that a test can see that it met every case.
    """

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        select_share: float = 0.25,
        personal_bound: float = 0.5,
        budget: Literal["reached", "all"] = "reached",
        selection: Literal["global", "tensor"] = "global",
        ranking: Literal["shared", "all"] = "shared",
        phases: Literal["parallel", "sequential"] = "parallel",
        server_rule: Literal["renormalised", "literal"] = "renormalised",
        moments: bool = True,
        answers: Literal["own", "server"] = "own",
        weights: Literal["cowa", "cowa-all", "uniform", "cowa-gradient", "cowa-prediction"] = "cowa",
    ) -> None:
        super().__init__(module, federation, training)
        self.select_share, self.personal_bound, self.selection = select_share, personal_bound, selection
        self.phases, self.server_rule, self.moments, self.scoring = phases, server_rule, moments, weights
        self.answers, self.ranking, self.budget = answers, ranking, budget
        self.keep_statistics()  # which never leave a client
        self.w_0, self.events = self.joined(self.initial), Counter[str]()
        self.before, self.newest = self.w_0, dict[int, Upload]()  # of the newest aggregation
        nothing = torch.zeros_like(self.w_0)
        self.members = [
            Member(
                nothing.bool(),
                nothing.bool(),
                nothing.clone(),
                {phase: Moments(nothing.clone(), nothing.clone()) for phase in ("personal", "shared")},
            )
            for _ in self.clients
        ]

    # Vectors

    def joined(self, params: Params) -> Tensor:
        """The tensors of a model behind one another."""
        return torch.cat([params[name].flatten() for name in self.names])

    def divided(self, vector: Tensor) -> Params:
        """A vector as the tensors of a model."""
        out, first = {}, 0
        for name in self.names:
            like = self.initial[name]
            out[name] = vector[first : first + like.numel()].view(like.shape)
            first += like.numel()
        return out

    def model_of(self, n: int) -> Tensor:
        """w_0 at (1 - m_n), p_n at m_n."""
        member = self.members[n]
        return torch.where(member.personal, member.values, self.w_0)

    # Rounds

    def play(self, number: int) -> None:
        """Algorithm 1, one round."""
        cohort = self.cohort(number)
        predictions = {n: self.prediction_score(n) for n in cohort}
        before = {n: self.members[n].last for n in cohort}
        uploads = {n: self.usual_turn(n, number) for n in cohort}
        for n in cohort:
            gradient = self.gradient_score(n, uploads[n], before[n])
            uploads[n].score = {
                "cowa": gradient + predictions[n],
                "cowa-all": gradient + predictions[n],
                "cowa-gradient": gradient,
                "cowa-prediction": predictions[n],
                "uniform": 1.0,
            }[self.scoring]
        for n in cohort:
            self.members[n].last = uploads[n]
        for i in range(len(self.w_0)):
            having = sum(bool(u.shared[i]) for u in uploads.values())
            self.events["shared by some"] += 0 < having < len(uploads)
            self.events["shared by none"] += not having
        self.before, self.newest = self.w_0, uploads
        self.w_0 = self.moved_by(list(uploads.values()))

    def moved_by(self, uploads: list[Upload]) -> Tensor:
        """What these uploads make of the model before: w + eta_g (aggregate - w), as everywhere."""
        return self.before + self.training.server_lr * (self.aggregated(uploads) - self.before)

    def usual_turn(self, n: int, number: int) -> Upload:
        """Algorithm 2: both phases of MAMO, then PWPM; returns what the client uploads."""
        member = self.members[n]
        assert self.own_statistics is not None
        start, statistics = self.model_of(n), self.own_statistics[n]
        personal, after_personal = self.mamo(n, number, start, statistics, "personal")
        if self.phases == "parallel" and not member.personal.all():  # again from w_n^k
            shared, after_shared = self.mamo(n, number, start, statistics, "shared")
        else:
            shared, after_shared = self.mamo(n, number, personal, after_personal, "shared")
        self.own_statistics[n] = after_shared
        end = torch.where(member.personal, personal, shared)
        # PWPM: Delta = |w_n^k - w_n^{k+1}|
        self.select(member, (start - end).abs())
        member.values = end
        return Upload(number, self.w_0, ~member.personal, reference.only(end, ~member.personal), start - end)

    def mamo(
        self, n: int, number: int, start: Tensor, statistics: Params, phase: Literal["personal", "shared"]
    ) -> tuple[Tensor, Params]:
        """E local epochs that move h = m_n, or h = 1 - m_n; no epoch where h = 0. The model and its statistics."""
        member = self.members[n]
        h = member.personal if phase == "personal" else ~member.personal
        if not h.any():
            return start, statistics
        w, eta, optimiser = start, self.lr(number), self.optimiser()
        for rows in self.stream(n, number, "personal" if phase == "personal" else "batches").turn():
            gradient = self.gradient(self.cross_entropy, {**self.divided(w), **statistics}, rows)
            q, statistics = reference.only(self.joined(gradient), h), self.tracked
            # What is smaller than 64 units in the last place of the largest may be a rounded zero.
            member.reached = member.reached | (q.abs() > 64 * 2**-52 * q.abs().max())
            if self.moments:  # w <- w - eta h u^ / (sqrt(v^) + eps)
                w = w - eta * reference.only(self.direction(member.moments[phase], q), h)
            else:
                w = optimiser.step({"w": w}, {"w": q}, eta, {"w": h})["w"]
        return w, statistics

    def direction(self, moments: Moments, q: Tensor) -> Tensor:
        """u^ / (sqrt(v^) + eps)."""
        # u <- b1 u + (1 - b1) h q ; v <- b2 v + (1 - b2) h q q ; s counts the updates, this one included.
        moments.u = BETA_1 * moments.u + (1 - BETA_1) * q
        moments.v = BETA_2 * moments.v + (1 - BETA_2) * q * q
        moments.s += 1
        # u^ = u / (1 - b1^s) ; v^ = v / (1 - b2^s)
        u_hat = moments.u / (1 - BETA_1**moments.s)
        v_hat = moments.v / (1 - BETA_2**moments.s)
        return u_hat / (v_hat.sqrt() + EPSILON)

    def select(self, member: Member, change: Tensor) -> None:
        """PWPM: the coordinates that changed most become personal, and leave the shared moments."""
        d, groups = len(change), [list(range(len(change)))]
        if self.selection == "tensor":
            groups, first = [], 0
            for name in self.names:
                groups.append(list(range(first, first + self.initial[name].numel())))
                first += self.initial[name].numel()
            assert first == d
        old = member.personal.tolist()
        for group in groups:
            # d is the number of positions where this client ever had a gradient, or of all as printed
            counted = [i for i in group if member.reached[i] or self.budget == "all"]
            self.events["never reached"] += len(group) - len(counted)
            # min(floor(p d), floor(gamma d) - ||m_n||_0)
            share, bound = (math.floor(s * len(counted) + 1e-9) for s in (self.select_share, self.personal_bound))
            room = max(bound - sum(old[i] for i in group), 0)
            self.events["at the bound"] += room < share
            if self.ranking == "all":  # Eq. 6: m[i] = 1 where the change is in the top p of all d
                top = reference.largest(change, counted, share)
                joining = [i for i in top if not old[i]]
                self.events["in the top p and personal before"] += len(top) - len(joining)
                joining = reference.largest(change, joining, room)
            else:
                joining = reference.largest(change, [i for i in counted if not old[i]], min(share, room))
            for i in joining:
                self.events["joined"] += 1
                member.personal[i] = True
                member.moments["shared"].u[i] = 0.0
                member.moments["shared"].v[i] = 0.0

    # COWA

    def others(self, n: int) -> Tensor:
        """w_{-n}: the newest aggregation once more, from all of its uploads but the client's; w elsewhere."""
        if n not in self.newest:
            return self.w_0
        rest, shared = [upload for j, upload in self.newest.items() if j != n], self.newest[n].shared
        for i in shared.nonzero().flatten().tolist():
            others = sum(bool(u.shared[i]) for u in rest)
            self.events["shared with all others"] += others == len(rest)
            self.events["shared with some others"] += 0 < others < len(rest)
            self.events["shared with no other"] += not others
        return torch.where(shared, self.moved_by(rest), self.w_0)

    def prediction_score(self, n: int) -> float:
        """P_n: the mean cross-entropy of w_{-n} on the client's training data, before it trains."""
        rows = self.rows(n)
        logits = self.logits(self.seen_by(n, self.divided(self.others(n))), self.x[rows])
        loss = 0.0
        for z, label in zip(logits, self.y[rows].tolist(), strict=True):
            loss -= float(z.log_softmax(0)[label])
        return loss / len(rows)

    def gradient_score(self, n: int, upload: Upload, last: Upload | None) -> float:
        """G_n = 1 - cos(delta_n, dbar_{-n}), where dbar_{-n} is how the others moved w since the last session."""
        if last is None:
            return 1.0
        self.events["others after a pause"] += upload.number - last.number > 1
        where = upload.shared if self.scoring != "cowa-all" else torch.ones_like(upload.shared)
        found = cosine(reference.only(upload.update, where), reference.only(last.received - self.others(n), where))
        return 1.0 if found is None else 1 - found

    # Server

    def aggregated(self, uploads: list[Upload]) -> Tensor:
        """What the uploads make of the model before, each weighed by its part of their scores."""
        out = self.before.clone()
        total = sum(u.score for u in uploads)
        for i in range(len(out)):
            having = [u for u in uploads if u.shared[i]]
            if not having:
                continue
            if self.server_rule == "literal":
                # w <- sum alpha_n w_n (1 - m_n) at (1 - m_0), old w at m_0 = OR of all m_n
                if len(having) == len(uploads):
                    out[i] = sum(u.score / total * float(u.values[i]) for u in uploads)
            elif sum(u.score for u in having) > 0:
                # w[i] = sum alpha_n (1 - m_n[i]) w_n[i] / sum alpha_n (1 - m_n[i]), the old one where nobody shares it
                out[i] = sum(u.score * float(u.values[i]) for u in having) / sum(u.score for u in having)
        return out

    # Answers

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """(g_n, p_n), as trained; w_0 of a client that never was; or w_0 at (1 - m_n) and p_n at m_n."""
        member = self.members[c]
        own = self.answers == "own" and member.last is not None
        return self.logits(self.seen_by(c, self.divided(member.values if own else self.model_of(c))), x)

    def common(self, x: Tensor) -> Tensor | None:
        """w_0, where the server has all it needs to answer."""
        return None if self.running else self.logits(self.divided(self.w_0), x)
