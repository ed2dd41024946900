"""What a person sees: commands, run folders, and one clear line for every wrong input."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import personafl
from personafl import cli, config, experiment
from personafl.config.recipe import SECTIONS
from personafl.data.corruptions import PARAMETERS, STANDARD
from personafl.models import StackedModel
from personafl.models.stacked import Execution

QUICK = [
    "training.num_rounds=4",
    "training.local_epochs=1",
    "data.num_clients=5",
    "dm-pfl.iterations=1",
    "dm-pfl-plus.iterations=1",
]


class Said:
    """The end of a command: exit code and what it printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    """Run a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["personafl", *words])
        try:
            cli.main()
            code = 0
        except SystemExit as e:
            code = int(e.code or 0)
        return Said(code, *capsys.readouterr())

    return run


def quick(*labels: str) -> list[str]:
    """The quickest settings for these methods."""
    return [q for q in QUICK if q.split(".")[0] in ("training", "data", *labels)] + [f"algorithms={','.join(labels)}"]


def test_a_run_writes_its_folder_and_prints_a_table(call, tmp_path: Path) -> None:
    said = call("run", *quick("local", "fedavg-ft", "dm-pfl"), "--out", "here", "--seeds", "1,2")
    assert said.code == 0, said.err
    for word in ("No shift", "Full shift", "Average", "MiB", "GFLOP", "Seconds", "local", "dm-pfl", "Evaluated model"):
        assert word in said.out
    here = tmp_path / "here"
    assert {p.name for p in here.iterdir()} == {
        "recipe.toml",
        "run.json",
        "table.md",
        "report.html",
        "local",
        "fedavg-ft",
        "dm-pfl",
    }
    for label in ("local", "fedavg-ft", "dm-pfl"):
        for seed in ("seed-1", "seed-2"):
            home = here / label / seed
            files = {"metrics.jsonl", "clients.csv", "evaluations.npz", "summary.json", "checkpoint"}
            assert {p.name for p in home.iterdir()} == files
    rows = [json.loads(line) for line in (here / "fedavg-ft" / "seed-1" / "metrics.jsonl").read_text().splitlines()]
    assert [r["round"] for r in rows] == [0, 1, 2, 3, 4]  # four rounds and the fine-tuning stage
    with (here / "local" / "seed-1" / "clients.csv").open() as f:
        assert [r["client"] for r in csv.DictReader(f)] == ["0", "1", "2", "3", "4"]
    assert "<svg" in (here / "report.html").read_text()
    again = config.load(here / "recipe.toml")
    assert again.training.num_rounds == 4
    assert again.model.name == "mlp"  # what auto stood for


def test_summary_has_the_agreed_names(call, tmp_path: Path) -> None:
    assert call("run", *quick("dm-pfl"), "--out", "o", "--quiet").code == 0
    s = json.loads((tmp_path / "o" / "dm-pfl" / "seed-0" / "summary.json").read_text())
    assert set(s) == {
        "algorithm", "label", "seed", "rounds", "evaluated_model", "settings", "lr", "environment", "accuracy", "shift",
        "communication", "compute", "time", "hashes", "masks", "metric",
    }  # fmt: skip
    means = {"clients", "similarity", "density", "overlap", "shared", "whole"}
    assert set(s["masks"]) == means | {"ids", "pairs", "by_client"}
    assert set(s["masks"]["whole"]) == {"similarity", "density", "overlap", "shared"}
    layers = {"layers.0.weight", "layers.1.weight", "head.weight"}
    assert all(set(s["masks"][what]) == layers for what in ("similarity", "density", "overlap", "shared"))
    assert s["metric"] == {"name": "accuracy", "better": "higher"}
    assert set(s["environment"]) == {
        "device",
        "hardware",
        "threads",
        "precision",
        "execution",
        "torch",
        "version",
        "commit",
    }
    assert set(s["accuracy"]) == {"personal", "global"}
    assert set(s["accuracy"]["personal"]) == {"mean", "std", "weighted", "p10", "worst"}
    assert set(s["shift"]) == {"protocol", "degrees", "average"}
    assert list(s["shift"]["degrees"]) == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert set(s["shift"]["degrees"]["1.0"]) == {"mean", "std"}
    assert set(s["communication"]) == {"up_bytes", "down_bytes", "mib_per_client", "paper_mib_per_client"}
    assert set(s["compute"]) == {"flops_per_client", "dense_flops_per_client"}
    assert set(s["time"]) == {"seconds", "seconds_per_round"}
    assert set(s["hashes"]) == {"split", "cohorts", "init", "shift", "data"}
    total = s["communication"]["up_bytes"] + s["communication"]["down_bytes"]
    assert s["communication"]["mib_per_client"] == pytest.approx(total / 5 / 2**20)
    assert s["settings"]["sparsity"] == 0.5


def test_everything_but_time_and_environment_follows_from_recipe_and_seed(call, tmp_path: Path) -> None:
    for out in ("a", "b"):
        assert call("run", *quick("dm-pfl-plus"), "--out", out, "--quiet").code == 0
    first, second = (json.loads((tmp_path / o / "dm-pfl-plus" / "seed-0" / "summary.json").read_text()) for o in "ab")
    for s in (first, second):
        del s["time"], s["environment"]
    assert first == second


def test_json_prints_the_summaries_and_nothing_else(call) -> None:
    said = call("run", *quick("local"), "--json")
    assert [s["label"] for s in json.loads(said.out)] == ["local"]


def test_compare_reads_run_folders_and_warns_of_what_is_missing(call, tmp_path: Path) -> None:
    call("run", *quick("fedavg"), "--out", "one", "--quiet")
    call("run", *quick("local"), "training.lr=0.05", "training.seed=0", "--out", "two", "--quiet")
    said = call("compare", "one", "two/local/seed-0", "--md", "t.md", "--latex", "t.tex", "--html", "t.html")
    assert said.code == 0, said.err
    assert "no fedavg-ft among the methods" in " ".join(said.out.split())
    assert "not comparable" not in said.out
    assert (tmp_path / "t.md").read_text().startswith("| Method")
    assert r"\begin{tabular}" in (tmp_path / "t.tex").read_text()
    assert "one/fedavg" in (tmp_path / "t.html").read_text()
    call("run", *quick("local"), "data.alpha=5", "--out", "three", "--quiet")
    assert "did not see the same split" in " ".join(call("compare", "one", "three").out.split())


def test_compare_says_what_is_missing_and_what_diverged(call, tmp_path: Path) -> None:
    words = [*quick("fedavg", "local"), "training.lr=1e20", "evaluation.shift=none", "--seeds", "0,1", "--spread", "ci"]
    said = call("run", *words, "--out", "o", "--quiet")
    assert "95 % interval over 2 seeds" in " ".join(said.out.split())
    assert "95 % interval over 2 seeds" in (tmp_path / "o" / "table.md").read_text()
    assert "fedavg diverged in seeds 0, 1" in " ".join(said.out.split())
    shutil.rmtree(tmp_path / "o" / "local" / "seed-1")
    out = " ".join(call("compare", "o", "--spread", "std").out.split())
    assert "Partial: 1 of 4 runs are not finished: local (seed 1)." in out
    assert "standard deviation over 1–2 seeds" in out
    assert "(diverged)" in out
    assert "Partial" not in call("compare", "o/local/seed-0").out  # that is all that was asked for
    assert "spread 'sem': possible are std, ci" in call("compare", "o", "--spread", "sem").err
    shutil.rmtree(tmp_path / "o" / "local")
    shutil.rmtree(tmp_path / "o" / "fedavg")
    assert call("compare", "o").code == 2


def test_runs_on_data_given_as_objects_are_compared(call, tmp_path: Path) -> None:
    """What a recipe cannot name is not needed for it."""
    training = {"num_rounds": 1, "local_epochs": 1}
    personafl.run(
        data=(X, Y), algorithms="local,fedavg", training=training, model=torch.nn.Linear(3, 3), out=tmp_path / "o"
    )
    said = call("compare", "o")
    assert said.code == 0, said.err
    assert re.search(r"local .*fedavg ", said.out, re.S)


@pytest.mark.parametrize(
    "what", ["algorithms", "datasets", "partitions", "corruptions", "models", "inference", "recipes"]
)
def test_list_names_what_there_is(call, what: str) -> None:
    found = json.loads(call("list", what, "--json").out)
    assert len(found) > 0
    assert all(entry["name"] and entry["summary"] for entry in found)
    assert found[0]["name"] in call("list", what).out


@pytest.mark.parametrize("name", ["dm-pfl", "digits", "dirichlet", "cifar-cnn", "demo"])
def test_info_explains_by_name(call, name: str) -> None:
    said = call("info", name)
    assert said.code == 0
    assert name in said.out
    assert len(said.out) > 40


def test_info_explains_how_clients_may_answer(call) -> None:
    assert call("info", "inference").out == call("list", "inference").out
    out = call("info", "stream").out
    assert "inference.doubt = 1.0: in an estimated mix" in out and "inference.window = 64: inputs" in out
    assert "inference.calibrate = false" in out
    assert call("info", "own").out == "inference own: The client's own model answers.\n"


def test_info_gives_settings_with_defaults(call) -> None:
    out = call("info", "dm-pfl-plus").out
    assert "KDD 2023" in out
    assert "readjust_share" in out and "0.01" in out
    assert "how a client answers" in out
    assert re.search(r"momentum +recipe +momentum of sgd, 0 for none", out)


def test_info_tells_what_a_partition_uses_and_how_severe_a_corruption_is(call) -> None:
    out = " ".join(call("info", "shards").out.split())
    assert "As FedSelect's code" in out and "Departures: a class dealt twice" in out
    assert "data.classes_per_client = 2: how many classes a client holds data.samples_per_class = 0: the most" in out
    assert "data.official_test=dealt" in out
    assert "data.official_test=dealt" not in call("info", "dirichlet").out
    for severity, (thickness, decay) in enumerate(PARAMETERS["fog"], 1):
        assert f"severity {severity}: thickness {thickness:g}, decay {decay:g}\n" in call("info", "fog").out


OWN_THINGS = '''"""Things of a user's own."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn

import personafl
from personafl.data.partition.partitioner import Setting, partitioner
from personafl.plugins import EstimatedPrior


@dataclass(frozen=True, kw_only=True)
class Mine(personafl.Ditto):
    """Ditto with more pull."""

    evaluates = "my model"
    proximal_weight: float = 7.5


@dataclass(frozen=True, kw_only=True)
class Bare(personafl.Algorithm):
    pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x.flatten(1))


class ByClient(Net):
    def forward(self, x):
        return super().forward(x) - x.mean()


@dataclass(frozen=True)
class Rule(EstimatedPrior):
    """Answers as I like."""


@partitioner()
def halves(request, *, share: Annotated[float, Setting("of the first client", "in [0, 1]")] = 0.5):
    """Two clients."""


def load():
    """My data."""


number = 3
'''


def test_info_explains_code_of_the_users_own_in_the_working_directory(call, tmp_path: Path) -> None:
    (tmp_path / "own_things.py").write_text(OWN_THINGS)
    wanted = {
        "Mine": ("own_things:Mine: Ditto with more pull.", "Things of a user's own.", "evaluated: my model", "7.5"),
        "Bare": ("own_things:Bare: it has no description",),
        "Net": ("model own_things:Net: it has no description", "model.name=own_things:Net"),
        "Rule": ("inference own_things:Rule: Answers as I like.", "inference.doubt = 1.0"),
        "halves": ("partition own_things:halves: Two clients.", "data.share = 0.5: of the first client"),
        "load": ("function own_things:load: My data.", "data.dataset=own_things:load"),
    }
    for name, texts in wanted.items():
        said = call("info", f"own_things:{name}")
        assert said.code == 0 and all(text in said.out for text in texts), said
    refused = {
        "own_things:number": "info own_things:number: it is of type int; possible are an Algorithm",
        "own_things:Missing": "cannot be imported: module 'own_things' has no attribute 'Missing'",
        "no_such_module:Mine": "cannot be imported: No module named 'no_such_module'",
    }
    for name, message in refused.items():
        said = call("info", name)
        assert said.code == 2 and message in said.err


def test_info_opens_what_fills_a_slot(call) -> None:
    assert re.search(r"inherit\.transfer +mmd +how it teaches", call("info", "fedphp").out)
    said = call("info", "fedpews").out
    assert re.search(r'base +\{ name = "fedavg", weights = "uniform" \} +the method that is warmed up', said)


def test_info_explains_a_key_and_lists_a_section(call) -> None:
    said = call("info", "training.momentum").out
    assert said.splitlines()[0] == "training.momentum: momentum of sgd"
    assert "type: number" in said and "default: 0.0" in said and "possible: in [0, 1)" in said
    assert "looked at by: all but co-pfl" in said
    for section in ("data", "model", "training", "evaluation"):
        out = call("info", section).out
        assert all(f"{section}.{name}" in out for name in SECTIONS[section].names())
    assert "by the data" in call("info", "training.lr").out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("training.momentun", "info training.momentun: no such setting of [training]; did you mean momentum?"),
        ("trainig.lr", "info trainig.lr: no such section or method; did you mean training?"),
        ("trainin", "info trainin: no such name; did you mean training?"),
        ("dm-pfl.sparse", "info dm-pfl.sparse: no such setting of dm-pfl; did you mean sparsity?"),
    ],
)
def test_info_suggests_the_nearest_key(call, name: str, message: str) -> None:
    said = call("info", name)
    assert said.code == 2 and message in said.err


def test_partition_shows_saves_and_draws(call, tmp_path: Path) -> None:
    said = call("partition", "demo", "data.num_clients=4", "--save", "p.json", "--plot", "p.png")
    assert said.code == 0, said.err
    saved = json.loads((tmp_path / "p.json").read_text())
    assert f"hash {saved['hash']}" in said.out
    assert saved["data"]["num_clients"] == 4 and "classes_per_client" not in saved["data"]
    held = [i for split in saved["clients"].values() for client in split for i in client]
    assert sorted(held) == list(range(1797))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_saved_partition_is_used_again_for_every_seed(call, tmp_path: Path) -> None:
    said = call("partition", "data.num_clients=4", "data.unseen_ratio=0.25", "training.seed=3", "--save", "p.json")
    found, saved = re.findall(r"hash (\w{16})", said.out)
    assert found == saved
    again = call("partition", "data.partition=p.json")
    assert f"hash {found}" in again.out and "4 clients, 1797 samples" in again.out
    words = [*QUICK[:2], "algorithms=fedavg", "data.partition=p.json", "--seeds", "1,2", "--out", "o", "--json"]
    ran = call("run", *words)
    assert [s["hashes"]["split"] for s in json.loads(ran.out)] == [found] * 2
    data = config.load(tmp_path / "o" / "recipe.toml").data
    assert data == config.Data(partition="p.json", normalize="none", normalize_targets=False)  # what auto is for digits
    back = personafl.Result.load(tmp_path / "o")
    assert back["fedavg"].simulation.hashes()["split"] == found
    assert back["fedavg"].simulation.federation.unseen == 1


def test_a_partition_of_other_data_is_refused_by_name(call, tmp_path: Path) -> None:
    call("partition", "data.num_clients=4", "--save", "p.json")
    said = call("run", "data.dataset=synthetic-3.2k", "data.partition=p.json")
    assert said.code == 2
    assert "p.json: divides digits (1797 examples), not synthetic-3.2k" in said.err
    assert {p.name for p in tmp_path.iterdir()} == {"p.json"}


@pytest.mark.filterwarnings("default")
def test_a_partition_goes_to_pfllib_and_comes_back(call, tmp_path: Path) -> None:
    said = call("partition", "data.num_clients=4", "--pfllib", "them")
    assert said.code == 0, said.err
    assert len(list((tmp_path / "them").glob("t*/*.npz"))) == 8
    assert "4 clients, 1797 samples" in call("partition", "data.dataset=them").out
    said = call("partition", "data.dataset=them", "data.partition=iid")
    assert said.err == "note: them knows its 4 clients; data.partition=natural keeps them\n"
    said = call("partition", "data.num_clients=4", "--pfllib", "them")
    assert (said.code, "them: not an empty folder" in said.err) == (2, True)


def test_doctor_checks_the_engine(call) -> None:
    said = call("doctor")
    assert said.code == 0
    assert "torch" in said.out
    assert "largest difference" in said.out
    assert "personafl doctor RECIPE or MODEL says how clients run through a model" in said.out


def test_doctor_says_how_clients_run_through_a_model_and_why(call, tmp_path: Path) -> None:
    (tmp_path / "own_things.py").write_text(OWN_THINGS)
    mixed = "layer by layer: outputs in evaluation differ from those of each client alone"
    for words, model, execution in (
        (["demo"], "mlp on digits", "stacked"),
        (["small-cnn"], "small-cnn on digits", "stacked"),
        (["own_things:Net"], "own_things:Net on digits", "stacked"),
        (["own_things:ByClient"], "own_things:ByClient on digits", mixed),
        (["demo", "model.name=own_things:ByClient"], "own_things:ByClient on digits", mixed),
        (["model.name=own_things:ByClient"], "own_things:ByClient on digits", mixed),
    ):
        said = call("doctor", *words)
        assert said.code == 0 and not said.err, said
        told = dict(re.findall(r"^(model|execution) +(.*)$", said.out, re.M))
        assert told == {"model": model, "execution": execution}
        assert ("slower than a stack" in said.out) == (execution != "stacked")
    said = call("doctor", "small-cn")
    assert said.code == 2 and "doctor small-cn: no such recipe or model; did you mean small-cnn?" in said.err


def test_doctor_calls_no_faster_way_slow(call, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, convolutions are faster for one client at a time."""
    reason = "on a GPU its convolutions are faster for one client at a time"
    monkeypatch.setattr(StackedModel, "execution", Execution("layer by layer", reason))
    said = call("doctor", "small-cnn")
    assert said.code == 0 and re.search(f"^execution +layer by layer: {reason}$", said.out, re.M)
    assert "slower than a stack" not in said.out + said.err


@pytest.mark.filterwarnings("always::personafl.core.errors.Note")
@pytest.mark.parametrize("quiet", [[], ["--quiet"]], ids=["progress", "quiet"])
def test_a_run_says_how_clients_ran_through_the_model_and_why(call, tmp_path: Path, quiet: list[str]) -> None:
    (tmp_path / "own_things.py").write_text(OWN_THINGS)
    said = call("run", *quick("local", "fedavg"), "model.name=own_things:ByClient", "--out", "here", *quiet)
    why = "layer by layer: outputs in evaluation differ from those of each client alone"
    assert said.code == 0, said
    assert said.err.count(f"note: ByClient runs {why}. This is slower than a stack of all clients\n") == 1
    assert f"The model runs {why}." in said.out
    here = tmp_path / "here"
    assert all(f"The model runs {why}." in (here / n).read_text() for n in ("table.md", "report.html"))
    for label in ("local", "fedavg"):
        summary = json.loads((here / label / "seed-0" / "summary.json").read_text())
        assert summary["environment"]["execution"] == why


def bad_label(shape: object, classes: int) -> torch.nn.Module:
    return torch.nn.Linear(1, 1)


def write(path: Path, **arrays: np.ndarray) -> str:
    np.savez(path, **arrays)
    return str(path)


X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
Y = np.arange(60) % 3

WRONG = {
    "unknown key": (["training.rounds=3"], "did you mean num_rounds"),
    "unknown section": (["trainin.lr=3"], "neither a section"),
    "unknown algorithm": (["algorithms=fedpher"], "no such algorithm"),
    "unknown data set": (["data.dataset=imagenet"], "no such data set"),
    "unknown recipe": (["nosuch"], "no such file"),
    "alpha": (["data.alpha=-0.5"], "data.alpha=-0.5: must be greater than 0"),
    "clients": (["data.num_clients=5000"], "num_clients=5000: the data set has 1797 samples"),
    "no partition": (["data.partition=nosuch"], "no such partition; possible are auto, iid"),
    "no partition file": (["data.partition=no.json"], "no.json: no such file; personafl partition RECIPE --save"),
    "no folder": (["data.dataset=./nowhere"], "data.dataset='./nowhere': nowhere: no such folder"),
    "a client's file": (["data.dataset=homes/anna.csv"], "anna.csv: a .csv file is one client's and belongs in"),
    "natural": (["data.partition=natural"], "no natural clients"),
    "sparsity": (["dm-pfl.sparsity=1.0"], "sparsity=1.0: must be in [0, 1)"),
    "head": (
        ["model.head=classifier*"],
        "model.head='classifier*' matches no parameter; the model has layers.0.weight",
    ),
    "device": (["--device", "tpu"], "personafl: device tpu: possible are"),
    "seeds": (["--seeds", "a,b"], "--seeds a,b: expected whole numbers"),
    "option": (["--fast"], "No such option"),
    "model": (["model.name=small-cnn", "data.dataset=synthetic-3.2k"], "wants images"),
    "model that fails": (["model.name=tests.test_cli:bad_label"], "shape"),
    "no adaptive": (["algorithms=local", "local.inference=per-sample"], "needs a global model"),
    "device not there": (["--device", "cuda:99"], "CUDA devices"),
    "device of another kind": (["--device", "meta"], "personafl: device meta: possible are"),
    "loss of a whole batch": (["training.loss=torch.nn.functional:cross_entropy"], "must give one number per example"),
    "loss that fails": (["training.loss=torch:nn"], "not a function"),
    "model called wrongly": (["model.name=torch.nn:Linear"], "model Linear: called with ((1, 8, 8), 10)"),
    "no body": (["model.head=*", "algorithms=fedrep"], "needs a head and a body"),
    "patience": (["training.patience=2"], "training.patience=2: needs validation data, and there are none; set data."),
    "target": (
        ["training.target=0.9", "algorithms=dm-pfl"],
        "DMPFL cannot be combined with training.target=0.9, because",
    ),
    "targets": (["evaluation.targets=80"], "evaluation.targets=[80.0]: must be shares in (0, 1]"),
    "spread": (["--spread", "sem"], "spread 'sem': possible are std, ci"),
    "several seeds": (["--seeds", "1,1"], "must differ"),
    "sample after local training": (["evaluation.when=after_local", "evaluation.clients=3"], "only those selected"),
    "pathological": (
        ["data.partition=pathological", "data.classes_per_client=1", "data.num_clients=3"],
        "cannot hold the data's 10 classes",
    ),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_wrong_input_ends_in_one_line_exit_two_and_nothing_written(call, tmp_path: Path, case: str) -> None:
    words, message = WRONG[case]
    said = call("run", *words)
    assert said.code == 2, said.err
    assert message in said.err
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.where(np.arange(180).reshape(60, 3) == 100, np.nan, X), "y": Y}, "example 33 contains NaN, the only"),
        ({"x": X, "y": Y - 1}, "label -1 of example 0 is not in 0.."),
        ({"x": X, "y": np.where(Y == 1, np.nan, Y)}, "target nan of example 1 is not finite"),
        ({"x": X, "y": Y[:50]}, "60 examples but 50 labels"),
        ({"x": X}, "must hold arrays x and y"),
        ({"x": (10 * X).astype(np.int64), "y": Y}, "examples are whole numbers: give floats, or bytes for images"),
        ({"x": X, "y": np.array([b"a", b"b", b"c"])[Y]}, "must be numbers"),
    ],
)
def test_wrong_data_are_named(call, tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    said = call("run", f"data.dataset={write(tmp_path / 'own.npz', **arrays)}", "data.num_clients=3")
    assert said.code == 2
    assert message in said.err
    assert {p.name for p in tmp_path.iterdir()} == {"own.npz"}


def test_data_that_know_their_clients_say_so_where_another_partition_fails(call, tmp_path: Path) -> None:
    path = write(tmp_path / "own.npz", x=X, y=Y, clients=np.array(["anna", "ben", "cleo"])[np.arange(60) // 20])
    said = call("run", f"data.dataset={path}", "data.num_clients=31", "data.partition=dirichlet")
    assert "two are needed per client; own knows its clients, data.partition=natural takes them" in said.err
    said = call("partition", f"data.dataset={path}", "data.partition=natural")
    assert re.search(r"2 +cleo +15 +5", said.out)


def test_classes_are_listed_by_their_names(call, tmp_path: Path) -> None:
    path = write(tmp_path / "own.npz", x=X, y=np.array(["walk", "[b]run", "sit"])[Y])
    said = call("partition", f"data.dataset={path}", "data.partition=iid", "data.num_clients=2")
    assert re.search(r"train +test +\[b\]run +sit +walk", said.out)


@pytest.mark.filterwarnings("default")
def test_ones_own_clients_are_not_divided_anew_without_a_word(call, tmp_path: Path) -> None:
    path = write(tmp_path / "own.npz", x=X, y=Y, clients=np.array(["anna", "ben", "cleo"])[np.arange(60) // 20])
    said = call("run", f"data.dataset={path}", "data.partition=dirichlet", *QUICK[:3], "algorithms=local", "--json")
    assert said.code == 0 and "note: own knows its 3 clients; data.partition=natural keeps them\n" in said.err


def test_a_broken_file_is_named(call, tmp_path: Path) -> None:
    (tmp_path / "broken.npz").write_bytes(b"PK no archive")
    said = call("run", "data.dataset=broken.npz")
    assert said.code == 2
    assert "not a readable .npz file" in said.err


def test_a_model_in_a_file_beside_the_recipe_is_found(call, tmp_path: Path) -> None:
    (tmp_path / "net_beside.py").write_text(
        "import torch\n\ndef Net(shape, classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.Linear(8, classes))\n"
    )
    said = call("run", *quick("fedrep"), "model.name=net_beside:Net", "--json")
    assert said.code == 0, said.err


def test_runs_of_the_same_name_in_two_places_stay_apart(call) -> None:
    for place, lr in (("a", "0.1"), ("b", "0.2")):
        call("run", *quick("fedavg"), f"training.lr={lr}", "--out", f"{place}/r", "--quiet")
    out = call("compare", "a/r", "b/r").out
    assert "a/r/fedavg" in out and "b/r/fedavg" in out
    assert call("compare", "a/r", "a/r/fedavg/seed-0").code == 2


def test_ones_own_arrays_with_clients_run(call, tmp_path: Path) -> None:
    path = write(tmp_path / "own.npz", x=X, y=Y, clients=np.array(["anna", "ben", "cleo"])[np.arange(60) // 20])
    said = call("run", f"data.dataset={path}", "data.partition=natural", *QUICK[:2], "algorithms=local", "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)[0]["accuracy"]["personal"]["mean"] > 0


def test_a_run_folder_says_who_its_clients_are(call, tmp_path: Path) -> None:
    clients = np.array(["anna", "ben", "3e2", "dov, 2"])[np.repeat([0, 1, 2, 3], [20, 24, 15, 1])]
    path = write(tmp_path / "own.npz", x=X, y=Y, clients=clients)
    words = [f"data.dataset={path}", "data.partition=natural", *QUICK[:2], "algorithms=local", "--out", "o", "--quiet"]
    said = call("run", *words, "data.unseen_ratio=0.3")
    assert "client dov, 2 has 1 sample, too few for a training and a test part; data.small_clients=drop" in said.err
    assert call("run", *words, "data.unseen_ratio=0.3", "data.small_clients=drop").code == 0
    back = personafl.Result.load(tmp_path / "o")["local"]
    sizes = {"anna": 15 + 5, "ben": 18 + 6, "3e2": 11 + 4}
    rows = [*back.clients, {"name": back.evaluations["unseen_names"][0], "train": 0, "test": 0}]
    assert {r["name"] for r in rows} == sizes.keys()
    for r in back.clients:
        assert r["train"] + r["test"] == sizes[r["name"]]
        assert back.client(r["name"]).id == r["client"]
        assert back.evaluations["names"][r["client"]] == r["name"]
    assert back.client(rows[-1]["name"]).id == 2
    with pytest.raises(ValueError, match=r"client 'eve': no such client; possible are .*anna"):
        back.client("eve")


def test_clients_with_a_corruption_each_say_which(call, tmp_path: Path) -> None:
    assert call("run", *quick("local"), "data.corruption=per-client", "--out", "o", "--quiet").code == 0
    with (tmp_path / "o" / "local" / "seed-0" / "clients.csv").open(newline="") as f:
        assert [r["corruption"] for r in csv.DictReader(f)] == list(STANDARD)[:5]
    with pytest.raises(ValueError, match="client 'anna': no such client; the clients of these data have no names"):
        personafl.Result.load(tmp_path / "o").client("anna")


def test_a_folder_with_something_in_it_is_refused(call, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    said = call("run", *QUICK, "--out", "full")
    assert said.code == 2
    assert "not empty" in said.err
    assert "choose another, or empty this one" in said.err
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_a_folder_that_cannot_be_written_is_refused(call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in ("file", "file/below", "/proc/nothing/here"):
        said = call("run", *quick("local"), "--out", out)
        assert said.code == 2, out
        assert f"run folder {out}" in said.err


def test_the_module_can_be_run_and_stops_with_one_line_on_ctrl_c() -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    code = (
        "import sys, personafl.cli as c, personafl.experiment as e\n"
        "def stop(*a, **k): raise KeyboardInterrupt\n"
        "e.run = stop\nsys.argv = ['personafl', 'run']\nc.main()"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (out.returncode, out.stderr.strip()) == (130, "stopped; nothing was written")
    out = subprocess.run([sys.executable, "-m", "personafl", "--version"], capture_output=True, text=True, env=env)
    assert out.stdout.strip() == personafl.__version__


def test_ctrl_c_says_how_to_go_on_where_something_was_written(call, monkeypatch: pytest.MonkeyPatch) -> None:
    from personafl import experiment

    def stop(*_: object, out: Path, **__: object) -> None:
        if out.name == "begun here":
            out.mkdir(parents=True)
            (out / "run.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "run", stop)
    said = call("run", "--out", "begun here")
    assert (said.code, said.err) == (130, "stopped; go on with: personafl resume 'begun here'\n")
    said = call("run", "--out", "there")
    assert (said.code, said.err) == (130, "stopped; nothing was written\n")


def test_runs_of_the_same_second_have_folders_of_their_own(
    call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "20260102-030405")
    for _ in range(2):
        assert call("run", *quick("local"), "training.num_rounds=1", "evaluation.shift=none", "--quiet").code == 0
    one, other = sorted(p.name for p in (tmp_path / "runs").iterdir())
    assert one != other and all(re.fullmatch(r"demo-20260102-030405-[0-9a-f]{4}", n) for n in (one, other))


@pytest.mark.parametrize("command", ["run", "compare", "list", "info", "partition", "doctor"])
def test_help_has_no_escapes_and_says_what_every_argument_means(call, command: str) -> None:
    out = call(command, "--help").out
    assert "\\" not in out
    arguments = out.partition("Arguments:\n")[2].partition("\n\n")[0].splitlines()
    # A name, with newer typer its type, and a sentence; the other lines are continued.
    assert all(re.match(r"  \S+( <\S+>)?  +\S|    ", line) for line in arguments)
    assert arguments
    if command == "run":
        assert "[default: auto]" in out


def test_list_alone_and_its_help_name_what_can_be_listed(call) -> None:
    kinds = {entry["name"] for entry in json.loads(call("list", "--json").out)}
    assert kinds == {"algorithms", "datasets", "partitions", "corruptions", "models", "inference", "recipes"}
    for words in (("list",), ("list", "--help")):
        assert all(kind in call(*words).out for kind in kinds)
    said = call("list", "algorithm")
    assert said.code == 2 and "did you mean algorithms?" in said.err


def end_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let experiments end so."""

    def end(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(experiment, "run", end)


def test_a_bug_shows_its_traceback_and_is_no_wrong_input(call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that looks like a wrong value: only what we say of a user's input is told in a line."""
    for bug in (ValueError("3 is not in list"), KeyError("x"), RuntimeError("shapes")):
        end_with(bug, monkeypatch)
        with pytest.raises(type(bug)) as seen:
            call("run")
        assert seen.value is bug
    code = (
        "import sys, personafl.cli as c, personafl.experiment as e\n"
        "def end(*a, **k): [].index(3)\n"
        "e.run = end\nsys.argv = ['personafl', 'run']\nc.main()"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.returncode == 1
    assert "Traceback" in out.stderr and "in end" in out.stderr


def test_traceback_shows_where_a_wrong_input_was_found(call, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = personafl.UserError("weights=3: possible are one, two")
    end_with(wrong, monkeypatch)
    said = call("run")
    assert (said.code, said.err.strip()) == (2, "personafl: weights=3: possible are one, two")
    for argv in (("--traceback",), ("--traceback", "training.num_rounds=2"), ("training.num_rounds=2", "--traceback")):
        with pytest.raises(personafl.UserError) as seen:
            call("run", *argv)
        assert seen.value is wrong


def test_a_full_disk_is_said_in_a_line(call, monkeypatch: pytest.MonkeyPatch) -> None:
    end_with(OSError(28, "No space left on device"), monkeypatch)
    said = call("run")
    assert (said.code, said.err.strip()) == (1, "personafl: the disk is full: No space left on device")


def test_a_sweep_chooses_and_writes_a_recipe_that_runs(call, tmp_path: Path) -> None:
    words = [*quick("fedavg", "ditto"), "training.lr=0.05,0.5", "evaluation.draws=1"]
    said = call("sweep", *words, "--out", "s")
    assert said.code == 0 and "4/4  ditto  training.lr=0.5: accuracy" in said.out
    assert re.search(r"\| fedavg +\| 2 +\| training.lr=0\.", said.out) and "what was chosen: best.toml" in said.out
    assert call("sweep", *words, "--out", "s", "--quiet").out.startswith("# Sweep")  # goes on, and has nothing to do
    assert call("run", "s/best.toml", "--json").code == 0
    said = call("sweep", *quick("fedavg", "ditto"), "training.lr=0.1", "--out", "t")
    assert (said.code, "nothing to choose from" in said.err) == (2, True)
    assert not (tmp_path / "t").exists()


def test_a_sweep_that_is_stopped_says_how_to_go_on(call, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "sweep", stop)
    said = call("sweep", "training.lr=0.1,0.2", "--out", "s")
    assert (said.code, said.err.strip()) == (130, "stopped; the same command with --out s goes on")


def test_python_callers_get_the_same_class_and_sentence() -> None:
    with pytest.raises(personafl.UserError, match="algorithm 'fedavgg': no such algorithm; did you mean fedavg"):
        personafl.run(None, "algorithms=fedavgg")
    with pytest.raises(personafl.UserError, match=r"sparsity=1.5: must be in \[0, 1\)"):
        personafl.DMPFL(sparsity=1.5)
