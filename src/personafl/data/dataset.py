"""A data set before it is divided over clients."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core.errors import UserError
from personafl.core.normalization import Normalization
from personafl.data.missing import Missing, fill_missing

Array = NDArray[Any]
HASHED = 4 * 2**20  # bytes of examples a hash is taken of


@dataclass(frozen=True, eq=False)
class Source:
    """A data set before it is divided: examples, labels, and natural clients where it has them."""

    name: str
    x: Tensor  # [N, ...]
    y: Tensor  # [N] int64
    classes: int
    model: str = "mlp"  # what model.name = "auto" means
    clients: NDArray[np.int64] | None = None  # [N] natural client of each example
    sources: NDArray[np.int64] | None = None  # [N] which of several data sets it came from
    groups: NDArray[np.int64] | None = None  # [N] examples of one group share raw data and are never split apart
    test: NDArray[np.bool_] | None = None  # [N] in the test part the data came with
    names: tuple[str, ...] | None = None  # of the natural clients, by their number
    corruption: tuple[str, int] | None = None  # of its images: kind and severity
    class_names: tuple[str, ...] | None = None  # where labels were text, by their number
    feature_names: tuple[str, ...] | None = None  # of the columns of x, where it was a table
    normalization: Normalization | None = None  # of what models see; x is not normalised

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
        if self.feature_names is not None and tuple(self.x.shape[1:]) != (len(self.feature_names),):
            raise UserError(
                f"{self.name}: {len(self.feature_names)} names of features for examples of shape "
                f"{tuple(self.x.shape[1:])}"
            )
        if self.x.is_floating_point() and not torch.isfinite(self.x).all():
            bad = int((~torch.isfinite(self.x)).reshape(len(self.x), -1).any(1).nonzero()[0, 0])
            raise UserError(f"{self.name}: {self._place(bad)} contains NaN or infinity")
        if self.normalization is not None and not self.normalization.fits(self.x):
            raise UserError(
                f"{self.name}: {self.normalization} does not fit examples of shape {tuple(self.x.shape[1:])}"
            )
        if self.y.dim() != 1:
            raise UserError(f"{self.name}: labels must be one number per example, their shape is {tuple(self.y.shape)}")
        if self.y.is_floating_point():
            bad = int((self.y != self.y.round()).int().argmax())
            raise UserError(
                f"{self.name}: labels must be whole numbers, that of {self._place(bad)} is {self.y[bad].item():g}"
            )
        wrong = (self.y < 0) | (self.y >= self.classes)
        if wrong.any():
            at = int(wrong.nonzero()[0, 0])
            raise UserError(
                f"{self.name}: label {int(self.y[at])} of {self._place(at)} is not in 0..{self.classes - 1}"
            )

    def _place(self, row: int) -> str:
        """An example in messages: by its place among its client's, where that has a name."""
        if self.clients is None or self.names is None:
            return f"example {row}"
        client = self.clients[row]
        return f"example {int((self.clients[:row] == client).sum())} of client {self.names[client]}"

    @cached_property
    def digest(self) -> str:
        """A short hash of name, labels, corruption, normalisation, shape and kind of number, and every k-th example.

        All examples count up to `HASHED` bytes of them; of larger data sets as many as make that.
        """
        each = self.x[0].numel() * self.x.element_size()
        step = max(1, -(-len(self.x) * each // HASHED))
        what = (self.name, tuple(self.x.shape), str(self.x.dtype), self.classes, self.corruption)
        h = hashlib.sha256(repr(what).encode())
        if self.normalization is not None:
            h.update(repr(self.normalization).encode())
        h.update(self.y.cpu().numpy().tobytes())
        h.update(self.x[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return h.hexdigest()[:16]


def arrays(
    x: object, y: object, clients: object = None, *, classes: int = 0, name: str = "arrays", missing: Missing = "refuse"
) -> Source:
    """One's own data: examples, their labels, and optionally the client of each example.

    Labels are whole numbers, or text, whose sorted different values are the classes. Numbers that are not whole stay
    float32, as do several per example, `[N, T]`. `missing` says what becomes of NaN among the examples.
    """
    xs, ys, count, class_names = as_tensors(name, x, y, classes)
    if xs.is_floating_point():
        xs = torch.from_numpy(fill_missing(name, [("", xs.numpy())], missing)[0])
    ids, names = None, None
    if clients is not None:
        there, found = np.unique(np.asarray(clients), return_inverse=True)
        ids, names = found.astype(np.int64), tuple(map(str, there))
    return Source(name, xs, ys, count, clients=ids, names=names, class_names=class_names)


def as_tensors(name: str, x: object, y: object, classes: int) -> tuple[Tensor, Tensor, int, tuple[str, ...] | None]:
    """Examples and labels as a `Source` has them, how many classes (0: as many as occur), and what they are called."""
    class_names, numbers = _encoded(name, y)
    try:
        xs, ys = torch.as_tensor(x), torch.as_tensor(numbers)
    except (TypeError, ValueError) as e:
        raise UserError(f"{name}: examples and labels must be numbers: {e}") from None
    if xs.is_floating_point():
        xs = xs.float()
    if ys.dim() == 2 and ys.shape[1] == 1:
        ys = ys.squeeze(1)
    if ys.dim() > 1 or (ys.is_floating_point() and bool((ys != ys.round()).any())):
        return xs, ys.float(), classes or (ys.shape[1] if ys.dim() > 1 else 1), None
    occurring = len(class_names) if class_names else int(ys.max()) + 1 if len(ys) else 1
    return xs, ys.long(), classes or occurring, class_names


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
