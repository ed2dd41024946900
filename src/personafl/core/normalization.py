"""Inputs and targets on a common scale: (x - mean) / std, by channel, column or output."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from personafl.core.errors import UserError

Affine = tuple[Tensor, Tensor]
"""Scale and shift, in the shape in which they go with an example."""


@dataclass(frozen=True)
class Normalization:
    """Mean and deviation along the first axis of an example: channels of images, columns of tables; one is for all.

    They are those of scaled examples, where the byte 255 is 1. For targets, there is one for each number of a target,
    and `restored` converts what a model predicts back to the targets' own units.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    axes: int = 1  # of an example
    _affine: dict[tuple[bool, torch.dtype, torch.device], Affine] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        sizes = {len(self.mean), len(self.std)} - {1}
        if len(sizes) > 1 or 0 in sizes:
            raise UserError(f"normalisation: {len(self.mean)} means for {len(self.std)} deviations")
        if not all(s > 0 for s in self.std):
            raise UserError(f"normalisation: std={list(self.std)}: must be greater than 0")

    @property
    def size(self) -> int:
        """How many channels or columns; 1 fits any number."""
        return max(len(self.mean), len(self.std))

    def fits(self, x: Tensor) -> bool:
        """Whether it goes with examples `[N, ...]`."""
        return self.axes == x.dim() - 1 and self.size in (1, *x.shape[1:2])

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Bytes or floats `[..., *example]` normalised, in the precision of a model."""
        pixels, device = x.dtype == torch.uint8, x.device
        found = self._affine.get((pixels, dtype, device))
        if found is None:  # kept: a CUDA graph must not make it, and must find it where it was
            scale, shift = self.affine(dtype, device)
            found = self._affine[pixels, dtype, device] = (scale / 255 if pixels else scale, shift)
        return transformed(x, *found)

    def restore(self, outputs: Tensor, axes: int) -> Tensor:
        """Outputs `[..., numbers of a target]` in the targets' own units; `axes` come before an example's numbers."""
        return rescale(outputs, *self.inverse_affine(outputs.dtype, outputs.device), axes)

    def inverse_affine(self, dtype: torch.dtype, device: torch.device | None = None) -> Affine:
        """Scale and shift that lead back."""
        mean, std = (torch.tensor(part, dtype=torch.float64) for part in (self.mean, self.std))
        return std.expand_as(mean).contiguous().to(device, dtype), mean.to(device, dtype)

    def affine(self, dtype: torch.dtype, device: torch.device | None = None) -> Affine:
        """Scale and shift of examples that are no bytes."""
        std = torch.tensor(self.std, dtype=torch.float64)
        mean = torch.tensor(self.mean, dtype=torch.float64)
        shape = (-1, *[1] * (self.axes - 1)) if self.axes else ()
        shift = -mean / std
        scale = (1 / std).expand_as(shift).contiguous()
        return scale.view(shape).to(device, dtype), shift.view(shape).to(device, dtype)


def transformed(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`x * scale + shift` of bytes or floats, in the precision of the latter."""
    if x.is_cuda:
        return torch.addcmul(shift, x if x.dtype == torch.uint8 else x.to(scale.dtype), scale)
    return x.to(scale.dtype, copy=True).mul_(scale).add_(shift)  # a third of addcmul's time on a CPU


def rescale(outputs: Tensor, scale: Tensor, shift: Tensor, axes: int) -> Tensor:
    """Outputs times a scale `[T]`, plus a shift `[T]`; an example's T numbers, behind `axes`, are in any shape."""
    if scale.numel() == 1:
        return outputs * scale + shift
    return (outputs.flatten(axes) * scale + shift).view_as(outputs)


def as_inputs(x: Tensor, dtype: torch.dtype, normalization: Normalization | None = None) -> Tensor:
    """Examples as a model takes them: bytes are pixels, other whole numbers (characters) stay what they are."""
    if normalization is not None and (x.dtype == torch.uint8 or x.is_floating_point()):
        return normalization(x, dtype)
    if x.dtype == torch.uint8:
        return x / 255 if dtype == torch.float32 else x.to(dtype) / 255
    return x.to(dtype) if x.is_floating_point() else x.long()
