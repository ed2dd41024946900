"""FedAvg with adaptive inference, FedLC and Fed-RoD: label counts in the local loss."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl.core.types import Training
from personafl.data.federated import Federation
from tests.reference import Params
from tests.references.base import HEAD, Reference
from tests.references.baselines import FedAvg


class FedAvgAdaptive(FedAvg):
    """FedAvg on logits plus log pi_c; answers are for the mix of classes of a batch, by EM over its inputs."""

    TEMPERATURE, PULL, DOUBT, STEPS = 1.5, 2.0, 1.0, 30

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        prior_free: bool = True,
        inference: str = "batch",
    ) -> None:
        super().__init__(module, federation, training)
        self.prior_free, self.inference = prior_free, inference

    def frequencies(self, c: int) -> list[float]:
        """pi_c(k) = (n_ck + 1) / (n_c + K)."""
        labels = self.y[self.rows(c)].tolist()
        classes = len(self.initial[HEAD[1]])
        return [(labels.count(k) + 1) / (len(labels) + classes) for k in range(classes)]

    def local(self, c: int, number: int) -> Params:
        """CE(z + log pi_c, y)."""
        if not self.prior_free:
            return super().local(c, number)
        log_pi = torch.tensor(self.frequencies(c), dtype=torch.float64).log()

        def loss(params: Params, rows: Tensor) -> Tensor:
            return F.cross_entropy(self.forward(params, self.x[rows])[1] + log_pi, self.y[rows])

        return self.train(c, number, self.w, loss=loss)

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """log p(y = k | x_i) = log sum_p a_p softmax(z_i + log p)_k, all inputs being one batch."""
        z = super().evaluated(c, x)
        if self.inference == "own":
            return z
        fits = [softmax([out / self.TEMPERATURE for out in one]) for one in z.tolist()]  # of z_i, T its temperature
        pi = self.frequencies(c)
        n, classes = len(fits), range(len(pi))
        q = pi
        for _ in range(self.STEPS):
            r = [posterior(fit, q) for fit in fits]
            q = [(sum(one[k] for one in r) + self.PULL * pi[k]) / (n + self.PULL) for k in classes]
        equal = [1 / len(pi) for _ in classes]
        half = [(pi[k] + equal[k]) / 2 for k in classes]
        shown = sum(1 - (1 - q[k]) ** n for k in classes)  # how many classes n inputs of this mix show
        likely = [sum(math.log(sum(p[k] * fit[k] for k in classes)) for fit in fits) for p in (pi, half, equal, q)]
        likely[3] -= self.DOUBT * (shown - 1)
        a = softmax(likely)
        answers = []
        for fit in fits:
            each = [posterior(fit, p) for p in (pi, half, equal, q)]
            answers.append([math.log(sum(w * one[k] for w, one in zip(a, each, strict=True))) for k in classes])
        return torch.tensor(answers, dtype=torch.float64)


def softmax(z: list[float]) -> list[float]:
    """exp z_k / sum_j exp z_j."""
    terms = [math.exp(one - max(z)) for one in z]
    return [term / sum(terms) for term in terms]


def posterior(fit: list[float], p: list[float]) -> list[float]:
    """softmax(z + log p), where fit is softmax(z)."""
    terms = [f * one for f, one in zip(fit, p, strict=True)]
    return [term / sum(terms) for term in terms]


class FedLC(FedAvg):
    """FedAvg whose softmax sees logits less tau n_k^(-1/4)."""

    def __init__(self, module: nn.Module, federation: Federation, training: Training, *, margin: float = 1.0) -> None:
        super().__init__(module, federation, training)
        self.tau = margin

    def local(self, c: int, number: int) -> Params:
        """-log( exp(f_y - tau n_y^(-1/4)) / sum_k exp(f_k - tau n_k^(-1/4)) ), n_k at least 1e-8."""
        labels = self.y[self.rows(c)].tolist()
        classes = len(self.initial[HEAD[1]])
        margins = [self.tau * max(labels.count(k), 1e-8) ** -0.25 for k in range(classes)]

        def loss(params: Params, rows: Tensor) -> Tensor:
            f = self.forward(params, self.x[rows])[1] - torch.tensor(margins, dtype=torch.float64)
            terms = [torch.logsumexp(one, 0) - one[label] for one, label in zip(f, self.y[rows].tolist(), strict=True)]
            return torch.stack(terms).mean()

        return self.train(c, number, self.w, loss=loss)


class FedRoD(Reference):
    """Balanced softmax for the shared model; a linear head of the client's own on features that stand still."""

    def __init__(self, module: nn.Module, federation: Federation, training: Training) -> None:
        super().__init__(module, federation, training)
        self.server = dict(self.initial)
        head = {"P": torch.zeros_like(self.initial[HEAD[0]]), "b": torch.zeros_like(self.initial[HEAD[1]])}
        self.private = [dict(head) for _ in self.clients]

    def answer(self, params: Params, z: Tensor, g: Tensor) -> Tensor:
        """h_g(z) + h_p(z), one example at a time."""
        return torch.stack([out + params["P"] @ one + params["b"] for one, out in zip(z, g, strict=True)])

    def play(self, number: int) -> None:
        """One round; body and shared head travel, the own head stays."""
        uploads, cohort = [], self.cohort(number)
        for c in cohort:
            labels = self.y[self.rows(c)].tolist()
            classes = len(self.initial[HEAD[1]])
            pi = [(labels.count(k) + 1) / (len(labels) + classes) for k in range(classes)]
            log_pi = torch.tensor([math.log(p) for p in pi], dtype=torch.float64)

            def loss(params: Params, rows: Tensor, log_pi: Tensor = log_pi) -> Tensor:
                z, g = self.forward({name: params[name] for name in self.names}, self.x[rows])
                own = self.answer(params, z.detach(), g.detach())
                return F.cross_entropy(g + log_pi, self.y[rows]) + F.cross_entropy(own, self.y[rows])

            trained = {**self.server, **self.private[c]}
            shared, mine = self.optimiser(), self.optimiser()  # of each its own moments and its own clip
            for rows in self.stream(c, number).turn():
                gradient = self.gradient(loss, trained, rows)
                trained = self.step(shared, trained, {n: gradient[n] for n in self.names}, self.lr(number))
                trained = self.step(mine, trained, {n: gradient[n] for n in ("P", "b")}, self.lr(number))
            self.private[c] = {name: trained[name] for name in self.private[c]}
            uploads.append({name: trained[name] for name in self.names})
        self.server = self.moved(self.server, self.mean(uploads, cohort))

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """Both heads on the newest shared body."""
        with torch.no_grad():
            z, g = self.forward({name: self.server[name] for name in self.names}, x)
            return self.answer(self.private[c], z, g)

    def common(self, x: Tensor) -> Tensor:
        """The shared model."""
        return self.logits(self.server, x)
