"""The Python door: run, take clients' models away, save and load."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import personafl
from personafl import config, experiment
from personafl.data import partition_file

RECIPE: dict[str, Any] = {
    "data": {"dataset": "digits", "num_clients": 5},
    "training": {"num_rounds": 4, "join_ratio": 0.6, "local_epochs": 1, "batch_size": 10},
    "evaluation": {"eval_every": 2},
    "algorithms": [{"name": "ditto"}, {"name": "dm-pfl-plus", "iterations": 1, "allocation": "erk"}],
}


@pytest.fixture(scope="module")
def result() -> personafl.Result:
    return personafl.run(RECIPE)


def test_every_client_has_a_model_that_predicts(result: personafl.Result) -> None:
    sim = result["ditto"].simulation
    for c in range(5):
        rows = sim.federation.examples("test", torch.tensor([c])).rows[0]
        x, y = sim.federation.source.x[rows], sim.federation.source.y[rows]
        logits = result["ditto"].client(c).predict(x)
        assert logits.shape == (len(rows), 10)
        mine = next(r for r in result["ditto"].clients if r["client"] == c)
        assert float((logits.argmax(1) == y).double().mean()) == pytest.approx(mine["accuracy"])
        with torch.no_grad():
            torch.testing.assert_close(result["ditto"].client(c).module(x), logits, rtol=1e-4, atol=1e-5)


def test_saved_and_loaded_results_predict_the_same(result: personafl.Result, tmp_path: Path) -> None:
    result.save(tmp_path / "run")
    again = personafl.Result.load(tmp_path / "run")
    assert again.methods.keys() == result.methods.keys()
    x = result["ditto"].simulation.federation.source.x[:7]
    for label in ("ditto", "dm-pfl-plus"):
        assert again[label].summary == result[label].summary
        assert again[label].rows == result[label].rows
        assert again[label].clients == result[label].clients
        for c in range(5):
            assert torch.equal(again[label].client(c).predict(x), result[label].client(c).predict(x))
        modules = [r[label].client(3).module for r in (result, again)]
        was, now = (m.state_dict() for m in modules)
        assert was.keys() == now.keys() and all(torch.equal(t, now[n]) for n, t in was.items())
        with torch.no_grad():
            assert torch.equal(*(m(x) for m in modules))
        save_file(was, tmp_path / "client.safetensors")  # which refuses tensors that share memory


QUICK = {
    "training": {"num_rounds": 1, "local_epochs": 1, "batch_size": 64},
    "evaluation": {"draws": 1},
    "algorithms": [{"name": "local"}],
}


def test_a_run_folder_keeps_its_partition_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    feds = [experiment.federation(config.load(RECIPE).with_seed(s)) for s in (0, 1)]
    partition_file.save(feds[0], tmp_path / "mine.json")
    made = personafl.run(QUICK | {"data": {"partition": "mine.json"}}, out=tmp_path / "run")
    made.save(tmp_path / "again")
    partition_file.save(feds[1], tmp_path / "mine.json")  # no longer the same
    monkeypatch.chdir("/")
    for folder in ("run", "again"):
        back = personafl.Result.load(tmp_path / folder)
        assert back["local"].simulation.federation.digest() == made["local"].summary["hashes"]["split"]
        assert back.recipe.data.partition == "mine.json"  # as it was asked for
    partition_file.save(feds[1], tmp_path / "run" / "split.json")
    with pytest.raises(ValueError, match=r"seed-0: the split of this run had hash \w{16}, now it is \w{16}: what "):
        personafl.Result.load(tmp_path / "run")


def test_a_run_on_ones_own_data_is_found_from_elsewhere_and_refused_where_they_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    held = {n: (draw.normal(size=(20, 3)), np.arange(20) % 2) for n in ("anna", "ben")}
    (tmp_path / "homes").mkdir()
    for n, (x, y) in held.items():
        np.savez(tmp_path / "homes" / f"{n}.npz", x=x, y=y)
    np.savez(tmp_path / "all.npz", x=held["anna"][0], y=held["anna"][1])
    personafl.run(QUICK | {"data": {"dataset": "homes/", "partition": "natural"}}, out=tmp_path / "run")
    personafl.run(QUICK | {"data": {"dataset": "all.npz", "num_clients": 2}}, out=tmp_path / "one")
    monkeypatch.chdir("/")
    for folder in ("run", "one"):
        assert len(personafl.Result.load(tmp_path / folder)["local"].clients) == 2
    np.savez(tmp_path / "homes" / "ben.npz", x=-held["ben"][0], y=held["ben"][1])  # the same labels, so the same split
    with pytest.raises(ValueError, match="the data of this run had hash"):
        personafl.Result.load(tmp_path / "run")


def test_images_that_are_corrupted_alike_are_made_once_for_all_seeds() -> None:
    asked = config.load("demo", ["data.corruption=fog", "algorithms=local"])
    _, feds = experiment.resolved(asked, (0, 1))
    assert feds[0].source.x is feds[1].source.x
    assert feds[0].digest() != feds[1].digest()
    assert torch.equal(feds[0].source.x, experiment.federation(asked).source.x)


def test_methods_share_the_draws_of_a_seed() -> None:
    made = personafl.run(RECIPE | {"training": QUICK["training"], "evaluation": {"draws": 1}}, seeds=(0, 1))
    shifts = {key: m.simulation.shift for key, m in made.methods.items()}
    for seed in (0, 1):
        assert shifts["ditto", seed] is shifts["dm-pfl-plus", seed]
        alone = experiment.simulation(made.recipe.with_seed(seed), made.recipe.algorithms[0])
        assert alone.hashes() == made.of("dm-pfl-plus", seed).summary["hashes"]
    assert shifts["ditto", 0] is not shifts["ditto", 1]


def test_predict_takes_arrays_too(result: personafl.Result) -> None:
    x = np.zeros((2, 1, 8, 8))
    assert torch.equal(result["ditto"].client(0).predict(x), result["ditto"].client(0).predict(torch.zeros(2, 1, 8, 8)))


def test_asking_for_what_is_not_there_says_what_is(result: personafl.Result) -> None:
    with pytest.raises(KeyError, match="ditto \\(seed 0\\), dm-pfl-plus \\(seed 0\\)"):
        result["fedavg"]
    with pytest.raises(ValueError, match=r"clients 0\.\.4"):
        result["ditto"].client(5)
    with pytest.raises(ValueError, match="several methods"):
        result.client(0)


def test_the_pieces_by_hand() -> None:
    x = np.random.default_rng(0).normal(size=(90, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    source = personafl.arrays(x, y)
    fed = personafl.Federation.build(source, np.split(np.arange(90), 3), seed=0)
    model = personafl.StackedModel(torch.nn.Linear(4, 2), source.x[:2])
    sim = personafl.Simulation(
        fed, model, personafl.FedAvg(), personafl.Training(num_rounds=20, join_ratio=1.0, lr=0.5)
    )
    sim.run()
    assert sim.rows[-1]["personal"]["mean"] > 0.85


def test_validation_data_are_scored_apart(tmp_path: Path) -> None:
    recipe = RECIPE | {"data": {"dataset": "digits", "num_clients": 5, "validation_share": 0.2}}
    found = personafl.run(recipe)["ditto"]
    assert {"mean", "std"} <= found.rows[-1]["validation"].keys()
    assert found.rows[-1]["validation"] != found.rows[-1]["personal"]
    fed = found.simulation.federation
    held = [set(fed.splits[s].values.tolist()) for s in ("train", "validation", "test")]
    assert sum(map(len, held)) == len(set().union(*held)) == 1797


class TwoOutputs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = torch.nn.Linear(64, 5), torch.nn.Linear(5, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x.flatten(1)).tanh())  # type: ignore[no-any-return]


def test_a_model_of_ones_own_by_dotted_path_and_head_by_pattern() -> None:
    recipe = RECIPE | {
        "model": {"name": "tests.test_experiment:TwoOutputs", "head": "fc.*"},
        "algorithms": [{"name": "fedrep"}],
    }
    found = personafl.run(recipe)["fedrep"].simulation
    assert found.server.keys() == {"body.weight", "body.bias"}


def pairs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.eye(8, dtype=np.float32).repeat(6, 0), np.arange(48) % 2, np.arange(48) // 12


def test_data_of_ones_own_by_dotted_path() -> None:
    recipe = config.load(
        {"data": {"dataset": "tests.test_experiment:pairs", "partition": "natural"}, "algorithms": [{"name": "local"}]}
    )
    fed = experiment.federation(recipe)
    assert fed.num_clients == 4
    assert fed.source.classes == 2


def test_another_seed_gives_another_federation_and_another_start() -> None:
    hashes = []
    for seed in (0, 1):
        recipe = config.load(RECIPE).with_seed(seed)
        hashes.append(experiment.simulation(recipe, recipe.algorithms[0]).hashes())
    assert all(hashes[0][k] != hashes[1][k] for k in ("split", "cohorts", "init", "shift"))


def half(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.nn.functional.cross_entropy(out, y, reduction="none")


def among_two(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (out.topk(2).indices == y.unsqueeze(1)).any(1).float()


def test_loss_and_metric_by_dotted_path() -> None:
    """Half the loss at twice the rate is the same training; the right class among two is a milder score."""
    usual = RECIPE | {"algorithms": [{"name": "fedavg"}], "training": {**RECIPE["training"], "precision": "float64"}}
    own = usual | {
        "training": {**usual["training"], "loss": "tests.test_experiment:half", "lr": 0.2},
        "evaluation": {"eval_every": 2, "metric": "tests.test_experiment:among_two"},
    }
    plain, mine = personafl.run(usual)["fedavg"], personafl.run(own)["fedavg"]
    for n, t in plain.simulation.server.items():
        torch.testing.assert_close(mine.simulation.server[n], t, rtol=1e-10, atol=1e-10)
    assert mine.summary["accuracy"]["personal"]["mean"] > plain.summary["accuracy"]["personal"]["mean"]


def test_what_the_server_knows_of_clients_is_read_back(tmp_path: Path) -> None:
    """FedPAC's heads, FedSelect's masks and shares of contribution live at the server, one row for each client."""
    methods = [{"name": "fedpac"}, {"name": "fedselect", "select_interval": 1}, {"name": "fedavg", "weights": "cowa"}]
    short = {"num_rounds": 3, "join_ratio": 0.6, "local_epochs": 1, "batch_size": 64}
    made = personafl.run(RECIPE | {"algorithms": methods, "training": short, "evaluation": {"shift": "none"}})
    made.save(tmp_path / "run")
    again = personafl.Result.load(tmp_path / "run")
    x = made["fedpac"].simulation.federation.source.x[:7]
    for label in ("fedpac", "fedselect", "fedavg"):
        sims = [r[label].simulation for r in (made, again)]
        rows = [sim.known.gather(sim.everybody) for sim in sims]
        assert rows[0].keys() == rows[1].keys() != set()
        assert all(torch.equal(rows[0][n], rows[1][n]) for n in rows[0])
        for c in range(5):
            assert torch.equal(again[label].client(c).predict(x), made[label].client(c).predict(x))


@pytest.mark.parametrize("name", ["classes", "shards", "quantity", "by-class"])
def test_every_partition_can_be_asked_for_in_a_recipe(name: str) -> None:
    recipe = config.load("demo", [f"data.partition={name}", "data.num_clients=10"])
    fed = experiment.federation(recipe)
    assert fed.num_clients == 10
    again = config.load({**tomllib.loads(config.dump(recipe))})
    assert experiment.federation(again).digest() == fed.digest()


def test_shards_can_be_limited_in_a_recipe() -> None:
    recipe = config.load("demo", ["data.partition=shards", "data.num_clients=10", "data.samples_per_class=20"])
    counts = experiment.federation(recipe).class_counts()
    assert counts.max() == 20
    assert ((counts > 0).sum(1) == 2).all()


def test_a_mixed_data_set_has_a_client_per_source() -> None:
    x, y = torch.rand(40, 4), torch.arange(40) % 2
    source = personafl.Source("two", x, y, 2, sources=np.repeat([0, 1], 20))
    fed = experiment.federation(config.load("demo", ["data.partition=by-source"]), source)
    assert fed.num_clients == 2
    first = fed.splits["train"].padded(torch.tensor([0]))[0]
    assert int(first.max()) < 20
