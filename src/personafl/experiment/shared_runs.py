"""Runs that tables and figures have in common: trained once, and judged by all that any of them asks for.

A run is one method in one setting with one seed. Two targets have it in common where their recipes differ in nothing
but the label and what is evaluated, and one evaluation can have all of it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from personafl import config
from personafl.config.recipe import Recipe
from personafl.evaluation.settings import Evaluation
from personafl.experiment.targets import Target

Place = tuple[str, str, str]
"""Where a run is asked for: target, setting and label."""


@dataclass(frozen=True)
class SharedRun:
    """One method with one seed, for every place that asks for it."""

    recipe: Recipe
    seed: int
    home: Path  # below the folder of all of them
    places: tuple[Place, ...]

    @property
    def label(self) -> str:
        """What its own folder calls the method."""
        return self.recipe.algorithms[0].label

    @property
    def setting(self) -> str:
        """The first one it is asked for in."""
        return self.places[0][1]

    @property
    def labels(self) -> set[str]:
        """What the method is called wherever it is asked for."""
        return {label for *_, label in self.places}


def plan(asked: Sequence[tuple[Target, Sequence[int]]], *, smoke: bool = False) -> list[SharedRun]:
    """What has to be run for these targets with these seeds, in the order they ask for it."""
    runs: dict[tuple[str, int], list[SharedRun]] = {}  # those of the same training
    taken: set[Path] = set()
    for target, seeds in asked:
        for setting in target.settings:
            for label in target.methods:
                recipe = target.recipe_of(setting, label, target.smoke if smoke else ())
                training, place = _training(recipe), (target.name, setting.name, label)
                for seed in seeds:
                    alike = runs.setdefault((training, seed), [])
                    for i, run in enumerate(alike):
                        if (judged := merged(run.recipe.evaluation, recipe.evaluation)) is not None:
                            more = replace(run.recipe, evaluation=judged)
                            alike[i] = replace(run, recipe=more, places=(*run.places, place))
                            break
                    else:
                        home = _free(_slug(setting.name), f"{label}-{seed}", taken)
                        taken.add(home)
                        alike.append(SharedRun(recipe, seed, home, (place,)))
    return [run for alike in runs.values() for run in alike]


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _free(setting: str, name: str, taken: set[Path]) -> Path:
    numbered = (setting if n == 1 else f"{setting}-{n}" for n in itertools.count(1))
    return next(home for folder in numbered if (home := Path("runs", folder, name)) not in taken)


def _training(recipe: Recipe) -> str:
    """All of a recipe but the label and the evaluation."""
    methods = tuple(replace(m, label=m.name) for m in recipe.algorithms)
    return config.dump(replace(recipe, evaluation=Evaluation(), algorithms=methods))


def merged(a: Evaluation, b: Evaluation) -> Evaluation | None:
    """All that two evaluations ask for; None where one cannot have both."""
    if not b.corruptions:  # severities and whose images are corrupted are open then
        b = replace(b, severities=a.severities, corrupted=a.corrupted)
    elif not a.corruptions:
        a = replace(a, severities=b.severities, corrupted=b.corrupted)
    together: dict[str, Any] = {
        "degrees": tuple(sorted({*a.degrees, *b.degrees})),
        "corruptions": tuple(dict.fromkeys((*a.corruptions, *b.corruptions))),
        "severities": tuple(sorted({*a.severities, *b.severities})),
        "corrupted": a.corrupted if a.corrupted == b.corrupted else "both",
        "input_counts": tuple(dict.fromkeys((*a.input_counts, *b.input_counts))),
        "rotations": tuple(dict.fromkeys((*a.rotations, *b.rotations))),
        "matrix": a.matrix or b.matrix,
        "change": a.change or b.change,
        "shift": b.shift if a.shift == "none" else a.shift,
    }
    if "none" not in (a.shift, b.shift) and a.shift != b.shift:
        return None
    if 0 not in (a.change, b.change) and a.change != b.change:
        return None
    if "all" in together["corruptions"] and len(together["corruptions"]) > 1:
        return None
    if any(getattr(a, f.name) != getattr(b, f.name) for f in fields(Evaluation) if f.name not in together):
        return None
    return replace(a, **together)
