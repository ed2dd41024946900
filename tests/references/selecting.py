"""Methods that choose what to train or whom to learn from: FedDST, FedSelect, FedPAC."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl.core.types import Layer, Training
from personafl.data.federated import Federation
from personafl.sparse.allocation import RULES
from tests.reference import Params, around_readjustment, as_mask, largest, only, tied
from tests.references.base import HEAD, Reference


def positions(mask: Tensor) -> list[int]:
    """The flat positions of a mask."""
    return [i for i, on in enumerate(mask.flatten().tolist()) if on]


class FedDST(Reference):
    """One sparse global model whose mask the clients readjust."""

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        sparsity: float = 0.5,
        readjust_share: float = 0.01,
        readjust_interval: int = 10,
        allocation: str = "feddst_first_dense",
    ) -> None:
        super().__init__(module, federation, training)
        self.share, self.interval, self.events = readjust_share, readjust_interval, Counter[str]()
        layers = []
        for name, w in self.initial.items():
            if w.dim() > 1:
                bias = name.replace("weight", "bias")
                layers.append(Layer(name, bias if bias in self.initial else None, tuple(w.shape), macs=0, outputs=0))
        self.budget = RULES[allocation](layers, sparsity)
        self.biases = [n for n in self.names if n not in self.budget]
        # The largest magnitudes of the initialisation are active; w is zero elsewhere.
        self.w, self.m = dict(self.initial), {}
        for n, k in self.budget.items():
            everywhere = list(range(self.w[n].numel()))
            self.m[n] = as_mask(largest(self.w[n].abs(), everywhere, k), self.w[n])
            self.w[n] = only(self.w[n], self.m[n])

    def annealed(self, number: int) -> float:
        """a_t = a/2 (1 + cos(pi t / t_end)), t_end = T/2; from t_end on nothing is readjusted."""
        t_end = self.training.num_rounds / 2
        if number % self.interval or number >= t_end:
            return 0.0
        return self.share / 2 * (1 + math.cos(math.pi * number / t_end))

    def play(self, number: int) -> None:
        """Masked SGD from w * m, then the server's weights and mask."""
        cohort, models, masks = self.cohort(number), [], []
        for c in cohort:
            theta, m_c = self.local(c, number)
            models.append(theta)
            masks.append(m_c)
        self.w |= self.mean(models, cohort, self.biases)
        for n in self.budget:
            self.aggregate(n, [theta[n] for theta in models], [m_c[n] for m_c in masks], self.shares(cohort))

    def local(self, c: int, number: int) -> tuple[Params, Params]:
        """E epochs within the mask, which may be readjusted before the last one."""
        theta, m_c, stream, optimiser = dict(self.w), dict(self.m), self.stream(c, number), self.optimiser()
        due = self.annealed(number) > 0
        before, after = around_readjustment(stream) if due else (stream.turn(), [])
        for place, rows in enumerate([*before, *after]):
            if due and place == len(before):
                theta, m_c = self.readjusted(c, number, theta, m_c)
            gradient = self.gradient(self.cross_entropy, theta, rows)
            theta = optimiser.step(theta, gradient, self.lr(number), {**dict.fromkeys(self.biases), **m_c})
        return theta, m_c

    def readjusted(self, c: int, number: int, theta: Params, m_c: Params) -> tuple[Params, Params]:
        """Per layer: prune the k smallest weights, grow the k largest gradients among what was inactive before."""
        gradient = self.gradient(self.cross_entropy, theta, self.batches(c, number, 0, "probe")[0])
        theta, m_c = dict(theta), dict(m_c)
        for n in self.budget:
            active, inactive = positions(m_c[n]), positions(~m_c[n])
            k = min(math.ceil(self.annealed(number) * len(active)), len(inactive))
            kept = largest(theta[n].abs(), active, len(active) - k)
            self.events["ties in pruning"] += tied(theta[n].abs(), sorted(set(active) - set(kept)), kept)
            grown = largest(gradient[n].abs(), inactive, k)
            m_c[n] = as_mask(kept + grown, theta[n])
            theta[n] = only(theta[n], m_c[n])  # theta is zero where it was inactive: the grown start at 0
            self.events["grown"] += k
            self.events["ties in growing"] += tied(gradient[n].abs(), grown, sorted(set(inactive) - set(grown)))
        return theta, m_c

    def aggregate(self, name: str, weights: list[Tensor], masks: list[Tensor], sizes: list[int]) -> None:
        """w = sum n_c w_c m_c / sum n_c m_c at positions with votes, then the largest magnitudes of them."""
        flat_w, flat_m = [w.flatten().tolist() for w in weights], [m.flatten().tolist() for m in masks]
        voted, values = [], [0.0] * self.w[name].numel()
        for i in range(len(values)):
            having = [c for c in range(len(sizes)) if flat_m[c][i]]
            if having:
                values[i] = sum(sizes[c] * flat_w[c][i] for c in having) / sum(sizes[c] for c in having)
                voted.append(i)
        w = torch.tensor(values, dtype=torch.float64).view(self.w[name].shape)
        kept = largest(w.abs(), voted, self.budget[name])
        self.events["voted but pruned"] += len(voted) - len(kept)
        self.events["ties in m"] += tied(w.abs(), kept, sorted(set(voted) - set(kept)))
        self.events["mask moved"] += int((as_mask(kept, w) != self.m[name]).sum())
        self.m[name] = as_mask(kept, w)
        self.w[name] = only(w, self.m[name])

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """The sparse global model."""
        return self.logits(self.w, x)

    def common(self, x: Tensor) -> Tensor | None:
        """The sparse global model."""
        return self.logits(self.w, x)


class FedSelect(Reference):
    """Weights that move much become personal, for good."""

    weights = "uniform"

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        select_share: float = 0.25,
        personal_bound: float = 0.8,
        select_interval: int = 3,
    ) -> None:
        super().__init__(module, federation, training)
        self.share, self.bound, self.interval = select_share, personal_bound, select_interval
        self.events = Counter[str]()
        self.w = dict(self.initial)
        self.masks = [{n: torch.zeros_like(w, dtype=torch.bool) for n, w in self.w.items()} for _ in self.clients]
        self.snapshots = [dict(self.initial) for _ in self.clients]
        self.own: dict[int, Params] = {}  # models after a client's last session

    def play(self, number: int) -> None:
        """Sessions under the masks as they are; new masks count from the next round on."""
        cohort, models, masks = self.cohort(number), [], []
        for c in cohort:
            masks.append(dict(self.masks[c]))
            self.own[c] = self.local(c, number)
            models.append(self.own[c])
            if number % self.interval == 0 and number != 0:
                self.select(c)
        if number < self.training.num_rounds - 1:  # the last round is not aggregated
            for n in self.names:
                self.aggregate(n, [model[n] for model in models], [m_c[n] for m_c in masks])

    def local(self, c: int, number: int) -> Params:
        """LocalAlt: E times one epoch on the personal positions, then one on the others; of K steps, K on each once."""
        m_c, model = self.masks[c], dict(self.w)
        if c in self.own:
            model = {n: torch.where(m_c[n], self.own[c][n], self.w[n]) for n in self.names}
        length, times = (None, 1) if self.training.local_steps else (1.0, self.training.local_epochs)
        sides = [(self.stream(c, number, "personal"), m_c, self.optimiser())]
        sides.append((self.stream(c, number), {n: ~m for n, m in m_c.items()}, self.optimiser()))
        for _ in range(times):
            for stream, moves, optimiser in sides:
                for rows in stream.turn(length):
                    gradient = self.gradient(self.cross_entropy, model, rows)
                    model = optimiser.step(model, gradient, self.lr(number), {n: moves[n] for n in self.names})
        return model

    def select(self, c: int) -> None:
        """The weights that moved most since the last selection join the mask, tensor by tensor."""
        for n in self.names:
            if "weight" not in n.rsplit(".")[-1]:
                continue
            personal, rest = positions(self.masks[c][n]), positions(~self.masks[c][n])
            if len(personal) / (len(personal) + len(rest)) > self.bound:
                self.events["at the bound"] += 1
                continue
            change = (self.own[c][n] - self.snapshots[c][n]).abs()
            joining = largest(change, rest, math.ceil(self.share * len(rest)))
            self.events["joined"] += len(joining)
            self.events["ties in joining"] += tied(change, joining, sorted(set(rest) - set(joining)))
            self.masks[c][n] = as_mask(personal + joining, change)
        self.snapshots[c] = self.own[c]

    def aggregate(self, name: str, weights: list[Tensor], masks: list[Tensor]) -> None:
        """w[i] = mean over the sampled clients with m[i] = 0, the old value where there is none."""
        flat_w, flat_m = [w.flatten().tolist() for w in weights], [m.flatten().tolist() for m in masks]
        values = self.w[name].flatten().tolist()
        for i in range(len(values)):
            sharing = [flat_w[c][i] for c in range(len(weights)) if not flat_m[c][i]]
            if sharing:
                values[i] = sum(sharing) / len(sharing)
            self.events["shared by some"] += 0 < len(sharing) < len(weights)
            self.events["shared by none"] += not sharing
        self.w[name] = torch.tensor(values, dtype=torch.float64).view(self.w[name].shape)

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """The client's model after its last session, the global one if it had none."""
        return self.logits(self.own.get(c, self.w), x)

    def common(self, x: Tensor) -> Tensor | None:
        """The global model."""
        return self.logits(self.w, x)


class FedPAC(Reference):
    """Features aligned to global class prototypes; heads combined from clients with similar data."""

    def __init__(
        self,
        module: nn.Module,
        federation: Federation,
        training: Training,
        *,
        alignment_weight: float = 1.0,
        head_epochs: int = 1,
        head_lr: float | None = 0.1,
    ) -> None:
        super().__init__(module, federation, training)
        self.alignment_weight, self.head_epochs, self.head_lr = alignment_weight, head_epochs, head_lr
        self.events = Counter[str]()
        self.server = {n: self.initial[n] for n in self.body}
        self.heads = [{n: self.initial[n] for n in HEAD} for _ in self.clients]
        self.prototypes: dict[int, Tensor] = {}  # of the classes that some client has sent

    def by_class(self, c: int, model: Params) -> dict[int, Tensor]:
        """The features of a client's training rows, class by class."""
        rows, f = self.rows(c), self.features(model, self.x[self.rows(c)])
        found: dict[int, list[Tensor]] = {}
        for i, k in enumerate(self.y[rows].tolist()):
            found.setdefault(k, []).append(f[i])
        return {k: torch.stack(features) for k, features in found.items()}

    def play(self, number: int) -> None:
        """Statistics, head, body, prototypes of every client; then body, prototypes and heads at the server."""
        cohort, models, vs, hs, sent = self.cohort(number), [], [], [], []
        for c in cohort:
            model = {**self.server, **self.heads[c]}
            own = self.by_class(c, model)
            v, h = self.statistics(own, len(self.rows(c)))
            vs.append(v)
            hs.append(h)
            means = {k: f.mean(0) for k, f in own.items()}
            models.append(self.local(c, number, model, means))
            sent.append(self.by_class(c, models[-1]))
        self.server = self.moved(self.server, self.mean(models, cohort, self.body))
        for k in range(self.federation.source.classes):
            # count * local mean = the sum of the features
            having = [own[k] for own in sent if k in own]
            if having:
                self.prototypes[k] = torch.cat(having).sum(0) / sum(len(f) for f in having)
        for i, c in enumerate(cohort):
            a = combination(self.dissimilarity(i, vs, hs))
            self.events["heads combined"] += sum(share > 0 for share in a) > 1
            self.events["heads left out"] += sum(share == 0 for share in a)
            self.heads[c] = {n: sum_of([a[j] * models[j][n] for j in range(len(cohort))]) for n in HEAD}

    def statistics(self, own: dict[int, Tensor], size: int) -> tuple[float, dict[int, Tensor]]:
        """V = (1/n) [ sum_k p_k mean||f||^2_k - sum_k p_k^2 ||mu_k||^2 ] and h_k = p_k mu_k."""
        v, h = 0.0, {}
        for k, f in own.items():
            p, mu = len(f) / size, f.mean(0)
            v += p * float((f**2).sum(1).mean()) - p**2 * float((mu**2).sum())
            h[k] = p * mu
        return v / size, h

    def local(self, c: int, number: int, model: Params, means: dict[int, Tensor]) -> Params:
        """The head with its own rate, then the body on F + lambda MSE(f, prototype of the class)."""

        def loss(params: Params, rows: Tensor) -> Tensor:
            f, logits = self.forward(params, self.x[rows])
            wanted = []
            for k in self.y[rows].tolist():
                self.events["no global prototype"] += k not in self.prototypes
                wanted.append(self.prototypes.get(k, means[k]))
            distance = ((f - torch.stack(wanted)) ** 2).mean()
            return F.cross_entropy(logits, self.y[rows]) + self.alignment_weight * distance

        stream = self.stream(c, number)
        model = self.train(c, number, model, moving=HEAD, batches=stream.turn(self.head_epochs), lr=self.head_lr)
        aligned = loss if number > 0 else None
        return self.train(c, number, model, loss=aligned, moving=self.body, batches=stream.turn())

    def dissimilarity(self, i: int, vs: list[float], hs: list[dict[int, Tensor]]) -> Tensor:
        """P_jl = delta_jl V_j + sum_k <h_i,k - h_j,k , h_i,k - h_l,k>."""
        nothing = torch.zeros_like(next(iter(hs[0].values())))
        p = torch.zeros(len(vs), len(vs), dtype=torch.float64)
        for j in range(len(vs)):
            for l in range(len(vs)):  # noqa: E741
                p[j, l] = vs[j] if j == l else 0.0
                for k in range(self.federation.source.classes):
                    h_i, h_j, h_l = (hs[c].get(k, nothing) for c in (i, j, l))
                    p[j, l] += ((h_i - h_j) * (h_i - h_l)).sum()
        return p

    def evaluated(self, c: int, x: Tensor) -> Tensor:
        """The newest body and the client's own head."""
        return self.logits({**self.server, **self.heads[c]}, x)

    def common(self, x: Tensor) -> Tensor | None:
        """The server has no head."""
        return None


def sum_of(tensors: list[Tensor]) -> Tensor:
    """The sum of some tensors."""
    total = torch.zeros_like(tensors[0])
    for tensor in tensors:
        total = total + tensor
    return total


def combination(p: Tensor) -> list[float]:
    """argmin a^T P a on the simplex, found by trying every support; shares below 0.001 are dropped."""
    p = (p + p.T) / 2
    values, vectors = torch.linalg.eigh(p)
    if float(values.min()) < -1e-12:  # by more than rounding
        kept = values >= 0.01
        p = vectors[:, kept] @ torch.diag(values[kept]) @ vectors[:, kept].T
    size, best, least = len(p), [0.0] * len(p), math.inf
    for count in range(1, size + 1):
        for support in map(list, combinations(range(size), count)):
            # The minimum of a^T P a under sum a = 1, all within the support: 2 P a + nu = 0, sum a = 1.
            system = torch.ones(count + 1, count + 1, dtype=torch.float64)
            system[:count, :count] = 2 * p[support][:, support]
            system[count, count] = 0
            right = torch.zeros(count + 1, dtype=torch.float64)
            right[count] = 1
            if torch.linalg.matrix_rank(system) <= count:
                continue  # no single minimum; a smaller support has one as good
            inside = torch.linalg.solve(system, right)[:count]
            a = torch.zeros(size, dtype=torch.float64)
            a[support] = inside
            if bool((inside >= 0).all()) and float(a @ p @ a) < least:
                best, least = a.tolist(), float(a @ p @ a)
    best = [share if share >= 1e-3 else 0.0 for share in best]
    return [share / sum(best) for share in best]
