"""One call for whatever a user brings: objects, names and dicts, and the command line beside them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import personafl
from personafl import Faults, FedAvg, Result, UserError, cli, config
from personafl.core.errors import Note
from tests import worlds

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 3, 8, 8)).astype(np.float32)
Y = RNG.integers(0, 3, 96)
WHO = np.repeat(np.arange(6), 16)
QUICK: dict[str, Any] = {"num_rounds": 2, "local_epochs": 1, "batch_size": 8, "join_ratio": 1.0, "lr": 0.05}


class Block(nn.Module):
    """Two convolutions with BatchNorm around a way past them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.na, self.nb = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.nb(self.b(torch.relu(self.na(self.a(x))))))


class Net(nn.Module):
    """A small ResNet of a user's own."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(shape[0], 4, 3, padding=1), Block(4), nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(torch.relu(self.stem(x))).mean((2, 3)))


def tensors(folder: Path) -> dict[str, Tensor]:
    return {
        f"{p.relative_to(folder)}:{n}": t
        for p in sorted(folder.rglob("*.safetensors"))
        for n, t in load_file(p).items()
    }


def told(result: Result) -> list[dict[str, Any]]:
    """The summaries, but for where and how long."""
    gone = ("time", "environment")
    return [{k: v for k, v in m.summary.items() if k not in gone} for m in result.methods.values()]


def test_the_command_line_gives_the_numbers_of_python_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays, a ResNet with BatchNorm and three methods, as objects and by file and dotted path."""
    monkeypatch.chdir(tmp_path)
    np.savez("own.npz", x=X, y=Y, clients=WHO)
    names = ["fedavg", "ditto", "fedrep"]
    here = personafl.run(data=(X, Y, WHO), model=Net, algorithms=names, training=QUICK, seeds=[1], out="python")
    settings = [f"training.{k}={v}" for k, v in QUICK.items()]
    path = "model.name=tests.experiment.test_running:Net"
    words = ["run", "data.dataset=own.npz", path, f"algorithms={','.join(names)}", *settings, "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", ["personafl", *words, "--out", "line", "--quiet"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    there = Result.load("line", trust=True)
    assert told(here) == told(there)
    a, b = tensors(Path("python")), tensors(Path("line"))
    assert a.keys() == b.keys() and len(a) > 30
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert (Path("python") / "report.html").is_file() and "ditto" in here.table()
    probe = torch.from_numpy(X[:5])
    with torch.no_grad():
        assert torch.allclose(here["ditto"].client(3).module(probe), there["ditto"].client(3).predict(probe), atol=1e-5)


def datasets() -> list[TensorDataset]:
    return [TensorDataset(torch.from_numpy(X[c == WHO]), torch.from_numpy(Y[c == WHO])) for c in range(6)]


DATA: dict[str, Callable[[], Any]] = {
    "arrays": lambda: (X, Y, WHO),
    "tensors": lambda: (torch.from_numpy(X), torch.from_numpy(Y), torch.from_numpy(WHO)),
    "named arrays": lambda: {"clients": WHO, "y": Y, "x": X},
    "settings": lambda: {"dataset": (X, Y, WHO), "partition": "natural"},
    "section": lambda: personafl.Data(dataset=(X, Y, WHO), partition="natural"),
    "data sets": datasets,
    "source": lambda: personafl.arrays(X, Y, WHO, name="own"),
}


@pytest.mark.parametrize("kind", DATA)
def test_data_are_the_same_in_every_form(kind: str) -> None:
    one = personafl.run(data=DATA[kind](), model=Net, algorithms="fedavg", training=QUICK)
    two = personafl.run(data=(X, Y, WHO), model=Net, algorithms="fedavg", training=QUICK)
    (a,), (b,) = told(one), told(two)
    assert a["hashes"]["split"] == b["hashes"]["split"]
    assert a["accuracy"] == b["accuracy"]


def test_a_federation_is_taken_as_it_is_and_found_again(tmp_path: Path) -> None:
    fed = worlds.federation()
    found = personafl.run(
        data=fed, model=worlds.module(), algorithms=FedAvg, training=QUICK, out=tmp_path / "run", seeds=[0, 1]
    )
    assert {m.summary["hashes"]["split"] for m in found.methods.values()} == {fed.digest()}
    again = Result.load(tmp_path / "run", data=fed, model=worlds.module())
    assert torch.equal(found.client(2).predict(fed.source.x), again.client(2).predict(fed.source.x))
    rows = Result.load(tmp_path / "run", data=fed.source, model=worlds.module())  # the split is in the folder
    assert torch.equal(found.client(2).predict(fed.source.x), rows.client(2).predict(fed.source.x))


def test_what_was_given_as_an_object_is_asked_for_again(tmp_path: Path) -> None:
    made = personafl.run(
        data=(X, Y, WHO), model=Net((3,), 3), algorithms=[FedAvg()], training=QUICK, out=tmp_path / "run"
    )
    again = r"this run was given an object; give it again in Python, as in Result.load\(folder, data=\.\.\.\)"
    with pytest.raises(UserError, match=again):
        Result.load(tmp_path / "run")
    with pytest.raises(UserError, match=r"Result.load\(folder, model=\.\.\.\)"):
        Result.load(tmp_path / "run", data=(X, Y, WHO))
    with pytest.raises(UserError, match="the data of this run had hash"):
        Result.load(tmp_path / "run", data=(X + 1, Y, WHO), model=Net((3,), 3))
    with pytest.raises(
        UserError, match=r"not the model of this run: head\.weight has shape \(4, 4\) here and \(3, 4\)"
    ):
        Result.load(tmp_path / "run", data=(X, Y, WHO), model=Net((3,), 4))
    other = Net((3,), 3)  # of other weights: those of the run are in its folder
    found = Result.load(tmp_path / "run", data=(X, Y, WHO), model=other)
    assert torch.equal(made.client(0).predict(X[:4]), found.client(0).predict(X[:4]))
    assert torch.equal(
        made.client(0).simulation.model.initial["head.weight"], found.client(0).simulation.model.initial["head.weight"]
    )


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        ("fedavg, ditto", ["fedavg", "ditto"]),
        (["fedavg", personafl.Ditto(proximal_weight=0.5)], ["fedavg", "ditto"]),
        ([personafl.FedAvg], ["fedavg"]),
        (personafl.FedAvg(), ["fedavg"]),
        ({"a": "fedavg", "b": personafl.FedAvg(lr=0.2)}, ["a", "b"]),
        ([{"name": "fedavg", "label": "mine"}], ["mine"]),
    ],
)
def test_algorithms_in_every_form(given: Any, labels: list[str]) -> None:
    assert [m.label for m in config.load("demo", given={"algorithms": given}).algorithms] == labels


def test_settings_left_open_go_by_the_data_and_are_told() -> None:
    with pytest.warns(Note, match=r"chosen for 6 clients with 12 training samples .*: num_rounds=50, .*, lr=0\.1$"):
        recipe, _ = personafl.experiment.resolved(config.load(None, given={"data": (X, Y, WHO), "model": Net}), [0])
    assert (recipe.training.lr, recipe.training.join_ratio, recipe.training.batch_size) == (0.1, 1.0, 10)
    assert "lr = 0.1" in config.dump(recipe) and recipe.data.partition == "natural"
    mine = config.load(None, ["training.batch_size=7"], {"data": (X, Y), "training": {"lr": 0.02}})
    assert mine.open == {"training.num_rounds", "training.join_ratio", "training.local_epochs", "algorithms"}
    numbers, _ = personafl.experiment.resolved(config.load(None, given={"data": (X[:, 0, 0], X[:, 1, 1, 1])}), [0])
    assert [m.label for m in numbers.algorithms] == ["local", "fedavg", "fedavg-ft", "ditto", "dm-pfl"]
    assert (numbers.data.partition, numbers.training.lr, numbers.training.loss) == ("iid", 0.01, "mse")
    whole = config.load(None, given={"data": (X, Y), "training": personafl.Training(lr=0.02)})
    assert whole.open == {"algorithms"} and whole.training.num_rounds == 100


def test_what_the_user_sets_for_all_wins_over_a_shipped_recipe() -> None:
    assert [m.algorithm.lr for m in config.load("demo").algorithms] == [0.3, 0.3, None, None, 0.7, 0.7, None]
    assert {m.algorithm.lr for m in config.load("demo", ["training.lr=0.1"]).algorithms} == {None}
    own = config.load("demo", ["training.lr=0.1", "ditto.lr=0.7"]).algorithms
    assert [m.algorithm.lr for m in own if m.label == "ditto"] == [0.7]
    given = config.load("demo", given={"training": {"lr": 0.1}}).algorithms
    assert {m.algorithm.lr for m in given} == {None}


def test_a_shipped_recipe_on_other_data_leaves_its_rates_behind() -> None:
    with pytest.warns(Note, match="the learning rates of demo were chosen for its own data"):
        found = config.load("demo", ["data.dataset=mnist"])
    assert found.training.lr == personafl.Training().lr and found.training.num_rounds == 80
    assert {m.algorithm.lr for m in found.algorithms} == {None}
    assert config.load(None, ["data.dataset=mnist"]).name == "own"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"store": "tape"}, r"^store tape: possible are auto, device, host, disk"),
        ({"memory": -1.0}, r"^memory -1.0: must be greater than 0"),
        ({"memory": 0.001}, r"memory=0.001: .* GiB are in use before the first round; allow more"),
    ],
)
def test_impossible_homes_and_limits_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        personafl.run(None, "training.num_rounds=1", "algorithms=fedavg", **options)  # type: ignore[arg-type]


def test_faults_are_a_section_like_the_others(tmp_path: Path) -> None:
    words = ("algorithms=fedavg", "training.num_rounds=2", "data.num_clients=5", "evaluation.shift=none")
    faults = {"faulty_ratio": 0.2, "fault": "empty", "drop_rate": 0.3}
    given = [
        personafl.run(None, *words, faults=faults, out=tmp_path / "run"),
        personafl.run(None, *words, faults=Faults(**faults)),  # type: ignore[arg-type]
        personafl.run(None, *words, *(f"faults.{k}={v}" for k, v in faults.items())),
    ]
    told, *others = ([{k: v for k, v in r.items() if k != "seconds"} for r in g["fedavg"].rows] for g in given)
    assert all(other == told for other in others)
    (faulty,) = given[0]["fedavg"].summary["faults"]["faulty_clients"]
    assert any({"client": faulty, "why": "an empty update"} in r.get("quarantined", []) for r in told)
    again = Result.load(tmp_path / "run")
    assert again.recipe.faults == Faults(**faults)  # type: ignore[arg-type]
    assert again["fedavg"].summary["faults"] == given[0]["fedavg"].summary["faults"]
    assert "an empty update" in (tmp_path / "run" / "table.md").read_text()
    with pytest.raises(UserError, match=r"faults=0.5: must be a dict of settings or Faults\(...\)"):
        personafl.run(None, faults=0.5)  # type: ignore[arg-type]
    plain = personafl.run(None, *words)["fedavg"]
    assert "faults" not in plain.summary and not any(
        {"quarantined", "dropped", "kept_model"} & r.keys() for r in plain.rows
    )


def test_a_run_that_stopped_is_told_and_found_again(tmp_path: Path) -> None:
    training = QUICK | {"num_rounds": 9, "target": 0.01, "lr_decay": 0.5}
    found = personafl.run(
        data={"dataset": (X, Y, WHO), "partition": "natural", "validation_share": 0.2},
        model=Net,
        algorithms="fedavg-ft",
        training=training,
        evaluation={"eval_every": 2, "targets": [0.01, 1.0]},
        out=tmp_path / "run",
    )["fedavg-ft"]
    summary, rows = found.summary, found.rows
    scored = [r for r in rows if "validation" in r]
    assert [r["round"] for r in rows] == [0, 1, 2] and rows[2]["phase"] == "finetune"
    assert summary["stopped"] == {"by": "target", "on": "validation", "rounds": 2}
    assert summary["rounds"] == 2
    best = max(scored, key=lambda r: r["validation"]["mean"])
    assert summary["validation"]["best_round"] == best["round"] + 1
    assert summary["validation"]["personal"] == best["personal"]
    assert summary["validation"]["last"]["personal"] == summary["accuracy"]["personal"]
    assert summary["rounds_to_target"]["0.01"]["personal"] == 2
    again = Result.load(tmp_path / "run", data=(X, Y, WHO), model=Net)["fedavg-ft"]
    assert again.summary == summary
    assert again.simulation.schedule == found.simulation.schedule
    assert torch.equal(again.client(1).predict(X[:4]), found.client(1).predict(X[:4]))


class _Split(nn.Module):
    """A forward pass that depends on the number of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.fc(part.flatten(1)) for part in x.split(8)])


def test_a_run_says_how_its_model_is_executed(tmp_path: Path) -> None:
    reason = r"layer by layer: its forward pass depends on the number of rows"
    settings = ["training.num_rounds=1", "algorithms=fedavg", "evaluation.shift=none"]
    with pytest.warns(Note, match=f"_Split runs {reason}"):
        result = personafl.run("demo", *settings, model=_Split, out=tmp_path / "own")
    summary = json.loads((tmp_path / "own/fedavg/seed-0/summary.json").read_text())
    assert summary["environment"]["execution"].startswith(reason)
    for text in (result.table(), *((tmp_path / "own" / name).read_text() for name in ("table.md", "report.html"))):
        assert f"The model runs {reason}" in text
    stacked = personafl.run("demo", *settings)
    assert stacked["fedavg"].summary["environment"]["execution"] == "stacked"


def everybody_diverges() -> dict[str, Any]:
    """A run of five rounds in which the rate of FedAvg with fine-tuning is far too high."""
    return {
        "data": {"dataset": "digits", "num_clients": 4, "partition": "iid"},
        "model": {"name": "mlp"},
        "training": QUICK | {"num_rounds": 5, "batch_size": 64},
        "evaluation": {"shift": "none", "eval_every": 5},
        "algorithms": [{"name": "fedavg-ft", "lr": 1e30}, {"name": "local"}],
    }


def test_a_method_stops_where_everybody_has_diverged_and_the_others_go_on(tmp_path: Path) -> None:
    """After three rounds in which no client's training was finite, of five; there had been no evaluation until then."""
    out = tmp_path / "run"
    made = personafl.run(everybody_diverges(), out=out)
    wild, sound = made["fedavg-ft"], made["local"]
    assert [r["round"] for r in wild.rows] == [0, 1, 2, 3]  # the last is the stage of fine-tuning
    assert [r.get("stopped") for r in wild.rows] == [None, None, "diverged", None]
    assert "personal" in wild.rows[2]
    assert wild.summary["stopped"] == {"by": "diverged", "on": "training", "rounds": 3}
    assert wild.summary["rounds"] == 3 and wild.summary["diverged"]["clients"] == 4
    assert sound.summary["rounds"] == 5 and "stopped" not in sound.summary
    for text in (made.table(), (out / "table.md").read_text(), (out / "report.html").read_text()):
        assert "(diverged)" in text and "Training stopped after round 3, since no client" in text
        assert "Stopped by" not in text and "stopped by test accuracy" not in text
    (out / "fedavg-ft" / "seed-0" / "summary.json").unlink()  # as if the process had been killed before the end
    again = personafl.resume(out)
    assert again["fedavg-ft"].summary["stopped"] == wild.summary["stopped"]
    x = sound.simulation.federation.source.x[:3]
    assert torch.equal(again["fedavg-ft"].client(1).predict(x), wild.client(1).predict(x))


def test_the_command_line_ends_with_a_code_where_everybody_has_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wild.toml").write_text(config.dump(config.load(everybody_diverges())))
    for words in (("run", "wild.toml", "--out", "o"), ("resume", "o")):
        monkeypatch.setattr(sys, "argv", ["personafl", *words, "--quiet"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 1
        said = capsys.readouterr()
        message = " ".join(said.err.split())
        assert "every client diverged. Lower fedavg-ft.lr (it was 1e+30)" in message
        assert "local" not in message and "written to" in said.out
