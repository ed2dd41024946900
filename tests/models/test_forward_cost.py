"""What a forward pass multiplies by; all counts are by hand, for sequences of T."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from personafl.core.types import Layer
from personafl.models import MODELS
from personafl.models.forward_cost import ForwardCost, observe

T = 7


def seen(module: nn.Module, *shape: int) -> ForwardCost:
    """One forward pass of three examples."""
    return observe(module.eval(), torch.rand(3, *shape), [n for n, p in module.named_parameters() if p.requires_grad])


def table(found: ForwardCost) -> dict[str, tuple[str | None, int, int]]:
    return {layer.weight: (layer.bias, layer.macs, layer.outputs) for layer in found.layers}


class Reading(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.rnn(input=x)[0][:, -1]
        return out


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_every_step_of_a_recurrent_layer_uses_its_weights(kind: Callable[..., nn.RNNBase], gates: int) -> None:
    """Two layers in both directions: the second reads both outputs of the first."""
    found = seen(Reading(kind(4, 5, num_layers=2, bidirectional=True, batch_first=True)), T, 4)
    wanted = {}
    for layer, inputs in ((0, 4), (1, 10)):
        for way in ("", "_reverse"):
            for side, width in (("ih", inputs), ("hh", 5)):
                name = f"{side}_l{layer}{way}"
                macs, outputs = T * gates * 5 * width, T * gates * 5
                wanted[f"rnn.weight_{name}"] = (f"rnn.bias_{name}", macs, outputs)
    assert table(found) == wanted
    assert found.other_flops == 0
    assert not any(layer.feedforward for layer in found.layers)


def test_projections_of_an_lstm_are_matrices_of_their_own() -> None:
    found = table(seen(Reading(nn.LSTM(4, 5, proj_size=3, batch_first=True)), T, 4))
    assert found == {
        "rnn.weight_ih_l0": ("rnn.bias_ih_l0", T * 20 * 4, T * 20),
        "rnn.weight_hh_l0": ("rnn.bias_hh_l0", T * 20 * 3, T * 20),
        "rnn.weight_hr_l0": (None, T * 3 * 5, 0),
    }


def test_a_cell_that_is_called_step_by_step_is_its_layer() -> None:
    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(len(x), 5)
            for step in x.unbind(1):
                state = self.cell(step, state)
            return state

    found = seen(Stepping(), T, 4)
    assert table(found) == {
        "cell.weight_ih": ("cell.bias_ih", T * 15 * 4, T * 15),
        "cell.weight_hh": ("cell.bias_hh", T * 15 * 5, T * 15),
    }


def test_the_zoos_lstm_has_all_its_matrices_and_no_look_up() -> None:
    module = MODELS["char-lstm"].build((80,), 80).eval()
    found = observe(module, torch.randint(80, (2, 80)), list(dict(module.named_parameters())))
    gates = 4 * 256
    assert [(layer.shape, layer.macs, layer.outputs) for layer in found.layers] == [
        ((gates, 8), 80 * gates * 8, 80 * gates),
        *[((gates, 256), 80 * gates * 256, 80 * gates)] * 3,
        ((80, 256), 80 * 256, 80),
    ]
    assert found.other_flops == 0
    parameters = sum(p.numel() for p in module.parameters())
    assert sum(layer.size for layer in found.layers) == parameters - 80 * 8 == 819_280  # all but the embedding


class Attending(nn.Module):
    """Attention of T tokens to themselves, or to T inputs of another width."""

    def __init__(self, weights: bool = True, wide: int = 8) -> None:
        super().__init__()
        self.weights, self.wide = weights, wide
        self.attention = nn.MultiheadAttention(8, 2, kdim=wide, vdim=wide, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        other = x if self.wide == 8 else F.pad(x, (0, self.wide - 8))
        out: Tensor = self.attention(x, other, other, need_weights=self.weights)[0].mean(1)
        return out


PRODUCTS = 2 * (T * T * 8 + T * T * 8)  # queries by keys, weights by values


@pytest.mark.parametrize("weights", [True, False])
def test_attention_has_two_matrices_and_products_without_weights(weights: bool) -> None:
    found = seen(Attending(weights), T, 8)
    assert table(found) == {
        "attention.in_proj_weight": ("attention.in_proj_bias", T * 24 * 8, T * 24),
        "attention.out_proj.weight": ("attention.out_proj.bias", T * 8 * 8, T * 8),
    }
    assert found.other_flops == PRODUCTS
    assert found.products == {1: PRODUCTS}  # between the two


def test_separate_projections_share_a_bias() -> None:
    found = seen(Attending(wide=10), T, 8)
    assert table(found) == {
        "attention.q_proj_weight": ("attention.in_proj_bias", T * 8 * 8, T * 8),
        "attention.k_proj_weight": ("attention.in_proj_bias", T * 8 * 10, T * 8),
        "attention.v_proj_weight": ("attention.in_proj_bias", T * 8 * 10, T * 8),
        "attention.out_proj.weight": ("attention.out_proj.bias", T * 8 * 8, T * 8),
    }
    assert [layer.size for layer in found.layers] == [64 + 8, 80 + 8, 80 + 8, 64 + 8]  # a third of it each
    assert found.products == {3: PRODUCTS}


def test_a_decoder_layer_projects_the_memory_and_its_own_tokens() -> None:
    class Decoding(nn.Module):
        """Three learned tokens ask T of memory."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
            self.tokens = nn.Parameter(torch.randn(3, 8))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(self.tokens.expand(len(x), 3, 8), x).mean(1)
            return out

    found = seen(Decoding(), T, 8)
    assert {n: macs for n, (_, macs, _) in table(found).items()} == {
        "layer.self_attn.in_proj_weight": 3 * 24 * 8,
        "layer.self_attn.out_proj.weight": 3 * 8 * 8,
        "layer.multihead_attn.in_proj_weight": 3 * 8 * 8 + T * 16 * 8,
        "layer.multihead_attn.out_proj.weight": 3 * 8 * 8,
        "layer.linear1.weight": 3 * 16 * 8,
        "layer.linear2.weight": 3 * 8 * 16,
    }
    assert all(layer.bias and layer.size == layer.weights + layer.shape[0] for layer in found.layers)
    assert found.products == {1: 2 * 2 * 3 * 3 * 8, 3: 2 * 2 * 3 * T * 8}
    assert [layer.feedforward for layer in found.layers] == [False] * 4 + [True] * 2


class Bare(nn.Module):
    """A module with one parameter, or two, and what it does with them."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.use = use
        self.weight = nn.Parameter(torch.randn(shapes[0]))
        if shapes[1:]:
            self.other = nn.Parameter(torch.randn(shapes[1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


W = (6, 8)
MACS = T * 6 * 8


@pytest.mark.parametrize(
    ("use", "shapes", "wanted"),
    [
        (lambda m, x: F.linear(x, m.weight), [W], (None, MACS, 0)),
        (lambda m, x: F.linear(x, m.weight, m.other), [W, (6,)], ("other", MACS, T * 6)),
        (lambda m, x: x @ m.weight.T, [W], (None, MACS, 0)),
        (lambda m, x: x @ m.weight + m.other, [(8, 6), (6,)], ("other", MACS, T * 6)),
        (lambda m, x: m.weight @ x.mT, [W], (None, MACS, 0)),
        (lambda m, x: torch.einsum("btd,hdk->bhtk", x, m.weight), [(2, 8, 3)], (None, MACS, 0)),
        (lambda m, x: x @ m.weight.T + m.other, [W, (T, 6)], (None, MACS, 0)),  # positions, no bias
        (lambda m, x: F.linear(x, m.weight[:2]), [W], (None, MACS // 3, 0)),
        (lambda m, x: F.linear(x, 0.5 * m.weight.clone()), [W], (None, MACS, 0)),
        (lambda m, x: F.linear(F.linear(x, m.weight), m.weight.T), [W], (None, 2 * MACS, 0)),
        (lambda m, x: F.linear(m.other.expand(len(x), T, 8), m.weight), [W, (T, 8)], (None, MACS, 0)),
        (lambda m, x: F.conv1d(x.mT, m.weight), [(6, 8, 1)], (None, MACS, 0)),
        (lambda m, x: F.conv_transpose1d(x.mT, m.weight, m.other), [(8, 6, 1), (6,)], ("other", MACS, T * 6)),
        (lambda m, x: F.bilinear(x, x, m.weight), [(2, 8, 8)], (None, T * 2 * 8 * 8, 0)),
    ],
)
def test_a_matrix_is_a_layer_however_it_is_multiplied_by(
    use: Callable[[Any, Tensor], Tensor], shapes: list[tuple[int, ...]], wanted: tuple[str | None, int, int]
) -> None:
    found = seen(Bare(use, *shapes), T, 8)
    assert table(found) == {"weight": wanted}
    (layer,) = found.layers
    assert (layer.shape, layer.feedforward, found.other_flops) == (shapes[0], False, 0)
    assert layer.size == layer.weights + (6 if wanted[0] else 0)  # not its rows, where the inputs come first


@pytest.mark.parametrize(
    ("use", "shape", "flops"),
    [
        (lambda m, x: x @ x.new_ones(8, 6) + m.weight, (6,), 2 * MACS),  # no parameter is multiplied by
        (lambda m, x: x @ m.weight, (8,), 2 * T * 8),  # a vector
        (lambda m, x: x @ m.weight.softmax(1), (8, 6), 2 * MACS),  # nowhere zero
        (lambda m, x: F.embedding(x[..., 0].long(), m.weight), (9, 4), 0),
        (lambda m, x: x * m.weight, (T, 8), 0),  # no product of matrices
    ],
)
def test_what_is_no_product_by_a_matrix_has_no_layer(
    use: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...], flops: int
) -> None:
    found = seen(Bare(use, shape), T, 8)
    assert found.layers == ()
    assert found.other_flops == flops


def test_an_embedding_that_is_also_the_output_layer_is_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.table(x.long()).mean(1))
            return out

    assert table(seen(Tied(), T)) == {"table.weight": ("head.bias", 9 * 4, 9)}


def test_frozen_weights_cost_without_being_layers() -> None:
    """An adapter of rank two beside a frozen layer."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(8, 6).requires_grad_(False)
            self.down, self.up = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(6, 2))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x) + x @ self.down.T @ self.up.T
            return out

    found = seen(Adapted(), 8)
    assert table(found) == {"down": (None, 2 * 8, 0), "up": (None, 6 * 2, 0)}
    assert found.other_flops == 2 * 6 * 8 + 6
    assert not found.products  # whose gradients would be counted


def test_a_linear_layer_with_a_bias_from_elsewhere_is_no_layer_of_units() -> None:
    """Another layer may add the same one."""

    class Lent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
            self.shift = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.first(x) + self.shift)
            return out

    found = seen(Lent(), 8)
    assert table(found) == {"first.weight": ("shift", 64, 8), "last.weight": ("last.bias", 64, 8)}
    assert [layer.feedforward for layer in found.layers] == [False, True]


def test_a_normalised_weight_is_masked_by_its_direction() -> None:
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 6)))
    assert table(seen(module, 8)) == {"0.parametrizations.weight.original1": ("0.bias", 6 * 8, 6)}


def test_sums_of_the_examples_are_divided_by_their_number() -> None:
    one, many = (observe(nn.Linear(8, 6), torch.rand(n, T, 8), ["weight", "bias"]) for n in (1, 5))
    assert one == many
    assert one.layers == (Layer("weight", "bias", (6, 8), MACS, T * 6, feedforward=True, biases=6),)
    assert one.activations == T * 6


def test_parameters_in_one_piece_of_memory_are_told_apart() -> None:
    """As a recurrent layer lays them for a GPU."""
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    memory = torch.randn(2, 4, 4)
    for layer, part in zip(module, memory, strict=True):
        layer.weight = nn.Parameter(part)
    assert table(seen(module, 4)) == {"0.weight": (None, 16, 0), "1.weight": (None, 16, 0)}


def test_fused_kernels_are_as_before() -> None:
    before = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled
    with pytest.raises(RuntimeError):
        seen(nn.Linear(8, 6), 7)
    assert before == (torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled)
