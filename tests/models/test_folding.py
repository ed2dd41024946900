"""Modules that know one client at a time, through the layers of a stack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from personafl import FedAvg, StackedModel
from personafl.core import rng
from tests import worlds

CLIENTS, SIZE, WORDS, LENGTH, WIDTH = 3, 4, 11, 6, 8
KEYS = rng.key(0, "noise", 1, torch.arange(CLIENTS))


class Placed(nn.Module):
    """A transformer over words whose places are learnt: as numbers of its own, or as a table it looks up itself."""

    def __init__(self, places: str, dropout: float) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(WORDS, WIDTH), nn.Dropout(dropout)
        self.places: Any = (
            nn.Embedding(LENGTH, WIDTH) if places == "table" else nn.Parameter(torch.randn(LENGTH, WIDTH))
        )
        self.inside = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        table = isinstance(self.places, nn.Module)
        places = self.places(torch.arange(x.shape[1], device=x.device)) if table else self.places
        out: Tensor = self.head(self.inside(self.drop(self.words(x) + places)).mean(1))
        return out


def stacked(places: str, dropout: float) -> tuple[nn.Module, StackedModel, dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    module = Placed(places, dropout)
    model = StackedModel(module, torch.randint(WORDS, (2, LENGTH))).to(torch.device("cpu"), torch.float64)
    params = {n: t + torch.randn(CLIENTS, *t.shape, dtype=t.dtype) / 10 for n, t in model.initial.items()}
    return module.double(), model, params, torch.randint(WORDS, (CLIENTS, SIZE, LENGTH))


@pytest.mark.parametrize("places", ["numbers", "table"])
def test_learnt_places_are_each_clients_own(places: str) -> None:
    """Outputs and gradients are those of the module with a client's weights."""
    module, model, params, x = stacked(places, 0.0)
    leaves = {n: t.clone().requires_grad_() for n, t in params.items()}
    out = model(leaves, x, keys=KEYS)
    grads = torch.autograd.grad(out.square().sum(), list(leaves.values()))
    for c in range(CLIENTS):
        own = {n: t[c].clone().requires_grad_() for n, t in params.items()}
        alone = functional_call(module.train(), own, (x[c],))
        torch.testing.assert_close(out[c], alone, rtol=1e-12, atol=1e-12)
        for mine, other in zip(grads, torch.autograd.grad(alone.square().sum(), list(own.values())), strict=True):
            torch.testing.assert_close(mine[c], other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("places", ["numbers", "table"])
def test_dropout_beside_learnt_places_is_by_each_clients_stream(places: str) -> None:
    """So such models run in several threads, and from recordings."""
    _, model, params, x = stacked(places, 0.4)
    assert not model.random
    before = torch.random.get_rng_state()
    trained = model(params, x, keys=KEYS)
    assert torch.equal(before, torch.random.get_rng_state())
    assert not torch.equal(trained, model(params, x))
    torch.testing.assert_close(trained, model(params, x, keys=KEYS), rtol=0, atol=0)
    for c in range(CLIENTS):
        rows = slice(c, c + 1)
        alone = model({n: t[rows] for n, t in params.items()}, x[rows], keys=KEYS[rows])
        torch.testing.assert_close(trained[rows], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("places", ["numbers", "table"])
def test_padding_is_left_out_of_a_module_that_knows_one_client(places: str) -> None:
    _, model, params, x = stacked(places, 0.4)
    valid = torch.ones(CLIENTS, SIZE, dtype=torch.bool)
    valid[1, 2:] = False
    padded = model(params, x, valid, KEYS)
    row = slice(1, 2)
    alone = model({n: t[row] for n, t in params.items()}, x[row, :2], keys=KEYS[row])
    torch.testing.assert_close(padded[row, :2], alone, rtol=1e-12, atol=1e-12)
    assert not padded[1, 2:].any()
    torch.testing.assert_close(padded[2], model(params, x, keys=KEYS)[2], rtol=0, atol=0)


class Shifted(nn.Module):
    """A bare parameter, norms with running statistics, and a sum of a wider type in place."""

    def __init__(self, *, wider: bool = False) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Linear(3, 3)
        self.shift, self.wider = nn.Parameter(torch.rand(3)), wider

    def forward(self, x: Tensor) -> Tensor:
        seen = self.conv(x)
        out = self.bn(self.conv(x.flip(2)))
        out += seen.double() if self.wider else seen
        done: Tensor = self.head(F.relu(out).mean((2, 3)) + self.shift)
        return done


def test_running_statistics_inside_are_moved() -> None:
    """Of every client's row, with others in the stack and without."""
    torch.manual_seed(0)
    model = StackedModel(Shifted(), torch.rand(2, 1, 8, 8)).to(torch.device("cpu"), torch.float64)
    params = {n: t.expand(CLIENTS, *t.shape).clone() for n, t in model.initial.items()}
    x = torch.rand(CLIENTS, SIZE, 1, 8, 8, dtype=torch.float64)
    together = {n: t.clone() for n, t in params.items()}
    model(together, x, keys=KEYS)
    for c in range(CLIENTS):
        own = {n: t[c : c + 1].clone() for n, t in params.items()}
        model(own, x[c : c + 1], keys=KEYS[c : c + 1])
        for n in model.info.buffers:
            assert not torch.equal(own[n], params[n][c : c + 1])
            torch.testing.assert_close(together[n][c : c + 1], own[n], rtol=1e-12, atol=1e-12)


def test_a_sum_in_place_keeps_its_type() -> None:
    """In float32, where the sum of a float32 and a float64 would be a float64 and the head's product fail."""
    torch.manual_seed(0)
    sim = worlds.simulation(FedAvg(), "cnn", model=Shifted(wider=True), num_rounds=2, precision="float32")
    sim.run()
    assert sim.server["head.weight"].isfinite().all()
