"""Attention over short sequences in one launch against PyTorch's, in float64: run with `-m gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from personafl import StackedModel
from personafl.core.torch_state import products
from personafl.models import attention
from tests.checks import assert_near, two_gradients

own = pytest.importorskip("personafl.accel.attention_kernels", reason="needs Triton", exc_type=ImportError)
norms = pytest.importorskip("personafl.accel.norm_kernels", reason="needs Triton", exc_type=ImportError)
pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")

# precision, type of the numbers, error of outputs and gradients as a share of the largest
HOW = [
    ("float32", torch.float32, 4e-6),
    ("tf32", torch.float32, 3e-3),
    ("bf16", torch.bfloat16, 3e-2),
]
SHAPES = [(3, 1, 1, 16), (2, 5, 2, 4), (3, 16, 1, 8), (2, 17, 3, 20), (4, 64, 2, 33), (50, 80, 4, 32), (2, 128, 2, 64)]


def seen_by(packed: Tensor, heads: int, causal: bool) -> Tensor:
    q, k, v = attention.split_heads(packed, 3, heads)
    return attention.join_heads(F.scaled_dot_product_attention(q, k, v, is_causal=causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("how", "kind", "share"), HOW)
def test_attention_in_one_launch_is_attention(
    how: Any, kind: torch.dtype, share: float, shape: tuple[int, ...], causal: bool
) -> None:
    examples, length, heads, width = shape
    torch.manual_seed(0)
    packed = torch.randn(examples, length, 3 * heads * width, device=CUDA, dtype=kind, requires_grad=True)
    grad = torch.randn(examples, length, heads * width, device=CUDA, dtype=kind)
    out = own.short_attention(packed, heads, causal=causal, how=how)
    (back,) = torch.autograd.grad(out, packed, grad)
    exact = packed.detach().double().requires_grad_()
    wanted = seen_by(exact, heads, causal)
    (wanted_back,) = torch.autograd.grad(wanted, exact, grad.double())
    assert_near(out.detach(), wanted.detach(), share)
    assert_near(back, wanted_back, share)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(3, 1, 1, 16), (2, 5, 2, 4), (2, 17, 3, 20), (4, 64, 2, 33)])
def test_attention_has_second_derivatives(shape: tuple[int, ...], causal: bool) -> None:
    examples, length, heads, width = shape
    torch.manual_seed(0)
    packed = torch.randn(examples, length, 3 * heads * width, device=CUDA, requires_grad=True)
    with products("float32", CUDA):
        found = two_gradients(lambda t: own.short_attention(t, heads, causal=causal, how="float32"), [packed])
    with sdpa_kernel(SDPBackend.MATH):  # the only one of PyTorch's that has second derivatives
        wanted = two_gradients(lambda t: seen_by(t, heads, causal), [packed.detach().double().requires_grad_()])
    for mine, other in zip(found, wanted, strict=True):
        assert_near(mine, other, 1e-4)


def test_attention_with_large_scores_stays_finite() -> None:
    packed = (torch.randn(2, 20, 3 * 2 * 8, device=CUDA) * 1e3).requires_grad_()
    out = own.short_attention(packed, 2, causal=False, how="float32")
    (back,) = torch.autograd.grad(out.sum(), packed)
    assert_near(out.detach(), seen_by(packed.detach().double(), 2, causal=False), 1e-3)
    assert back.isfinite().all()


@pytest.mark.parametrize("change", ["long", "wide", "double", "host", "small"])
def test_what_has_no_kernel_is_left_to_pytorch(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, kind, where = (2, 128, 3 * 2 * 64), torch.float32, "cuda"
    assert own.fits(torch.zeros(shape, device=CUDA), 2)
    if change == "long":
        shape = (2, 129, 3 * 2 * 64)
    elif change == "wide":
        shape = (2, 128, 3 * 2 * 65)
    elif change == "small":
        monkeypatch.setattr(own, "_room", lambda _: 101_376)  # of an RTX 3090
    kind, where = (torch.float64 if change == "double" else kind), ("cpu" if change == "host" else where)
    assert not own.fits(torch.zeros(shape, dtype=kind, device=where), 2)


class Encoder(nn.Module):
    """Two layers that attend to what came before."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 3, 40, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        out: Tensor = self.out(self.encoder(x, mask=hidden, is_causal=True).mean(1))
        return out


@pytest.mark.parametrize("clients", [1, 3])
def test_a_stacked_encoder_takes_them_and_is_each_clients_own(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = StackedModel(Encoder(), torch.randn(2, 9, 24)).to(CUDA, torch.float32, "float32")
    params = {n: torch.stack([t + 0.1 * torch.randn_like(t) for _ in range(clients)]) for n, t in model.initial.items()}
    leaves = {n: t.requires_grad_() for n, t in params.items()}
    x = torch.randn(clients, 5, 9, 24, device=CUDA)

    def ran(keys: Tensor) -> tuple[Tensor, ...]:
        with products("float32", CUDA):
            out = model(leaves, x, keys=keys)
            return out.detach(), *torch.autograd.grad(out.square().sum(), list(leaves.values()))

    keys = torch.zeros(clients, dtype=torch.int64, device=CUDA)
    ran(keys)  # the first call of a size compares a stack with clients alone, which calls them more often
    called: list[str] = []
    real = own.short_attention, norms.layer_norm
    monkeypatch.setattr(own, "short_attention", lambda *a, **k: (called.append("attention"), real[0](*a, **k))[1])
    monkeypatch.setattr(norms, "layer_norm", lambda *a, **k: (called.append("norm"), real[1](*a, **k))[1])
    mine = ran(keys)
    assert called.count("attention") == 2 and called.count("norm") == 4
    monkeypatch.setattr(own, "fits", lambda *a: False)
    monkeypatch.setattr(norms, "fits", lambda *a: False)
    for one, other in zip(mine, ran(keys), strict=True):
        assert_near(one, other.double(), 1e-4)
    assert len(called) == 6
