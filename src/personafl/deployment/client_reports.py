"""What clients say of themselves, their data, their work and their scores, checked: whatever they say, it is bounded.

What is wrong is a `TypeError`, `ValueError`, `KeyError` or `OverflowError`, or a `UserError` with a sentence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from personafl.data import normalize
from personafl.deployment.messages import Failure, Reply
from personafl.deployment.world import Form

Row = dict[str, Any]
MOST_WORK = 1e30  # FLOP or steps of one exchange
MOST_VALUE = 1e15  # of an input or a target, where clients tell their sums
MOST_SCORE = 1e15  # of a metric that has no bound


@dataclass(frozen=True)
class Described:
    """What a client tells of its data, checked."""

    form: Form
    sizes: dict[str, int]
    setting: normalize.Setting  # what data.normalize means for them
    moments: Any  # of inputs
    target_moments: Any

    @classmethod
    def read(cls, told: Row) -> Described:
        setting = normalize.checked(told["normalize"])
        moments = told.get("moments"), told.get("target_moments")
        return cls(Form.read(told["form"]), read_sizes(told["sizes"]), setting, *moments)

    @property
    def kind(self) -> tuple[Form, normalize.Setting]:
        """What must be the same at all clients."""
        names = None if self.form.class_names is None else ()
        return dataclasses.replace(self.form, classes=1, class_names=names), self.setting

    def unlike(self, other: Described) -> str:
        if why := self.form.unlike(other.form):
            return why
        same = self.setting == other.setting
        return "" if same else f"data.normalize={self.setting!r:.80} for its data, others {other.setting!r:.80}"


def labels_beyond(form: Form, agreed: Form) -> str:
    """What is wrong with a client's labels where all agreed on theirs; nothing where it has no others."""
    fits = form.classes <= agreed.classes and set(form.class_names or ()) <= set(agreed.class_names or ())
    return "" if fits else "labels that were not agreed on"


def answer(reply: Reply | Failure) -> tuple[str, Row]:
    """Why an answer is none, and what it tells."""
    if isinstance(reply, Failure):
        return one_line(reply.why), {}
    return (one_line(reply.told["error"]) or "an error" if reply.told.get("error") else ""), reply.told


def one_line(told: Any) -> str:
    """What a client says, for a log: one line of moderate length, without anything that is no letter."""
    shown = "".join(c if c.isprintable() else " " for c in str(told)[:1000])
    return " ".join(shown.split())[:300]


def finite(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def score(value: Any, most: float) -> float:
    """A score; what is not finite, which JSON has as null, counts as zero."""
    found = 0.0 if value is None else finite(value)
    if found > most * (1 + 1e-9) or found < -MOST_SCORE:
        raise ValueError
    return found


def read_scores(told: Any, bounds: Mapping[str, float]) -> Row:
    """A client's scores, checked: those there are bounds for."""
    found: Row = {"finite": bool(told["finite"])}
    asked = [n for n in ("own", "common", "validation", "train_loss") if n in bounds and (n in told or n == "own")]
    return found | {n: score(told[n], bounds[n]) for n in asked}


def read_work(told: Any) -> dict[str, float]:
    """What a client's training took, checked."""
    found = {n: finite(told[n]) for n in ("flops", "dense_flops", "loss", "steps")}
    if any(not 0 <= found[n] <= MOST_WORK for n in ("flops", "dense_flops", "steps")):
        raise ValueError
    return found


def read_sizes(told: Any) -> dict[str, int]:
    sizes: dict[str, int] = {split: told[split] for split in ("train", "validation", "test")}
    if any(type(n) is not int or not (split != "validation") <= n < 2**32 for split, n in sizes.items()):
        raise ValueError
    return sizes


def read_moments(told: Any, two: Tensor, train: int) -> normalize.Moments:
    """The sums of a client's training inputs or targets, checked: of numbers that data may have.

    `two` are two examples, or two targets, of the form that all have; `train` is how many the client trains on.
    """
    like = normalize.moments(two)
    mean, squares = (np.asarray([finite(v) for v in told[n]], np.float64) for n in ("mean", "squares"))
    fits = mean.shape == squares.shape == like.mean.shape and told["count"] == train * like.count // 2
    if not fits or (np.abs(mean) > MOST_VALUE).any() or (squares < 0).any() or (squares > MOST_VALUE**2).any():
        raise ValueError
    return normalize.Moments(train * like.count // 2, mean, squares)
