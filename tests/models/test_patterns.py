"""Patterns of layers in modules anybody may have written."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from personafl.core import rng
from personafl.core.criteria import CRITERION_GRADIENTS, cross_entropy
from personafl.core.types import Batch, Params
from personafl.models import CNN, MLP, StackedModel
from personafl.models.layers import StackedConv

CLIENTS, SIZE, IMAGE = 3, 4, (2, 8, 8)
CPU = torch.device("cpu")
KEYS = rng.key(0, "noise", 1, torch.arange(CLIENTS))


class Of(nn.Module):
    """Layers by name, and a function of them and of the input."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.does = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x)


def conv() -> nn.Conv2d:
    return nn.Conv2d(2, 3, 3, padding=1)


def block(*behind: nn.Module) -> nn.Sequential:
    """A convolution and what follows it."""
    return nn.Sequential(conv(), *behind, nn.Flatten(), nn.LazyLinear(2))


def chain(*between: nn.Module, outputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), *between, nn.Linear(4, outputs))


def own(forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> Of:
    """A convolution, what `forward` makes of it, and a linear layer behind that."""
    return Of(lambda m, x: m.fc(forward(m, x).flatten(1)), conv=conv(), **layers, fc=nn.LazyLinear(2))


def two(forward: Callable[[Any, Tensor], Tensor], width: int = 4) -> Of:
    return Of(forward, a=nn.Linear(5, width), b=nn.Linear(width, 2))


def stacked(module: nn.Module, shape: tuple[int, ...]) -> StackedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        example = torch.rand(2, *shape)
        with torch.no_grad():
            module(example)  # lazy layers learn their size
        return StackedModel(module, example).to(CPU, torch.float64)


def blocks(module: nn.Module, shape: tuple[int, ...], *, training: bool = True) -> list[str]:
    """What was found: what follows each convolution and norm, and how many linear layers are in a row."""
    return blocks_of(stacked(module, shape), training=training)


def blocks_of(model: StackedModel, *, training: bool = True) -> list[str]:
    assert not model.whole
    if model._fused is None:
        return []
    forward = model._fused.training if training else model._fused.evaluation
    source = "" if forward is None else inspect.getsource(forward)
    found = []
    for name, given in re.findall(r"layers_(conv_relu|norm_relu|linears)\((.*?)\);", source):
        if name == "conv_relu":
            words = re.findall(r"'(\w+)'", given)
            found.append(" ".join(("conv", *words, *["inner"] * ("into" in given))))
        elif name == "norm_relu":
            found.append("sum with norm, relu" if "added" in given else "norm relu")
        else:
            found.append(f"{given.count(',')} linear")
    return found


def clients(model: StackedModel, shape: tuple[int, ...]) -> tuple[Params, Tensor]:
    draw = torch.Generator().manual_seed(1)
    noise = {n: torch.randn(CLIENTS, *t.shape, generator=draw, dtype=torch.float64) for n, t in model.initial.items()}
    x = torch.randn(CLIENTS, SIZE, *shape, generator=draw, dtype=torch.float64)
    return {n: t + 0.1 * noise[n] for n, t in model.initial.items()}, x


def differentiated(model: StackedModel, params: Params, x: Tensor, keys: Tensor | None) -> list[Tensor]:
    """Outputs, then gradients of all parameters."""
    leaves = {n: t.clone().requires_grad_() for n, t in params.items()}
    out = model(leaves, x, None, keys)
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), list(leaves.values()), materialize_grads=True)]


RELUS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "F.relu": lambda m, x: F.relu(x),
    "F.relu in place": lambda m, x: F.relu(x, inplace=True),
    "F.relu_": lambda m, x: F.relu_(x),
    "torch.relu": lambda m, x: torch.relu(x),
    "torch.relu_": lambda m, x: torch.relu_(x),
    "method": lambda m, x: x.relu(),
    "method in place": lambda m, x: x.relu_(),
    "module": lambda m, x: m.act(x),
    "module in place": lambda m, x: m.act_(x),
}


@pytest.mark.parametrize("relu", RELUS.values(), ids=RELUS)
def test_every_way_to_write_relu_is_seen(relu: Callable[[Any, Tensor], Tensor]) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.max_pool2d(relu(m, m.conv(x)), 2).flatten(1)
        return m.b(relu(m, m.a(x)))  # type: ignore[no-any-return]

    layers = {"conv": conv(), "a": nn.Linear(48, 4), "b": nn.Linear(4, 2)}
    module = Of(forward, **layers, act=nn.ReLU(), act_=nn.ReLU(inplace=True))
    assert blocks(module, IMAGE) == ["conv relu pool", "2 linear"]


POOLS: dict[str, tuple[nn.Module, bool]] = {
    "2": (nn.MaxPool2d(2), True),
    "2, 2": (nn.MaxPool2d(2, 2), True),
    "(2, 2)": (nn.MaxPool2d((2, 2), stride=(2, 2)), True),
    "F": (Of(lambda m, x: F.max_pool2d(x, 2)), True),
    "F, keywords": (Of(lambda m, x: F.max_pool2d(x, kernel_size=(2, 2), stride=2)), True),
    "3": (nn.MaxPool2d(3), False),
    "(2, 1)": (nn.MaxPool2d((2, 1)), False),
    "stride 1": (nn.MaxPool2d(2, 1), False),
    "padding": (nn.MaxPool2d(2, padding=1), False),
    "dilation": (nn.MaxPool2d(2, dilation=2), False),
    "ceil": (nn.MaxPool2d(2, ceil_mode=True), False),
    "F, 3": (Of(lambda m, x: F.max_pool2d(x, 3)), False),
    "F, padding": (Of(lambda m, x: F.max_pool2d(x, 2, 2, 1)), False),
    "indices": (Of(lambda m, x: F.max_pool2d(x, 2, return_indices=True)[0]), False),
    "average": (nn.AvgPool2d(2), False),
    "adaptive": (nn.AdaptiveMaxPool2d(4), False),
}


@pytest.mark.parametrize(("pool", "known"), POOLS.values(), ids=POOLS)
def test_only_pooling_of_two_by_two_is_part_of_a_block(pool: nn.Module, known: bool) -> None:
    assert blocks(block(nn.ReLU(), pool), IMAGE) == ["conv relu pool" if known else "conv relu"]
    assert blocks(block(pool, nn.ReLU()), IMAGE) == (["conv pool relu"] if known else [])


@pytest.mark.parametrize(
    "act", [nn.ReLU6(), nn.LeakyReLU(), nn.GELU(), nn.Sequential(nn.Tanh(), nn.ReLU()), nn.Hardtanh(0, 1)], ids=str
)
def test_other_activations_are_no_pattern(act: nn.Module) -> None:
    assert blocks(block(act, nn.MaxPool2d(2)), IMAGE) == []
    assert blocks(chain(act), (5,)) == []


def test_longer_modules_have_several_blocks() -> None:
    convs = [conv(), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3, stride=2), nn.ReLU()]
    ends = [nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Dropout(0.5), chain(nn.ReLU())]
    module = nn.Sequential(*convs, nn.Sequential(*ends))
    assert blocks(module, IMAGE) == ["conv relu pool inner", "conv relu", "2 linear", "2 linear"]
    assert blocks(block(nn.MaxPool2d(2), nn.MaxPool2d(2)), IMAGE) == []
    assert blocks(block(nn.ReLU(), nn.ReLU()), IMAGE) == ["conv relu"]
    assert blocks(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (5,)) == ["2 linear"]


def test_the_networks_of_the_registry_are_found_as_those_of_anybody() -> None:
    assert blocks(MLP(5, 4, 4, 2), (5,)) == ["3 linear"]
    assert blocks(CNN(IMAGE, (3, 4), (5,), 2, 3, 1), IMAGE) == ["conv relu pool inner", "conv relu pool", "2 linear"]
    mixed = CNN(IMAGE, (3, 4), (5,), 2, 3, 1, pooled=(False, True), dropout=(0.5,), map_dropout=0.5)
    assert blocks(mixed, IMAGE) == ["conv relu inner", "conv relu", "2 linear"]
    assert blocks(CNN(IMAGE, (3, 4), (5,), 2, 3, 1, activation=F.leaky_relu), IMAGE) == []


def doubled(m: Any, x: Tensor) -> Tensor:
    h = m.conv(x)
    return F.relu(h) + h  # type: ignore[no-any-return]


def seen_before_pooling(m: Any, x: Tensor) -> Tensor:
    h = F.relu(m.conv(x))
    return F.max_pool2d(h, 2) + F.avg_pool2d(h, 2)


def changed_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    F.relu_(h)
    return m.b(h)  # type: ignore[no-any-return]


def looked_at(m: Any, x: Tensor) -> Tensor:
    h = F.relu(m.a(x))
    return m.b(h) + h.sum(1, keepdim=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "shape", "found"),
    [
        (own(doubled), IMAGE, []),
        (own(seen_before_pooling), IMAGE, ["conv relu"]),
        (two(changed_in_place), (5,), []),
        (two(looked_at), (5,), []),
    ],
)
def test_what_is_used_elsewhere_too_is_not_taken_away(module: nn.Module, shape: tuple[int, ...], found: Any) -> None:
    assert blocks(module, shape) == found


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inside, self.fc = conv(), nn.Conv2d(3, 3, 3, padding=1), nn.Linear(192, 2)
        self.register_buffer("shift", torch.rand(3))

    def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
        x = F.relu(self.stem(x)) if scale is None else x
        x = F.relu(self.inside(x)) + x + self.get_buffer("shift").view(1, -1, 1, 1)
        out: Tensor = self.fc(x.view(x.shape[0], -1))
        return out


def beside_norm(forward: Callable[[Any, Tensor, Tensor], Tensor]) -> Of:
    """A batch norm of a convolution, what `forward` makes of it and of another convolution, and a linear layer."""
    layers = {"conv": conv(), "bn": nn.BatchNorm2d(3), "short": conv(), "bns": nn.BatchNorm2d(3)}
    return Of(lambda m, x: m.fc(forward(m, m.conv(x), m.short(x)).flatten(1)), **layers, fc=nn.LazyLinear(2))


def plus_equals(m: Any, x: Tensor, y: Tensor) -> Tensor:
    out = m.bn(x)
    out += y
    return F.relu_(out)


def changed_behind(m: Any, x: Tensor, y: Tensor) -> Tensor:
    out = m.bn(x) + y
    return F.relu(out) + y.mul_(2.0)


def changed_between(m: Any, x: Tensor, y: Tensor) -> Tensor:
    out = m.bn(x)
    y.mul_(2.0)
    return F.relu(out + y)


def changed_before_relu(m: Any, x: Tensor, y: Tensor) -> Tensor:
    out = m.bn(x) + y
    y.mul_(2.0)
    return F.relu(out) + y


def normed_between(m: Any, x: Tensor, y: Tensor) -> Tensor:
    out = m.bn(x)
    return F.relu(out + m.bn(y + 3))


def other_changed(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.relu(y.add_(m.bn(x))) + y


def other_changed_beside_block(m: Any, x: Tensor, y: Tensor) -> Tensor:
    twice = y * 2
    return F.relu(twice.add_(m.bn(y.neg()))) + twice + F.relu(x)


def also_shown(m: Any, x: Tensor, y: Tensor) -> Tensor:
    out = m.bn(x)
    return F.relu(out + y) + out  # type: ignore[no-any-return]


BESIDE: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], list[str]]] = {
    "sum": (lambda m, x, y: F.relu(m.bn(x) + y), ["sum with norm, relu"]),
    "sum, the other first": (lambda m, x, y: (y + m.bn(x)).relu(), ["sum with norm, relu"]),
    "sum, torch.add": (lambda m, x, y: torch.relu(torch.add(y, m.bn(x))), ["sum with norm, relu"]),
    "sum, method": (lambda m, x, y: m.bn(x).add(y).relu_(), ["sum with norm, relu"]),
    "sum, in place": (plus_equals, ["sum with norm, relu"]),
    "sum of two norms": (lambda m, x, y: F.relu(m.bn(x) + m.bns(y)), ["sum with norm, relu"]),
    "sum that broadcasts": (lambda m, x, y: F.relu(m.bn(x) + y.mean(1, keepdim=True)), ["sum with norm, relu"]),
    "sum, changed behind it": (changed_behind, ["sum with norm, relu"]),
    "sum, changed between": (changed_between, ["sum with norm, relu"]),
    "sum, changed before the relu": (changed_before_relu, ["sum with norm, relu"]),
    "sum with a size": (lambda m, x, y: F.relu(m.bn(x.flip(3)) + x.shape[1]) + y, ["sum with norm, relu"]),
    "sum of a norm and itself": (normed_between, []),
    "sum with more": (lambda m, x, y: F.relu(torch.add(m.bn(x), y, alpha=2)), []),
    "sum with a number": (lambda m, x, y: F.relu(m.bn(x) + 1.0) + y, []),
    "sum in the other": (other_changed, []),
    "sum in the other, beside a block": (other_changed_beside_block, ["conv relu"]),
    "sum with itself": (lambda m, x, y: F.relu(m.bn(x) + x) + y, []),
    "norm that is shown": (also_shown, []),
    "norm of a sum": (lambda m, x, y: F.relu(m.bn(x + y)), ["norm relu"]),
}


def frozen_bias() -> nn.Linear:
    layer = nn.Linear(5, 4)
    layer.bias.requires_grad_(False)
    return layer


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "cnn": (
        lambda: nn.Sequential(block(nn.ReLU(), nn.MaxPool2d(2)), nn.ReLU(), nn.Linear(2, 2)),
        IMAGE,
        ["conv relu pool", "2 linear"],
    ),
    "pooling first": (lambda: block(nn.MaxPool2d(2), nn.ReLU(inplace=True)), IMAGE, ["conv pool relu"]),
    "linear": (lambda: chain(nn.ReLU(inplace=True)), (5,), ["2 linear"]),
    "sequences": (lambda: chain(nn.ReLU()), (6, 5), ["2 linear"]),
    "frozen bias": (lambda: nn.Sequential(frozen_bias(), nn.ReLU(), nn.Linear(4, 2)), (5,), ["2 linear"]),
    "no bias": (lambda: nn.Sequential(nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)), (5,), ["2 linear"]),
    "dropout": (lambda: nn.Sequential(nn.Dropout(0.5), *chain(nn.ReLU()), nn.Dropout(0.2)), (5,), ["2 linear"]),
    "residual": (Residual, IMAGE, ["conv relu", "conv relu"]),
    "norms": (
        lambda: nn.Sequential(conv(), nn.ReLU(), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(192, 2)),
        IMAGE,
        ["conv relu"],
    ),
    "norm, then relu": (lambda: block(nn.BatchNorm2d(3), nn.ReLU(inplace=True)), IMAGE, ["norm relu"]),
    "norm of features": (lambda: chain(nn.BatchNorm1d(4), nn.ReLU()), (5,), ["norm relu"]),
    **{n: (partial(beside_norm, f), IMAGE, found) for n, (f, found) in BESIDE.items()},
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("make", "shape", "found"), MODULES.values(), ids=MODULES)
def test_outputs_and_gradients_are_those_without_patterns(
    make: Callable[[], nn.Module], shape: tuple[int, ...], found: list[str], training: bool
) -> None:
    model = stacked(make(), shape)
    assert blocks_of(model) == found
    params, x = clients(model, shape)
    for n in model.info.buffers:
        params[n] = model.initial[n].expand(CLIENTS, *model.initial[n].shape).clone()
    trained = {n: t for n, t in params.items() if n not in model.info.buffers}

    def run() -> list[Tensor]:
        statistics = {n: params[n].clone() for n in model.info.buffers}
        leaves = {n: t.clone().requires_grad_() for n, t in trained.items()}
        out = model(leaves | statistics, x.clone(), None, KEYS if training else None)
        weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
        grads = torch.autograd.grad((out * weights).sum(), list(leaves.values()), materialize_grads=True)
        return [out.detach(), *statistics.values(), *grads]

    fused = run()
    model._fused = None
    for a, b in zip(fused, run(), strict=True):  # the same operations, in the same order
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_a_module_of_ones_own_has_the_numbers_of_the_registrys() -> None:
    """In float32, to the last bit."""
    torch.manual_seed(0)
    zoo = CNN(IMAGE, (3, 4), (5,), 2, 3, 1)
    pairs = [("convs.0", "0"), ("convs.1", "3"), ("fcs.0", "7"), ("head", "9")]
    convs = [conv(), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    user = nn.Sequential(*convs, nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 2))
    user.load_state_dict({f"{b}.{n}": getattr(zoo.get_submodule(a), n) for a, b in pairs for n in ("weight", "bias")})
    x = torch.rand(CLIENTS, SIZE, *IMAGE)
    found = []
    for module in (zoo, user):
        model = StackedModel(module, x[0])
        params = {n: t.expand(CLIENTS, *t.shape) for n, t in model.initial.items()}
        found.append(differentiated(model, params, x, KEYS))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# What enters the head, and gradients by hand


@pytest.mark.parametrize("training", [True, False])
def test_what_enters_a_head_is_seen_inside_a_run(training: bool) -> None:
    model = stacked(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), (5,))
    assert blocks_of(model) == ["3 linear"]
    assert (model.head_name, model.info.features) == ("4", 4)
    params, x = clients(model, (5,))
    keys = KEYS if training else None
    z, out = model.features(params, x, keys=keys)
    assert torch.equal(out, model(params, x, keys=keys)) and (z >= 0).all()
    torch.testing.assert_close(out, z @ params["4.weight"].mT + params["4.bias"].unsqueeze(1), rtol=1e-12, atol=1e-12)
    nothing, changed = model.features(params, x, keys=keys, change=torch.zeros_like)
    assert torch.equal(nothing, z)
    torch.testing.assert_close(changed, params["4.bias"].unsqueeze(1).expand_as(changed))


def test_a_head_may_be_a_convolution_of_a_block() -> None:
    module = nn.Sequential(conv(), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 2))
    model = StackedModel(module, torch.rand(2, *IMAGE), head="2.*").to(CPU, torch.float64)
    assert blocks_of(model) == ["conv relu inner", "conv relu"]
    params, x = clients(model, IMAGE)
    z, out = model.features(params, x)
    assert torch.equal(out, model(params, x)) and z.shape == (CLIENTS, SIZE, 3 * 8 * 8)
    seen, changed = model.features(params, x, change=torch.zeros_like)
    assert torch.equal(seen, z) and not torch.allclose(changed, out)


def test_a_block_goes_to_a_kernel_unless_somebody_looks_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would be asked for: pooling, and an output of lower precision where only kernels read it."""
    asked: list[tuple[bool, bool]] = []

    def with_relu(self: StackedConv, x: Tensor, *, pooled: bool, inner: bool) -> None:
        asked.append((pooled, inner))

    without = nn.Conv2d(4, 2, 3, stride=2)  # no kernel has strides
    module = nn.Sequential(conv(), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.ReLU(), without, nn.ReLU())
    model = stacked(nn.Sequential(module, nn.Flatten(), nn.Linear(2, 2)), IMAGE)
    monkeypatch.setattr(StackedConv, "with_relu", with_relu)
    monkeypatch.setattr(StackedConv, "in_one_kernel", lambda m: m.original.stride == (1, 1) and not m.watched)
    params, x = clients(model, IMAGE)
    model(params, x)
    assert asked == [(False, True), (True, False), (False, False)]
    asked.clear()
    second = model._folded.get_submodule("0.2")
    second.register_forward_pre_hook(lambda *_: None)
    model(params, x)
    assert asked == [(False, False), (True, False), (False, False)]


def by_hand(model: StackedModel, names: list[str], shape: tuple[int, ...]) -> tuple[Any, Params, Batch]:
    params, x = clients(model, shape)
    y = torch.randint(2, (CLIENTS, SIZE), generator=torch.Generator().manual_seed(0))
    batch = Batch(x, y, torch.ones(CLIENTS, SIZE, dtype=torch.bool), torch.full((CLIENTS,), SIZE), KEYS)
    return model.closed_form_gradients(params, names, batch, CRITERION_GRADIENTS[cross_entropy]), params, batch


@pytest.mark.parametrize("inplace", [True, False])
def test_gradients_are_taken_by_hand_in_a_module_of_ones_own(inplace: bool) -> None:
    model = stacked(nn.Sequential(nn.Flatten(), *chain(nn.ReLU(inplace))), (5,))
    found, params, batch = by_hand(model, list(model.info.parameters), (5,))
    assert found is not None
    leaves = {n: t.clone().requires_grad_() for n, t in params.items()}
    out = model(leaves, batch.x, batch.valid, batch.keys)
    losses = F.cross_entropy(out.flatten(0, 1), batch.y.flatten(), reduction="none").view(CLIENTS, SIZE).mean(1)
    torch.testing.assert_close(found[0], losses.detach(), rtol=1e-12, atol=1e-12)
    for n, g in zip(leaves, torch.autograd.grad(losses.sum(), list(leaves.values())), strict=True):
        torch.testing.assert_close(found[1][n], g, rtol=1e-12, atol=1e-13)


def test_a_layer_that_is_used_twice_is_no_run_of_two() -> None:
    tied = Of(lambda m, x: m.fc(F.relu(m.fc(x))), fc=nn.Linear(3, 3))
    model = stacked(tied, (3,))
    assert blocks_of(model) == [] and by_hand(model, ["fc.weight"], (3,))[0] is None
    within = Of(lambda m, x: m.b(F.relu(m.a(F.relu(m.b(F.relu(m.a(x))))))), a=nn.Linear(3, 2), b=nn.Linear(2, 3))
    model = stacked(within, (3,))
    assert blocks_of(model) == ["2 linear", "2 linear"] and by_hand(model, ["b.weight"], (3,))[0] is None
    params, x = clients(model, (3,))
    fused = differentiated(model, params, x, KEYS)
    model._fused = None
    for a, b in zip(fused, differentiated(model, params, x, KEYS), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# Modes


class InTraining(nn.Module):
    """Another activation in evaluation, and functional dropout that drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(F.dropout(x, 0.0, self.training))
        out: Tensor = self.b(F.relu(x) if self.training else x.sigmoid())
        return out


def test_each_mode_has_a_recording_of_its_own() -> None:
    model = stacked(InTraining(), (5,))
    assert (blocks_of(model, training=True), blocks_of(model, training=False)) == (["2 linear"], [])
    params, x = clients(model, (5,))
    a, b = ((params[f"{n}.weight"].mT, params[f"{n}.bias"].unsqueeze(1)) for n in "ab")
    for _ in range(2):
        for keys, act in ((KEYS, torch.relu), (None, torch.sigmoid)):
            torch.testing.assert_close(model(params, x, keys=keys), act(x @ a[0] + a[1]) @ b[0] + b[1])


def test_dropout_is_that_of_each_client_and_none_in_evaluation() -> None:
    model = stacked(nn.Sequential(nn.Dropout(0.5), *chain(nn.ReLU(), outputs=3)), (5,))
    assert blocks_of(model) == blocks_of(model, training=False) == ["2 linear"]
    params, x = clients(model, (5,))
    trained = model(params, x, keys=KEYS)
    for c in range(CLIENTS):
        row = slice(c, c + 1)
        alone = model({n: t[row] for n, t in params.items()}, x[row], keys=KEYS[row])
        torch.testing.assert_close(trained[row], alone, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(trained, model(params, x))
    assert torch.equal(model(params, x), model(params, x))


@pytest.mark.parametrize(
    "drop",
    [
        lambda x, on: F.dropout(x, 0.5, on),
        lambda x, on: F.dropout(x, training=on),
        lambda x, on: torch.dropout(x, 0.5, on),
        lambda x, on: torch.dropout(x, p=0.5, train=on),
        lambda x, on: F.dropout(x, p=0.5) if on else x,
    ],
)
def test_functional_dropout_is_that_of_the_module(drop: Callable[[Tensor, bool], Tensor]) -> None:
    """The same draws, since both are the first of a step; none in evaluation, and none of PyTorch's generator."""
    module = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    own = Of(lambda m, x: m.b(drop(m.a(x), m.training)), a=module[0], b=module[2])
    ours, theirs = stacked(module, (5,)), stacked(own, (5,))
    assert not theirs.whole and not theirs.random and theirs.pads
    params, x = clients(theirs, (5,))
    renamed = dict(zip(("0.weight", "0.bias", "2.weight", "2.bias"), params.values(), strict=True))
    state = torch.get_rng_state()
    for keys in (KEYS, None):
        assert torch.equal(theirs(params, x, keys=keys), ours(renamed, x, keys=keys))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(theirs(params, x, keys=KEYS), theirs(params, x))


def test_dropout_of_whole_channels_in_a_forward() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(27, 2))
    own = Of(lambda m, x: m.b(F.dropout2d(m.a(x), 0.5, m.training).flatten(1)), a=module[0], b=module[3])
    ours, theirs = stacked(module, (2, 5, 5)), stacked(own, (2, 5, 5))
    params, x = clients(theirs, (2, 5, 5))
    renamed = dict(zip(("0.weight", "0.bias", "3.weight", "3.bias"), params.values(), strict=True))
    assert torch.equal(theirs(params, x, keys=KEYS), ours(renamed, x, keys=KEYS))


def test_dropout_in_place_or_across_examples_is_left_to_the_module() -> None:
    """In place, others may see what was dropped; with examples on another axis, clients would share draws."""
    layers = {"a": nn.Linear(5, 4), "b": nn.Linear(4, 2)}
    inplace = Of(lambda m, x: m.b(F.dropout(m.a(x), 0.5, m.training, inplace=True)), **layers)
    across = Of(lambda m, x: m.b(F.dropout(m.a(x).t(), 0.5, m.training).t()), **layers)
    for module in (inplace, across):
        assert stacked(module, (5,)).whole and stacked(module, (5,)).random


# Copies, devices and what a module holds


class Normalised(nn.Module):
    """Buffers, a constant that is no buffer, and what is computed from them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 2)
        self.register_buffer("mean", torch.rand(5))
        self.register_buffer("std", torch.rand(5) + 1)
        self.factor = 0.5

    def forward(self, x: Tensor) -> Tensor:
        mean, std = self.get_buffer("mean"), self.std
        out: Tensor = self.b(F.relu(self.a((x - mean.view(1, -1)) / std.clamp(min=0.1) * self.factor)))
        return out


def test_buffers_are_moved_and_shared_by_those_who_borrow() -> None:
    module = Normalised()
    model = StackedModel(module, torch.rand(2, 5))
    assert blocks_of(model) == ["2 linear"]
    for dtype in (torch.float64, torch.float32):
        model.to(CPU, dtype)
        params = {n: t[None] for n, t in model.initial.items()}
        x = torch.rand(1, SIZE, 5, dtype=dtype)
        torch.testing.assert_close(model(params, x)[0], module.to(dtype)(x[0]))
    with model.borrowed() as twin:
        assert twin._fused is not None and twin._folded is not model._folded
        assert twin._folded.get_buffer("mean") is model._folded.get_buffer("mean")
        model._folded.get_buffer("mean").add_(1)
        assert torch.equal(twin(params, x), model(params, x))
        assert not torch.allclose(twin(params, x)[0], module(x[0]))
    other = model.copy()
    other._folded.get_buffer("mean").add_(1)
    assert not torch.allclose(other(params, x), model(params, x))


def test_a_copy_calls_its_own_layers() -> None:
    model = stacked(chain(nn.ReLU()), (5,))
    twin = model.copy()
    params, x = clients(model, (5,))
    expected = model(params, x)
    model._folded.get_submodule("2").register_forward_pre_hook(lambda *_: pytest.fail("the layer of another"))
    assert torch.equal(twin(params, x), expected)
    z, _ = twin.features(params, x)
    assert z.shape == (CLIENTS, SIZE, 4)


# What cannot be recorded, or not faithfully


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -grad


def without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = F.relu(m.a(x))
    return m.b(F.relu(m.c(x)))  # type: ignore[no-any-return]


def in_lower_precision(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=x.dtype != torch.float64):  # not while it is checked
        return m.b(F.relu(m.c(F.relu(m.a(x)))))  # type: ignore[no-any-return]


def remembered(m: Any, x: Tensor) -> Tensor:
    m.last = F.relu(m.a(x))
    return m.b(F.relu(m.c(m.last)))  # type: ignore[no-any-return]


def listed(m: Any, x: Tensor) -> Tensor:
    m.seen[:] = [x]
    return m.b(F.relu(m.c(F.relu(m.a(x)))))  # type: ignore[no-any-return]


class NotATensor(Of):
    seen: list[Tensor]

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(forward, a=nn.Linear(5, 4), c=nn.Linear(4, 4), b=nn.Linear(4, 2))
        self.seen = []


UNRECORDED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "data": lambda m, x: m.b(F.relu(m.c(F.relu(m.a(x if x.dim() == 2 else x.flatten(1)))))),
    "length": lambda m, x: m.b(F.relu(m.c(F.relu(m.a(x))))) * (len(x) > 0),
    "constant": lambda m, x: m.b(F.relu(m.c(F.relu(m.a(x + torch.ones(5)))))),
    "made": lambda m, x: m.b(F.relu(m.c(F.relu(m.a(x * torch.tensor(2.0)))))),
    "dtype": lambda m, x: m.b(F.relu(m.c(F.relu(m.a(x.to(next(m.parameters()).dtype)))))),
    "device": lambda m, x: m.b(F.relu(m.c(F.relu(m.a(x.to(next(m.parameters()).device)))))),
    "autograd function": lambda m, x: m.b(F.relu(m.c(Reversed.apply(F.relu(m.a(x)))))),
    "no_grad": without_gradient,
    "autocast": in_lower_precision,
    "attribute": remembered,
    "list": listed,
    "a bad branch": lambda m, x: m.b(F.relu(m.c(F.relu(m.a(x if isinstance(x, Tensor) else x + 1))))),
}


@pytest.mark.parametrize("forward", UNRECORDED.values(), ids=UNRECORDED)
def test_what_cannot_be_recorded_faithfully_runs_as_it_is(forward: Callable[[Any, Tensor], Tensor]) -> None:
    module = NotATensor(forward)
    model = stacked(module, (5,))
    assert model._fused is None and not model.whole
    params, x = clients(model, (5,))
    for c, out in enumerate(model(params, x)):
        alone = model.client({n: t[c] for n, t in params.items()})
        torch.testing.assert_close(out, alone(x[c]), rtol=1e-12, atol=1e-12)


def test_hooks_of_ones_own_are_kept() -> None:
    module = chain(nn.ReLU())
    module[1].register_forward_hook(lambda _, __, out: 2 * out)
    model = stacked(module, (5,))
    assert model._fused is None and model.execution.mode == "client by client"
    params, x = clients(model, (5,))
    for c, out in enumerate(model(params, x)):
        torch.testing.assert_close(out, model.client({n: t[c] for n, t in params.items()})(x[c]))


def test_further_arguments_have_their_defaults() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = chain(nn.ReLU())

        def forward(self, x: Tensor, mask: Tensor | None = None, *rest: Any, **named: Any) -> Tensor:
            out: Tensor = self.net(x if mask is None else x * mask)
            return out

    assert blocks(Masked(), (5,)) == ["2 linear"]


def test_modules_of_other_threads_go_on_while_one_is_recorded() -> None:
    """A recording changes `nn.Module` for the whole process; calls of other threads must not end up in it."""
    entered, done = threading.Event(), threading.Event()
    other, seen = chain(nn.ReLU()), []

    def work() -> None:
        entered.wait(10)
        seen.append(other(torch.ones(1, 5)))
        done.set()

    def forward(m: Any, x: Any) -> Tensor:
        if isinstance(x, fx.Proxy):  # it is being recorded
            entered.set()
            assert done.wait(10)
        return m.b(F.relu(m.a(x)))  # type: ignore[no-any-return]

    thread = threading.Thread(target=work)
    thread.start()
    assert blocks(two(forward), (5,)) == ["2 linear"]
    thread.join()
    assert torch.equal(seen[0], other(torch.ones(1, 5)))
