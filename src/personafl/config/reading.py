"""A recipe from TOML, a shipped name or a dict, with overrides."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from personafl.config.building import build
from personafl.config.names import ConfigError, unknown
from personafl.config.recipe import SECTIONS, Recipe, unused
from personafl.data import DATASETS
from personafl.data.partition import knows_clients
from personafl.data.pfllib import is_pfllib


def recipes() -> dict[str, str]:
    """The shipped recipes: name to text."""
    folder = resources.files("personafl") / "recipes"
    return {
        f.name[: -len(".toml")]: f.read_text(encoding="utf-8")
        for f in sorted(folder.iterdir(), key=str)
        if f.name.endswith(".toml")
    }


def load(recipe: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe by path, by shipped name or as a dict (None: the demo), with `section.key=value` overrides."""
    if isinstance(recipe, Mapping):
        name, raw = "recipe", dict(recipe)
    else:
        name, raw = _read(str(recipe or "demo"))
    made = build(name, _overridden(raw, overrides))
    left = unused(made)
    ignored = [key for key in dict(map(_pair, overrides)) if key in left]
    if ignored:
        warnings.warn(f"without effect here: {', '.join(f'{key} ({left[key]})' for key in ignored)}", stacklevel=2)
    return made


def _read(recipe: str) -> tuple[str, dict[str, Any]]:
    shipped = recipes()
    if recipe in shipped:
        return recipe, tomllib.loads(shipped[recipe])
    path = Path(recipe)
    if not path.is_file():
        raise ConfigError(f"recipe {recipe!r}: no such file, and {unknown('shipped recipe', recipe, shipped)}")
    try:
        return path.stem, tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"recipe {recipe}: not valid TOML: {e}") from None


def _overridden(raw: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    raw = {k: dict(v) if isinstance(v, Mapping) else v for k, v in raw.items()}
    methods = [dict(m) for m in raw.get("algorithms", [])]
    before = raw.get("data", {}).get("partition")
    pairs = [_pair(o) for o in overrides]
    for key, value in pairs:  # which methods there are comes first, so that their settings find them
        if key == "algorithms":
            wanted = [v.strip() for v in value.split(",") if v.strip()]
            known = {m.get("label", m.get("name")): m for m in methods}
            methods = [dict(known.get(w, {"name": w})) for w in wanted]
    for key, value in pairs:
        if key == "algorithms":
            continue
        section, _, name = key.rpartition(".")
        if section in SECTIONS:
            raw.setdefault(section, {})[name] = _literal(value)
            continue
        mine = [m for m in methods if section in (m.get("label"), m.get("name"))]
        if not mine and "." in section:  # a setting of what fills a slot: fedphp.inherit.transfer
            section, _, slot = section.rpartition(".")
            mine = [_opened(m, slot) for m in methods if section in (m.get("label"), m.get("name"))]
        if not section or not mine:
            labels = [str(m.get("label", m.get("name"))) for m in methods]
            raise ConfigError(
                f"override {key}={value}: {section or key!r} is neither a section ({', '.join(SECTIONS)}) "
                f"nor a method of this run ({', '.join(labels)})"
            )
        for m in mine:
            m[name] = _literal(value)
    _follow_clients(raw.get("data", {}), before, dict(pairs))
    return raw | {"algorithms": methods}


def _opened(entry: dict[str, Any], slot: str) -> dict[str, Any]:
    """What fills a slot of a method, as a table that can be written to."""
    held = entry.get(slot, {"name": "fedavg", "weights": "uniform"} if slot == "base" else {})  # a warm-up's default
    entry[slot] = dict(held) if isinstance(held, Mapping) else {"name" if slot == "base" else "transfer": held}
    opened: dict[str, Any] = entry[slot]
    return opened


def _follow_clients(data: dict[str, Any], before: object, asked: Mapping[str, str]) -> None:
    """Take the clients of a folder, and all that data know, where nothing else is asked for.

    `before` is the recipe's own partition, `asked` are the overrides.
    """
    name = data.get("dataset")
    chosen = "data.dataset" in asked or "data.partition" in asked
    folder = isinstance(name, str) and name not in DATASETS and Path(name).is_dir()
    if folder and "data.partition" not in asked and ("data.dataset" in asked or before is None):
        data["partition"] = "natural"
        if "data.official_test" not in asked and ("data.dataset" in asked or "official_test" not in data):
            data["official_test"] = "dealt" if is_pfllib(str(name)) else "pooled"
    now = data.get("partition")
    if knows_clients(now) and before != now and "data.num_clients" not in asked and chosen:
        data.pop("num_clients", None)


def _pair(override: str) -> tuple[str, str]:
    key, eq, value = override.partition("=")
    if not eq or not key:
        raise ConfigError(f"override {override!r}: expected section.key=value")
    return key.strip(), value.strip()


def _literal(text: str) -> Any:
    """A value as TOML would read it; bare words are strings, commas make a list."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        pass
    if "," in text:
        return [_literal(t) for t in text.split(",")]
    try:
        return float(text)  # .5 is no TOML
    except ValueError:
        return text
