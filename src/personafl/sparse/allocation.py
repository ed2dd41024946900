"""How many weights each layer keeps at an overall sparsity S.

All rules return the number of active weights per maskable tensor. Biases, norms and embeddings are never masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from personafl.core.types import Layer

Rule = Callable[[Sequence[Layer], float], dict[str, int]]


def _floor(value: float) -> int:
    """Rounded down, but not over a rounding error: 0.2 * 1000 is 200."""
    return math.floor(value + 1e-9)


def _ratio(layer: Layer) -> float:
    """The Erdos-Renyi(-kernel) density up to a constant: sum of the dimensions over their product."""
    return sum(layer.shape) / math.prod(layer.shape)


def erk(layers: Sequence[Layer], sparsity: float) -> dict[str, int]:
    """RigL's rule (Evci et al., ICML 2020): density proportional to the ratio, layers that would pass 1 are dense."""
    dense: set[str] = set()
    while True:
        free = [layer for layer in layers if layer.weight not in dense]
        budget = (1 - sparsity) * sum(layer.weights for layer in layers)
        budget -= sum(layer.weights for layer in layers if layer.weight in dense)
        share = sum(_ratio(layer) * layer.weights for layer in free)
        scale = budget / share if free else 0.0
        over = {layer.weight for layer in free if scale * _ratio(layer) > 1}
        if not over:
            break
        dense |= over
    return {
        layer.weight: layer.weights if layer.weight in dense else _floor(scale * _ratio(layer) * layer.weights)
        for layer in layers
    }


def uniform_first_dense(layers: Sequence[Layer], sparsity: float) -> dict[str, int]:
    """The same sparsity everywhere but in the first layer, which stays dense."""
    return {
        layer.weight: layer.weights if i == 0 else _floor((1 - sparsity) * layer.weights)
        for i, layer in enumerate(layers)
    }


def _feddst(layers: Sequence[Layer], sparsity: float, exempt: int) -> dict[str, int]:
    """FedDST's released rule: raw sparsities 1 - ratio, scaled so that S of everything (biases counted) is dropped."""
    masked = layers[exempt:]
    raw = sum((1 - _ratio(layer)) * layer.size for layer in masked)
    scale = sparsity * sum(layer.size for layer in layers) / raw if raw else 0.0
    keep = {layer.weight: layer.weights for layer in layers[:exempt]}
    for layer in masked:
        share = min(max(scale * (1 - _ratio(layer)), 0.0), 1.0)
        keep[layer.weight] = min(_floor((1 - share) * layer.size), layer.weights)
    return keep


def feddst(layers: Sequence[Layer], sparsity: float) -> dict[str, int]:
    """FedDST's rule over all layers (Bibikar et al., AAAI 2022, as released): almost uniform."""
    return _feddst(layers, sparsity, 0)


def feddst_first_dense(layers: Sequence[Layer], sparsity: float) -> dict[str, int]:
    """FedDST's rule with the first layer dense: what DM-PFL's Fig. 5b was made with."""
    return _feddst(layers, sparsity, 1)


RULES: dict[str, Rule] = {
    "feddst_first_dense": feddst_first_dense,
    "erk": erk,
    "uniform_first_dense": uniform_first_dense,
    "feddst": feddst,
}
