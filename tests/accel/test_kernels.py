"""The kernels of stacked convolution and dropout against PyTorch, a client at a time: run with `-m gpu`."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl import Evaluation, FedAvg, Machine, Simulation, StackedModel
from personafl.core import rng
from personafl.core.errors import UserError
from personafl.core.torch_state import products
from personafl.core.types import Arithmetic
from personafl.models import MODELS
from tests import worlds
from tests.checks import assert_near, two_gradients

kernels = pytest.importorskip("personafl.accel.kernels", reason="needs Triton", exc_type=ImportError)
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
    (10, 40, 16, 130, 3, 8, 8, 1, kernels.RELU, True),  # tiles of 128 columns, as many as a GPU wants
    (3, 16, 256, 256, 3, 4, 4, 1, kernels.POOL, False),
]
WITHIN = {"float32": 2e-6, "tf32": 2e-3, "bf16": 2e-2}  # error of outputs, as a share of the largest
KERNELS = ("forward", "for_weight", "spread", "pack", "collect", "largest", "scale")


def alone(x: Tensor, weight: Tensor, bias: Tensor | None, pad: int, mode: int) -> Tensor:
    outs = []
    for c, images in enumerate(x.chunk(len(weight))):
        out = F.conv2d(images, weight[c], None if bias is None else bias[c], padding=pad)
        out = F.relu(out) if mode else out
        outs.append(F.max_pool2d(out, 2) if mode == kernels.POOL else out)
    return torch.cat(outs)


def drawn(shape: tuple[int, ...], draw: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Images, weights, biases and gradients of the outputs."""
    clients, batch, i, o, k, high, wide, pad, mode, biased = shape
    wide, high = wide + 2 * pad - k + 1, high + 2 * pad - k + 1
    size = (high // 2, wide // 2) if mode == kernels.POOL else (high, wide)
    images, grad = draw(clients * batch, i, *shape[5:7]), draw(clients * batch, o, *size)
    return images, draw(clients, o, i, k, k), draw(clients, o) if biased else None, grad


@pytest.mark.parametrize("how", list(WITHIN))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_small_whole_numbers_come_out_exactly(shape: tuple[int, ...], how: str) -> None:
    """No arithmetic rounds them, so outputs and gradients are those of a convolution per client to the last bit."""
    stream = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randint(-2, 3, size, device="cuda", generator=stream).float()

    x, weight, bias, grad = drawn(shape, draw)
    given = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    exact = [t.detach().double().requires_grad_() for t in given]
    out = kernels.convolution(x, weight, bias, shape[7], shape[8], how, torch.float32)
    truth = alone(exact[0], exact[1], exact[2] if bias is not None else None, shape[7], shape[8])
    assert torch.equal(out, truth.float())
    pairs = zip(torch.autograd.grad(out, given, grad), torch.autograd.grad(truth, exact, grad.double()), strict=True)
    for found, true in pairs:
        assert true.abs().max() < 2**24
        assert torch.equal(found, true.float())


@pytest.mark.parametrize("how", list(WITHIN))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_numbers_are_rounded_as_the_precision_says(shape: tuple[int, ...], how: str) -> None:
    """Gradients in float32 only: an output that was rounded may come from another place, or not through the ReLU."""
    stream = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", generator=stream)

    x, weight, bias, grad = drawn(shape, draw)
    given = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    exact = [t.detach().double().requires_grad_() for t in given]
    out = kernels.convolution(x, weight, bias, shape[7], shape[8], how, torch.float32)
    truth = alone(exact[0], exact[1], exact[2] if bias is not None else None, shape[7], shape[8])
    assert (out - truth).abs().max() <= WITHIN[how] * truth.abs().max()
    if how == "float32":
        found = torch.autograd.grad(out, given, grad)
        for f, true in zip(found, torch.autograd.grad(truth, exact, grad.double()), strict=True):
            assert (f - true).norm() <= WITHIN[how] * true.norm()


@pytest.mark.parametrize("how", list(WITHIN))
@pytest.mark.parametrize("size", [1e-12, 1e-5, 1e5])
def test_numbers_far_from_one_are_rounded_no_more_than_others(size: float, how: str) -> None:
    """Each client's have a size of their own, so that none is rounded by what fits another."""
    stream, shape = torch.Generator("cuda").manual_seed(0), (3, 16, 16, 20, 3, 8, 8, 1, kernels.PLAIN, True)

    def draw(*of: int) -> Tensor:
        each = torch.tensor([1.0, size, size**2 if size < 1e-6 else 1 / size], device="cuda").view(-1, *[1] * len(of))
        return (torch.randn(3, of[0] // 3, *of[1:], device="cuda", generator=stream) * each).flatten(0, 1)

    x, weight, bias, grad = drawn(shape, draw)
    given = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
    exact = [t.detach().double().requires_grad_() for t in given]
    out = kernels.convolution(x, weight, bias, 1, kernels.PLAIN, how, torch.float32)
    truth = alone(exact[0], exact[1], exact[2], 1, kernels.PLAIN)
    found = [out, *torch.autograd.grad(out, given, grad)]
    for f, true in zip(found, [truth, *torch.autograd.grad(truth, exact, grad.double())], strict=True):
        for own, own_true in zip(f.double().chunk(3), true.chunk(3), strict=True):
            if own_true.abs().max() > 1e-30:  # smaller ones are rounded in float32 itself
                assert (own - own_true).norm() <= WITHIN[how] * own_true.norm()


@pytest.mark.parametrize("how", list(WITHIN))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layers_kernels_are_compiled_together(
    shape: tuple[int, ...], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, batch, i, o, k, high, wide, pad, mode, biased = shape
    found: list[bool] = []  # of every kernel compiled or found in the cache: whether it was ahead of its launch
    ahead = False
    compile_all = kernels._compile

    def compiling(*given: object) -> None:
        nonlocal ahead
        ahead = True
        compile_all(*given)
        ahead = False

    def hook(*_: object, **__: object) -> None:
        found.append(ahead)

    monkeypatch.setattr(kernels, "_compile", compiling)
    monkeypatch.setattr(kernels, "_compiled", set())
    monkeypatch.setattr("triton.knobs.runtime.jit_post_compile_hook", hook)
    for kernel in (getattr(kernels, f"_{n}") for n in KERNELS):
        kernel.device_caches.clear()
    x = torch.randn(clients * batch, i, high, wide, device="cuda", requires_grad=True)
    weight = torch.randn(clients, o, i, k, k, device="cuda", requires_grad=True)
    bias = torch.randn(clients, o, device="cuda") if biased else None
    kernels.convolution(x, weight, bias, pad, mode, how, torch.float32).sum().backward()
    assert found and all(found)


def test_launchers_are_loaded_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that load Triton's launchers again may be given each other's."""
    from triton.backends.nvidia.driver import CudaLauncher

    by: list[int] = []
    make = CudaLauncher.__init__

    def told(self: Any, *given: Any, **more: Any) -> None:
        by.append(threading.get_ident())
        make(self, *given, **more)

    monkeypatch.setattr(CudaLauncher, "__init__", told)
    monkeypatch.setattr(kernels, "_compiled", set())
    for kernel in (getattr(kernels, f"_{n}") for n in KERNELS):
        kernel.device_caches.clear()
    x, weight = torch.randn(4, 16, 8, 8, device="cuda"), torch.randn(2, 16, 16, 3, 3, device="cuda")
    kernels.convolution(x, weight, None, 1, kernels.POOL, "tf32", torch.float32)
    assert len(by) > 4 and set(by) == {threading.get_ident()}


@pytest.mark.parametrize("how", list(WITHIN))
def test_a_number_that_is_none_stays_one(how: str) -> None:
    weight = torch.full((1, 16, 16, 3, 3), torch.nan, device="cuda")
    for mode in (kernels.PLAIN, kernels.RELU, kernels.POOL):
        out = kernels.convolution(torch.ones(2, 16, 8, 8, device="cuda"), weight, None, 0, mode, how, torch.float32)
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


# Small ones: an output that is rounded to the other side of zero has another gradient.
FEW = [
    (3, 2, 3, 16, 3, 9, 7, 1, kernels.RELU, True),
    (2, 2, 16, 20, 3, 6, 6, 1, kernels.PLAIN, False),
    (2, 3, 4, 5, 3, 6, 6, 1, kernels.PLAIN, True),
    (1, 5, 8, 8, 5, 8, 8, 2, kernels.POOL, True),
    (2, 10, 3, 5, 3, 7, 6, 0, kernels.POOL, False),
]


@pytest.mark.parametrize("of_images", [True, False])
@pytest.mark.parametrize("shape", FEW, ids=str)
def test_a_convolution_in_float32_has_second_derivatives(shape: tuple[int, ...], of_images: bool) -> None:
    """Also where the images need no gradient, as those of a first layer."""
    stream = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, device="cuda", generator=stream)

    images, weight, bias, _ = drawn(shape, draw)
    given = [images] * of_images + [weight] + ([] if bias is None else [bias])

    def parts(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
        x, *rest = tensors if of_images else (images.to(tensors[0].dtype), *tensors)
        return x, rest[0], rest[1] if len(rest) > 1 else None

    def fused(*tensors: Tensor) -> Tensor:
        return kernels.convolution(*parts(tensors), shape[7], shape[8], "float32", torch.float32)

    def plain(*tensors: Tensor) -> Tensor:
        return alone(*parts(tensors), shape[7], shape[8])

    with products("float32"):  # PyTorch's own would be tf32
        found = two_gradients(fused, [t.requires_grad_() for t in given])
    wanted = two_gradients(plain, [t.detach().double().requires_grad_() for t in given])
    for mine, other in zip(found, wanted, strict=True):
        assert_near(mine, other, 1e-4)


@pytest.mark.parametrize("how", ["tf32", "bf16"])
def test_a_convolution_that_rounds_its_inputs_refuses_second_derivatives(how: Arithmetic) -> None:
    x, weight = torch.randn(4, 16, 8, 8, device="cuda"), torch.randn(2, 16, 16, 3, 3, device="cuda", requires_grad=True)
    out = kernels.convolution(x, weight, None, 1, kernels.RELU, how, torch.float32)
    with pytest.raises(UserError, match=f"precision='{how}': convolutions have no second derivatives"):
        torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    (grad,) = torch.autograd.grad(kernels.convolution(x, weight, None, 1, 0, how, torch.float32).sum(), weight)
    assert grad.isfinite().all()


def test_dropout_has_second_derivatives() -> None:
    keys = rng.key(0, "noise", torch.arange(5))
    x = torch.rand(5, 3000) + 0.5
    kept = rng.uniform(keys, 3000, torch.float32) >= 0.3
    found = two_gradients(lambda t: kernels.dropout(t, keys.cuda(), 0.3), [x.cuda().requires_grad_()])
    wanted = two_gradients(lambda t: torch.where(kept, t / 0.7, 0), [x.double().requires_grad_()])
    for mine, other in zip(found, wanted, strict=True):
        assert_near(mine.cpu(), other, 1e-5)


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
    """As near to the exact numbers as a CPU, also where clients share one row of parameters as they do on arrival."""
    torch.manual_seed(0)
    module = MODELS[name].build((3, 32, 32), 10)
    x = torch.rand(3, 4, 3, 32, 32)
    found = {}
    for device, dtype in (("cpu", torch.float64), ("cpu", torch.float32), ("cuda", torch.float32)):
        model = StackedModel(copy.deepcopy(module), x[0]).to(torch.device(device), dtype)
        params = {n: t.to(device, dtype).expand(3, *t.shape) for n, t in model.initial.items()}
        with products("float32"):  # PyTorch's own would be tf32
            found[device, dtype] = model(params, x.to(device, dtype)).cpu().double()
    exact, cpu, gpu = found.values()
    assert (gpu - exact).norm() <= 4 * (cpu - exact).norm()


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_a_run_ends_near_the_exact_one(precision: str) -> None:
    shown = Evaluation(eval_every=4, shift="none")
    ends = []
    for way in ("float64", precision):
        training = worlds.training(num_rounds=4, precision=way)
        sim = Simulation(
            worlds.federation("cnn"), worlds.model("cnn"), FedAvg(), training, shown, machine=Machine(device="cuda")
        )
        sim.run()
        ends.append(sim.server)
    exact, found = ends
    within = {"float32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}[precision]
    for n, t in exact.items():
        assert (found[n] - t).abs().max() <= within


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
        self.words, self.encoder = nn.Embedding(20, 64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.encoder(self.words(x)).mean(1))
        return out


def test_sequences_in_bf16_are_as_near_to_float32_as_under_autocast() -> None:
    torch.manual_seed(0)
    module, x = Sequences(), torch.randint(20, (3, 8, 12))
    found, alone = {}, copy.deepcopy(module).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        own = alone(x[0].cuda())
    usual = [own, *torch.autograd.grad(own.float().square().sum(), list(alone.parameters()))]
    for how in ("float32", "bf16"):
        model = StackedModel(copy.deepcopy(module), x[0]).to(torch.device("cuda"), torch.float32, how)
        params = {n: t.repeat(3, *[1] * t.dim()).requires_grad_() for n, t in model.initial.items()}
        with products(how):
            z, out = model.features(params, x.cuda(), keys=torch.arange(3, device="cuda"))
            grads = torch.autograd.grad(out.square().sum(), list(params.values()))
        assert {t.dtype for t in (z, out, *grads)} == {torch.float32}
        found[how] = [out.detach(), *grads]
    for exact, near, other in zip(*found.values(), usual, strict=True):
        assert 0 < (near[0] - exact[0]).norm() <= 2 * (other - exact[0]).norm()
