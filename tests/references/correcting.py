"""Baselines that correct FedAvg's local steps or its mean: SCAFFOLD, FedNova, MOON, FedMMD."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl.core.types import Training
from personafl.data.federated import Federation
from tests.reference import Params
from tests.references.baselines import FedAvg


class Scaffold(FedAvg):
    """Control variates c of the server and c_i of the clients, all zero at first."""

    def __init__(self, module: nn.Module, federation: Federation, training: Training) -> None:
        super().__init__(module, federation, training, weights="uniform")
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
        # w += eta_g mean(dy);  c += |S| / N mean(dc)
        self.w = self.moved(self.w, self.mean(ys, cohort))
        dc = self.mean(dcs, cohort)
        self.c = {n: self.c[n] + len(cohort) / len(self.clients) * dc[n] for n in self.names}


class FedNova(FedAvg):
    """Updates are divided by how often a gradient of the session entered them."""

    def length(self, i: int, number: int) -> float:
        """a_i: what the session would move by if every gradient were 1, the rate too; without momentum its steps."""
        moved, velocity = 0.0, 0.0
        for _ in self.stream(i, number).turn():
            velocity = self.training.momentum * velocity + 1
            moved += velocity
        return moved

    def play(self, number: int) -> None:
        """w <- w - tau_eff sum p_i d_i with d_i = (w - w_i) / a_i, tau_eff = sum p_i a_i, p_i = n_i / n."""
        cohort = self.cohort(number)
        shares = self.shares(cohort)
        tau_eff, total = 0.0, {n: torch.zeros_like(w) for n, w in self.w.items()}
        for i, n_i in zip(cohort, shares, strict=True):
            p = n_i / sum(shares)
            w_i = self.local(i, number)
            a = self.length(i, number)
            tau_eff += p * a
            total = {n: total[n] + p * (self.w[n] - w_i[n]) / a for n in self.names}
        self.w = self.moved(self.w, {n: self.w[n] - tau_eff * total[n] for n in self.names})


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
    ) -> None:
        super().__init__(module, federation, training)
        self.mu, self.tau = contrast_weight, temperature
        self.previous: dict[int, Params] = {}

    def local(self, c: int, number: int) -> Params:
        """F + mu l_con, l_con = -log( e^{s(z,z_glob)/tau} / (e^{s(z,z_glob)/tau} + e^{s(z,z_prev)/tau}) )."""

        def loss(params: Params, rows: Tensor) -> Tensor:
            z, logits = self.forward(params, self.x[rows])
            z_glob = self.features(self.w, self.x[rows])
            z_prev = self.features(self.previous[c], self.x[rows])
            near = (F.cosine_similarity(z, z_glob) / self.tau).exp()
            far = (F.cosine_similarity(z, z_prev) / self.tau).exp()
            contrast = -(near / (near + far)).log()
            return F.cross_entropy(logits, self.y[rows]) + self.mu * contrast.mean()

        # There is no previous model in a client's first session, and no term.
        trained = self.train(c, number, self.w, loss=loss if c in self.previous else None)
        self.previous[c] = trained
        return trained


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
