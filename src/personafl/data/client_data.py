"""What each client holds, concatenated into one data set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from personafl.core.errors import UserError
from personafl.core.types import TaskName
from personafl.data.columns import Column, name_features
from personafl.data.dataset import Array, Source, prepared
from personafl.data.missing import Missing, fill_missing


@dataclass(frozen=True)
class ClientData:
    """Examples of a client, or of its training or test part; it may come in several pieces."""

    name: str  # of the client
    x: Array  # [n, ...]
    y: Array  # [n] numbers or text, or [n, T] numbers
    test: bool | None = None  # None: it is not divided

    @property
    def where(self) -> str:
        part = "" if self.test is None else ", test part" if self.test else ", training part"
        return f"client {self.name}{part}"


def concatenate(
    name: str,
    parts: Iterable[ClientData],
    *,
    classes: int = 0,
    missing: Missing = "refuse",
    task: TaskName | Literal["auto"] = "auto",
    class_names: tuple[str, ...] | None = None,
    columns: tuple[Column, ...] | None = None,
) -> Source:
    """All parts as one data set, its clients numbered as they first come; what does not fit is named.

    A part may be empty where its client has another that is not.
    """
    held = [_checked(name, p) for p in _present(name, parts)]
    first = held[0]
    for p in held[1:]:
        _check_fit(name, p, first)
    features = None if columns is None else tuple(name_features(columns))
    if first.x.dtype.kind == "f":
        filled = fill_missing(name, [(p.where, p.x) for p in held], missing, features)
        held = [replace(p, x=x) for p, x in zip(held, filled, strict=True)]
    names = list(dict.fromkeys(p.name for p in held))
    number = {n: i for i, n in enumerate(names)}
    lengths = [len(p.y) for p in held]
    clients = np.repeat([number[p.name] for p in held], lengths)
    divided = [p.test is not None for p in held]
    if any(divided) and not all(divided):
        odd = held[divided.index(divided[0] is False)]
        raise UserError(f"{name}: {odd.where}: either all clients or none come with a test part")
    test = np.repeat([bool(p.test) for p in held], lengths) if all(divided) else None
    x, y = np.concatenate([p.x for p in held]), np.concatenate([p.y for p in held])
    found = prepared(name, x, y, classes, task, "refuse")
    found["class_names"] = found["class_names"] or class_names
    return Source(
        name=name, clients=clients, test=test, names=tuple(names), feature_names=features, columns=columns, **found
    )


def _present(name: str, parts: Iterable[ClientData]) -> list[ClientData]:
    """The parts that are not empty, of which every client must have one."""
    given = list(parts)
    held = [p for p in given if len(p.y)]
    bare = {p.name: p for p in given}.keys() - {p.name for p in held}
    if bare:
        raise UserError(f"{name}: {next(p for p in given if p.name in bare).where}: no examples")
    if not held:
        raise UserError(f"{name}: no clients")
    return held


def _check_fit(name: str, part: ClientData, first: ClientData) -> None:
    where = f"{name}: {part.where}"
    if part.x.shape[1:] != first.x.shape[1:]:
        raise UserError(
            f"{where}: examples of shape {part.x.shape[1:]}, those of {first.where} have {first.x.shape[1:]}"
        )
    if part.x.dtype != first.x.dtype:
        raise UserError(f"{where}: examples are {part.x.dtype}, those of {first.where} {first.x.dtype}")
    if part.y.shape[1:] != first.y.shape[1:]:
        raise UserError(f"{where}: labels of shape {part.y.shape[1:]}, those of {first.where} have {first.y.shape[1:]}")
    kinds = ["text" if p.y.dtype.kind == "U" else "numbers" for p in (part, first)]
    if kinds[0] != kinds[1]:
        raise UserError(f"{where}: labels are {kinds[0]}, those of {first.where} {kinds[1]}")


def _checked(name: str, part: ClientData) -> ClientData:
    """The part with floats in single precision, or what is wrong with it; NaN among its examples is let through."""
    x, y = part.x, part.y
    if x.dtype.kind not in "fiub" or y.dtype.kind not in "fiubU":
        kind = x.dtype if x.dtype.kind not in "fiub" else y.dtype
        raise UserError(f"{name}: {part.where}: examples and labels must be numbers, they are {kind}")
    if y.ndim < 1 or x.ndim < 1 or len(x) != len(y):
        raise UserError(
            f"{name}: {part.where}: one label per example is needed; examples have shape {x.shape}, labels {y.shape}"
        )
    if x.dtype.kind == "f":
        x = x.astype(np.float32, copy=False)
        _refuse(name, part, np.isinf(x), "contains infinity")
    if y.dtype.kind == "f":
        _refuse(name, part, ~np.isfinite(y), "has no label: it is NaN or infinity")
    return replace(part, x=x)


def _refuse(name: str, part: ClientData, wrong: NDArray[np.bool_], what: str) -> None:
    if wrong.any():
        example = int(wrong.reshape(len(wrong), -1).any(axis=1).argmax())
        raise UserError(f"{name}: {part.where}: example {example} {what}")


def client_names(names: Sequence[str] | None, count: int) -> list[str]:
    """These names of clients, or their numbers."""
    if names is None:
        return [str(i) for i in range(count)]
    if len(names) != count or len(set(names)) != count:
        raise UserError(f"{len(names)} names ({len(set(names))} different) for {count} clients")
    return list(names)
