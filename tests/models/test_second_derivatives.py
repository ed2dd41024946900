"""Second-order MAML against a loop over clients in plain PyTorch, where a loss differentiates its own gradient."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from personafl import Federation, Source, StackedModel
from personafl.authoring import Algorithm, whole
from personafl.models import recurrent
from personafl.models.attention import attend
from tests import reference, worlds

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
