"""Every client's model on one set of corrupted images, the same for all: DM-PFL's Fig. 4.

The set is the test part the data came with (`Source.test`), whoever holds its rows. Where that was pooled with the
training part before clients were dealt theirs (`data.official_test = "pooled"`), most of its images are some client's
training images, as they are in the paper. Data without such a part, and runs judged by validation data, have what all
clients are judged by in its place, those held out included; a row is one client's, so nobody trained on these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from personafl.core.types import Examples, Metric
from personafl.data.federated import Federation
from personafl.data.ragged import Indices
from personafl.evaluation import image_transforms, matrix
from personafl.evaluation.matrix import Score
from personafl.evaluation.settings import Evaluation

MOST = 10_000  # images of the set
KEPT = 2**29  # bytes of corrupted images held at a time, or one kind and severity of them

Cell = tuple[str, int] | None
"""Kind and severity; None for the images as they are."""


def asked(evaluation: Evaluation) -> bool:
    """Whether there are corruptions of this set."""
    return bool(evaluation.corruptions) and evaluation.corrupted != "own"


def chosen_rows(federation: Federation, evaluation: Evaluation) -> Tensor:
    """The rows of the set, ascending; `MOST` evenly spaced ones of more."""
    came_with = federation.source.test
    if evaluation.split == "test" and came_with is not None and came_with.any():
        rows: Indices = np.flatnonzero(came_with)
    else:
        common = federation.common_test
        rows = np.unique(federation.drawn("test").numpy()[0] if common is None else common.cpu().numpy())
    if len(rows) > MOST:
        rows = rows[np.arange(MOST) * len(rows) // MOST]
    return torch.from_numpy(rows)


def passes(federation: Federation, evaluation: Evaluation, rows: Tensor) -> list[list[Cell]]:
    """The set as it is, then each kind and severity; as many together as are held at a time."""
    kinds = image_transforms.kinds(evaluation)
    cells: list[Cell] = [None, *((k, s) for k in kinds for s in evaluation.severities)]
    image = federation.source.x[:1]
    many = max(1, KEPT // (len(rows) * image.numel() * image.element_size()))
    return [cells[i : i + many] for i in range(0, len(cells), many)]


def blocks(rows: Tensor, *, per_sample: bool) -> list[Tensor]:
    """Rows that are scored together: all of them where an answer looks at its batch."""
    return list(torch.split(rows, matrix.ROWS if per_sample else max(len(rows), 1)))


def images(federation: Federation, rows: Tensor, cell: Cell, seed: int) -> Examples:
    """These rows as one client's, corrupted; the same images as where they are somebody's own test images."""
    device = federation.source.y.device
    data = federation.examples_at(rows.to(device)[None], torch.tensor([len(rows)]), torch.zeros(1, dtype=torch.int64))
    return data if cell is None else image_transforms.corrupted(data, *cell, seed)


def scored_by(score: Score, shown: Sequence[Examples], ids: Tensor, metric: Metric) -> Tensor:
    """The numbers `[C]` of these clients for blocks of images."""
    found = []
    for block in shown:
        count = block.count.expand(len(ids))
        found.append(score(dataclasses.replace(block, rows=block.rows.expand(len(ids), -1), count=count, ids=ids)))
    return torch.stack([metric.of_client(torch.cat(mine)) for mine in zip(*found, strict=True)])
