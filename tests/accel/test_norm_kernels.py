"""Norms in few passes against PyTorch's, in float64: run with `-m gpu`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.checks import assert_near, two_gradients

norms = pytest.importorskip("personafl.accel.norm_kernels", reason="needs Triton", exc_type=ImportError)
pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def test_a_norm_without_an_epsilon_has_slopes() -> None:
    """A program's rows beyond the last have no spread, which may not reach the others."""
    rows, scale, shift = (
        torch.randn(2, 5, 4, device=CUDA),
        torch.ones(2, 4, device=CUDA),
        torch.zeros(2, 4, device=CUDA),
    )
    scale.requires_grad_()
    (slope,) = torch.autograd.grad(norms.layer_norm(rows, scale, shift, 0.0).square().sum(), scale)
    assert slope.isfinite().all()


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 5, 4), (3, 300, 20), (20, 700, 128), (5, 33, 64), (1, 3, 1024)])
def test_a_norm_in_one_pass_is_each_clients_layer_norm(shape: tuple[int, int, int]) -> None:
    clients, _, width = shape
    torch.manual_seed(0)
    rows = (3 * torch.randn(shape, device=CUDA) + 5).requires_grad_()
    scale, shift = (torch.randn(clients, width, device=CUDA, requires_grad=True) for _ in range(2))
    grad = torch.randn(shape, device=CUDA)
    out = norms.layer_norm(rows, scale, shift, 1e-5)
    found = torch.autograd.grad(out, (rows, scale, shift), grad)
    exact = [t.detach().double().requires_grad_() for t in (rows, scale, shift)]
    wanted = torch.stack([F.layer_norm(r, (width,), w, b, 1e-5) for r, w, b in zip(*exact, strict=True)])
    assert_near(out.detach(), wanted.detach(), 1e-5)
    for mine, other in zip(found, torch.autograd.grad(wanted, exact, grad.double()), strict=True):
        assert_near(mine, other, 2e-5)


@pytest.mark.parametrize("shape", [(1, 3, 8), (2, 5, 4), (3, 30, 20)])
def test_a_layer_norm_has_second_derivatives(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    rows, scale, shift = (torch.randn(s, device=CUDA) for s in (shape, shape[::2], shape[::2]))
    given = [3 * rows + 5, scale, shift]

    def plain(rows: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        each = zip(rows, scale, shift, strict=True)
        return torch.stack([F.layer_norm(r, shape[2:], w, b, 1e-5) for r, w, b in each])

    found = two_gradients(lambda *t: norms.layer_norm(*t, 1e-5), [t.requires_grad_() for t in given])
    wanted = two_gradients(plain, [t.detach().double().requires_grad_() for t in given])
    for mine, other in zip(found, wanted, strict=True):
        assert_near(mine, other, 1e-4)


# images, channels, height and width
IMAGES = [
    (64, 64, 32, 32),
    (64, 512, 4, 4),
    (10, 3, 7, 5),
    (2, 20, 3, 3),
    (8, 130, 1, 1),
    (129, 1, 1, 2),
    (33, 2, 16, 17),
]


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("shape", IMAGES)
def test_a_batch_norm_in_few_passes_is_pytorchs(shape: tuple[int, ...], tracked: bool) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(shape, device=CUDA) + 20).contiguous(memory_format=torch.channels_last)
    grad = torch.randn(shape, device=CUDA)  # another layout than the images'
    x.requires_grad_()
    weight, bias = (torch.randn(shape[1], device=CUDA, requires_grad=True) for _ in range(2))
    running = [torch.randn(shape[1], device=CUDA), torch.rand(shape[1], device=CUDA)] if tracked else [None, None]
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    exact_running = [None if t is None else t.double() for t in running]
    assert norms.batch_fits(x, weight, bias)
    out = norms.batch_norm(x, weight, bias, *running, 0.3, 1e-5)
    assert out.is_contiguous(memory_format=torch.channels_last)
    found = torch.autograd.grad(out, (x, weight, bias), grad)
    wanted = F.batch_norm(exact[0], *exact_running, *exact[1:], training=True, momentum=0.3, eps=1e-5)
    assert_near(out.detach(), wanted.detach(), 1e-5)
    for mine, other in zip(found, torch.autograd.grad(wanted, exact, grad.double()), strict=True):
        assert_near(mine, other, 1e-4)
    for moved, exactly in zip(running, exact_running, strict=True):
        assert (moved is None) == (exactly is None)
        if moved is not None and exactly is not None:
            assert_near(moved, exactly, 1e-5)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("shape", IMAGES)
def test_relu_and_what_is_added_are_part_of_a_batch_norm(
    shape: tuple[int, ...], beside: bool, kind: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, added = (
        torch.randn(shape, device=CUDA).to(kind).contiguous(memory_format=torch.channels_last).requires_grad_()
        for _ in range(2)
    )
    weight, bias = (torch.randn(shape[1], device=CUDA, requires_grad=True) for _ in range(2))
    grad = torch.randn(shape, device=CUDA).to(kind)
    running = [torch.randn(shape[1], device=CUDA), torch.rand(shape[1], device=CUDA)]
    exact_running = [t.double() for t in running]
    given = [x, weight, bias, *[added] * beside]
    out = norms.batch_norm(x, weight, bias, *running, 0.3, 1e-5, added=added if beside else None, relu=True)
    assert out.dtype == kind and out.is_contiguous(memory_format=torch.channels_last)
    found = torch.autograd.grad(out, given, grad)
    exact = [t.detach().double().requires_grad_() for t in given]
    normed = F.batch_norm(exact[0], *exact_running, *exact[1:3], training=True, momentum=0.3, eps=1e-5)
    wanted = (normed + exact[3] if beside else normed).relu()
    share = 1e-5 if kind == torch.float32 else 1e-2
    assert_near(out.detach(), wanted.detach(), share)
    for mine, other in zip(found, torch.autograd.grad(wanted, exact, grad.double()), strict=True):
        assert mine.dtype == (torch.float32 if mine.dim() == 1 else kind)
        assert_near(mine, other, 10 * share)
    for moved, exactly in zip(running, exact_running, strict=True):
        assert_near(moved, exactly, share)


@pytest.mark.parametrize(("relu", "beside"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("shape", [(10, 3, 7, 5), (2, 20, 3, 3), (8, 130, 1, 1)])
def test_a_batch_norm_has_second_derivatives(shape: tuple[int, ...], relu: bool, beside: bool) -> None:
    """So have ReLU and what is added; running statistics move once, however often the norm is computed."""
    torch.manual_seed(0)
    weight, bias = (torch.randn(shape[1], device=CUDA) for _ in range(2))
    images = [torch.randn(shape, device=CUDA).contiguous(memory_format=torch.channels_last) for _ in range(1 + beside)]
    given = [weight, bias, *images]
    running = [torch.randn(shape[1], device=CUDA), torch.rand(shape[1], device=CUDA)]
    exact_running = [t.double() for t in running]

    def fused(weight: Tensor, bias: Tensor, x: Tensor, added: Tensor | None = None) -> Tensor:
        return norms.batch_norm(x, weight, bias, *running, 0.3, 1e-5, added=added, relu=relu)

    def plain(weight: Tensor, bias: Tensor, x: Tensor, added: Tensor | None = None) -> Tensor:
        mean, var = exact_running
        out = F.batch_norm(x, mean, var, weight, bias, training=True, momentum=0.3, eps=1e-5)
        out = out if added is None else out + added
        return out.relu() if relu else out

    found = two_gradients(fused, [t.requires_grad_() for t in given])
    wanted = two_gradients(plain, [t.detach().double().requires_grad_() for t in given])
    for mine, other in zip(found, wanted, strict=True):
        assert_near(mine, other, 1e-4)
    for moved, exactly in zip(running, exact_running, strict=True):
        assert_near(moved, exactly, 1e-5)


def test_what_is_no_number_is_none_behind_relu() -> None:
    x = torch.randn(4, 3, 5, 5, device=CUDA).contiguous(memory_format=torch.channels_last)
    x[0, 1, 2, 3] = float("nan")
    one, none = torch.ones(3, device=CUDA), torch.zeros(3, device=CUDA)
    out = norms.batch_norm(x, one, none, None, None, 0.1, 1e-5, relu=True)
    assert out[:, 1].isnan().all() and out[:, [0, 2]].isfinite().all()


def test_nothing_goes_back_through_what_relu_makes_zero() -> None:
    """Where all numbers are the same, the norm is zero, and so is the slope of ReLU there."""
    x = torch.full((4, 3, 5, 5), 7.0, device=CUDA).contiguous(memory_format=torch.channels_last).requires_grad_()
    one, none = torch.ones(3, device=CUDA), torch.zeros(3, device=CUDA, requires_grad=True)
    out = norms.batch_norm(x, one, none, None, None, 0.1, 1e-5, relu=True)
    slopes = torch.autograd.grad(out.sum(), (x, none))
    assert not out.any() and not any(t.any() for t in slopes)


def test_a_number_whose_square_is_none_leaves_the_others_finite() -> None:
    x = torch.randn(64, 2, 8, 8, device=CUDA).contiguous(memory_format=torch.channels_last)
    x[40, 1, 2, 3] = 1e30
    one, none = torch.ones(2, device=CUDA), torch.zeros(2, device=CUDA)
    assert norms.batch_norm(x, one, none, None, None, 0.1, 1e-5).isfinite().all()


def test_a_mean_far_from_zero_leaves_the_spread_as_it_is() -> None:
    """Squares of numbers around 10,000 have no bits left for a spread of 1."""
    torch.manual_seed(0)
    x = (torch.randn(64, 8, 16, 16, device=CUDA) + 1e4).contiguous(memory_format=torch.channels_last)
    one, none = torch.ones(8, device=CUDA), torch.zeros(8, device=CUDA)
    out = norms.batch_norm(x, one, none, None, None, 0.1, 1e-5)
    assert_near(out, F.batch_norm(x.double(), None, None, training=True), 1e-3)


def test_other_layouts_and_types_are_left_to_pytorch() -> None:
    one = torch.ones(4, device=CUDA)
    x = torch.zeros(2, 4, 3, 3, device=CUDA).contiguous(memory_format=torch.channels_last)
    assert norms.batch_fits(x, one, one)
    assert norms.batch_fits(x.bfloat16(), one, one)
    for other in (x.contiguous(), x.double(), x.half(), x[:, :, :2], x.cpu(), torch.zeros(2, 4, device=CUDA)):
        assert not norms.batch_fits(other, one, one)
    assert not norms.batch_fits(x, one.double(), one) and not norms.batch_fits(x[:1, :, :1, :1], one, one)
