"""Every module of `zoo.py` against a sequential PyTorch loop, in float64.

FedAvg with fine-tuning at the end: three rounds of five clients of different sizes, with momentum and weight decay. The
loop knows nothing of stacks: it copies the module, trains each copy with `torch.optim.SGD`, and takes the weighted
mean. Only the order of the minibatches is the package's, from `tests/reference.py`.
"""

from __future__ import annotations

import copy
import re
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl import Evaluation, FedAvgFT, Federation, Machine, Simulation, Source, StackedModel, Training, UserError
from tests import reference
from tests.models.zoo import CLASSES, VOCABULARY, ZOO, Entry, Inputs

SIZES = (7, 12, 5, 16, 9)  # training rows: last minibatches of 2, 2, 5, 1 and 4
PAIRS = (7, 12, 5, 14, 9)  # last minibatches of 2, 2, 5, 4 and 4
TESTED = 3  # rows that each client predicts in the end
CLIENTS = torch.arange(len(SIZES))
TRAINING = Training(
    num_rounds=3,
    join_ratio=1.0,
    local_epochs=1,
    batch_size=5,
    lr=0.05,
    lr_decay=0.9,
    momentum=0.6,
    weight_decay=0.05,
    precision="float64",
)
LOSSES = {
    "classification": F.cross_entropy,
    "regression": lambda out, y: F.mse_loss(out.view_as(y), y),
    "multilabel": lambda out, y: F.binary_cross_entropy_with_logits(out, y.to(out.dtype)),
    "sequence": lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()),
}


def make(entry: Entry) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return entry.make()


def federation(inputs: Inputs, sizes: tuple[int, ...]) -> Federation:
    """Ragged clients, each with an input of its own scale, and some rows beside to predict."""
    draw = torch.Generator().manual_seed(1)
    held = [n + TESTED for n in sizes]
    whose = torch.arange(len(sizes)).repeat_interleave(torch.tensor(held))
    if inputs.words:
        x = torch.randint(VOCABULARY, (len(whose), *inputs.shape), generator=draw)
    else:
        scale = 0.5 + 0.2 * whose.view(-1, *[1] * len(inputs.shape))
        x = torch.randn(len(whose), *inputs.shape, generator=draw) * scale
    targets, count = {
        "classification": (torch.randint(CLASSES, (len(x),), generator=draw), CLASSES),
        "regression": (torch.randn(len(x), generator=draw), 1),
        "multilabel": ((torch.rand(len(x), CLASSES, generator=draw) < 0.4).to(torch.uint8), CLASSES),
        "sequence": (torch.randint(VOCABULARY, (len(x), *inputs.shape), generator=draw), VOCABULARY),
    }[inputs.task]
    parts = np.split(np.arange(len(x)), np.cumsum(held)[:-1])
    source = Source("zoo", x, targets, count, task=inputs.task)
    return Federation.build(source, [p[TESTED:] for p in parts], seed=0, tests=[p[:TESTED] for p in parts])


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def examples(data: Federation, rows: Tensor) -> tuple[Tensor, Tensor]:
    x, y = data.source.x[rows], data.source.y[rows]
    return x.double() if x.is_floating_point() else x, y.double() if y.is_floating_point() else y


def train(server: nn.Module, data: Federation, client: int, number: int) -> nn.Module:
    """One client's session in one round."""
    module = copy.deepcopy(server).train()
    optimizer = torch.optim.SGD(
        module.parameters(),
        lr=reference.rate(TRAINING, number),
        momentum=TRAINING.momentum,
        weight_decay=TRAINING.weight_decay,
    )
    for rows in reference.Stream(reference.rows_of(data, "train", client), TRAINING, number, client).turn():
        x, y = examples(data, rows)
        optimizer.zero_grad()
        LOSSES[data.source.task](module(x), y).backward()
        optimizer.step()
    return module


def sequential(server: nn.Module, data: Federation) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The server's numbers after the last round, and what each client predicts after fine-tuning them."""
    server = server.double()
    clients = CLIENTS.tolist()
    share = torch.tensor([len(reference.rows_of(data, "train", c)) for c in clients], dtype=torch.float64)
    share /= share.sum()
    for number in range(TRAINING.num_rounds):
        states = [train(server, data, c, number).state_dict() for c in clients]
        floats = [n for n, t in states[0].items() if t.is_floating_point()]
        mean = {n: sum(s * state[n] for s, state in zip(share, states, strict=True)) for n in floats}
        server.load_state_dict(mean, strict=False)
    personal = [train(server, data, c, TRAINING.num_rounds).eval() for c in clients]
    with torch.no_grad():
        inputs = [examples(data, reference.rows_of(data, "test", c))[0] for c in clients]
        return tensors(server), [m(x) for m, x in zip(personal, inputs, strict=True)]


def stacked(model: StackedModel, data: Federation, chunk: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The same from the package, with at most `chunk` clients in a stack; 0: with all of them."""
    sim = Simulation(
        data,
        model,
        FedAvgFT(),
        TRAINING,
        Evaluation(shift="none", eval_every=10_000),
        machine=Machine(device="cpu", chunk=chunk),
    )
    sim.run()
    outputs: list[Tensor] = []
    with torch.no_grad():
        for ids in CLIENTS.split(chunk or len(CLIENTS)):
            x = torch.stack([examples(data, reference.rows_of(data, "test", c))[0] for c in ids.tolist()])
            outputs += sim.algorithm.predict(sim.model, sim.deployed_models(sim.model, ids), x)
    return sim.server, outputs


def assert_same(found: Tensor, wanted: Tensor, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


def entries(*, refused: bool) -> list:
    """The lines of the table as parameters of a test."""
    found = []
    for entry in ZOO:
        if bool(entry.refused) == refused:
            marks = [] if entry.quick else [pytest.mark.slow]
            found.append(pytest.param(entry, id=entry.name, marks=marks))
    return found


@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:LSTM with projections is not supported")
@pytest.mark.parametrize("entry", entries(refused=False))
def test_a_module_in_a_stack_trains_as_in_a_sequential_loop(entry: Entry) -> None:
    data = federation(entry.inputs, PAIRS if entry.pairs else SIZES)
    model, module = StackedModel(make(entry), data.source.x[:2]), make(entry).double()
    initial = {n: t.detach().clone() for n, t in tensors(module).items()}
    server, predictions = stacked(model, data, 1) if entry.random else sequential(module, data)
    assert any(not torch.equal(t, initial[n]) for n, t in server.items())
    for chunk in (0, 2):
        found, outputs = stacked(model, data, chunk)
        for n, t in server.items():
            if not n.endswith("num_batches_tracked"):  # what the package does not train must have stayed
                assert_same(found.get(n, initial[n]), t, f"chunk={chunk}: {n} of the server")
        for c, (found_here, wanted) in enumerate(zip(outputs, predictions, strict=True)):
            assert_same(found_here, wanted, f"chunk={chunk}: predictions of client {c}")


@pytest.mark.parametrize("entry", entries(refused=True))
def test_a_module_that_cannot_be_stacked_is_refused_in_a_sentence(entry: Entry) -> None:
    data = federation(entry.inputs, SIZES)
    with pytest.raises(UserError, match=re.compile(entry.refused, re.IGNORECASE)):
        stacked(StackedModel(make(entry), data.source.x[:2]), data, 0)


def test_the_zoo_is_large_and_its_quick_part_small() -> None:
    assert Counter(entry.name for entry in ZOO).most_common(1)[0][1] == 1
    assert len(ZOO) >= 120
    assert 15 <= sum(entry.quick for entry in ZOO) <= 25
