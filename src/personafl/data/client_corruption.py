"""Clients whose images are corrupted, for training as for testing: `data.corruption`.

As CO-PFL (severity 5, a type of corruption for each client), by the corruptions of `corruptions.py`. Clients' splits
come first, so no image is trained on in one form and tested in another.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from personafl.core import rng
from personafl.core.errors import UserError
from personafl.data.corruptions import STANDARD, corrupt, require_images
from personafl.data.dataset import Source
from personafl.data.federated import Federation, Split

PER_CLIENT = "per-client"
CORRUPTED_BY_DEFAULT = frozenset({"cifar10-c"})
"""Data sets whose clients have a corruption each unless a recipe says otherwise."""

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
BLOCK = 1000  # looked up together


def corrupt_source(source: Source, kind: str, severity: int = 5) -> Source:
    """A data set with all its images corrupted by one kind, if that is asked for and not done already.

    An image's draws are keyed by its row alone, so they are the same for every seed.
    """
    if kind in ("none", PER_CLIENT) or source.corruption == (kind, severity):
        return source
    require_images(source.x, f"data.corruption={kind!r} on {source.name}")
    x = _corrupt(source.x, torch.arange(len(source.x)), kind, severity)
    return dataclasses.replace(source, x=x, corruption=(kind, severity))


def corrupt_federation(federation: Federation, kind: str, severity: int = 5) -> Federation:
    """A federation with corrupted images: all by one kind, or client c by kind c of the fifteen, which then begin anew.

    Rows of no client stay as they are when every client has a kind of its own.
    """
    source = federation.source
    if kind != PER_CLIENT:
        return dataclasses.replace(federation, source=corrupt_source(source, kind, severity))
    if federation.common_test is not None:
        raise UserError(
            f"data.corruption={kind!r}: all clients are tested on the same images (data.test_share=0), which cannot be "
            "corrupted differently for each; split test data off with data.test_share"
        )
    require_images(source.x, f"data.corruption={kind!r} on {source.name}")
    x, names = source.x.clone(), STANDARD
    for place, name in enumerate(names[: federation.everybody]):
        for ids in torch.split(torch.arange(place, federation.everybody, len(names)), BLOCK):
            rows = torch.cat([_rows(federation, split, ids) for split in SPLITS])
            x[rows] = _corrupt(x[rows], rows, name, severity)
    return dataclasses.replace(federation, source=dataclasses.replace(source, x=x, corruption=(kind, severity)))


def client_kinds(federation: Federation) -> list[str]:
    """The kind of each client, where each has one of its own; else nothing."""
    if federation.source.corruption is None or federation.source.corruption[0] != PER_CLIENT:
        return []
    return [STANDARD[c % len(STANDARD)] for c in range(federation.everybody)]


def _corrupt(x: Tensor, rows: Tensor, kind: str, severity: int) -> Tensor:
    return corrupt(x, kind, severity, rng.key(0, "corrupted data", rows))


def _rows(federation: Federation, split: Split, ids: Tensor) -> Tensor:
    """What these clients hold in a split, behind one another."""
    data = federation.examples(split, ids)
    return data.rows[torch.arange(data.rows.shape[1]) < data.count.unsqueeze(1)]
