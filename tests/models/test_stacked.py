import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import prune

from personafl import (
    ALGORITHMS,
    Algorithm,
    Ditto,
    Evaluation,
    FedAvg,
    Federation,
    FedPHP,
    Simulation,
    Source,
    UserError,
)
from personafl.core import rng, tree
from personafl.core.criteria import CRITERION_GRADIENTS, cross_entropy
from personafl.core.types import Batch, Task
from personafl.models import CNN, MLP, MODELS, StackedModel, agreement, layers, stacked
from tests import worlds
from tests.references.correcting import MOON

CLIENTS, SIZE = 3, 4
KEYS = rng.key(0, "noise", 1, torch.tensor([3, 5, 9]))


class TextNet(nn.Module):
    """Embedding, Conv1d, GroupNorm and LayerNorm."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.conv = nn.Conv1d(6, 4, 3, padding=1)
        self.groups = nn.GroupNorm(2, 4)
        self.norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        x = self.groups(self.conv(self.table(x).transpose(1, 2)))  # [N, 4, T]
        return self.fc(self.norm(x.transpose(1, 2)).relu().mean(1))


class BatchNormNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.fc = nn.Linear(3 * 9, 4)
        self.norm1 = nn.BatchNorm1d(4, affine=False, momentum=0.3)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().flatten(1)
        return self.head(self.norm1(self.fc(x)))


class Recurrent(nn.Module):
    """An LSTM of two layers with dropout between them, time first or examples first."""

    def __init__(self, batch_first):
        super().__init__()
        self.batch_first = batch_first
        self.lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=batch_first)
        self.fc = nn.Linear(8, 2)

    def forward(self, x):
        if self.batch_first:
            out, (h, _) = self.lstm(x)
            last = out[:, -1]
        else:
            out, (h, _) = self.lstm(x.transpose(0, 1))
            last = out[-1]
        return self.fc(torch.cat([last, h[0]], 1))


class GRUNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.gru(x)[1][-1])


class BareParameter(nn.Module):
    """Parameters that belong to no layer: a vector and a number."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.shift = nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.fc(x + self.shift) * self.scale


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.attention(x, x, x)[0].mean(1))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.layer(x).mean(1))


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(3, 8)
        self.fc = nn.Linear(8, 2)

    def forward(self, x):
        return self.fc(F.dropout(self.hidden(x), 0.5, self.training))


class Noise(nn.Module):
    """What it draws is no dropout, so nobody knows how to make it a client's own."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(3, 8)
        self.fc = nn.Linear(8, 2)

    def forward(self, x):
        x = self.hidden(x)
        return self.fc(x + torch.randn_like(x) if self.training else x)


class CentredInput(nn.Module):
    """A forward that mixes the examples of a batch, before any parameter is seen."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(x - x.mean(0))


class CentredFeatures(nn.Module):
    """The same behind a layer."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(3, 4)
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        x = self.hidden(x)
        return self.fc(x - x.mean(0))


class TiedWeights(nn.Module):
    """One layer used twice under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(self.second(self.first(x).relu()))


class ReadsItsLayers(nn.Module):
    """A forward that looks at its layers' attributes: a decoder tied to the embedding, a size."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        out = self.lstm(self.table(x))[0][:, -1, : self.lstm.hidden_size]
        return F.linear(out, self.table.weight)


class Frozen(nn.Module):
    """Layers nobody trains, of every kind that must find its parameters."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.shift = nn.Parameter(torch.randn(4))
        self.fc = nn.Linear(4, 2)
        for p in (*self.backbone.parameters(), *self.norm.parameters(), self.shift):
            p.requires_grad_(False)

    def forward(self, x):
        return self.fc(self.norm(self.backbone(x)).relu() + self.shift)


# module, shape of an example (None: tokens), whether the whole module must run client by client
ZOO = {
    "mlp": (lambda: MLP(6, 5, 4, 3), (2, 3), False),
    "cnn": (lambda: CNN((2, 8, 8), (3, 4), (5,), 3, kernel=3, padding=1), (2, 8, 8), False),
    "batch norm": (BatchNormNet, (2, 5, 5), False),
    "text": (TextNet, None, False),
    "lstm, examples first": (lambda: Recurrent(True), (5, 3), False),
    "lstm, time first": (lambda: Recurrent(False), (5, 3), False),
    "gru": (GRUNet, (5, 3), False),
    "bare parameter": (BareParameter, (3,), False),
    "attention": (Attention, (5, 4), False),
    "transformer layer": (Encoder, (5, 4), False),
    "functional dropout": (FunctionalDropout, (3,), False),
    "noise": (Noise, (3,), True),
    "dropout": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2), nn.Dropout(0.2)), (3,), False),
    "centred input": (CentredInput, (3,), True),
    "centred features": (CentredFeatures, (3,), True),
    "tied weights": (TiedWeights, (3,), True),
    "reads its layers": (ReadsItsLayers, None, True),
    "frozen": (Frozen, (3,), False),
    "no bias": (
        lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.LayerNorm(4, bias=False), nn.Linear(4, 2)),
        (3,),
        False,
    ),
    "linear on sequences": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (5, 3), False),
}
EACH = pytest.mark.parametrize("name", list(ZOO))


def draw(shape, rows, seed=1):
    g = torch.Generator().manual_seed(seed)
    if shape is None:
        return torch.randint(0, 7, (*rows, 5), generator=g)
    return torch.randn(*rows, *shape, generator=g, dtype=torch.float64)


def build(make, shape, **settings):
    """The stacked model in float64, and every client's own random parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make()
    example = draw(shape, (2,), seed=0)
    model = StackedModel(module, example if shape is None else example.float(), **settings)
    return model.to(torch.device("cpu"), torch.float64), module.double()


def clients(model, count=CLIENTS):
    g = torch.Generator().manual_seed(2)
    return {  # positive noise keeps a running variance positive
        n: t + 0.3 * torch.rand(count, *t.shape, generator=g, dtype=torch.float64) for n, t in model.initial.items()
    }


def leaves(model, params):
    return {n: t.clone().requires_grad_(n not in model.info.buffers) for n, t in params.items()}


def differentiate(model, out, params, weights):
    """Gradients of a weighted sum of outputs, by name."""
    names = model.info.parameters
    grads = torch.autograd.grad((out * weights).sum(), [params[n] for n in names], materialize_grads=True)
    return dict(zip(names, grads, strict=True))


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def weights_of(out):
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@EACH
def test_a_stack_in_evaluation_is_each_client_alone(name):
    make, shape, whole = ZOO[name]
    model, module = build(make, shape)
    assert model.whole == whole
    params, x = leaves(model, clients(model)), draw(shape, (CLIENTS, SIZE))
    out = model(params, x)
    weights = weights_of(out)
    stacked = differentiate(model, out, params, weights)
    module.eval()
    for c in range(CLIENTS):
        own = {n: t[c].detach().requires_grad_(t.requires_grad) for n, t in params.items()}
        alone = functional_call(module, own, (x[c],))
        assert_same(out[c], alone)
        for n, g in differentiate(model, alone, own, weights[c]).items():
            assert_same(stacked[n][c], g)


def run(model, params, x, valid, keys, weights):
    """Outputs, gradients and running statistics of one training step."""
    own = leaves(model, params)
    out = model(own, x, valid, keys)
    grads = differentiate(model, out, own, weights)
    return out.detach(), grads | tree.select(own, model.info.buffers)


@EACH
def test_a_stack_in_training_is_three_stacks_of_one(name):
    make, shape, _ = ZOO[name]
    model, _ = build(make, shape)
    params, x = clients(model), draw(shape, (CLIENTS, SIZE))
    weights = weights_of(model(params, x))
    out, rest = run(model, params, x, None, KEYS, weights)
    for c in range(CLIENTS):
        row = slice(c, c + 1)
        alone, alone_rest = run(model, tree.take(params, row), x[row], None, KEYS[row], weights[row])
        assert_same(out[row], alone)
        assert alone_rest.keys() == rest.keys()
        for n, t in alone_rest.items():
            assert_same(rest[n][row], t)


@EACH
def test_padding_reaches_no_number_in_training(name):
    make, shape, _ = ZOO[name]
    model, _ = build(make, shape)
    params, x = clients(model), draw(shape, (CLIENTS, SIZE))
    real = [4, 3, 2]
    valid = torch.arange(SIZE) < torch.tensor(real).unsqueeze(1)
    weights = weights_of(model(params, x))
    weights[~valid] = 0  # a loss looks at real examples only
    out, rest = run(model, params, x, valid, KEYS, weights)
    changed = x.clone()
    changed[~valid] = draw(shape, (int((~valid).sum()),), seed=9)
    again, again_rest = run(model, params, changed, valid, KEYS, weights)
    assert torch.equal(out[valid], again[valid])
    for c, n in enumerate(real):
        row = slice(c, c + 1)
        alone, alone_rest = run(model, tree.take(params, row), x[row, :n], None, KEYS[row], weights[row, :n])
        assert_same(out[row, :n], alone)
        for key, t in alone_rest.items():
            assert_same(rest[key][row], t)
            assert_same(again_rest[key][row], t)


def test_odd_convolutions_are_those_of_each_client():
    layers = [
        lambda: nn.Conv2d(2, 4, 3, stride=2, groups=2),
        lambda: nn.Conv2d(2, 4, 2, padding="same", dilation=2, bias=False),
        lambda: nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"),
        lambda: nn.ConvTranspose2d(2, 4, 2),
    ]
    for layer in layers:
        model, module = build(layer, (2, 6, 6))
        params, x = clients(model), draw((2, 6, 6), (CLIENTS, SIZE))
        out = model(params, x)
        for c in range(CLIENTS):
            assert_same(out[c], functional_call(module, {n: t[c] for n, t in params.items()}, (x[c],)))


def test_volumes_can_be_convolved():
    def make():
        return nn.Sequential(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2), nn.Flatten(), nn.Linear(16, 2))

    model, module = build(make, (1, 3, 3, 3))
    params, x = clients(model), draw((1, 3, 3, 3), (CLIENTS, SIZE))
    out = model(params, x)
    for c in range(CLIENTS):
        assert_same(out[c], functional_call(module.eval(), {n: t[c] for n, t in params.items()}, (x[c],)))


def test_the_padding_word_of_an_embedding_has_no_gradient():
    def make():
        return nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(20, 2))

    model, module = build(make, None)
    params, x = leaves(model, clients(model)), draw(None, (CLIENTS, SIZE))
    assert (x == 0).any()
    out = model(params, x)
    stacked = differentiate(model, out, params, torch.ones_like(out))
    own = {n: t[0].detach().requires_grad_() for n, t in params.items()}
    alone = functional_call(module, own, (x[0],))
    grads = differentiate(model, alone, own, torch.ones_like(alone))
    assert grads["0.weight"][0].tolist() == [0] * 4
    assert_same(stacked["0.weight"][0], grads["0.weight"])


# Batch normalisation


@pytest.mark.parametrize(("norm", "shape"), [(nn.BatchNorm1d, ()), (nn.BatchNorm1d, (4,)), (nn.BatchNorm2d, (2, 3))])
def test_batch_norm_is_torchs_own_on_the_real_rows(norm, shape):
    flat = 3 * torch.Size(shape).numel()
    model, _ = build(lambda: nn.Sequential(norm(3, momentum=0.3), nn.Flatten(), nn.Linear(flat, 2)), (3, *shape))
    params, x = clients(model), draw((3, *shape), (CLIENTS, 6))
    start = {n: t.clone() for n, t in params.items()}
    real = [6, 4, 2]
    valid = torch.arange(6) < torch.tensor(real).unsqueeze(1)
    for _ in range(2):
        out = model(params, x, valid, KEYS)
    for c, n in enumerate(real):
        plain = norm(3, momentum=0.3).double().train()
        own = {k.removeprefix("0."): t[c] for k, t in start.items() if k.startswith("0.")}
        plain.load_state_dict(own, strict=False)
        for _ in range(2):
            hidden = plain(x[c, :n]).flatten(1)
        assert_same(out[c, :n], F.linear(hidden, params["2.weight"][c], params["2.bias"][c]))
        assert_same(params["0.running_mean"][c], plain.running_mean)
        assert_same(params["0.running_var"][c], plain.running_var)


def test_batch_norm_in_training_has_torchs_gradients():
    model, module = build(BatchNormNet, (2, 5, 5))
    params, x = leaves(model, clients(model)), draw((2, 5, 5), (CLIENTS, SIZE))
    start = {n: t.detach().clone() for n, t in params.items()}
    out = model(params, x, None, KEYS)
    weights = weights_of(out)
    stacked = differentiate(model, out, params, weights)
    module.train()
    for c in range(CLIENTS):
        own = {n: t[c].clone().requires_grad_(n not in model.info.buffers) for n, t in start.items()}
        alone = functional_call(module, own, (x[c],))
        assert_same(out[c], alone)
        for n, g in differentiate(model, alone, own, weights[c]).items():
            assert_same(stacked[n][c], g)
        for n in model.info.buffers:
            assert_same(params[n][c], own[n])


def test_running_statistics_are_state_and_the_counter_of_batches_is_not():
    model, _ = build(BatchNormNet, (2, 5, 5))
    assert model.info.buffers == {
        "norm.running_mean",
        "norm.running_var",
        "norm1.running_mean",
        "norm1.running_var",
    }
    assert list(model.info.shapes)[-4:] == sorted(model.info.buffers)  # parameters come first
    assert model.info.shapes["norm.running_mean"] == (3,)
    assert not model.info.buffers & set(model.info.parameters)


def test_evaluation_changes_no_running_statistics():
    model, _ = build(BatchNormNet, (2, 5, 5))
    params = clients(model)
    before = {n: t.clone() for n, t in params.items()}
    model(params, draw((2, 5, 5), (CLIENTS, SIZE)))
    assert all(torch.equal(params[n], before[n]) for n in params)


def test_a_single_example_in_training_counts_as_its_own_mean():
    model, _ = build(lambda: nn.Sequential(nn.BatchNorm1d(3, momentum=0.25), nn.Linear(3, 2)), (3,))
    params = clients(model, 1)
    before = params["0.running_mean"].clone()
    x = draw((3,), (1, 2))
    model(params, x, torch.tensor([[True, False]]), KEYS[:1])
    assert_same(params["0.running_mean"], 0.75 * before + 0.25 * x[:, 0])
    assert torch.isfinite(params["0.running_var"]).all()


def test_dropped_statistics_are_no_state_and_the_batch_gives_them():
    model, module = build(BatchNormNet, (2, 5, 5), policy="drop")
    assert model.info.policy == "drop"
    assert model.info.buffers == frozenset()
    assert not [n for n in (*model.info.shapes, *model.initial) if "running" in n]
    params, x = clients(model), draw((2, 5, 5), (CLIENTS, SIZE))
    evaluated, trained = model(params, x), model(params, x, None, KEYS)
    assert torch.equal(evaluated, trained)
    module.train()
    for c in range(CLIENTS):
        assert_same(evaluated[c], functional_call(module, {n: t[c] for n, t in params.items()}, (x[c],)))


@pytest.mark.parametrize("policy", ["average", "local"])
def test_the_other_policies_keep_statistics_as_state(policy):
    model, _ = build(BatchNormNet, (2, 5, 5), policy=policy)
    assert model.info.policy == policy
    assert len(model.info.buffers) == 4


def test_a_cumulative_average_is_refused():
    with pytest.raises(ValueError, match="momentum=None"):
        StackedModel(nn.Sequential(nn.BatchNorm1d(3, momentum=None), nn.Linear(3, 2)), torch.randn(2, 3))


class FrozenNorm(nn.Module):
    """A batch norm nobody trains, with statistics of its own, in a module of one of three kinds."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.hidden = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.fc = nn.Linear(4, 2)
        if kind == "bare parameter":
            self.shift = nn.Parameter(torch.zeros(3))
        for p in self.norm.parameters():
            p.requires_grad_(False)
        self.norm.running_mean.fill_(0.5)
        self.norm.running_var.fill_(2.0)

    def forward(self, x):
        x = self.hidden(x + self.shift if self.kind == "bare parameter" else x)
        return self.fc(self.norm(x - x.mean(0) if self.kind == "mixing" else x))


@pytest.mark.parametrize("kind", ["plain", "bare parameter", "mixing"])
def test_a_frozen_batch_norm_keeps_its_statistics_in_training(kind):
    model, _ = build(lambda: FrozenNorm(kind), (3,))
    assert model.whole == (kind == "mixing")
    assert not [n for n in model.info.shapes if n.startswith("norm.")]
    assert model.info.buffers == frozenset()
    params, x = clients(model), draw((3,), (CLIENTS, SIZE))
    before = model(params, x)
    assert_same(model(params, 5 * x, None, KEYS), model(params, 5 * x))  # the same in training and in evaluation
    assert torch.equal(model(params, x), before)


def test_statistics_that_clients_would_share_are_refused():
    class InstanceNormNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
            self.fc = nn.Linear(3, 2)

        def forward(self, x):
            return self.fc(self.norm(x).mean(2))

    with pytest.raises(ValueError, match=r"buffer 'norm.running_mean' is changed by the forward pass"):
        build(InstanceNormNet, (3, 5))


# Parameters that are not trained


def test_frozen_parameters_are_no_state_and_still_act():
    model, module = build(Frozen, (3,))
    assert set(model.info.shapes) == set(model.initial) == {"fc.weight", "fc.bias"}
    params, x = clients(model), draw((3,), (CLIENTS, SIZE))
    with torch.no_grad():
        module.backbone.weight[0] += 1
    other = StackedModel(module, draw((3,), (2,), seed=0))
    assert not torch.allclose(other(params, x), model(params, x))


def test_a_module_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="ReLU has no parameter"):
        StackedModel(nn.ReLU(), torch.randn(2, 3))
    with pytest.raises(ValueError, match="Linear has no parameter that requires a gradient"):
        StackedModel(nn.Linear(3, 2).requires_grad_(False), torch.randn(2, 3))


def test_a_module_that_answers_differently_each_time_is_refused():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.calls = nn.Linear(3, 2), 0

        def forward(self, x):
            self.calls += 1
            return self.fc(x) + self.calls

    with pytest.raises(ValueError, match=r"Counting: attribute 'calls' changes from one call"):
        StackedModel(Counting(), torch.randn(2, 3))


def test_a_module_that_does_not_fit_its_data_speaks_for_itself():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        StackedModel(nn.Linear(4, 2), torch.randn(2, 3))


def test_the_module_given_is_left_alone():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).train()
    before = copy.deepcopy(module.state_dict())
    StackedModel(module, torch.randn(2, 3), policy="drop")
    assert module.training
    assert module.state_dict().keys() == before.keys()
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())


# Dropout


def ones(*layers, width=200):
    """A layer whose output is all ones, then these."""
    module = nn.Sequential(nn.Linear(3, width), *layers)
    nn.init.zeros_(module[0].weight)
    nn.init.ones_(module[0].bias)
    return module


def test_dropout_keeps_its_share_and_scales_it():
    model, _ = build(lambda: ones(nn.Dropout(0.3)), (3,))
    params = tree.stack(model.initial, CLIENTS)
    out = model(params, draw((3,), (CLIENTS, 50)), None, KEYS)
    kept = out != 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / 0.7))
    # 10,000 draws per client: standard error sqrt(0.3 * 0.7 / 10000) = 0.0046
    assert kept.double().mean((1, 2)).tolist() == pytest.approx([0.7] * 3, abs=5 * 0.0046)
    assert torch.equal(model(params, draw((3,), (CLIENTS, 50))), torch.ones(CLIENTS, 50, 200, dtype=torch.float64))


@pytest.mark.parametrize("make", [lambda: ones(nn.Dropout(0.5)), lambda: Recurrent(True), FunctionalDropout, Noise])
def test_dropout_depends_on_the_clients_key_and_on_nothing_else(make):
    shape = (5, 3) if make().__class__ is Recurrent else (3,)
    model, _ = build(make, shape)
    params, x = tree.stack(model.initial, CLIENTS), draw(shape, (1, SIZE)).expand(CLIENTS, SIZE, *shape)
    out = model(params, x, None, KEYS)
    assert not torch.allclose(out[0], out[1])
    turned = torch.tensor([2, 0, 1])
    assert_same(model(params, x, None, KEYS[turned]), out[turned])
    assert_same(model(params, x, None, KEYS), out)
    assert not torch.allclose(model(params, x, None, rng.extend(KEYS, 1)), out)
    padded = torch.arange(SIZE) < torch.tensor([[4], [2], [1]])
    if make().__class__ is nn.Sequential:  # an example's draw does not depend on those behind it
        assert torch.equal(model(params, x, padded, KEYS)[padded], out[padded])
        assert torch.equal(model(params, x[:, :2], None, KEYS), out[:, :2])


def test_two_dropouts_of_a_step_draw_differently():
    model, _ = build(lambda: ones(nn.Dropout(0.5), nn.Dropout(0.5)), (3,))
    out = model(tree.stack(model.initial, 1), draw((3,), (1, 50)), None, KEYS[:1])
    # a quarter survives two independent draws, half would survive the same one twice; 10,000 draws
    assert (out != 0).double().mean() == pytest.approx(0.25, abs=5 * 0.0043)


def test_channel_dropout_drops_whole_channels():
    model, _ = build(lambda: ones(nn.Unflatten(1, (50, 2, 2)), nn.Dropout2d(0.4)), (3,))
    out = model(tree.stack(model.initial, CLIENTS), draw((3,), (CLIENTS, 20)), None, KEYS).flatten(3)  # [3, 20, 50, 4]
    dropped = (out == 0).all(3)
    assert torch.equal(dropped, (out == 0).any(3))
    # 3,000 channels: standard error sqrt(0.4 * 0.6 / 3000) = 0.009
    assert dropped.double().mean() == pytest.approx(0.4, abs=5 * 0.009)


def test_dropping_everything_leaves_no_gradient_and_no_nan():
    model, _ = build(lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(1.0), nn.Linear(4, 2)), (3,))
    params = leaves(model, clients(model))
    out = model(params, draw((3,), (CLIENTS, SIZE)), None, KEYS)
    grads = differentiate(model, out, params, torch.ones_like(out))
    assert grads["0.weight"].count_nonzero() == 0
    assert grads["2.bias"].tolist() == [[SIZE, SIZE]] * CLIENTS


def test_dropout_leaves_the_global_generator_alone():
    model, _ = build(Noise, (3,))
    state = torch.get_rng_state()
    model(tree.stack(model.initial, CLIENTS), draw((3,), (CLIENTS, SIZE)), None, KEYS)
    assert torch.equal(torch.get_rng_state(), state)


# What a model says about itself


def test_the_head_is_the_last_linear_layer():
    assert build(BatchNormNet, (2, 5, 5))[0].info.head == {"head.weight", "head.bias"}
    assert build(lambda: MLP(6, 5, 4, 3), (6,))[0].info.head == {"head.weight", "head.bias"}
    assert build(lambda: nn.Linear(3, 2), (3,))[0].info.head == {"weight", "bias"}


def test_a_frozen_layer_is_no_head():
    def make():
        module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        module[1].requires_grad_(False)
        return module

    assert build(make, (3,))[0].info.head == {"0.weight", "0.bias"}


def test_a_model_without_linear_layers_has_no_head():
    assert build(lambda: nn.Conv1d(3, 2, 1), (3, 4))[0].info.head == frozenset()


def test_the_head_may_be_a_pattern():
    model, _ = build(lambda: MLP(6, 5, 4, 3), (6,), head="layers.1.*")
    assert model.info.head == {"layers.1.weight", "layers.1.bias"}


def test_a_head_that_matches_nothing_is_refused_with_what_there_is():
    with pytest.raises(ValueError, match=r"model.head='fc\*' matches no parameter; .* layers.0.weight, .* head.bias"):
        build(lambda: MLP(6, 5, 4, 3), (6,), head="fc*")


def test_layers_are_in_forward_order_with_their_work():
    class Backwards(nn.Module):
        """Defined last to first, and its first layer called twice."""

        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 2, bias=False)
            self.first = nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.first(self.first(x)))

    first, last = build(Backwards, (4,))[0].info.layers
    assert (first.weight, first.bias, first.macs, first.outputs) == ("first.weight", "first.bias", 2 * 16, 2 * 4)
    assert (last.weight, last.bias, last.macs, last.outputs) == ("last.weight", None, 8, 0)


def test_work_outside_trained_layers_is_counted_apart():
    info = build(Frozen, (3,))[0].info
    assert [layer.weight for layer in info.layers] == ["fc.weight"]
    assert info.other_flops == 2 * 12 + 4  # the frozen layer: 3 x 4 weights, 4 biases


@pytest.mark.parametrize(
    ("name", "shape", "classes", "count"),
    [
        ("cifar-cnn", (3, 32, 32), 10, 797_962),
        ("pews-mlp", (5,), 4, 14_884),
        ("mlp", (1, 8, 8), 10, 64 * 128 + 128 + 128 * 64 + 64 + 64 * 10 + 10),
        # conv 16 and 32 with pooling leave 32 images of 2 x 2
        ("small-cnn", (1, 8, 8), 10, 9 * 16 + 16 + 9 * 16 * 32 + 32 + 128 * 64 + 64 + 64 * 10 + 10),
    ],
)
def test_networks_have_their_number_of_parameters(name, shape, classes, count):
    module = MODELS[name].build(shape, classes)
    assert sum(p.numel() for p in module.parameters()) == count
    assert module(torch.zeros(2, *shape)).shape == (2, classes)


def test_an_image_network_refuses_flat_data():
    with pytest.raises(ValueError, match=r"model.name='cifar-cnn' wants images .* shape \(5,\)"):
        MODELS["cifar-cnn"].build((5,), 4)


# Using it


@pytest.mark.parametrize("name", ["batch norm", "frozen", "bare parameter", "centred features"])
def test_a_client_can_take_its_ordinary_module_away(name):
    make, shape, _ = ZOO[name]
    model, _ = build(make, shape)
    params, x = clients(model), draw(shape, (CLIENTS, SIZE))
    out = model(params, x)
    for c in range(CLIENTS):
        module = model.client({n: t[c] for n, t in params.items()})
        assert not module.training
        assert_same(module(x[c]), out[c])


def test_a_copy_answers_alike_and_shares_nothing():
    model, _ = build(lambda: MLP(6, 5, 4, 3), (6,))
    params, x = clients(model), draw((6,), (CLIENTS, SIZE))
    twin = model.copy()
    assert torch.equal(twin(params, x), model(params, x))
    assert twin._context is not model._context
    assert all(m.context is twin._context for m in twin._folded.modules() if hasattr(m, "context"))


def test_the_initial_parameters_are_the_modules():
    model, module = build(BatchNormNet, (2, 5, 5))
    state = module.state_dict()
    assert set(model.initial) == set(model.info.shapes)
    assert all(torch.equal(t, state[n]) for n, t in model.initial.items())
    assert {n: tuple(t.shape) for n, t in model.initial.items()} == dict(model.info.shapes)


@pytest.mark.parametrize(
    ("name", "random", "pads"),
    [
        ("mlp", False, True),
        ("batch norm", False, True),
        ("dropout", False, True),  # by the clients' own streams
        ("gru", False, False),  # one layer: nothing to drop out
        ("lstm, examples first", False, True),
        ("attention", False, True),
        ("functional dropout", False, True),
        ("noise", True, False),
    ],
)
def test_models_that_draw_by_pytorchs_generator_are_known(name, random, pads):
    make, shape, _ = ZOO[name]
    model = build(make, shape)[0]
    assert (model.random, model.pads) == (random, pads)


@pytest.mark.parametrize("size", [SIZE, 1])
@pytest.mark.parametrize("training", [True, False])
def test_one_client_is_normed_as_in_a_stack(size, training):
    """PyTorch's own norm takes one client without padding; a minibatch of one example it would refuse."""
    model = build(BatchNormNet, (2, 5, 5))[0]
    params, x = clients(model), draw((2, 5, 5), (CLIENTS, size), seed=3)
    keys = KEYS if training else None
    together = {n: t.clone() for n, t in params.items()}
    out = model(together, x, keys=keys)
    for c in range(CLIENTS):
        own = {n: t[c : c + 1].clone() for n, t in params.items()}
        found = model(own, x[c : c + 1], keys=None if keys is None else keys[c : c + 1])
        torch.testing.assert_close(found[0], out[c], rtol=1e-10, atol=1e-10)
        for n in own:  # running statistics among them
            torch.testing.assert_close(own[n][0], together[n][c], rtol=1e-10, atol=1e-10)


def test_threads_borrow_models_over_the_same_tensors():
    model, _ = build(BatchNormNet, (2, 5, 5))
    with model.borrowed() as first, model.borrowed() as second:
        assert len({id(m) for m in (model, first, second)}) == 3
        assert all(first.initial[n] is t for n, t in model.initial.items())
    with model.borrowed() as again:
        assert again is first or again is second


# Gradients by hand


def stacked_minibatch(model, *shape):
    """Random models of three clients, and a minibatch of which two places are padding."""
    draw = torch.Generator().manual_seed(1)
    params = {
        n: t.double() + 0.1 * torch.randn(CLIENTS, *t.shape, generator=draw, dtype=torch.float64)
        for n, t in model.initial.items()
    }
    x = torch.randn(CLIENTS, SIZE, *shape, generator=draw, dtype=torch.float64)
    count = torch.tensor([4, 4, 2])
    y = torch.randint(3, (CLIENTS, SIZE), generator=draw)
    return params, Batch(x, y, torch.arange(SIZE) < count.unsqueeze(1), count, KEYS)


def by_autograd(model, params, names, batch):
    leaves = {n: params[n].clone().requires_grad_() for n in names}
    loss = Task(model, cross_entropy, cross_entropy).loss(params | leaves, batch)
    return loss.detach(), dict(zip(leaves, torch.autograd.grad(loss.sum(), list(leaves.values())), strict=True))


class Scaled(MLP):
    def forward(self, x):
        return 2 * super().forward(x)


class ScaledInPlace(MLP):
    def forward(self, x):
        return super().forward(x).mul_(2)


class ScaledInTraining(MLP):
    def forward(self, x):
        return super().forward(x) * (2 if self.training else 1)


class Twice(nn.Module):
    """A layer that is used two times."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(self.fc(x))


@pytest.mark.parametrize(
    ("module", "shape", "names"),
    [
        (MLP(5, 4, 6, 3), (5,), ["layers.0.weight", "layers.0.bias", "layers.1.weight", "head.weight", "head.bias"]),
        (MLP(5, 4, 6, 3), (5,), ["head.bias"]),
        (MLP(5, 4, 6, 3), (5,), ["layers.0.bias"]),
        (nn.Sequential(nn.Flatten(), nn.Linear(6, 3, bias=False)), (2, 3), ["1.weight"]),
        (CNN((1, 6, 6), (2,), (4,), 3, kernel=3, padding=1), (1, 6, 6), ["fcs.0.weight", "head.weight"]),
    ],
)
def test_gradients_by_hand_are_those_of_autograd(module, shape, names):
    model = StackedModel(module, torch.randn(2, *shape)).to(torch.device("cpu"), torch.float64)
    params, batch = stacked_minibatch(model, *shape)
    found = model.closed_form_gradients(params, names, batch, CRITERION_GRADIENTS[cross_entropy])
    assert found is not None
    loss, grads = by_autograd(model, params, names, batch)
    torch.testing.assert_close(found[0], loss, rtol=1e-13, atol=1e-13)
    assert list(found[1]) == names
    for n in names:
        torch.testing.assert_close(found[1][n], grads[n], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("module", "shape", "names"),
    [
        (Scaled(5, 4, 3), (5,), ["head.weight"]),
        (ScaledInPlace(5, 4, 3), (5,), ["head.weight"]),
        (ScaledInTraining(5, 4, 3), (5,), ["head.weight"]),
        (Twice(), (3,), ["fc.weight"]),
        (CNN((1, 6, 6), (2,), (4,), 3, kernel=3, padding=1), (1, 6, 6), ["convs.0.weight", "head.weight"]),
        (nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)), (5,), ["2.weight"]),
    ],
)
def test_gradients_are_left_to_autograd_where_more_happens(module, shape, names):
    model = StackedModel(module, torch.randn(2, *shape)).to(torch.device("cpu"), torch.float64)
    params, batch = stacked_minibatch(model, *shape)
    assert model.closed_form_gradients(params, names, batch, CRITERION_GRADIENTS[cross_entropy]) is None


def test_what_enters_the_head_is_seen_in_a_row_of_linear_layers():
    model = StackedModel(MLP(5, 4, 6, 3), torch.randn(2, 5)).to(torch.device("cpu"), torch.float64)
    params, batch = stacked_minibatch(model, 5)
    z, out = model.features(params, batch.x)
    torch.testing.assert_close(out, model(params, batch.x))
    again = torch.baddbmm(params["head.bias"].unsqueeze(1), z, params["head.weight"].transpose(1, 2))
    torch.testing.assert_close(out, again)
    assert z.shape == (CLIENTS, SIZE, 6) and (z >= 0).all()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_module_may_take_for_granted_how_images_lie_in_memory(channels: int) -> None:
    class Viewing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2, self.head = nn.Conv2d(channels, 6, 5), nn.Conv2d(6, 16, 5), nn.Linear(256, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = F.max_pool2d(F.relu(self.conv1(x)), 2)
            return self.head(F.max_pool2d(F.relu(self.conv2(x)), 2).view(-1, 256))

    torch.manual_seed(0)
    model = StackedModel(Viewing(), torch.rand(2, channels, 28, 28))
    assert not model.whole
    params = {n: torch.stack([t, 1.1 * t]) for n, t in model.initial.items()}
    for size in (2, 16):  # the second convolution has more weights than the smaller batch has numbers
        x = torch.rand(2, size, channels, 28, 28)
        for rows in (slice(0, 2), slice(1, 2)):
            found = model({n: t[rows] for n, t in params.items()}, x[rows])
            for c, out in zip(range(2)[rows], found, strict=True):
                alone = model.client({n: t[c] for n, t in params.items()})
                torch.testing.assert_close(out, alone(x[c]))


def test_rounding_does_not_decide_how_images_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images the other way round give other bits in float32, and the same way round the same ones."""
    monkeypatch.setattr(stacked, "LONG", 0)
    monkeypatch.setitem(agreement.NEAR, torch.float32, 0.0)
    torch.manual_seed(0)
    model = StackedModel(CNN((3, 16, 16), (8, 16), (), 4, 3, 1), torch.rand(2, 3, 16, 16))
    assert model.channels_last == {"convs.0.weight", "convs.1.weight"}


# What a user's module may do, and what it may not


class InPlace(nn.Module):
    """Scales its input, in place or not; as a first step of training or always."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.a, self.head = place, nn.Linear(16, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.place == "always" or (self.place == "in training" and self.training):
            x.mul_(0.5)
        elif self.place == "nowhere" or (self.place == "nowhere, in training" and self.training):
            x = x * 0.5
        return self.head(torch.tanh(self.a(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", [FedAvg, Ditto, FedPHP])
@pytest.mark.parametrize(("place", "elsewhere"), [("always", "nowhere"), ("in training", "nowhere, in training")])
def test_a_forward_may_work_in_place_on_its_input(method: type[Algorithm], place: str, elsewhere: str) -> None:
    """Two models of a client look at the same minibatch, and a data set is looked at again."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 16, generator=draw), torch.arange(40) % 3
    servers, before = [], x.clone()
    for kind in (place, elsewhere):
        fed = Federation.build(Source("own", x, y, 3), np.split(np.arange(40), 4), 0)
        torch.manual_seed(0)
        sim = Simulation(fed, InPlace(kind), method(), worlds.training(num_rounds=2), Evaluation(shift="none"))
        sim.run()
        servers.append(sim.server)
        assert torch.equal(x, before)
    for n, t in servers[0].items():
        assert torch.equal(t, servers[1][n]), n


class Changes(nn.Module):
    """Changes its weights in the forward pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a = how, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "data":
            self.a.weight.data.clamp_(-0.1, 0.1)
        elif self.training:
            with torch.no_grad():
                self.a.weight.mul_(0.9)
        return self.a(x)  # type: ignore[no-any-return]


def hooked() -> nn.Module:
    module = nn.Linear(4, 3)
    module.weight.register_hook(lambda g: g * 0)
    return module


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.a = nn.Parameter(torch.randn(3, dtype=torch.cfloat)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.fft.irfft(torch.fft.rfft(x) * self.w, n=4))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: Changes("data"), "parameter 'a.weight' is changed by the forward pass"),
        (lambda: Changes("no_grad"), "parameter 'a.weight' is changed by the forward pass"),
        (hooked, "parameter 'weight' has a hook"),
        (Complex, "parameter 'w' is complex"),
        (lambda: nn.LazyLinear(3), "parameter 'weight' has no shape yet; call the module on a batch"),
        (lambda: nn.Sequential(torch.jit.trace(nn.Linear(4, 3), torch.zeros(2, 4))), "has a part in TorchScript"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_what_would_not_be_heeded_is_refused(build: Callable[[], nn.Module], told: str) -> None:
    with pytest.raises(UserError, match=told):
        StackedModel(build(), torch.randn(2, 4))


def test_an_embedding_whose_rows_are_scaled_in_place_is_refused() -> None:
    module = nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Flatten(), nn.Linear(8, 3))
    with pytest.raises(UserError, match=r"parameter '0.weight' is changed by the forward pass.*max_norm"):
        StackedModel(module, torch.tensor([[0, 1], [2, 4]]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_another_type_are_taken(dtype: torch.dtype) -> None:
    module = nn.Linear(4, 3)
    model = StackedModel(copy.deepcopy(module).to(dtype), torch.randn(2, 4)).to(torch.device("cpu"), torch.float32)
    for n, t in module.state_dict().items():
        assert torch.equal(model.initial[n], t.to(dtype).float())


@pytest.mark.parametrize("token", [-1, 5, 100])
def test_a_token_outside_of_its_embedding_reads_nobody_elses_row(token: int) -> None:
    module = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))
    model = StackedModel(module, torch.tensor([[0, 1], [2, 4]]))
    params = {n: torch.stack([t, t + 1, t - 1]) for n, t in model.initial.items()}
    x = torch.zeros(3, 2, 2, dtype=torch.int64)
    model(params, x)
    x[1, 1, 0] = token
    with pytest.raises(UserError, match=f"0.weight: no row {token} in an embedding of 5 rows"):
        model(params, x)


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("turned", [True, False])
def test_a_product_turned_round_is_the_same_product(clients: int, turned: bool) -> None:
    """Few outputs of many inputs and rows take the other way on a CPU; what comes out is nobody's view."""
    rows, inputs, outputs = layers.TALL, layers.WIDE, layers.NARROW + (0 if turned else 1)
    x, weight = (torch.randn(clients, n, inputs, dtype=torch.float64) for n in (rows, outputs))
    weight_before, x_before = weight.clone(), x.clone()
    out = layers._product(x, weight)
    torch.testing.assert_close(out, torch.einsum("cbi,coi->cbo", x, weight), rtol=1e-12, atol=1e-12)
    assert out.is_contiguous()
    out.add_(1).relu_()
    assert torch.equal(x, x_before) and torch.equal(weight, weight_before)


class ViT(nn.Module):
    """Patches, a class token and learned positions: parameters of its own beside its layers."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, stride=4)
        self.token = nn.Parameter(torch.full((1, 1, 8), 0.1))
        self.positions = nn.Parameter(torch.arange(40.0).view(1, 5, 8) / 40)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.norm = norm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        rows = self.patches(x).flatten(2).transpose(1, 2)
        rows = torch.cat([self.token.expand(len(x), -1, -1), rows], 1) + self.positions
        return self.head(self.norm(self.encoder(rows)[:, 0]))


@pytest.fixture(scope="module")
def vit():
    torch.manual_seed(0)
    return StackedModel(ViT(), torch.rand(2, 1, 8, 8)).to(torch.device("cpu"), torch.float64)


def test_features_of_a_model_that_is_called_for_each_client(vit):
    assert vit.info.features == 8 and vit.head_name == "head"
    params = {n: torch.stack([t, t * 1.1 + 0.01]) for n, t in vit.initial.items()}
    x = torch.rand(2, 4, 1, 8, 8, dtype=torch.float64)
    valid = torch.tensor([[True] * 4, [True] * 3 + [False]])
    z, out = vit.features(params, x, valid)
    _, doubled = vit.features(params, x, valid, change=lambda z: 2 * z)
    for c, rows in enumerate((4, 3)):
        module = vit.client({n: t[c] for n, t in params.items()})
        entered: list[Tensor] = []
        module.head.register_forward_pre_hook(lambda m, given, entered=entered: entered.append(given[0]))
        expected = module(x[c, :rows])
        torch.testing.assert_close(z[c, :rows], entered[0])
        torch.testing.assert_close(out[c, :rows], expected)
        torch.testing.assert_close(doubled[c, :rows], module.head(2 * entered[0]))


def test_a_changed_feature_moves_running_statistics_once(vit):
    params = {n: torch.stack([t, t]) for n, t in vit.initial.items()}
    x = torch.rand(2, 4, 1, 8, 8, dtype=torch.float64)
    plain = {n: t.clone() for n, t in params.items()}
    vit(plain, x, keys=KEYS[:2])
    vit.features(params, x, keys=KEYS[:2], change=lambda z: 2 * z)
    torch.testing.assert_close(params["norm.running_mean"], plain["norm.running_mean"])


@pytest.mark.parametrize("name", ["moon", "fedmmd", "fedphp", "fedfu"])
def test_methods_that_look_at_features_train_a_vision_transformer(vit, name):
    servers = []
    for chunk in (0, 1):
        sim = worlds.simulation(
            ALGORITHMS[name](), "cnn", model=vit, chunk=chunk, num_rounds=2, join_ratio=1.0, batch_size=6
        )
        sim.run()
        servers.append(sim.server)
    for n in servers[0]:
        torch.testing.assert_close(servers[0][n], servers[1][n], rtol=1e-9, atol=1e-9)


def test_moon_trains_a_vision_transformer_as_a_loop_over_clients_does():
    """In the second round every client has a previous model, so that features are compared with two others."""
    torch.manual_seed(0)
    module = ViT(nn.LayerNorm)
    settings = {"num_rounds": 2, "join_ratio": 1.0, "batch_size": 6}
    slow = MOON(copy.deepcopy(module), worlds.federation("cnn"), worlds.training(**settings))
    for number in range(2):
        slow.play(number)
    model = StackedModel(module, torch.rand(2, 1, 8, 8))
    assert model.execution.mode == "layer by layer"
    sim = worlds.simulation(ALGORITHMS["moon"](), "cnn", model=model, **settings)
    sim.run()
    for n, t in slow.w.items():
        torch.testing.assert_close(sim.server[n], t, rtol=1e-9, atol=1e-9)


def test_layers_with_a_parametrization_run_within_a_stack():
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))
    model = StackedModel(nn.Sequential(normed, nn.ReLU(), nn.Linear(5, 3)), torch.rand(2, 6))
    assert str(model.execution) == "stacked, except 0 (ParametrizedLinear), which runs one client at a time"


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (nn.utils.weight_norm, "layer '0' uses torch.nn.utils.weight_norm, .*parametrizations.weight_norm"),
        (lambda m: prune.l1_unstructured(m, "weight", 0.5), "layer '0' is pruned .*prune.remove"),
    ],
)
def test_weights_that_a_hook_computes_are_refused(change, why, called):
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    change(module[0])
    if called:
        module(torch.rand(2, 6))
    with pytest.raises(UserError, match=why):
        StackedModel(module, torch.rand(2, 6))


def test_complex_outputs_are_refused():
    class Spectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 5)

        def forward(self, x):
            return torch.fft.fft(self.fc(x))

    with pytest.raises(UserError, match="Spectrum returns complex numbers"):
        StackedModel(Spectrum(), torch.rand(2, 6))


def test_a_module_that_holds_activations_of_an_earlier_call_is_taken():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x):
            self.hidden = self.a(x).relu()
            self.all = {"hidden": [self.hidden]}
            return self.b(self.hidden)

    module = Keeping()
    module(torch.rand(2, 6))
    model = StackedModel(module, torch.rand(2, 6))
    params = {n: t[None].clone().requires_grad_() for n, t in model.initial.items()}
    out = model(params, torch.rand(1, 4, 6), keys=KEYS[:1])
    assert out.requires_grad
    with model.copy().borrowed() as twin:
        assert twin.info.shapes == model.info.shapes
