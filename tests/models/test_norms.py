"""Which parameters belong to normalisation layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from personafl import StackedModel
from personafl.models import MODELS

WEIGHT_AND_BIAS = ("weight", "bias")


class ScaleNorm(nn.Module):
    """A norm as users write it, on no class of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x / (x.norm(dim=-1, keepdim=True) + 1e-3)


class Conditioned(nn.LayerNorm):
    """A subclass whose name says nothing, with a linear layer inside, which is no norm."""

    def __init__(self) -> None:
        super().__init__(4)
        self.shift = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift(x)


class NormedLinear(nn.Linear):
    """A linear layer on normalised inputs: its weight is no norm's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.normalize(x, dim=-1))


class PreNorm(nn.Module):
    """A block of others' layers, which owns a parameter that is no norm's only by its place."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(4), inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(self.norm(x))
        return out


def norms(module: nn.Module, *shape: int) -> set[str]:
    return set(StackedModel(module, torch.randn(2, *shape)).info.norms)


def test_a_model_without_norms_has_none() -> None:
    assert norms(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), 3) == set()


@pytest.mark.parametrize(
    ("norm", "names"),
    [
        (nn.BatchNorm1d(4), {"1.weight", "1.bias"}),
        (nn.LayerNorm(4), {"1.weight", "1.bias"}),
        (nn.LayerNorm(4, bias=False), {"1.weight"}),
        (nn.RMSNorm(4), {"1.weight"}),
        (nn.GroupNorm(2, 4), {"1.weight", "1.bias"}),
        (nn.GroupNorm(2, 4, affine=False), set()),
        (ScaleNorm(), {"1.scale"}),
        (Conditioned(), {"1.weight", "1.bias"}),
        (NormedLinear(4, 4), set()),
        (PreNorm(nn.Linear(4, 4)), {"1.norm.weight", "1.norm.bias"}),
        (PreNorm(PreNorm(nn.RMSNorm(4))), {f"1.{n}" for n in (
            "norm.weight", "norm.bias", "inner.norm.weight", "inner.norm.bias", "inner.inner.weight")}),
    ],
)  # fmt: skip
def test_norms_are_the_parameters_of_normalisation_layers(norm: nn.Module, names: set[str]) -> None:
    assert norms(nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 2)), 3) == names


def test_norms_over_images_count_too_and_frozen_ones_do_not() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)
    )
    assert norms(module, 1, 4, 4) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    module[1].requires_grad_(False)
    assert norms(module, 1, 4, 4) == {"2.weight", "2.bias"}


def test_the_norms_of_a_transformer_are_inside_its_layers() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    module = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(12, 2))
    assert norms(module, 3, 4) == {
        f"0.layers.{i}.norm{k}.{n}" for i in (0, 1) for k in (1, 2) for n in ("weight", "bias")
    }


def test_the_norms_of_a_residual_network_are_all_its_batch_norms() -> None:
    module = MODELS["resnet18"].build((3, 32, 32), 10)
    wanted = {
        f"{p}.{n}" for p, m in module.named_modules() if isinstance(m, nn.BatchNorm2d) for n in ("weight", "bias")
    }
    assert len(wanted) == 2 * 20
    assert set(StackedModel(module, torch.rand(2, 3, 32, 32)).info.norms) == wanted
