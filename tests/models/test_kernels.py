"""The kernels of stacked convolution and dropout against PyTorch, a client at a time: run with `-m gpu`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl import Evaluation, FedAvg, Simulation, StackedModel
from personafl.core import rng
from personafl.models import MODELS
from tests import worlds

kernels = pytest.importorskip("personafl.models.kernels", reason="needs Triton", exc_type=ImportError)
pytestmark = pytest.mark.gpu

# clients, batch, channels in and out, kernel, height, width, padding, what follows, bias
SHAPES = [
    (3, 64, 1, 32, 5, 28, 28, 0, kernels.POOL, True),
    (3, 64, 32, 64, 5, 12, 12, 0, kernels.POOL, True),
    (20, 10, 32, 64, 5, 12, 12, 0, kernels.POOL, True),
    (50, 10, 3, 32, 3, 32, 32, 0, kernels.RELU, True),
    (3, 2, 3, 16, 3, 9, 7, 1, kernels.RELU, True),
    (2, 2, 16, 20, 3, 6, 6, 1, kernels.PLAIN, False),
    (1, 5, 8, 8, 5, 8, 8, 2, kernels.POOL, True),
    (2, 40, 3, 5, 3, 7, 6, 0, kernels.POOL, False),
    (4, 130, 64, 70, 3, 8, 8, 1, kernels.PLAIN, True),
]
# Largest error of the outputs, and of the gradients by norm, each as a share of the largest output and of the norm.
# In bf16 a rounded output may come from another place of its window, or not through the ReLU, so gradients move more.
WITHIN = {"float32": (2e-6, 2e-6), "tf32": (2e-3, 3e-2), "bf16": (2e-2, 1e-1)}


def alone(x: Tensor, weight: Tensor, bias: Tensor | None, pad: int, mode: int) -> Tensor:
    outs = []
    for c, images in enumerate(x.chunk(len(weight))):
        out = F.conv2d(images, weight[c], None if bias is None else bias[c], padding=pad)
        out = F.relu(out) if mode else out
        outs.append(F.max_pool2d(out, 2) if mode == kernels.POOL else out)
    return torch.cat(outs)


@pytest.mark.parametrize("how", list(WITHIN))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_convolution_of_all_clients_is_each_clients_own(shape: tuple[int, ...], how: str) -> None:
    clients, batch, i, o, k, high, wide, pad, mode, biased = shape
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(clients * batch, i, high, wide, device="cuda", generator=draw)
    weight = torch.randn(clients, o, i, k, k, device="cuda", generator=draw) / (i * k * k) ** 0.5
    bias = torch.randn(clients, o, device="cuda", generator=draw) if biased else None
    given = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    exact = [t.detach().double().requires_grad_() for t in given]
    out = kernels.convolution(x, weight, bias, pad, mode, how, torch.float32)
    truth = alone(exact[0], exact[1], exact[2] if biased else None, pad, mode)
    grad = torch.randn(out.shape, device="cuda", generator=draw)
    within, of_gradients = WITHIN[how]
    assert out.shape == truth.shape
    assert (out - truth).abs().max() <= within * truth.abs().max()
    pairs = zip(torch.autograd.grad(out, given, grad), torch.autograd.grad(truth, exact, grad.double()), strict=True)
    for found, true in pairs:
        assert (found - true).norm() <= of_gradients * true.norm()


def test_a_number_that_is_none_stays_one() -> None:
    weight = torch.full((1, 16, 16, 3, 3), torch.nan, device="cuda")
    for mode in (kernels.PLAIN, kernels.RELU, kernels.POOL):
        out = kernels.convolution(torch.ones(2, 16, 8, 8, device="cuda"), weight, None, 0, mode, "bf16", torch.float32)
        assert out.isnan().all()


def test_dropout_draws_as_a_cpu_does() -> None:
    keys = rng.key(0, "noise", torch.arange(5))
    x = torch.rand(5, 3000) + 0.5
    kept = rng.uniform(keys, 3000, torch.float32) >= 0.3
    given = x.cuda().requires_grad_()
    out = kernels.dropout(given, keys.cuda(), 0.3)
    assert torch.equal(out.detach().cpu(), torch.where(kept, x / (1 - 0.3), 0))
    (grad,) = torch.autograd.grad(out, given, torch.ones_like(out))
    assert torch.equal(grad.cpu(), torch.where(kept, torch.ones_like(x) / (1 - 0.3), 0))


def test_only_what_the_kernels_have_goes_to_them() -> None:
    fits = {
        nn.Conv2d(3, 8, 3): True,
        nn.Conv2d(3, 8, 3, padding=1): True,
        nn.Conv2d(3, 8, 3, stride=2): False,
        nn.Conv2d(4, 8, 3, groups=2): False,
        nn.Conv2d(3, 8, 3, dilation=2): False,
        nn.Conv2d(3, 8, (3, 5)): False,
        nn.Conv2d(3, 8, 3, padding="same"): False,
        nn.Conv2d(3, 8, 3, padding=(1, 0)): False,
        nn.Conv2d(3, 8, 1, padding=1): False,
    }
    assert {conv: kernels.fits(conv) for conv in fits} == fits


@pytest.mark.parametrize("name", ["cifar-cnn", "dropout-cnn", "resnet18"])
def test_models_in_single_precision_agree_with_a_cpu(name: str) -> None:
    """Also where all clients share one row of parameters, as those of a model just received do."""
    torch.manual_seed(0)
    model = StackedModel(MODELS[name].build((3, 32, 32), 10), torch.rand(2, 3, 32, 32))
    x = torch.rand(3, 4, 3, 32, 32)
    params = {n: t.expand(3, *t.shape) for n, t in model.initial.items()}
    truth = model(params, x)
    model = model.to(torch.device("cuda"), torch.float32)
    found = model({n: t.cuda()[:1].expand_as(t) for n, t in params.items()}, x.cuda())
    torch.testing.assert_close(found.cpu(), truth, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_a_run_ends_near_the_exact_one(precision: str) -> None:
    shown = Evaluation(eval_every=4, shift="none")
    ends = []
    for way in ("float64", precision):
        training = worlds.training(num_rounds=4, precision=way)
        sim = Simulation(worlds.federation("cnn"), worlds.model("cnn"), FedAvg(), training, shown, device="cuda")
        sim.run()
        ends.append(sim.server)
    exact, found = ends
    within = {"float32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}[precision]
    for n, t in exact.items():
        assert (found[n] - t).abs().max() <= within
