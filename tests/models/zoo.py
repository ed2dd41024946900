"""Small modules as users write them, one line each in `ZOO`; `test_zoo.py` trains every one of them.

A module is a class or function above the table where it needs more than a line, else a lambda within the line. Examples
are vectors of 6 numbers, 2 x 8 x 8 images, signals of 2 channels, series of 5 steps, 4 x 4 x 4 volumes or 6 words;
targets are 3 classes unless the line says otherwise.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from personafl.core.types import TaskName

CLASSES, VOCABULARY = 3, 11


@dataclass(frozen=True)
class Inputs:
    """The shape of one example, of whole numbers up to `VOCABULARY` where they are words, and what is learnt."""

    shape: tuple[int, ...]
    words: bool = False
    task: TaskName = "classification"


VECTOR, IMAGE, SIGNAL, SERIES = Inputs((6,)), Inputs((2, 8, 8)), Inputs((2, 12)), Inputs((5, 4))
VOLUME, WORDS, TAGS = Inputs((1, 4, 4, 4)), Inputs((6,), words=True), Inputs((6,), words=True, task="sequence")
NUMBER, LABELS = Inputs((6,), task="regression"), Inputs((6,), task="multilabel")


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    Args:
        name: what the module shows; unique.
        make: makes the module.
        inputs: the examples it takes.
        quick: it is among the few that run in the README's tests.
        random: it draws random numbers in training, which a plain PyTorch loop cannot repeat; stacks of several clients
            are compared with stacks of one instead.
        pairs: no minibatch may have a single row, because the module alone makes nothing of one (batch norms).
        refused: the error message it is refused with, as a regular expression, whatever the case of its letters.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Inputs
    quick: bool = False
    random: bool = False
    pairs: bool = False
    refused: str = ""


class Own(nn.Module):
    """Layers, parameters and settings by name, and a forward in one line: a function of the module and its input."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def head(width):
    return nn.Linear(width, CLASSES)


def weight(*shape):
    return nn.Parameter(torch.randn(*shape) / math.sqrt(shape[-1]))


def around(*layers):
    """A linear layer, these, and another one."""
    return nn.Sequential(nn.Linear(6, 8), *layers, head(8))


def pooled(*layers, width=4):
    """These layers over images, the mean over all places, and a linear layer."""
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head(width))


# Dense layers


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 8), nn.Linear(8, 7), head(7)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


class Listed(nn.Module):
    def __init__(self, widths=(6, 8, 7, 5)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.out = head(widths[-1])

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x).relu() if i % 2 else layer(x).tanh()
        return self.out(x)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"in": nn.Linear(6, 8), "act": nn.GELU(), "out": head(8)})

    def forward(self, x):
        for part in self.parts.values():
            x = part(x)
        return x


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width, norm=nn.Identity):
        super().__init__()
        self.norm, self.up, self.down = norm(width), nn.Linear(width, 9), nn.Linear(9, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Highway(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.change, self.out = nn.Linear(6, 6), nn.Linear(6, 6), head(6)
        nn.init.constant_(self.gate.bias, -1.0)

    def forward(self, x):
        for _ in range(2):
            t = torch.sigmoid(self.gate(x))
            x = t * torch.relu(self.change(x)) + (1 - t) * x
        return self.out(x)


class TiedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.bias, self.out = nn.Linear(6, 4), nn.Parameter(torch.zeros(6)), head(6)

    def forward(self, x):
        code = torch.tanh(self.encoder(x))
        return self.out(x - F.linear(code, self.encoder.weight.t(), self.bias))


def tied_layers():
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), head(6))
    module[2].weight = module[0].weight
    return module


class FactorizationMachine(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.factors = head(6), weight(6, 4, CLASSES)

    def forward(self, x):
        total = torch.einsum("bi,ifk->bfk", x, self.factors)
        squares = torch.einsum("bi,ifk->bfk", x**2, self.factors**2)
        return self.linear(x) + 0.5 * (total**2 - squares).sum(1)


class Cross(nn.Module):
    """Deep & cross layers: x0 * (W x) + b + x."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([weight(6, 6) for _ in range(2)])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(6)) for _ in range(2)])
        self.out = head(6)

    def forward(self, x):
        first = x
        for w, b in zip(self.weights, self.biases, strict=True):
            x = first * (x @ w + b) + x
        return self.out(x)


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterDict({"left": weight(8, 6), "right": weight(CLASSES, 8)})

    def forward(self, x):
        return F.linear(F.linear(x, self.weights["left"]).relu(), self.weights["right"])


class Frozen(nn.Module):
    """A pretrained body that is not tuned."""

    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), head(8)
        for p in self.body.parameters():
            p.requires_grad = False

    def forward(self, x):
        return self.out(self.body(x))


class BodyWithoutGradient(nn.Module):
    """A body that is not tuned, though its weights ask for a gradient."""

    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), head(8)

    def forward(self, x):
        with torch.no_grad():
            h = self.body(x)
        return self.out(h)


class Lora(nn.Module):
    """A frozen layer and a low-rank update of it."""

    def __init__(self):
        super().__init__()
        self.base, self.out = nn.Linear(6, 8).requires_grad_(False), head(8)
        self.down, self.up = weight(2, 6), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x):
        return self.out(torch.tanh(self.base(x) + x @ self.down.T @ self.up.T))


class Cut(torch.autograd.Function):
    """Numbers as they are, with no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


class Sign(torch.autograd.Function):
    """The sign, with the gradient of the identity: a straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return torch.sign(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


def output_hook(m, x):
    """Only the first class learns."""
    out = m.fc(x)
    if out.requires_grad:
        out.register_hook(lambda g: g * torch.tensor([1.0, 0.0, 0.0], dtype=g.dtype))
    return out


def hidden_hook(m, x):
    h = torch.relu(m.a(x))
    if h.requires_grad:
        h.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return m.b(h)


def clipped_gradient(m, x):
    """What goes back mixes the rows of a minibatch."""
    h = torch.relu(m.a(x))
    if h.requires_grad:
        h.register_hook(lambda g: g / (1 + g.norm()))
    return m.b(h)


def hooked(register, hook, layer=0):
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), head(8))
    getattr(module[layer], register)(hook)
    return module


def doubled(module):
    module.register_full_backward_pre_hook(lambda m, g: (g[0] * 2,))
    return module


def after(module, hook):
    module.register_forward_hook(hook)
    return module


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU()), head(8)

    def forward(self, x):
        return self.out(checkpoint(self.body, x, use_reentrant=False))


def inplace(m, x):
    h = m.a(x)
    h += m.b(x)
    h[:, :2] *= 2
    return m.o(h.relu_())


def rearranged(m, x):
    h = m.a(x).view(-1, 4, 2).transpose(1, 2).permute(0, 2, 1).flip(1).reshape(len(x), 8)
    return m.o(h.roll(1, dims=1).unsqueeze(1).squeeze(1))


class Maxout(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(6, 12), head(4)

    def forward(self, x):
        return self.out(self.fc(x).view(x.size(0), 4, 3).max(dim=2).values)


class MaskedLinear(nn.Linear):
    """A linear layer that sees some of its inputs (MADE)."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("mask", torch.ones(outputs, inputs).tril())

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


class Twice(nn.Sequential):
    """A sequential with a forward of its own."""

    def forward(self, x):
        return super().forward(x) + super().forward(-x)


class Ensemble(nn.Module):
    """Batched heads: one product for all members."""

    def __init__(self, members=3):
        super().__init__()
        self.first, self.second = weight(members, 6, 5), weight(members, 5, CLASSES)

    def forward(self, x):
        h = torch.relu(torch.einsum("bi,mij->mbj", x, self.first))
        return torch.bmm(h, self.second).log_softmax(-1).logsumexp(0)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


def parametrized(wrap):
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), head(6))
    wrap(module[0])
    return module


class Gumbel(nn.Module):
    """Draws a category in training."""

    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(6, 5), head(5)

    def forward(self, x):
        return self.out(F.gumbel_softmax(self.fc(x), tau=0.7) if self.training else self.fc(x).softmax(-1))


# What depends on the rows of a minibatch


class GhostBatchNorm(nn.Module):
    """Batch norm over virtual batches."""

    def __init__(self, norm, virtual):
        super().__init__()
        self.norm, self.virtual = norm, virtual

    def forward(self, x):
        return torch.cat([self.norm(part) for part in x.split(self.virtual)])


class BatchStatistics(nn.Module):
    """Batch statistics by hand."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        x = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-2).sqrt()
        return x * self.scale + self.shift


def capacity(m, x):
    """Every expert takes as many rows as there is room for, the surest first (switch transformer)."""
    room = math.ceil(1.25 * len(x) / 2)
    gates = m.gate(x).softmax(-1)
    out = x.new_zeros(len(x), CLASSES)
    for i, expert in enumerate(m.experts):
        rows = gates[:, i].topk(room).indices
        out = out.index_add(0, rows, expert(x[rows]) * gates[rows, i : i + 1])
    return out


def counted_capacity(m, x):
    """Each row goes to its best expert, which takes the first six rows that come."""
    gates = m.gate(x).softmax(-1)
    chosen = F.one_hot(gates.argmax(-1), 2).to(x.dtype)
    taken = chosen * (chosen.cumsum(0) <= 6)
    return (torch.stack([expert(x) for expert in m.experts], 1) * (taken * gates).unsqueeze(-1)).sum(1)


def clipped(m, x):
    """Activations at most 2.5 deviations from the mean of the batch."""
    h = m.a(x)
    mean, deviation = h.mean(), h.std()
    return m.b(h.clamp(mean - 2.5 * deviation, mean + 2.5 * deviation))


def masked_experts(m, x):
    """Each row goes to its best expert; one that nobody chose is not called."""
    gates = m.gate(x).softmax(-1)
    choice, out = gates.argmax(-1), m.shared(x)
    for i, expert in enumerate(m.experts):
        mask = choice == i
        if mask.any():
            out[mask] = out[mask] + expert(x[mask]) * gates[mask, i : i + 1]
    return out


def all_experts(m, x):
    """The outputs of all experts, by their gates."""
    return torch.einsum("bm,bmk->bk", m.gate(x).softmax(-1), torch.stack([expert(x) for expert in m.experts], 1))


def sure_experts(m, x):
    """Each row goes to the two best experts, by their gates."""
    gates, chosen = m.gate(x).softmax(-1).topk(2, dim=-1)
    outs = torch.stack([expert(x) for expert in m.experts], 1)
    picked = outs.gather(1, chosen.unsqueeze(-1).expand(-1, -1, CLASSES))
    return (gates.unsqueeze(-1) * picked).sum(1)


def experts(forward, count=3, **more):
    layers = nn.ModuleList([head(6) for _ in range(count)])
    return Own(forward, gate=nn.Linear(6, count), experts=layers, **more)


def discriminated(m, x):
    """How far each row of a minibatch is from the others (minibatch discrimination)."""
    h = m.a(x)
    near = torch.exp(-(h.unsqueeze(0) - h.unsqueeze(1)).abs().sum(2)).sum(1, keepdim=True)
    return m.o(torch.cat([h, near], 1))


def padded_rows(m, x):
    """Pads a minibatch to a multiple of four rows."""
    missing = -len(x) % 4
    return m.o(torch.relu(m.a(F.pad(x, (0, 0, 0, missing)))))[: len(x)]


def room_for_six(m, x):
    """Every expert takes six rows, or half of them where there are more."""
    room = min(len(x), max(6, math.ceil(len(x) / 2)))
    gates = m.gate(x).softmax(-1)
    out = x.new_zeros(len(x), CLASSES)
    for i, expert in enumerate(m.experts):
        rows = gates[:, i].topk(room).indices
        out = out.index_add(0, rows, expert(x[rows]) * gates[rows, i : i + 1])
    return out


def converged(m, x):
    """Iterates until no row of the minibatch moves much."""
    z = torch.zeros_like(x)
    for _ in range(30):
        new = torch.tanh(m.a(z) * 0.5 + x)
        if (new - z).abs().max() < 0.05:
            break
        z = new
    return m.o(new)


def inner_step(m, x):
    """A step on a loss of its own before it predicts (test-time training)."""
    with torch.enable_grad():
        guess = (F.linear(F.linear(x, m.a.weight), m.a.weight.T) - x).square().mean()
        (slope,) = torch.autograd.grad(guess, m.a.weight, create_graph=True)
    return m.b(torch.relu(F.linear(x, m.a.weight - 0.5 * slope)))


def mixup(m, x):
    """Mixes rows of the minibatch in training."""
    if m.training:
        x = 0.8 * x + 0.2 * x[torch.randperm(len(x))]
    return m.o(torch.relu(m.a(x)))


def noisy(m, x):
    return m.o(torch.relu(m.a(x + 0.1 * torch.randn_like(x) if m.training else x)))


def stochastic_depth(m, x):
    h = torch.relu(m.a(x))
    if not m.training or torch.rand(()).item() < 0.7:
        h = h + m.b(h)
    return m.o(h)


def drop_path(m, x):
    """Drops the residual branch of single rows."""
    h = m.a(x)
    branch = m.b(torch.relu(h))
    if m.training:
        branch = branch * torch.bernoulli(torch.full((len(x), 1), 0.5, dtype=x.dtype)) / 0.5
    return m.o(h + branch)


def drop_connect(m, x):
    return F.linear(x, F.dropout(m.weight, 0.3, m.training), m.bias)


# What a module keeps


class CountingLarge(nn.Module):
    """Counts minibatches of more than four rows."""

    def __init__(self):
        super().__init__()
        self.fc, self.calls = head(6), 0

    def forward(self, x):
        self.calls += len(x) > 4
        return self.fc(x) / (1 + 0.1 * self.calls)


class Counting(nn.Module):
    """Another forward after ten steps: a warm-up by hand."""

    def __init__(self):
        super().__init__()
        self.fc, self.out, self.n = nn.Linear(6, 8), head(8), 0

    def forward(self, x):
        if self.training:
            self.n += 1
        h = self.fc(x)
        return self.out(h.relu() if self.n <= 10 else h.relu() * 0.5)


class Remembering(nn.Module):
    """Leaves its activations where a user finds them, for a penalty or a picture."""

    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(6, 8), head(8)
        self.h, self.maps = None, []

    def forward(self, x):
        self.h = self.fc(x).relu()
        self.maps = [self.h.detach()]
        return self.out(self.h)


class Caching(nn.Module):
    """Builds its table of positions when it first sees a length."""

    def __init__(self):
        super().__init__()
        self.fc, self.out, self.tables = nn.Linear(4, 4), head(4), {}

    def table(self, length, like):
        key = length, like.dtype, like.device
        if key not in self.tables:
            self.tables[key] = torch.linspace(-1, 1, length, dtype=like.dtype, device=like.device).unsqueeze(1)
        return self.tables[key]

    def forward(self, x):
        return self.out(torch.tanh(self.fc(x) + self.table(x.shape[1], x)).mean(1))


class LazyMask(nn.Module):
    """Makes its causal mask in the first forward."""

    def __init__(self):
        super().__init__()
        self.attention, self.out, self.mask = nn.MultiheadAttention(4, 2, batch_first=True), head(4), None

    def forward(self, x):
        if self.mask is None or len(self.mask) != x.shape[1]:
            self.mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.out(self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0][:, -1])


class Unregistered(nn.Module):
    """A plain tensor as an attribute, and a weight as a property."""

    def __init__(self):
        super().__init__()
        self.scale, self.direction, self.length = torch.linspace(0.5, 1.5, 6), weight(CLASSES, 6), weight(CLASSES, 1)

    @property
    def weight(self):
        return self.length * self.direction / self.direction.norm(dim=1, keepdim=True)

    def forward(self, x):
        return F.linear(x * self.scale, self.weight)


class Asking(nn.Module):
    """Asks its layers what they are, where they lie and how large they are."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.act, self.fc3 = nn.Linear(6, 8), nn.Linear(8, 8), nn.Tanh(), head(8)

    def forward(self, x):
        x = x.to(next(self.parameters()).device).view(-1, self.fc1.in_features)
        for i in range(1, 3):
            x = torch.relu(getattr(self, f"fc{i}")(x)) / math.sqrt(self.fc2.out_features)
        for layer in (self.act, self.fc3):
            x = 2 * layer(x) if isinstance(layer, nn.Linear) else layer(x)
        return x


class FrozenByTrain(nn.Module):
    """Freezes its body whenever it is put into training, as detection networks do."""

    def __init__(self):
        super().__init__()
        self.body, self.out = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), head(8)

    def train(self, mode=True):
        super().train(mode)
        self.body.requires_grad_(False)
        return self

    def forward(self, x):
        return self.out(self.body(x))


class CachedWeights(nn.Module):
    """Computes its weights once for a whole evaluation."""

    def __init__(self):
        super().__init__()
        self.direction, self.out, self.cache = weight(8, 6), head(8), None

    def train(self, mode=True):
        self.cache = None
        return super().train(mode)

    def forward(self, x):
        w = F.normalize(self.direction, dim=1) if self.cache is None else self.cache
        if not self.training:
            self.cache = w
        return self.out(F.linear(x, w).relu())


class Options(nn.Module):
    """A forward with further arguments."""

    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(6, 8), head(8)

    def forward(self, x, scale=None, *, return_features=False, **unused):
        h = torch.relu(self.fc(x)) * (2.0 if scale is None else scale)
        return h if return_features else self.out(h)


# Other dense modules


class Fourier(nn.Module):
    """Random Fourier features, fixed or learnt."""

    def __init__(self, learnt):
        super().__init__()
        frequencies = torch.randn(6, 5)
        if learnt:
            self.frequencies = nn.Parameter(frequencies)
        else:
            self.register_buffer("frequencies", frequencies, persistent=False)
        self.out = head(10)

    def forward(self, x):
        angles = 2 * math.pi * 0.1 * x @ self.frequencies
        return self.out(torch.cat([angles.sin(), angles.cos()], -1))


class Kan(nn.Module):
    """Sums of learnt functions of single inputs, on Gaussian bumps (Kolmogorov-Arnold network)."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 5))
        self.coefficients, self.base = weight(outputs, inputs, 5), nn.Linear(inputs, outputs)

    def forward(self, x):
        bumps = torch.exp(-((x.unsqueeze(-1) - self.grid) ** 2))
        return torch.einsum("big,oig->bo", bumps, self.coefficients) + self.base(F.silu(x))


class Hypernetwork(nn.Module):
    """The weights of the last layer are made from the input."""

    def __init__(self):
        super().__init__()
        self.body, self.maker = nn.Linear(6, 4), nn.Linear(6, 4 * CLASSES)

    def forward(self, x):
        made = self.maker(x).view(-1, 4, CLASSES)
        return torch.bmm(torch.tanh(self.body(x)).unsqueeze(1), made).squeeze(1)


class DeepSets(nn.Module):
    """A function of a set of numbers, whatever their order."""

    def __init__(self):
        super().__init__()
        self.phi, self.rho = nn.Sequential(nn.Linear(1, 5), nn.ReLU()), nn.Sequential(nn.Linear(10, 5), head(5))

    def forward(self, x):
        each = self.phi(x.unsqueeze(-1))
        return self.rho(torch.cat([each.mean(1), each.amax(1)], -1))


class Prototypes(nn.Module):
    """Squared distances to a point of each class."""

    def __init__(self):
        super().__init__()
        self.body, self.points = nn.Linear(6, 4), weight(CLASSES, 4)

    def forward(self, x):
        z = self.body(x)
        return -(z.unsqueeze(1) - self.points).pow(2).sum(-1)


class Rbf(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres, self.log_width, self.out = weight(7, 6), nn.Parameter(torch.zeros(7)), head(7)

    def forward(self, x):
        return self.out(torch.exp(-self.log_width.exp() * torch.cdist(x, self.centres).square() / 6))


class MixtureDensity(nn.Module):
    """The mean of a mixture of Gaussians, whose parameters are made from the input."""

    def __init__(self):
        super().__init__()
        self.body, self.share, self.mean = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return (self.share(h).softmax(-1) * self.mean(h)).sum(-1, keepdim=True)


class Monotone(nn.Module):
    """Weights that are positive by softplus."""

    def __init__(self):
        super().__init__()
        self.first, self.bias, self.second = weight(5, 6), nn.Parameter(torch.zeros(5)), weight(1, 5)

    def forward(self, x):
        h = torch.tanh(F.linear(x, F.softplus(self.first), self.bias))
        return F.linear(h, F.softplus(self.second)).squeeze(-1)


class SoftTree(nn.Module):
    """A decision tree of depth two with soft decisions."""

    def __init__(self):
        super().__init__()
        self.decide, self.leaves = nn.Linear(6, 3), weight(4, CLASSES)

    def forward(self, x):
        right = torch.sigmoid(self.decide(x))
        a, b, c = right.unbind(-1)
        path = torch.stack([(1 - a) * (1 - b), (1 - a) * b, a * (1 - c), a * c], -1)
        return path @ self.leaves


class Euler(nn.Module):
    """A neural ODE in steps of Euler."""

    def __init__(self):
        super().__init__()
        self.field, self.out = nn.Linear(7, 6), head(6)

    def forward(self, x):
        for step in range(4):
            time = x.new_full((x.shape[0], 1), step / 4)
            x = x + 0.25 * torch.tanh(self.field(torch.cat([x, time], 1)))
        return self.out(x)


class Equilibrium(nn.Module):
    """A fixed point that is found without gradients, then one step with them (deep equilibrium)."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.out = nn.Linear(6, 6), nn.Linear(6, 6), head(6)

    def forward(self, x):
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(5):
                z = torch.tanh(0.3 * self.inner(z) + self.outer(x))
        return self.out(torch.tanh(0.3 * self.inner(z) + self.outer(x)))


def energy(m, x):
    """Minus the gradient of an energy: the weights' gradients are second derivatives."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        total = m.b(torch.tanh(m.a(x))).sum()
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
    return -slope[:, :CLASSES]


def spectrum(m, x):
    """Complex numbers on the way, real ones in the end."""
    return m.o(torch.cat([(z := torch.fft.rfft(m.a(x))).real, z.abs()], -1))


class Cosine(nn.Module):
    """A classifier by the angle, with a learnt scale."""

    def __init__(self):
        super().__init__()
        self.body, self.weight, self.scale = nn.Linear(6, 5), weight(CLASSES, 5), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.scale.exp() * F.linear(F.normalize(self.body(x), dim=-1), F.normalize(self.weight, dim=-1))


# Images, signals and volumes


class ConvNet(nn.Module):
    """The CNN of PyTorch's tutorial."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.pool = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 5, 3), nn.MaxPool2d(2, 2)
        self.fc1, self.fc2 = nn.Linear(5, 6), head(6)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


class ResidualBlock(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class Dense(nn.Module):
    """A DenseNet block: every layer sees all that came before."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(2 + 2 * i), nn.ReLU(), nn.Conv2d(2 + 2 * i, 2, 3, padding=1)) for i in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class Inception(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.three = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 3, padding=1)
        self.pool = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), nn.Conv2d(2, 2, 1))

    def forward(self, x):
        return torch.cat([self.one(x), self.three(x), self.pool(x)], 1).relu()


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.up, self.merge = nn.ConvTranspose2d(4, 3, 2, stride=2), nn.Conv2d(6, 3, 3, padding=1)
        self.out = nn.Conv2d(3, CLASSES, 1)

    def forward(self, x):
        first = F.relu(self.down1(x))
        second = F.relu(self.down2(F.max_pool2d(first, 2)))
        merged = F.relu(self.merge(torch.cat([first, self.up(second)], 1)))
        return self.out(merged).mean((2, 3))


class SqueezeExcite(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x):
        s = F.adaptive_avg_pool2d(x, 1)
        return x * torch.sigmoid(self.up(F.relu(self.down(s))))


class SpatialAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x):
        seen = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], 1)
        return x * torch.sigmoid(self.conv(seen))


class StandardizedConv(nn.Conv2d):
    """A convolution whose weights have mean 0 and variance 1."""

    def forward(self, x):
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        w = w / (w.flatten(1).std(1).view(-1, 1, 1, 1) + 1e-5)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class DynamicConv(nn.Module):
    """Every example has a kernel of its own: the batch becomes groups of one convolution."""

    def __init__(self):
        super().__init__()
        self.kernels, self.mix = weight(3, 4, 2, 3, 3), nn.Linear(2, 3)

    def forward(self, x):
        b, c, h, w = x.shape
        share = self.mix(x.mean((2, 3))).softmax(-1)
        kernels = torch.einsum("bm,moikl->boikl", share, self.kernels).reshape(b * 4, c, 3, 3)
        return F.conv2d(x.reshape(1, b * c, h, w), kernels, padding=1, groups=b).view(b, 4, h, w)


class CoordConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        n, _, h, w = x.shape
        rows = torch.linspace(-1, 1, h, dtype=x.dtype).view(1, 1, h, 1).expand(n, 1, h, w)
        columns = torch.linspace(-1, 1, w, dtype=x.dtype).view(1, 1, 1, w).expand(n, 1, h, w)
        return self.conv(torch.cat([x, rows, columns], 1)).relu()


class SpatialTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.place, self.conv = nn.Linear(2 * 64, 6), nn.Conv2d(2, 4, 3)
        nn.init.normal_(self.place.weight, std=0.01)
        with torch.no_grad():
            self.place.bias.copy_(torch.tensor([1.0, 0, 0.1, 0, 1.0, -0.1]))

    def forward(self, x):
        theta = self.place(x.flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return self.conv(F.grid_sample(x, grid, align_corners=False)).relu()


class FilterResponse(nn.Module):
    """Filter response normalization with a thresholded unit."""

    def __init__(self, channels):
        super().__init__()
        self.gamma, self.beta = (
            nn.Parameter(torch.ones(1, channels, 1, 1)),
            nn.Parameter(torch.zeros(1, channels, 1, 1)),
        )
        self.tau = nn.Parameter(torch.full((1, channels, 1, 1), -0.5))

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean((2, 3), keepdim=True) + 1e-6)
        return torch.max(self.gamma * x + self.beta, self.tau)


class ChannelNorm(nn.Module):
    """A layer norm over channels (ConvNeXt)."""

    def __init__(self, channels):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(channels), nn.Parameter(0.5 * torch.ones(channels))

    def forward(self, x):
        return (self.norm(x.permute(0, 2, 3, 1)) * self.scale).permute(0, 3, 1, 2)


class BlurPool(nn.Module):
    def __init__(self, channels):
        super().__init__()
        row = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("kernel", torch.outer(row, row).repeat(channels, 1, 1, 1))

    def forward(self, x):
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), self.kernel, stride=2, groups=x.shape[1])


class SpectralConv(nn.Module):
    """The lowest frequencies times complex weights (Fourier neural operator)."""

    def __init__(self):
        super().__init__()
        self.weight, self.skip = nn.Parameter(0.3 * torch.randn(2, 4, 3, 2)), nn.Conv1d(2, 4, 1)

    def forward(self, x):
        z = torch.fft.rfft(x)
        out = z.new_zeros(len(x), 4, z.shape[-1])
        out[:, :, :3] = torch.einsum("bik,iok->bok", z[:, :, :3], torch.view_as_complex(self.weight))
        return torch.relu(torch.fft.irfft(out, n=x.shape[-1]) + self.skip(x))


class Causal(nn.Conv1d):
    """A dilated convolution that sees the past alone (TCN)."""

    def forward(self, x):
        reach = (self.kernel_size[0] - 1) * self.dilation[0]
        return super().forward(F.pad(x, (reach, 0)))


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Conv1d(2, 4, 1)
        self.filters = nn.ModuleList(Causal(4, 8, 2, dilation=d) for d in (1, 2, 4))
        self.skips = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(3))
        self.out = head(4)

    def forward(self, x):
        x, total = self.start(x), 0
        for conv, skip in zip(self.filters, self.skips, strict=True):
            a, b = conv(x).chunk(2, dim=1)
            h = skip(torch.tanh(a) * torch.sigmoid(b))
            x, total = x + h, total + h
        return self.out(F.relu(total)[..., -1])


def shuffled(x):
    """Channel shuffle of two groups."""
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class Capsules(nn.Module):
    """Primary capsules and their lengths."""

    def __init__(self):
        super().__init__()
        self.conv, self.votes = nn.Conv2d(2, 8, 5, stride=3), weight(8, CLASSES, 4, 2)

    def forward(self, x):
        u = self.conv(x).view(x.size(0), -1, 4).transpose(1, 2).reshape(x.size(0), 8, -1)[..., :2]
        v = torch.einsum("ncd,ckod->nko", u / (1 + u.norm(dim=-1, keepdim=True)), self.votes)
        return v.norm(dim=-1)


class KeptInEvaluation(nn.Module):
    """A pretrained norm that stays in evaluation, as detection networks have it."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), head(4)
        self.norm.get_buffer("running_mean").fill_(0.3)
        self.norm.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.out(self.norm(self.conv(x)).relu().mean((2, 3)))


# Recurrent networks


class Recurrent(nn.Module):
    """A recurrent layer, and the state after the last step."""

    def __init__(self, layer, width, batch_first=True):
        super().__init__()
        self.rnn, self.out, self.batch_first = layer, head(width), batch_first

    def forward(self, x):
        out, _ = self.rnn(x if self.batch_first else x.transpose(0, 1))
        return self.out(out[:, -1] if self.batch_first else out[-1])


class FinalStates(nn.Module):
    """The last states of both directions."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True), head(6)

    def forward(self, x):
        _, (h, _) = self.lstm(x)
        return self.out(torch.cat([h[-2], h[-1]], dim=1))


class Cell(nn.Module):
    def __init__(self, cell):
        super().__init__()
        self.cell, self.out = cell, head(4)

    def forward(self, x):
        h = x.new_zeros(x.size(0), 4)
        state = (h, h) if isinstance(self.cell, nn.LSTMCell) else h
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.out(state[0] if isinstance(state, tuple) else state)


class OwnCell(nn.Module):
    """A minimal gated unit, written out."""

    def __init__(self):
        super().__init__()
        self.forget, self.new, self.out = nn.Linear(8, 4), nn.Linear(8, 4), head(4)

    def forward(self, x):
        h = torch.zeros(x.shape[0], 4, dtype=x.dtype, device=x.device)
        for t in range(x.shape[1]):
            f = torch.sigmoid(self.forget(torch.cat([x[:, t], h], 1)))
            h = (1 - f) * h + f * torch.tanh(self.new(torch.cat([x[:, t], f * h], 1)))
        return self.out(h)


class LearntStates(nn.Module):
    """An LSTM whose first states are learnt."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 3, batch_first=True), head(3)
        self.h0, self.c0 = nn.Parameter(0.1 * torch.randn(1, 1, 3)), nn.Parameter(torch.zeros(1, 1, 3))

    def forward(self, x):
        first = self.h0.expand(-1, len(x), -1).contiguous(), self.c0.expand(-1, len(x), -1).contiguous()
        return self.out(self.lstm(x, first)[0].mean(1))


class StatesGiven(nn.Module):
    """The LSTM of many tutorials: states of zeros, and flattened parameters."""

    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(4, 3, num_layers=2, batch_first=True), head(3)

    def forward(self, x):
        self.lstm.flatten_parameters()
        h0 = torch.zeros(self.lstm.num_layers, x.size(0), self.lstm.hidden_size, dtype=x.dtype).to(x.device)
        out, _ = self.lstm(x, (h0, torch.zeros_like(h0)))
        return self.fc(out[:, -1, :])


class Sequences(nn.Module):
    """An encoder whose last states a decoder begins with."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.LSTM(4, 3, batch_first=True), nn.LSTM(4, 3, batch_first=True)
        self.out = head(3)

    def forward(self, x):
        _, states = self.encoder(x[:, :3])
        return self.out(self.decoder(x[:, 3:], states)[0][:, -1])


class Packed(nn.Module):
    """Sequences as long as they have words, packed."""

    def __init__(self):
        super().__init__()
        self.table, self.gru, self.out = (
            nn.Embedding(VOCABULARY, 4, padding_idx=0),
            nn.GRU(4, 3, batch_first=True),
            head(3),
        )

    def forward(self, x):
        lengths = (x != 0).sum(1)
        packed = pack_padded_sequence(self.table(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.out(self.gru(packed)[1][-1])


class PackedOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.lstm, self.out = nn.Embedding(VOCABULARY, 4), nn.LSTM(4, 3, batch_first=True), head(3)

    def forward(self, x):
        lengths = (x != 0).sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(self.table(x), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.out(out.max(1).values)


class IndependentRnn(nn.Module):
    """One weight per unit for the state before."""

    def __init__(self):
        super().__init__()
        self.enter, self.recur, self.out = nn.Linear(4, 5), nn.Parameter(0.5 * torch.rand(5)), head(5)

    def forward(self, x):
        h = x.new_zeros(len(x), 5)
        for step in self.enter(x).unbind(1):
            h = torch.relu(step + self.recur * h)
        return self.out(h)


class StateSpace(nn.Module):
    """A diagonal linear recurrence as one sum over powers."""

    def __init__(self):
        super().__init__()
        self.enter, self.log_decay, self.out = nn.Linear(4, 5), nn.Parameter(torch.zeros(5)), head(5)

    def forward(self, x):
        steps = torch.arange(x.shape[1] - 1, -1, -1, dtype=x.dtype)
        powers = torch.sigmoid(self.log_decay) ** steps.unsqueeze(1)
        return self.out((self.enter(x) * powers).sum(1))


class AttentionPooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.score, self.out = nn.GRU(4, 3, bidirectional=True, batch_first=True), nn.Linear(6, 1), head(6)

    def forward(self, x):
        h, _ = self.gru(x)
        return self.out((self.score(h).softmax(1) * h).sum(1))


class ConvRecurrent(nn.Module):
    """A recurrence of convolutions over the rows of an image."""

    def __init__(self):
        super().__init__()
        self.gates, self.out = nn.Conv1d(2 + 3, 3, 3, padding=1), head(3)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 3, x.shape[3])
        for row in x.unbind(2):
            h = torch.tanh(self.gates(torch.cat([row, h], 1)))
        return self.out(h.mean(2))


# Attention


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(4, 2, 6, **({"dropout": 0.0, "batch_first": True} | options))


def over_series(encoder, width=4):
    return Own(lambda m, x: m.out(m.encoder(x).mean(1)), encoder=encoder, out=head(width))


class ClassToken(nn.Module):
    """A ViT: patches by a convolution, a class token and learnt positions."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(2, 4, 4, stride=4)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, 4)), nn.Parameter(0.1 * torch.randn(1, 5, 4))
        self.encoder, self.norm, self.out = encoder_layer(norm_first=True), nn.LayerNorm(4), head(4)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.out(self.norm(self.encoder(x))[:, 0])


class SelfAttention(nn.Module):
    """Heads by hand."""

    def __init__(self, heads=2, how="hand"):
        super().__init__()
        self.qkv, self.proj, self.heads, self.how = nn.Linear(4, 12), nn.Linear(4, 4), heads, how

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if self.how == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.how == "linear":
            q, k = F.elu(q) + 1, F.elu(k) + 1
            y = (q @ (k.transpose(-2, -1) @ v)) / (q @ k.sum(-2).unsqueeze(-1))
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
            y = scores.softmax(-1) @ v
        return x + self.proj(y.transpose(1, 2).reshape(b, t, d))


class NanoGPT(nn.Module):
    """A causal language model with tied tables."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, 4), nn.Embedding(6, 4)
        self.block, self.norm = SelfAttention(how="sdpa"), nn.LayerNorm(4)
        self.out = nn.Linear(4, VOCABULARY, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.out(self.norm(self.block(h)))


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), head(4)
        angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1]))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def turn(self, x):
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, x):
        scores = self.turn(self.q(x)) @ self.turn(self.k(x)).mT / 2
        return self.out((scores.softmax(-1) @ self.v(x)).mean(1))


class RelativeBias(nn.Module):
    """A learnt bias for each distance, looked up in a table (Swin)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.table, self.out = nn.Linear(4, 12), nn.Parameter(0.1 * torch.randn(9)), head(4)
        places = torch.arange(5)
        self.register_buffer("index", places[:, None] - places[None, :] + 4)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(((q @ k.mT / 2 + self.table[self.index]).softmax(-1) @ v).mean(1))


class KeyPadding(nn.Module):
    """Words that are padding are not attended to."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(VOCABULARY, 4, padding_idx=0), head(4)
        self.encoder = nn.TransformerEncoder(encoder_layer(), 1, enable_nested_tensor=False)

    def forward(self, x):
        padding = x == 0
        h = self.encoder(self.table(x), src_key_padding_mask=padding)
        real = (~padding).unsqueeze(-1).to(h.dtype)
        return self.out((h * real).sum(1) / real.sum(1))


class Perceiver(nn.Module):
    """Learnt queries that look at the series."""

    def __init__(self):
        super().__init__()
        self.queries, self.attention = nn.Parameter(torch.randn(2, 4)), nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = head(8)

    def forward(self, x):
        queries = self.queries.unsqueeze(0).repeat(x.shape[0], 1, 1)
        return self.out(self.attention(queries, x, x)[0].flatten(1))


class CrossAttention(nn.Module):
    """The first half of a series looks at the second."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.LayerNorm(4), head(4)

    def forward(self, x):
        seen, weights = self.attention(x[:, :2], x[:, 2:], x[:, 2:], need_weights=True)
        return self.out(self.norm(x[:, :2] + seen).mean(1) * (1 + weights.mean((1, 2)).unsqueeze(-1)))


class Decoder(nn.Module):
    """An encoder, and a decoder with a causal mask, both over the series."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=True)
        self.out = head(4)
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).triu(1))

    def forward(self, x):
        return self.out(self.transformer(x, x, tgt_mask=self.mask)[:, -1])


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.over_steps, self.over_channels = nn.Linear(5, 5), nn.Linear(4, 4)
        self.norm1, self.norm2, self.out = nn.LayerNorm(4), nn.LayerNorm(4), head(4)

    def forward(self, x):
        x = x + F.gelu(self.over_steps(self.norm1(x).transpose(1, 2))).transpose(1, 2)
        return self.out((x + F.gelu(self.over_channels(self.norm2(x)))).mean(1))


class MixtureOfExperts(nn.Module):
    """Each step of a series goes to its best expert of two, rows of all examples together."""

    def __init__(self):
        super().__init__()
        self.router, self.out = nn.Linear(4, 2), head(4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        gate, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero(as_tuple=True)[0]
            out.index_add_(0, rows, gate[rows, None] * expert(flat[rows]))
        return self.out((flat + out).view_as(x).mean(1))


class Linformer(nn.Module):
    """Keys and values over fewer places, by a product along the series."""

    def __init__(self):
        super().__init__()
        self.qkv, self.shorten, self.out = nn.Linear(4, 12), weight(2, 5), head(4)

    def forward(self, x):
        q, k, v = self.qkv(x).split(4, dim=-1)
        return self.out(((q @ (self.shorten @ k).mT).softmax(-1) @ (self.shorten @ v)).mean(1))


# Words


class Bag(nn.Module):
    def __init__(self, mode="mean", **options):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(VOCABULARY, 4, mode=mode, **options), head(4)

    def forward(self, x):
        return self.out(self.bag(x))


class Offsets(nn.Module):
    """A bag with offsets: all words of the minibatch in a row, as in PyTorch's tutorial."""

    def __init__(self):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(VOCABULARY, 4, mode="sum"), head(4)

    def forward(self, x):
        offsets = torch.arange(0, x.numel(), x.shape[1], device=x.device)
        return self.out(self.bag(x.reshape(-1), offsets))


class Hashing(nn.Module):
    """Pairs of words share a small table."""

    def __init__(self):
        super().__init__()
        self.words, self.pairs, self.out = nn.Embedding(VOCABULARY, 4), nn.Embedding(7, 4), head(4)

    def forward(self, x):
        pairs = (x[:, :-1] * 31 + x[:, 1:]) % 7
        return self.out(self.words(x).mean(1) + self.pairs(pairs).mean(1))


class TextConv(nn.Module):
    """Convolutions of several widths over words (TextCNN)."""

    def __init__(self):
        super().__init__()
        self.table, self.convs = nn.Embedding(VOCABULARY, 4), nn.ModuleList(nn.Conv1d(4, 3, k) for k in (2, 3))
        self.out = head(6)

    def forward(self, x):
        h = self.table(x).transpose(1, 2)
        return self.out(torch.cat([F.relu(conv(h)).max(2).values for conv in self.convs], 1))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.lstm = nn.Embedding(VOCABULARY, 4), nn.LSTM(4, 3, bidirectional=True, batch_first=True)
        self.out = nn.Linear(6, VOCABULARY)

    def forward(self, x):
        return self.out(self.lstm(self.table(x))[0])


def over_words(layer, forward=lambda m, x: m.out(m.table(x).mean(1))):
    return Own(forward, table=layer, out=head(4))


# Refused


def old_weight_norm():
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), head(8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(module[0])
    return module


def old_spectral_norm():
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), head(8))
    torch.nn.utils.spectral_norm(module[0])
    return module


def pruned():
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), head(8))
    prune.l1_unstructured(module[0], "weight", amount=0.5)
    return module


class Averaging(nn.Module):
    """Keeps a running mean of its activations in a buffer."""

    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(6, 8), head(8)
        self.mean = nn.Buffer(torch.zeros(8))

    def forward(self, x):
        h = self.fc(x)
        if self.training:
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.out(h - self.mean)


class Momentum(nn.Module):
    """Moves a target network in its forward (BYOL)."""

    def __init__(self):
        super().__init__()
        self.online, self.target, self.out = nn.Linear(6, 8), nn.Linear(6, 8).requires_grad_(False), head(8)

    @torch.no_grad()
    def move(self):
        for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
            q.mul_(0.9).add_(p, alpha=0.1)

    def forward(self, x):
        if self.training:
            self.move()
        return self.out(self.online(x) - self.target(x))


class Annealed(nn.Module):
    """A temperature that falls with every call, as a plain attribute."""

    def __init__(self):
        super().__init__()
        self.fc, self.temperature = head(6), 1.0

    def forward(self, x):
        if self.training:
            self.temperature = max(0.5, self.temperature * 0.99)
        return self.fc(x) / self.temperature


class Queue(nn.Module):
    """Looks at the features of the minibatch before, in a plain list (memory bank)."""

    def __init__(self):
        super().__init__()
        self.fc, self.out, self.bank = nn.Linear(6, 8), head(8), []

    def forward(self, x):
        h = self.fc(x)
        if self.training:
            self.bank = [*self.bank, h.detach().mean(0)][-12:]
        return self.out(h - torch.stack(self.bank).mean(0) if len(self.bank) > 10 else h)


def hooked_parameter():
    module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), head(8))
    module[0].weight.register_hook(lambda g: g * 0.5)
    return module


def two(forward, width=8, **more):
    """Two linear layers, and what a forward makes of them."""
    return Own(forward, a=nn.Linear(6, width), b=head(width), **more)


def three(forward, **more):
    return Own(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 8), o=head(8), **more)


seq, lin, cat = nn.Sequential, nn.Linear, torch.cat
relu, tanh = torch.relu, torch.tanh
ACTIVATIONS = (
    *(nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU),
    *(nn.ReLU6, nn.Softsign, nn.Tanhshrink, nn.Hardshrink, nn.LogSigmoid, nn.Hardsigmoid),
)

# fmt: off
DENSE = [
    Entry("sequential", lambda: seq(lin(6, 8), nn.ReLU(), lin(8, 7), nn.ReLU(), head(7)), VECTOR, quick=True),
    Entry("logistic regression", lambda: head(6), VECTOR),
    Entry("functional", Functional, VECTOR),
    Entry("module list", Listed, VECTOR),
    Entry("module dict", Named, VECTOR),
    Entry("nested", lambda: seq(seq(seq(lin(6, 8)), nn.ReLU()), seq(seq(head(8)))), VECTOR),
    Entry("ordered dict", lambda: seq(OrderedDict(fc=lin(6, 8), act=nn.Tanh(), out=head(8))), VECTOR),
    Entry("layer called twice", lambda: Own(lambda m, x: m.o(relu(m.a(relu(m.a(x))))), a=lin(6, 6), o=head(6)), VECTOR),
    Entry("tied autoencoder", TiedAutoencoder, VECTOR, quick=True),
    Entry("tied layers", tied_layers, VECTOR),
    Entry("residual blocks", lambda: seq(Block(6), Block(6), head(6)), VECTOR),
    Entry("pre-norm residual blocks", lambda: seq(Block(6, nn.LayerNorm), Block(6, nn.LayerNorm), head(6)), VECTOR),
    Entry("highway", Highway, VECTOR),
    Entry("skip", lambda: Own(lambda m, x: m.b(cat([x, relu(m.a(x))], 1)), a=lin(6, 8), b=head(14)), VECTOR),
    Entry("branches", lambda: Own(lambda m, x: m.o(relu(m.a(x)) + tanh(m.b(x)) * m.c(x)), a=lin(6, 8), b=lin(6, 8),
          c=lin(6, 8), o=head(8)), VECTOR),
    Entry("squeeze and excite", lambda: three(lambda m, x: m.o((h := m.a(x)) * m.b(relu(h)).sigmoid())), VECTOR),
    Entry("bilinear", lambda: Own(lambda m, x: m.b(x[:, :3], x[:, 3:]), b=nn.Bilinear(3, 3, CLASSES)), VECTOR),
    Entry("factorization machine", FactorizationMachine, VECTOR),
    Entry("deep and cross", Cross, VECTOR),
    Entry("own scale and bias", lambda: two(lambda m, x: m.b(relu(m.a(x * m.s + m.t))), s=weight(6), t=weight(6)),
          VECTOR),
    Entry("parameter dict", ByName, VECTOR),
    Entry("low rank", lambda: Own(lambda m, x: x @ m.u @ m.v, u=weight(6, 2), v=weight(2, CLASSES)), VECTOR),
    Entry("frozen body", Frozen, VECTOR),
    Entry("body under no_grad", BodyWithoutGradient, VECTOR, quick=True),
    Entry("detached body", lambda: two(lambda m, x: m.b(relu(m.a(x)).detach())), VECTOR),
    Entry("unused layer", lambda: two(lambda m, x: m.b(relu(m.a(x))), spare=lin(6, 6)), VECTOR, quick=True),
    Entry("unused parameter", lambda: two(lambda m, x: m.b(relu(m.a(x))), spare=weight(4)), VECTOR),
    Entry("layer for training alone", lambda: two(lambda m, x: m.b(m.a(x)) + (m.c(x) if m.training else 0), c=head(6)),
          VECTOR),
    Entry("layer for evaluation alone", lambda: two(lambda m, x: m.b(m.a(x)) + (0 if m.training else m.c(x)),
          c=head(6)), VECTOR),
    Entry("target by detach", lambda: two(lambda m, x: m.b(m.a(x) - m.a(x).detach().mean(1, keepdim=True))), VECTOR),
    Entry("frozen by train()", FrozenByTrain, VECTOR),
    Entry("lora", Lora, VECTOR),
    Entry("scaled output", lambda: two(lambda m, x: 0.5 * m.b(relu(m.a(x)))), VECTOR),
    Entry("temperature", lambda: two(lambda m, x: m.b(relu(m.a(x))) / m.t.exp(), t=weight(1)), VECTOR),
    Entry("bounded output", lambda: two(lambda m, x: 5 * tanh(m.b(relu(m.a(x))))), VECTOR),
    Entry("log softmax output", lambda: seq(lin(6, 8), nn.ReLU(), head(8), nn.LogSoftmax(dim=1)), VECTOR),
    Entry("cosine classifier", Cosine, VECTOR),
    Entry("straight-through sign", lambda: two(lambda m, x: m.b(Sign.apply(m.a(x)))), VECTOR),
    Entry("gradient reversal", lambda: two(lambda m, x: m.b(Reverse.apply(relu(m.a(x)), 0.3))), VECTOR),
    Entry("hook on the output", lambda: Own(output_hook, fc=head(6)), VECTOR, quick=True),
    Entry("hook on the output of two layers", lambda: Own(output_hook, fc=around(nn.ReLU())), VECTOR),
    Entry("hook on a hidden activation", lambda: two(hidden_hook), VECTOR, quick=True),
    Entry("forward hook", lambda: hooked("register_forward_hook", lambda m, _, out: out * 2), VECTOR),
    Entry("forward pre-hook", lambda: hooked("register_forward_pre_hook", lambda m, x: (x[0] + 1,)), VECTOR),
    Entry("backward hook", lambda: hooked("register_full_backward_hook", lambda m, g, _: (g[0] * 2,), 2), VECTOR),
    Entry("backward pre-hook", lambda: hooked("register_full_backward_pre_hook", lambda m, g: (g[0] * 2,), 2), VECTOR),
    Entry("backward pre-hook on one layer", lambda: doubled(head(6)), VECTOR),
    Entry("backward pre-hook on the module", lambda: doubled(around(nn.ReLU())), VECTOR),
    Entry("forward hook on the module", lambda: after(around(nn.ReLU()), lambda m, _, out: out * 2), VECTOR),
    Entry("forward hook on one layer", lambda: after(head(6), lambda m, _, out: out * 2), VECTOR),
    Entry("checkpoint", Checkpointed, VECTOR),
    Entry("checkpoint_sequential", lambda: Own(lambda m, x: m.o(checkpoint_sequential(m.s, 2, x, use_reentrant=False)),
          s=seq(lin(6, 6), nn.Tanh(), lin(6, 6)), o=head(6)), VECTOR),
    Entry("einsum", lambda: Own(lambda m, x: torch.einsum("bi,ik->bk", x, m.w) + m.t, w=weight(6, 3), t=weight(3)),
          VECTOR),
    Entry("matmul", lambda: Own(lambda m, x: tanh(x @ m.v) @ m.w, v=weight(6, 8), w=weight(8, 3)), VECTOR),
    Entry("addmm", lambda: Own(lambda m, x: torch.addmm(m.t, x, m.w), w=weight(6, 3), t=weight(3)), VECTOR),
    Entry("unit rows", lambda: two(lambda m, x: m.b(relu(m.a(x / x.norm(dim=1, keepdim=True))))), VECTOR),
    Entry("logarithm of inputs", lambda: two(lambda m, x: m.b(relu(m.a(x.abs().log())))), VECTOR),
    Entry("unit features", lambda: two(lambda m, x: m.b((h := relu(m.a(x))) / h.norm(dim=1, keepdim=True))), VECTOR),
    Entry("in place", lambda: Own(inplace, a=lin(6, 8), b=lin(6, 8), o=head(8)), VECTOR),
    Entry("in place on the input", lambda: two(lambda m, x: m.b(m.a(x.mul_(2).relu_()))), VECTOR),
    Entry("rearranged", lambda: Own(rearranged, a=lin(6, 8), o=head(8)), VECTOR),
    Entry("chunks of features", lambda: Own(lambda m, x: m.b((c := m.a(x).chunk(2, 1))[0] * c[1].sigmoid()),
          a=lin(6, 8), b=head(4)), VECTOR),
    Entry("split features", lambda: two(lambda m, x: m.b(cat([p.cumsum(1) for p in m.a(x).split([3, 5], 1)], 1))),
          VECTOR),
    Entry("maxout", Maxout, VECTOR),
    Entry("sorted features", lambda: two(lambda m, x: m.b(m.a(x).sort(1).values)), VECTOR),
    Entry("glu", lambda: seq(lin(6, 16), nn.GLU(), head(8)), VECTOR),
    Entry("prelu", lambda: around(nn.PReLU()), VECTOR),
    Entry("prelu for each unit", lambda: around(nn.PReLU(8)), VECTOR),
    *(Entry(a.__name__.lower(), lambda a=a: around(a()), VECTOR) for a in ACTIVATIONS),
    Entry("softmax inside", lambda: around(nn.Softmax(dim=1)), VECTOR),
    Entry("softmin inside", lambda: around(nn.Softmin(dim=-1)), VECTOR),
    Entry("layer norm", lambda: around(nn.LayerNorm(8), nn.ReLU()), VECTOR),
    Entry("rms norm", lambda: around(nn.RMSNorm(8, eps=1e-6)), VECTOR),
    Entry("group norm of vectors", lambda: around(nn.GroupNorm(4, 8)), VECTOR),
    Entry("batch norm", lambda: around(nn.BatchNorm1d(8), nn.ReLU()), VECTOR, quick=True, pairs=True),
    Entry("batch norm first", lambda: seq(nn.BatchNorm1d(6), lin(6, 8), nn.ReLU(), head(8)), VECTOR, pairs=True),
    Entry("batch norm last", lambda: seq(lin(6, 8), nn.ReLU(), head(8), nn.BatchNorm1d(CLASSES)), VECTOR, pairs=True),
    Entry("batch norm, not affine", lambda: around(nn.BatchNorm1d(8, affine=False)), VECTOR, pairs=True),
    Entry("batch norm, other momentum", lambda: around(nn.BatchNorm1d(8, momentum=0.7, eps=0.1)), VECTOR, pairs=True),
    Entry("batch norm, not tracking", lambda: around(nn.BatchNorm1d(8, track_running_stats=False)), VECTOR, pairs=True),
    Entry("batch norm called twice", lambda: Own(lambda m, x: m.o(m.n(m.b(m.n(m.a(x)).relu()))), a=lin(6, 8),
          n=nn.BatchNorm1d(8), b=lin(8, 8), o=head(8)), VECTOR, pairs=True),
    Entry("batch norm as a function", lambda: two(lambda m, x: m.b(F.batch_norm(m.a(x), None, None, training=True))),
          VECTOR, pairs=True),
    Entry("masked linear", lambda: seq(MaskedLinear(6, 6), nn.ReLU(), MaskedLinear(6, 6), head(6)), VECTOR),
    Entry("sequential with its own forward", lambda: Twice(lin(6, 8), nn.ReLU(), head(8)), VECTOR),
    Entry("ensemble", Ensemble, VECTOR),
    Entry("weight norm", lambda: parametrized(parametrizations.weight_norm), VECTOR),
    Entry("orthogonal", lambda: parametrized(parametrizations.orthogonal), VECTOR),
    Entry("own parametrization",
          lambda: parametrized(lambda m: parametrize.register_parametrization(m, "weight", Symmetric())), VECTOR),
    Entry("buffers", lambda: Own(lambda m, x: m.o((x - m.c) / 2), c=nn.Buffer(torch.arange(6.0)), o=head(6)), VECTOR),
    Entry("outputs for nothing", lambda: Own(lambda m, x: m.t.expand(len(x), 3), t=weight(3)), VECTOR),
    Entry("penalty in the output", lambda: two(lambda m, x: m.b(m.a(x)) * sum(p.norm() for p in m.parameters())),
          VECTOR),
    Entry("asks its layers", Asking, VECTOR),
    Entry("plain tensor and property", Unregistered, VECTOR),
    Entry("slices of a sequential", lambda: Own(lambda m, x: m.s[-1](tanh(m.s[:-1](x))), s=around(nn.ReLU())), VECTOR),
    Entry("siamese", lambda: Own(lambda m, x: m.b((m.a(x[:, :3]) - m.a(x[:, 3:])).abs()), a=lin(3, 8), b=head(8)),
          VECTOR),
    Entry("batch norm under no_grad", lambda: two(lambda m, x: m.b(m.a(torch.no_grad()(m.n)(x))), n=nn.BatchNorm1d(6)),
          VECTOR, pairs=True),
    Entry("layer norm without weights", lambda: around(nn.LayerNorm(8, elementwise_affine=False)), VECTOR),
    Entry("hook that stores", lambda: hooked("register_forward_hook", lambda m, _, out: setattr(m, "seen", out)),
          VECTOR),
    Entry("outputs squeezed to the utmost",
          lambda: Own(lambda m, x: m.b(relu(m.a(x))).squeeze(), a=lin(6, 8), b=lin(8, 1)), NUMBER),
    Entry("outputs [M, 1]", lambda: seq(lin(6, 8), nn.ReLU(), lin(8, 1)), NUMBER),
    Entry("outputs [M]", lambda: Own(lambda m, x: m.b(relu(m.a(x))).squeeze(1), a=lin(6, 8), b=lin(8, 1)), NUMBER),
    Entry("outputs squeezed", lambda: Own(lambda m, x: m.b(relu(m.a(x))).squeeze(-1), a=lin(6, 8), b=lin(8, 1)),
          NUMBER),
    Entry("several labels", lambda: around(nn.ReLU()), LABELS),
    Entry("classifier chain",
          lambda: Own(lambda m, x: cat([a := m.a(x), m.b(cat([x, a], 1))], 1), a=lin(6, 1), b=lin(7, 2)), LABELS),
]

RANDOM = [
    Entry("dropout", lambda: around(nn.ReLU(), nn.Dropout(0.4)), VECTOR, quick=True, random=True),
    Entry("dropout on the input", lambda: seq(nn.Dropout(0.2), lin(6, 8), nn.ReLU(), head(8)), VECTOR, random=True),
    Entry("functional dropout", lambda: two(lambda m, x: m.b(F.dropout(m.a(x), 0.3, m.training))), VECTOR, random=True),
    Entry("alpha dropout", lambda: around(nn.SELU(), nn.AlphaDropout(0.3)), VECTOR, random=True),
    Entry("dropout of channels", lambda: pooled(nn.Conv2d(2, 4, 3), nn.Dropout2d(0.5)), IMAGE, random=True),
    Entry("dropout between layers", lambda: Recurrent(nn.LSTM(4, 3, 2, dropout=0.4, batch_first=True), 3), SERIES,
          random=True),
    Entry("dropout in attention", lambda: over_series(encoder_layer(dropout=0.3)), SERIES, random=True),
    Entry("dropconnect", lambda: Own(drop_connect, weight=weight(3, 6), bias=weight(3)), VECTOR, random=True),
    Entry("drop path", lambda: three(drop_path), VECTOR, random=True),
    Entry("stochastic depth", lambda: three(stochastic_depth), VECTOR, random=True),
    Entry("noise in training", lambda: Own(noisy, a=lin(6, 8), o=head(8)), VECTOR, random=True),
    Entry("mixup in forward", lambda: Own(mixup, a=lin(6, 8), o=head(8)), VECTOR, random=True),
    Entry("gumbel softmax", Gumbel, VECTOR, random=True),
    Entry("random relu", lambda: around(nn.RReLU()), VECTOR, random=True),
    Entry("dropout and batch norm", lambda: around(nn.BatchNorm1d(8), nn.Dropout(0.5)), VECTOR, random=True,
          pairs=True),
]

ROWS = [
    Entry("split(8) of rows", lambda: two(lambda m, x: cat([m.b(relu(m.a(p))) for p in x.split(8)])), VECTOR,
          quick=True),
    Entry("split(2) of rows", lambda: two(lambda m, x: cat([m.b(relu(m.a(p))) for p in x.split(2)])), VECTOR),
    Entry("split(8) and its mean",
          lambda: two(lambda m, x: cat([m.b(h - h.mean(0)) for p in x.split(8) for h in [m.a(p)]])), VECTOR),
    Entry("chunk(2) of rows", lambda: two(lambda m, x: cat([m.b(relu(m.a(p))) for p in x.chunk(2)])), VECTOR),
    Entry("chunk(2) of long batches",
          lambda: two(lambda m, x: cat([m.b(relu(m.a(p))) for p in x.chunk(2)]) if len(x) > 6 else m.b(relu(m.a(x)))),
          VECTOR),
    Entry("ghost batch norm of 8", lambda: around(GhostBatchNorm(nn.BatchNorm1d(8), 8)), VECTOR, quick=True,
          pairs=True),
    Entry("ghost batch norm of 8, not tracking", lambda: around(GhostBatchNorm(
          nn.BatchNorm1d(8, track_running_stats=False), 8)), VECTOR, pairs=True),
    Entry("ghost batch norm of 3", lambda: around(GhostBatchNorm(BatchStatistics(8), 3)), VECTOR),
    Entry("capacity by rows", lambda: experts(capacity, 2), VECTOR),
    Entry("cut for some clients", lambda: two(
          lambda m, x: m.b(relu(m.a(x))) * (1 if len(x) > 4 else Cut.apply(m.scale)), scale=weight(1)), VECTOR),
    Entry("branch on rows", lambda: two(lambda m, x: m.b(relu(m.a(x)) * (2 if len(x) > 4 else 1))), VECTOR),
    Entry("branch on many rows", lambda: two(lambda m, x: m.b(relu(m.a(x)) * (2 if len(x) > 6 else 1))), VECTOR,
          quick=True),
    Entry("layer for long batches", lambda: two(lambda m, x: m.b(relu(m.a(x))) + (m.c(x) if len(x) > 4 else 0),
          c=head(6)), VECTOR),
    Entry("branch on many numbers", lambda: two(lambda m, x: m.b(m.a(x)) * (2 if x.numel() > 36 else 1)), VECTOR),
    Entry("parity of rows", lambda: two(lambda m, x: m.b(relu(m.a(x))) * (1 + len(x) % 2)), VECTOR),
    Entry("room for six rows", lambda: experts(room_for_six, 2), VECTOR),
    Entry("branch on a value", lambda: two(lambda m, x: m.b(relu(m.a(x / 2 if x.abs().max() > 3 else x)))), VECTOR,
          quick=True),
    Entry("branch on a mean", lambda: two(lambda m, x: m.b(m.a(x)) * (2 if x.mean() > 0 else 1)), VECTOR),
    Entry("until it has converged", lambda: Own(converged, a=lin(6, 6), o=head(6)), VECTOR),
    Entry("inner step", lambda: two(inner_step), VECTOR, quick=True),
    Entry("twice as many rows", lambda: two(lambda m, x: (h := m.b(m.a(cat([x, -x]))).chunk(2))[0].relu() - h[1]),
          VECTOR),
    Entry("each row twice", lambda: two(lambda m, x: m.b(tanh(m.a(x.repeat_interleave(2, 0)))).view(-1, 2, 3).sum(1)),
          VECTOR),
    Entry("each row twice, batch norm", lambda: Own(lambda m, x: m.a(x.repeat_interleave(2, 0)).view(-1, 2, 3).sum(1),
          a=around(nn.BatchNorm1d(8), nn.ReLU())), VECTOR, pairs=True),
    Entry("twice as many rows, batch norm", lambda: Own(lambda m, x: m.a(cat([x, -x])).view(2, -1, 3).sum(0),
          a=around(nn.BatchNorm1d(8), nn.ReLU())), VECTOR, pairs=True),
    Entry("halves as rows",
          lambda: Own(lambda m, x: m.b(relu(m.a(x.reshape(-1, 3))).view(len(x), -1)), a=lin(3, 4), b=head(8)), VECTOR),
    Entry("less the mean number", lambda: two(lambda m, x: m.b(m.a((x - x.mean()) / (1 + x.square().mean())))), VECTOR),
    Entry("normalized over rows", lambda: two(lambda m, x: m.b(F.normalize(m.a(x), dim=0))), VECTOR),
    Entry("list of rows", lambda: Own(lambda m, x: m.b(torch.stack([m.a(r[r != 0].view(-1, 1)).amax(0) for r in x])),
          a=lin(1, 8), b=head(8)), VECTOR),
    Entry("scaled by rows", lambda: two(lambda m, x: m.b(relu(m.a(x))) / x.shape[0]), VECTOR),
    Entry("every second row", lambda: two(lambda m, x: m.b(m.a(x) * (1 + torch.arange(len(x)) % 2).unsqueeze(1))),
          VECTOR),
    Entry("rows padded to four", lambda: Own(padded_rows, a=lin(6, 8), o=head(8)), VECTOR),
    Entry("statistics by hand", lambda: around(BatchStatistics(8)), VECTOR),
    Entry("less the mean row", lambda: two(lambda m, x: m.b(m.a(x - x.mean(0)))), VECTOR),
    Entry("less the first row", lambda: two(lambda m, x: m.b(m.a(x - x[:1]))), VECTOR),
    Entry("rows before", lambda: two(lambda m, x: m.b(m.a(x).cumsum(0))), VECTOR),
    Entry("neighbouring row", lambda: two(lambda m, x: m.b(m.a(x) + 0.1 * m.a(x).roll(1, 0))), VECTOR),
    Entry("rank among rows", lambda: two(lambda m, x: m.b(m.a(x + 0.1 * x.argsort(0).argsort(0)))), VECTOR),
    Entry("attention over rows", lambda: two(lambda m, x: m.b(((h := m.a(x)) @ h.T / 3).softmax(-1) @ h)), VECTOR),
    Entry("minibatch discrimination", lambda: Own(discriminated, a=lin(6, 4), o=head(5)), VECTOR),
    Entry("softmax over rows", lambda: two(lambda m, x: m.b(m.a(x).softmax(0))), VECTOR),
    Entry("rows as one vector", lambda: two(lambda m, x: m.b(m.a(x) / (1 + m.a(x).norm()))), VECTOR),
    Entry("clipped gradient of all rows", lambda: two(clipped_gradient), VECTOR),
    Entry("rows one by one", lambda: two(lambda m, x: torch.stack([m.b(relu(m.a(r))) for r in x])), VECTOR),
    Entry("rows without a batch", lambda: two(lambda m, x: torch.func.vmap(lambda r: m.b(relu(m.a(r))))(x)), VECTOR),
    Entry("steps as rows", lambda: Own(lambda m, x: m.b(relu(m.a(x.flatten(0, 1)))).view(len(x), -1, 3).mean(1),
          a=lin(4, 8), b=head(8)), SERIES),
    Entry("rows last", lambda: Own(lambda m, x: (m.w @ x.T).T + m.t, w=weight(3, 6), t=weight(3)), VECTOR),
]

STATE = [
    Entry("stored activations", Remembering, VECTOR, quick=True),
    Entry("cached table", Caching, SERIES),
    Entry("lazy mask", LazyMask, SERIES),
    Entry("further arguments", Options, VECTOR),
]

OTHER = [
    Entry("fourier features", lambda: Fourier(learnt=False), VECTOR),
    Entry("learnt fourier features", lambda: Fourier(learnt=True), VECTOR),
    Entry("kan", lambda: seq(Kan(6, 4), Kan(4, CLASSES)), VECTOR),
    Entry("hypernetwork", Hypernetwork, VECTOR),
    Entry("deep sets", DeepSets, VECTOR),
    Entry("prototypes", Prototypes, VECTOR),
    Entry("radial basis functions", Rbf, VECTOR),
    Entry("mixture density", MixtureDensity, NUMBER),
    Entry("monotone", Monotone, NUMBER),
    Entry("soft tree", SoftTree, VECTOR),
    Entry("neural ode", Euler, VECTOR),
    Entry("deep equilibrium", Equilibrium, VECTOR),
    Entry("energy", lambda: Own(energy, a=lin(6, 5), b=lin(5, 1)), VECTOR),
    Entry("spectrum", lambda: Own(spectrum, a=lin(6, 8), o=head(10)), VECTOR),
    Entry("experts, all", lambda: experts(all_experts), VECTOR),
    Entry("experts, top two", lambda: experts(sure_experts), VECTOR),
    Entry("experts by mask", lambda: experts(masked_experts, shared=head(6)), VECTOR),
]

IMAGES = [
    Entry("convolutions", ConvNet, IMAGE, quick=True),
    Entry("one convolution", lambda: pooled(nn.Conv2d(2, 4, 3)), IMAGE),
    Entry("stride", lambda: pooled(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU()), IMAGE),
    Entry("dilation", lambda: pooled(nn.Conv2d(2, 4, 3, dilation=2), nn.ReLU()), IMAGE),
    Entry("groups", lambda: pooled(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU()), IMAGE),
    Entry("depthwise separable", lambda: pooled(nn.Conv2d(2, 2, 3, groups=2), nn.Conv2d(2, 4, 1), nn.ReLU6()), IMAGE),
    Entry("uneven kernel", lambda: pooled(nn.Conv2d(2, 4, (3, 1), padding=(1, 0)), nn.Conv2d(4, 4, (1, 3))), IMAGE),
    Entry("no bias", lambda: pooled(nn.Conv2d(2, 4, 3, bias=False), nn.ReLU()), IMAGE),
    Entry("padding same", lambda: pooled(nn.Conv2d(2, 4, 4, padding="same"), nn.ReLU()), IMAGE),
    Entry("padding circular", lambda: pooled(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")), IMAGE),
    Entry("padding reflect", lambda: pooled(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")), IMAGE),
    Entry("padding replicate", lambda: pooled(nn.Conv2d(2, 4, 3, padding=1, padding_mode="replicate")), IMAGE),
    Entry("transposed convolution", lambda: pooled(nn.ConvTranspose2d(2, 4, 2, stride=2), nn.ReLU()), IMAGE),
    Entry("pixel shuffle", lambda: pooled(nn.Conv2d(2, 16, 3), nn.PixelShuffle(2)), IMAGE),
    Entry("pixel unshuffle", lambda: pooled(nn.PixelUnshuffle(2), nn.Conv2d(8, 4, 3)), IMAGE),
    Entry("adaptive pooling", lambda: seq(nn.Conv2d(2, 4, 3), nn.AdaptiveMaxPool2d((2, 1)), nn.Flatten(), head(8)),
          IMAGE),
    Entry("max and mean pooling", lambda: Own(lambda m, x: m.o(cat([(h := m.c(x)).amax((2, 3)), h.mean((2, 3))], 1)),
          c=nn.Conv2d(2, 4, 3), o=head(8)), IMAGE),
    Entry("average pooling", lambda: pooled(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2), nn.Tanh()), IMAGE),
    Entry("power pooling", lambda: pooled(nn.Conv2d(2, 4, 3), nn.Sigmoid(), nn.LPPool2d(2, 2)), IMAGE),
    Entry("pooling by 3", lambda: pooled(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1, ceil_mode=True)), IMAGE),
    Entry("upsample", lambda: pooled(nn.Conv2d(2, 4, 3), nn.Upsample(scale_factor=2), nn.Conv2d(4, 4, 3)), IMAGE),
    Entry("bilinear upsample", lambda: pooled(nn.Conv2d(2, 4, 3), nn.Upsample((9, 9), mode="bilinear"), nn.ReLU()),
          IMAGE),
    Entry("resnet", lambda: pooled(nn.Conv2d(2, 3, 3), ResidualBlock(3, 3), ResidualBlock(3, 4, 2)), IMAGE, quick=True,
          pairs=True),
    Entry("densenet", lambda: pooled(Dense(), width=6), IMAGE, pairs=True),
    Entry("inception", lambda: pooled(Inception(), width=6), IMAGE),
    Entry("u-net", UNet, IMAGE),
    Entry("squeeze and excite, images", lambda: pooled(nn.Conv2d(2, 4, 3), SqueezeExcite(4)), IMAGE),
    Entry("spatial attention", lambda: pooled(nn.Conv2d(2, 4, 3), SpatialAttention()), IMAGE),
    Entry("batch norm, images", lambda: pooled(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), IMAGE),
    Entry("batch norm kept in evaluation", KeptInEvaluation, IMAGE),
    Entry("group norm", lambda: pooled(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()), IMAGE),
    Entry("instance norm", lambda: pooled(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4), nn.ReLU()), IMAGE),
    Entry("instance norm, affine", lambda: pooled(nn.InstanceNorm2d(2, affine=True), nn.Conv2d(2, 4, 3), nn.ReLU()),
          IMAGE, quick=True),
    Entry("layer norm, images", lambda: pooled(nn.Conv2d(2, 4, 3), nn.LayerNorm([4, 6, 6]), nn.ReLU()), IMAGE),
    Entry("layer norm over channels", lambda: pooled(nn.Conv2d(2, 4, 3), ChannelNorm(4), nn.GELU()), IMAGE),
    Entry("instance norm between convolutions", lambda: pooled(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True),
          nn.Conv2d(4, 4, 3)), IMAGE),
    Entry("tied convolutions", lambda: Own(
          lambda m, x: m.o((F.conv_transpose2d(m.c(x).relu(), m.c.weight) - x).flatten(1)),
          c=nn.Conv2d(2, 4, 3), o=head(128)), IMAGE),
    Entry("local response norm", lambda: pooled(nn.Conv2d(2, 4, 3), nn.LocalResponseNorm(3), nn.ReLU()), IMAGE),
    Entry("filter response norm", lambda: pooled(nn.Conv2d(2, 4, 3), FilterResponse(4)), IMAGE),
    Entry("standardized convolution", lambda: pooled(StandardizedConv(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU()), IMAGE),
    Entry("weight norm of a convolution", lambda: pooled(parametrizations.weight_norm(nn.Conv2d(2, 4, 3)), nn.ReLU()),
          IMAGE),
    Entry("dynamic convolution", lambda: pooled(DynamicConv(), nn.ReLU()), IMAGE),
    Entry("coordinates", lambda: pooled(CoordConv()), IMAGE),
    Entry("spatial transformer", lambda: pooled(SpatialTransformer()), IMAGE),
    Entry("blur pooling", lambda: pooled(nn.Conv2d(2, 4, 3), BlurPool(4)), IMAGE),
    Entry("channel shuffle", lambda: Own(lambda m, x: m.o(m.b(shuffled(m.a(x).relu())).mean((2, 3))),
          a=nn.Conv2d(2, 4, 1, groups=2), b=nn.Conv2d(4, 4, 1, groups=2), o=head(4)), IMAGE),
    Entry("patches by unfold", lambda: Own(lambda m, x: m.o(m.a(F.unfold(x, 4, stride=4).mT).relu().mean(1)),
          a=lin(32, 4), o=head(4)), IMAGE),
    Entry("fold", lambda: Own(
          lambda m, x: m.o(F.fold(m.a(F.unfold(x, 4, stride=2).mT).mT, (8, 8), 4, stride=2).mean((2, 3))),
          a=lin(32, 32), o=head(2)), IMAGE),
    Entry("capsules", Capsules, IMAGE),
    Entry("wide net of views", lambda: Own(lambda m, x: m.o(m.c(x).view(len(x), -1)), c=nn.Conv2d(2, 2, 5), o=head(32)),
          IMAGE),
    Entry("channels last", lambda: Own(
          lambda m, x: m.o(m.c(x.contiguous(memory_format=torch.channels_last)).mean((2, 3))),
          c=nn.Conv2d(2, 4, 3), o=head(4)), IMAGE),
    Entry("convolution of signals", lambda: seq(nn.Conv1d(2, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), head(20)),
          SIGNAL),
    Entry("transposed, signals", lambda: seq(nn.ConvTranspose1d(2, 3, 2), nn.MaxPool1d(4), nn.Flatten(), head(9)),
          SIGNAL),
    Entry("batch norm of signals", lambda: seq(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(),
          nn.AdaptiveAvgPool1d(1), nn.Flatten(), head(4)), SIGNAL),
    Entry("causal convolutions", lambda: Own(lambda m, x: m.o(m.b(relu(m.a(x)))[..., -1]), a=Causal(2, 4, 3),
          b=Causal(4, 4, 3, dilation=2), o=head(4)), SIGNAL),
    Entry("wavenet", WaveNet, SIGNAL),
    Entry("spectral convolution", lambda: seq(SpectralConv(), nn.Flatten(), head(48)), SIGNAL),
    Entry("spectrogram", lambda: Own(lambda m, x: m.o(torch.fft.rfft(x).abs().log1p().flatten(1)), o=head(14)), SIGNAL),
    Entry("convolution of volumes", lambda: seq(nn.Conv3d(1, 2, 2), nn.ReLU(), nn.MaxPool3d(2), nn.Flatten(), head(2)),
          VOLUME),
    Entry("batch norm of volumes", lambda: seq(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2), nn.Flatten(), head(54)), VOLUME),
    Entry("convolution by own weights",
          lambda: Own(lambda m, x: m.o(F.conv2d(x, m.w).relu().mean((2, 3))), w=weight(4, 2, 3, 3), o=head(4)), IMAGE),
    Entry("convolution called twice", lambda: Own(lambda m, x: m.o(m.c(m.c(x).relu()).mean((2, 3))),
          c=nn.Conv2d(2, 2, 3, padding=1), o=head(2)), IMAGE),
]

RECURRENT = [
    Entry("lstm", lambda: Recurrent(nn.LSTM(4, 3, batch_first=True), 3), SERIES, quick=True),
    Entry("gru", lambda: Recurrent(nn.GRU(4, 3, batch_first=True), 3), SERIES),
    Entry("rnn", lambda: Recurrent(nn.RNN(4, 3, batch_first=True, nonlinearity="relu"), 3), SERIES),
    Entry("two layers", lambda: Recurrent(nn.LSTM(4, 3, 2, batch_first=True), 3), SERIES),
    Entry("time first", lambda: Recurrent(nn.LSTM(4, 3), 3, batch_first=False), SERIES),
    Entry("time first, gru", lambda: Recurrent(nn.GRU(4, 3, 2), 3, batch_first=False), SERIES),
    Entry("both directions", lambda: Recurrent(nn.GRU(4, 3, bidirectional=True, batch_first=True), 6), SERIES),
    Entry("last states", FinalStates, SERIES),
    Entry("projected states", lambda: Recurrent(nn.LSTM(4, 5, proj_size=3, batch_first=True), 3), SERIES),
    Entry("no bias, lstm", lambda: Recurrent(nn.LSTM(4, 3, bias=False, batch_first=True), 3), SERIES),
    Entry("lstm cell", lambda: Cell(nn.LSTMCell(4, 4)), SERIES),
    Entry("gru cell", lambda: Cell(nn.GRUCell(4, 4)), SERIES),
    Entry("own cell", OwnCell, SERIES),
    Entry("learnt states", LearntStates, SERIES),
    Entry("zero states and flat parameters", StatesGiven, SERIES),
    Entry("encoder and decoder", Sequences, SERIES),
    Entry("packed", Packed, WORDS),
    Entry("packed outputs", PackedOutputs, WORDS),
    Entry("independent units", IndependentRnn, SERIES),
    Entry("state space", StateSpace, SERIES),
    Entry("attention over states", AttentionPooling, SERIES),
    Entry("recurrent convolution", ConvRecurrent, IMAGE),
    Entry("frozen reservoir", lambda: Recurrent(nn.RNN(4, 3, batch_first=True).requires_grad_(False), 3), SERIES),
    Entry("reversed series", lambda: Own(lambda m, x: m.o(m.r(x.flip(1))[0][:, -1]), r=nn.GRU(4, 3, batch_first=True),
          o=head(3)), SERIES),
]

ATTENTION = [
    Entry("encoder layer", lambda: over_series(encoder_layer()), SERIES, quick=True),
    Entry("encoder, norm first", lambda: over_series(encoder_layer(norm_first=True, activation="gelu")), SERIES),
    Entry("encoder of two layers", lambda: over_series(nn.TransformerEncoder(encoder_layer(), 2, nn.LayerNorm(4),
          enable_nested_tensor=False)), SERIES),
    Entry("encoder layer called twice",
          lambda: Own(lambda m, x: m.o(m.e(m.e(x)).mean(1)), e=encoder_layer(), o=head(4)), SERIES),
    Entry("time first, attention", lambda: Own(lambda m, x: m.o(m.e(x.transpose(0, 1)).mean(0)),
          e=encoder_layer(batch_first=False), o=head(4)), SERIES),
    Entry("decoder", Decoder, SERIES),
    Entry("learnt positions",
          lambda: Own(lambda m, x: m.o(m.e(x + m.p).mean(1)), e=encoder_layer(), p=weight(5, 4), o=head(4)), SERIES),
    Entry("attention with biases", lambda: Own(lambda m, x: m.o(m.a(x, x, x)[0].mean(1)), a=nn.MultiheadAttention(4, 2,
          add_bias_kv=True, add_zero_attn=True, batch_first=True), o=head(4)), SERIES),
    Entry("other keys", lambda: Own(lambda m, x: m.o(m.a(x, (k := x[..., :3]), k)[0].mean(1)),
          a=nn.MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True), o=head(4)), SERIES),
    Entry("vision transformer", ClassToken, IMAGE),
    Entry("attention by hand", lambda: over_series(SelfAttention()), SERIES),
    Entry("causal attention", lambda: over_series(SelfAttention(how="sdpa")), SERIES),
    Entry("linear attention", lambda: over_series(SelfAttention(how="linear")), SERIES),
    Entry("language model", NanoGPT, TAGS, quick=True),
    Entry("rotary positions", Rotary, SERIES),
    Entry("relative bias", RelativeBias, SERIES),
    Entry("key padding", KeyPadding, WORDS),
    Entry("learnt queries", Perceiver, SERIES),
    Entry("cross attention", CrossAttention, SERIES),
    Entry("mixer", Mixer, SERIES),
    Entry("experts of steps", MixtureOfExperts, SERIES),
    Entry("linformer", Linformer, SERIES),
]

TEXT = [
    Entry("embedding", lambda: over_words(nn.Embedding(VOCABULARY, 4)), WORDS),
    Entry("embedding with a padding word", lambda: over_words(nn.Embedding(VOCABULARY, 4, padding_idx=0)), WORDS),
    Entry("frozen embedding", lambda: over_words(nn.Embedding.from_pretrained(torch.randn(VOCABULARY, 4))), WORDS),
    Entry("gradients by frequency", lambda: over_words(nn.Embedding(VOCABULARY, 4, scale_grad_by_freq=True)), WORDS),
    Entry("table of weights", lambda: over_words(weight(VOCABULARY, 4), lambda m, x: m.out(m.table[x].mean(1))), WORDS),
    Entry("functional embedding",
          lambda: over_words(weight(VOCABULARY, 4), lambda m, x: m.out(F.embedding(x, m.table).mean(1))), WORDS),
    Entry("mean of real words", lambda: over_words(nn.Embedding(VOCABULARY, 4),
          lambda m, x: m.out((m.table(x) * (r := (x != 0).unsqueeze(-1).to(m.out.weight.dtype))).sum(1) / r.sum(1))),
          WORDS),
    Entry("one-hot words", lambda: over_words(lin(VOCABULARY, 4),
          lambda m, x: m.out(tanh(m.table(F.one_hot(x, VOCABULARY).to(m.out.weight.dtype))).mean(1))), WORDS),
    Entry("bag of words", Bag, WORDS),
    Entry("bag of words, summed", lambda: Bag("sum", padding_idx=0), WORDS),
    Entry("bag of words, largest", lambda: Bag("max"), WORDS),
    Entry("bag with offsets", Offsets, WORDS),
    Entry("hashing", Hashing, WORDS),
    Entry("text convolutions", TextConv, WORDS),
    Entry("tagger", Tagger, TAGS),
]

REFUSED = [
    Entry("counter", Counting, VECTOR, quick=True, refused="Counting"),
    Entry("counter of large batches", CountingLarge, VECTOR, refused="CountingLarge: attribute 'calls' changes"),
    Entry("annealed temperature", Annealed, VECTOR, refused="Annealed"),
    Entry("memory bank", Queue, VECTOR, refused="Queue"),
    Entry("batch norm in a checkpoint", lambda: Own(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False)),
          a=seq(lin(6, 8), nn.BatchNorm1d(8)), b=head(8)), VECTOR, refused="running_mean"),
    Entry("running mean of its own", Averaging, VECTOR, refused="'mean'"),
    Entry("weights cached in evaluation", CachedWeights, VECTOR, refused="CachedWeights"),
    Entry("target network", Momentum, VECTOR, refused="Momentum"),
    Entry("complex outputs", lambda: two(lambda m, x: torch.fft.fft(m.b(m.a(x)))), VECTOR, quick=True,
          refused="complex"),
    Entry("complex weights", lambda: Own(lambda m, x: (x @ m.w).abs(), w=nn.Parameter(torch.randn(6, 3) * 1j)), VECTOR,
          refused="parameter 'w' is complex"),
    Entry("old weight norm", old_weight_norm, VECTOR, quick=True, refused="weight_norm"),
    Entry("old spectral norm", old_spectral_norm, VECTOR, refused="layer .* uses torch.nn.utils.spectral_norm"),
    Entry("pruned", pruned, VECTOR, quick=True, refused="prun"),
    Entry("spectral norm", lambda: parametrized(parametrizations.spectral_norm), VECTOR,
          refused="buffer .* is changed"),
    Entry("list of outputs", lambda: two(lambda m, x: [m.b(m.a(x)), x]), VECTOR, refused="gives a list"),
    Entry("tuple of outputs", lambda: two(lambda m, x: (m.b(m.a(x)), x)), VECTOR, refused="gives a tuple"),
    Entry("dict of outputs", lambda: two(lambda m, x: {"logits": m.b(m.a(x))}), VECTOR, refused="gives a dict"),
    Entry("one number for all", lambda: two(lambda m, x: m.b(m.a(x)).mean()), VECTOR, refused="one row for each"),
    Entry("instance norm with statistics", lambda: pooled(nn.InstanceNorm2d(2, track_running_stats=True),
          nn.Conv2d(2, 4, 3)), IMAGE, refused="buffer .* is changed"),
    Entry("cumulative batch norm", lambda: around(nn.BatchNorm1d(8, momentum=None)), VECTOR, refused="momentum=None"),
    Entry("bounded embedding", lambda: over_words(nn.Embedding(VOCABULARY, 4, max_norm=0.5)), WORDS,
          refused="max_norm"),
    Entry("draws of Python", lambda: two(lambda m, x: m.b(m.a(x)) * (random.random() if m.training else 1)), VECTOR,
          refused="different outputs each time"),
    Entry("draws in evaluation", lambda: two(lambda m, x: m.b(m.a(x + torch.randn_like(x)))), VECTOR,
          refused="draws random numbers in evaluation"),
    Entry("hook on a parameter", hooked_parameter, VECTOR, refused="has a hook"),
    Entry("capacity by counting", lambda: experts(counted_capacity, 2), VECTOR, quick=True,
          refused="outputs differ from those of each client alone"),
    Entry("place in the batch", lambda: two(lambda m, x: m.b(m.a(x) * (1 + (torch.arange(x.shape[0]) >= 20)).view(-1,
          1))), VECTOR, refused="outputs differ from those of each client alone"),
    Entry("clipped by the batch", lambda: two(clipped), VECTOR,
          refused="outputs differ from those of each client alone"),
    Entry("lazy layer", lambda: seq(nn.LazyLinear(8), nn.ReLU(), head(8)), VECTOR, refused="has no shape yet"),
    Entry("nothing to learn", lambda: head(6).requires_grad_(False), VECTOR, refused="requires a gradient"),
]
# fmt: on

ZOO = [*DENSE, *RANDOM, *ROWS, *STATE, *OTHER, *IMAGES, *RECURRENT, *ATTENTION, *TEXT, *REFUSED]
