"""What a recipe names: found, or refused with what is possible."""

from __future__ import annotations

import difflib
import importlib
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from personafl.algorithms import ALGORITHMS
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.types import Criterion, Metric

T = TypeVar("T")

# What other frameworks call our keys.
_ELSEWHERE = {
    "global_rounds": "num_rounds",
    "rounds": "num_rounds",
    "n_rounds": "num_rounds",
    "num_server_rounds": "num_rounds",
    "global_epoch": "num_rounds",
    "local_learning_rate": "lr",
    "learning_rate": "lr",
    "local_epoch": "local_epochs",
    "epochs": "local_epochs",
    "lbs": "batch_size",
    "batch": "batch_size",
    "fraction_fit": "join_ratio",
    "fraction_train": "join_ratio",
    "client_participation": "join_ratio",
    "eligible_perc": "join_ratio",
    "n_clients": "num_clients",
    "client_num": "num_clients",
    "dirichlet_alpha": "alpha",
    "eval_gap": "eval_every",
    "test_interval": "eval_every",
    "learning_rate_decay_gamma": "lr_decay",
    "class_per_client": "classes_per_client",
    "model_name": "name",
}


class ConfigError(UserError):
    """A recipe or a command line that cannot be run, in one line."""


def unknown(what: str, given: str, possible: Sequence[str] | Mapping[str, Any], where: str = "") -> str:
    """`no such setting of [training]; did you mean num_rounds?`, or what was possible."""
    names = list(possible)
    elsewhere = _ELSEWHERE.get(given.lower())
    near = [elsewhere] if elsewhere in names else difflib.get_close_matches(given, names, 1, 0.6)
    guess = f"; did you mean {near[0]}?" if near else ";"
    return f"no such {what}{' ' + where if where else ''}{guess} possible are {', '.join(names)}"


def imported(path: str, what: str) -> Any:
    """The object at `package.module:name`."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(f"{what} {path!r}: cannot be imported: {e}") from None


def algorithm_class(name: object) -> type[Algorithm]:
    """A registered method, or one's own as `package.module:Class`."""
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    if isinstance(name, str) and ":" in name:
        cls = imported(name, "algorithm")
        if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
            raise ConfigError(f"algorithm {name!r}: that is not a subclass of personafl.Algorithm")
        return cls
    raise ConfigError(f"algorithm {name!r}: {unknown('algorithm', str(name), ALGORITHMS)}, or package.module:Class")


def name_of(algorithm: Algorithm) -> str:
    """What a recipe calls a method."""
    cls = type(algorithm)
    registered = next((n for n, c in ALGORITHMS.items() if c is cls), None)
    return registered or f"{cls.__module__}:{cls.__qualname__}"


def check_criterion(name: str, known: Sequence[str], what: str) -> None:
    """Refuse a loss or metric that is neither `auto`, one of these, nor a function that can be imported."""
    if ":" in name:
        criterion(name, {}, what)
    elif name != "auto" and name not in known:
        raise ConfigError(f"{what} {name!r}: {unknown(what, name, ('auto', *known))}, or package.module:function")


def criterion(name: str, known: Mapping[str, T], what: str) -> T | Criterion:
    """A loss or metric by its name among those of a task, `auto` for the first of them, or one's own by dotted path."""
    if name == "auto":
        return next(iter(known.values()))
    if ":" not in name:
        return known[name]
    found = imported(name, what)
    if not callable(found) and not isinstance(found, Metric):
        raise ConfigError(f"{what} {name!r}: that is not a function")
    return typing.cast("T | Criterion", found)


def path_of(function: object, what: str) -> str:
    """The dotted path of a function, by which a recipe names it."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if getattr(sys.modules.get(module), name, None) is not function:
        shown = name or repr(function)
        raise ConfigError(
            f"{what}={shown}: must be a function at the top level of a module, so that a recipe can name it"
        )
    return f"{module}:{name}"
