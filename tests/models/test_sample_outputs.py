"""Outputs by which runs and deployments find that a model's code is not what it was."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import personafl
from personafl import UserError
from personafl.experiment import model_files
from personafl.models import StackedModel
from personafl.models.sample_outputs import MOST_OUTPUTS, TOLERANCE, outputs_difference, sample_outputs


class Net(nn.Module):
    """A network whose last layer begins with zeros."""

    def __init__(self, activation: Callable[[Tensor], Tensor], classes: int = 3, *, zeros: bool = True) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, classes)
        self.activation = activation
        if zeros:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.activation(self.norm(self.body(x))))
        return out


class Tokens(nn.Module):
    """A model of rows of numbers that stand for words, the first of which counts for nothing."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 5, padding_idx=0), nn.Linear(5, 3)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.activation(self.table(x)).mean(1))
        return out


class Looked(nn.Module):
    """A model whose floats are places in a table, so that not any number will do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.table(x.long()).flatten(1)
        return out


def outputs(make: Callable[[], nn.Module], example: Tensor) -> tuple[float, ...]:
    torch.manual_seed(0)
    return StackedModel(make(), example).sample_outputs


def again(model: StackedModel) -> tuple[float, ...]:
    return sample_outputs(model, model.module, model.initial, model.example)


def of_net(activation: Callable[[Tensor], Tensor], classes: int = 3) -> tuple[float, ...]:
    return outputs(lambda: Net(activation, classes), torch.randn(2, 4))


def test_the_same_code_gives_the_same_outputs_whatever_was_drawn_before() -> None:
    first = of_net(torch.relu)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    model = StackedModel(Net(torch.relu), torch.randn(2, 4))
    state = torch.random.get_rng_state()
    assert again(model) == model.sample_outputs
    assert torch.equal(torch.random.get_rng_state(), state) and not torch.equal(before, state)
    assert of_net(torch.relu) == first and len(first) == 6
    assert outputs_difference(first, of_net(torch.relu)) is None


@pytest.mark.parametrize("other", [torch.tanh, nn.functional.gelu, lambda x: nn.functional.leaky_relu(x, 0.05)])
def test_another_activation_is_found_behind_a_layer_of_zeros(other: Callable[[Tensor], Tensor]) -> None:
    why = r"largest difference .*, largest output .*, tolerance 0\.0001 of it"
    assert re.fullmatch(why, str(outputs_difference(of_net(other), of_net(torch.relu))))


def test_another_eps_is_found_where_it_matters() -> None:
    def make() -> nn.Module:
        net = Net(torch.relu)
        net.norm.eps = 1e-2
        return net

    assert outputs_difference(outputs(make, torch.randn(2, 4)), of_net(torch.relu)) is not None


def test_tokens_are_drawn_from_the_table() -> None:
    example = torch.zeros(2, 6, dtype=torch.int64)
    first, other = (outputs(lambda f=f: Tokens(f), example) for f in (torch.relu, torch.tanh))  # type: ignore[misc]
    assert first[:3] != first[3:]
    assert outputs_difference(other, first) is not None


def test_where_numbers_cannot_be_drawn_the_example_is_taken() -> None:
    assert len(outputs(Looked, torch.tensor([[0.0], [1.0]]))) == 6


def test_outputs_are_bounded_in_number() -> None:
    assert len(of_net(torch.relu, classes=1000)) == MOST_OUTPUTS


def test_what_is_never_finite_is_not_compared() -> None:
    found = of_net(lambda x: x * math.inf)
    assert found == ()
    assert outputs_difference(of_net(torch.relu), found) is None


def test_rounding_is_none_of_it_and_a_missing_output_is() -> None:
    agreed = (1.0, -2.0, 0.0)
    assert outputs_difference((1.0, -2.0, TOLERANCE), agreed) is None
    for mine in ((1.0, -2.0, 3 * TOLERANCE), (1.0, -2.0), ()):
        assert outputs_difference(mine, agreed) is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_not_compared(dtype: torch.dtype) -> None:
    assert outputs(lambda: Net(torch.relu).to(dtype), torch.randn(2, 4, dtype=dtype)) == ()


def test_a_model_in_float64_gives_them_within_the_tolerance() -> None:
    torch.manual_seed(0)
    model = StackedModel(Net(torch.relu), torch.randn(2, 4))
    before = model.sample_outputs
    model.to(torch.device("cpu"), torch.float64)
    assert again(model) != before and outputs_difference(again(model), before) is None


SMALL: dict[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 4},
    "training": {"num_rounds": 2, "local_epochs": 1, "batch_size": 64},
    "evaluation": {"shift": "none"},
    "algorithms": [{"name": "fedavg"}],
}


class Scaled(nn.Module):
    """Features times a tensor that is neither a parameter nor a buffer, so that no file has it."""

    def __init__(self, scale: float = 1.0, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.scale, self.activation = torch.full((16,), scale), activation
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.activation(self.body(x.flatten(1))) * self.scale)
        return out


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, saved after each of its two rounds."""
    out = tmp_path_factory.mktemp("outputs") / "run"
    personafl.run(SMALL, model=Scaled(), out=out)
    return out


OTHERS = pytest.mark.parametrize("other", [lambda: Scaled(1.01), lambda: Scaled(activation=torch.tanh)])


@OTHERS
def test_a_run_is_not_read_with_a_model_of_other_outputs(run_folder: Path, other: Callable[[], nn.Module]) -> None:
    personafl.Result.load(run_folder, model=Scaled())  # its weights are drawn anew and replaced by the run's
    with pytest.raises(UserError, match=r"the model gives other outputs than that of this run for the same weights \("):
        personafl.Result.load(run_folder, model=other())


@OTHERS
def test_a_run_does_not_go_on_with_a_model_of_other_outputs(tmp_path: Path, other: Callable[[], nn.Module]) -> None:
    def interrupt(label: str, seed: int, stages: int, row: dict[str, Any]) -> None:
        if row["round"] == 1:
            raise KeyboardInterrupt

    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        personafl.run(SMALL, model=Scaled(), out=out, checkpoint_every=1, watch=interrupt)
    with pytest.raises(UserError, match="other outputs than that of this run"):
        personafl.resume(out, model=other(), quiet=True)
    assert len(personafl.resume(out, model=Scaled(), quiet=True)["fedavg"].rows) == 2


@pytest.mark.parametrize("text", ["{}", "[true]", '["1.0"]', "[1.0", "[" * 100_000])
def test_damaged_outputs_are_refused(tmp_path: Path, text: str) -> None:
    model = StackedModel(Scaled(), torch.rand(2, 1, 8, 8))
    path = tmp_path / "checkpoint" / "sample_outputs.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(UserError, match=r"sample_outputs\.json: cannot be read"):
        model_files.check_outputs(model, tmp_path)
