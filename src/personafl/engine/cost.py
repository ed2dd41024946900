"""What a round costs: bytes, and floating-point operations with and without masks.

Bytes are the length of what the codec packs. Beside them stands the papers' way of counting: four bytes
a value, one bit per weight where its mask travels, no headers, the mean of both directions.

One multiply-accumulate is two FLOP, adding a bias one per output. The backward pass costs a
forward pass per layer for the weights that move, and one for the layer's input wherever a layer at
or below it moves: a full training step is three forward passes, the papers' convention. (The
gradient towards the data, which frameworks skip, is counted with it.) A product of activations, as
in attention, has a gradient for each of its factors where a layer before it moves. A masked layer
costs its density times as much, save in the gradient step that decides regrowth, which needs all of
a layer's weight gradient. Where whole units are masked, so are their biases. Masks drawn anew in
every step are counted by their expected density, to the nearest whole FLOP of an example.

A loss may call models several times: every call costs a forward pass, and every backward pass through it what it
reaches. A gradient of a gradient passes back through a backward pass, which costs twice as much as that one (each
product has two gradients), and then through the forward pass. So second-order MAML's first step takes nine forward
passes: one, two for its gradient, four for that gradient's, and two. What our own operations compute once more on the
way is not counted.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from personafl.core import tree, wire
from personafl.core.types import Download, Layer, Masked, ModelInfo, Payload, Stage
from personafl.engine.model_calls import FEATURES, INPUT, OUTPUT, ModelCall


@dataclass(frozen=True)
class Traffic:
    """Bytes of all clients of a stack together."""

    up: int
    down: int
    paper: float


def traffic(stage: Stage, down: Download, upload: Payload, count: int) -> Traffic:
    """What a stack of clients receives and sends in a stage."""
    received = 0
    if stage.down:
        received = wire.size(down.shared) * count
        if down.own:  # one message: the header of the rows' part is that of the shared part
            received += wire.total_size(down.own, count) - wire.size({}) * count
    sent = wire.total_size(upload, count) if stage.up else 0
    paper = (_plain(down.shared) * count + _plain(down.own) + _plain(upload)) / 2 if stage.in_paper else 0.0
    return Traffic(sent, received, paper)


def _plain(payload: Payload) -> float:
    total = 0.0
    for entry in payload.values():
        if isinstance(entry, Masked):
            total += 4 * int(entry.mask.sum()) + (0 if entry.known else entry.mask.numel() / 8)
        elif entry.is_floating_point():
            total += 4 * entry.numel()
        elif entry.dtype == torch.bool:
            total += entry.numel() / 8
    return total


def density(mask: Tensor) -> Tensor:
    """Each client's fraction of active positions, `[C]` float64; one that is given as such is taken as it is."""
    return mask.double() if mask.dim() == 1 else tree.flat(mask).sum(1).double() / mask[0].numel()


def forward(layer: Layer, dense: float | Tensor = 1.0, biases: float | Tensor = 1.0) -> float | Tensor:
    """FLOP of one example through one layer."""
    return 2.0 * layer.macs * dense + layer.outputs * biases


def forward_pass(info: ModelInfo) -> float:
    """FLOP of one example through the whole model, nothing masked."""
    return info.other_flops + sum(2.0 * layer.macs + layer.outputs for layer in info.layers)


def calls(
    info: ModelInfo,
    observed: Iterable[ModelCall],
    active: Mapping[str, Tensor],
    count: int,
    regrow: bool = False,
) -> tuple[Tensor, Tensor]:
    """FLOP of these calls of the model for one example, with and without masks: two `[C]` float64.

    Each call runs under the masks of the tensors it was given, or of those these were computed from.
    """
    masked: float | Tensor = 0.0
    dense: float | Tensor = 0.0
    for call in observed:
        masks = {n: active[source] for n, source in call.sources.items() if source in active}
        parts = [(1, *_forward(info, masks))]
        for each in call.backward:
            parts.append((2**each.order, *_backward(info, each.reached, masks, regrow and not each.order)))
        for times, sparse, full in parts:
            masked = masked + call.examples * times * sparse
            dense += call.examples * times * full
    every = torch.ones(count, dtype=torch.float64)
    return (every * masked).round(), every * dense


def step(
    info: ModelInfo,
    moving: Collection[str],
    active: Mapping[str, Tensor],
    count: int,
    regrow: bool = False,
) -> tuple[Tensor, Tensor]:
    """Forward and backward FLOP of one example, with and without masks: two `[C]` float64.

    `moving` names tensors of all the client's models; `active` has the masks of those that run
    masked, or their densities `[C]`; `regrow` asks for the dense gradient of the weights.
    """
    if not active:
        return _unmasked(_Known(info), tuple(moving), count)
    return _step(info, moving, active, count, regrow)


@dataclass(frozen=True, eq=False)
class _Known:
    """A model's facts as what they are of: to compare them would take longer than what is looked up."""

    info: ModelInfo

    def __hash__(self) -> int:
        return id(self.info)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and other.info is self.info


@functools.lru_cache(maxsize=32)
def _unmasked(of: _Known, moving: tuple[str, ...], count: int) -> tuple[Tensor, Tensor]:
    """What nothing masked costs, which is the same in every round; not to be written to."""
    return _step(of.info, moving, {}, count)


def _step(
    info: ModelInfo, moving: Collection[str], active: Mapping[str, Tensor], count: int, regrow: bool = False
) -> tuple[Tensor, Tensor]:
    masked: float | Tensor = 0.0  # a tensor from the first mask on
    dense: float | Tensor = 0.0
    for prefix in dict.fromkeys(map(tree.prefix_of, moving)):
        names = {n[len(prefix) + 1 :] if prefix else n for n in moving if tree.prefix_of(n) == prefix}
        if names.isdisjoint(info.parameters):
            continue
        masks = tree.under(active, prefix) if prefix else active
        for sparse, full in (_forward(info, masks), _backward(info, names, masks, regrow)):
            masked = masked + sparse
            dense += full
    every = torch.ones(count, dtype=torch.float64)
    return (every * masked).round(), every * dense


def _forward(info: ModelInfo, masks: Mapping[str, Tensor]) -> tuple[float | Tensor, float]:
    """A forward pass under these masks, and without them."""
    masked: float | Tensor = info.other_flops
    for layer in info.layers:
        masked = masked + forward(layer, *_shares(layer, masks))
    return masked, forward_pass(info)


def _backward(
    info: ModelInfo, reached: AbstractSet[str], masks: Mapping[str, Tensor], regrow: bool
) -> tuple[float | Tensor, float]:
    """A backward pass to these parameters under these masks, and without them."""
    names = reached - {INPUT, FEATURES, OUTPUT}
    through_head = OUTPUT in reached or FEATURES not in reached
    # a norm or embedding that moves, or the input: gradients must reach it
    below = INPUT in reached or not names <= info.of_layers
    lowest = next((i for i, layer in enumerate(info.layers) if not names.isdisjoint(layer.names)), len(info.layers))
    products = sum(flops for place, flops in info.products.items() if lowest < place)
    dense = 2.0 * (info.other_flops if below else products)
    masked: float | Tensor = dense
    for layer in info.layers:
        if not through_head and not info.head.isdisjoint(layer.names):
            continue
        moves = not names.isdisjoint(layer.names)
        below = below or moves
        full = float(forward(layer))
        sparse = forward(layer, *_shares(layer, masks))
        dense += full * (moves + below)
        masked = masked + sparse * below + (full if regrow else sparse) * moves
    return masked, dense


def _shares(layer: Layer, masks: Mapping[str, Tensor]) -> list[float | Tensor]:
    """The density of a layer's weight, and that of its bias if it has one."""
    return [density(masks[n]).cpu() if n in masks else 1.0 for n in layer.names] if masks else []
