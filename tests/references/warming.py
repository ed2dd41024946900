"""FedPeWS and FedPeWS-Fixed: every client trains its own subnetwork while the run warms up."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from personafl.core import rng
from personafl.core.types import Training
from personafl.data.federated import Federation
from tests.reference import Optimiser, Params
from tests.references.base import Reference

Units = list[Tensor]
"""One number per hidden unit (or channel), layer by layer."""


class Warming(Reference):
    """Masked networks, their aggregation, and the rounds after the warm-up; `events` counts what happened."""

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        warmup_share: float,
        proximal_weight: float,
        weights: Literal["examples", "uniform"],
    ) -> None:
        """The base method is FedProx where `proximal_weight` is positive, else FedAvg; `weights` are those of both."""
        super().__init__(module, federation, training)
        self.proximal_weight, self.weights = proximal_weight, weights
        self.warmup = round(warmup_share * training.num_rounds)  # W
        self.server, self.events = dict(self.initial), Counter[str]()  # x_g
        # Layers in the order of the forward pass; all but the last have hidden units.
        self.layers = [n for n, m in module.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        self.units = [len(self.initial[layer + ".bias"]) for layer in self.layers[:-1]]

    # Masks

    def parameter_masks(self, mu: Units) -> Params:
        """Weight from unit i to unit o: mu_l[o] mu_{l-1}[i]; bias of o: mu_l[o]; factor 1 at inputs and outputs."""
        out: Params = {}
        for at, layer in enumerate(self.layers):
            weight = self.initial[layer + ".weight"]
            outgoing = mu[at] if at < len(mu) else torch.ones(len(weight), dtype=torch.float64)
            incoming = torch.ones(weight.shape[1], dtype=torch.float64)
            if at > 0:  # after flattening, a channel covers its consecutive positions
                incoming = mu[at - 1].repeat_interleave(weight.shape[1] // len(mu[at - 1]))
            mask = outgoing[:, None] * incoming[None, :]
            while mask.dim() < weight.dim():
                mask = mask.unsqueeze(-1)
            out[layer + ".weight"] = mask.expand(weight.shape)
            out[layer + ".bias"] = outgoing
        return out

    def masked_activations(self, params: Params, mu: Units, x: Tensor) -> Tensor:
        """Logits where what layer l + 1 receives of unit o of layer l is multiplied by mu_l[o]."""
        hooks = []
        for at, layer in enumerate(self.layers[1:]):

            def multiply(_: nn.Module, inputs: tuple[Tensor, ...], mu_l: Tensor = mu[at]) -> Tensor:
                received = inputs[0]
                factor = mu_l.repeat_interleave(received.shape[1] // len(mu_l))
                return received * factor.view(1, -1, *[1] * (received.dim() - 2))

            hooks.append(self.network.module.get_submodule(layer).register_forward_pre_hook(multiply))
        logits: Tensor = functional_call(self.network.module, params, (x.double(),))
        for hook in hooks:
            hook.remove()
        return logits

    def masked_loss(self, params: Params, mu: Units, rows: Tensor) -> Tensor:
        """f(x * G(s)) as the weights see it."""
        return F.cross_entropy(self.masked_activations(params, mu, self.x[rows]), self.y[rows])

    # Rounds

    def proximal(self, params: Params, masks: Params | None = None) -> Tensor:
        """mu/2 ||x - x_g||^2, in the warm-up over the subnetwork's parameters."""
        total = torch.zeros((), dtype=torch.float64)
        for name in self.names:
            square = (params[name] - self.server[name]) ** 2
            total = total + (square if masks is None else square * masks[name]).sum()
        return self.proximal_weight / 2 * total

    def weight_step(self, optimiser: Optimiser, params: Params, mu: Units, rows: Tensor, number: int) -> Params:
        """Procedure II: a step on f(x * G(s)), and the base's term, over x."""

        def loss(x: Params, rows: Tensor) -> Tensor:
            return self.masked_loss(x, mu, rows) + self.proximal(x, self.parameter_masks(mu))

        return self.step(optimiser, params, self.gradient(loss, params, rows), self.lr(number))

    def warm_session(self, i: int, number: int) -> tuple[Params, Units]:
        """A client's part of a warm-up round: its x_i and m_i."""
        raise NotImplementedError

    def play(self, number: int) -> None:
        """One round."""
        cohort = self.cohort(number)
        if number >= self.warmup:

            def loss(x: Params, rows: Tensor) -> Tensor:
                return self.cross_entropy(x, rows) + self.proximal(x)

            models = [self.train(i, number, self.server, loss=loss) for i in cohort]
            self.server = self.moved(self.server, self.mean(models, cohort))
            self.events["rounds after the warm-up"] += 1
            return
        uploads = [self.warm_session(i, number) for i in cohort]
        over, under = [{n: torch.zeros_like(w) for n, w in self.server.items()} for _ in range(2)]
        for share, (x_i, mu) in zip(self.shares(cohort), uploads, strict=True):
            m_i = self.parameter_masks(mu)
            for name in self.names:
                over[name] = over[name] + share * x_i[name] * m_i[name]
                under[name] = under[name] + share * m_i[name]
        # x_g <- x_g - eta_g (x_g - sum x_i m_i / sum m_i); x_g stays where sum m_i = 0.
        new: Params = {}
        for name, old in self.server.items():
            covered = under[name] > 0
            self.events["covered by none"] += int((~covered).sum())
            mean = over[name] / torch.where(covered, under[name], torch.ones_like(old))
            new[name] = torch.where(covered, old - self.training.server_lr * (old - mean), old)
        self.server = new

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """x_g."""
        return self.common(x)

    def common(self, x: Tensor) -> Tensor:
        """x_g."""
        return self.logits(self.server, x)


class FedPeWS(Warming):
    """FedPeWS: the subnetworks are drawn from scores that are trained too."""

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        warmup_share: float = 0.2,
        diversity_weight: float = 2.0,
        score_lr: float = 0.1,
        score_init: float = 0.0,
        ste: Literal["activation", "parameter"] = "parameter",
        proximal_weight: float = 0.0,
        weights: Literal["examples", "uniform"] = "uniform",
    ) -> None:
        super().__init__(
            module,
            federation,
            training,
            warmup_share=warmup_share,
            proximal_weight=proximal_weight,
            weights=weights,
        )
        self.diversity_weight, self.score_lr, self.ste = diversity_weight, score_lr, ste
        start = [torch.full((units,), score_init, dtype=torch.float64) for units in self.units]
        self.scores = [[s.clone() for s in start] for _ in self.clients]  # s_i
        self.sent = [[s.sigmoid() for s in start] for _ in self.clients]  # sigma(s_i) as last sent

    def draw(self, keys: Tensor, scores: Units) -> Units:
        """G(s): unit o of layer l is on with probability sigma(s_l[o])."""
        out = []
        for at, s in enumerate(scores):
            stream = rng.extend(rng.extend(keys, "units"), at)
            u = rng.uniform(stream, len(s))[0]
            out.append((u < s.sigmoid()).double())
            self.events["draws that the scores decided"] += int(((u < 0.5) != (u < s.sigmoid())).sum())
        return out

    def others(self, i: int) -> Units:
        """theta_{g without i} = (N theta_g - sigma(s_i)) / (N - 1), theta_g the mean of what all clients last sent."""
        n, out = len(self.sent), []
        for at in range(len(self.units)):
            theta_g = sum((sent[at] for sent in self.sent), torch.zeros_like(self.sent[i][at])) / n
            out.append((n * theta_g - self.sent[i][at]) / (n - 1))
        return out

    def score_gradient(self, params: Params, scores: Units, mu: Units, others: Units, rows: Tensor) -> Units:
        """The straight-through gradient of f(x * G(s)) - lambda ||sigma(s) - theta_{g without i}||^2 over s."""
        leaves = [s.clone().requires_grad_() for s in scores]
        sigma = [s.sigmoid() for s in leaves]
        # forward the sample, backward as the identity to sigma(s)
        through = [m + (p - p.detach()) for m, p in zip(mu, sigma, strict=True)]
        if self.ste == "activation":
            loss = self.masked_loss(params, through, rows)
        else:
            masks = self.parameter_masks(through)
            loss = self.cross_entropy({name: params[name] * masks[name] for name in self.names}, rows)
        for p, theta in zip(sigma, others, strict=True):
            loss = loss - self.diversity_weight * ((p - theta) ** 2).sum()
        return list(torch.autograd.grad(loss, leaves))

    def play(self, number: int) -> None:
        """One round; theta_g stays as it is within it."""
        super().play(number)
        if number < self.warmup:
            for i in self.cohort(number):
                self.sent[i] = [s.sigmoid() for s in self.scores[i]]

    def warm_session(self, i: int, number: int) -> tuple[Params, Units]:
        """Each minibatch twice: Procedure I moves s, Procedure II moves x; then m_i is drawn once more."""
        x, s, others = dict(self.server), self.scores[i], self.others(i)
        client, optimiser = torch.tensor([i]), self.optimiser()
        for seen, rows in enumerate(self.stream(i, number).turn()):
            keys = rng.extend(rng.key(self.training.seed, "noise", number, client), seen)
            found = self.score_gradient(x, s, self.draw(keys, s), others, rows)
            s = [old - self.score_lr * g for old, g in zip(s, found, strict=True)]
            fresh = rng.extend(rng.extend(keys, "then"), 1)
            x = self.weight_step(optimiser, x, self.draw(fresh, s), rows, number)
        self.scores[i] = s
        return x, self.draw(rng.key(self.training.seed, "draws", number, client), s)


class FedPeWSFixed(Warming):
    """FedPeWS-Fixed: client i has group i of every hidden layer's units throughout the warm-up."""

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        warmup_share: float = 0.2,
        shares: tuple[float, ...] = (),
        proximal_weight: float = 0.0,
        weights: Literal["examples", "uniform"] = "uniform",
    ) -> None:
        super().__init__(
            module,
            federation,
            training,
            warmup_share=warmup_share,
            proximal_weight=proximal_weight,
            weights=weights,
        )
        n = federation.num_clients
        self.ends = [sum(shares[:i]) if shares else i / n for i in range(n + 1)]

    def group(self, i: int) -> Units:
        """Contiguous disjoint groups that cover a layer."""
        out = []
        for units in self.units:
            first, last = [(round(units * a), round(units * b)) for a, b in pairwise(self.ends)][i]
            out.append(torch.tensor([float(first <= o < last) for o in range(units)], dtype=torch.float64))
        return out

    def warm_session(self, i: int, number: int) -> tuple[Params, Units]:
        """Procedure II alone, under the client's fixed mask."""
        x, mu, optimiser = dict(self.server), self.group(i), self.optimiser()
        for rows in self.stream(i, number).turn():
            x = self.weight_step(optimiser, x, mu, rows, number)
        return x, mu
