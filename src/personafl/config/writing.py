"""A recipe out again, as TOML."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from personafl.config.names import name_of
from personafl.config.recipe import SECTIONS, Recipe, unused, values
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.method_settings import RECIPE
from personafl.core.plain_text import is_text
from personafl.data import DATASETS


def anchored(recipe: Recipe) -> Recipe:
    """The recipe with the place of data of one's own written out, so that it means the same from anywhere."""
    name = recipe.data.dataset
    if not isinstance(name, str) or name in DATASETS or (":" in name and not Path(name).exists()):
        return recipe
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, dataset=str(Path(name).resolve())))


def dump(recipe: Recipe) -> str:
    """The resolved recipe as TOML: everything that was used, nothing that was not."""
    skip = {*unused(recipe), *(() if recipe.model.head else ("model.head",))}
    out = []
    for section in SECTIONS:
        kept = {k: v for k, v in values(getattr(recipe, section)).items() if f"{section}.{k}" not in skip}
        out.append(tomli_w.dumps({section: kept}))
    for m in recipe.algorithms:
        own = {"name": m.name, "label": m.label, **settings(m.algorithm)}
        tables = {k: v for k, v in own.items() if isinstance(v, Mapping)}
        plain = {k: v for k, v in own.items() if k not in tables}
        out.append("[[algorithms]]\n" + tomli_w.dumps(plain))
        # `[algorithms.base]` belongs to the last of `[[algorithms]]`. A list of tables handed over as a whole would be
        # written inline, above the sections, where its entries are short.
        out += [tomli_w.dumps({"algorithms": tables})] if tables else []
    text = "\n".join(out)
    if not is_text(text):
        line = next(line for line in text.splitlines() if not is_text(line))
        raise UserError(f"recipe: cannot be written as TOML, for this is not UTF-8: {line!r}")
    return text


def settings(algorithm: Algorithm) -> dict[str, Any]:
    """A method's own settings as plain values; what is not set (no inherited model) is left out."""
    out: dict[str, Any] = {}
    for f in algorithm.settings():
        value = getattr(algorithm, f.name)
        if isinstance(value, Algorithm):
            out[f.name] = {"name": name_of(value), **settings(value)}
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fillings = f.metadata["fillings"]
            name = next(n for n, kind in fillings.items() if kind is type(value))
            out[f.name] = ({} if name == next(iter(fillings)) else {"name": name}) | dataclasses.asdict(value)
        elif value is not None:
            out[f.name] = value
        elif f.name in algorithm.from_recipe and f.default is not None:
            out[f.name] = RECIPE
    return out
