"""What every key of a recipe is: type, default, meaning, possible values, and which methods look at it."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from personafl.config.defaults import BY_DATA
from personafl.config.names import algorithm_class, table_of
from personafl.config.recipe import AUTO, SECTIONS
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.method_settings import FROM_TRAINING, RECIPE
from personafl.core.settings import Section, hints, unknown
from personafl.core.types import LOSSES
from personafl.data import DATASETS, PARTITIONS
from personafl.data.client_corruption import PER_CLIENT
from personafl.data.corruptions import CORRUPTIONS
from personafl.data.partition import declared_settings
from personafl.evaluation.metrics import METRICS, names
from personafl.methods import ALGORITHMS
from personafl.models import MODELS

NAMED: dict[str, Collection[str]] = {
    "data.dataset": DATASETS,
    "data.partition": (AUTO, *PARTITIONS),
    "data.corruption": (AUTO, "none", PER_CLIENT, *CORRUPTIONS),
    "model.name": (AUTO, *MODELS),
    "training.loss": (AUTO, *names(LOSSES)),
    "evaluation.metric": (AUTO, *names(METRICS)),
    "evaluation.corruptions": ("all", *CORRUPTIONS),
}
"""Keys whose values are names from a registry; some take more, as their meaning says."""

ONLY = {
    "model.head": ("lg-fedavg", "fedper", "fedrep", "fedpac", "moon", "fedmmd", "fedfu", "flda", "fed-rod", "fedphp")
}
"""Keys that only these methods look at, by their defaults."""

ALL_BUT = {
    "training.server_lr": ("local",),
    **{f"training.{n}": ("co-pfl",) for n in ("optimizer", "momentum", "weight_decay", "grad_clip")},
}
"""Keys that these methods do not look at, by their defaults."""


@dataclass(frozen=True)
class Key:
    """A key of a recipe, in words."""

    section: str  # or the name of a method
    name: str
    type: str
    default: str
    help: str
    possible: str  # nothing where all values of its type are
    looked_at_by: str  # methods, or partitions; nothing for a key of a method

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"


def keys(section: str) -> list[Key]:
    """The keys of a section, or the settings of a method."""
    return _of_section(section) if section in SECTIONS else _of_method(section)


def key(dotted: str) -> Key:
    """One key, as `training.momentum` or `dm-pfl.sparsity`."""
    section, _, name = dotted.partition(".")
    if section not in (*SECTIONS, *ALGORITHMS):
        raise UserError(f"{dotted}: {unknown('section or method', section, (*SECTIONS, *ALGORITHMS))}")
    found = {k.name: k for k in keys(section)}
    if name not in found:
        where = f"of [{section}]" if section in SECTIONS else f"of {section}"
        raise UserError(f"{dotted}: {unknown('setting', name, found, where)}")
    return found[name]


def _of_section(section: str) -> list[Key]:
    kind: Any = SECTIONS[section]
    of_type, rules = hints(kind), _rules(kind)
    out = []
    for f in dataclasses.fields(kind):
        if f.name in kind.names():
            dotted = f"{section}.{f.name}"
            hint = of_type[f.name]
            possible = _possible(NAMED.get(dotted, _choices(hint)), rules.get(f.name, ()))
            told = (_type(hint), toml_value(f.default), f.metadata["help"], possible, _lookers(section, f.name))
            out.append(Key(section, f.name, *told))
        elif f.name == "partition_settings":
            out += [_of_partition(section, name) for name in declared_settings()]
    return out


def _of_partition(section: str, name: str) -> Key:
    """A setting of partitions; where they have other defaults, each is named."""
    using = {n: p.settings[name] for n, p in PARTITIONS.items() if name in p.settings}
    first = next(iter(using.values()))
    defaults: dict[str, list[str]] = {}
    for partition, setting in using.items():
        defaults.setdefault(toml_value(setting.default), []).append(partition)
    one = len(defaults) == 1
    default = next(iter(defaults)) if one else ", ".join(f"{d} ({', '.join(n)})" for d, n in defaults.items())
    possible = _possible(_choices(first.type), [first.must] if first.must else [])
    return Key(section, name, _type(first.type), default, first.help, possible, f"partition {', '.join(using)}")


def _of_method(name: str) -> list[Key]:
    cls = algorithm_class(name)
    of_type, out = hints(cls), []
    for f in cls.settings():
        hint = of_type.get(f.name, Any)
        from_recipe = f.default is None and f.name in cls.from_recipe
        fillings = f.metadata.get("fillings") or {}
        choices = f.metadata.get("choices") or fillings or _choices(hint)
        kind = "method" if hint is Algorithm else "table" if fillings else _type(hint)
        kind = "name or table" if fillings and f.metadata.get("choices") else kind
        told = (
            kind,
            RECIPE if from_recipe else toml_value(f.default),
            f.metadata.get("help", ""),
            _possible(choices, ()),
        )
        out.append(Key(name, f.name, *told, looked_at_by=""))
    return out


def _lookers(section: str, name: str) -> str:
    """Which methods look at a key, and which have a value of their own instead."""
    dotted = f"{section}.{name}"
    words = [", ".join(ONLY[dotted]) if dotted in ONLY else "all"]
    if dotted in ALL_BUT:
        words = [f"all but {', '.join(ALL_BUT[dotted])}"]
    if section == "training" and name in FROM_TRAINING:
        own = {n: d for n, cls in ALGORITHMS.items() if (d := _default(cls, name)) is not None}
        words.append(f"each may have its own, as ditto.{name}")
        words += [f"{n} has {toml_value(d)}" for n, d in own.items()]
    return "; ".join(words)


def _default(cls: type[Algorithm], name: str) -> Any:
    return next(f.default for f in cls.settings() if f.name == name)


def by_data(dotted: str) -> bool:
    """Whether a key goes by the data where neither a recipe nor the user has it."""
    return dotted in BY_DATA


def _rules(kind: type[Section]) -> dict[str, list[str]]:
    """What the settings of a section must be, in the words of its own check."""
    found: dict[str, list[str]] = {}

    class Listening(kind):  # type: ignore[misc, valid-type]
        def hold(self, rules: Iterable[tuple[str, bool, str]]) -> None:
            for name, _, must in rules:
                found.setdefault(name, []).append(must)

    Listening()
    return found


def _possible(choices: Collection[str], rules: Iterable[str]) -> str:
    return "; ".join([*([", ".join(map(str, choices))] if choices else []), *rules])


_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false"}


def _type(hint: Any) -> str:
    """A type as TOML has it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return _WORDS[type(args[0])]
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(a) for a in args if a is not types.NoneType))
    if origin is tuple:
        return f"list of {_type(args[0])}"
    if hint is Any:
        return "text, in Python an object"
    return "function" if origin is not None else _WORDS.get(hint, "text")


def _choices(hint: Any) -> tuple[str, ...]:
    """The values a type spells out."""
    options = [o for o in typing.get_args(hint) if o is not types.NoneType]
    if typing.get_origin(hint) is Literal:
        return tuple(map(str, options))
    return _choices(options[0]) if isinstance(hint, types.UnionType) and len(options) == 1 else ()


def toml_value(default: Any) -> str:
    """A default as a recipe would write it."""
    if isinstance(default, Algorithm):
        table = table_of(default)
        return _inline(table) if len(table) > 1 else table["name"]
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return f"[{', '.join(map(toml_value, default))}]"
    if dataclasses.is_dataclass(default):
        return _inline({f.name: getattr(default, f.name) for f in dataclasses.fields(default)})
    return "none" if default is None else default or "empty" if isinstance(default, str) else str(default)


def _inline(table: Mapping[str, Any]) -> str:
    """A table as TOML writes it in a line, so that it can be copied into a recipe."""
    held = (f"{k} = {json.dumps(v) if isinstance(v, str) else toml_value(v)}" for k, v in table.items())
    return f"{{ {', '.join(held)} }}"
