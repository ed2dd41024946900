"""LSTM layers of many clients at once against PyTorch's own, a client at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from personafl import StackedModel
from personafl.core.torch_state import products
from personafl.models import recurrent

CLIENTS, STEPS, SIZE, INPUTS, WIDTH = 3, 5, 4, 6, 7


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("clients", [CLIENTS, 1])
@pytest.mark.parametrize("steps", [STEPS, 1])
def test_a_layer_is_every_clients_own(steps: int, clients: int, biased: bool, dtype: torch.dtype, device: str) -> None:
    """States, the last of the cell, and all gradients, also of the states before."""
    with products("float32"):  # PyTorch's own would take coarser ones
        assert_every_clients_own(steps, clients, biased, dtype, device)


def assert_every_clients_own(steps: int, clients: int, biased: bool, dtype: torch.dtype, device: str) -> None:
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=draw, dtype=torch.float64) / 2).to(device, dtype).requires_grad_()

    x, hidden, cell = drawn(clients, steps, SIZE, INPUTS), drawn(clients, SIZE, WIDTH), drawn(clients, SIZE, WIDTH)
    weights = [drawn(clients, 4 * WIDTH, i) for i in (INPUTS, WIDTH)]
    biases = [drawn(clients, 4 * WIDTH) for _ in range(2 * biased)]
    bias = biases[0] + biases[1] if biased else None
    found = recurrent.lstm_layer(x, (weights[0], weights[1], bias), hidden, cell)
    layer = nn.LSTM(INPUTS, WIDTH, bias=biased).to(device, dtype)
    names = [n for n, _ in layer.named_parameters()]
    alone = []
    for c in range(clients):
        own = dict(zip(names, [t[c] for t in (*weights, *biases)], strict=True))
        out, (end, last) = functional_call(layer, own, (x[c], (hidden[c][None], cell[c][None])))
        alone.append((out, end[0], last[0]))
    truth = [torch.stack(t) for t in zip(*alone, strict=True)]
    near: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-3, "atol": 2e-5}
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b, **near)
    given, mixed = (x, hidden, cell, *weights, *biases), [torch.randn_like(t) for t in truth]
    slopes = [torch.autograd.grad(outs, given, mixed, retain_graph=True) for outs in (list(found), truth)]
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b, **near)


class Two(nn.Module):
    """Two layers, there and back, with states before that are not zero, and both kinds of outputs used."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.batch_first = bool(options.get("batch_first", False))
        self.lstm = nn.LSTM(INPUTS, WIDTH, num_layers=2, **options)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        ways = 2 if self.lstm.bidirectional else 1
        first = x.new_ones(2 * ways, len(x), WIDTH) / 3
        out, (hidden, cell) = self.lstm(x if self.batch_first else x.transpose(0, 1), (first, first / 2))
        last = out[:, -1] if self.batch_first else out[-1]
        done: Tensor = self.head(last[:, -WIDTH:] + hidden[0] + cell[-1])
        return done


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_an_lstm_module_in_a_stack_is_itself(first: bool, both: bool, dropout: float) -> None:
    """In evaluation exactly the module; in training a client has the same numbers with others beside it and without."""
    torch.manual_seed(0)
    module = Two(batch_first=first, bidirectional=both, dropout=dropout)
    x = torch.randn(CLIENTS, SIZE, STEPS, INPUTS, dtype=torch.float64)
    model = StackedModel(module, torch.randn(2, STEPS, INPUTS)).to(torch.device("cpu"), torch.float64)
    assert not model.whole and model.pads and not model.random
    params = {n: t + torch.randn(CLIENTS, *t.shape, dtype=t.dtype) / 10 for n, t in model.initial.items()}
    module = module.double().eval()
    for c in range(CLIENTS):
        own = {n: t[c] for n, t in params.items()}
        torch.testing.assert_close(model(params, x)[c], functional_call(module, own, (x[c],)), rtol=1e-12, atol=1e-12)
    keys = torch.arange(CLIENTS)
    trained = model(params, x, keys=keys)
    assert torch.equal(trained, model(params, x)) == (dropout == 0)
    for c in range(CLIENTS):
        rows = slice(c, c + 1)
        alone = model({n: t[rows] for n, t in params.items()}, x[rows], keys=keys[rows])
        torch.testing.assert_close(trained[rows], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_packed_sequences_and_projections_run_per_client() -> None:
    """What the stacked form does not know is left to the module itself."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(INPUTS, WIDTH, batch_first=True)
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.full((len(x),), x.shape[1])
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            done: Tensor = self.head(self.lstm(packed)[1][0][-1])
            return done

    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(INPUTS, WIDTH, batch_first=True, proj_size=4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            done: Tensor = self.head(self.lstm(x)[0][:, -1])
            return done

    example = torch.randn(2, STEPS, INPUTS)
    assert StackedModel(Packed(), example).whole
    model = StackedModel(Projected(), example)
    assert not model.whole and not model.pads
