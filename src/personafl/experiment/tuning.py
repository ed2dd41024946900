"""Settings chosen by validation data: every point of a grid, or some of them, for every method of a recipe.

A trial trains one method with one point and is judged by the clients' validation data alone, as robustness asks for:
by the mean over the degrees of shift (without shift, by clients' own data), over seeds that are not the ones reported.
Test data are not looked at (`evaluation.split`). What was chosen is written as a recipe that trains on the validation
data too and is judged by test data.

A sweep's folder has `sweep.json` (what was asked for), `trials/<label>/<number>.json` (a point and its summaries),
`trials.csv`, `sweep.md`, `sweep.png`, and `best.toml`, or `best-<label>.toml` for each method where one recipe cannot
hold what they chose. The same sweep into the same folder goes on: trials that are there are not run again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w

from personafl import config
from personafl.config.conversion import entries
from personafl.config.recipe import SECTIONS, Method, Recipe
from personafl.core import rng
from personafl.core.errors import UserError
from personafl.core.method_settings import FROM_TRAINING
from personafl.engine.checks import check_calibration
from personafl.experiment import jobs as processes
from personafl.experiment import run_folder
from personafl.experiment.jobs import side_by_side
from personafl.experiment.run_folder import claimed
from personafl.experiment.run_setup import resolved
from personafl.experiment.running import run
from personafl.experiment.trials import Point, Sweep, Trial, write
from personafl.simulation import ranks
from personafl.simulation.machine import chosen_device
from personafl.storage import files
from personafl.storage.lock import locked

REQUEST = "sweep.json"
SEEDS = (1000,)  # of trials, where none are given
MOST = 10_000  # points of a method's grid


def sweep(
    recipe: str | Path | Mapping[str, Any] | None = None,
    *overrides: str,
    grid: Mapping[str, Sequence[Any]] | None = None,
    trials: int = 0,
    seeds: Sequence[int] = SEEDS,
    validation_share: float = 0.2,
    jobs: int = 1,
    data: Any = None,
    model: Any = None,
    algorithms: Any = None,
    training: Any = None,
    evaluation: Any = None,
    faults: Any = None,
    out: str | Path | None = None,
    device: str = "auto",
    told: Callable[[Trial, int, int], None] | None = None,
    **conditions: Any,
) -> Sweep:
    """Try settings of a recipe's methods, choose each method's by validation data, and write what was chosen.

    Overrides with several values, `"training.lr=0.01,0.1"` or `"dm-pfl.readjust_interval=1,10"`, are the grid, and so
    is `grid` (`{"training.lr": [0.01, 0.1]}`); those with one value are of all trials. Each method gets all points of
    the keys that concern it, or `trials` of them, drawn. `seeds` must not be the recipe's own. Where the recipe has no
    validation data, `validation_share` of every client's samples are set aside. `jobs` trials go side by side, each in
    a process, which takes parts that can be pickled. `told` hears of every trial with its place and how many there
    are. The other arguments are those of `personafl.run`.
    """
    given = config.parts(data, model, algorithms, training, evaluation, faults)
    asked = _Request.of(recipe, overrides, grid or {}, given, trials, tuple(seeds), validation_share)
    place, folder = chosen_device(device), None if out is None else Path(out).absolute()
    if ranks.launched() > 1:
        raise UserError("sweep: runs in one process; torchrun shares the clients of single runs")
    processes.share_threads(conditions, processes.checked(jobs))
    if folder is None:
        return asked.run(None, place, conditions, jobs, told)
    request, again = json.dumps(asked.told(), indent=1) + "\n", (folder / REQUEST).is_file()
    with locked(folder) if again else claimed(folder):
        if not again:
            files.write(folder / REQUEST, request)
        elif run_folder.text_of(folder / REQUEST) != request:
            raise UserError(f"sweep folder {folder}: is one of another sweep; choose another folder")
        elif "object:" in request:
            raise UserError(
                f"sweep folder {folder}: nothing tells whether parts given in Python are those of before; choose "
                "another folder, or name them as package.module:function"
            )
        return asked.run(folder, place, conditions, jobs, told)


@dataclass(frozen=True)
class _Request:
    """A sweep as it was asked for, checked."""

    recipe: str | Path | Mapping[str, Any] | None
    plain: tuple[str, ...]  # overrides of all trials
    given: Mapping[str, Any]
    seeds: tuple[int, ...]
    share: float
    base: Recipe
    points: Mapping[str, tuple[Point, ...]]  # by label

    @classmethod
    def of(
        cls,
        recipe: Any,
        overrides: Sequence[str],
        grid: Mapping[str, Sequence[Any]],
        given: Mapping[str, Any],
        trials: int,
        seeds: tuple[int, ...],
        share: float,
    ) -> _Request:
        if isinstance(recipe, str) and "=" in recipe:
            recipe, overrides = None, (recipe, *overrides)
        if isinstance(recipe, (str, Path)) and str(recipe) not in config.recipes():
            recipe = config.raw(recipe)  # as it is now: trials may go on for hours
        plain, wanted = _divided(overrides)
        for key, values in grid.items():
            wanted[key] = [_text(key, v) for v in values]
        base = config.load(recipe, plain, given)
        _check(wanted, base, trials, seeds, share)
        points = {m.label: _points(wanted, m, trials) for m in base.algorithms}
        share = base.data.validation_share or share
        made = cls(recipe, plain, given, seeds, share, base, points)
        for m in base.algorithms:
            for point in made.points[m.label]:
                trial = made.trial(m.label, point)
                _check_effect(trial, point)
                check_calibration(1, trial.algorithms[0].algorithm, trial.evaluation)
        return made

    def told(self) -> dict[str, Any]:
        """What another sweep must have in common to be the same."""
        points = {label: [dict(p) for p in found] for label, found in self.points.items()}
        recipe = config.dump(config.anchored(self.base))
        return {"recipe": recipe, "points": points, "seeds": list(self.seeds), "validation_share": self.share}

    def trial(self, label: str, point: Point) -> Recipe:
        judged = ("evaluation.split=validation", f"data.validation_share={self.share}")
        return self._made([*judged, *_overrides(point)], label)

    def _made(self, chosen: Sequence[str], label: str | None = None) -> Recipe:
        """The recipe with these overrides, and of its methods all or one."""
        made = config.load(self.recipe, [*self.plain, *chosen], self.given)
        return replace(made, algorithms=tuple(m for m in made.algorithms if label in (None, m.label)))

    def run(
        self,
        folder: Path | None,
        place: str,
        conditions: Mapping[str, Any],
        jobs: int,
        told: Callable[[Trial, int, int], None] | None,
    ) -> Sweep:
        every = list(self._all())
        calls = [partial(self._tried, *one, folder, place, conditions) for one in every]
        found: dict[int, Trial] = {}
        for i, trial in side_by_side(calls, jobs):
            found[i] = trial
            if told is not None:
                told(trial, len(found), len(every))
        by_label: dict[str, list[Trial]] = {label: [] for label in self.points}
        for i, (label, _, _) in enumerate(every):
            by_label[label].append(found[i])
        ended = Sweep(by_label, folder)
        ended = replace(ended, recipes=self._recipes(ended.best, place))
        if folder is not None:
            write(ended, folder)
        return ended

    def _tried(
        self, label: str, number: int, point: Point, folder: Path | None, place: str, conditions: Mapping[str, Any]
    ) -> Trial:
        """A trial that is there, or was run now."""
        path = None if folder is None else folder / "trials" / label / f"{number}.json"
        done = None if path is None else _read(path, label, number, point, self.seeds)
        if done is not None:
            return done
        made = run(self.trial(label, point), seeds=self.seeds, device=place, quiet=True, **conditions)
        done = Trial(label, number, point, tuple(m.summary for m in made.methods.values()))
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, json.dumps({"point": dict(point), "summaries": done.summaries}, indent=1) + "\n")
        return done

    def _all(self) -> Iterator[tuple[str, int, Point]]:
        for label, points in self.points.items():
            for number, point in enumerate(points):
                yield label, number, point

    def _recipes(self, best: Mapping[str, Trial], place: str) -> dict[str, str]:
        """What was chosen: one recipe if that can hold it, else one for each method."""
        common: dict[str, set[str]] = {}
        own: list[str] = []
        objects = any(not isinstance(m, (str, Mapping)) for m in entries(self.given.get("algorithms", [])))
        for m in self.base.algorithms:
            for key, value in best[m.label].point.items():
                section, _, name = key.partition(".")
                if section in SECTIONS and (objects or section != "training" or name not in FROM_TRAINING):
                    common.setdefault(key, set()).add(value)
                    continue
                called = next((n for n in (m.label, m.name) if key.startswith(f"{n}.")), section)
                own.append(f"{m.label}{key[len(called) :]}={value}")
        whole = self.base.data.validation_share and not (self.base.training.patience or self.base.training.target)
        again = ["data.validation_share=0"] if whole else []
        if all(len(values) == 1 for values in common.values()):
            chosen = [*again, *(f"{key}={value}" for key, (value,) in common.items()), *own]
            return {"best.toml": _dumped(self._made(chosen), place)}
        return {
            f"best-{label}.toml": _dumped(self._made([*again, *_overrides(t.point)], label), place)
            for label, t in best.items()
        }


def _dumped(recipe: Recipe, place: str) -> str:
    """A recipe as a run of it would write it."""
    return config.dump(config.anchored(resolved(recipe, (recipe.training.seed,), place)[0]))


def _divided(overrides: Sequence[str]) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Overrides with one value, and the keys of the others with theirs; `algorithms` are not a choice to be made."""
    plain: list[str] = []
    wanted: dict[str, list[str]] = {}
    for o in overrides:
        if not isinstance(o, str) or "=" not in o:
            raise UserError(f"override {o!r}: expected section.key=value or section.key=value,value")
        key, _, text = o.partition("=")
        if key.strip() in wanted or any(p.partition("=")[0].strip() == key.strip() for p in plain):
            raise UserError(f"override {o!r}: {key.strip()} is given twice")
        values = [text] if key.strip() == "algorithms" else _values(text)
        if len(values) > 1:
            wanted[key.strip()] = values
        else:
            plain.append(o)
    return tuple(plain), wanted


def _values(text: str) -> list[str]:
    """What commas outside of brackets and quotation marks divide."""
    out, depth, quote = [""], 0, ""
    for c in text:
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in "[{":
            depth += 1
        elif c in "]}":
            depth -= 1
        if c == "," and not depth and not quote:
            out.append("")
        else:
            out[-1] += c
    return [v.strip() for v in out]


def _text(key: str, value: Any) -> str:
    """A value as an override has it."""
    try:
        return tomli_w.dumps({"v": list(value) if isinstance(value, tuple) else value}).partition("=")[2].strip()
    except TypeError:
        raise UserError(f"sweep {key}: {value!r:.60} is no value of a recipe") from None


def _overrides(point: Point) -> list[str]:
    return [f"{key}={value}" for key, value in point.items()]


def _concerns(key: str, method: Method) -> bool:
    return key.partition(".")[0] in SECTIONS or key.startswith((f"{method.label}.", f"{method.name}."))


def _check(
    wanted: Mapping[str, Sequence[str]], base: Recipe, trials: int, seeds: tuple[int, ...], share: float
) -> None:
    for key, values in wanted.items():
        section = key.partition(".")[0]
        if section in ("data", "evaluation", "faults") or key == "training.seed":
            hint = "give seeds as such" if key == "training.seed" else "run them apart"
            raise UserError(f"sweep {key}: scores under other conditions say nothing of a method; {hint}")
        if not any(_concerns(key, m) for m in base.algorithms):
            labels = ", ".join(m.label for m in base.algorithms)
            raise UserError(f"sweep {key}: neither training, model nor a method of this recipe ({labels})")
        if not values or len(set(values)) < len(values) or not all(values):
            raise UserError(f"sweep {key}={','.join(values)}: needs values that differ")
    if not wanted and len({m.name for m in base.algorithms}) == len(base.algorithms):  # no two readings of a method
        raise UserError("sweep: nothing to choose from; give a key several values, such as training.lr=0.01,0.1")
    if type(trials) is not int or trials < 0:
        raise UserError(f"trials {trials}: must be a whole number, 0 for the whole grid")
    if not seeds or len(set(seeds)) < len(seeds) or not all(type(s) is int and s >= 0 for s in seeds):
        raise UserError(f"seeds {','.join(map(str, seeds))}: must be whole numbers that differ")
    if base.training.seed in seeds:
        raise UserError(f"seed {base.training.seed}: is the recipe's own; choose by others, such as {SEEDS[0]}")
    if base.evaluation.split != "test" or not 0 < share < 1:
        raise UserError(
            f"validation share {share}: must be in (0, 1)"
            if base.evaluation.split == "test"
            else "evaluation.split='validation': a sweep sets that itself; leave it at test"
        )


def _points(wanted: Mapping[str, Sequence[str]], method: Method, trials: int) -> tuple[Point, ...]:
    """All points of the keys that concern a method, or so many of them, drawn; in the order of the grid."""
    mine = {key: values for key, values in wanted.items() if _concerns(key, method)}
    if (size := math.prod(map(len, mine.values()))) > MOST and not trials:
        raise UserError(f"sweep: {size} points for {method.label}; give fewer values, or trials, such as 50")
    chosen: Sequence[int] = range(size)
    if trials and trials < size:
        chosen = sorted(rng.generator(0, f"sweep {method.label}").choice(size, trials, replace=False).tolist())
    return tuple(dict(zip(mine, _at(list(mine.values()), i), strict=True)) for i in chosen)


def _at(values: Sequence[Sequence[str]], place: int) -> list[str]:
    """The point at a place of a grid, whose last key changes fastest."""
    out = []
    for of in reversed(values):
        place, i = divmod(place, len(of))
        out.append(of[i])
    return out[::-1]


def _check_effect(trial: Recipe, point: Point) -> None:
    """Refuse a rate of all methods that a method has one of its own for."""
    (method,) = trial.algorithms
    for key in point:
        section, _, name = key.partition(".")
        own = getattr(method.algorithm, name, None) if section == "training" and name in FROM_TRAINING else None
        if own is not None:
            raise UserError(
                f"sweep {key}: {method.label} has {name}={own} of its own in this recipe; sweep {method.label}.{name}"
            )


# Files


def _read(path: Path, label: str, number: int, point: Point, seeds: tuple[int, ...]) -> Trial | None:
    """A trial that is there and whole; None where it is to be run."""
    try:
        told = json.loads(files.read_text(path))
        found = Trial(label, number, point, tuple(told["summaries"]))
        sides = [s["accuracy"]["personal"]["mean"] for s in found.summaries]
        same = told["point"] == dict(point) and [s["seed"] for s in found.summaries] == list(seeds)
        same = same and all(isinstance(v, float) for v in sides)
        return found if same and found.scores and all(s["label"] == label for s in found.summaries) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
