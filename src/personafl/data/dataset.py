"""A data set before it is divided over clients."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import tasks
from personafl.core.errors import UserError
from personafl.core.types import TaskName

Array = NDArray[Any]
HASHED = 4 * 2**20  # bytes of examples a hash is taken of


@dataclass(frozen=True)
class Source:
    """A data set before it is divided: examples, targets, and natural clients where it has them."""

    name: str
    x: Tensor  # [N, ...]
    y: Tensor  # [N] int64, or as its task has them (`core/tasks.py`)
    classes: int  # or numbers per target, where targets are no classes: what a model gives for an example
    model: str = "mlp"  # what model.name = "auto" means
    clients: NDArray[np.int64] | None = None  # [N] natural client of each example
    sources: NDArray[np.int64] | None = None  # [N] which of several data sets it came from
    groups: NDArray[np.int64] | None = None  # [N] examples of one group share raw data and are never split apart
    test: NDArray[np.bool_] | None = None  # [N] in the test part the data came with
    names: tuple[str, ...] | None = None  # of the natural clients, by their number
    corruption: tuple[str, int] | None = None  # of its images: kind and severity
    task: TaskName = "classification"

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
        if self.x.is_floating_point() and not torch.isfinite(self.x).all():
            bad = int((~torch.isfinite(self.x)).reshape(len(self.x), -1).any(1).nonzero()[0, 0])
            raise UserError(f"{self.name}: example {bad} contains NaN or infinity")
        try:
            tasks.check_targets(self.y, self.task, self.classes)
        except UserError as e:
            raise UserError(f"{self.name}: {e}") from None

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
        model = changed.model if self.model in ("mlp", "token-lstm") else self.model
        return replace(self, y=changed.y, classes=changed.classes, model=model, task=changed.task)

    @cached_property
    def digest(self) -> str:
        """A short hash of name, targets, corruption, shape and kind of number, and of every k-th example.

        All examples count up to `HASHED` bytes of them; of larger data sets as many as make that.
        """
        each = self.x[0].numel() * self.x.element_size()
        step = max(1, -(-len(self.x) * each // HASHED))
        what: tuple[object, ...] = (self.name, tuple(self.x.shape), str(self.x.dtype), self.classes, self.corruption)
        if self.task != "classification":
            what = (*what, self.task, tuple(self.y.shape), str(self.y.dtype))
        h = hashlib.sha256(repr(what).encode())
        h.update(self.y.cpu().numpy().tobytes())
        h.update(self.x[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return h.hexdigest()[:16]


def arrays(
    x: object,
    y: object,
    clients: object = None,
    *,
    classes: int = 0,
    name: str = "arrays",
    task: TaskName | Literal["auto"] = "auto",
) -> Source:
    """One's own data: examples, targets, and optionally the client of each example.

    The type and shape of the targets say what task it is (`core/tasks.py`), unless `task` does.
    """
    try:
        xs, ys = torch.as_tensor(x), torch.as_tensor(y)
    except (TypeError, ValueError) as e:
        raise UserError(f"{name}: examples and targets must be numbers: {e}") from None
    if xs.is_floating_point():
        xs = xs.float()
    try:
        kind = tasks.infer_task(ys) if task == "auto" else task
        ys = tasks.as_targets(ys, kind)
    except UserError as e:
        raise UserError(f"{name}: {e}") from None
    ids, names = None, None
    if clients is not None:
        there, found = np.unique(np.asarray(clients), return_inverse=True)
        ids, names = found.astype(np.int64), tuple(map(str, there))
    count = tasks.count_outputs(ys, kind)
    tokens = kind == "sequence" and not xs.is_floating_point()
    if tokens and xs.numel():  # examples and targets have one vocabulary
        count = max(count, int(xs.max()) + 1)
    if kind in ("classification", "sequence"):
        count = classes or count
    model = "token-lstm" if tokens else "mlp"
    return Source(name, xs, ys, count, model, clients=ids, names=names, task=kind)


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
