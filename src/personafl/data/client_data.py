"""What each client holds, concatenated into one data set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from personafl.core.errors import UserError
from personafl.data.dataset import Array, Source, arrays


@dataclass(frozen=True)
class ClientData:
    """A client's examples, or those of its training or test part."""

    name: str  # of the client
    x: Array  # [n, ...]
    y: Array  # [n] or [n, ...]
    test: bool | None = None  # None: it is not divided

    @property
    def where(self) -> str:
        part = "" if self.test is None else ", test part" if self.test else ", training part"
        return f"client {self.name}{part}"


def concatenate(name: str, parts: Iterable[ClientData], *, classes: int = 0) -> Source:
    """All parts as one data set, its clients numbered as they first come; what does not fit is named."""
    held = [_checked(name, p) for p in parts]
    if not held:
        raise UserError(f"{name}: no clients")
    first = held[0]
    for p in held[1:]:
        if p.x.shape[1:] != first.x.shape[1:]:
            raise UserError(
                f"{name}: {p.where}: examples of shape {p.x.shape[1:]}, those of {first.where} have {first.x.shape[1:]}"
            )
        if p.y.shape[1:] != first.y.shape[1:]:
            raise UserError(
                f"{name}: {p.where}: targets of shape {p.y.shape[1:]}, those of {first.where} have {first.y.shape[1:]}"
            )
        if p.x.dtype != first.x.dtype:
            raise UserError(f"{name}: {p.where}: examples are {p.x.dtype}, those of {first.where} {first.x.dtype}")
    names = list(dict.fromkeys(p.name for p in held))
    number = {n: i for i, n in enumerate(names)}
    lengths = [len(p.y) for p in held]
    clients = np.repeat([number[p.name] for p in held], lengths)
    divided = [p.test is not None for p in held]
    if any(divided) and not all(divided):
        odd = held[divided.index(divided[0] is False)]
        raise UserError(f"{name}: {odd.where}: either all clients or none come with a test part")
    test = np.repeat([bool(p.test) for p in held], lengths) if all(divided) else None
    made = arrays(
        np.concatenate([p.x for p in held]), np.concatenate([p.y for p in held]), clients, classes=classes, name=name
    )
    return replace(made, test=test, names=tuple(names))


def _checked(name: str, part: ClientData) -> ClientData:
    """The part with floats in single precision, or what is wrong with it."""
    x, y = part.x, part.y
    if x.dtype.kind not in "fiub" or y.dtype.kind not in "fiub":
        kind = x.dtype if x.dtype.kind not in "fiub" else y.dtype
        raise UserError(f"{name}: {part.where}: examples and labels must be numbers, they are {kind}")
    if y.ndim < 1 or x.ndim < 1 or len(x) != len(y):
        raise UserError(
            f"{name}: {part.where}: one label per example is needed; examples have shape {x.shape}, labels {y.shape}"
        )
    if not len(y):
        raise UserError(f"{name}: {part.where}: no examples")
    if x.dtype.kind == "f":
        x = x.astype(np.float32, copy=False)
        _refuse(name, part, ~np.isfinite(x).reshape(len(x), -1).all(axis=1), "contains NaN or infinity")
    if y.dtype.kind == "f":
        _refuse(name, part, ~np.isfinite(y).reshape(len(y), -1).all(axis=1), "has a target that is NaN or infinite")
    elif y.ndim == 1:
        _refuse(name, part, y < 0, "has a negative label")
    return ClientData(part.name, x, y, part.test)


def _refuse(name: str, part: ClientData, wrong: NDArray[np.bool_] | np.bool_, what: str) -> None:
    if wrong.any():
        raise UserError(f"{name}: {part.where}: example {int(wrong.argmax())} {what}")


def client_names(names: Sequence[str] | None, count: int) -> list[str]:
    """These names of clients, or their numbers."""
    if names is None:
        return [str(i) for i in range(count)]
    if len(names) != count or len(set(names)) != count:
        raise UserError(f"{len(names)} names ({len(set(names))} different) for {count} clients")
    return list(names)
