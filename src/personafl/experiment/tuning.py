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

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w

from personafl import config
from personafl.config.building import entries
from personafl.config.recipe import SECTIONS, Method, Recipe
from personafl.core import files, rng
from personafl.core.algorithm import FROM_TRAINING
from personafl.core.display import Displayed
from personafl.core.errors import UserError
from personafl.core.lock import LOCK, locked
from personafl.core.plain_text import harmless
from personafl.core.types import Better
from personafl.evaluation.rounds import better
from personafl.evaluation.shown import Shown
from personafl.experiment.build import resolved
from personafl.experiment.running import run
from personafl.sim import ranks
from personafl.sim.machine import chosen_device

REQUEST = "sweep.json"
SEEDS = (1000,)  # of trials, where none are given
MOST = 10_000  # points of a method's grid
Point = Mapping[str, str]
"""A value, as overrides have it, for each key."""


@dataclass(frozen=True)
class Trial:
    """A method with a point, and what came of it with each seed."""

    label: str
    number: int
    point: Point
    summaries: tuple[Mapping[str, Any], ...] = field(repr=False)

    @property
    def scores(self) -> list[float]:
        """What each seed is judged by."""
        return [score(s) for s in self.summaries]

    @property
    def score(self) -> float:
        """The mean over seeds; not a number where a run diverged to none."""
        return statistics.fmean(self.scores)

    @property
    def diverged(self) -> bool:
        """Whether clients are left with models that are not finite."""
        return any(s.get("diverged", {}).get("final") for s in self.summaries) or math.isnan(self.score)

    def at(self, degree: float) -> float | None:
        """Accuracy at a degree of shift, the mean over seeds."""
        found = [s["shift"]["degrees"].get(str(degree)) for s in self.summaries if s["shift"]]
        return statistics.fmean(f["mean"] for f in found) if found and all(found) else None


def score(summary: Mapping[str, Any]) -> float:
    """The mean over the degrees of shift, or over clients on their own data where there is none."""
    shift = summary["shift"]
    return float(shift["average"] if shift else summary["accuracy"]["personal"]["mean"])


@dataclass(frozen=True, repr=False)
class Sweep(Displayed):
    """The trials of every method, and what they chose."""

    trials: Mapping[str, Sequence[Trial]]  # by label
    folder: Path | None = None
    recipes: Mapping[str, str] = field(default_factory=dict)  # what was chosen, as TOML by the name of its file

    def _facts(self) -> dict[str, object]:
        return {n: ", ".join(f"{k}={v}" for k, v in t.point.items()) or "as it is" for n, t in self.best.items()}

    @property
    def shown(self) -> Shown:
        return Shown.of([s for found in self.trials.values() for t in found for s in t.summaries])

    @property
    def best(self) -> dict[str, Trial]:
        """The trial of each method with the best score, the first of equals; those that diverged come last."""
        return {label: self._first(found) for label, found in self.trials.items()}

    @property
    def at_equal_budget(self) -> dict[str, Trial]:
        """The same of methods with keys of their own, had those stayed at their first values: as many trials as all."""
        out = {}
        for label, found in self.trials.items():
            own = {k: v for k, v in found[0].point.items() if k.partition(".")[0] not in SECTIONS}
            if own:
                out[label] = self._first([t for t in found if own.items() <= t.point.items()])
        return out

    def _first(self, found: Sequence[Trial]) -> Trial:
        which: Better = "higher" if self.shown.better == "higher" else "lower"
        best = found[0]
        for t in found[1:]:
            ahead = better(t.score, best.score, which)
            if (best.diverged and not t.diverged) or (best.diverged == t.diverged and ahead):
                best = t
        return best

    def rows(self) -> list[dict[str, Any]]:
        """A row for every trial."""
        keys = dict.fromkeys(k for found in self.trials.values() for t in found for k in t.point)
        best = self.best
        return [
            {"label": t.label, "trial": t.number}
            | {k: t.point.get(k, "") for k in keys}
            | {"score": t.score, "std": _spread(t.scores), "seeds": len(t.scores), "own": _own(t)}
            | {"shift_1": t.at(1.0), "diverged": t.diverged, "chosen": t is best[t.label]}
            for found in self.trials.values()
            for t in found
        ]

    def markdown(self) -> str:
        """A table of what was chosen, and one of all trials."""
        shown, best = self.shown, self.best
        head = ["method", "trials", "chosen", "score", "own data", "full shift"]
        chosen = []
        for label, t in best.items():
            numbers = [_number(t.scores, shown), *_sides(t, shown)]
            chosen.append([label, str(len(self.trials[label])), _words(t.point), *numbers])
            if (other := self.at_equal_budget.get(label)) is not None and other is not t:
                numbers = [_number(other.scores, shown), *_sides(other, shown)]
                chosen.append([f"{label}, without keys of its own", "", _words(other.point), *numbers])
        every = [
            [t.label, str(t.number), _words(t.point), _number(t.scores, shown), *_sides(t, shown), _alert(t)]
            for found in self.trials.values()
            for t in found
        ]
        seeds = len(next(iter(best.values())).summaries)
        note = (
            f"{shown.heading}, on validation data. Score: the mean over the degrees of shift, or over clients' own "
            f"data where there is none; mean of {seeds} seed{'s' if seeds > 1 else ''}"
            f"{' ± their standard deviation' if seeds > 1 else ''}."
        )
        parts = [
            "# Sweep",
            note,
            _table(head, chosen),
            "## All trials",
            _table([*head[:1], "trial", *head[2:], ""], every),
        ]
        return "\n\n".join(parts) + "\n"

    def figure(self) -> Any:
        """For every key, the best score at each of its values."""
        from personafl.evaluation import figures

        keys = list(dict.fromkeys(k for found in self.trials.values() for t in found for k in t.point))
        lines: dict[str, dict[str, list[tuple[str, float]]]] = {k: {} for k in keys}
        for key in keys:
            for label, found in self.trials.items():
                values = dict.fromkeys(t.point[key] for t in found if key in t.point)
                lines[key][label] = [
                    (v, self._first([t for t in found if t.point.get(key) == v]).score) for v in values
                ]
        return figures.sweep({k: {n: at for n, at in of.items() if at} for k, of in lines.items()}, self.shown)


def sweep(
    recipe: str | Path | Mapping[str, Any] | None = None,
    *overrides: str,
    grid: Mapping[str, Sequence[Any]] | None = None,
    trials: int = 0,
    seeds: Sequence[int] = SEEDS,
    validation_share: float = 0.2,
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
    validation data, `validation_share` of every client's samples are set aside. `told` hears of every trial with its
    place and how many there are. The other arguments are those of `personafl.run`.
    """
    given = config.parts(data, model, algorithms, training, evaluation, faults)
    asked = _Request.of(recipe, overrides, grid or {}, given, trials, tuple(seeds), validation_share)
    place, folder = chosen_device(device), None if out is None else Path(out).absolute()
    if ranks.launched() > 1:
        raise UserError("sweep: runs in one process; torchrun shares the clients of single runs")
    if folder is None:
        return asked.run(None, place, conditions, told)
    _claim(folder, asked)
    with locked(folder):
        return asked.run(folder, place, conditions, told)


def _claim(folder: Path, asked: _Request) -> None:
    """Begin a folder, or see that it is one of the same sweep."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"sweep folder {folder}: that is a file")
    path, text = folder / REQUEST, json.dumps(asked.told(), indent=1) + "\n"
    if path.is_file():
        if files.read_text(path) != text:
            raise UserError(f"sweep folder {folder}: is one of another sweep; choose another folder")
        return
    if folder.is_dir() and any(p.name != LOCK for p in folder.iterdir()):
        raise UserError(f"sweep folder {folder}: the folder is not empty; choose another, or empty this one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"sweep folder {folder}: cannot be created: {e.strerror}") from None
    files.write(path, text)


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
                _check_effect(made.trial(m.label, point), point)
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
        told: Callable[[Trial, int, int], None] | None,
    ) -> Sweep:
        found: dict[str, list[Trial]] = {label: [] for label in self.points}
        total = sum(map(len, self.points.values()))
        for label, number, point in self._all():
            path = None if folder is None else folder / "trials" / label / f"{number}.json"
            done = None if path is None else _read(path, label, number, point, self.seeds)
            if done is None:
                made = run(self.trial(label, point), seeds=self.seeds, device=place, quiet=True, **conditions)
                done = Trial(label, number, point, tuple(m.summary for m in made.methods.values()))
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    files.write(path, json.dumps({"point": dict(point), "summaries": done.summaries}, indent=1) + "\n")
            found[label].append(done)
            if told is not None:
                told(done, sum(map(len, found.values())), total)
        ended = Sweep(found, folder)
        ended = replace(ended, recipes=self._recipes(ended.best, place))
        if folder is not None:
            _write(ended, folder)
        return ended

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
    plain, wanted = [], {}
    for o in overrides:
        if not isinstance(o, str) or "=" not in o:
            raise UserError(f"override {o!r}: expected section.key=value or section.key=value,value")
        key, _, text = o.partition("=")
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
    if not wanted:
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
        same = told["point"] == dict(point) and [s["seed"] for s in found.summaries] == list(seeds)
        return found if same and found.scores and all(s["label"] == label for s in found.summaries) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _write(ended: Sweep, folder: Path) -> None:
    rows, table = ended.rows(), io.StringIO()
    writer = csv.DictWriter(table, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.write(folder / "trials.csv", table.getvalue())
    files.write(folder / "sweep.md", ended.markdown())
    picture = io.BytesIO()
    ended.figure().savefig(picture, format="png", dpi=120, metadata={"Software": None})
    files.write(folder / "sweep.png", picture.getvalue())
    for name, text in ended.recipes.items():
        files.write(folder / name, text)


def _own(t: Trial) -> float:
    return statistics.fmean(s["accuracy"]["personal"]["mean"] for s in t.summaries)


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _number(values: Sequence[float], shown: Shown) -> str:
    text = shown.number(statistics.fmean(values))
    return f"{text} ± {shown.number(_spread(values))}" if len(values) > 1 else text


def _sides(t: Trial, shown: Shown) -> list[str]:
    shifted = t.at(1.0)
    return [shown.number(_own(t)), "" if shifted is None else shown.number(shifted)]


def _alert(t: Trial) -> str:
    return "diverged" if t.diverged else ""


def _words(point: Point) -> str:
    return ", ".join(f"{k}={v}" for k, v in point.items()) or "as it is"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[harmless(c).replace("|", "\\|") for c in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells))
