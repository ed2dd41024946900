"""What a recipe names: found, or refused with what is possible."""

from __future__ import annotations

import importlib
import re
import sys
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.settings import shortened, unknown
from personafl.core.types import Criterion, Metric
from personafl.evaluation.metrics import chosen
from personafl.methods import ALGORITHMS

T = TypeVar("T")

_PATH = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*)")

GIVEN = "object:"
"""What the name of an object begins with that a run was given and that has no dotted path."""


def described(thing: object) -> str:
    """The dotted path of what can be imported by one, else `object:NAME`."""
    module, name = getattr(thing, "__module__", None) or "", getattr(thing, "__qualname__", None) or ""
    importable = module != "__main__" and _PATH.fullmatch(f"{module}:{name}")
    if importable and getattr(sys.modules.get(module), name, None) is thing:
        return f"{module}:{name}"
    return f"{GIVEN}{getattr(thing, 'name', None) or name or type(thing).__name__}"


def given_again(key: str, name: str, keyword: str) -> None:
    """Refuse the name of an object that is not there."""
    if name.startswith(GIVEN):
        raise UserError(
            f"{key}={name!r}: this run was given an object; give it again in Python, as in "
            f"Result.load(folder, {keyword}{': ...}' if '{' in keyword else '=...'}), or to personafl.resume"
        )


def imported(path: str, what: str) -> Any:
    """The object at `package.module:name`: an attribute of a module, each by plain names; nothing is evaluated."""
    parts = _PATH.fullmatch(path)
    if parts is None:
        raise UserError(f"{what} {path!r}: not of the form package.module:name")
    module, name = parts.groups()
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise UserError(f"{what} {path!r}: cannot be imported: {e}") from None


def algorithm_class(name: object) -> type[Algorithm]:
    """A registered method, or one's own as `package.module:Class`."""
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    if isinstance(name, str) and ":" in name:
        given_again("algorithms.name", name, "algorithms")
        cls = imported(name, "algorithm")
        if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
            raise UserError(f"algorithm {name!r}: that is not a subclass of personafl.Algorithm")
        return cls
    called = name if isinstance(name, str) else ""
    raise UserError(f"algorithm {shortened(name)}: {unknown('algorithm', called, ALGORITHMS)}, or package.module:Class")


def name_of(algorithm: Algorithm) -> str:
    """What a recipe calls a method."""
    cls = type(algorithm)
    return ALGORITHMS.name_of(cls) or described(cls)


def table_of(algorithm: Algorithm) -> dict[str, Any]:
    """The table that gives a method in a recipe: its name, and the settings that are not its class's defaults."""
    own = ((f, getattr(algorithm, f.name)) for f in algorithm.settings())
    return {"name": name_of(algorithm), **{f.name: value for f, value in own if value != f.default}}


def criterion(name: str | Criterion | Metric, known: Mapping[str, T], key: str) -> T | Criterion:
    """A loss or metric: by its name among those of a task, `auto` for the first of them, by dotted path, or itself."""
    if not isinstance(name, str) or ":" not in name:
        return typing.cast("T | Criterion", chosen(name, known, key))
    section, _, what = key.partition(".")
    given_again(key, name, f"{section}={{'{what}'")
    found = imported(name, what)
    if not callable(found) and not isinstance(found, Metric):
        raise UserError(f"{what} {name!r}: that is not a function")
    return typing.cast("T | Criterion", found)
