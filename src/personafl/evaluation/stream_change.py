"""A stream of inputs that changes abruptly: a client's own, then somebody else's, then its own again.

So many inputs each, in the order drawn for each client; the foreign ones are those of a draw of shift. Where a test set
has fewer, they come again from the start. Nobody tells the client of the change. What it comes to is the mean score
over clients and draws at every place of the stream, and how many inputs pass after a change until it has recovered:
until the mean of the next `WIDTH` inputs is within `NEAR` of what the second half of that part has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core.errors import UserError
from personafl.core.types import Examples, Metric
from personafl.data.federated import Federation
from personafl.data.shift import Shift
from personafl.evaluation import batch_inference
from personafl.evaluation.matrix import Score
from personafl.evaluation.settings import Evaluation

PARTS = ("own", "shifted", "own_again")
WIDTH = 8  # inputs that are averaged over to tell whether it has recovered
NEAR = 0.01


def check(evaluation: Evaluation, metric: Metric) -> None:
    if evaluation.change and metric.reduce is not None:
        raise UserError(f"evaluation.change={evaluation.change}: {metric.name} is no mean over examples; use change=0")


def stream(federation: Federation, shift: Shift, ids: Tensor, draw: int, inputs: int, seed: int) -> Examples:
    """The streams of these clients, `[C, 3 * inputs]` rows in order; a client without test data has none."""
    data = federation.examples("test", ids)
    order = batch_inference.shuffled(data, seed)
    rows = data.rows.new_zeros(len(ids), len(PARTS) * inputs)
    for i, (c, n) in enumerate(zip(ids.tolist(), data.count.tolist(), strict=True)):
        if n:
            own = data.rows[i, order[i, :n]][torch.arange(2 * inputs, device=rows.device) % n]
            foreign = shift.of(draw, c)[0].to(rows.device)[torch.arange(inputs, device=rows.device) % n]
            rows[i] = torch.cat([own[:inputs], foreign, own[inputs:]])
    return dataclasses.replace(data, rows=rows, count=(data.count > 0) * rows.shape[1])


def stream_scores(
    score_in_order: Score, federation: Federation, shift: Shift, ids: Tensor, evaluation: Evaluation, seed: int
) -> Tensor:
    """The scores of these clients' streams, `[C, draws, 3 * inputs]`; NaN where there is none."""
    draws = []
    for d in range(shift.draws):
        found = score_in_order(stream(federation, shift, ids, d, evaluation.change, seed))
        length = len(PARTS) * evaluation.change
        draws.append(torch.stack([s if len(s) else torch.full((length,), torch.nan) for s in found]))
    return torch.stack(draws, 1)


def summary(scores: NDArray[Any], better: str) -> dict[str, Any]:
    """What scores `[C, draws, 3 * inputs]` come to."""
    curve = np.nanmean(scores.astype(np.float64), axis=(0, 1))
    parts = dict(zip(PARTS, np.split(curve, len(PARTS)), strict=True))
    levels = {name: float(part[len(part) // 2 :].mean()) for name, part in parts.items()}
    after = {name: recovered(parts[name], levels[name], better) for name in PARTS[1:]}
    return {"inputs": len(parts["own"]), "levels": levels, "recovery": after, "curve": curve.tolist()}


def smoothed(told: Mapping[str, Any]) -> dict[float, float]:
    """The curve of a summary for drawing: means of `WIDTH` inputs, at their middle; inputs count from one."""
    curve = np.array([v for v in told["curve"] if isinstance(v, int | float)], dtype=np.float64)
    width = min(WIDTH, len(curve))
    means = np.convolve(curve, np.ones(width) / width, "valid") if width else curve
    return {i + (width + 1) / 2: float(v) for i, v in enumerate(means)}


def recovered(part: NDArray[np.float64], level: float, better: str) -> int:
    """The inputs that pass until the mean of the next ones is as good as this, but for `NEAR`."""
    sign = 1 if better == "higher" else -1
    for first in range(len(part)):
        if sign * (part[first : first + WIDTH].mean() - level) >= -NEAR:
            return first
    return len(part)
