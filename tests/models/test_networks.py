"""The networks by name: their sizes, and that every kind of them runs stacked, ragged clients and all."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn

from personafl import ALGORITHMS, Evaluation, FedAvg, Federation, Machine, Simulation, Source, StackedModel, Training
from personafl.core.types import BufferPolicy
from personafl.models import MODELS, CharLSTM, ResNet18
from personafl.models.folding import PerClient

SIZES = (13, 9, 5)
PAPERS = [
    ("mcmahan-cnn", (1, 28, 28), 10, 1_663_370),
    ("mnist-cnn", (1, 28, 28), 10, 244_234),
    ("har-dnn", (561,), 6, 177_542),
    ("har-dnn", (9, 128), 6, 328_838),
    ("vgg11", (3, 32, 32), 10, 9_225_600),
    ("vgg11-fc", (3, 32, 32), 10, 9_220_480 + 2 * (512 * 512 + 512) + 5_130),
    # 27 x 64 + 64; then 9 inputs outputs + outputs for 64-128-256-512-512; the same linear layers
    ("vgg8-fc", (3, 32, 32), 10, 1_792 + 73_856 + 295_168 + 1_180_160 + 2_359_808 + 525_312 + 5_130),
    ("tfcnn", (3, 32, 32), 10, 66_560),
    ("tfcnn-fc", (3, 32, 32), 10, 188_810),
    ("leaf-cnn", (1, 28, 28), 62, 6_603_710),
    ("fedpac-cnn", (3, 32, 32), 10, 107_690),
    ("fedrep-cnn", (3, 32, 32), 10, 307_842),
    ("pfllib-cnn", (1, 28, 28), 10, 582_026),
    ("dropout-cnn", (3, 32, 32), 10, 1_626_442),
]
LARGE = ("vgg11", "vgg11-fc", "vgg8-fc", "leaf-cnn")


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "classes", "parameters"),
    [
        *PAPERS,
        ("cifar-cnn", (3, 32, 32), 10, 797_962),
        ("vgg11", (3, 32, 32), 100, 9_220_480 + 512 * 100),
        ("pews-mlp", (5,), 4, 14_884),
        ("pews-cnn", (3, 32, 32), 20, 134_228),
        ("pews-cnn", (3, 32, 32), 21, 136_277),
        ("resnet18", (3, 32, 32), 10, 11_181_642),
        # 3 x 3 instead of 7 x 7 in the stem: 64 x 3 x (49 - 9) fewer
        ("resnet18-cifar", (3, 32, 32), 10, 11_181_642 - 64 * 3 * 40),
        # 80 x 8; 4 x 256 x (8 + 256 + 2); 4 x 256 x (256 + 256 + 2); 256 x 80 + 80
        ("char-lstm", (80,), 80, 640 + 272_384 + 526_336 + 20_560),
        ("token-lstm", (80,), 80, 640 + 272_384 + 526_336 + 20_560),
    ],
)
def test_parameter_counts(name: str, shape: tuple[int, ...], classes: int, parameters: int) -> None:
    assert count(MODELS[name].build(shape, classes)) == parameters


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [pytest.param(*c[:3], marks=[pytest.mark.slow] if c[0] in LARGE else []) for c in PAPERS],
)
def test_a_stack_of_a_papers_network_equals_each_client_alone(name: str, shape: tuple[int, ...], classes: int) -> None:
    draw = torch.Generator().manual_seed(4)
    x, y = torch.randn(7, *shape, generator=draw), torch.arange(7) % classes
    fed = Federation.build(Source("toy", x, y, classes), [np.arange(4), np.arange(4, 7)], 0)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = StackedModel(MODELS[name].build(shape, classes), x[:2])
    assert not model.whole and not model.random
    assert model.info.outputs == classes
    training = Training(num_rounds=1, join_ratio=1.0, local_steps=1, batch_size=2, lr=0.01, precision="float64")
    servers = []
    for chunk in (2, 1):
        sim = Simulation(
            fed, model.copy(), FedAvg(), training, Evaluation(shift="none", eval_every=99), machine=Machine(chunk=chunk)
        )
        sim.run()
        servers.append(sim.server)
    for n, together in servers[0].items():
        torch.testing.assert_close(together, servers[1][n], rtol=1e-9, atol=1e-9)
        assert not torch.equal(together, model.initial[n].double()), n


def test_dropout_stands_where_the_papers_have_it() -> None:
    shares: dict[str, dict[str, float]] = {}
    for name, shape in (("mnist-cnn", (1, 28, 28)), ("dropout-cnn", (3, 32, 32)), ("vgg11-fc", (3, 32, 32))):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = MODELS[name].build(shape, 10)
        shares[name] = {n: m.p for n, m in module.named_modules() if isinstance(m, nn.Dropout | nn.Dropout2d)}
        x = torch.rand(2, *shape)
        module.eval()
        assert torch.equal(module(x), module(x))
        module.train()
        assert not torch.equal(module(x), module(x))
    assert shares == {
        "mnist-cnn": {"map_drop": 0.5},
        "dropout-cnn": {"drops.0": 0.25, "drops.1": 0.5},
        "vgg11-fc": {"drops.0": 0.0, "drops.1": 0.5, "drops.2": 0.5},  # behind each hidden layer
    }


def test_whole_feature_maps_are_dropped_before_the_last_pooling() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        maps = MODELS["mnist-cnn"].build((1, 28, 28), 10).train().encode(torch.rand(8, 1, 28, 28)).view(8, 64, 16)
    dropped = (maps == 0).all(2)
    assert 0.4 < dropped.float().mean() < 0.6


def test_fedpac_uses_the_leaky_relu() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = MODELS["fedpac-cnn"].build((3, 32, 32), 10)
    assert module.encode(-torch.rand(4, 3, 32, 32)).min() < 0


def test_the_networks_of_fedphp_begin_as_its_code_does() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain, deep = (MODELS[n].build((3, 32, 32), 10) for n in ("vgg11", "vgg11-fc"))
    for net in (plain, deep):
        last = net.convs[-1]
        assert last.weight.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.01)  # fan out: 3 x 3 x 512
        assert not last.bias.any()
    assert deep.head.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not deep.head.bias.any()
    assert plain.head.bias is None
    assert plain.head.weight.abs().max() <= 512**-0.5  # PyTorch's own: uniform within 1 / sqrt(inputs)


def test_the_features_of_fedphps_networks_are_what_leaves_the_convolutions() -> None:
    x = torch.rand(2, 3, 32, 32)
    for name, head, features in (("tfcnn", None, 1024), ("tfcnn-fc", "[!c]*", 1024), ("tfcnn-fc", None, 128)):
        assert StackedModel(MODELS[name].build((3, 32, 32), 10), x, head).info.features == features


def test_too_small_images_are_refused() -> None:
    with pytest.raises(
        ValueError, match="images of 8 x 8 are too small for 8 convolutions with 5 poolings; use larger"
    ):
        MODELS["vgg11"].build((3, 8, 8), 10)


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


@functools.cache
def stacked(kind: str, policy: BufferPolicy = "average") -> StackedModel:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = CharLSTM(3, 4, 5) if kind == "lstm" else ResNet18(2, 3, "cifar", width=4)
    return StackedModel(module, federation(kind).source.x[:2], policy=policy)


def simulation(kind: str, name: str, chunk: int, policy: BufferPolicy = "average") -> Simulation:
    rounds = 3 if name == "dm-pfl" else 2  # a round of each of its phases; of others, one that finds what was kept
    training = Training(num_rounds=rounds, join_ratio=1.0, local_epochs=1, batch_size=4, lr=0.05, precision="float64")
    quiet = Evaluation(shift="none", eval_every=10_000)
    model = stacked(kind, policy).copy()
    return Simulation(federation(kind), model, ALGORITHMS[name](), training, quiet, machine=Machine(chunk=chunk))


@pytest.mark.filterwarnings("ignore:3 rounds leave room", "ignore:allocation=")
@pytest.mark.parametrize(
    "name",
    [
        *("fedavg", "fedphp", "co-pfl", "dm-pfl"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("fedavg-ft", "ditto", "fedrep", "fedselect")),
    ],
)
@pytest.mark.parametrize("kind", ["resnet", "lstm"])
def test_a_stack_of_residual_or_recurrent_networks_equals_each_client_alone(kind: str, name: str) -> None:
    together, alone = (simulation(kind, name, chunk) for chunk in (100, 1))
    together.run()
    alone.run()
    ready = [s.deployed_models(s.model, s.everybody) for s in (together, alone)]
    for n in ready[0]:
        torch.testing.assert_close(ready[0][n], ready[1][n], rtol=1e-7, atol=1e-7)
    assert any((ready[0][n] != together.model.initial[n]).any() for n in together.model.info.parameters)


@pytest.mark.parametrize("policy", ["average", "local", "drop"])
def test_the_statistics_of_a_resnet_follow_the_policy(policy: BufferPolicy) -> None:
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


def test_an_lstm_has_a_stacked_form_of_its_own() -> None:
    model = simulation("lstm", "fedavg", 100).model
    assert not model.whole and not model.random and model.pads
    assert not any(isinstance(m, PerClient) for m in model._folded.modules())


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
