"""A data set before it is divided over clients."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import tasks
from personafl.core.display import Displayed
from personafl.core.errors import UserError
from personafl.core.normalization import Normalization
from personafl.core.plain_text import is_text
from personafl.core.types import TaskName
from personafl.data.columns import Column, name_features
from personafl.data.content_hash import content_hash
from personafl.data.missing import Missing, fill_missing

Array = NDArray[Any]


@dataclass(frozen=True, eq=False, repr=False)
class Source(Displayed):
    """A data set before it is divided: examples, targets, and natural clients where it has them."""

    name: str
    x: Tensor  # [N, ...]
    y: Tensor  # [N] int64, or as its task has them (`core/tasks.py`)
    classes: int  # or numbers per target, where targets are no classes: what a model gives for an example
    model: str = ""  # what model.name = "auto" means; none: what suits their shape
    clients: NDArray[np.int64] | None = None  # [N] natural client of each example
    sources: NDArray[np.int64] | None = None  # [N] which of several data sets it came from
    groups: NDArray[np.int64] | None = None  # [N] examples of one group share raw data and are never split apart
    test: NDArray[np.bool_] | None = None  # [N] in the test part the data came with
    names: tuple[str, ...] | None = None  # of the natural clients, by their number
    corruption: tuple[str, int] | None = None  # of its images: kind and severity
    class_names: tuple[str, ...] | None = None  # where labels were text, by their number
    feature_names: tuple[str, ...] | None = None  # of the columns of x, where it was a table
    columns: tuple[Column, ...] | None = None  # of the table that x was made from, with the categories of text
    task: TaskName = "classification"
    normalization: Normalization | None = None  # of what models see; x is not normalised
    target_normalization: Normalization | None = None  # of what training sees; y is not normalised

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise UserError(f"{self.name}: {len(self.x)} examples but {len(self.y)} labels")
        if not len(self.x):
            raise UserError(f"{self.name}: no examples")
        if self.clients is not None and len(self.clients) != len(self.y):
            raise UserError(f"{self.name}: {len(self.y)} examples but {len(self.clients)} client ids")
        if self.clients is not None and self.names is not None and self.clients.max() >= len(self.names):
            raise UserError(f"{self.name}: {len(self.names)} names, too few for client {self.clients.max()}")
        held = {"sources": self.sources, "groups": self.groups, "entries in test": self.test}
        for what, values in held.items():
            if values is not None and len(values) != len(self.y):
                raise UserError(f"{self.name}: {len(self.y)} examples but {len(values)} {what}")
        if self.test is not None and self.test.dtype != np.bool_:
            raise UserError(f"{self.name}: test must be true or false for each example, it is {self.test.dtype}")
        if self.class_names is not None and len(self.class_names) != self.classes:
            raise UserError(f"{self.name}: {self.classes} classes but {len(self.class_names)} names of classes")
        for what, told in (("client", self.names), ("class", self.class_names), ("feature", self.feature_names)):
            if not is_text("".join(told or ())):
                odd = next(n for n in told or () if not is_text(n))
                raise UserError(f"{self.name}: {what} {odd!r}: its name must be UTF-8 without a zero byte")
        if self.feature_names is not None and tuple(self.x.shape[1:]) != (len(self.feature_names),):
            raise UserError(
                f"{self.name}: {len(self.feature_names)} names of features for examples of shape "
                f"{tuple(self.x.shape[1:])}"
            )
        if self.columns is not None and self.feature_names != tuple(name_features(self.columns)):
            raise UserError(f"{self.name}: the names of its features are not those of its columns")
        if self.x.is_floating_point() and not torch.isfinite(self.x).all():
            bad = int((~torch.isfinite(self.x)).reshape(len(self.x), -1).any(1).nonzero()[0, 0])
            raise UserError(f"{self.name}: {self._place(bad)} contains NaN or infinity")
        if self.normalization is not None and not self.normalization.fits(self.x):
            raise UserError(
                f"{self.name}: {self.normalization} does not fit examples of shape {tuple(self.x.shape[1:])}"
            )
        self._check_target_normalization()
        try:
            tasks.check_targets(self.y, self.task, self.classes, self._place)
        except UserError as e:
            raise UserError(f"{self.name}: {e}") from None

    def _check_target_normalization(self) -> None:
        if self.target_normalization is None:
            return
        if self.task != "regression":
            raise UserError(f"{self.name}: only targets of regression can be normalised, these are of {self.task}")
        if not self.target_normalization.fits(self.y):
            raise UserError(
                f"{self.name}: {self.target_normalization} does not fit targets of shape {tuple(self.y.shape[1:])}"
            )

    def check_outputs(self, outputs: int) -> None:
        """Refuse a model whose outputs cannot be converted back to the units of normalised targets."""
        if self.target_normalization is not None and outputs != self.classes:
            raise UserError(
                f"data.normalize_targets=true: the model gives {outputs} numbers for an example and a target has "
                f"{self.classes}, so outputs cannot be converted back to the units of the targets; set "
                "data.normalize_targets=false"
            )

    @property
    def labels(self) -> NDArray[np.int64]:
        """The class of each example `[N]`; all the same where targets are no classes."""
        return self.y.cpu().numpy() if self.task == "classification" else np.zeros(len(self.y), np.int64)

    @property
    def label_count(self) -> int:
        """How many classes `labels` are of."""
        return self.classes if self.task == "classification" else 1

    def as_task(self, task: TaskName | Literal["auto"]) -> Source:
        """The same data with their targets taken for another task's; refused where they cannot be."""
        if task in ("auto", self.task):
            return self
        changed = arrays(self.x, self.y, name=self.name, task=task)
        model = changed.model if self.model in ("", "token-lstm") else self.model
        return replace(self, y=changed.y, classes=changed.classes, model=model, task=changed.task)

    def _facts(self) -> dict[str, object]:
        natural = {} if self.clients is None else {"clients": len(np.unique(self.clients))}
        shape = tuple(self.x.shape[1:])
        return {"name": self.name, "examples": len(self.x), "shape": shape, "classes": self.classes} | natural

    def _place(self, row: int) -> str:
        """An example in messages: by its place among its client's, where that has a name."""
        if self.clients is None or self.names is None:
            return f"example {row}"
        client = self.clients[row]
        return f"example {int((self.clients[:row] == client).sum())} of client {self.names[client]}"

    @cached_property
    def digest(self) -> str:
        """A short hash of name, examples, targets, corruption, normalisations, shape and kind of number.

        Every byte of the examples counts up to four gibibytes of them (`data/content_hash.py`).
        """
        what: tuple[object, ...] = (self.name, tuple(self.x.shape), str(self.x.dtype), self.classes, self.corruption)
        if self.task != "classification":
            what = (*what, self.task, tuple(self.y.shape), str(self.y.dtype))
        h = hashlib.sha256(repr(what).encode())
        if self.normalization is not None:
            h.update(repr(self.normalization).encode())
        if self.target_normalization is not None:
            h.update(b"targets" + repr(self.target_normalization).encode())
        h.update(self.y.cpu().numpy().tobytes())
        h.update(content_hash(self.x))
        return h.hexdigest()[:16]


def arrays(
    x: object,
    y: object,
    clients: object = None,
    *,
    classes: int = 0,
    name: str = "arrays",
    task: TaskName | Literal["auto"] = "auto",
    missing: Missing = "refuse",
) -> Source:
    """One's own data: examples, targets, and optionally the client of each example.

    The type and shape of the targets say what task it is (`core/tasks.py`), unless `task` does. Text is one class per
    different value, in sorted order. `missing` says what becomes of NaN among the examples.
    """
    ids, names = None, None
    if clients is not None:
        there, found = np.unique(np.asarray(clients), return_inverse=True)
        ids, names = found.astype(np.int64), tuple(map(str, there))
    return Source(name=name, clients=ids, names=names, **prepared(name, x, y, classes, task, missing))


class Prepared(TypedDict):
    """Fields of a `Source` that follow from examples and targets."""

    x: Tensor
    y: Tensor
    classes: int
    model: str
    class_names: tuple[str, ...] | None
    task: TaskName


def prepared(
    name: str, x: object, y: object, classes: int, task: TaskName | Literal["auto"], missing: Missing
) -> Prepared:
    """Examples and targets in the types of their task, how many classes there are, and which network suits them."""
    class_names, numbers = _encoded(name, y)
    if hasattr(x, "to_numpy"):  # a data frame
        x = x.to_numpy()
    try:
        xs, ys = torch.as_tensor(x).detach(), torch.as_tensor(numbers).detach()
    except (TypeError, ValueError, RuntimeError) as e:
        raise UserError(f"{name}: examples and targets must be numbers: {e}") from None
    if xs.is_complex() or ys.is_complex():
        raise UserError(f"{name}: examples and targets must be real numbers, they are complex")
    if xs.is_floating_point():
        xs = torch.from_numpy(fill_missing(name, [("", xs.float().numpy())], missing)[0])
    if ys.dim() == 2 and ys.shape[1] == 1 and not ys.is_floating_point() and ys.dtype != torch.bool:
        ys = ys.squeeze(1)  # a column of classes
    try:
        kind = tasks.infer_task(ys) if task == "auto" else task
        ys = tasks.as_targets(ys, kind)
        count = len(class_names) if class_names else tasks.count_outputs(ys, kind)
        tokens = kind == "sequence" and not xs.is_floating_point()
        if tokens:  # examples and targets have one vocabulary
            count = max(count, tasks.count_classes(xs))
    except UserError as e:
        raise UserError(f"{name}: {e}") from None
    if kind in ("classification", "sequence"):
        count = classes or count
    model = "token-lstm" if tokens else ""
    return {"x": xs, "y": ys, "classes": count, "model": model, "class_names": class_names, "task": kind}


def _encoded(name: str, y: object) -> tuple[tuple[str, ...] | None, object]:
    """Labels that are text as numbers, and what each number stands for; others as they are."""
    held = y if isinstance(y, Tensor) else np.asarray(y)
    if isinstance(held, Tensor) or held.dtype.kind not in "UO":
        return None, y
    if not all(isinstance(v, str) for v in held.flat) or held.ndim != 1:
        raise UserError(f"{name}: labels must be numbers, or text, one for each example")
    there, codes = np.unique(held.astype(np.str_), return_inverse=True)
    return tuple(map(str, there)), codes.astype(np.int64)


def from_arrays(name: str, held: Mapping[str, Array], classes: int, model: str) -> Source:
    """A data set of the arrays x and y, and of clients, test, groups and sources those there are."""
    clients, sources, groups = (
        held[n].astype(np.int64) if n in held else None for n in ("clients", "sources", "groups")
    )
    test = held["test"].astype(np.bool_) if "test" in held else None
    x, y = torch.from_numpy(held["x"]), torch.from_numpy(held["y"].astype(np.int64))
    return Source(name, x, y, classes, model, clients, sources, groups, test)


def official_test_mask(train: int, test: int) -> NDArray[np.bool_]:
    """Which examples are of the test part, where that lies behind the training part."""
    return np.repeat([False, True], [train, test])
