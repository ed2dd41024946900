"""A recipe from TOML, a shipped name or a dict, with overrides."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from personafl.config.conversion import build, entries, made_section, method
from personafl.config.defaults import BY_DATA
from personafl.config.recipe import SECTIONS, Data, Method, Recipe, unused, values
from personafl.config.trust import own_code, refuse_own_code
from personafl.config.writing import settings
from personafl.core.algorithm import Algorithm
from personafl.core.errors import Note, UserError
from personafl.core.method_settings import FROM_TRAINING, RECIPE
from personafl.core.settings import shortened, unknown
from personafl.data import DATASETS
from personafl.data.partition import knows_clients
from personafl.data.pfllib import is_pfllib
from personafl.methods import ALGORITHMS


def recipes() -> dict[str, str]:
    """The shipped recipes: name to text."""
    folder = resources.files("personafl") / "recipes"
    return {
        f.name[: -len(".toml")]: f.read_text(encoding="utf-8")
        for f in sorted(folder.iterdir(), key=str)
        if f.name.endswith(".toml")
    }


def parts(
    data: Any = None,
    model: Any = None,
    algorithms: Any = None,
    training: Any = None,
    evaluation: Any = None,
    faults: Any = None,
) -> dict[str, Any]:
    """The parts of a recipe that Python code gave, by their names, without those it did not."""
    given = {
        "data": data,
        "model": model,
        "algorithms": algorithms,
        "training": training,
        "evaluation": evaluation,
        "faults": faults,
    }
    return {name: part for name, part in given.items() if part is not None}


def raw(recipe: str | Path) -> dict[str, Any]:
    """What a recipe's file says, to be given to `load` in its place."""
    return _read(str(recipe))[1]


def load(
    recipe: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    given: Mapping[str, Any] | None = None,
    trust: bool = True,
) -> Recipe:
    """A recipe by path, by shipped name or as a dict, with `section.key=value` overrides.

    `given` are sections and algorithms as Python has them: a table, an object, or what the section is about (`data`: a
    name or data of one's own; `model`: a name, a module or a function that makes one). What is given replaces the
    recipe's. Methods that are given keep the settings that the recipe has for them, where they say nothing else
    (`_selected`). Without a recipe, the demo is meant where its data are, else one with settings that go by the data.
    Without `trust`, code of one's own that the recipe names is not imported but refused (`config/trust.py`).
    """
    given = given or {}
    asked = dict(map(_pair, overrides))
    other = _other_data(given.get("data"), asked)
    if isinstance(recipe, Mapping):
        name, raw = "recipe", dict(recipe)
    elif recipe is None and other:
        name, raw = "own", {"algorithms": [{"name": n} for n in DEFAULT_METHODS]}
    else:
        name, raw = _read(str(recipe or "demo"))
        if str(recipe or "demo") in recipes():
            raw = _adapted(name, raw, other, given, asked)
    merged = _merged(raw, given)
    if not trust:
        refuse_own_code(recipe if isinstance(recipe, (str, Path)) else name, raw, merged, asked)
    try:
        own = entries(raw.get("algorithms", []))
        if "algorithms" in given:
            merged["algorithms"] = _selected(given["algorithms"], own, trust)
        named = {*asked, *_named(raw, given)}
        before, raw = raw.get("data"), merged
        tables = _overridden(raw, overrides, own if trust else [])
        if isinstance(tables.get("data"), dict):
            _follow_clients(tables["data"], before.get("partition") if isinstance(before, Mapping) else None, named)
        made = build(name, tables)
    except RecursionError:
        raise UserError(f"recipe {name}: nested too deeply") from None
    left = unused(made)
    ignored = [key for key in left if key in named]
    if ignored:
        warnings.warn(f"without effect here: {', '.join(f'{key} ({left[key]})' for key in ignored)}", stacklevel=2)
    if recipe is None and other:
        chosen = {f"{s}.{key}" for s in SECTIONS for key in (raw[s] if isinstance(raw.get(s), Mapping) else [])}
        whole = {f"{s}.{key}" for s, kind in SECTIONS.items() if isinstance(raw.get(s), kind) for key in kind.names()}
        made = replace(made, open=frozenset(BY_DATA) - chosen - whole - asked.keys() - given.keys())
    return made


DEFAULT_METHODS = ("local", "fedavg", "fedavg-ft", "ditto", "dm-pfl", "dm-pfl-plus")
"""What is compared where neither a recipe nor the user says."""


def _other_data(data: Any, asked: Mapping[str, str]) -> bool:
    """Whether a run is on other data than the demo's."""
    if "data.dataset" in asked:
        return asked["data.dataset"] != "digits"
    if isinstance(data, Mapping) and not _arrays(data):
        data = data.get("dataset")
    elif isinstance(data, Data):
        data = data.dataset
    return data is not None and not (isinstance(data, str) and data == "digits")


def _adapted(
    name: str, raw: dict[str, Any], other: bool, given: Mapping[str, Any], asked: Mapping[str, str]
) -> dict[str, Any]:
    """A shipped recipe, less what it says of methods and the user says of all, or its rates where data are others."""
    training = given.get("training")
    named = {k.partition(".")[2] for k in asked if k.startswith("training.")}
    named |= set(training) if isinstance(training, Mapping) else set(FROM_TRAINING) if training is not None else set()
    drop = set(FROM_TRAINING) & (named | ({"lr"} if other else set()))
    if not drop:
        return raw
    if other and "lr" in raw.get("training", {}) and "lr" not in named:
        raw = raw | {"training": {k: v for k, v in raw["training"].items() if k != "lr"}}
        warnings.warn(f"the learning rates of {name} were chosen for its own data and are not used", Note, stacklevel=3)
    methods = [{k: v for k, v in m.items() if k not in drop} for m in raw.get("algorithms", [])]
    return raw | {"algorithms": methods}


def _arrays(data: Mapping[str, Any]) -> bool:
    return {"x", "y"} <= data.keys() <= {"x", "y", "clients"}


def _merged(raw: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The tables with what was given in Python in their places."""
    out = dict(raw)
    for section, value in given.items():
        if section == "algorithms":
            out[section] = value
        elif section == "data" and isinstance(value, Mapping) and _arrays(value):
            held = tuple(value[n] for n in ("x", "y", "clients") if n in value)
            out[section] = {**_table(out, section), "dataset": held}
        elif isinstance(value, Mapping):
            out[section] = {**_table(out, section), **value}
        elif isinstance(value, SECTIONS[section]):
            out[section] = value
        elif section in WHAT:
            if isinstance(value, type) and issubclass(value, tuple(SECTIONS.values())):
                raise UserError(f"{section}={value.__name__}: a class; give an object, {value.__name__}(...)")
            out[section] = {**_table(out, section), WHAT[section]: value}
        else:
            kind = SECTIONS[section].__name__
            raise UserError(f"{section}={shortened(value)}: must be a dict of settings or {kind}(...)")
    return out


def _table(raw: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The settings of a section, whose table may be missing, or made already."""
    held = raw.get(section, {})
    return dict(held) if isinstance(held, Mapping) else values(made_section(section, held))


WHAT = {"data": "dataset", "model": "name"}
"""The setting a section is about, which stands for it where something else than a table is given."""


def _read(recipe: str) -> tuple[str, dict[str, Any]]:
    shipped = recipes()
    if recipe in shipped:
        return recipe, tomllib.loads(shipped[recipe])
    path = Path(recipe)
    if not path.is_file():
        raise UserError(f"recipe {recipe!r}: no such file, and {unknown('shipped recipe', recipe, shipped)}")
    try:
        return path.stem, tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:  # also bytes that are no text, and numbers of too many digits
        why = "nested too deeply" if isinstance(e, RecursionError) else e
        raise UserError(f"recipe {recipe}: not valid TOML: {why}") from None


def _selected(given: Any, own: Sequence[Any], trust: bool) -> list[Any]:
    """The methods that Python code gave, with the settings that the recipe has for them.

    A name or class is the recipe's entry with that label, if there is one. A table has that entry's settings beneath
    its own. An object has all of its own settings; where its learning rate, optimiser, momentum, weight decay or
    gradient clipping are `None`, which means the recipe's, it takes what that entry says. Without `trust`, entries
    that name code are not used, since that code would be imported.
    """
    labels = {_key(_called(entry)): entry for entry in own}
    return [_with_settings(entry, labels, trust) for entry in entries(given)]


def _with_settings(given: Any, labels: Mapping[str, Any], trust: bool) -> Any:
    if isinstance(given, type) and (name := ALGORITHMS.name_of(given)):
        given = name
    if isinstance(given, (Algorithm, Method)):
        made = method(given)
        table = _table_of(labels, made.name, made.label)
        open_ = [n for n in made.algorithm.from_recipe if getattr(made.algorithm, n, None) is None]
        rates = {n: table[n] for n in open_ if n in table and table[n] != RECIPE}
        return replace(made, algorithm=replace(made.algorithm, **rates)) if rates else given
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping) or not isinstance(name := given.get("name"), str):
        return given
    table = _table_of(labels, name, given.get("label", name))
    if not trust and own_code({"algorithms": [table]}):
        return given
    return {**table, **given, "name": table.get("name", name), "label": given.get("label", name)}


def _table_of(labels: Mapping[str, Any], name: str, label: object) -> dict[str, Any]:
    """The settings a recipe has for a method: those under its label, else those of the entry called like the method."""
    for called in (label, name):
        entry = labels.get(_key(called))
        if isinstance(entry, (Algorithm, Method)):
            made = method(entry)
            entry = {"name": made.name, "label": made.label, **settings(made.algorithm)}
        table = {"name": entry} if isinstance(entry, str) else entry
        if isinstance(table, Mapping) and name in (called, table.get("name")):
            return dict(table)
    return {}


def _key(label: object) -> str:
    """A label as it is compared: a colon is a dash in the names of folders."""
    return str(label).replace(":", "-")


def _overridden(raw: dict[str, Any], overrides: Sequence[str], own: Sequence[Any] = ()) -> dict[str, Any]:
    """The tables with overrides; `own` are the recipe's methods, where others may have been given."""
    raw = {k: dict(v) if isinstance(v, Mapping) and k in SECTIONS else v for k, v in raw.items()}
    if not overrides:
        return raw
    held = entries(raw.get("algorithms", []))
    methods: list[Any] = [_copied(m) for m in held]
    pairs = [_pair(o) for o in overrides]
    for key, value in pairs:  # which methods there are comes first, so that their settings find them
        if key == "algorithms":
            wanted = [v.strip() for v in value.split(",") if v.strip()]
            known = {_key(_called(m)): m for m in (*own, *methods)}
            methods = [_copied(known.get(_key(w), w)) for w in wanted]
    for key, value in pairs:
        if key == "algorithms":
            continue
        section, _, name = key.rpartition(".")
        if section in SECTIONS:
            raw[section] = _table(raw, section)
            raw[section][name] = _literal(value)
            continue
        mine = [m for m in methods if _is(m, section)]
        if not mine and "." in section:  # a setting of what fills a slot: fedphp.inherit.transfer
            section, _, slot = section.rpartition(".")
            mine = [_opened(m, slot) for m in methods if _is(m, section)]
        if not section or not mine:
            labels = [_called(m) for m in methods]
            near = next((f"{s}.{key}" for s, kind in SECTIONS.items() if key in kind.names()), "")
            if near:
                raise UserError(f"override {key}={value}: did you mean {near}={value}?")
            raise UserError(
                f"override {key}={value}: {section or key!r} is neither a section ({', '.join(SECTIONS)}) "
                f"nor a method of this run ({', '.join(labels)})"
            )
        for m in mine:
            if not isinstance(m, dict):
                raise UserError(f"override {key}={value}: {section} was given as an object, which has its own settings")
            m[name] = _literal(value)
    return raw | {"algorithms": methods}


def _copied(entry: Any) -> Any:
    """An entry of a comparison as a table of its own, or the object it is."""
    return dict(entry) if isinstance(entry, Mapping) else {"name": entry} if isinstance(entry, str) else entry


def _called(entry: Any) -> str:
    """The label of an entry of a comparison, or the name where it has none."""
    if isinstance(entry, str):
        return entry
    return str(entry.get("label", entry.get("name"))) if isinstance(entry, Mapping) else method(entry).label


def _is(entry: Any, called: str) -> bool:
    return called in ((entry.get("label"), entry.get("name")) if isinstance(entry, dict) else (_called(entry),))


def _opened(entry: Any, slot: str) -> dict[str, Any]:
    """What fills a slot of a method, as a table that can be written to."""
    if not isinstance(entry, dict):
        raise UserError(f"{_called(entry)}.{slot}: the method was given as an object, which has its own settings")
    held = entry.get(slot, "fedavg" if slot == "base" else {})  # a warm-up's default
    first = {"inherit": "transfer", "robust": "rule"}.get(slot, "name")  # the setting a bare value is
    entry[slot] = dict(held) if isinstance(held, Mapping) else {first: held}
    opened: dict[str, Any] = entry[slot]
    return opened


def _named(raw: Mapping[str, Any], given: Mapping[str, Any]) -> set[str]:
    """The keys, as `data.alpha`, that Python code gave in tables and by name; they count as overrides do.

    A data set counts only where the recipe is of one that is shipped: who holds what of other data is the recipe's.
    """
    keys = {f"{s}.{k}" for s, v in given.items() if s in SECTIONS and isinstance(v, Mapping) for k in v}
    if isinstance(given.get("data"), (str, Path)):
        keys.add("data.dataset")
    own = raw.get("data", {})
    shipped = isinstance(own, Mapping) and isinstance(name := own.get("dataset", "digits"), str) and name in DATASETS
    return keys if shipped else keys - {"data.dataset"}


def _follow_clients(data: dict[str, Any], before: object, asked: Collection[str]) -> None:
    """Take the clients of a folder, and all that data know, where nothing else is asked for.

    `before` is the recipe's own partition, `asked` are the keys of overrides and of tables given in Python.
    """
    name = data.get("dataset")
    name = str(name) if isinstance(name, Path) else name
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
        raise UserError(f"override {override!r}: expected section.key=value")
    return key.strip(), value.strip()


def _literal(text: str) -> Any:
    """A value as TOML would read it; bare words are strings, commas make a list."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        pass
    if "," in text:
        return [_literal(t) for t in text.split(",")]
    try:
        return float(text)  # .5 is no TOML
    except ValueError:
        return text
