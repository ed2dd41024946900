"""Slow reference implementations: one client at a time, one position at a time, in float64.

They share with the package the random streams and the `nn.Module`, nothing else. A model is a
dictionary of tensors without a client axis; a mask is a bool tensor of a weight's shape.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl.core import rng
from personafl.core.types import Training
from personafl.data.federated import Federation, Split

Params = dict[str, Tensor]


# Data and random streams


def rows_of(federation: Federation, split: Split, client: int) -> Tensor:
    """The rows of the source that a client holds in a split."""
    ragged = federation.splits[split]
    return ragged.values[int(ragged.offsets[client]) : int(ragged.offsets[client + 1])]


def sampled(federation: Federation, training: Training, number: int) -> list[int]:
    """S_t: |S_t| = max(1, int(ratio * C)) clients without replacement."""
    size = max(1, int(training.join_ratio * federation.num_clients + 1e-9))
    drawn = rng.generator(training.seed, "cohort", number).choice(federation.num_clients, size, replace=False)
    return [int(c) for c in drawn]


def shuffled(rows: Tensor, training: Training, purpose: str, number: int, client: int, epoch: int) -> Tensor:
    """A client's rows in the order of one local epoch."""
    stream = rng.extend(rng.key(training.seed, purpose, number, torch.tensor([client])), epoch)
    return rows[rng.order(stream, torch.tensor([len(rows)]), len(rows))[0]]


def minibatches(order: Tensor, batch_size: int) -> list[Tensor]:
    """Consecutive runs of an order; the last one may be short."""
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


def rate(training: Training, number: int) -> float:
    """The learning rate of a round."""
    return training.lr * training.lr_decay**number


class Stream:
    """A client's minibatches of one session, turn after turn; every turn begins with the next whole epoch."""

    def __init__(self, rows: Tensor, training: Training, number: int, client: int, purpose: str = "batches") -> None:
        self.rows, self.training, self.key = rows, training, (purpose, number, client)
        self.epoch = 0  # of the session, the next one

    def turn(self, epochs: float | None = None, *, steps: int = 0) -> list[Tensor]:
        """So many epochs or steps, else those of the recipe; of a fraction of an epoch the nearest number of steps."""
        if epochs is None and not steps:
            steps, epochs = self.training.local_steps, self.training.local_epochs
        size = self.training.batch_size
        if not steps:
            assert epochs is not None
            steps = math.floor(epochs * math.ceil(len(self.rows) / size) + 0.5)
        out: list[Tensor] = []
        while len(out) < steps:
            purpose, number, client = self.key
            out += minibatches(shuffled(self.rows, self.training, purpose, number, client, self.epoch), size)
            self.epoch += 1
        return out[:steps]


def around_readjustment(stream: Stream) -> tuple[list[Tensor], list[Tensor]]:
    """A session cut before its last epoch, or before the last fifth of its steps."""
    training = stream.training
    if not training.local_steps:
        return stream.turn(training.local_epochs - 1), stream.turn(1)
    last = math.ceil(training.local_steps / 5)
    before = stream.turn(steps=training.local_steps - last) if training.local_steps > last else []
    return before, stream.turn(steps=last)


# One model


def initial(module: nn.Module) -> Params:
    """A module's own parameters, in float64."""
    return {name: p.detach().double().clone() for name, p in module.named_parameters()}


def running(module: nn.Module) -> Params:
    """A module's running statistics."""
    return {name: b for name, b in module.named_buffers() if name.rpartition(".")[2] in ("running_mean", "running_var")}


def copied(tensors: Params) -> Params:
    """The same numbers in tensors of their own, in float64."""
    return {name: t.detach().double().clone() for name, t in tensors.items()}


class Network:
    """An ordinary module whose parameters are set before each use."""

    def __init__(self, module: nn.Module) -> None:
        self.module = copy.deepcopy(module).double()

    def _load(self, params: Params) -> None:
        with torch.no_grad():
            for name, p in (*self.module.named_parameters(), *running(self.module).items()):
                p.copy_(params[name])

    def logits(self, params: Params, x: Tensor) -> Tensor:
        """Outputs in eval mode."""
        self._load(params)
        self.module.eval()
        with torch.no_grad():
            out: Tensor = self.module(x.double())
        return out

    def gradient(self, params: Params, x: Tensor, y: Tensor) -> Params:
        """The dense gradient of the mean cross-entropy of a minibatch; the module's running statistics move."""
        self._load(params)
        self.module.train()
        self.module.zero_grad()
        F.cross_entropy(self.module(x.double()), y).backward()
        return {name: p.grad.clone() for name, p in self.module.named_parameters() if p.grad is not None}


class Optimiser:
    """`torch.optim.SGD` or `Adam` behind `clip_grad_norm_`, written out: one model of one client in one session.

    Of a tensor under a mask only the positions in it exist. `acted` counts the steps that a setting changed.
    """

    def __init__(self, training: Training, acted: Counter[str] | None = None) -> None:
        self.adam = training.optimizer == "adam"
        self.momentum = 0.0 if self.adam else training.momentum
        self.decay, self.bound = training.weight_decay, training.grad_clip
        self.buffers: Params = {}
        self.steps = Counter[str]()  # of each tensor
        self.acted = Counter[str]() if acted is None else acted

    def step(self, params: Params, gradient: Params, lr: float, moves: dict[str, Tensor | None]) -> Params:
        """The named tensors move, within their masks where there is one; all else stays."""
        masks = {n: torch.ones_like(params[n], dtype=torch.bool) if m is None else m for n, m in moves.items()}
        g = {n: only(gradient[n], m) for n, m in masks.items()}
        if self.bound:
            # g <- g min(1, bound / (||g|| + 1e-6)), the norm over all that moves
            norm = math.sqrt(sum(float((t * t).sum()) for t in g.values()))
            scale = min(1.0, self.bound / (norm + 1e-6))
            self.acted["clip" if scale < 1 else "no clip"] += 1
            g = {n: scale * t for n, t in g.items()}
        out, decayed, carried = dict(params), False, False
        for n, mask in masks.items():
            if self.decay:  # g <- g + decay w
                decayed = decayed or bool(only(params[n], mask).any())
                g[n] = g[n] + self.decay * only(params[n], mask)
            if self.momentum:  # b <- momentum b + g, in the first step g
                old = self.buffers.get(n, torch.zeros_like(g[n]))
                carried = carried or bool(only(old, mask).any())
                self.buffers[n] = torch.where(mask, self.momentum * old + g[n], old)
                g[n] = only(self.buffers[n], mask)
            if self.adam:
                g[n] = only(self.adapted(n, g[n], mask), mask)
            out[n] = params[n] - lr * g[n]
        self.acted["weight decay"] += decayed
        self.acted["momentum"] += carried
        return out

    def adapted(self, name: str, g: Tensor, mask: Tensor) -> Tensor:
        """u <- b1 u + (1 - b1) g ; v <- b2 v + (1 - b2) g g ; u / (1 - b1^s) / (sqrt(v / (1 - b2^s)) + eps)."""
        self.steps[name] += 1
        moments = []
        for moment, decay, new in (("u", 0.9, g), ("v", 0.999, g * g)):
            old = self.buffers.get(f"{moment} {name}", torch.zeros_like(g))
            self.buffers[f"{moment} {name}"] = torch.where(mask, decay * old + (1 - decay) * new, old)
            moments.append(self.buffers[f"{moment} {name}"] / (1 - decay ** self.steps[name]))
        return moments[0] / (moments[1].sqrt() + 1e-8)


def weighted_mean(models: list[Params], sizes: list[int], names: list[str]) -> Params:
    """FedAvg mean: sum n_c w_c / sum n_c."""
    out: Params = {}
    for name in names:
        total = torch.zeros_like(models[0][name])
        for model, n in zip(models, sizes, strict=True):
            total = total + n * model[name]
        out[name] = total / sum(sizes)
    return out


# FedAvg


def fedavg(module: nn.Module, federation: Federation, training: Training) -> list[Params]:
    """The server's weights after each round of FedAvg."""
    network, server, history = Network(module), initial(module), []
    x, y = federation.source.x, federation.source.y
    for number in range(training.num_rounds):
        models, sizes = [], []
        for c in sampled(federation, training, number):
            rows, local, optimiser = rows_of(federation, "train", c), dict(server), Optimiser(training)
            for batch in Stream(rows, training, number, c).turn():
                gradient = network.gradient(local, x[batch], y[batch])
                local = optimiser.step(local, gradient, rate(training, number), dict.fromkeys(local))
            models.append(local)
            sizes.append(len(rows))
        server = weighted_mean(models, sizes, list(server))
        history.append(server)
    return history


# DM-PFL


@dataclass(frozen=True)
class Settings:
    """DM-PFL's settings, as far as the reference knows them."""

    sparsity: float = 0.5
    readjust_share: float = 0.01
    readjust_interval: int = 10
    readjust_when: Literal["before_last_epoch", "after_training"] = "before_last_epoch"
    iterations: int = 2
    reset_personal: bool = True
    vote_threshold: float = 0.3
    votes: Literal["counted", "weighted"] = "counted"
    uncovered: Literal["keep", "drop"] = "keep"
    readjust_head: bool = True
    personal_epochs: float | None = None
    personal_lr: float | None = None
    averaged: Literal["covered", "voted"] = "covered"


@dataclass
class Client:
    """w_c, zero outside m_c, and m_c."""

    weights: Params
    masks: Params


@dataclass(frozen=True)
class Phase:
    """Consecutive rounds `first` to `first + length - 1` of one kind."""

    kind: Literal["masks", "global", "personal"]
    first: int
    length: int


def phases(num_rounds: int, iterations: int) -> list[Phase]:
    """Each iteration: half Phase 1, a quarter 2a, a quarter 2b; boundaries are rounded cumulative shares."""
    iterations = max(1, min(iterations, num_rounds // 4))
    out: list[Phase] = []
    for i in range(iterations):
        edges = [round(num_rounds * (i + share) / iterations) for share in (0.0, 0.5, 0.75, 1.0)]
        out.append(Phase("masks", edges[0], edges[1] - edges[0]))
        out.append(Phase("global", edges[1], edges[2] - edges[1]))
        out.append(Phase("personal", edges[2], edges[3] - edges[2]))
    return out


def largest(values: Tensor, among: list[int], k: int) -> list[int]:
    """The k flat positions of largest value; of equal values the earlier position."""
    flat = values.flatten().tolist()
    return sorted(among, key=lambda i: (-flat[i], i))[:k]


def tied(values: Tensor, taken: list[int], left: list[int]) -> bool:
    """Whether a value among those taken also stands among those left."""
    flat = values.flatten().tolist()
    return not {flat[i] for i in taken}.isdisjoint(flat[i] for i in left)


def as_mask(positions: list[int], like: Tensor) -> Tensor:
    """A mask of these flat positions."""
    mask = torch.zeros(like.numel(), dtype=torch.bool)
    for i in positions:
        mask[i] = True
    return mask.view(like.shape)


def only(values: Tensor, mask: Tensor) -> Tensor:
    """The values in a mask, zero elsewhere."""
    return torch.where(mask, values, torch.zeros_like(values))


class DMPFL:
    """DM-PFL; `events` counts what happened, so that a test can see that it met every case."""

    def __init__(
        self, module: nn.Module, federation: Federation, training: Training, settings: Settings, budget: dict[str, int]
    ) -> None:
        """`budget` gives the number of active positions of every masked weight."""
        self.network, self.federation, self.training, self.settings = Network(module), federation, training, settings
        self.budget, self.events, self.acted = budget, Counter[str](), Counter[str]()
        self.x, self.y = federation.source.x, federation.source.y
        self.phases = phases(training.num_rounds, settings.iterations)
        self.w_g = initial(module)
        self.biases = [name for name in self.w_g if name not in budget]
        # m_g: the largest magnitudes of the initialisation; every client starts with m_c = m_g and the same weights.
        self.m_g: Params = {}
        for name, k in budget.items():
            size = self.w_g[name].numel()
            self.m_g[name] = as_mask(largest(self.w_g[name].abs(), list(range(size)), k), self.w_g[name])
        self.clients = [
            Client({n: only(self.w_g[n], m) for n, m in self.m_g.items()}, {n: m.clone() for n, m in self.m_g.items()})
            for _ in range(federation.num_clients)
        ]
        # Running statistics are the server's, or every client's own: one set for whatever it trains.
        self.statistics_stay = False
        self.statistics = copied(running(module))
        self.own_statistics = [dict(self.statistics) for _ in range(federation.num_clients)]

    # Models

    def statistics_of(self, c: int) -> Params:
        """The running statistics a client predicts and begins to train with."""
        return self.own_statistics[c] if self.statistics_stay else self.statistics

    def theta_g(self) -> Params:
        """theta_g = w_g * m_g, and the global biases."""
        return {n: only(w, self.m_g[n]) if n in self.m_g else w for n, w in self.w_g.items()}

    def theta_c(self, c: int) -> Params:
        """Eq. 4: w_g * (m_g AND m_c) + w_c * (m_c AND NOT m_g), and the global biases."""
        out, client = {n: self.w_g[n] for n in self.biases}, self.clients[c]
        for n, m_c in client.masks.items():
            m_g = self.m_g[n]
            out[n] = only(self.w_g[n], m_g & m_c) + only(client.weights[n], m_c & ~m_g)
        return out | self.statistics_of(c)

    # Rounds

    def phase_of(self, number: int) -> Phase:
        """The phase a round belongs to."""
        return next(p for p in self.phases if p.first <= number < p.first + p.length)

    def play(self, number: int) -> None:
        """One round."""
        phase = self.phase_of(number)
        if phase.kind == "masks":
            self.masks_round(number)
        elif phase.kind == "global":
            self.global_round(number)
        elif number == phase.first:
            for c in range(self.federation.num_clients):
                self.personal_phase(c, phase)

    def stream(self, c: int, number: int) -> Stream:
        """A client's minibatches of a session."""
        return Stream(rows_of(self.federation, "train", c), self.training, number, c)

    def steps(
        self, optimiser: Optimiser, batches: list[Tensor], theta: Params, lr: float, moves: dict[str, Tensor | None]
    ) -> Params:
        """A step on each of these minibatches; the forward pass moves the running statistics."""
        for batch in batches:
            gradient = self.network.gradient(theta, self.x[batch], self.y[batch])
            theta = optimiser.step(theta, gradient, lr, moves) | copied(running(self.network.module))
        return theta

    # Phase 1

    def masks_round(self, number: int) -> None:
        """Algorithm 1."""
        cohort = sampled(self.federation, self.training, number)
        readjust = number % self.settings.readjust_interval == 0
        uploads = [self.masks_client(c, number, readjust) for c in cohort]
        sizes = [len(rows_of(self.federation, "train", c)) for c in cohort]
        masks = [{n: m.clone() for n, m in self.clients[c].masks.items()} for c in cohort]
        self.w_g |= weighted_mean(uploads, sizes, self.biases)
        self.statistics = weighted_mean(uploads, sizes, list(self.statistics))
        for name in self.budget:
            self.aggregate(name, [u[name] for u in uploads], [m[name] for m in masks], sizes)

    def masks_client(self, c: int, number: int, readjust: bool) -> Params:
        """A client's part of Algorithm 1; returns what it uploads."""
        client, lr = self.clients[c], rate(self.training, number)
        # w_c takes w_g at (m_g AND m_c) and keeps its own weights elsewhere; the model is w_c * m_c: Eq. 4 again.
        theta, stream, optimiser = self.theta_c(c), self.stream(c, number), Optimiser(self.training, self.acted)
        late = self.settings.readjust_when == "after_training"
        before, after = around_readjustment(stream) if readjust and not late else (stream.turn(), [])
        theta = self.steps(optimiser, before, theta, lr, {**dict.fromkeys(self.biases), **client.masks})
        if readjust:
            theta = self.readjust(c, number, theta)
        theta = self.steps(optimiser, after, theta, lr, {**dict.fromkeys(self.biases), **client.masks})
        client.weights = {n: theta[n].clone() for n in self.budget}
        self.own_statistics[c] = {n: theta[n] for n in self.statistics}
        return theta

    def readjust(self, c: int, number: int, theta: Params) -> Params:
        """Prune the smallest weights, regrow where the gradient is largest; returns the model under the new mask."""
        alpha = self.settings.readjust_share / 2 * (1 + math.cos(math.pi * number / self.training.num_rounds))
        order = shuffled(rows_of(self.federation, "train", c), self.training, "probe", number, c, 0)
        batch = order[: self.training.batch_size]
        gradient = self.network.gradient(theta, self.x[batch], self.y[batch])
        out = dict(theta)
        last = list(self.budget)[-1]
        for name in self.budget:
            if name == last and not self.settings.readjust_head:
                continue
            old = self.clients[c].masks[name]
            active = [i for i, on in enumerate(old.flatten().tolist()) if on]
            k = math.ceil(alpha * len(active))
            kept = largest(theta[name].abs(), active, len(active) - k)  # of equal ones the earlier
            pruned = sorted(set(active) - set(kept))
            inactive = sorted(set(range(old.numel())) - set(kept))  # the just-pruned ones included
            grown = largest(gradient[name].abs(), inactive, k)
            self.events["ties in pruning"] += tied(theta[name].abs(), pruned, kept)
            self.events["ties in growing"] += tied(gradient[name].abs(), grown, sorted(set(inactive) - set(grown)))
            self.events["pruned and regrown at once"] += len(set(pruned) & set(grown))
            self.events["newly grown"] += len(set(grown) - set(active))
            new = as_mask(kept + grown, old)
            # Regrown at once: the weight stays. New: theta is zero outside the old mask, so it starts at zero.
            out[name] = only(theta[name], new)
            self.clients[c].masks[name] = new
        return out

    def aggregate(self, name: str, weights: list[Tensor], masks: list[Tensor], sizes: list[int]) -> None:
        """Eq. 5, then the server's mask from votes and magnitudes."""
        shape, w_g = self.w_g[name].shape, self.w_g[name].flatten().tolist()
        m_g = self.m_g[name].flatten().tolist()
        flat_w, flat_m = [w.flatten().tolist() for w in weights], [m.flatten().tolist() for m in masks]
        threshold = Fraction(str(self.settings.vote_threshold))
        eligible: list[int] = []
        for i in range(len(w_g)):
            having = [c for c in range(len(sizes)) if flat_m[c][i]]
            if self.settings.votes == "counted":
                votes = Fraction(len(having), len(sizes))
            else:
                votes = Fraction(sum(sizes[c] for c in having), sum(sizes))
            if having and (self.settings.averaged == "covered" or votes > threshold):
                w_g[i] = sum(sizes[c] * flat_w[c][i] for c in having) / sum(sizes[c] for c in having)
            if votes > threshold:
                eligible.append(i)
            elif votes > 0:
                self.events["too few votes"] += 1
                self.events["votes at the threshold"] += votes == threshold
            elif m_g[i]:
                self.events["uncovered in m_g"] += 1
                if self.settings.uncovered == "keep":
                    eligible.append(i)
        self.events["fewer than the budget"] += len(eligible) < self.budget[name]
        self.events["more than the budget"] += len(eligible) > self.budget[name]
        self.w_g[name] = torch.tensor(w_g, dtype=torch.float64).view(shape)
        chosen = largest(self.w_g[name].abs(), eligible, self.budget[name])
        self.events["ties in m_g"] += tied(self.w_g[name].abs(), chosen, sorted(set(eligible) - set(chosen)))
        self.m_g[name] = as_mask(chosen, self.w_g[name])

    # Phase 2

    def global_round(self, number: int) -> None:
        """Algorithm 2: FedAvg of theta_g within m_g; w_g outside m_g, w_c and all masks stay."""
        cohort = sampled(self.federation, self.training, number)
        models = []
        for c in cohort:
            theta, optimiser = self.theta_g() | self.statistics_of(c), Optimiser(self.training, self.acted)
            moves: dict[str, Tensor | None] = {**dict.fromkeys(self.biases), **self.m_g}
            theta = self.steps(optimiser, self.stream(c, number).turn(), theta, rate(self.training, number), moves)
            self.own_statistics[c] = {n: theta[n] for n in self.statistics}
            models.append(theta)
        sizes = [len(rows_of(self.federation, "train", c)) for c in cohort]
        self.statistics = weighted_mean(models, sizes, list(self.statistics))
        for name, mean in weighted_mean(models, sizes, list(self.w_g)).items():
            self.w_g[name] = torch.where(self.m_g[name], mean, self.w_g[name]) if name in self.m_g else mean

    def personal_phase(self, c: int, phase: Phase) -> None:
        """Algorithm 3: a client's whole share of the phase at once; only m_c AND NOT m_g moves."""
        client = self.clients[c]
        own: dict[str, Tensor | None] = {n: m & ~self.m_g[n] for n, m in client.masks.items()}
        theta = self.theta_c(c)
        if self.settings.reset_personal:  # line 3, literally: w_c <- w_g * (m_g AND m_c)
            theta |= {n: only(self.w_g[n], self.m_g[n] & m) for n, m in client.masks.items()}
        share = len(sampled(self.federation, self.training, 0)) / self.federation.num_clients  # of the rounds
        stream, optimiser, steps = (
            self.stream(c, phase.first),
            Optimiser(self.training, self.acted),
            self.training.local_steps,
        )
        total = (1 if steps else self.training.local_epochs) * share * phase.length  # epochs, or sessions of K steps
        if self.settings.personal_epochs is not None:
            total, steps = self.settings.personal_epochs, 0
        piece = 0
        while piece < total:
            lr, part = rate(self.training, phase.first + int(piece * phase.length / total)), min(1.0, total - piece)
            lr = self.settings.personal_lr or lr
            batches = stream.turn(steps=max(1, round(part * steps))) if steps else stream.turn(part)
            theta = self.steps(optimiser, batches, theta, lr, own)
            piece += 1
        self.events["fractional epochs"] += total != int(total)
        client.weights = {n: theta[n].clone() for n in self.budget}
        self.own_statistics[c] = {n: theta[n] for n in self.statistics}  # what is not sent counts for this client alone


# DM-PFL+


def entropy(logits: list[float]) -> float:
    """Shannon entropy of the softmax, in nats."""
    top = max(logits)
    exponentials = [math.exp(z - top) for z in logits]
    return -sum(e / sum(exponentials) * math.log(e / sum(exponentials)) for e in exponentials)


def cosine(a: list[float], b: list[float]) -> float:
    """The cosine of two vectors."""
    dot = sum(p * q for p, q in zip(a, b, strict=True))
    return dot / math.sqrt(sum(p * p for p in a)) / math.sqrt(sum(q * q for q in b))


def base_entropy(network: Network, theta: Params, x: Tensor) -> float:
    """BE: the mean entropy of a model on unshifted inputs."""
    return sum(entropy(z) for z in network.logits(theta, x).tolist()) / len(x)


def chooses_own(z_c: list[float], z_g: list[float], be_c: float, be_g: float) -> bool:
    """Algorithm 4: whether theta_c, not theta_g, predicts this sample."""
    similarity = cosine(z_c, z_g)
    return entropy(z_c) - (1 - similarity) * be_c < entropy(z_g) - (1 - similarity) * be_g
