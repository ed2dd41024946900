"""Modules as users write them: run as a stack where that is right, client by client where not, never wrong unseen."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl import StackedModel
from personafl.core.errors import UserError
from personafl.core.types import Params
from tests.models.test_patterns import Of

CLIENTS, SIZE = 3, 5
KEYS = torch.arange(CLIENTS)


class Backbone(Of):
    """Its backbone is never in training: the idiom for one that is not to be tuned."""

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        self.get_submodule("back").eval()
        return self


def routed(m: Any, x: Tensor) -> Tensor:
    """Each row through one of two layers."""
    first = x[:, 0] > 0
    out = x.new_zeros(len(x), 2)
    out[first], out[~first] = m.a(x[first]), m.b(x[~first])
    return out


def energy(m: Any, x: Tensor) -> Tensor:
    """The gradient of a scalar is the output, so weights' gradients are second derivatives."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        total = m.b(m.a(x).tanh()).sum()
        found: Tensor = torch.autograd.grad(total, x, create_graph=True)[0]
    return found


def hooked(gated: bool) -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    if gated:
        module[0].register_forward_hook(lambda m, _, out: out * 2 if m.training else out)
    else:
        module[1].register_full_backward_hook(lambda m, given, _: (given[0] * 2,))  # type: ignore[operator,index]
    return module


def normed_gradient(m: Any, x: Tensor) -> Tensor:
    """What goes back mixes the examples of a batch."""
    h: Tensor = m.a(x)
    if h.requires_grad:
        h.register_hook(lambda g: g / g.norm().clamp(min=1e-3))
    out: Tensor = m.b(h)
    return out


def inplace(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.a(x)
    out += m.b(x)
    return out.sigmoid_()


def flat(m: Any, x: Tensor) -> Tensor:
    """A layer over all words of all examples."""
    out: Tensor = m.o(m.n(m.a(x.reshape(-1, 6))).view(len(x), 4, 5).mean(1))
    return out


class Gated(nn.Module):
    """A part without a rule, whose forward and whose owner's read a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.random, self.weight = 1.0, nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def float32_states(m: Any, x: Tensor) -> Tensor:
    """The states it begins with are of PyTorch's default type, whatever the input is."""
    first = torch.zeros(1, len(x), 5)
    out: Tensor = m.o(m.l(x, (first, first))[0][:, -1])
    return out


def rolled(m: Any, x: Tensor) -> Tensor:
    out: Tensor = m.o(x.roll(int(torch.randint(0, 2, ())), 1) if m.training else x)
    return out


LINEAR = partial(nn.Linear, 6, 2)
VECTOR, WORDS = (6,), (4, 6)
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {  # and whether it runs as a whole
    "prelu over words": (lambda: Of(flat, a=nn.Linear(6, 5), n=nn.PReLU(), o=nn.Linear(5, 2)), WORDS, True),
    "norm over words": (lambda: Of(flat, a=nn.Linear(6, 5), n=nn.BatchNorm1d(5), o=nn.Linear(5, 2)), WORDS, True),
    "linear over words": (lambda: Of(flat, a=nn.Linear(6, 5), n=nn.ReLU(), o=nn.Linear(5, 2)), WORDS, False),
    "routed": (lambda: Of(routed, a=nn.Linear(6, 2), b=nn.Linear(6, 2)), VECTOR, True),
    "energy": (lambda: Of(energy, a=nn.Linear(6, 5), b=nn.Linear(5, 1)), VECTOR, False),
    "hook in training": (lambda: hooked(gated=True), VECTOR, True),
    "hook on the way back": (lambda: hooked(gated=False), VECTOR, True),
    "mixed on the way back": (lambda: Of(normed_gradient, a=nn.Linear(6, 5), b=nn.Linear(5, 2)), VECTOR, True),
    "in place": (lambda: Of(inplace, a=nn.Linear(6, 1), b=nn.Linear(6, 1)), VECTOR, False),
    "a name of its own": (lambda: Of(lambda m, x: m.o(m.g(x)) * m.g.random, g=Gated(), o=LINEAR()), VECTOR, False),
    "reads its weights": (
        lambda: Of(lambda m, x: m.o(x) * (1 + sum(p.sum() for p in m.parameters()) * m.training), o=nn.Linear(6, 2)),
        VECTOR,
        True,
    ),
    "head of training": (
        lambda: Of(lambda m, x: m.o(x) + (m.aux(x) if m.training else 0), o=nn.Linear(6, 2), aux=nn.Linear(6, 2)),
        VECTOR,
        False,
    ),
    "float32": (lambda: Of(float32_states, l=nn.LSTM(6, 5, batch_first=True), o=nn.Linear(5, 2)), WORDS, False),
    "frozen backbone": (
        lambda: Backbone(lambda m, x: m.o(m.back(x)), back=nn.Sequential(LINEAR(), nn.Dropout(0.5)), o=nn.Linear(2, 2)),
        VECTOR,
        False,
    ),
}  # fmt: skip


def built(make: Callable[[], nn.Module], example: Tensor) -> StackedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return StackedModel(make(), example)


def clients(model: StackedModel, shape: tuple[int, ...]) -> tuple[Params, Tensor]:
    draw = torch.Generator().manual_seed(1)
    params = {n: t + 0.1 * torch.rand(CLIENTS, *t.shape, generator=draw) for n, t in model.initial.items()}
    return params, torch.randn(CLIENTS, SIZE, *shape, generator=draw)


def alone(model: StackedModel, params: Params, x: Tensor, *, training: bool) -> tuple[Tensor, Params]:
    """The ordinary module with a client's weights as its own."""
    module = copy.deepcopy(model.module)
    module.load_state_dict({n: t.detach() for n, t in params.items()}, strict=False)
    module.train(training)
    out = module(x.clone())
    named = dict(module.named_parameters())
    grads = torch.autograd.grad(out.square().sum(), [named[n] for n in model.info.parameters], materialize_grads=True)
    return out.detach(), dict(zip(model.info.parameters, grads, strict=True))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", list(MODULES))
def test_a_client_in_a_stack_is_the_module_with_its_weights(name: str, padded: bool, training: bool) -> None:
    """Outputs and gradients, with and without padding in other clients' minibatches and its own."""
    make, shape, whole = MODULES[name]
    model = built(make, torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)))
    assert model.whole == whole
    params, x = clients(model, shape)
    real = [SIZE, 3, 4] if padded else [SIZE] * CLIENTS
    valid = torch.arange(SIZE) < torch.tensor(real).unsqueeze(1) if padded else None
    own = {n: t.clone().requires_grad_(n in model.info.parameters) for n, t in params.items()}
    out = model(own, x.clone(), valid, KEYS if training else None)
    mask = torch.ones(CLIENTS, SIZE, dtype=torch.bool) if valid is None else valid
    total = torch.where(mask.view(*mask.shape, *[1] * (out.dim() - 2)), out, 0).square().sum()
    found = torch.autograd.grad(total, [own[n] for n in model.info.parameters], materialize_grads=True)
    for c, n in enumerate(real):
        truth, grads = alone(model, {k: t[c] for k, t in params.items()}, x[c, :n], training=training)
        torch.testing.assert_close(out[c, :n], truth, rtol=1e-4, atol=1e-5)
        for grad, k in zip(found, model.info.parameters, strict=True):
            torch.testing.assert_close(grad[c], grads[k], rtol=1e-3, atol=1e-4)


def sometimes(draw: Callable[[], float]) -> Callable[[], nn.Module]:
    """Stochastic depth: a layer is left out now and then."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        if not m.training or draw() >= 0.2:
            h = h + m.b(F.relu(m.a(x)))
        out: Tensor = m.o(F.relu(h))
        return out

    return lambda: Of(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6), o=nn.Linear(6, 2))


@pytest.mark.parametrize(
    "make",
    [
        sometimes(lambda: torch.rand(1).item()),
        lambda: nn.Sequential(nn.Linear(6, 5), nn.AlphaDropout(0.01), nn.ReLU(), nn.Linear(5, 2)),
        lambda: Of(lambda m, x: m.o(x * torch.bernoulli(x[:, :1] * 0 + 0.99) if m.training else x), o=LINEAR()),
        lambda: Of(rolled, o=LINEAR()),
    ],
    ids=["depth", "alpha", "bernoulli", "roll"],
)
@pytest.mark.parametrize("seed", range(3))
def test_rare_draws_are_found_and_made_the_clients_own(make: Callable[[], nn.Module], seed: int) -> None:
    torch.manual_seed(seed)
    model = StackedModel(make(), torch.ones(2, 6))
    assert model.whole and model.random
    params, x = clients(model, VECTOR)
    state = torch.get_rng_state()
    together = model(params, x, None, KEYS)
    rows = [slice(c, c + 1) for c in range(CLIENTS)]
    each = [model({n: t[row] for n, t in params.items()}, x[row], None, KEYS[row]) for row in rows]
    torch.testing.assert_close(together, torch.cat(each))
    assert torch.equal(torch.get_rng_state(), state)


def test_what_python_draws_is_nobodys_stream() -> None:
    random.seed(0)
    module = Of(lambda m, x: m.o(x) * (random.random() if m.training else 1), o=LINEAR())
    with pytest.raises(UserError, match="the same input and random stream give different outputs each time"):
        StackedModel(module, torch.randn(2, 6))


def test_examples_that_are_all_alike_hide_nothing() -> None:
    assert StackedModel(Of(lambda m, x: m.o(x - x.mean(0)), o=nn.Linear(6, 2)), torch.zeros(2, 6)).whole
    words = Of(lambda m, x: m.o(m.e(x) + m.e(x[:1])).mean(1), e=nn.Embedding(7, 6), o=nn.Linear(6, 2))
    assert StackedModel(words, torch.full((2, 4), 6)).whole


def test_nobodys_tensors_and_generators_are_touched() -> None:
    example, state, python = torch.randn(2, 6), torch.get_rng_state(), random.getstate()
    before = example.clone()
    StackedModel(Of(lambda m, x: m.o(F.relu(x, inplace=True)), o=nn.Linear(6, 2)), example)
    StackedModel(Of(lambda m, x: m.o(x + torch.randn_like(x) * m.training), o=nn.Linear(6, 2)), example)
    assert torch.equal(example, before)
    assert random.getstate() == python
    torch.manual_seed(0)
    state = torch.get_rng_state()
    StackedModel(nn.Sequential(nn.Flatten(), nn.AlphaDropout(0.1), NoDraws()), example)
    assert torch.equal(torch.get_rng_state(), state)


class NoDraws(nn.Module):
    """A layer that is not drawn when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def test_a_block_that_two_others_share_is_one_block() -> None:
    block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    module = nn.Sequential(nn.Sequential(block), nn.Sequential(block), nn.Linear(6, 2))
    model = StackedModel(module, torch.randn(2, 6))
    params, x = clients(model, VECTOR)
    for c in range(CLIENTS):
        truth, _ = alone(model, {n: t[c] for n, t in params.items()}, x[c], training=False)
        torch.testing.assert_close(model(params, x)[c], truth)


def test_channels_without_a_batch_are_no_examples() -> None:
    """PyTorch takes two axes for one example of channels, so whole examples are dropped: one module for all of them."""
    model = StackedModel(nn.Sequential(nn.Linear(6, 5), nn.Dropout1d(0.5), nn.Linear(5, 2)), torch.randn(2, 6))
    assert model.whole and model.random


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda m, x: {"out": m.o(x)}, r"^Of gives a dict; a model must give one tensor, \[examples, \.\.\.\]$"),
        (lambda m, x: (m.o(x), x), r"^Of gives a tuple; "),
        (lambda m, x: m.o(x).mean(), r"^Of gives shape \(\) for 3 examples; a model gives one row for each$"),
        (lambda m, x: torch.cat([m.o(x)] * 2), r"^Of gives shape \(6, 2\) for 3 examples"),
        (
            lambda m, x: m.o(x + torch.randn_like(x)),
            r"^Of draws random numbers in evaluation; a model must answer alike",
        ),
    ],
)
def test_outputs_that_are_no_row_for_each_example_are_refused(forward: Callable[..., Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        StackedModel(Of(forward, o=nn.Linear(6, 2)), torch.randn(2, 6))


class Experts(nn.Module):
    """Each row goes to the expert with the largest gate; an expert without rows is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        best, out = self.gate(x).argmax(1), x.new_zeros(len(x), 2)
        for i, expert in enumerate(self.experts):
            if (rows := best == i).any():
                out[rows] = expert(x[rows])
        return out


@pytest.mark.parametrize("seed", range(6))
def test_an_expert_may_have_rows_of_one_client_only(seed: int) -> None:
    torch.manual_seed(seed)
    assert StackedModel(Experts(), torch.randn(2, 6)).execution.mode == "layer by layer"
