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
    update: Tensor  # delta_n at the shared coordinates, zero elsewhere
    score: float = 0.0  # Gamma_n
    alpha: float = 0.0


@dataclass
class Member:
    """m_n, p_n, the two moment pairs and the last upload."""

    personal: Tensor
    values: Tensor
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
        selection: Literal["global", "tensor"] = "global",
        phases: Literal["parallel", "sequential"] = "parallel",
        server_rule: Literal["renormalised", "literal"] = "renormalised",
        moments: bool = True,
        weights: Literal["cowa", "uniform", "cowa-gradient", "cowa-prediction", "cowa-server"] = "cowa",
    ) -> None:
        super().__init__(module, federation, training)
        self.select_share, self.personal_bound, self.selection = select_share, personal_bound, selection
        self.phases, self.server_rule, self.moments, self.scoring = phases, server_rule, moments, weights
        self.w_0, self.events = self.joined(self.initial), Counter[str]()
        nothing = torch.zeros_like(self.w_0)
        self.members = [
            Member(
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
        predictions = {n: self.prediction_score(n, number) for n in cohort}
        before = {n: self.members[n].last for n in cohort}
        uploads = {n: self.session(n, number) for n in cohort}
        for n in cohort:
            if self.scoring == "cowa-server":
                gradient = self.server_score(n, uploads, before)
            else:
                gradient = self.gradient_score(uploads[n], before[n])
            uploads[n].score = {
                "cowa": gradient + predictions[n],
                "cowa-server": gradient + predictions[n],
                "cowa-gradient": gradient,
                "cowa-prediction": predictions[n],
                "uniform": 1.0,
            }[self.scoring]
        # alpha_n = Gamma_n / sum Gamma
        total = sum(upload.score for upload in uploads.values())
        for n in cohort:
            uploads[n].alpha = uploads[n].score / total
            self.members[n].last = uploads[n]
        # w_0 <- w_0 + eta_g (aggregate - w_0), as everywhere
        self.w_0 = self.w_0 + self.training.server_lr * (self.aggregated(list(uploads.values())) - self.w_0)

    def session(self, n: int, number: int) -> Upload:
        """Algorithm 2: both phases of MAMO, then PWPM; returns what the client uploads."""
        member = self.members[n]
        start = self.model_of(n)
        personal = self.mamo(n, number, start, "personal")
        if self.phases == "parallel":  # again from w_n^k
            shared = self.mamo(n, number, start, "shared")
        else:
            shared = self.mamo(n, number, personal, "shared")
        end = torch.where(member.personal, personal, shared)
        # PWPM: Delta = |w_n^k - w_n^{k+1}|
        self.select(member, (start - end).abs())
        member.values = torch.where(member.personal, end, torch.zeros_like(end))
        held = ~member.personal
        return Upload(number, self.w_0, held, reference.only(end, held), reference.only(start - end, held))

    def mamo(self, n: int, number: int, start: Tensor, phase: Literal["personal", "shared"]) -> Tensor:
        """E local epochs that move h = m_n, or h = 1 - m_n."""
        member = self.members[n]
        h = member.personal if phase == "personal" else ~member.personal
        if not h.any():
            return start
        w, eta, optimiser = start, self.lr(number), self.optimiser()
        for rows in self.stream(n, number, "personal" if phase == "personal" else "batches").turn():
            q = reference.only(self.joined(self.gradient(self.cross_entropy, self.divided(w), rows)), h)
            if self.moments:  # w <- w - eta h u^ / (sqrt(v^) + eps)
                w = w - eta * reference.only(self.direction(member.moments[phase], q), h)
            else:
                w = optimiser.step({"w": w}, {"w": q}, eta, {"w": h})["w"]
        return w

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
            # min(floor(p d), floor(gamma d) - ||m_n||_0)
            taken = sum(old[i] for i in group)
            bound = math.floor(self.personal_bound * len(group)) - taken
            count = min(math.floor(self.select_share * len(group)), bound)
            self.events["at the bound"] += bound < math.floor(self.select_share * len(group))
            for i in reference.largest(change, [i for i in group if not old[i]], max(count, 0)):
                self.events["joined"] += 1
                member.personal[i] = True
                member.moments["shared"].u[i] = 0.0
                member.moments["shared"].v[i] = 0.0

    # COWA

    def prediction_score(self, n: int, number: int) -> float:
        """P_n: the mean cross-entropy of w_{-n} on the client's training data, before it trains."""
        last, without = self.members[n].last, self.w_0
        if last is not None and last.number == number - 1 and self.training.server_lr * last.alpha < 1:
            # w_{-n} = (w^k - alpha_n w_n^k) / (1 - alpha_n) where n shared, w^k elsewhere
            share = self.training.server_lr * last.alpha  # of the server's move that the client made
            rest = (self.w_0 - share * last.values) / (1 - share)
            without = torch.where(last.shared, rest, self.w_0)
            self.events["others without the client"] += 1
        rows = self.rows(n)
        logits = self.logits(self.divided(without), self.x[rows])
        loss = 0.0
        for z, label in zip(logits, self.y[rows].tolist(), strict=True):
            loss -= float(z.log_softmax(0)[label])
        return loss / len(rows)

    def gradient_score(self, upload: Upload, last: Upload | None) -> float:
        """G_n = 1 - cos(delta_n, dbar_{-n}), where dbar_{-n} is how the others moved w since the last session."""
        if last is None or self.training.server_lr * last.alpha >= 1:
            return 1.0
        # delta = w before - w now ; dbar_{-n} = (delta - alpha_n delta_n^last) / (1 - alpha_n)
        self.events["others after a pause"] += upload.number - last.number > 1
        moved = last.received - upload.received
        share = self.training.server_lr * last.alpha
        others = (moved - share * last.update) / (1 - share)
        found = cosine(upload.update, reference.only(others, upload.shared))
        return 1.0 if found is None else 1 - found

    def server_score(self, n: int, uploads: dict[int, Upload], before: dict[int, Upload | None]) -> float:
        """G_n = 1 - cos(delta_n, sum_{j != n} alpha_j delta_j), from the uploads of this round."""
        others = torch.zeros_like(self.w_0)
        for j, upload in uploads.items():
            last = before[j]
            if j != n:
                others = others + (1 / len(uploads) if last is None else last.alpha) * upload.update
        found = cosine(uploads[n].update, reference.only(others, uploads[n].shared))
        return 1.0 if found is None else 1 - found

    # Server

    def aggregated(self, uploads: list[Upload]) -> Tensor:
        """What the uploads make of w_0."""
        out = self.w_0.clone()
        for i in range(len(out)):
            having = [u for u in uploads if u.shared[i]]
            self.events["shared by some"] += 0 < len(having) < len(uploads)
            self.events["shared by none"] += not having
            if self.server_rule == "literal":
                # w <- sum alpha_n w_n (1 - m_n) at (1 - m_0), old w at m_0 = OR of all m_n
                if len(having) == len(uploads):
                    out[i] = sum(u.alpha * float(u.values[i]) for u in uploads)
            elif sum(u.alpha for u in having) > 0:
                # w[i] = sum alpha_n (1 - m_n[i]) w_n[i] / sum alpha_n (1 - m_n[i]), the old one where nobody shares it
                out[i] = sum(u.alpha * float(u.values[i]) for u in having) / sum(u.alpha for u in having)
        return out

    # Answers

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """w_0 at (1 - m_n) and p_n at m_n."""
        return self.logits(self.divided(self.model_of(c)), x)

    def common(self, x: Tensor) -> Tensor:
        """w_0."""
        return self.logits(self.divided(self.w_0), x)
