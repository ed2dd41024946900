"""Published tables and figures that can be run again: what was printed, a recipe for each of its settings, its claims.

A target is a TOML file of `personafl/targets`, the numbers printed in its paper a CSV file beside it. A target has

    title, paper, seeds   what it is, the name of the CSV file, and the seeds reported
    published             the tables and figures it has numbers of, as the CSV file calls them
    columns               those that are compared: names of published columns, which `measures` knows how to measure
    notes                 what a reader must know
    smoke                 overrides for a rehearsal without downloaded data
    [methods]             labels of the recipe with their published names; several may have the same one
    [by_method]           overrides of single labels: as the paper has it, or as validation data chose
    [best]                published names that stand for the best of several labels, column by column
    [[settings]]          name (as published), overrides of the recipe, and by_method as above, for this setting alone
    [[claims]]            says, and who is compared with whom: `Claim`
    [recipe]              a recipe
    picture               "frontier": own accuracy against that at full shift, a point for each method; "change": along
                          a stream that changes
    base                  another target whose keys hold where they are not given, its recipe's settings one by one
"""

from __future__ import annotations

import csv
import io
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

from personafl import config
from personafl.config.recipe import Recipe
from personafl.core.errors import UserError
from personafl.core.settings import unknown

FOLDER = "targets"


@dataclass(frozen=True)
class Printed:
    """A published number."""

    value: float
    std: float | None
    unit: str


@dataclass(frozen=True)
class Setting:
    """A part of a table, or a point of a figure: the recipe with these overrides."""

    name: str
    overrides: tuple[str, ...] = ()
    by_method: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """What a paper says, as a comparison of measured numbers, in one column or in several.

    Every method of `ours` is ahead of every one of `than` by more than `margin` (a negative one: is at least so
    near), in each of `settings`, all by default; with `against` it is ahead of its own number in that other setting,
    with `than_column` of its own in that other column. Or it is held to a given number: with `near` it is within
    `within` of it, with `least` not below and with `most` not above it.
    """

    says: str
    column: str = ""
    ours: tuple[str, ...] = ()
    than: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    against: str = ""
    than_column: str = ""
    margin: float = 0.0
    near: float | None = None
    within: float = 0.0
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True)
class Target:
    """A published table or figure."""

    name: str
    title: str
    paper: str
    seeds: tuple[int, ...]
    published: tuple[str, ...]
    columns: tuple[str, ...]
    settings: tuple[Setting, ...]
    methods: Mapping[str, str]  # the published name of each label
    claims: tuple[Claim, ...]
    recipe: Mapping[str, Any]
    best: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # labels whose best a published name stands for
    by_method: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # overrides of single labels
    notes: tuple[str, ...] = ()
    smoke: tuple[str, ...] = ()
    picture: str = ""

    def recipe_of(self, setting: Setting, label: str, more: Sequence[str] = ()) -> Recipe:
        """One method's recipe in a setting."""
        own = (*self.by_method.get(label, ()), *setting.overrides, *setting.by_method.get(label, ()))
        made = config.load(self.recipe, [*own, *more])
        found = tuple(m for m in made.algorithms if m.label == label)
        assert len(found) == 1, (self.name, label)
        return replace(made, algorithms=found)

    def changes(self, setting: str, label: str) -> dict[str, str]:
        """What a method's recipe has of its own in a setting, but for the method's settings."""
        here = next(s for s in self.settings if s.name == setting)
        own = (*self.by_method.get(label, ()), *here.by_method.get(label, ()))
        return {k: v for k, _, v in (o.partition("=") for o in own) if not k.startswith(f"{label}.")}

    def shown(self, row: str) -> str:
        """What a label, or a best one, is called in tables: its published name, and the label where it shares that."""
        name = self.methods.get(row, row)
        return name if list(self.methods.values()).count(name) < 2 else f"{name} ({row})"

    def printed(self) -> dict[tuple[str, str, str], Printed]:
        """Published numbers by setting, label or name of a best one, and column."""
        names = {**self.methods, **{name: name for name in self.best}}
        found = {}
        for row in csv.DictReader(io.StringIO(_text(f"{self.paper}.csv"))):
            if row["source"] in self.published:
                std = float(row["std"]) if row["std"] else None
                for label in (label for label, name in names.items() if name == row["method"]):
                    found[row["setting"], label, row["column"]] = Printed(float(row["value"]), std, row["unit"])
        return found


def names() -> list[str]:
    """All targets."""
    folder = resources.files("personafl") / FOLDER
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


def expanded(asked: Sequence[str]) -> list[str]:
    """These targets, each once; the beginning of several names, such as dmpfl, stands for all of them."""
    found = [[n for n in names() if n.startswith(f"{a}-")] or [a] for a in asked]
    return list(dict.fromkeys(name for of in found for name in of))


def load(name: str) -> Target:
    """A target by its name."""
    if not isinstance(name, str) or name not in names():
        known = unknown("target", str(name), names())
        raise UserError(f"{name}: {known}; personafl reproduce --list tells what they are")
    told = _told(name)
    return Target(
        name=name,
        title=told["title"],
        paper=told["paper"],
        seeds=tuple(told["seeds"]),
        published=tuple(told["published"]),
        columns=tuple(told["columns"]),
        settings=tuple(map(_setting, told["settings"])),
        methods=told["methods"],
        best={n: tuple(of) for n, of in told.get("best", {}).items()},
        by_method=_by_method(told),
        claims=tuple(map(_claim, told["claims"])),
        recipe=told["recipe"],
        notes=tuple(told.get("notes", ())),
        smoke=tuple(told["smoke"]),
        picture=told.get("picture", ""),
    )


def _told(name: str) -> dict[str, Any]:
    """A target's file over that of its base."""
    own = tomllib.loads(_text(f"{name}.toml"))
    if "base" not in own:
        return own
    base = _told(own.pop("base"))
    recipe = dict(base["recipe"])
    for section, values in own.pop("recipe", {}).items():
        recipe[section] = recipe.get(section, {}) | values if isinstance(values, dict) else values
    return base | own | {"recipe": recipe}


def _setting(told: Mapping[str, Any]) -> Setting:
    return Setting(told["name"], tuple(told.get("overrides", ())), _by_method(told))


def _by_method(told: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {label: tuple(of) for label, of in told.get("by_method", {}).items()}


def _claim(told: Mapping[str, Any]) -> Claim:
    made: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in told.items()}
    assert len({"near", "least", "most"} & made.keys()) < 2, told  # one number at most
    return Claim(**made)


def _text(name: str) -> str:
    return (resources.files("personafl") / FOLDER / name).read_text(encoding="utf-8")
