"""Code of one's own that a recipe names: running a recipe imports it, looking at one does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from personafl.config.names import GIVEN
from personafl.config.recipe import is_function
from personafl.core.errors import UserError

KEYS = ("data.dataset", "model.name", "training.loss", "evaluation.metric")
"""Settings that may be `package.module:thing`; names of methods may be, too."""


def own_code(raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the tables of a recipe name by `package.module:thing`, each behind its setting."""
    found = []
    for key in KEYS:
        section, _, name = key.partition(".")
        table = raw.get(section)
        value = table.get(name) if isinstance(table, Mapping) else None
        if isinstance(value, str) and (is_function(value) if key == "data.dataset" else ":" in value):
            found.append((key, value))
    found += [("algorithms", path) for path in _methods(raw.get("algorithms"))]
    return [(key, path) for key, path in found if not path.startswith(GIVEN)]


def _methods(entry: Any) -> Iterator[str]:
    """Dotted paths among methods and what fills their slots."""
    left = [entry]
    while left:
        entry = left.pop()
        if isinstance(entry, str):
            yield from (path for part in entry.split(",") if ":" in (path := part.strip()))
        elif isinstance(entry, Mapping):  # of methods by label, one may be called label
            left += [v for k, v in reversed(list(entry.items())) if k != "label" or "name" not in entry]
        elif isinstance(entry, (list, tuple)):
            left += reversed(entry)


def refuse_own_code(
    recipe: object, raw: Mapping[str, Any], merged: Mapping[str, Any], asked: Mapping[str, str]
) -> None:
    """Refuse a recipe that names code; not for what its user gave instead, in `merged` tables or `asked` overrides."""

    def stands(key: str, path: str) -> bool:
        section, _, name = key.partition(".")
        if not name:
            return merged[section] is raw[section]
        return key not in asked and isinstance(table := merged[section], Mapping) and table.get(name) is path

    if named := dict.fromkeys(f"{key}={path!r}" for key, path in own_code(raw) if stands(key, path)):
        raise UserError(
            f"{recipe} names code of its own, {', '.join(named)}: it is not imported to look at it; --trust, in Python "
            "trust=True, allows that"
        )
