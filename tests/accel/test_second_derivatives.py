"""Second-order MAML against a loop over clients in plain PyTorch, where a loss differentiates its own gradient.

Then the backward passes of single functions.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from personafl import Federation, Source, StackedModel
from personafl.authoring import Algorithm, whole
from personafl.core.errors import UserError
from personafl.models import recurrent
from personafl.models.attention import attend
from tests import reference, worlds
from tests.checks import two_gradients

SIZES = (9, 4, 14)  # training rows of the clients, after a quarter has gone: 7, 3, 11
INNER = 0.3


def maml_loss(second_order: bool):
    """The loss after one gradient step on the same minibatch, as a function of the weights before it."""

    def loss(task, local, batch):
        names = list(task.model.info.parameters)
        leaves = [local.params[n] for n in names]
        grads = torch.autograd.grad(task.loss(local.params, batch).sum(), leaves, create_graph=second_order)
        adapted = {n: w - INNER * g for n, w, g in zip(names, leaves, grads, strict=True)}
        return task.loss(local.params | adapted, batch)

    return loss


@dataclass(frozen=True, kw_only=True)
class MAML(Algorithm):
    """Per-FedAvg (Fallah et al., 2020) on one minibatch."""

    evaluates: ClassVar[str] = "the meta-model"
    second_order: bool = True

    def turns(self, local, rnd):
        return [self.usual_turn(whole(self.info.parameters), loss=maml_loss(self.second_order))]


class Sequence(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.into, self.layer, self.fc = nn.Linear(3, 8), layer, nn.Linear(8, 3)

    def forward(self, x):
        out = self.layer(self.into(x))
        return self.fc((out[0] if isinstance(out, tuple) else out)[:, -1])


MODULES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), (6,)),
    "cnn": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 3)
        ),
        (1, 8, 8),
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 3)),
        (1, 8, 8),
    ),
    "lstm": (lambda: Sequence(nn.LSTM(8, 8, batch_first=True)), (5, 3)),
    "transformer": (
        lambda: Sequence(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)),
        (5, 3),
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv1d(5, 4, 2), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(), nn.Linear(8, 3)),
        (5, 3),
    ),
}


def federation(shape: tuple[int, ...]) -> Federation:
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(3, (sum(SIZES),), generator=draw)
    x = torch.randn(len(y), *shape, generator=draw) + y.view(-1, *[1] * len(shape))
    return Federation.build(Source("toy", x, y, 3), np.split(np.arange(len(y)), np.cumsum(SIZES)[:-1]), 0)


def plain_maml(module: nn.Module, fed: Federation, training, *, second_order: bool) -> dict[str, torch.Tensor]:
    """Three rounds of the same, one client and one minibatch at a time."""
    module = copy.deepcopy(module).double()
    statistics = [n for n, _ in module.named_buffers() if not n.endswith("num_batches_tracked")]
    names = [n for n, _ in module.named_parameters()]
    server = {n: t.detach().clone() for n, t in module.state_dict().items() if n in (*names, *statistics)}
    for number in range(training.num_rounds):
        sums, total = {n: torch.zeros_like(t) for n, t in server.items()}, 0
        for client in range(fed.num_clients):
            own = {n: t.clone() for n, t in server.items()}
            rows = reference.rows_of(fed, "train", client)
            order = reference.shuffled(rows, training, "batches", number, client, 0)
            for part in reference.minibatches(order, training.batch_size):
                x, y = fed.source.x[part].double(), fed.source.y[part]
                leaves = {n: own[n].requires_grad_() for n in names}
                with sdpa_kernel(SDPBackend.MATH):  # the only one of PyTorch's that has second derivatives
                    first = F.cross_entropy(functional_call(module.train(), own | leaves, (x,)), y)
                    grads = torch.autograd.grad(first, list(leaves.values()), create_graph=second_order)
                    adapted = {n: w - INNER * g for (n, w), g in zip(leaves.items(), grads, strict=True)}
                    loss = F.cross_entropy(functional_call(module, own | adapted, (x,)), y)
                    found = torch.autograd.grad(loss, list(leaves.values()))
                own |= {n: (own[n] - training.lr * g).detach() for n, g in zip(leaves, found, strict=True)}
            sums = {n: t + len(rows) * own[n].detach() for n, t in sums.items()}
            total += len(rows)
        server = {n: t / total for n, t in sums.items()}
    return server


@pytest.mark.parametrize("kind", MODULES)
def test_second_order_maml_equals_a_loop_over_clients(kind):
    make, shape = MODULES[kind]
    torch.manual_seed(0)
    module, fed = make(), federation(shape)
    training = worlds.training(num_rounds=3, join_ratio=1.0, local_epochs=1, batch_size=4)
    model = StackedModel(module, fed.source.x[:2])
    for second_order in (True, False):
        expected = plain_maml(module, fed, training, second_order=second_order)
        for chunk in (0, 1):
            sim = worlds.simulation(
                MAML(second_order=second_order), fed=fed, model=model, chunk=chunk, num_rounds=3, join_ratio=1.0,
                local_epochs=1, batch_size=4,
            )  # fmt: skip
            sim.run()
            for n, t in expected.items():
                torch.testing.assert_close(sim.server[n], t, rtol=1e-9, atol=1e-9, msg=lambda m, n=n: f"{n}: {m}")
    assert any(
        not torch.allclose(expected[n], t, rtol=1e-3)
        for n, t in plain_maml(module, fed, training, second_order=True).items()
    )


def test_the_stacked_lstm_layer_has_second_derivatives():
    torch.manual_seed(0)
    c, t, b, i, h = 2, 3, 2, 2, 3
    shapes = [(c, t, b, i), (c, 4 * h, i), (c, 4 * h, h), (c, 4 * h), (c, b, h), (c, b, h)]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradgradcheck(recurrent.LSTMLayer.apply, inputs)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_has_second_derivatives(causal):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = None if causal else torch.randn(1, 1, 3, 3, dtype=torch.float64, requires_grad=True)

    def call(q, k, v, m):
        return attend(q, k, v, m, causal=causal)

    assert torch.autograd.gradcheck(call, (*inputs, mask))
    assert torch.autograd.gradgradcheck(call, (*inputs, mask))


# The GPU's fused functions. Their modules are imported here without Triton, whose kernels are never called: a backward
# pass that must itself be differentiable consists of PyTorch's own functions. `-m gpu` compares the kernels as well.


def imported(name: str) -> ModuleType:
    """A module of `personafl.accel` by itself, with something else in Triton's place."""
    spec = importlib.util.find_spec(f"personafl.accel.{name}")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    instead = {"triton": mock.MagicMock(), "triton.language": mock.MagicMock(), spec.name: module}
    with mock.patch.dict(sys.modules, instead):
        spec.loader.exec_module(module)
    return module


kernels, norms, attention = (imported(name) for name in ("kernels", "norm_kernels", "attention_kernels"))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def assert_same_gradients(found: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def layer_of(mode: int, pad: int, biased: bool, how: str = "float32") -> Any:
    return kernels._Layer(4, 5, 3, pad, mode, biased, how)


def convolution(mode: int, pad: int, biased: bool) -> Any:
    """The fused function, with another forward pass that saves the same."""

    class Convolution(kernels.Convolution):  # type: ignore[name-defined,misc]
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: object) -> Tensor:
            layer = layer_of(mode, pad, biased)
            ctx.save_for_backward(x, None, weight, None, None, x, weight, bias)
            ctx.rest = (layer, None, x.dtype)
            return kernels._plain_convolution(layer, x, weight, bias).detach()

    return lambda x, w, b=None: Convolution.apply(x, w, b, pad, mode, "float32", x.dtype)  # type: ignore[no-untyped-call]


def grouped(x: Tensor, weight: Tensor, bias: Tensor | None, pad: int, mode: int) -> Tensor:
    """All clients' convolutions as the groups of one."""
    clients, outputs = weight.shape[:2]
    images = x.view(clients, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)
    shift = None if bias is None else bias.flatten()
    out = F.conv2d(images, weight.flatten(0, 1), shift, padding=pad, groups=clients)
    out = out.unflatten(1, (clients, outputs)).transpose(0, 1).flatten(0, 1)
    out = out.relu() if mode else out
    return F.max_pool2d(out, 2) if mode == kernels.POOL else out


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("mode", [kernels.PLAIN, kernels.RELU, kernels.POOL])
def test_a_convolution_is_each_clients_own(mode: int, pad: int, biased: bool) -> None:
    torch.manual_seed(0)
    inputs = [draw(6, 4, 7, 6), draw(2, 5, 4, 3, 3), *[draw(2, 5)] * biased]
    found = kernels._plain_convolution(layer_of(mode, pad, biased), *inputs, *[None] * (not biased))
    wanted = grouped(inputs[0], inputs[1], inputs[2] if biased else None, pad, mode)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert_same_gradients(
        two_gradients(convolution(mode, pad, biased), inputs, graph=True),
        two_gradients(lambda x, w, b=None: grouped(x, w, b, pad, mode), inputs),
    )


@pytest.mark.parametrize("how", ["tf32", "bf16"])
def test_a_convolution_that_rounds_its_inputs_refuses_second_derivatives(how: str) -> None:
    class Saved:
        saved_tensors = (torch.zeros(1), None, torch.zeros(1), None, None)
        rest = (layer_of(kernels.PLAIN, 0, False, how), (1, 1), torch.float32)

    with pytest.raises(UserError, match=f"precision='{how}': convolutions have no second derivatives"):
        kernels.Convolution.backward(Saved(), torch.zeros(1))


def test_dropout_drops_the_same_on_the_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = torch.arange(6).view(2, 3) % 2 == 0
    monkeypatch.setattr(kernels, "_dropped", lambda x, keys, p: torch.where(kept, x / (1 - p), 0))
    x = draw(2, 3)
    found = two_gradients(lambda t: kernels.dropout(t, torch.zeros(2), 0.75), [x])
    assert_same_gradients(found, two_gradients(lambda t: torch.where(kept, 4 * t, 0), [x]))


def batch_norm(then: int) -> Any:
    class BatchNorm(norms.BatchNorm):  # type: ignore[name-defined,misc]
        @staticmethod
        def forward(ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor, *rest: object) -> Tensor:
            out = norms._plain_batch_norm(x, weight, bias, eps=1e-5, relu=then == norms._RELU).detach()
            out = out if added is None else (out + added).relu()
            ctx.save_for_backward(x, weight, bias, x, *([out] if then == norms._ADDED else []))
            ctx.then, ctx.eps = then, 1e-5
            return out

    def call(x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None = None) -> Tensor:
        out: Tensor = BatchNorm.apply(x, added, weight, bias, None, None, 0.1, 1e-5, then)  # type: ignore[no-untyped-call]
        return out

    return call


def normed(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    far = x - x.mean(axes, keepdim=True)
    return far / (far.square().mean(axes, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("then", [norms._PLAIN, norms._RELU, norms._ADDED])
def test_a_batch_norm_is_by_the_statistics_of_its_batch(then: int) -> None:
    torch.manual_seed(0)
    inputs = [draw(4, 3, 5, 2), draw(3), draw(3), *[draw(4, 3, 5, 2)] * (then == norms._ADDED)]

    def by_hand(x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None = None) -> Tensor:
        out = normed(x, (0, 2, 3)) * weight.view(-1, 1, 1) + bias.view(-1, 1, 1)
        out = out if added is None else out + added
        return out.relu() if then else out

    found = norms._plain_batch_norm(*inputs[:3], eps=1e-5, relu=then == norms._RELU)
    if then != norms._ADDED:
        torch.testing.assert_close(found, by_hand(*inputs), rtol=1e-12, atol=1e-12)
    assert_same_gradients(two_gradients(batch_norm(then), inputs, graph=True), two_gradients(by_hand, inputs))


def test_a_layer_norm_has_each_clients_scale_and_shift() -> None:
    class LayerNorm(norms.LayerNorm):  # type: ignore[name-defined,misc]
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
            ctx.save_for_backward(x, weight, bias)
            ctx.eps = eps
            return norms._plain_layer_norm(x, weight, bias, eps=eps).detach()

    def by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return normed(x, (2,)) * weight.unsqueeze(1) + bias.unsqueeze(1)

    torch.manual_seed(0)
    inputs = [draw(2, 5, 4), draw(2, 4), draw(2, 4)]
    torch.testing.assert_close(norms._plain_layer_norm(*inputs, eps=1e-5), by_hand(*inputs), rtol=1e-12, atol=1e-12)
    found = two_gradients(lambda *t: LayerNorm.apply(*t, 1e-5), inputs, graph=True)  # type: ignore[no-untyped-call]
    assert_same_gradients(found, two_gradients(by_hand, inputs))


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_that_of_every_head(causal: bool) -> None:
    class ShortAttention(attention.ShortAttention):  # type: ignore[name-defined,misc]
        @staticmethod
        def forward(ctx: Any, packed: Tensor, heads: int, causal: bool, how: str) -> Tensor:
            ctx.save_for_backward(packed)
            ctx.rest = heads, causal, how
            return attention._plain_attention(packed, heads=heads, causal=causal).detach()

    def by_hand(packed: Tensor) -> Tensor:
        """Queries of both heads of 3, then keys, then values; a query may see itself and what came before."""
        heads = []
        for first in (0, 3):
            q, k, v = (packed[..., at + first : at + first + 3] for at in (0, 6, 12))
            scores = (q @ k.mT / 3**0.5).exp()
            scores = scores.tril() if causal else scores
            heads.append(scores / scores.sum(-1, keepdim=True) @ v)
        return torch.cat(heads, -1)

    torch.manual_seed(0)
    packed = draw(2, 5, 18)
    found = attention._plain_attention(packed, heads=2, causal=causal)
    torch.testing.assert_close(found, by_hand(packed), rtol=1e-12, atol=1e-12)
    assert_same_gradients(
        two_gradients(lambda t: ShortAttention.apply(t, 2, causal, "float32"), [packed], graph=True),  # type: ignore[no-untyped-call]
        two_gradients(by_hand, [packed]),
    )
