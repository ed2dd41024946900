"""FedPHP: every client keeps a model that inherits from its own past."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl.core.types import Training
from personafl.data.federated import Federation
from tests.reference import Params
from tests.references.base import Reference
from tests.references.correcting import discrepancy


class FedPHP(Reference):
    """FedPHP: the personalised model learns from the inherited private model, then is blended into it."""

    weights = "uniform"

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        transfer: Literal["mmd", "kd", "l2", "prox"] = "mmd",
        weight: float = 0.01,
        temperature: float = 4.0,
        momentum: Literal["mu-a", "mu-b", "mu-c"] = "mu-a",
        rate: float = 0.9,
        answers: Literal["inherited", "personalised", "both"] = "inherited",
    ) -> None:
        super().__init__(module, federation, training)
        self.transfer, self.weight, self.temperature = transfer, weight, temperature
        self.momentum, self.rate, self.answers = momentum, rate, answers
        self.server = dict(self.initial)
        self.inherited = [dict(self.initial) for _ in self.clients]  # theta_p^k
        self.personalised: dict[int, Params] = {}  # theta_s^k as last trained
        self.sessions = [0 for _ in self.clients]  # z^k

    def play(self, number: int) -> None:
        """Algorithm 1, one round."""
        cohort, uploads = self.cohort(number), []
        for k in cohort:
            student = self.usual_turn(k, number)
            mu, old = self.mu(k, number), self.inherited[k]
            # theta_p <- (1 - mu_k) theta_s^k + mu_k theta_p, once, after local training; z^k counts from then on.
            # Running statistics are a part of both models.
            self.inherited[k] = {name: (1 - mu) * student[name] + mu * old[name] for name in self.initial}
            self.personalised[k] = student
            self.sessions[k] += 1
            uploads.append(student)
        self.server = self.moved(self.server, self.mean(uploads, cohort, [*self.names, *self.running]))

    def usual_turn(self, k: int, number: int) -> Params:
        """theta_s^k: local training from theta_s with the kept theta_p^k as a frozen teacher."""
        teacher = dict(self.inherited[k])

        def loss(student: Params, rows: Tensor) -> Tensor:
            # (1 - lambda) CE(theta_s^k) + lambda L_kt, of one forward pass, which running statistics count
            h_s, g_s = self.forward(student, self.x[rows])
            own = F.cross_entropy(g_s, self.y[rows])
            return (1 - self.weight) * own + self.weight * self.knowledge(student, h_s, g_s, teacher, rows)

        return self.train(k, number, self.server, loss=loss)

    def knowledge(self, student: Params, h_s: Tensor, g_s: Tensor, teacher: Params, rows: Tensor) -> Tensor:
        """L_kt; the teacher is in evaluation mode, the student in training mode."""
        if self.transfer == "prox":  # ||theta_s - theta_p||^2
            total = torch.zeros((), dtype=torch.float64)
            for name in self.names:
                total = total + ((student[name] - teacher[name]) ** 2).sum()
            return total
        self.network.module.eval()
        with torch.no_grad():
            h_p, g_p = self.forward(teacher, self.x[rows])
        self.network.module.train()
        if self.transfer == "mmd":  # ||mean Phi(h_s) - mean Phi(h_p)||^2
            return discrepancy(h_s, h_p)
        if self.transfer == "l2":  # 1/(2B) sum ||h_s - h_p||^2
            return ((h_s - h_p) ** 2).sum() / (2 * len(rows))
        # tau^2 mean KL(softmax(g_p / tau) || softmax(g_s / tau))
        tau = self.temperature
        log_s, log_p = F.log_softmax(g_s / tau, 1), F.log_softmax(g_p / tau, 1)
        return tau**2 * (log_p.exp() * (log_p - log_s)).sum() / len(rows)

    def mu(self, k: int, number: int) -> float:
        """The share of the old HPM in the new one."""
        if self.momentum == "mu-a":  # mu z^k / (Q T), clipped; z^k does not count this session
            expected = self.training.join_ratio * self.training.num_rounds
            return min(self.rate * self.sessions[k] / expected, 0.9)
        if self.momentum == "mu-b":
            return self.rate
        return number / self.training.num_rounds  # mu_t = t / T

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """The HPM, the personalised model, or the mean of their probabilities."""
        inherited = self.logits(self.inherited[c], x)
        personalised = self.logits(self.personalised.get(c, self.seen_by(c, self.server)), x)
        if self.answers == "inherited":
            return inherited
        if self.answers == "personalised":
            return personalised
        return ((inherited.softmax(1) + personalised.softmax(1)) / 2).log()

    def common(self, x: Tensor) -> Tensor | None:
        """theta_s, which without running statistics is not complete."""
        return self.logits(self.server, x) if self.own_statistics is None else None
