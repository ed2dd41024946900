"""The networks by name: their sizes, and that every kind of them runs stacked, ragged clients and all."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from personafl import ALGORITHMS, Evaluation, FedAvg, Federation, Simulation, Source, StackedModel, Training
from personafl.models import MODELS, CharLSTM, ResNet18
from personafl.models.layers import PerClient

SIZES = (13, 9, 5)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        ("cifar-cnn", (3, 32, 32), 10, 797_962),
        ("pews-mlp", (5,), 4, 14_884),
        ("pews-cnn", (3, 32, 32), 20, 134_228),
        ("pews-cnn", (3, 32, 32), 21, 136_277),
        ("resnet18", (3, 32, 32), 10, 11_181_642),
        # 3 x 3 instead of 7 x 7 in the stem: 64 x 3 x (49 - 9) fewer
        ("resnet18-cifar", (3, 32, 32), 10, 11_181_642 - 64 * 3 * 40),
        # 80 x 8; 4 x 256 x (8 + 256 + 2); 4 x 256 x (256 + 256 + 2); 256 x 80 + 80
        ("char-lstm", (80,), 80, 640 + 272_384 + 526_336 + 20_560),
    ],
)
def test_parameter_counts(name: str, shape: tuple[int, ...], classes: int, parameters: int) -> None:
    assert count(MODELS[name].build(shape, classes)) == parameters


def federation(kind: str) -> Federation:
    draw = torch.Generator().manual_seed(4)
    rows = sum(SIZES)
    y = torch.randint(3, (rows,), generator=draw)
    if kind == "lstm":  # a text whose last character tells the next
        x = torch.randint(3, (rows, 6), generator=draw)
        x[:, -1] = y
    else:
        x = torch.randn(rows, 2, 16, 16, generator=draw) + y.view(-1, 1, 1, 1)
    parts = np.split(np.arange(rows), np.cumsum(SIZES)[:-1])
    return Federation.build(Source("toy", x, y, 3), parts, 0)


def simulation(kind: str, name: str, chunk: int, **options: str) -> Simulation:
    fed = federation(kind)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = CharLSTM(3, 4, 5) if kind == "lstm" else ResNet18(2, 3, "cifar", width=4)
    model = StackedModel(module, fed.source.x[:2], **options)  # type: ignore[arg-type]
    training = Training(num_rounds=3, join_ratio=1.0, local_epochs=1, batch_size=4, lr=0.05, precision="float64")
    quiet = Evaluation(shift="none", eval_every=10_000)
    return Simulation(fed, model, ALGORITHMS[name](), training, quiet, chunk=chunk)


@pytest.mark.filterwarnings("ignore:3 rounds leave room", "ignore:allocation=")
@pytest.mark.parametrize("name", ["fedavg", "fedavg-ft", "ditto", "fedrep", "fedphp", "co-pfl", "fedselect", "dm-pfl"])
@pytest.mark.parametrize("kind", ["resnet", "lstm"])
def test_a_stack_of_residual_or_recurrent_networks_equals_each_client_alone(kind: str, name: str) -> None:
    together, alone = (simulation(kind, name, chunk) for chunk in (100, 1))
    together.run()
    alone.run()
    ready = [s.ready(s.model, s.everybody) for s in (together, alone)]
    for n in ready[0]:
        torch.testing.assert_close(ready[0][n], ready[1][n], rtol=1e-7, atol=1e-7)
    assert any((ready[0][n] != together.model.initial[n]).any() for n in together.model.info.parameters)


@pytest.mark.parametrize("policy", ["average", "local", "drop"])
def test_the_statistics_of_a_resnet_follow_the_policy(policy: str) -> None:
    sim = simulation("resnet", "fedavg", 100, policy=policy)
    sim.run()
    statistics = {n for n in sim.model.initial if n.endswith(("running_mean", "running_var"))}
    kept = sim.store.gather(sim.everybody)
    assert len(statistics) == (0 if policy == "drop" else 2 * 20)  # 20 norms in a ResNet-18
    assert statistics <= sim.server.keys() if policy == "average" else not statistics & sim.server.keys()
    assert statistics <= kept.keys() if policy == "local" else not statistics & kept.keys()
    if policy == "local":  # each client's follow its own data
        mean = kept["bn1.running_mean"]
        assert not torch.allclose(mean[0], mean[1])


def test_an_lstm_runs_per_client_inside_the_stacked_step() -> None:
    model = simulation("lstm", "fedavg", 100).model
    assert not model.whole
    kinds = {type(m.original).__name__ for m in model._folded.modules() if isinstance(m, PerClient)}
    assert kinds == {"LSTM"}  # the embedding and the head are batched over clients
    assert not model.parallel


def test_a_full_resnet_takes_a_round() -> None:
    """11 million parameters a client, one minibatch each."""
    fed = federation("resnet")
    model = StackedModel(ResNet18(2, 3), fed.source.x[:2])
    sim = Simulation(
        fed,
        model,
        FedAvg(),
        Training(num_rounds=1, join_ratio=0.7, local_steps=1, batch_size=4, lr=0.01),
        Evaluation(shift="none"),
    )
    before = sim.server["fc.weight"].clone()
    sim.run()
    assert not torch.equal(sim.server["fc.weight"], before)
    assert torch.isfinite(sim.server["layer4.1.conv2.weight"]).all()
