"""Test images changed: corrupted at several severities, or turned.

An image is changed by draws of the seed, its row in the data set and the kind, so every method sees the same images,
whichever clients share a stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from personafl.core import rng
from personafl.core.errors import UserError
from personafl.core.types import Examples
from personafl.data.corruptions import CORRUPTIONS, SEVERITIES, STANDARD, corrupt, require_images, rotate
from personafl.data.dataset import Source
from personafl.evaluation.settings import Evaluation

ImageChange = Callable[[Tensor, Tensor], Tensor]
"""Images `[N, ...]` and their rows `[N]` to images."""


def kinds(evaluation: Evaluation) -> tuple[str, ...]:
    """The corruptions asked for, `all` written out: the standard fifteen."""
    return STANDARD if "all" in evaluation.corruptions else evaluation.corruptions


def check(evaluation: Evaluation, source: Source) -> None:
    """Refuse what these data cannot be asked for."""
    for kind in kinds(evaluation):
        if kind not in CORRUPTIONS:
            raise UserError(f"evaluation.corruptions={kind!r}: possible are all, {', '.join(CORRUPTIONS)}")
    for severity in evaluation.severities:
        if severity not in SEVERITIES:
            raise UserError(f"evaluation.severities={severity}: possible are 1 to 5")
    if evaluation.corruptions:
        whose = "" if evaluation.corrupted == "own" else f"evaluation.corrupted={evaluation.corrupted!r}, "
        require_images(source.x, f"{whose}evaluation.corruptions={list(evaluation.corruptions)} on {source.name}")
    if evaluation.rotations:
        require_images(source.x, f"evaluation.rotations={list(evaluation.rotations)} on {source.name}", coloured=False)


def corrupted(data: Examples, kind: str, severity: int, seed: int) -> Examples:
    """The same examples, corrupted."""
    return _changed(data, lambda x, rows: corrupt(x, kind, severity, rng.key(seed, "corruption", rows)))


def rotated(data: Examples, degrees: float) -> Examples:
    """The same examples, turned counter-clockwise."""
    return _changed(data, lambda x, _: rotate(x, degrees))


def _changed(data: Examples, change: ImageChange) -> Examples:
    """Examples with images of their own, each client's behind the one's before."""
    real = torch.arange(data.rows.shape[1]) < data.count.unsqueeze(1)  # [C, M]
    real = real.to(data.rows.device)
    rows = data.rows[real].to(data.x.device)
    place = (real.flatten().cumsum(0) - 1).view_as(data.rows) * real
    return dataclasses.replace(data, x=change(data.x[rows], rows), y=data.y[rows.to(data.y.device)], rows=place)
