"""docs/results against the summaries its pages are made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tools import results

from personafl.experiment import targets


def test_the_pages_are_what_the_summaries_give() -> None:
    assert results.differences() == [], "python tools/results.py writes them anew"


def test_every_summary_is_of_a_run_that_a_target_asks_for() -> None:
    asked = {results.kept_at(r.home): r for r in results.planned()}
    for path in results.RUNS.glob("*/*.json"):
        told = json.loads(path.read_text())
        run = asked[path]
        assert (told["seed"], told["rounds"]) == (run.seed, run.recipe.training.num_rounds)
        assert told["algorithm"] == run.recipe.algorithms[0].name
        assert told["lr"] == run.recipe.training.lr and told["environment"]["commit"]


def test_methods_of_a_setting_and_seed_saw_the_same_data() -> None:
    seen: dict[tuple[str, str], set[str]] = {}
    for path in results.RUNS.glob("*/*.json"):
        hashes = json.loads(path.read_text())["hashes"]
        seed = path.stem.rpartition("-")[2]
        seen.setdefault((path.parent.name, seed), set()).add(
            json.dumps([hashes[n] for n in ("split", "cohorts", "init")])
        )
    assert seen and all(len(kinds) == 1 for kinds in seen.values())


def test_what_is_missing_is_run_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Figure 6 in small, one of six runs being there, and one that was judged by less."""
    small = targets.load("dmpfl-fig6")
    smaller = dict(small.recipe) | {"data": dict(small.recipe["data"]) | {"dataset": "digits"}}
    smaller |= {"model": {"name": "small-cnn"}, "training": {"num_rounds": 8, "local_epochs": 1, "join_ratio": 0.5}}
    target = replace(small, recipe=smaller, seeds=(0,))
    monkeypatch.setattr(targets, "load", lambda _: target)
    monkeypatch.setattr(results, "RUNS", tmp_path / "runs")
    assert [r.home.parent.name for r in results.missing(["dmpfl-fig6"], tmp_path)] == [
        "five-groups-of-four", "fifteen-and-five",
    ]  # fmt: skip
    monkeypatch.setattr(results, "missing", lambda names, of=results.missing: of(names, tmp_path))
    results.played(["dmpfl-fig6"], tmp_path / "out", 1, "cpu")
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    assert results.collect(tmp_path / "out", tmp_path) == 2
    assert results.missing(["dmpfl-fig6"]) == []
    one = tmp_path / "fifteen-and-five" / "dm-pfl-0.json"
    told = json.loads(one.read_text())
    del told["masks"]
    one.write_text(json.dumps(told))
    assert [r.home.parent.name for r in results.missing(["dmpfl-fig6"])] == ["fifteen-and-five"]
