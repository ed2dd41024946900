"""Checkpoints: a run that was interrupted and gone on with is the run that was not."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor

import personafl
from personafl import Ditto
from personafl.core.errors import Note, UserError
from personafl.core.local_work import ClientState
from personafl.core.types import Params, Round
from personafl.evaluation import report
from personafl.experiment import checkpoint_files, run_folder
from personafl.experiment.checkpoint import Checkpoints
from personafl.experiment.checkpoint_interval import DEFAULT
from personafl.simulation import ranks
from personafl.simulation.ranks import SingleProcess
from personafl.storage import files, lock
from personafl.storage.lock import locked
from tests import kills, worlds
from tests.simulation.test_ranks import together
from tests.storage.test_files import recorded

QUICK: dict[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 6},
    "training": {"num_rounds": 4, "local_epochs": 1, "join_ratio": 0.5, "lr": 0.1},
    "evaluation": {"degrees": [0.0, 1.0], "draws": 1, "eval_every": 1},
}


@pytest.fixture(autouse=True)
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time of a quick run, and are the report's tests' to look at."""
    monkeypatch.setattr(report, "html", lambda *_, **__: "a page")


class CutError(Exception):
    """The end of a run from outside."""


def cut_at(stage: int) -> Callable[..., None]:
    """Told of every stage, ends the run at one."""
    count = 0

    def watch(*_: object) -> None:
        nonlocal count
        count += 1
        if count == stage:
            raise CutError

    return watch


def run(out: Path, *methods: object, cut: int = 0, **settings: Any) -> personafl.Result | None:
    """A quick run, saved after every round; cut behind a stage where that is asked."""
    recipe = QUICK | {"algorithms": list(methods)}
    sections = {k: QUICK.get(k, {}) | settings.pop(k) for k in list(settings) if k in (*QUICK, "faults")}
    words: dict[str, Any] = {"out": out, "quiet": True, "checkpoint_every": 1, "threads": 1} | settings
    if not cut:
        return personafl.run(recipe | sections, **words)
    with pytest.raises(CutError):
        personafl.run(recipe | sections, watch=cut_at(cut), **words)
    return None


@pytest.mark.filterwarnings("ignore:.*rounds leave room", "ignore:allocation=")
@pytest.mark.parametrize(
    ("method", "store"),
    [
        ("ditto", "disk"),
        ("dm-pfl", "host"),
        ("dm-pfl-plus", "disk"),
        ("co-pfl", "host"),
        ("fedpac", "disk"),
        ("fedphp", "host"),
        ("scaffold", "host"),
        ("fedpews", "host"),
    ],
)
def test_a_run_gone_on_with_is_the_run_that_was_not_interrupted(method: str, store: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", method, store=store)
    run(tmp_path / "cut", method, store=store, cut=3)
    assert run_folder.missing(tmp_path / "cut") == [(method, 0)]
    result = personafl.resume(tmp_path / "cut", quiet=True)
    assert kills.differences(tmp_path / "cut", tmp_path / "whole") == []
    assert [r["round"] for r in result[method].rows] == [0, 1, 2, 3]
    assert whole is not None
    mine, its = (r[method].simulation for r in (result, whole))
    for get in (
        lambda s: s.server,
        lambda s: s.store.gather(torch.arange(6)),
        lambda s: s.known.gather(torch.arange(6)),
    ):
        assert list(get(mine)) == list(get(its))  # sums over tensors go by the order of their names


def test_what_is_scored_before_aggregation_goes_on_too(tmp_path: Path) -> None:
    """The cohort that was trained, and the accuracy clients left with, are part of the state."""
    settings = {"evaluation": {"when": "after_local", "eval_every": 2}}
    run(tmp_path / "whole", "fedphp", **settings)
    run(tmp_path / "cut", "fedphp", cut=3, **settings)
    personafl.resume(tmp_path / "cut", quiet=True)
    assert kills.differences(tmp_path / "cut", tmp_path / "whole") == []


def test_results_that_are_on_their_way_arrive_in_the_run_that_goes_on(tmp_path: Path) -> None:
    """Late results of the round before the cut are used in the one behind it."""
    settings = {"faults": {"straggler_ratio": 0.5, "late": "stale", "drop_rate": 0.2}}
    whole = run(tmp_path / "whole", "ditto", **settings)
    assert whole is not None and any(r.get("stale") for r in whole["ditto"].rows)
    run(tmp_path / "cut", "ditto", cut=3, **settings)
    personafl.resume(tmp_path / "cut", quiet=True)
    assert kills.differences(tmp_path / "cut", tmp_path / "whole") == []


def test_the_working_directory_may_change_during_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a folder that is named by where it is from here."""
    run(tmp_path / "whole", "ditto", "local", store="disk")

    def moving(count: int) -> Callable[..., None]:
        cut = cut_at(count)

        def watch(*told: object) -> None:
            os.chdir("/")
            cut(*told)

        return watch

    monkeypatch.chdir(tmp_path)
    with pytest.raises(CutError):
        run(Path("cut"), "ditto", "local", store="disk", watch=moving(2))
    os.chdir(tmp_path)
    personafl.resume("cut", watch=moving(99))
    os.chdir(tmp_path)
    assert kills.differences(tmp_path / "cut", tmp_path / "whole") == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cut", "whole"]


def test_finished_methods_and_seeds_are_not_run_again(tmp_path: Path) -> None:
    run(tmp_path / "whole", "fedavg", "local", seeds=[3, 1])
    run(tmp_path / "cut", "fedavg", "local", seeds=[3, 1], cut=4 + 4 + 4 + 2)  # in the last method of the last seed
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "cut").glob("*/seed-*/summary.json")}
    assert len(before) == 3
    told: list[tuple[str, int, int]] = []

    def watch(label: str, seed: int, _: int, row: dict[str, Any]) -> None:
        told.append((label, seed, row["round"]))

    result = personafl.resume(tmp_path / "cut", watch=watch)
    assert told == [("local", 1, 2), ("local", 1, 3)]  # from the row behind its last checkpoint
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert kills.differences(tmp_path / "cut", tmp_path / "whole") == []
    assert list(result.methods) == [("fedavg", 3), ("local", 3), ("fedavg", 1), ("local", 1)]


def test_going_on_with_a_finished_run_reads_it(tmp_path: Path) -> None:
    first = run(tmp_path / "a", "ditto")
    assert first is not None
    again = personafl.resume(tmp_path / "a", watch=lambda *_: pytest.fail("it was run again"))
    assert again["ditto"].summary == first["ditto"].summary
    x = first["ditto"].simulation.federation.source.x[:5]
    assert torch.equal(again["ditto"].client(2).predict(x), first["ditto"].client(2).predict(x))


def test_arrays_and_modules_are_given_again(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.rand(80, 5, generator=draw), torch.arange(80) % 4
    module = torch.nn.Linear(5, 4)
    words: dict[str, Any] = {"quiet": True, "threads": 1, "checkpoint_every": 1}
    training = {"num_rounds": 3, "join_ratio": 1.0}
    asked: dict[str, Any] = {"data": {"dataset": (x, y), "num_clients": 4, "partition": "iid"}, "model": module}
    whole: dict[str, Any] = {"algorithms": ["ditto"], "training": training, **words, **asked}
    personafl.run(**whole, out=tmp_path / "whole")
    with pytest.raises(CutError):
        personafl.run(**(whole | {"watch": cut_at(2)}), out=tmp_path / "cut")
    with pytest.raises(UserError, match="given"):
        personafl.resume(tmp_path / "cut")
    other = torch.nn.Linear(5, 4)  # other first weights: those of the run are taken
    personafl.resume(tmp_path / "cut", data=(x, y), model=other, quiet=True)
    assert kills.differences(tmp_path / "cut", tmp_path / "whole") == []
    with pytest.raises(UserError, match="the data of this run had hash"):
        personafl.resume(tmp_path / "cut", data=(x + 1, y), model=other, quiet=True)


class Hollow(Ditto):
    """Keeps a tensor without elements, and one more from a round on where that is asked."""

    late: int = 99

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        return super().init_clients(params, ids) | {"aux/none": torch.zeros(len(ids), 0)}

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
        new = super().keep(kept, local, rnd)
        return new | ({"aux/more": new["aux/none"] + 1} if rnd.number >= self.late else {})


@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_client_may_keep_tensors_without_elements(store: str, tmp_path: Path) -> None:
    run(tmp_path / "whole", Hollow(), store=store)
    run(tmp_path / "cut", Hollow(), store=store, cut=3)
    personafl.resume(tmp_path / "cut", algorithms=[Hollow()], quiet=True)
    assert kills.differences(tmp_path / "cut", tmp_path / "whole") == []


def test_what_could_not_be_gone_on_with_is_refused_in_the_round_it_comes_up(tmp_path: Path) -> None:
    told: list[int] = []
    with pytest.raises(UserError, match="'aux/more': clients keep it but do not begin with it"):
        run(tmp_path / "a", type("Late", (Hollow,), {"late": 2})(), watch=lambda *row: told.append(row[3]["round"]))
    assert told == [0, 1]


# What is damaged


def newest(folder: Path) -> Path:
    return max((folder / "ditto" / "seed-0" / "progress").iterdir())


def flip(path: Path, at: int = -5) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda p: os.truncate(p / "clients.safetensors", 100), "clients.safetensors: is cut short, 100 of"),
        (lambda p: flip(p / "state.safetensors"), "state.safetensors: is damaged"),
        (lambda p: (p / "state.safetensors").unlink(), "state.safetensors: is missing"),
        (lambda p: flip(p / "manifest.json", 40), "manifest.json: is damaged"),
        (lambda p: (p / "manifest.json").write_text("{}"), "manifest.json: is damaged"),
        (lambda p: (p / "manifest.json").write_text('{"format": 99, "sha256": ""}'), "format 99, this version reads"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json: is missing"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    damage: Callable[[Path], object], told: str, tmp_path: Path, whole_and_cut: tuple[Path, Path]
) -> None:
    whole, cut = whole_and_cut
    out = tmp_path / "cut"
    shutil.copytree(cut, out)
    damage(newest(out))
    with pytest.warns(Note, match=f"a checkpoint cannot be used: .*{told}"):
        personafl.resume(out, quiet=True)
    assert kills.differences(out, whole) == []


@pytest.fixture(scope="module")
def whole_and_cut(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    box = tmp_path_factory.mktemp("runs")
    run(box / "whole", "ditto")
    run(box / "cut", "ditto", cut=4)
    return box / "whole", box / "cut"


def test_rows_on_disk_go_back_to_the_checkpoint_before_a_damaged_one(
    tmp_path: Path, cut_on_disk: dict[int, Path]
) -> None:
    out = tmp_path / "cut"
    run(tmp_path / "whole", "ditto", store="disk")
    shutil.copytree(cut_on_disk[4], out)
    flip(newest(out) / "state.safetensors")
    with pytest.warns(Note, match="a checkpoint cannot be used"):
        personafl.resume(out, quiet=True)
    assert kills.differences(out, tmp_path / "whole") == []


def test_what_is_named_is_on_the_disk_and_the_last_word_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = recorded(monkeypatch)
    run(tmp_path / "a", "ditto", training={"num_rounds": 1})
    at = calls.index(("replace", "00000001"))
    begin = calls.index(("replace", "00000000"))
    saved = calls[begin + 1 : at]
    for name in ("state.safetensors", "clients.safetensors", "manifest.json.part", "metrics.jsonl"):
        written, synced = (max(i for i, c in enumerate(saved) if c == (call, name)) for call in ("write", "fsync"))
        assert written < synced, name
    manifest = saved.index(("write", "manifest.json.part"))
    assert all(saved.index(("fsync", f"{n}.safetensors")) < manifest for n in ("state", "clients"))
    assert saved.index(("fsync", "metrics.jsonl")) < manifest
    assert saved[-1] == ("fsync", "00000001.part")  # the names in it, before it has its own
    assert calls[at + 1] == ("fsync", "progress")
    last = [name for call, name in calls[at:] if call == "replace" and name in ("manifest.json", "summary.json")]
    assert last == ["manifest.json", "summary.json"]


def test_what_is_left_of_a_checkpoint_that_was_not_finished_is_no_part_of_the_next(tmp_path: Path) -> None:
    sim = worlds.simulation(Ditto(), num_rounds=2)
    sim.step()
    left = tmp_path / "progress" / f"00000000{files.PART}"
    left.mkdir(parents=True)
    (left / "known.safetensors").write_text("of another time")
    Checkpoints(tmp_path, sim, DEFAULT, None, [], 0.0).write()
    assert sorted(p.name for p in left.parent.iterdir()) == ["00000000"]
    found = sorted(p.name for p in (left.parent / "00000000").iterdir())
    assert found == ["clients.safetensors", "manifest.json", "state.safetensors"]


def test_two_checkpoints_are_kept_and_none_is_left(whole_and_cut: tuple[Path, Path]) -> None:
    whole, cut = whole_and_cut
    assert sorted(p.name for p in (cut / "ditto" / "seed-0" / "progress").iterdir()) == ["00000003", "00000004"]
    assert not (whole / "ditto" / "seed-0" / "progress").exists()


def test_without_a_whole_checkpoint_nothing_is_begun_anew(tmp_path: Path, whole_and_cut: tuple[Path, Path]) -> None:
    out = tmp_path / "cut"
    shutil.copytree(whole_and_cut[1], out)
    for path in (out / "ditto" / "seed-0" / "progress").iterdir():
        flip(path / "state.safetensors")
    with (
        pytest.warns(Note, match="cannot be used"),
        pytest.raises(UserError, match="none of its checkpoints can be used; remove this folder to run it anew"),
    ):
        personafl.resume(out, quiet=True)


def test_rows_behind_the_checkpoint_and_a_torn_line_are_cut(tmp_path: Path, whole_and_cut: tuple[Path, Path]) -> None:
    whole, cut = whole_and_cut
    out = tmp_path / "cut"
    shutil.copytree(cut, out)
    shutil.rmtree(newest(out))  # so that one row is behind the last
    rows = out / "ditto" / "seed-0" / "metrics.jsonl"
    kept = rows.read_text().splitlines(keepends=True)[:3]
    with rows.open("a") as file:
        file.write('{"round": 4, "pha')
    personafl.resume(out, quiet=True)
    assert rows.read_text().splitlines(keepends=True)[:3] == kept  # not touched, seconds and all
    assert kills.differences(out, whole) == []


def test_rows_on_disk_do_not_go_back_to_a_state_that_does_not_fit(tmp_path: Path, cut_on_disk: dict[int, Path]) -> None:
    """They have been written to since, and stay so."""
    out = tmp_path / "cut"
    shutil.copytree(cut_on_disk[0], out)
    path = newest(out) / "manifest.json"
    told = json.loads(path.read_text())
    del told["sha256"]
    told["state"]["played"] = 3
    path.write_text(json.dumps(told | {"sha256": checkpoint_files.digest(told)}))
    store = out / "ditto" / "seed-0" / "store"
    before = {p: p.read_bytes() for p in store.rglob("*.*")}
    with pytest.raises(UserError, match="3 stages with 0 rows are not of this run"):
        personafl.resume(out, quiet=True)
    assert {p: p.read_bytes() for p in store.rglob("*.*")} == before


def test_rows_of_clients_on_disk_that_are_damaged_are_found(tmp_path: Path) -> None:
    run(tmp_path / "whole", "ditto", store="disk")
    run(tmp_path / "cut", "ditto", store="disk", cut=4)
    path = tmp_path / "cut" / "ditto" / "seed-0" / "store" / "clients" / "personal%2Flayers.0.weight.rows"
    for row in range(6):  # those written in the last round are in the undo file too
        flip(path, row * path.stat().st_size // 1024)
    with (
        pytest.warns(Note, match="damaged, the rows of clients"),
        pytest.raises(UserError, match="none of its checkpoints can be used"),
    ):
        personafl.resume(tmp_path / "cut", quiet=True)


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint/clients.safetensors",
        "checkpoint/server.safetensors",
        "checkpoint/initial.safetensors",
        "checkpoint/sample_outputs.json",
        "checkpoint/state.safetensors",
        "checkpoint/manifest.json",
        "metrics.jsonl",
        "clients.csv",
        "evaluations.npz",
        "summary.json",
    ],
)
def test_a_finished_run_that_lost_or_changed_a_file_is_not_loaded(
    name: str, tmp_path: Path, whole_and_cut: tuple[Path, Path]
) -> None:
    out = tmp_path / "a"
    shutil.copytree(whole_and_cut[0], out)
    path = out / "ditto" / "seed-0" / name
    flip(path, len(path.read_bytes()) // 2)
    with pytest.raises(UserError, match=rf"{path.name}: is damaged"):
        personafl.Result.load(out)
    path.unlink()
    with pytest.raises(UserError, match=rf"{path.name}: is missing|nothing in this run folder is finished"):
        personafl.Result.load(out)


def test_a_finished_run_without_its_store_is_not_loaded(tmp_path: Path) -> None:
    run(tmp_path / "a", "ditto", store="disk")
    store = tmp_path / "a" / "ditto" / "seed-0" / "store"
    flip(store / "clients" / "personal%2Flayers.0.weight.rows", 3)
    result = personafl.Result.load(tmp_path / "a")
    with pytest.raises(UserError, match="damaged, the rows of clients"):
        [result["ditto"].client(c) for c in range(6)]
    shutil.rmtree(store)
    with pytest.raises(UserError, match="no store here"):
        personafl.Result.load(tmp_path / "a")


# Several ranks


def two_ranks(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something on two ranks, which are threads here."""
    mine = threading.local()

    @contextmanager
    def process_group(place: str) -> Iterator[SingleProcess]:
        yield mine.world

    def one(world: SingleProcess) -> None:
        mine.world = world
        work()

    with monkeypatch.context() as patched:
        patched.setattr(ranks, "launched", lambda: 2)
        patched.setattr(ranks, "process_group", process_group)
        together(2, one)


def without_the_newest(path: Path) -> None:
    """A store that cannot go back to its last commit."""
    told = json.loads(path.read_text())
    del told["rows"][max(told["rows"], key=int)]
    path.write_text(json.dumps(told))


@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.filterwarnings("ignore:a checkpoint cannot be used")
def test_ranks_go_on_from_a_checkpoint_all_of_them_have(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest file of the second is damaged, or its rows cannot go back: the first goes further back with it."""
    words: dict[str, Any] = {"quiet": True, "checkpoint_every": 1, "threads": 1, "store": store}
    recipe = QUICK | {"algorithms": ["ditto"]}
    cut = cut_at(4)
    two_ranks(lambda: personafl.run(recipe, out=tmp_path / "whole", **words), monkeypatch)
    with pytest.raises(CutError):
        two_ranks(lambda: personafl.run(recipe, out=tmp_path / "cut", watch=cut, **words), monkeypatch)
    if store == "host":
        flip(newest(tmp_path / "cut") / "state-1.safetensors")
    else:
        without_the_newest(tmp_path / "cut" / "ditto" / "seed-0" / "store-1" / "clients" / "commits.json")
    rounds: list[int] = []
    two_ranks(
        lambda: personafl.resume(tmp_path / "cut", watch=lambda *told: rounds.append(told[3]["round"])), monkeypatch
    )
    assert rounds == [3]
    assert kills.differences(tmp_path / "cut", tmp_path / "whole") == []


# More rounds


@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_finished_run_goes_on_beyond_its_end(store: str, tmp_path: Path) -> None:
    run(tmp_path / "long", "ditto", store=store, training={"num_rounds": 6})
    run(tmp_path / "short", "ditto", store=store)
    personafl.resume(tmp_path / "short", "training.num_rounds=6", quiet=True)
    assert run_folder.read(tmp_path / "short").rounds == 6
    assert "num_rounds = 6" in (tmp_path / "short" / "recipe.toml").read_text()
    assert kills.differences(tmp_path / "short", tmp_path / "long") == []
    found = personafl.Result.load(tmp_path / "short")["ditto"]
    assert found.summary["rounds"] == 6 and len(found.rows) == 6


def test_an_interrupted_run_goes_on_beyond_its_end(tmp_path: Path) -> None:
    run(tmp_path / "long", "fedavg-ft", training={"num_rounds": 6})
    run(tmp_path / "short", "fedavg-ft", cut=2)  # before its closing stage
    personafl.resume(tmp_path / "short", "training.num_rounds=6", quiet=True)
    assert kills.differences(tmp_path / "short", tmp_path / "long") == []


def test_a_run_that_was_stopped_early_is_not_made_longer_by_going_on(tmp_path: Path) -> None:
    """It reaches its target in the first rounds and is cut in what follows them at once."""
    settings = {"training": {"num_rounds": 12, "target": 0.2}}
    whole = run(tmp_path / "whole", "fedavg-ft", **settings)
    assert whole is not None and whole["fedavg-ft"].summary["stopped"]["rounds"] < 12
    stages = len(whole["fedavg-ft"].rows)
    run(tmp_path / "cut", "fedavg-ft", cut=stages - 1, **settings)
    personafl.resume(tmp_path / "cut", quiet=True)
    assert kills.differences(tmp_path / "cut", tmp_path / "whole") == []


def test_a_longer_run_that_was_interrupted_too_is_not_taken_for_finished(tmp_path: Path) -> None:
    run(tmp_path / "long", "ditto", training={"num_rounds": 6})
    run(tmp_path / "short", "ditto")
    with pytest.raises(CutError):
        personafl.resume(tmp_path / "short", "training.num_rounds=6", watch=cut_at(1))
    assert run_folder.missing(tmp_path / "short") == [("ditto", 0)]
    personafl.resume(tmp_path / "short", quiet=True)
    assert kills.differences(tmp_path / "short", tmp_path / "long") == []


@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.filterwarnings("ignore:a checkpoint cannot be used")
def test_a_longer_run_that_ended_before_its_summary_goes_on(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is the new one, its summary still that of the shorter run."""
    run(tmp_path / "long", "ditto", store=store, training={"num_rounds": 6})
    run(tmp_path / "short", "ditto", store=store)
    real = files.publish

    def cut(part: Path, path: Path) -> None:
        if path.name == "summary.json":
            raise CutError
        real(part, path)

    with monkeypatch.context() as patched:
        patched.setattr(files, "publish", cut)
        with pytest.raises(CutError):
            personafl.resume(tmp_path / "short", "training.num_rounds=6", quiet=True)
    assert run_folder.missing(tmp_path / "short") == [("ditto", 0)]
    personafl.resume(tmp_path / "short", quiet=True)
    assert kills.differences(tmp_path / "short", tmp_path / "long") == []


@pytest.mark.filterwarnings("ignore:.*rounds leave room", "ignore:allocation=")
@pytest.mark.parametrize(
    ("method", "settings", "told"),
    [
        (
            "fedavg-ft",
            {},
            r"fedavg-ft with seed 0 cannot be continued to training\.num_rounds=9\. .* the stage 'finetune'",
        ),
        ("dm-pfl", {}, r"dm-pfl with seed 0 .*\. Its training depends on the number of rounds\."),
        ("fedavg", {"training": {"target": 0.01}}, "Its training was stopped after 1 rounds"),
        ("co-pfl", {}, r"co-pfl with seed 0 .*\. The shape of its state depends on the number of rounds\."),
        ("fedselect", {}, r"fedselect with seed 0 .*\. Its schedule depends on the number of rounds\."),
    ],
)
def test_methods_that_cannot_go_on_say_why(method: str, settings: dict[str, Any], told: str, tmp_path: Path) -> None:
    run(tmp_path / "a", "local", method, **settings)
    with pytest.raises(UserError, match=told):
        personafl.resume(tmp_path / "a", "training.num_rounds=9")
    assert run_folder.read(tmp_path / "a").rounds == 4  # nothing was changed
    assert run_folder.missing(tmp_path / "a") == []


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("training.lr=0.2", "resume training.lr=0.2: a run goes on as it began; training.num_rounds=N may be given"),
        ("training.num_rounds=2", "training.num_rounds=2: the run is one of 4 rounds; give as many or more"),
        ("training.num_rounds=x", "training.num_rounds='x': must be a whole number"),
        ("faster", "resume faster: a run goes on as it began"),
    ],
)
def test_other_overrides_are_refused(override: str, told: str, whole_and_cut: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match=told):
        personafl.resume(whole_and_cut[0], override)


def test_the_recipe_of_a_run_is_spelt_as_it_was_when_rounds_are_added(tmp_path: Path) -> None:
    run(tmp_path / "a", "ditto")
    before = (tmp_path / "a" / "recipe.toml").read_text()
    personafl.resume(tmp_path / "a", "training.num_rounds=5", quiet=True)
    assert (tmp_path / "a" / "recipe.toml").read_text() == before.replace("num_rounds = 4", "num_rounds = 5")
    personafl.resume(tmp_path / "a", quiet=True)  # and known as what it is now


def test_a_recipe_that_was_changed_is_refused(tmp_path: Path, whole_and_cut: tuple[Path, Path]) -> None:
    out = tmp_path / "cut"
    shutil.copytree(whole_and_cut[1], out)
    text = (out / "recipe.toml").read_text()
    (out / "recipe.toml").write_text(text.replace("lr = 0.1", "lr = 0.2"))
    with pytest.raises(UserError, match=r"recipe.toml: was changed since the run began"):
        personafl.resume(out)


@pytest.mark.parametrize(
    "change",
    [
        {"threads": 0},
        {"threads": "a"},
        {"threads": 10**9},
        {"threads_per_client": 0},
        {"ranks": "2"},
        {"memory": "x"},
        {"chunk": -1},
        {"new": 1},
    ],
)
def test_conditions_no_run_has_are_refused(
    change: dict[str, Any], tmp_path: Path, whole_and_cut: tuple[Path, Path]
) -> None:
    out = tmp_path / "cut"
    shutil.copytree(whole_and_cut[1], out)
    told = json.loads((out / "run.json").read_text())
    told["conditions"] |= change
    (out / "run.json").write_text(json.dumps(told))
    with pytest.raises(UserError, match=r"run.json: not written by personafl run"):
        personafl.resume(out)


@pytest.mark.parametrize("name", ["ditto/seed-0/checkpoint/manifest.json", "ditto/seed-0/summary.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(
    name: str, tmp_path: Path, whole_and_cut: tuple[Path, Path]
) -> None:
    out = tmp_path / "a"
    shutil.copytree(whole_and_cut[0], out)
    (out / name).unlink()
    os.mkfifo(out / name)
    with pytest.raises(UserError):
        personafl.Result.load(out)


@pytest.mark.parametrize(
    "name",
    [
        "recipe.toml",
        "run.json",
        "{home}/metrics.jsonl",
        "{home}/checkpoint/initial.safetensors",
        "{home}/checkpoint/sample_outputs.json",
        "{home}/store/clients/ids.bin",
        "{home}/store/clients/sums.bin",
        "{home}/store/clients/personal%2Fhead.weight.rows",
        "{home}/store/clients/undo-{number}.bin",
        "{home}/store/clients/store.json",
        "{home}/store/clients/commits.json",
        "{home}/progress/0000000{number}/state.safetensors",
        "{home}/progress/0000000{number}/manifest.json",
    ],
)
@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.filterwarnings("ignore:a checkpoint cannot be used")
def test_a_pipe_in_place_of_a_file_of_an_unfinished_run_is_refused(
    name: str, at: int, tmp_path: Path, cut_on_disk: dict[int, Path]
) -> None:
    """All its checkpoints, where it is one of theirs; in a run that had one alone there is no other to go back to."""
    out = tmp_path / "cut"
    shutil.copytree(cut_on_disk[at], out)
    for number in range(max(at - 1, 0), at + 1):
        path = out / name.format(home="ditto/seed-0", number=number)
        path.unlink()
        os.mkfifo(path)
    with pytest.raises(UserError):
        personafl.resume(out, quiet=True)


@pytest.fixture(scope="module")
def cut_on_disk(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs that were ended behind their first checkpoint, and behind their last."""
    box = tmp_path_factory.mktemp("runs")
    found = {at: box / str(at) for at in (0, 4)}
    run(found[4], "ditto", store="disk", cut=4)
    run(found[0], "ditto", store="disk", cut=1, checkpoint_every=9)
    return found


def test_what_is_no_run_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("nope", "empty", "a/nope", "."):
        with pytest.raises(UserError, match=r"not a run folder, it has no run.json"):
            personafl.resume(name)


def test_a_method_and_seed_of_a_run_stands_for_the_run(whole_and_cut: tuple[Path, Path]) -> None:
    assert personafl.resume(whole_and_cut[0] / "ditto" / "seed-0", quiet=True).labels == ("ditto",)


def test_a_method_of_the_run_that_is_not_given_again_is_named(whole_and_cut: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match="the run has a method ditto, and algorithms has fedavg alone"):
        personafl.Result.load(whole_and_cut[0], algorithms=["fedavg"])


def test_the_command_to_go_on_is_that_of_as_many_processes() -> None:
    assert run_folder.command(Path("runs/a b"), 1) == "personafl resume 'runs/a b'"
    assert run_folder.command(Path("r"), 2) == "torchrun --nproc-per-node 2 -m personafl resume r"


# When, and by whom


def test_one_of_two_gets_a_folder(tmp_path: Path) -> None:
    for i in range(50):
        got: list[str] = []
        start, end = threading.Barrier(2), threading.Barrier(2)

        def claim(folder: Path = tmp_path / str(i), got: list[str] = got, start: Any = start, end: Any = end) -> None:
            start.wait()
            try:
                with run_folder.claimed(folder):
                    got.append("mine")
                    end.wait()
            except UserError as e:
                got.append(str(e))
                end.wait()

        both = [threading.Thread(target=claim) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert got.count("mine") == 1
        assert any("is writing to this folder" in text for text in got)
        assert list((tmp_path / str(i)).iterdir()) == []  # the lock is gone with who had it


def test_a_folder_that_was_written_to_before_it_was_claimed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a run that began and ended between the look at the folder and the lock."""

    def late(path: Path, **options: Any) -> Any:
        path.with_name("recipe.toml").write_text("of another run")
        return FileLock(path, **options)

    monkeypatch.setattr(lock, "FileLock", late)
    with pytest.raises(UserError, match="the folder is not empty"), run_folder.claimed(tmp_path / "a"):
        pass


def test_a_folder_that_is_written_to_is_nobody_elses(whole_and_cut: tuple[Path, Path]) -> None:
    whole, _ = whole_and_cut
    with locked(whole):
        with pytest.raises(UserError, match=f"process {os.getpid()} on .* is writing to this folder"):
            personafl.resume(whole)
        assert personafl.Result.load(whole)["ditto"].rows  # reading is


def test_going_on_elsewhere_is_told(tmp_path: Path, whole_and_cut: tuple[Path, Path]) -> None:
    out = tmp_path / "cut"
    shutil.copytree(whole_and_cut[1], out)
    path = newest(out) / "manifest.json"
    told = json.loads(path.read_text())
    del told["sha256"]
    told["environment"]["torch"] = "1.0"
    path.write_text(json.dumps(told | {"sha256": checkpoint_files.digest(told)}))
    with pytest.warns(Note, match=r"goes on elsewhere than it began.*torch 1.0 then"):
        personafl.resume(out, quiet=True)
