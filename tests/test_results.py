"""docs/results against the summaries its pages are made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tools import results

from personafl.experiment import targets
from personafl.experiment.shared_runs import SharedRun


def test_the_pages_are_what_the_summaries_give() -> None:
    assert results.differences() == [], "python tools/results.py writes them anew"


def test_every_summary_is_of_a_run_that_a_target_asks_for() -> None:
    asked = {results.kept_at(r.home): r for r in results.planned()}
    for path in results.RUNS.glob("*/*.json"):
        told = json.loads(path.read_text())
        run = asked[path]
        assert results.is_of(run, told), path
        assert told["lr"] == run.recipe.training.lr and told["environment"]["commit"]


def test_methods_of_a_setting_and_seed_saw_the_same_data() -> None:
    """Those that hold validation data out train on less of the same, and are judged by the same test data."""
    asked = {results.kept_at(r.home): r for r in results.planned()}
    seen: dict[tuple[Any, ...], set[str]] = {}
    for path in results.RUNS.glob("*/*.json"):
        hashes = json.loads(path.read_text())["hashes"]
        of = path.parent.name, path.stem.rpartition("-")[2]
        trained = *of, asked[path].recipe.data.validation_share
        seen.setdefault(trained, set()).add(json.dumps([hashes[n] for n in ("split", "cohorts")]))
        seen.setdefault(of, set()).add(json.dumps([hashes[n] for n in ("init", "data", "shift")]))
    assert seen and all(len(kinds) == 1 for kinds in seen.values())


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Figure 6 in small as the only target, and a folder for its summaries."""
    whole = targets.load("dmpfl-fig6")
    recipe = dict(whole.recipe) | {"data": dict(whole.recipe["data"]) | {"dataset": "digits"}}
    recipe |= {"model": {"name": "small-cnn"}, "training": {"num_rounds": 8, "local_epochs": 1, "join_ratio": 0.5}}
    target = replace(whole, recipe=recipe, seeds=(0,))
    monkeypatch.setattr(targets, "load", lambda _: target)
    monkeypatch.setattr(targets, "names", lambda: ["dmpfl-fig6"])
    monkeypatch.setattr(results, "RUNS", tmp_path / "kept")
    return tmp_path / "kept"


def settings_of(runs: list[SharedRun]) -> list[str]:
    return [r.home.parent.name for r in runs]


@pytest.mark.slow
def test_what_is_missing_is_run_and_kept(small: Path, tmp_path: Path) -> None:
    names, out = ["dmpfl-fig6"], tmp_path / "out"
    assert settings_of(results.missing(names)) == ["five-groups-of-four", "fifteen-and-five"]
    results.played(names, out, 1, "cpu", [1])  # of a seed that is not asked for
    assert not out.exists()
    results.played(names, out, 1, "cpu", [0])
    assert not list(out.rglob("*.safetensors"))
    assert results.collect(out, small) == 2
    assert results.missing(names) == []
    results.played(names, out, 2, "cpu")  # nothing is left to run
    one = small / "fifteen-and-five" / "dm-pfl-0.json"
    told = json.loads(one.read_text())
    one.write_text(json.dumps(told | {"masks": {}}))
    assert settings_of(results.missing(names)) == ["fifteen-and-five"]  # it was judged by less
    one.write_text(json.dumps(told | {"settings": told["settings"] | {"sparsity": 0.4}}))
    assert settings_of(results.missing(names)) == ["fifteen-and-five"]  # the target has other settings now
    one.write_text(json.dumps(told | {"robustness": {"expected": {}, "more": {}}}))
    with pytest.raises(SystemExit, match=r"has no .*more.*, and .* has"):
        results.collect(out, small)
    one.unlink()
    path = next(out.rglob("dm-pfl/seed-0/summary.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rounds": 4}))
    with pytest.raises(SystemExit, match="of other seeds, rounds or settings"):
        results.collect(out, small)
    (out / "runs" / "fifteen-and-five").rename(out / "runs" / "other")
    path.unlink()
    with pytest.raises(SystemExit, match="no target has such a run"):
        results.collect(out, small)


@pytest.mark.slow
def test_runs_are_called_as_when_all_targets_are_run() -> None:
    """Table 4 has no runs of its own, and Figure 4's are judged as Table 1's, too."""
    whole = {r.home for r in results.planned()}
    for names in (["dmpfl-table4"], ["dmpfl-fig4", "dmpfl-fig5"]):
        assert {r.home for r in results.missing(names)} <= whole
    assert results.missing(["dmpfl-table4"]) == []
    assert all(r.recipe.evaluation.matrix for r in results.missing(["dmpfl-fig4"]))


def test_a_seed_with_few_numbers_is_not_reported() -> None:
    target = targets.load("dmpfl-table1")
    found = results.summaries(target)
    assert results.reported(target, found) == (0, 1, 2)
    few = {key: told for key, told in found.items() if key[2] != 1 or key[1] == "fedavg"}
    assert results.reported(target, few) == (0, 2)
    without_two = {key: told for key, told in found.items() if key[2] != 1 or key[1] not in ("ditto", "apfl")}
    assert results.reported(target, without_two) == (0, 2)  # of 14 methods
    without_one = {key: told for key, told in found.items() if key[2] != 1 or key[1] != "ditto"}
    assert results.reported(target, without_one) == (0, 1, 2)
