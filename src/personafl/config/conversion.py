"""From tables of plain values to the typed objects of a recipe."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from personafl.config.names import algorithm_class, name_of, table_of
from personafl.config.recipe import SECTIONS, Method, Recipe
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.method_settings import RECIPE
from personafl.core.settings import filled, hints, refuse_unknown, shortened, typed, unknown
from personafl.methods import ALGORITHMS


def build(name: str, raw: Mapping[str, Any]) -> Recipe:
    """A recipe from its tables, or from sections that are made already."""
    for section in raw:
        if section not in (*SECTIONS, "algorithms"):
            raise UserError(f"section [{section}]: {unknown('section', section, (*SECTIONS, 'algorithms'))}")
    made = {section: made_section(section, raw.get(section, {})) for section in SECTIONS}
    return Recipe(name, algorithms=_methods(raw.get("algorithms", [])), **made)


def made_section(section: str, values: Any) -> Any:
    """A section from its table."""
    kind = SECTIONS[section]
    if isinstance(values, kind):
        return values
    if not isinstance(values, Mapping) or not all(isinstance(k, str) for k in values):
        raise UserError(f"[{section}] must be a table of settings, it is {shortened(values)}")
    refuse_unknown(section, values, sorted(kind.names()), f"[{section}]")
    return kind(**values)


def entries(given: Any) -> list[Any]:
    """What a comparison is made of, one by one: tables, names or objects; several names, or objects by label."""
    if isinstance(given, str):
        return [e.strip() for e in given.split(",") if e.strip()]
    if isinstance(given, (Algorithm, Method, type)):
        return [given]
    if isinstance(given, Mapping):
        return [given] if "name" in given else [_labelled(label, entry) for label, entry in given.items()]
    if not isinstance(given, (list, tuple)):
        raise UserError(f"algorithms={shortened(given)}: must be [[algorithms]] tables, names or Algorithm objects")
    return list(given)


def _labelled(label: object, entry: Any) -> Any:
    """An entry of a comparison under another label; nothing is imported for it."""
    if isinstance(entry, str):
        return {"name": entry, "label": label}
    if isinstance(entry, Mapping):
        return {**entry, "label": label}
    return dataclasses.replace(method(entry), label=_label(label))


def _methods(given: Any) -> tuple[Method, ...]:
    """All of a comparison as objects, each with a label of its own."""
    found = entries(given)
    if not found:
        raise UserError("no algorithms: add an [[algorithms]] table or algorithms=NAME,...")
    methods = tuple(method(m) for m in found)
    labels = [m.label for m in methods]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"algorithms: two methods are called {label!r}; give one of them another label")
    return methods


_LONGEST = 200  # a file system's limit is 255
_FILES = (".toml", ".json", ".md", ".html", ".lock")


def _label(label: object) -> str:
    if not isinstance(label, str) or not re.fullmatch(r"[\w.+ :-]+", label) or label.startswith("."):
        raise UserError(
            f"algorithms.label={shortened(label)}: letters, digits and . _ - + : only, for it names a folder"
        )
    if label != label.strip() or len(label.encode()) > _LONGEST:
        raise UserError(
            f"algorithms.label={shortened(label)}: at most {_LONGEST} bytes, none of them a space at the beginning or "
            "the end, for it names a folder"
        )
    if label.lower().endswith(_FILES):
        raise UserError(
            f"algorithms.label={label!r}: must not end in {', '.join(_FILES)}, as files do that lie beside its folder"
        )
    return label.replace(":", "-")


def method(entry: Any) -> Method:
    """An `[[algorithms]]` table as an object; so is a name, an `Algorithm`, or the class of one with its defaults."""
    if isinstance(entry, Method):
        return dataclasses.replace(entry, label=_label(entry.label))
    if isinstance(entry, type) and issubclass(entry, Algorithm):
        entry = entry()
    if isinstance(entry, Algorithm):
        name = name_of(entry)
        return Method(_label(name if name in ALGORITHMS else type(entry).__name__), name, entry)
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, Mapping):
        raise UserError(f"algorithms: {shortened(entry)}: must be a name, a table with a name, or an Algorithm")
    if "name" not in entry:
        raise UserError(f"[[algorithms]] entry {shortened(dict(entry))}: it has no name")
    name = entry["name"]
    cls = algorithm_class(name)
    label = _label(entry.get("label", name))
    settings = {k: v for k, v in entry.items() if k not in ("name", "label")}
    known = {f.name: f for f in cls.settings()}
    of_type = hints(cls)
    refuse_unknown(label, settings, known, str(name))
    values: dict[str, Any] = {}
    for key, value in settings.items():
        taken = key in cls.from_recipe and _is_one_of(value, None, RECIPE)
        told = known[key].metadata
        by_name = bool(told.get("choices")) and not isinstance(value, Mapping)  # a name stands for its usual settings
        fillings = None if by_name else told.get("fillings")
        hint = str if by_name else of_type.get(key, Any)
        values[key] = None if taken else _slot(f"{label}.{key}", value, hint, fillings, known[key].default)
    try:
        return Method(label, name, cls(**values))
    except UserError as e:
        raise UserError(f"{label}: {e}") from None


def _is_one_of(value: Any, *words: str | None) -> bool:
    return (value is None or isinstance(value, str)) and value in words


def _slot(where: str, value: Any, hint: Any, fillings: Mapping[str, type[Any] | None] | None, default: Any) -> Any:
    """A setting that may itself be a table: a base method, or what fills a slot.

    A table may name one of the fillings, else the first is meant. A bare value is that one's first setting. The base
    method that is the default has the default's settings where a table leaves them out.
    """
    if hint is Algorithm:
        table = {"name": value} if isinstance(value, str) else value
        if isinstance(table, Mapping) and table.get("name") == name_of(default):
            table = table_of(default) | dict(table)
        try:
            return method(table).algorithm
        except UserError as e:
            raise UserError(f"{where}: {e}") from None
    if not fillings:
        return typed(where, value, hint)
    if _is_one_of(value, None, "none"):
        return None
    if not isinstance(value, Mapping):
        first = next(kind for kind in fillings.values() if kind is not None)
        value = {dataclasses.fields(first)[0].name: value}
    return filled(where, value, fillings)
