"""Missing values of examples: NaN where a number should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from personafl.core.errors import UserError

_Array = NDArray[Any]
Missing = Literal["refuse", "mean", "zero"]
HELP = "data.missing=mean or data.missing=zero fills them"


def fill_missing(
    name: str, parts: Sequence[tuple[str, _Array]], missing: Missing, features: Sequence[str] | None = None
) -> list[_Array]:
    """Float examples `[n, ...]` of several places with their NaN replaced, or refused with the first one's place.

    The mean of a feature is that of all values that are there, of all parts and rows: each part gives sums and counts.
    """
    holes = [np.isnan(x) for _, x in parts]
    total = sum(int(h.sum()) for h in holes)
    if not total:
        return [x for _, x in parts]
    if missing == "refuse":
        where, hole = next((w, h) for (w, _), h in zip(parts, holes, strict=True) if h.any())
        example = int(hole.reshape(len(hole), -1).any(axis=1).argmax())
        count = "the only missing value" if total == 1 else f"the first of {total} missing values"
        raise UserError(f"{name}: {f'{where}: ' if where else ''}example {example} contains NaN, {count}; {HELP}")
    value = np.zeros(parts[0][1].shape[1:]) if missing == "zero" else _means(name, parts, holes, features)
    return [np.where(h, value.astype(x.dtype), x) for (_, x), h in zip(parts, holes, strict=True)]


def _means(
    name: str, parts: Sequence[tuple[str, _Array]], holes: Sequence[_Array], features: Sequence[str] | None
) -> _Array:
    sums = sum(np.where(h, 0, x).sum(axis=0, dtype=np.float64) for (_, x), h in zip(parts, holes, strict=True))
    counts = np.asarray(sum((~h).sum(axis=0) for h in holes))
    if not counts.all():
        bare = np.argwhere(counts == 0)[0].tolist()
        what = features[bare[0]] if features else "".join(f"[{i}]" for i in bare)
        raise UserError(f"{name}: feature {what} has no value in any example, so there is no mean of it")
    return np.asarray(sums / counts)
