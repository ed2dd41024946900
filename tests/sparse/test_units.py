"""From units to parameters, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from personafl import StackedModel
from personafl.models import CNN
from personafl.sparse import units


def bits(*values: int) -> Tensor:
    return torch.tensor([values], dtype=torch.bool)


MLP = StackedModel(
    nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2)), torch.zeros(2, 2)
)
# One image channel, 4 x 4; two channels, pooled to 2 x 2: eight flattened numbers; three hidden units; two outputs.
NET = StackedModel(CNN((1, 4, 4), (2,), (3,), 2, kernel=3, padding=1), torch.zeros(2, 1, 4, 4))


def test_the_weights_of_an_mlp_lie_between_units_that_are_on() -> None:
    found = units.positions(MLP.info.layers, {"0.weight": bits(1, 0, 1), "2.weight": bits(0, 1)})
    assert found["0.weight"][0].tolist() == [[True, True], [False, False], [True, True]]  # inputs are never masked
    assert found["0.bias"][0].tolist() == [True, False, True]
    assert found["2.weight"][0].tolist() == [[False, False, False], [True, False, True]]
    assert found["2.bias"][0].tolist() == [False, True]
    assert found["4.weight"][0].tolist() == [[False, True], [False, True]]  # nor are outputs
    assert "4.bias" not in found


def test_a_channel_covers_its_consecutive_positions_behind_the_flattening() -> None:
    found = units.positions(NET.info.layers, {"convs.0.weight": bits(0, 1), "fcs.0.weight": bits(1, 1, 0)})
    assert found["convs.0.weight"].shape == (1, 2, 1, 3, 3)
    assert not found["convs.0.weight"][0, 0].any()
    assert found["convs.0.weight"][0, 1].all()
    assert found["convs.0.bias"][0].tolist() == [False, True]
    row = [False] * 4 + [True] * 4  # channel 0 has positions 0 to 3
    assert found["fcs.0.weight"][0].tolist() == [row, row, [False] * 8]
    assert found["fcs.0.bias"][0].tolist() == [True, True, False]
    assert found["head.weight"][0].tolist() == [[True, True, False]] * 2


def test_clients_of_a_stack_have_masks_of_their_own() -> None:
    both = {"0.weight": torch.cat([bits(1, 0, 1), bits(0, 1, 0)]), "2.weight": torch.cat([bits(1, 1), bits(0, 1)])}
    together = units.positions(MLP.info.layers, both)
    for c in range(2):
        alone = units.positions(MLP.info.layers, {n: u[c : c + 1] for n, u in both.items()})
        assert all(torch.equal(together[n][c], alone[n][0]) for n in alone)


@pytest.mark.parametrize("model", [MLP, NET], ids=["mlp", "cnn"])
def test_densities_are_those_of_the_positions(model: StackedModel) -> None:
    hidden = [layer.weight for layer in model.info.layers[:-1]]
    drawn = {n: torch.cat([bits(1, 0, 1), bits(0, 1, 0)])[:, : model.info.shapes[n][0]] for n in hidden}
    wanted = {n: m.flatten(1).double().mean(1) for n, m in units.positions(model.info.layers, drawn).items()}
    found = units.densities(model.info.layers, drawn)
    assert found.keys() == wanted.keys()
    for n, share in wanted.items():
        torch.testing.assert_close(found[n], share, rtol=0, atol=1e-15)


def test_densities_of_probabilities_are_expected_ones() -> None:
    """Units of different layers are drawn independently: a weight is on with the product of both probabilities."""
    odds = {"0.weight": torch.tensor([[0.2, 0.4, 0.9]]), "2.weight": torch.tensor([[0.5, 0.1]])}  # means 0.5 and 0.3
    found = units.densities(MLP.info.layers, odds)
    wanted = {"0.weight": 0.5, "0.bias": 0.5, "2.weight": 0.15, "2.bias": 0.3, "4.weight": 0.3}
    assert {n: float(t) for n, t in found.items()} == pytest.approx(wanted, rel=1e-6)  # float32 probabilities


@pytest.mark.parametrize("model", [MLP, NET], ids=["mlp", "cnn"])
@pytest.mark.parametrize("inputs_only", [True, False])
def test_multiplied_units_answer_as_multiplied_activations(model: StackedModel, inputs_only: bool) -> None:
    """With numbers of 0 and 1 in both forms, and as a plain forward pass with hooks that multiply."""
    model = model.copy().to(torch.device("cpu"), torch.float64)
    draw = torch.Generator().manual_seed(3)
    params = {n: torch.randn(1, *t.shape, generator=draw, dtype=torch.float64) for n, t in model.initial.items()}
    hidden = model.info.layers[:-1]
    on = {layer.weight: torch.arange(layer.shape[0])[None] % 2 == i % 2 for i, layer in enumerate(hidden)}
    shape = (2,) if model.info.layers[0].shape[1] == 2 else (1, 4, 4)
    x = torch.randn(1, 5, *shape, generator=draw, dtype=torch.float64)
    numbers = {n: u.double() for n, u in on.items()}
    found = model(units.scaled(params, model.info.layers, numbers, inputs_only=inputs_only), x)[0]
    plain = model.client({n: t[0] for n, t in params.items()})
    for layer in hidden:
        gate = numbers[layer.weight][0].view(-1, *[1] * (len(layer.shape) - 2))
        part = plain.get_submodule(layer.weight.removesuffix(".weight"))
        part.register_forward_hook(
            lambda module, args, out, gate=gate: out * gate
        )  # before a ReLU: the same as behind it
    with torch.no_grad():
        torch.testing.assert_close(found, plain(x[0]), rtol=1e-10, atol=1e-10)


def test_the_two_forms_differ_for_numbers_between() -> None:
    params = {n: t[None] for n, t in MLP.initial.items()}
    half = {"0.weight": torch.full((1, 3), 0.5), "2.weight": torch.ones(1, 2)}
    once, twice = (units.scaled(params, MLP.info.layers, half, inputs_only=i) for i in (True, False))
    torch.testing.assert_close(once["0.weight"], params["0.weight"])
    torch.testing.assert_close(twice["0.weight"], params["0.weight"] / 2)
    torch.testing.assert_close(twice["0.bias"], params["0.bias"] / 2)
    for form in (once, twice):
        torch.testing.assert_close(form["2.weight"], params["2.weight"] / 2)


def test_a_chain_of_layers_is_taken() -> None:
    units.require_chain(NET.info, "it")  # raises for other models, as test_fedpews.py says
    assert [layer.weight for layer in NET.info.layers] == ["convs.0.weight", "fcs.0.weight", "head.weight"]
