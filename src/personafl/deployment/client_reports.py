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

from personafl.core.types import Row
from personafl.data import normalize
from personafl.data.columns import MOST_CATEGORIES, feature_places, unknown_category
from personafl.deployment.federation_spec import MOST_CLASSES, MOST_NAMES, Form
from personafl.deployment.messages import Failure, Reply

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
        form = dataclasses.replace(self.form, classes=1, class_names=names)
        if form.columns is not None:
            columns = (c._replace(categories=None if c.categories is None else ()) for c in form.columns)
            form = form.with_columns(tuple(sorted(columns)))
        return form, self.setting

    def input_moments(self, agreed: Form, two: Tensor) -> normalize.Moments:
        """The sums of the client's training inputs, by the features agreed on; `two` are two examples of these.

        A feature of a category that the client does not have is 0 in all its rows.
        """
        train = self.sizes["train"]
        if self.form.columns == agreed.columns or self.form.columns is None or agreed.columns is None:
            return read_moments(self.moments, two, train)
        own = read_moments(self.moments, self.form.stand_in(None).x, train)
        places = feature_places(self.form.columns, agreed.columns)
        mean, squares = np.zeros(agreed.shape), np.zeros(agreed.shape)
        mean[places], squares[places] = own.mean, own.squares
        return normalize.Moments(own.count, mean, squares)

    def unlike(self, other: Described) -> str:
        if why := self.form.unlike(other.form):
            return why
        same = self.setting == other.setting
        return "" if same else f"data.normalize={self.setting!r:.80} for its data, others {other.setting!r:.80}"


def labels_beyond(form: Form, agreed: Form) -> str:
    """What is wrong with a client's labels where all agreed on theirs; nothing where it has no others."""
    fits = form.classes <= agreed.classes and set(form.class_names or ()) <= set(agreed.class_names or ())
    return "" if fits else "labels that were not agreed on"


def categories_beyond(form: Form, agreed: Form) -> str:
    """What is wrong with a client's categories where all agreed on theirs; nothing where it has no others."""
    unknown = unknown_category(form.columns or (), agreed.columns or ())
    return f"categories in column {unknown[0]!r:.80} that were not agreed on" if unknown else ""


def find_excess(described: Mapping[int, Described], agreed: Form) -> tuple[int, str] | None:
    """The client that tells most of what there is too much of in the form of all, and why it is not used.

    None where labels and categories of all are within their limits.
    """
    if agreed.classes > MOST_CLASSES:
        most = max(described, key=lambda n: described[n].form.classes)
        return most, "too many labels beside those of the others"
    for name, categories in agreed.columns or ():
        if len(categories or ()) > MOST_CATEGORIES:
            widths = {n: next(c.width for c in d.form.columns or () if c.name == name) for n, d in described.items()}
            most = max(widths, key=widths.__getitem__)
            return most, f"too many categories in column {name!r:.80} beside those of the others"
    if agreed.name_length > MOST_NAMES:
        most = max(described, key=lambda n: described[n].form.name_length)
        return most, "too many or too long labels and categories beside those of the others"
    return None


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
