"""Baselines whose clients keep a whole model beside the server's: Ditto, APFL, FML."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from personafl.core.types import Training
from personafl.data.federated import Federation
from tests.reference import Params
from tests.references.baselines import FedAvg


class Ditto(FedAvg):
    """FedAvg on w; a personal v that is pulled towards the received w."""

    def __init__(
        self, module: nn.Module, federation: Federation, training: Training, *, proximal_weight: float = 0.1
    ) -> None:
        super().__init__(module, federation, training)
        self.pull, self.v = proximal_weight, [dict(self.initial) for _ in self.clients]

    def local(self, c: int, number: int) -> Params:
        """v steps by grad F(v) + lambda (v - w_t), on the minibatches that train w; its statistics are its own."""
        v, optimiser = self.v[c], self.optimiser()
        for rows in self.stream(c, number).turn():
            g = self.gradient(self.cross_entropy, v, rows)
            pulled = {n: g[n] + self.pull * (v[n] - self.w[n]) for n in self.names}
            v = self.step(optimiser, v, pulled, self.lr(number)) | self.tracked
        self.v[c] = v
        return super().local(c, number)

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """v."""
        return self.logits(self.v[c], x)


class APFL(FedAvg):
    """FedAvg on w; a private v that is trained, and used, mixed with w."""

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        alpha: float = 0.5,
        learn_alpha: bool = True,
    ) -> None:
        super().__init__(module, federation, training)
        self.learn_alpha = learn_alpha
        self.alpha = [alpha for _ in self.clients]
        self.v = [dict(self.initial) for _ in self.clients]

    def mixed(self, c: int, v: Params, w: Params) -> Params:
        """vbar = alpha v + (1 - alpha) w."""
        return {n: self.alpha[c] * v[n] + (1 - self.alpha[c]) * w[n] for n in self.names}

    def local(self, c: int, number: int) -> Params:
        """alpha once, on the first minibatch; then w on F(w) and v on F(vbar), minibatch by minibatch."""
        v, w, eta = self.v[c], dict(self.w), self.lr(number)
        if self.learn_alpha:
            # dF(vbar)/dalpha = <v - w, grad F(vbar)>
            g = self.gradient(self.cross_entropy, self.mixed(c, v, w), self.batches(c, number, 0)[0])
            slope = sum(float(((v[n] - w[n]) * g[n]).sum()) for n in self.names)
            self.alpha[c] = min(max(self.alpha[c] - eta * slope, 0.0), 1.0)
        of_v, of_w = self.optimiser(), self.optimiser()
        for rows in self.stream(c, number).turn():
            at_w = self.gradient(self.cross_entropy, w, rows)
            at_vbar = self.gradient(self.cross_entropy, self.mixed(c, v, w), rows)
            # dF(vbar)/dv = alpha grad F(vbar)
            v = self.step(of_v, v, {n: self.alpha[c] * at_vbar[n] for n in self.names}, eta)
            w = self.step(of_w, w, at_w, eta)
        self.v[c] = v
        return w

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """vbar with the newest w."""
        return self.logits(self.mixed(c, self.v[c], self.w), x)


class FML(FedAvg):
    """A private model and the travelling meme learn from the data and from one another."""

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        alpha: float = 0.5,
        beta: float = 0.5,
    ) -> None:
        super().__init__(module, federation, training, weights="uniform")
        self.alpha, self.beta = alpha, beta
        self.private = [dict(self.initial) for _ in self.clients]

    def taught(self, share: float, student: Params, teacher: Params, rows: Tensor) -> Params:
        """The gradient of share * CE + (1 - share) * KL(p_teacher || p_student) in the student."""
        p = self.logits(teacher, self.x[rows]).softmax(1)

        def loss(params: Params, rows: Tensor) -> Tensor:
            logits = self.forward(params, self.x[rows])[1]
            divergence = (p * (p.log() - logits.log_softmax(1))).sum(1).mean()
            return share * F.cross_entropy(logits, self.y[rows]) + (1 - share) * divergence

        return self.gradient(loss, student, rows)

    def local(self, c: int, number: int) -> Params:
        """Both step at once: each one's teacher is the other before the step."""
        private, meme, eta = self.private[c], dict(self.w), self.lr(number)
        of_private, of_meme = self.optimiser(), self.optimiser()
        for rows in self.stream(c, number).turn():
            at_private = self.taught(self.alpha, private, meme, rows)
            at_meme = self.taught(self.beta, meme, private, rows)
            private, meme = self.step(of_private, private, at_private, eta), self.step(of_meme, meme, at_meme, eta)
        self.private[c] = private
        return meme

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """The private model."""
        return self.logits(self.private[c], x)
