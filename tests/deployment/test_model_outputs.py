"""Outputs by which server and clients find that they run different code."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from personafl.core.errors import UserError
from personafl.deployment.model_outputs import MOST_OUTPUTS, TOLERANCE, check_outputs, first_outputs
from personafl.models import StackedModel


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
    return first_outputs(StackedModel(make(), example))


def of_net(activation: Callable[[Tensor], Tensor], classes: int = 3) -> tuple[float, ...]:
    return outputs(lambda: Net(activation, classes), torch.randn(2, 4))


def test_the_same_code_gives_the_same_outputs_whatever_was_drawn_before() -> None:
    first = of_net(torch.relu)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    model = StackedModel(Net(torch.relu), torch.randn(2, 4))
    state = torch.random.get_rng_state()
    first_outputs(model)
    assert torch.equal(torch.random.get_rng_state(), state) and not torch.equal(before, state)
    assert of_net(torch.relu) == first and len(first) == 6
    check_outputs(first, of_net(torch.relu))


@pytest.mark.parametrize("other", [torch.tanh, nn.functional.gelu, lambda x: nn.functional.leaky_relu(x, 0.05)])
def test_another_activation_is_found_behind_a_layer_of_zeros(other: Callable[[Tensor], Tensor]) -> None:
    why = r"^it runs model code that gives other outputs than the server's .*largest difference .* tolerance 0\.0001"
    with pytest.raises(UserError, match=why):
        check_outputs(of_net(other), of_net(torch.relu))


def test_another_eps_is_found_where_it_matters() -> None:
    def make() -> nn.Module:
        net = Net(torch.relu)
        net.norm.eps = 1e-2
        return net

    with pytest.raises(UserError, match="other outputs"):
        check_outputs(outputs(make, torch.randn(2, 4)), of_net(torch.relu))


def test_tokens_are_drawn_from_the_table() -> None:
    example = torch.zeros(2, 6, dtype=torch.int64)
    first, other = (outputs(lambda f=f: Tokens(f), example) for f in (torch.relu, torch.tanh))  # type: ignore[misc]
    assert first[:3] != first[3:]
    with pytest.raises(UserError, match="other outputs"):
        check_outputs(other, first)


def test_where_numbers_cannot_be_drawn_the_example_is_taken() -> None:
    assert len(outputs(Looked, torch.tensor([[0.0], [1.0]]))) == 6


def test_outputs_are_bounded_in_number() -> None:
    assert len(of_net(torch.relu, classes=1000)) == MOST_OUTPUTS


def test_what_is_never_finite_is_not_compared() -> None:
    found = of_net(lambda x: x * math.inf)
    assert found == ()
    check_outputs(of_net(torch.relu), found)


def test_rounding_is_none_of_it_and_a_missing_output_is() -> None:
    agreed = (1.0, -2.0, 0.0)
    check_outputs((1.0, -2.0, TOLERANCE), agreed)
    for mine in ((1.0, -2.0, 3 * TOLERANCE), (1.0, -2.0), ()):
        with pytest.raises(UserError, match="other outputs"):
            check_outputs(mine, agreed)
