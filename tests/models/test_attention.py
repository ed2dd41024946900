"""Stacked attention is every client's own attention: PyTorch's, with that client's weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from personafl.core.errors import UserError
from personafl.core.types import Params
from personafl.models.stacked import StackedModel, describe

CLIENTS, SIZE, T, WIDTH = 3, 4, 5, 8
KEYS = torch.tensor([11, 12, 13])
HIDDEN = torch.ones(T, T, dtype=torch.bool).triu(1)  # what comes later


def late(x: Tensor) -> Tensor:
    """Which tokens are padding: those behind the first whose first number is large."""
    return (x[..., 0] > 1.0) & (torch.arange(x.shape[1]) > 0)


class Attending(nn.Module):
    """One attention layer with all that it gives, called as `how` says."""

    def __init__(self, how: Callable[[nn.Module, Tensor], Any], **options: Any) -> None:
        super().__init__()
        self.how = how
        self.attention = nn.MultiheadAttention(WIDTH, 2, **options)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.how(self.attention, x)
        out = self.head(out)
        return out if weights is None else torch.cat([out.flatten(1), weights.flatten(1)], 1)


def itself(**options: Any) -> Callable[[nn.Module, Tensor], Any]:
    return lambda m, x: m(x, x, x, **options)


def padded(m: nn.Module, x: Tensor) -> Any:
    return m(x, x, x, key_padding_mask=late(x), attn_mask=HIDDEN, is_causal=True, need_weights=False)


def a_mask_each(m: nn.Module, x: Tensor) -> Any:
    mask = x[:, None, :, :1].expand(-1, 2, -1, T).flatten(0, 1)  # [N * heads, T, T], the numbers of each query
    return m(x, x, x, attn_mask=mask.transpose(1, 2), need_weights=False)


def sequence_first(m: nn.Module, x: Tensor) -> Any:
    rows = x.transpose(0, 1)
    return m(rows, rows[:3], rows[1:4], need_weights=False)[0].transpose(0, 1), None


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "weights": lambda: Attending(itself(), batch_first=True),
    "weights of every head": lambda: Attending(itself(average_attn_weights=False), batch_first=True),
    "no weights": lambda: Attending(itself(need_weights=False), batch_first=True),
    "no bias": lambda: Attending(itself(need_weights=False), batch_first=True, bias=False),
    "mask": lambda: Attending(itself(attn_mask=HIDDEN), batch_first=True),
    "causal": lambda: Attending(itself(attn_mask=HIDDEN, is_causal=True, need_weights=False), batch_first=True),
    "padding and mask": lambda: Attending(padded, batch_first=True),
    "a mask for each example": lambda: Attending(a_mask_each, batch_first=True),
    "keys and values alike": lambda: Attending(lambda m, x: m(x, x[:, 1:], x[:, 1:]), batch_first=True),
    "sequence first": lambda: Attending(sequence_first),
    "other widths": lambda: Attending(
        lambda m, x: m(x, x[:, 1:, :4], x[:, 1:, :6], need_weights=False), batch_first=True, kdim=4, vdim=6
    ),
    "frozen input": lambda: freeze(Attending(itself(need_weights=False), batch_first=True), "attention.in_proj_bias"),
    "frozen output": lambda: freeze(Attending(itself(need_weights=False), batch_first=True), "attention.out_proj"),
}


def freeze(module: nn.Module, begins: str) -> nn.Module:
    for n, p in module.named_parameters():
        p.requires_grad_(not n.startswith(begins))
    return module


class Transformer(nn.Module):
    """PyTorch's own layers."""

    def __init__(self, *, padding: bool = False, mask: bool = False, decoder: bool = False, **options: Any) -> None:
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True} | options
        self.padding, self.mask = padding, mask
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of options under which PyTorch has no fused path
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 6, **options), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 6, **options), 1) if decoder else None
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, unused = HIDDEN if self.mask else None, late(x) if self.padding else None
        seen = self.encoder(x, hidden, unused)
        if self.decoder is not None:
            seen = self.decoder(x / 2, seen, hidden, memory_key_padding_mask=unused)
        out: Tensor = self.head(seen.mean(1))
        return out


TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    "encoder": Transformer,
    "encoder, norm first": lambda: Transformer(norm_first=True),
    "encoder, gelu, no bias": lambda: Transformer(activation="gelu", bias=False),
    "encoder, padding": lambda: Transformer(padding=True),
    "encoder, causal": lambda: Transformer(mask=True),
    "encoder, both": lambda: Transformer(padding=True, mask=True),
    "decoder": lambda: Transformer(decoder=True, padding=True, mask=True),
}
ALL = LAYERS | TRANSFORMERS


def draw(*rows: int, seed: int = 1) -> Tensor:
    return torch.randn(*rows, T, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> StackedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make()
    return StackedModel(module, draw(2, seed=0).float()).to(torch.device("cpu"), dtype)


def of_clients(model: StackedModel) -> Params:
    g = torch.Generator().manual_seed(2)
    noise = {n: torch.randn(CLIENTS, *t.shape, generator=g, dtype=torch.float64) for n, t in model.initial.items()}
    return {n: (t + 0.3 * noise[n].to(t.dtype)).requires_grad_() for n, t in model.initial.items()}


def slopes(out: Tensor, params: Params) -> Params:
    weights = torch.linspace(-1, 1, out[0].numel(), dtype=out.dtype).view(out.shape[1:])
    found = torch.autograd.grad((out * weights).sum(), list(params.values()), materialize_grads=True)
    return dict(zip(params, found, strict=True))


@pytest.mark.parametrize("keys", [None, KEYS], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", list(ALL))
def test_outputs_and_gradients_are_those_of_each_client_alone(name: str, keys: Tensor | None) -> None:
    model = built(ALL[name])
    assert not model.whole and not model.random and model.pads
    params, x = of_clients(model), draw(CLIENTS, SIZE)
    out = model(params, x, None, keys)
    grads = slopes(out, params)
    module = model.module.train(keys is not None)
    for c in range(CLIENTS):
        own = {n: t[c].detach().requires_grad_() for n, t in params.items()}
        alone = functional_call(module, own, (x[c],))
        torch.testing.assert_close(out[c], alone, rtol=1e-9, atol=1e-9)
        with torch.no_grad():  # where PyTorch has fused kernels
            torch.testing.assert_close(out[c], functional_call(module, own, (x[c],)), rtol=1e-9, atol=1e-9)
        for n, g in slopes(alone[None], own).items():
            torch.testing.assert_close(grads[n][c], g, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["weights", "no weights", "encoder, both", "decoder"])
def test_single_precision_rounds_and_nothing_else(name: str) -> None:
    """Sums of some ten terms of order one, a few layers deep: 1e-5 is a hundred times float32's rounding."""
    model, single = built(ALL[name]), built(ALL[name], torch.float32)
    params, x = of_clients(model), draw(CLIENTS, SIZE)
    own = {n: t.detach().float().requires_grad_() for n, t in params.items()}
    exact, found = model(params, x), single(own, x.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    rounded = slopes(found, own)
    for n, g in slopes(exact, params).items():
        torch.testing.assert_close(rounded[n].double(), g, rtol=1e-4, atol=1e-4)


DROPPING: dict[str, Callable[[], nn.Module]] = {
    "weights": lambda: Attending(itself(), batch_first=True, dropout=0.4),
    "padding and mask": lambda: Attending(padded, batch_first=True, dropout=0.4),
    "encoder": lambda: Transformer(dropout=0.4, padding=True),
    "decoder": lambda: Transformer(dropout=0.4, decoder=True),
}


@pytest.mark.parametrize("name", list(DROPPING))
def test_dropout_is_drawn_from_each_clients_own_stream(name: str) -> None:
    """Who else is in the stack, and padding behind a client's examples, change none of its numbers."""
    model = built(DROPPING[name])
    assert not model.whole and not model.random
    params, x = of_clients(model), draw(CLIENTS, SIZE)
    valid = torch.arange(SIZE) < torch.tensor([4, 3, 2]).unsqueeze(1)
    out = model(params, x, valid, KEYS)
    grads = slopes(torch.where(valid.view(*valid.shape, *[1] * (out.dim() - 2)), out, 0), params)
    assert not torch.allclose(out, model(params, x))
    for c, n in enumerate([4, 3, 2]):
        own = {k: t[c : c + 1].detach().requires_grad_() for k, t in params.items()}
        alone = model(own, x[c : c + 1, :n], None, KEYS[c : c + 1])
        torch.testing.assert_close(out[c : c + 1, :n], alone, rtol=1e-9, atol=1e-9)
        whole = torch.cat([alone, torch.zeros_like(out[c : c + 1, n:])], 1)
        for k, g in slopes(whole, own).items():
            torch.testing.assert_close(grads[k][c : c + 1], g, rtol=1e-9, atol=1e-9)


def test_as_many_weights_as_asked_are_dropped_and_the_others_scaled() -> None:
    model = built(lambda: Attending(itself(average_attn_weights=False), batch_first=True, dropout=0.25))
    x = draw(CLIENTS, 200)
    params = {n: t.detach() for n, t in of_clients(model).items()}
    before, after = (model(params, x, None, k)[..., 3 * T :] for k in (None, KEYS))
    kept = after != 0
    torch.testing.assert_close(after[kept], before[kept] / 0.75, rtol=1e-12, atol=0)
    share = kept.double().mean((1, 2))  # of 200 x 2 x 25 draws each: standard error 0.0043
    assert (share - 0.75).abs().max() < 5 * 0.0043
    assert not torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_query_that_may_attend_to_nothing_has_zeros_and_finite_gradients(need_weights: bool, dropout: float) -> None:
    """Padding behind a client's examples may look like this. What is left is the bias of the output."""

    def hiding(m: nn.Module, x: Tensor) -> Any:
        return m(x, x, x, key_padding_mask=x[..., 0] > 9, need_weights=need_weights)[0], None

    model = built(lambda: Attending(hiding, batch_first=True, dropout=dropout))
    params, x = of_clients(model), draw(CLIENTS, SIZE)
    x[1, 2, :, 0] = 10.0
    out = model(params, x, None, KEYS)
    bias = params["attention.out_proj.bias"][1]
    alone = params["head.weight"][1] @ bias + params["head.bias"][1]
    torch.testing.assert_close(out[1, 2], alone.expand(T, 3), rtol=1e-12, atol=1e-12)
    assert all(g.isfinite().all() for g in slopes(out, params).values())


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_options_without_a_rule_run_client_by_client(option: str) -> None:
    model = built(lambda: Attending(itself(), batch_first=True, **{option: True}))
    params, x = of_clients(model), draw(CLIENTS, SIZE)
    assert model.whole
    for c in range(CLIENTS):
        alone = functional_call(model.module, {n: t[c] for n, t in params.items()}, (x[c],))
        torch.testing.assert_close(model(params, x)[c], alone, rtol=1e-9, atol=1e-9)


def test_attention_between_examples_runs_client_by_client() -> None:
    """Without a batch axis PyTorch takes the examples of a batch for a sequence."""
    with pytest.raises(UserError, match=r"^Attending gives another shape for another number of examples"):
        built(lambda: Attending(lambda m, x: m(x[:, 0], x[:, 1], x[:, 2]), batch_first=True))
    model = built(lambda: Attending(lambda m, x: (m(x[:, 0], x[:, 1], x[:, 2])[0], None), batch_first=True))
    assert model.whole


def test_a_hint_without_its_mask_is_refused_as_by_pytorch() -> None:
    with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
        built(lambda: Attending(itself(is_causal=True, need_weights=False), batch_first=True))


def test_nothing_is_printed_and_padded_places_are_those_of_training() -> None:
    """PyTorch's nested tensors warn, and give zeros for padded places, which training does not have."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = built(lambda: Transformer(padding=True))
        params, x = of_clients(model), draw(CLIENTS, SIZE)
        torch.testing.assert_close(model(params, x, None, KEYS), model(params, x), rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            own = model.client({n: t[0] for n, t in params.items()})
            torch.testing.assert_close(own(x[0]), model(params, x)[0], rtol=1e-9, atol=1e-9)


def test_costs_are_those_of_the_module() -> None:
    """Of one example: 4 T WIDTH^2 multiplications with projections, 2 T^2 WIDTH of queries by keys and by values."""
    module = Attending(itself(need_weights=False), batch_first=True)
    info = describe(module, draw(2).float(), None, "average")
    macs = {layer.weight: layer.macs for layer in info.layers}
    assert macs == {
        "attention.in_proj_weight": 3 * T * WIDTH**2,
        "attention.out_proj.weight": T * WIDTH**2,
        "head.weight": 3 * T * WIDTH,
    }
    assert info.other_flops == 2 * 2 * T * T * WIDTH
    stacked = built(lambda: module).info
    assert (stacked.layers, stacked.other_flops, stacked.products) == (info.layers, info.other_flops, info.products)
