"""Masks of hidden units, and the masks of parameters they imply.

For a chain of linear and convolution layers. Units are a linear layer's outputs and a convolution's output channels;
those of the last layer are never masked. After flattening, a channel covers its consecutive positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from personafl.core.errors import UserError
from personafl.core.types import Layer, ModelInfo, Params


def require_chain(info: ModelInfo, what: str) -> None:
    """Raise `UserError`, beginning with `what`, if the model is not a chain of linear and convolution layers."""
    inside = {n for layer in info.layers if layer.feedforward for n in layer.names}
    others = [n for n in info.parameters if n not in inside]
    if others or len(info.layers) < 2:
        found = f"parameters elsewhere: {', '.join(others[:3])}" if others else f"{len(info.layers)} layer"
        raise UserError(f"{what} masks the units of a chain of linear and convolution layers; this model has {found}")
    for before, after in pairwise(info.layers):
        if after.shape[1] % before.shape[0]:
            raise UserError(
                f"{what}: the {after.shape[1]} inputs of {after.weight} are not those of {before.weight}'s "
                f"{before.shape[0]} units; this model is no chain of layers"
            )


def sides(layers: Sequence[Layer], units: Mapping[str, Tensor]) -> list[tuple[Layer, Tensor | None, Tensor | None]]:
    """Per layer the units `[C, ...]` on its output and its input side, None where nothing is masked."""
    out = []
    below: Tensor | None = None
    for layer in layers:
        above = units.get(layer.weight)
        if below is not None:
            below = below.repeat_interleave(layer.shape[1] // below.shape[1], dim=1)
        out.append((layer, above, below))
        below = above
    return out


def positions(layers: Sequence[Layer], units: Mapping[str, Tensor]) -> Params:
    """The parameters between units that are on: `[C, ...]` bool, for tensors that are masked at all."""
    out: Params = {}
    for layer, above, below in sides(layers, units):
        count = len(next(iter(units.values())))
        mask = torch.ones(count, *layer.shape, dtype=torch.bool, device=next(iter(units.values())).device)
        if above is not None:
            mask = mask & _rows(above, layer)
            if layer.bias is not None:
                out[layer.bias] = above
        if below is not None:
            mask = mask & _columns(below, layer)
        out[layer.weight] = mask
    return out


def densities(layers: Sequence[Layer], units: Mapping[str, Tensor]) -> Params:
    """The share of those parameters in each masked tensor, `[C]` float64; the expected one, given probabilities."""
    out: Params = {}
    for layer, above, below in sides(layers, units):
        shares = [u.double().mean(1) for u in (above, below) if u is not None]
        if above is not None and layer.bias is not None:
            out[layer.bias] = shares[0]
        if shares:
            out[layer.weight] = torch.stack(shares).prod(0)
    return out


def scaled(params: Params, layers: Sequence[Layer], units: Mapping[str, Tensor], *, inputs_only: bool) -> Params:
    """The parameters of the model in which units are multiplied by these numbers.

    With `inputs_only` a unit's activation is multiplied (by way of the next layer's weights); else every parameter is
    by the units it touches, which in a network of ReLUs gives the same outputs for numbers that are 0 or 1.
    """
    out = dict(params)
    for layer, above, below in sides(layers, units):
        weight = params[layer.weight]
        if below is not None:
            weight = weight * _columns(below, layer)
        if above is not None and not inputs_only:
            weight = weight * _rows(above, layer)
            if layer.bias is not None:
                out[layer.bias] = params[layer.bias] * above
        out[layer.weight] = weight
    return out


def _rows(units: Tensor, layer: Layer) -> Tensor:
    return units.view(*units.shape, *[1] * (len(layer.shape) - 1))


def _columns(units: Tensor, layer: Layer) -> Tensor:
    return units.view(units.shape[0], 1, units.shape[1], *[1] * (len(layer.shape) - 2))
