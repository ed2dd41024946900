"""Baselines that correct FedAvg's local steps or its mean: SCAFFOLD, FedNova, MOON, FedMMD."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl.core import rng
from personafl.core.types import Training
from personafl.data.federated import Federation
from tests.reference import Params
from tests.references.base import HEAD
from tests.references.baselines import FedAvg


class Scaffold(FedAvg):
    """Control variates c of the server and c_i of the clients, all zero at first."""

    def __init__(
        self, module: nn.Module, federation: Federation, training: Training, *, weights: str = "uniform"
    ) -> None:
        super().__init__(module, federation, training, weights=weights)
        self.c = {n: torch.zeros_like(w) for n, w in self.initial.items()}
        self.c_i = [dict(self.c) for _ in self.clients]

    def play(self, number: int) -> None:
        """Option II."""
        cohort, eta, ys, dcs = self.cohort(number), self.lr(number), [], []
        for i in cohort:
            y, c_i, steps, optimiser = dict(self.w), self.c_i[i], 0, self.optimiser()
            for rows in self.stream(i, number).turn():
                g = self.gradient(self.cross_entropy, y, rows)
                y = self.step(optimiser, y, {n: g[n] + self.c[n] - c_i[n] for n in self.names}, eta)
                steps += 1
            # c_i+ = c_i - c + (w - y) / (steps eta)
            self.c_i[i] = {n: c_i[n] - self.c[n] + (self.w[n] - y[n]) / (steps * eta) for n in self.names}
            ys.append(y)
            dcs.append({n: self.c_i[i][n] - c_i[n] for n in self.names})
        # w += eta_g mean(dy);  c += |S| / N mean(dc), by examples sum n_i dc_i / n over all clients' n
        self.w = self.moved(self.w, self.mean(ys, cohort))
        share = sum(self.shares(cohort)) / sum(self.shares(self.clients))
        dc = self.mean(dcs, cohort)
        self.c = {n: self.c[n] + share * dc[n] for n in self.names}


class FedNova(FedAvg):
    """Updates are divided by the length of the local work: the sum of what each gradient counts in them."""

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        proximal_weight: float = 0.0,
        server_momentum: float = 0.0,
    ) -> None:
        super().__init__(module, federation, training)
        self.mu, self.beta = proximal_weight, server_momentum
        self.u = {n: torch.zeros_like(w) for n, w in self.w.items()}

    def pulled(self, params: Params, rows: Tensor) -> Tensor:
        """F + mu/2 ||w_i - w||^2."""
        pull = sum(((params[n] - self.w[n]).square().sum() for n in self.names), torch.zeros(()))
        return self.cross_entropy(params, rows) + self.mu / 2 * pull

    def length(self, steps: int, number: int, mu: float) -> float:
        """||a||_1 of w - w_i = eta sum_k a_k g_k: the same steps on the coefficients of the gradients."""
        eta, rho = self.lr(number), self.training.momentum
        a, v = [0.0] * steps, [0.0] * steps
        for step in range(steps):
            v = [rho * v[k] - eta * mu * a[k] + (1.0 if k == step else 0.0) for k in range(steps)]
            a = [a[k] + v[k] for k in range(steps)]
        return sum(abs(a_k) for a_k in a)

    def play(self, number: int) -> None:
        """w <- w - tau_eff sum p_i d_i with d_i = (w - w_i) / a_i, p_i = n_i / n.

        tau_eff = sum p_i a_i, of the a_i there would be without the proximal term.
        """
        cohort = self.cohort(number)
        shares = self.shares(cohort)
        tau_eff, total = 0.0, {n: torch.zeros_like(w) for n, w in self.w.items()}
        for i, n_i in zip(cohort, shares, strict=True):
            p = n_i / sum(shares)
            w_i, steps = self.train(i, number, self.w, loss=self.pulled), len(self.stream(i, number).turn())
            a = self.length(steps, number, self.mu)
            tau_eff += p * self.length(steps, number, 0.0)
            total = {n: total[n] + p * (self.w[n] - w_i[n]) / a for n in self.names}
        # u <- beta u + move / eta;  w <- w - eta_g eta u
        eta = self.lr(number)
        self.u = {n: self.beta * self.u[n] + tau_eff * total[n] / eta for n in self.names}
        self.w = self.moved(self.w, {n: self.w[n] - eta * self.u[n] for n in self.names})


class MOON(FedAvg):
    """Features are drawn to the received model's and away from those of the client's previous model."""

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        contrast_weight: float = 5.0,
        temperature: float = 0.5,
        projection: bool = False,
    ) -> None:
        super().__init__(module, federation, training)
        self.mu, self.tau, self.projection = contrast_weight, temperature, projection
        self.previous: dict[int, Params] = {}
        if projection:  # two linear layers, trained, sent and averaged with the model
            d = self.initial[HEAD[0]].shape[1]
            for i, (name, count) in enumerate({"A": d * d, "a": d, "B": d * d, "b": d}.items()):
                u = rng.uniform(rng.key(training.seed, "projection", i), count)  # as nn.Linear: U(-1, 1) / sqrt(d)
                self.w[name] = ((2 * u - 1) / d**0.5).view((d, d) if name.isupper() else (d,))

    def projected(self, params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
        """z and the logits: the head sees B relu(A h + a) + b instead of the features h."""
        h, logits = self.forward({name: params[name] for name in self.names}, x)
        if not self.projection:
            return h, logits
        z = torch.stack([params["B"] @ (params["A"] @ one + params["a"]).relu() + params["b"] for one in h])
        return z, z @ params[HEAD[0]].T + params[HEAD[1]]

    def local(self, c: int, number: int) -> Params:
        """F + mu l_con, l_con = -log( e^{s(z,z_glob)/tau} / (e^{s(z,z_glob)/tau} + e^{s(z,z_prev)/tau}) )."""

        def loss(params: Params, rows: Tensor) -> Tensor:
            z, logits = self.projected(params, self.x[rows])
            with torch.no_grad():
                z_glob, z_prev = (self.projected(w, self.x[rows])[0] for w in (self.w, self.previous[c]))
            near = (F.cosine_similarity(z, z_glob) / self.tau).exp()
            far = (F.cosine_similarity(z, z_prev) / self.tau).exp()
            contrast = -(near / (near + far)).log()
            return F.cross_entropy(logits, self.y[rows]) + self.mu * contrast.mean()

        def first(params: Params, rows: Tensor) -> Tensor:
            return F.cross_entropy(self.projected(params, self.x[rows])[1], self.y[rows])

        # There is no previous model in a client's first session, and no term.
        trained = self.train(c, number, self.w, loss=loss if c in self.previous else first)
        self.previous[c] = trained
        return trained

    def play(self, number: int) -> None:
        """w <- w - eta_g (w - mean), the projection's too."""
        cohort = self.cohort(number)
        models = [self.local(c, number) for c in cohort]
        self.w = self.moved(self.w, self.mean(models, cohort, self.w))

    def common(self, x: Tensor) -> Tensor | None:
        """The global model."""
        return self.projected(self.w, x)[1]

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """The global model."""
        return self.projected(self.w, x)[1]


class FedMMD(FedAvg):
    """Features stay close, as a distribution, to the received model's."""

    def __init__(
        self, module: nn.Module, federation: Federation, training: Training, *, discrepancy_weight: float = 0.01
    ) -> None:
        super().__init__(module, federation, training)
        self.discrepancy_weight = discrepancy_weight

    def local(self, c: int, number: int) -> Params:
        """F + lambda MMD^2(h, h_g)."""

        def loss(params: Params, rows: Tensor) -> Tensor:
            h, logits = self.forward(params, self.x[rows])
            h_g = self.features(self.w, self.x[rows])
            return F.cross_entropy(logits, self.y[rows]) + self.discrepancy_weight * discrepancy(h, h_g)

        return self.train(c, number, self.w, loss=loss)


def discrepancy(h: Tensor, other: Tensor) -> Tensor:
    """MMD^2, biased, of two batches of B features: mean(XX + YY - XY - YX) under a sum of five Gaussians."""
    size = len(h)
    if size == 1:  # no distribution, no discrepancy
        return torch.zeros((), dtype=torch.float64)
    joint = [*h, *other]
    squared = [[((p - q) ** 2).sum() for q in joint] for p in joint]
    # b = sum of the squared distances / (n^2 - n), n = 2B, a constant
    n = 2 * size
    b = sum(float(d.detach()) for row in squared for d in row) / (n * n - n)
    if b == 0:  # all features are equal
        return torch.zeros((), dtype=torch.float64)

    def kernel(d: Tensor) -> Tensor:
        # sum_i exp(-d^2 / b_i), b_i = b 2^i / 4
        return torch.stack([(-d / (b * 2**i / 4)).exp() for i in range(5)]).sum()

    total = torch.zeros((), dtype=torch.float64)
    for i in range(size):
        for j in range(size):
            xx, yy = kernel(squared[i][j]), kernel(squared[size + i][size + j])
            xy, yx = kernel(squared[i][size + j]), kernel(squared[size + i][j])
            total = total + xx + yy - xy - yx
    return total / (size * size)
