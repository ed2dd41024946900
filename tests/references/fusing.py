"""FedFu and FLDA: two models of a client that answer together."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl.core.types import Training
from personafl.data.federated import Federation
from tests.reference import Params
from tests.references.base import HEAD, Reference


class FedFu(Reference):
    """FedFusion: the features of the received body and of the trained one are fused before the head."""

    weights = "uniform"

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        fusion: Literal["conv", "multi", "single"] = "conv",
        smoothing: float = 0.9,
    ) -> None:
        super().__init__(module, federation, training)
        self.fusion, self.smoothing = fusion, smoothing
        d = self.initial[HEAD[0]].shape[1]
        started: Params
        if fusion == "conv":  # A = [I/2, I/2], b = 0
            half = torch.eye(d, dtype=torch.float64) / 2
            started = {"A": torch.cat([half, half], 1), "b": torch.zeros(d, dtype=torch.float64)}
        else:
            started = {"gamma": torch.zeros(d if fusion == "multi" else 1, dtype=torch.float64)}
        self.server = {**self.initial, **started}

    def fused(self, params: Params, z_g: Tensor, z_l: Tensor) -> Tensor:
        """F(z_g, z_l), one example at a time."""
        out = []
        for g, own in zip(z_g, z_l, strict=True):
            if self.fusion == "conv":
                out.append(params["A"] @ torch.cat([g, own]) + params["b"])
            else:
                out.append(params["gamma"] * g + (1 - params["gamma"]) * own)
        return torch.stack(out)

    def answer(self, params: Params, received: Params, x: Tensor) -> Tensor:
        """head(F(E_g(x), E_l(x)))."""
        with torch.no_grad():
            z_g = self.forward({name: received[name] for name in self.names}, x)[0]
        z_l = self.forward({name: params[name] for name in self.names}, x)[0]
        return self.fused(params, z_g, z_l) @ params[HEAD[0]].T + params[HEAD[1]]

    def play(self, number: int) -> None:
        """One round; model and fusion module are trained, sent and averaged alike."""
        uploads, received = [], dict(self.server)

        def loss(params: Params, rows: Tensor) -> Tensor:
            return F.cross_entropy(self.answer(params, received, self.x[rows]), self.y[rows])

        cohort = self.cohort(number)
        for c in cohort:
            uploads.append(self.train(c, number, received, loss=loss))
        self.server = self.moved(received, self.mean(uploads, cohort, received))
        if self.fusion != "conv":  # gamma <- 0.1 mean + 0.9 previous
            moved, old = self.server["gamma"], received["gamma"]
            self.server["gamma"] = (1 - self.smoothing) * moved + self.smoothing * old

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """The fused model whose two bodies are the newest one."""
        return self.common(x)

    def common(self, x: Tensor) -> Tensor:
        """The same for everybody."""
        with torch.no_grad():
            return self.answer(self.server, self.server, x)


class FLDA(Reference):
    """FLDA: a gate on the shared features mixes the probabilities of a shared and a private model."""

    def __init__(self, module: nn.Module, federation: Federation, training: Training) -> None:
        super().__init__(module, federation, training)
        self.server = dict(self.initial)  # M_G
        d = self.initial[HEAD[0]].shape[1]
        zeros = torch.zeros(d, dtype=torch.float64)
        gate = {"u": zeros, "b": torch.zeros((), dtype=torch.float64)}
        self.private = [{**{"P/" + name: w for name, w in self.initial.items()}, **gate} for _ in self.clients]

    def answer(self, params: Params, x: Tensor) -> Tensor:
        """log(a p_G + (1 - a) p_P), a = sigmoid(u z + b), z the features of M_G."""
        z, g = self.forward({name: params[name] for name in self.names}, x)
        p = self.forward({name: params["P/" + name] for name in self.names}, x)[1]
        out = []
        for features, shared, private in zip(z, g, p, strict=True):
            a = torch.sigmoid((params["u"] * features).sum() + params["b"])
            out.append((a * shared.softmax(0) + (1 - a) * private.softmax(0)).log())
        return torch.stack(out)

    def play(self, number: int) -> None:
        """One round; M_G, M_P and the gate are trained jointly, only M_G travels."""

        def loss(params: Params, rows: Tensor) -> Tensor:
            # cross-entropy of the mixture: -log yhat[y]
            answers = self.answer(params, self.x[rows])
            total = torch.zeros((), dtype=torch.float64)
            for answer, label in zip(answers, self.y[rows].tolist(), strict=True):
                total = total - answer[label]
            return total / len(rows)

        uploads, cohort = [], self.cohort(number)
        for c in cohort:
            trained = self.train(c, number, {**self.server, **self.private[c]}, loss=loss)
            self.private[c] = {name: trained[name] for name in self.private[c]}
            uploads.append({name: trained[name] for name in self.names})
        self.server = self.moved(self.server, self.mean(uploads, cohort))

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """The mixture with the newest M_G."""
        with torch.no_grad():
            return self.answer({**self.server, **self.private[c]}, x)

    def common(self, x: Tensor) -> Tensor:
        """M_G."""
        return self.logits(self.server, x)
