"""Settings chosen by validation data."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import personafl
from personafl import Sweep, UserError
from personafl.config.recipe import Recipe
from personafl.experiment import trials, tuning
from personafl.experiment.trials import Trial

QUICK: dict[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 4},
    "training": {"num_rounds": 2, "local_epochs": 1},
    "evaluation": {"draws": 1, "degrees": [0.0, 0.5, 1.0]},
    "algorithms": ["fedavg", {"name": "ditto", "label": "mine"}],
}


class Stub:
    """In place of training: scores as told, and which recipes came."""

    def __init__(self, scores: Mapping[tuple[str, ...], float], better: str = "higher", final: Sequence[float] = ()):
        self.scores, self.better, self.final = scores, better, final  # by the values of a point
        self.seen: list[Recipe] = []

    def __call__(self, recipe: Recipe, *, seeds: Sequence[int], **_: Any) -> SimpleNamespace:
        self.seen.append(recipe)
        (method,) = recipe.algorithms
        told = (method.label, str(recipe.training.lr), str(getattr(method.algorithm, "proximal_weight", "")))
        found = next(v for k, v in self.scores.items() if set(k) <= set(told))
        degrees = {str(d): {"mean": found + shift, "std": 0.0} for d, shift in ((0.0, 0.1), (0.5, 0.0), (1.0, -0.1))}
        summary = {
            "label": method.label,
            "metric": {"name": "accuracy" if self.better == "higher" else "mse", "better": self.better},
            "accuracy": {"personal": {"mean": found + 0.1}},
            "shift": {"degrees": degrees, "average": sum(d["mean"] for d in degrees.values()) / 3},
        }
        if found in self.final:
            summary["diverged"] = {"final": 1}
        return SimpleNamespace(methods={s: SimpleNamespace(summary=summary | {"seed": s}) for s in seeds})


def chosen(found: Sweep) -> dict[str, dict[str, str]]:
    return {label: dict(t.point) for label, t in found.best.items()}


def test_the_best_mean_over_the_degrees_of_shift_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own data would choose the same here, so a summary without an average is looked at by itself."""
    monkeypatch.setattr(tuning, "run", Stub({("fedavg", "0.1"): 0.3, ("fedavg", "0.2"): 0.5, ("mine",): 0.4}))
    found = personafl.sweep(QUICK, "training.lr=0.1,0.2")
    assert chosen(found) == {"fedavg": {"training.lr": "0.2"}, "mine": {"training.lr": "0.1"}}  # the first of equals
    best = found.best["fedavg"]
    assert best.score == pytest.approx(0.5) and best.at(1.0) == pytest.approx(0.4) and best.at(0.3) is None
    robust = {"shift": {"average": 0.2}, "accuracy": {"personal": {"mean": 0.9}}}
    assert trials.score(robust) == 0.2 and trials.score(robust | {"shift": None}) == 0.9


def test_lower_is_chosen_where_it_is_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "run", Stub({("0.1",): 0.3, ("0.2",): 0.5}, "lower"))
    assert chosen(personafl.sweep(QUICK, "training.lr=0.2,0.1", algorithms=["fedavg"])) == {
        "fedavg": {"training.lr": "0.1"}
    }


@pytest.mark.parametrize("order", ["0.1,0.2,0.3", "0.3,0.2,0.1"])
def test_what_diverged_is_chosen_last(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "run", Stub({("0.1",): math.nan, ("0.2",): 0.2, ("0.3",): 0.9}, final=(0.9,)))
    found = personafl.sweep(QUICK, f"training.lr={order}", algorithms=["fedavg"])
    assert chosen(found) == {"fedavg": {"training.lr": "0.2"}}
    assert [t.diverged for t in found.trials["fedavg"]] == [v != "0.2" for v in order.split(",")]


def test_every_method_gets_the_points_that_concern_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub({("fedavg",): 0.1, ("mine", "0.5"): 0.4, ("mine",): 0.2})
    monkeypatch.setattr(tuning, "run", stub)
    found = personafl.sweep(QUICK, "mine.proximal_weight=0.1,0.5", grid={"training.lr": [0.1, 0.2]})
    assert [dict(t.point) for t in found.trials["fedavg"]] == [{"training.lr": "0.1"}, {"training.lr": "0.2"}]
    assert [dict(t.point) for t in found.trials["mine"]] == [
        {"mine.proximal_weight": w, "training.lr": lr} for w in ("0.1", "0.5") for lr in ("0.1", "0.2")
    ]
    assert [r.algorithms[0].label for r in stub.seen] == ["fedavg"] * 2 + ["mine"] * 4
    assert found.best["mine"].score == pytest.approx(0.4)
    assert found.at_equal_budget["mine"].score == pytest.approx(0.2)  # of two trials, as FedAvg had
    assert "fedavg" not in found.at_equal_budget
    assert "mine, without keys of its own" in found.markdown()


def test_trials_look_at_validation_data_with_other_seeds_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub = Stub({("fedavg",): 0.1, ("mine",): 0.2})
    monkeypatch.setattr(tuning, "run", stub)
    found = personafl.sweep(QUICK, "training.lr=0.1,0.2", "training.batch_size=7", validation_share=0.3, seeds=(5, 6))
    for recipe in stub.seen:
        assert recipe.evaluation.split == "validation" and recipe.data.validation_share == 0.3
        assert recipe.training.batch_size == 7
    assert all([s["seed"] for s in t.summaries] == [5, 6] for ts in found.trials.values() for t in ts)
    best = personafl.config.load(tomllib.loads(found.recipes["best.toml"]))
    assert best.evaluation.split == "test" and best.data.validation_share == 0 and best.training.seed == 0
    assert [m.algorithm.lr for m in best.algorithms] == [0.1, 0.1] and best.training.batch_size == 7


def test_a_recipe_of_all_methods_is_written_where_it_can_hold_what_they_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    class ByEpochs(Stub):
        def __call__(self, recipe: Recipe, **given: Any) -> SimpleNamespace:
            self.scores = {("fedavg",): recipe.training.local_epochs, ("mine",): -recipe.training.local_epochs}
            return super().__call__(recipe, **given)

    monkeypatch.setattr(tuning, "run", ByEpochs({}))
    found = personafl.sweep(QUICK, "training.local_epochs=1,2", "training.lr=0.1,0.2")
    epochs = {}
    for name, text in found.recipes.items():
        (entry,) = tomllib.loads(text)["algorithms"]
        epochs[name, entry["label"]] = tomllib.loads(text)["training"]["local_epochs"]
    assert epochs == {("best-fedavg.toml", "fedavg"): 2.0, ("best-mine.toml", "mine"): 1.0}


def test_methods_may_be_objects_and_have_a_recipe_each_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        tuning, "run", Stub({("fedavg", "0.2"): 0.9, ("mine", "0.1"): 0.5, ("fedavg",): 0, ("mine",): 0})
    )
    methods = {"fedavg": personafl.FedAvg(), "mine": personafl.Ditto(proximal_weight=0.3)}
    found = personafl.sweep(QUICK, "training.lr=0.1,0.2", algorithms=methods)
    rates = {n: tomllib.loads(text)["training"]["lr"] for n, text in found.recipes.items()}
    assert rates == {"best-fedavg.toml": 0.2, "best-mine.toml": 0.1}
    assert tomllib.loads(found.recipes["best-mine.toml"])["algorithms"][0]["proximal_weight"] == 0.3


def test_drawn_points_are_some_of_the_grid_and_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "run", Stub({("fedavg",): 0.1, ("mine",): 0.2}))

    def points(trials: int) -> list[list[dict[str, str]]]:
        grid = {"training.lr": [0.1, 0.2, 0.3, 0.4], "training.batch_size": [5, 6, 7]}
        found = personafl.sweep(QUICK, grid=grid, trials=trials)
        return [[dict(t.point) for t in ts] for ts in found.trials.values()]

    every, some = points(0), points(5)
    assert [len(p) for p in every] == [12, 12] == [len(p) for p in points(99)]
    assert [len(p) for p in some] == [5, 5] and points(5) == some
    assert some[0] != some[1]  # each method has its own draws
    for mine, of in zip(some, every, strict=True):
        assert mine == [p for p in of if p in mine]


def test_a_grid_too_large_to_try_is_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "run", Stub({("fedavg",): 0.1}))
    grid = {f"training.{n}": list(range(1, 60)) for n in ("batch_size", "num_rounds", "local_epochs")}
    found = personafl.sweep(QUICK, grid=grid, trials=3, algorithms=["fedavg"])
    assert len({tuple(t.point.values()) for t in found.trials["fedavg"]}) == 3
    with pytest.raises(UserError, match="205379 points for fedavg; give fewer values, or trials"):
        personafl.sweep(QUICK, grid=grid)


def test_readings_of_one_method_are_compared_without_a_grid(tmp_path: Path) -> None:
    named = ["fedavg", {"name": "fedavg", "label": "still", "lr": 1e-6}]
    found = personafl.sweep(QUICK, algorithms=named, out=tmp_path / "s")
    assert {label: len(of) for label, of in found.trials.items()} == {"fedavg": 1, "still": 1}
    assert found.best["fedavg"].score != found.best["still"].score
    assert (tmp_path / "s" / "sweep.png").stat().st_size > 1000


def test_no_cell_of_the_table_of_trials_is_a_formula(tmp_path: Path) -> None:
    """A label may begin with a plus, and so the name of its column; a negative number stays one."""
    summary = {"accuracy": {"personal": {"mean": -0.5}}, "shift": None, "metric": {"name": "r2", "better": "higher"}}
    points = ({"+mine.rule": "=1+1"}, {"+mine.rule": "-2.5"})
    found = [Trial("+mine", i, point, (summary,)) for i, point in enumerate(points)]
    trials.write(Sweep({"+mine": found}), tmp_path)
    head, *rows = csv.reader((tmp_path / "trials.csv").read_text().splitlines())
    assert head[:4] == ["label", "trial", "'+mine.rule", "score"]
    assert [r[:4] for r in rows] == [["'+mine", "0", "'=1+1", "-0.5"], ["'+mine", "1", "-2.5", "-0.5"]]


@pytest.mark.parametrize(
    ("words", "options", "told"),
    [
        (("training.lr=0.1",), {}, "nothing to choose from"),
        (("data.alpha=0.1,0.2",), {}, "sweep data.alpha: scores under other conditions"),
        (("training.seed=1,2",), {}, "give seeds as such"),
        (("fedrep.lr=1,2",), {}, r"neither training, model nor a method of this recipe \(fedavg, mine\)"),
        (("training.lr=1,1",), {}, "needs values that differ"),
        (("training.lr=1,",), {}, "needs values that differ"),
        (("training.lr=1,x",), {}, "training.lr='x': must be a number"),
        (("training.lr=1,2",), {"seeds": (1000, 0)}, "seed 0: is the recipe's own"),
        (("training.lr=1,2",), {"seeds": ()}, "whole numbers that differ"),
        (("training.lr=1,2",), {"seeds": (3, 3)}, "whole numbers that differ"),
        (("training.lr=1,2",), {"trials": -1}, "trials -1"),
        (("training.lr=1,2",), {"validation_share": 1.0}, "validation share 1.0"),
        (("training.lr=1,2", "evaluation.split=validation"), {}, "a sweep sets that itself"),
        (("training.lr=1,2", "mine.lr=3"), {}, "mine has lr=3.0 of its own in this recipe; sweep mine.lr"),
        ((), {"grid": {"training.lr": [object()]}}, "is no value of a recipe"),
        (("training.lr",), {}, "expected section.key=value"),
    ],
)
def test_what_cannot_be_chosen_is_refused_before_anything_runs(
    words: tuple[str, ...], options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tuning, "run", lambda *_, **__: pytest.fail("a trial was run"))
    with pytest.raises(UserError, match=told):
        personafl.sweep(QUICK, *words, out=tmp_path / "s", **options)
    assert not (tmp_path / "s").exists()


def test_commas_in_brackets_and_quotation_marks_divide_nothing() -> None:
    assert tuning._values("[1,2],[3], 'a,b',{x = [1,2]}") == ["[1,2]", "[3]", "'a,b'", "{x = [1,2]}"]
    assert tuning._text("k", (1, 2.5)).replace("\n", "").replace(" ", "").rstrip(",]") == "[1,2.5"
    assert tuning._text("k", True) == "true" and tuning._text("k", "a") == '"a"'


# For real


def test_a_sweep_that_was_interrupted_goes_on_and_comes_to_the_same(tmp_path: Path) -> None:
    words = ("training.lr=0.05,0.5", "mine.proximal_weight=0.1,1.0")
    heard: list[tuple[str, int, int, int]] = []

    def told(trial: Trial, place: int, of: int) -> None:
        heard.append((trial.label, trial.number, place, of))
        if len(heard) == 3:
            raise KeyboardInterrupt

    whole = personafl.sweep(QUICK, *words, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        personafl.sweep(QUICK, *words, out=tmp_path / "cut", told=told)
    assert heard == [("fedavg", 0, 1, 6), ("fedavg", 1, 2, 6), ("mine", 0, 3, 6)]
    (tmp_path / "cut" / "trials" / "fedavg" / "1.json").write_text("{")
    before = (tmp_path / "cut" / "trials" / "fedavg" / "0.json").stat().st_mtime_ns
    found = personafl.sweep(QUICK, *words, out=tmp_path / "cut")
    assert (tmp_path / "cut" / "trials" / "fedavg" / "0.json").stat().st_mtime_ns == before
    assert found.rows() == whole.rows()
    for name in ("trials.csv", "sweep.md", "best.toml", "sweep.json", "sweep.png"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    with pytest.raises(UserError, match="is one of another sweep"):
        personafl.sweep(QUICK, "training.lr=0.05,0.4", out=tmp_path / "cut")
    rows = list(csv.DictReader((tmp_path / "cut" / "trials.csv").read_text().splitlines()))
    assert [r["chosen"] for r in rows].count("True") == 2 and len(rows) == 6
    for r in rows:
        summary = json.loads((tmp_path / "cut" / "trials" / r["label"] / f"{r['trial']}.json").read_text())["summaries"]
        degrees = [d["mean"] for d in summary[0]["shift"]["degrees"].values()]
        assert float(r["score"]) == pytest.approx(sum(degrees) / 3)
    result = personafl.run(tmp_path / "cut" / "best.toml", quiet=True)
    assert [m.summary["lr"] for m in result] == [float(t.point["training.lr"]) for t in whole.best.values()]


def test_test_data_have_no_part_in_a_choice() -> None:
    draw = np.random.default_rng(0)
    y = draw.integers(3, size=240)
    x = (draw.normal(size=(240, 5)) + y[:, None]).astype(np.float32)
    fed = personafl.Federation.build(personafl.arrays(x, y), np.split(np.arange(240), 4), 0, validation_share=0.2)
    other = y.copy()
    for c in range(4):
        rows = fed.rows("test", c).numpy()
        other[rows] = (other[rows] + 1) % 3
    spoilt = personafl.Federation.build(
        personafl.arrays(x, other), np.split(np.arange(240), 4), 0, validation_share=0.2
    )
    sections = {n: QUICK[n] for n in ("training", "evaluation", "algorithms")}
    found = [personafl.sweep(sections, "training.lr=0.05,0.5", data=d).rows() for d in (fed, spoilt)]
    assert found[0] == found[1]


def test_a_folder_that_has_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="the folder is not empty"):
        personafl.sweep(QUICK, "training.lr=0.05,0.5", out=tmp_path)
    with pytest.raises(UserError, match="that is a file"):
        personafl.sweep(QUICK, "training.lr=0.05,0.5", out=tmp_path / "notes.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_trials_side_by_side_come_to_the_same(tmp_path: Path) -> None:
    alone, beside = (
        personafl.sweep(QUICK, "training.lr=0.1,0.5", jobs=n, out=tmp_path / str(n), device="cpu") for n in (1, 2)
    )
    assert alone.rows() == beside.rows() and alone.recipes == beside.recipes
    assert (tmp_path / "1" / "sweep.md").read_text() == (tmp_path / "2" / "sweep.md").read_text()


def test_parts_that_no_other_process_can_have_are_refused() -> None:
    with pytest.raises(UserError, match="jobs 2: other processes cannot be given these parts"):
        personafl.sweep(QUICK, "training.lr=0.1,0.5", jobs=2, model=lambda: None)
    with pytest.raises(UserError, match="jobs 0: must be a whole number"):
        personafl.sweep(QUICK, "training.lr=0.1,0.5", jobs=0)


def test_a_recipe_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What becomes of its file while a sweep runs is not looked at."""
    path = tmp_path / "mine.toml"
    path.write_text('algorithms = ["fedavg"]\n[data]\nnum_clients = 4\n[training]\nnum_rounds = 2\n')
    stub = Stub({("fedavg", "0.1"): 0.3, ("fedavg", "0.5"): 0.5})
    monkeypatch.setattr(tuning, "run", stub)
    personafl.sweep(path, "training.lr=0.1,0.5", told=lambda *_: path.write_text("nonsense"))
    assert [r.training.num_rounds for r in stub.seen] == [2, 2]


def test_a_folder_of_parts_given_in_python_is_not_gone_on_with(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).random((120, 4), dtype=np.float32), np.arange(120) % 3
    own = (x, y, np.arange(120) // 40)
    words: dict[str, Any] = {"data": own, "out": tmp_path / "o", "device": "cpu"}
    personafl.sweep(QUICK | {"data": {}, "algorithms": ["fedavg"]}, "training.lr=0.1,0.5", **words)
    with pytest.raises(UserError, match="nothing tells whether parts given in Python are those of before"):
        personafl.sweep(QUICK | {"data": {}, "algorithms": ["fedavg"]}, "training.lr=0.1,0.5", **words)


def test_a_key_is_given_once() -> None:
    with pytest.raises(UserError, match=r"training\.lr is given twice"):
        personafl.sweep(QUICK, "training.lr=0.1,0.5", "training.lr=0.2")
