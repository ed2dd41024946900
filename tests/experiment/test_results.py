"""Results written, read back and asked: accuracies, clients' rows, newcomers."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import personafl
from personafl import Ditto, Result, UserError, run
from tests import checks, worlds

ROBUST = {
    "data": {"dataset": "digits", "num_clients": 5},
    "training": {"num_rounds": 2, "join_ratio": 0.6, "local_epochs": 1, "batch_size": 64},
    "evaluation": {
        "eval_every": 2,
        "draws": 2,
        "shift": "label",
        "degrees": [0.0, 1.0],
        "corruptions": ["fog", "gaussian_noise"],
        "severities": [2, 4],
        "rotations": [30],
        "matrix": True,
    },
    "algorithms": [{"name": "fedavg"}, {"name": "local"}],
}


def test_results_are_kept_and_read_back(tmp_path: Path) -> None:
    made = personafl.run(ROBUST, out=tmp_path / "run")
    again = personafl.Result.load(tmp_path / "run")
    for label in ("fedavg", "local"):
        first, second = made[label], again[label]
        assert first.summary == second.summary
        assert first.evaluations.keys() == second.evaluations.keys()
        for name, held in first.evaluations.items():
            assert held.dtype == second.evaluations[name].dtype
            assert np.array_equal(held, second.evaluations[name]), name
    found, summary = made["local"].evaluations, made["local"].summary
    assert summary["shift"]["protocol"] == "label"
    assert summary["shift"]["degrees"].keys() == {"0.0", "1.0"}
    robust = summary["robustness"]
    assert list(robust["corruptions"]) == ["fog", "gaussian_noise"]
    cell = robust["corruptions"]["gaussian_noise"]["4"]
    assert cell["mean"] == pytest.approx(found["corruption_accuracy"][:, 1, 1].mean())
    assert cell["std"] == pytest.approx(found["corruption_accuracy"][:, 1, 1].std())
    assert robust["corruption_average"]["mean"] == pytest.approx(found["corruption_accuracy"].mean())
    assert robust["rotations"]["30.0"]["mean"] == pytest.approx(found["rotation_accuracy"].mean())
    assert robust["expected"]["1.0"]["mean"] == pytest.approx(found["expected_accuracy"][:, -1].mean())
    assert set(made["local"].clients[0]) == {"client", "train", "test", "accuracy", "shift_0", "shift_1"}
    assert made["fedavg"].summary["hashes"] == summary["hashes"]


SMALL: dict[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 4},
    "training": {"num_rounds": 2, "join_ratio": 0.5, "local_epochs": 1, "batch_size": 64},
    "evaluation": {"eval_every": 2, "shift": "none"},
    "algorithms": [{"name": "fedavg"}, {"name": "local"}],
}
QUICK = (
    "training.num_rounds=4",
    "training.local_epochs=1",
    "data.num_clients=5",
    "algorithms=dm-pfl,scaffold",
    "dm-pfl.iterations=1",
)


def test_rows_on_disk_are_part_of_the_run_folder(tmp_path: Path) -> None:
    usual = run(None, *QUICK, out=tmp_path / "usual")
    disk = run(None, *QUICK, out=tmp_path / "disk", store="disk")
    for label in ("dm-pfl", "scaffold"):
        assert disk[label].summary["accuracy"] == usual[label].summary["accuracy"]
        home = tmp_path / "disk" / label / "seed-0"
        assert (home / "store" / "clients" / "store.json").is_file()
        assert not (home / "checkpoint" / "clients.safetensors").exists()
        told = json.loads((home / "checkpoint" / "engine.json").read_text())["store"]
        assert told["home"] == "disk"
        assert told["clients"] == len(disk[label].simulation.store)
        assert told["disk_bytes_per_client"] >= told["bytes_per_client"]
        told = json.loads((tmp_path / "usual" / label / "seed-0" / "checkpoint" / "engine.json").read_text())["store"]
        assert told["home"] == "host" and "disk_bytes_per_client" not in told
    for again in (Result.load(tmp_path / "disk"), Result.load(tmp_path / "usual")):
        for label in ("dm-pfl", "scaffold"):
            x = disk[label].simulation.federation.source.x[:3]
            for c in range(5):
                assert torch.equal(again[label].client(c).predict(x), usual[label].client(c).predict(x))


def test_rows_in_a_folder_elsewhere_are_written_to_the_run_folder(tmp_path: Path) -> None:
    done = run(None, *QUICK, store="disk")
    done.save(tmp_path / "saved")
    again = Result.load(tmp_path / "saved")
    assert again["dm-pfl"].simulation.store.ids == sorted(done["dm-pfl"].simulation.store.ids)


@pytest.mark.parametrize("stop_at", ["fedavg", "local"])
def test_an_interrupted_run_says_that_it_is_partial(tmp_path: Path, stop_at: str) -> None:
    def stop(label: str, seed: int, stages: int, row: dict[str, Any]) -> None:
        if label == stop_at:
            raise KeyboardInterrupt

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(SMALL, seeds=[3, 1], out=folder, watch=stop)
    if stop_at == "fedavg":
        with pytest.raises(UserError, match="run: nothing in this run folder is finished"):
            Result.load(folder)
        return
    line = "Partial: 3 of 4 runs are not finished: fedavg (seed 1), local (seeds 3, 1)."
    assert line in (folder / "table.md").read_text()
    assert line in (folder / "report.html").read_text()
    found = Result.load(folder)
    assert found.missing == [("fedavg", 1), ("local", 3), ("local", 1)]
    assert line in found.table()
    found.save(tmp_path / "again")
    assert sorted(Result.load(tmp_path / "again").missing) == sorted(found.missing)


def test_a_damaged_run_folder_is_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(SMALL | {"algorithms": ["fedavg"]}, out=folder)
    (folder / "fedavg" / "seed-old").mkdir()  # somebody's own; not of the run
    (home,) = [p for p in (folder / "fedavg").iterdir() if (p / "summary.json").is_file()]
    for name in ("summary.json", "metrics.jsonl", "evaluations.npz"):
        whole = (home / name).read_bytes()
        (home / name).write_bytes(whole[:-20])
        with pytest.raises(UserError, match=f"{name}: is (cut short|damaged)"):
            Result.load(folder)
        (home / name).write_bytes(whole)
    assert Result.load(folder).labels == ("fedavg",)


def test_a_run_that_diverged_says_so_wherever_it_is_shown(tmp_path: Path) -> None:
    made = run(SMALL | {"training": SMALL["training"] | {"lr": 1e20}}, out=tmp_path / "run")
    told = made["fedavg"].summary["diverged"]
    left_out = made["fedavg"].summary["faults"]["quarantined"]
    assert (told["clients"], told["of"], told["final"]) == (len(left_out["clients"]), 4, 0)
    assert left_out["clients"] and list(left_out["why"]) == ["its loss is not finite"]
    assert json.loads((tmp_path / "run" / "fedavg" / "seed-0" / "summary.json").read_text())["diverged"] == told
    for text in (
        made.table(),
        (tmp_path / "run" / "table.md").read_text(),
        (tmp_path / "run" / "report.html").read_text(),
    ):
        assert "(diverged)" in text
        assert f"fedavg diverged: loss or model of {told['clients']} of 4 clients was not finite" in text
        assert f"fedavg: {left_out['updates']} updates of {told['clients']} clients were left out" in text
        assert "Partial" not in text


HELD_OUT: dict[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 6, "unseen_ratio": 0.34},
    "training": {"num_rounds": 2, "join_ratio": 0.5, "local_epochs": 1, "batch_size": 20},
    "evaluation": {"eval_every": 2, "shift": "none"},
    "algorithms": [{"name": "fedavg"}, {"name": "fedper"}],
}


@pytest.fixture(scope="module")
def result() -> personafl.Result:
    return personafl.run(HELD_OUT)


def test_a_client_held_out_can_be_asked_like_any_other(result: personafl.Result) -> None:
    sim = result["fedper"].simulation
    assert (sim.federation.num_clients, sim.federation.unseen) == (4, 2)
    x = sim.federation.source.x[:5]
    for c in (4, 5):
        client = result["fedper"].client(c)
        assert client.predict(x).shape == (5, 10)
        assert torch.equal(client.deployed["layers.0.weight"][0], sim.server["layers.0.weight"])
        assert not torch.equal(client.deployed["head.weight"][0], sim.model.initial["head.weight"])
    with pytest.raises(ValueError, match=r"client 6: this federation has clients 0..5"):
        result["fedper"].client(6)


def test_the_accuracy_of_newcomers_is_the_mean_over_them(result: personafl.Result) -> None:
    for label in ("fedavg", "fedper"):
        sim, scores = result[label].simulation, []
        for c in (4, 5):
            x, y = checks.rows_of(sim, c, "test")
            scores.append(float((result[label].client(c).predict(x).argmax(1) == y).double().mean()))
        told = result[label].summary["accuracy"]["unseen"]
        assert told["mean"] == pytest.approx(sum(scores) / 2, abs=1e-6)
        assert told["worst"] == pytest.approx(min(scores), abs=1e-6)


def test_the_table_has_a_column_for_newcomers_only_where_there_are_some(result: personafl.Result) -> None:
    assert "Newcomers" in result.table().splitlines()[0]
    cell = f"{100 * result['fedavg'].summary['accuracy']['unseen']['mean']:.1f}"
    assert cell in result.table().splitlines()[2]
    plain = personafl.run(HELD_OUT | {"data": {"dataset": "digits", "num_clients": 4}})
    assert "unseen" not in plain["fedavg"].summary["accuracy"]
    assert "Newcomers" not in plain.table()
    assert plain["fedavg"].simulation.newcomers() is None


def test_results_read_back_have_the_same_newcomers(result: personafl.Result, tmp_path: Any) -> None:
    result.save(tmp_path / "run")
    again = personafl.Result.load(tmp_path / "run")
    x = result["fedper"].simulation.federation.source.x[:5]
    for c in range(6):
        found, wanted = again["fedper"].client(c), result["fedper"].client(c)
        checks.assert_agree(found.deployed, wanted.deployed)
        assert torch.equal(found.predict(x), wanted.predict(x))  # what is read lies in memory as what was written


@pytest.fixture(scope="module")
def compared() -> personafl.Result:
    recipe: dict[str, Any] = {
        "data": {"dataset": "digits", "partition": "iid", "num_clients": 3},
        "training": {"num_rounds": 2, "local_steps": 1, "batch_size": 2},
        "evaluation": {"eval_every": 1, "degrees": [0.0, 1.0], "draws": 1, "matrix": True},
        "algorithms": ["local", "fedavg-ft"],
    }
    return personafl.run(recipe, seeds=[3, 5])


def test_a_result_is_a_collection_of_its_methods(compared: personafl.Result) -> None:
    assert [(m.label, m.seed) for m in compared] == [("local", 3), ("fedavg-ft", 3), ("local", 5), ("fedavg-ft", 5)]
    assert len(compared) == 4
    assert compared.labels == ("local", "fedavg-ft") and compared.seeds == (3, 5)
    assert "local" in compared and "ditto" not in compared


def test_data_frames_have_a_row_for_each_thing_asked_for(compared: personafl.Result) -> None:
    pytest.importorskip("pandas", reason="the extra pandas is not installed")
    runs = [("local", 3), ("fedavg-ft", 3), ("local", 5), ("fedavg-ft", 5)]
    summary = compared.to_pandas()
    assert list(zip(summary["method"], summary["seed"], strict=True)) == runs
    assert summary["accuracy_personal_mean"].tolist() == [m.summary["accuracy"]["personal"]["mean"] for m in compared]
    assert summary["accuracy_global_mean"].isna().tolist() == [True, False, True, False]  # local has none
    rounds = compared.to_pandas("rounds")
    tuned = rounds[(rounds["method"] == "fedavg-ft") & (rounds["seed"] == 5)]
    assert tuned["phase"].tolist() == ["train", "train", "finetune"]
    assert tuned["personal_mean"].iloc[-1] == compared.of("fedavg-ft", 5).summary["accuracy"]["personal"]["mean"]
    clients = compared.to_pandas("clients")
    assert len(clients) == 4 * 3
    means = clients.groupby(["method", "seed"], sort=False)["accuracy"].mean()
    assert means.tolist() == pytest.approx(summary["accuracy_personal_mean"].tolist(), abs=1e-12)  # a mean of three
    assert compared.to_pandas("inputs").empty  # nothing of the kind was asked for
    shift = compared.to_pandas("shift")
    assert list(shift.columns) == ["method", "seed", "degree", "mean", "std"]
    assert shift["degree"].tolist() == [0.0, 1.0] * 4
    with pytest.raises(personafl.UserError, match="no such table; did you mean rounds"):
        compared.to_pandas("round")


def test_without_pandas_one_line_says_how_to_get_it(
    compared: personafl.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(personafl.UserError, match=r'^to_pandas needs pandas: pip install "personafl\[pandas\]"$'):
        compared.to_pandas()


def test_figures_of_the_report_are_drawn_one_by_one(compared: personafl.Result) -> None:
    over_rounds = compared.plot().axes[0]
    assert over_rounds.lines[0].get_label() == "local"
    assert len(over_rounds.collections) == 2  # a band for each method
    assert compared.plot("shift").axes[0].get_xlabel() == "degree of shift, %"
    assert len(compared.plot("clients").axes[0].get_xticklabels()) == 2
    assert [a.get_title() for a in compared.plot("matrix").axes[:2]] == ["local, seed 3", "fedavg-ft, seed 3"]
    with pytest.raises(personafl.UserError, match=r"evaluation\.rotations=-15,0,15 gives some"):
        compared.plot("rotations")
    with pytest.raises(personafl.UserError, match="no such figure; did you mean shift"):
        compared.plot("shifts")
    shown: Any = compared.plot("clients")
    assert shown._repr_png_().startswith(b"\x89PNG")  # what a notebook asks for


def test_a_run_on_normalised_inputs_is_read_back(tmp_path: Path) -> None:
    """Statistics of each seed's own training data; raw images are what clients are asked."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (120, 1, 8, 8), dtype=torch.uint8, generator=draw)
    data = (x, torch.randint(3, (120,), generator=draw))
    recipe: dict[str, Any] = {
        "data": {"partition": "iid", "num_clients": 3},
        "training": {"num_rounds": 2, "join_ratio": 1.0, "local_epochs": 1, "batch_size": 10},
        "evaluation": {"shift": "none"},
        "algorithms": [{"name": "ditto"}],
    }
    made = run(recipe, data=data, out=tmp_path / "run", seeds=[0, 1])
    assert 'normalize = "standardize"' in (tmp_path / "run" / "recipe.toml").read_text()
    again = Result.load(tmp_path / "run", data=data)
    for seed in (0, 1):
        first, second = made.of("ditto", seed), again.of("ditto", seed)
        norm = first.simulation.federation.source.normalization
        assert norm is not None and norm == second.simulation.federation.source.normalization
        checkpoint = tmp_path / "run" / "ditto" / f"seed-{seed}" / "checkpoint"
        kept = json.loads((checkpoint / "normalization.json").read_text())
        assert (kept["mean"], kept["std"]) == (list(norm.mean), list(norm.std))
        module = first.client(1).module
        assert torch.equal(second.client(1).predict(x), first.client(1).predict(x))
        with torch.no_grad():
            torch.testing.assert_close(module(x), first.client(1).predict(x), rtol=1e-5, atol=1e-5)
            scaled = (x / 255 - torch.tensor(norm.mean)) / torch.tensor(norm.std)
            torch.testing.assert_close(module.network(scaled), module(x), rtol=1e-5, atol=1e-5)
    other = run(recipe, "data.normalize=half", data=data)["ditto"]
    assert other.summary["hashes"]["data"] != made["ditto"].summary["hashes"]["data"]


def test_inputs_and_clients_that_cannot_be_are_named(compared: personafl.Result) -> None:
    method = compared["local"]
    client, shape = method.client(0), tuple(method.simulation.federation.source.x.shape[1:])
    x = np.random.default_rng(0).random((5, *shape), np.float32)
    assert torch.equal(client.predict(x[::-1]), client.predict(x[::-1].copy()))  # lying backwards in memory
    assert torch.equal(client.predict(x.astype(">f4")), client.predict(x))
    wanted = f"must be \\(B, {', '.join(map(str, shape))}\\)"
    for wrong in (
        x[0],
        x[:, :1, :1],
        torch.zeros(5, *shape, dtype=torch.complex64),
        torch.zeros(5, *shape).to_sparse(),
    ):
        with pytest.raises(personafl.UserError, match=wanted):
            client.predict(wrong)
    for no_numbers in (None, "text", [[None]]):
        with pytest.raises(personafl.UserError, match="must be a tensor or an array of numbers"):
            client.predict(no_numbers)  # type: ignore[arg-type]
    for other in (1.0, None, True):
        with pytest.raises(personafl.UserError, match=f"client={other}: must be a whole number"):
            method.client(other)  # type: ignore[arg-type]
    assert method.client(np.int64(2)).id == 2  # type: ignore[arg-type]


READ = """
import pickle, sys, torch
result, inputs, outputs = pickle.load(open(sys.argv[1], "rb"))
for label, of_run in outputs.items():
    assert torch.equal(result[label].client(2).predict(inputs), of_run), label
    assert torch.isfinite(result[label].client(2).module(inputs)).all()
"""


@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_result_can_be_copied_and_pickled(tmp_path: Path, store: str) -> None:
    recipe = SMALL | {"training": SMALL["training"] | {"num_rounds": 1}, "algorithms": [{"name": "ditto"}]}
    made = run(recipe, out=tmp_path / "run", store=store, timed=True)
    inputs = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    outputs = {label: made[label].client(2).predict(inputs) for label in made.labels}
    copied, unpickled = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    for other in (copied, unpickled):
        assert other.table() == made.table()
        for label, of_run in outputs.items():
            assert torch.equal(other[label].client(2).predict(inputs), of_run)
    # A copy has rows of its own: what is written to one reaches no other.
    for other in (copied, unpickled):
        rows = other["ditto"].simulation.store
        rows.scatter(torch.tensor([2]), {n: t * 0 for n, t in rows.gather(torch.tensor([2])).items()})
        assert not torch.equal(other["ditto"].client(2).predict(inputs), outputs["ditto"])
    assert torch.equal(made["ditto"].client(2).predict(inputs), outputs["ditto"])
    with (tmp_path / "result.pkl").open("wb") as file:
        pickle.dump((made, inputs, outputs), file)
    subprocess.run([sys.executable, "-c", READ, tmp_path / "result.pkl"], check=True)


def test_a_simulation_goes_on_from_a_copy() -> None:
    sim = worlds.simulation(Ditto(), num_rounds=2)
    sim.step()
    other = pickle.loads(pickle.dumps(sim))
    assert "seconds" in other.step() and sim.played == 1
    sim.step()
    checks.assert_agree(sim.server, other.server, 0)
