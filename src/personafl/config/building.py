"""From tables of plain values to the typed objects of a recipe."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from personafl.config.checking import check
from personafl.config.names import ConfigError, algorithm_class, path_of, unknown
from personafl.config.recipe import SECTIONS, Data, Method, Recipe
from personafl.core.algorithm import FROM_TRAINING, RECIPE, Algorithm
from personafl.core.errors import UserError
from personafl.data import DATASETS
from personafl.data.client_corruption import CORRUPTED_BY_DEFAULT, PER_CLIENT
from personafl.data.partition import PARTITIONS, declared_settings, knows_clients

T = TypeVar("T")
FUNCTIONS = ("loss", "metric")  # settings that may be functions


def build(name: str, raw: Mapping[str, Any]) -> Recipe:
    """A recipe from its tables: typed, checked, and with what they leave open filled in."""
    for section in raw:
        if section not in (*SECTIONS, "algorithms"):
            raise ConfigError(f"section [{section}]: {unknown('section', section, (*SECTIONS, 'algorithms'))}")
    made: dict[str, Any] = {}
    for section, cls in SECTIONS.items():
        values = raw.get(section, {})
        if not isinstance(values, Mapping):
            raise ConfigError(f"[{section}] must be a table of settings, it is {values!r}")
        made[section] = _data(values) if cls is Data else _section(section, cls, values)
    given = raw.get("data", {})
    if "num_clients" in given and made["data"].num_clients < 1:
        raise ConfigError(f"data.num_clients={made['data'].num_clients}: must be at least 1")
    if made["data"].dataset not in DATASETS and Path(made["data"].dataset).is_dir():
        made["data"] = replace(made["data"], dataset=_folder(made["data"].dataset))
    check(**made)
    made["data"] = _filled(made["data"], given)
    if made["evaluation"].when == "after_local":
        made["evaluation"] = replace(made["evaluation"], clients="selected")
    return Recipe(name, algorithms=_methods(raw.get("algorithms", [])), **made)


def _data(values: Mapping[str, Any]) -> Data:
    """The data section; what the settings of partitions must be is for the chosen one to say, or else for another."""
    declared = declared_settings(str(values.get("partition", Data.partition)))
    own = {k: v for k, v in values.items() if k not in declared}
    settings = {k: _typed(f"data.{k}", v, declared[k].type) for k, v in values.items() if k in declared}
    return replace(_section("data", Data, own, also=declared), partition_settings=settings)


def _folder(name: str) -> str:
    """A folder's name that is seen to be one, also where the folder is not there."""
    return name if "/" in name or "\\" in name else f"./{name}"


def _filled(data: Data, given: Collection[str]) -> Data:
    """The data section with what was not given as its data set and partition have it."""
    if data.dataset in CORRUPTED_BY_DEFAULT and "corruption" not in given:
        data = replace(data, corruption=PER_CLIENT)
    if data.num_clients == 0 and not knows_clients(data.partition) and not data.from_file:
        data = replace(data, num_clients=20)
    declared = {} if data.from_file else PARTITIONS[data.partition].settings
    settings = {n: data.partition_settings.get(n, s.default) for n, s in declared.items()}
    return replace(data, partition_settings=settings)


def _methods(entries: Any) -> tuple[Method, ...]:
    """The `[[algorithms]]` tables as objects, each with a label of its own."""
    if not isinstance(entries, list) or not all(isinstance(m, Mapping) for m in entries):
        raise ConfigError("algorithms must be [[algorithms]] tables, each with a name")
    if not entries:
        raise ConfigError("no algorithms: add an [[algorithms]] table or algorithms=NAME,...")
    methods = tuple(method(m) for m in entries)
    labels = [m.label for m in methods]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"algorithms: two methods are called {label!r}; give one of them another label")
    return methods


def method(entry: Mapping[str, Any]) -> Method:
    """An `[[algorithms]]` table as an object."""
    if "name" not in entry:
        raise ConfigError(f"[[algorithms]] entry {dict(entry)}: it has no name")
    name = entry["name"]
    cls = algorithm_class(name)
    label = entry.get("label", name)
    if not isinstance(label, str) or not re.fullmatch(r"[\w.+ :-]+", label) or label.startswith("."):
        raise ConfigError(f"algorithms.label={label!r}: letters, digits and . _ - + : only, for it names a folder")
    settings = {k: v for k, v in entry.items() if k not in ("name", "label")}
    known = {f.name: f for f in cls.settings()}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in known:
            raise ConfigError(f"{label}.{key}={value!r}: {unknown('setting', key, known, f'of {name}')}")
        taken = key in FROM_TRAINING and value in (None, RECIPE)
        fillings = known[key].metadata.get("fillings")
        values[key] = None if taken else _slot(f"{label}.{key}", value, hints[key], fillings)
    try:
        return Method(label.replace(":", "-"), name, cls(**values))
    except UserError as e:
        raise ConfigError(f"{label}: {e}") from None


def _slot(where: str, value: Any, hint: Any, fillings: Mapping[str, type[Any]] | None) -> Any:
    """A setting that may itself be a table: a base method, or what fills a slot.

    A table may name one of the fillings, else the first is meant. A bare value is that one's first setting.
    """
    if hint is Algorithm:
        return method({"name": value} if isinstance(value, str) else value).algorithm
    if not fillings:
        return _typed(where, value, hint)
    if value in (None, "none"):
        return None
    name = value.get("name", next(iter(fillings))) if isinstance(value, Mapping) else next(iter(fillings))
    if name not in fillings:
        raise ConfigError(f"{where}.name={name!r}: {unknown('filling', str(name), fillings)}")
    kind = fillings[name]
    if not isinstance(value, Mapping):
        value = {dataclasses.fields(kind)[0].name: value}
    try:
        return _section(where, kind, {k: v for k, v in value.items() if k != "name"})
    except UserError as e:
        raise e if isinstance(e, ConfigError) else ConfigError(f"{where}: {e}") from None


def _section(section: str, cls: type[T], values: Mapping[str, Any], also: Collection[str] = ()) -> T:
    names = {*(f.name for f in dataclasses.fields(cls)), *also} - {"partition_settings"}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values = {k: path_of(v, f"{section}.{k}") if k in FUNCTIONS and callable(v) else v for k, v in values.items()}
    for key, value in values.items():
        if key not in names:
            raise ConfigError(f"{section}.{key}={value!r}: {unknown('setting', key, sorted(names), f'of [{section}]')}")
    return cls(**{k: _typed(f"{section}.{k}", v, hints[k]) for k, v in values.items()})


def _typed(where: str, value: Any, hint: Any) -> Any:
    """The value as the type asks; whole numbers pass for real ones, nothing else is bent."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where}={value!r}: possible are {', '.join(map(str, args))}")
        return value
    if origin in (typing.Union, types.UnionType):
        args = tuple(a for a in args if a is not types.NoneType)
        if len(args) == 1:
            return _typed(where, value, args[0])
        for option in args:
            try:
                return _typed(where, value, option)
            except ConfigError:
                continue
        words = [str(a) for o in args for a in (typing.get_args(o) or ("a whole number" if o is int else o.__name__,))]
        raise ConfigError(f"{where}={value!r}: possible are {', '.join(words)}")
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_typed(where, v, args[0]) for v in items)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{where}={value!r}: must be finite")
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        kind = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(hint, str(hint))
        raise ConfigError(f"{where}={value!r}: must be {kind}")
    return value
