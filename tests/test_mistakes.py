"""Mistakes users make, in Python and on the command line: one line each, with thing, value and what is possible."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import personafl
from personafl import Ditto, Evaluation, FedAvg, Simulation, Training, UserError, cli
from tests import worlds

NESTED = r"(<dict>|\{.*\.\.\.)"  # from some depth on Python cannot show it, which depth goes by its version

X, Y = np.zeros((40, 6), np.float32), np.arange(40) % 3
QUICK = {"num_rounds": 1, "local_epochs": 1}


def run(*overrides: str, **given: Any) -> Any:
    """The smallest run with something wrong in it."""
    given.setdefault("algorithms", "fedavg")
    given.setdefault("training", QUICK)
    return personafl.run(given.pop("recipe", None), *overrides, **given)


def flat(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (out.argmax(-1) != y).float().mean()


class Shapeless(nn.Module):
    def __init__(self, a: int, b: int, c: int) -> None:
        super().__init__()


# What a setting must be: section, key, wrong value, and what is said, alike from keyword, dict, override and recipe.
SETTINGS: list[tuple[str, str, Any, str]] = [
    ("training", "optimizer", "adagrad", r"training.optimizer='adagrad': possible are sgd, adam, adamw"),
    ("training", "loss", "msee", r"training.loss='msee': no such loss; "),
    ("training", "lr", -0.1, r"training.lr=-0.1: must be greater than 0"),
    ("training", "lr", "fast", r"training.lr='fast': must be a number"),
    ("training", "precision", "fp16", r"training.precision='fp16': possible are auto, float64, float32, tf32, bf16"),
    ("training", "num_rounds", 0, r"training.num_rounds=0: must be at least 1"),
    ("training", "num_rounds", 2.5, r"training.num_rounds=2.5: must be a whole number"),
    ("training", "num_rounds", True, r"training.num_rounds=True: must be a whole number"),
    ("training", "batch_size", 2**70, rf"training.batch_size={2**70}: must be below 2\^63"),
    ("training", "num_rounds", 10**9, r"training.num_rounds=1000000000: must be at least 1 and at most 1000000"),
    ("training", "local_epochs", 10**9, r"training.local_epochs=1000000000: must be at least 1 and at most 1000000"),
    ("training", "lr", 10**400, r"training.lr=(1000|inf).*: must be finite"),
    ("training", "lr", 1e300, r"training.lr=1e\+300: must be at most 3.4e\+38 in size"),
    ("training", "loss", ".x:y", r"loss '.x:y': not of the form package.module:name"),
    ("training", "loss", "os:path.join", r"loss 'os:path.join': not of the form package.module:name"),
    ("training", "loss", "os:sep", r"loss 'os:sep': that is not a function"),
    ("training", "join_ratio", 1.5, r"training.join_ratio=1.5: must be in \(0, 1\]"),
    ("training", "momentum", 1.0, r"training.momentum=1.0: must be in \[0, 1\)"),
    ("training", "weight_decay", -1.0, r"training.weight_decay=-1.0: must be not negative"),
    ("training", "seed", -1, r"training.seed=-1: must be not negative"),
    ("training", "rounds", 5, r"training.rounds=5: no such setting of \[training\]; did you mean num_rounds\?"),
    ("training", "learning_rate", 0.1, r"training.learning_rate=0.1: no such setting .* did you mean lr\?"),
    ("training", "moment", 0.9, r"training.moment=0.9: no such setting .* did you mean momentum\?"),
    ("evaluation", "shift", "weather", r"evaluation.shift='weather': possible are donor, pool, label, none"),
    ("evaluation", "eval_every", 0, r"evaluation.eval_every=0: must be at least 1"),
    ("evaluation", "degrees", [0.5, 2.0], r"evaluation.degrees=\[0.5, 2.0\]: must be shares in \[0, 1\]"),
    ("evaluation", "corruptions", ["foggy"], r"evaluation.corruptions='foggy': no such corruption; did you mean fog\?"),
    ("evaluation", "metric", "acuracy", r"evaluation.metric='acuracy': no such metric; did you mean accuracy\?"),
    ("evaluation", "metric", "..:y", r"metric '..:y': not of the form package.module:name"),
    ("evaluation", "draws", 10**9, r"evaluation.draws=1000000000: must be at least 1 and at most 10000"),
    ("evaluation", "matrix", "yes", r"evaluation.matrix='yes': must be true or false"),
    ("model", "buffers", "forget", r"model.buffers='forget': possible are average, local, drop"),
    ("model", "name", "a b:c", r"model 'a b:c': not of the form package.module:name"),
    ("model", "name", "mpl", r"model.name='mpl': no such model; did you mean mlp\?"),
    ("data", "dataset", "minst", r"data.dataset='minst': no such data set; did you mean mnist\?"),
    ("data", "dataset", "x", r"data.dataset='x': no such data set"),
    ("data", "dataset", "", r"data.dataset='': no such data set"),
    ("data", "dataset", "os:sep", r"data.dataset='os:sep': that is not a function"),
    ("data", "dataset", "os.path:join", r"data.dataset='os.path:join': must be a function that is called with nothing"),
    ("data", "dataset", "os:", r"data set 'os:': not of the form package.module:name"),
    ("data", "partition", "dirichelt", r"data.partition='dirichelt': no such partition; did you mean dirichlet\?"),
    ("data", "alpha", -1.0, r"data.alpha=-1.0: must be greater than 0"),
    ("data", "alhpa", 0.1, r"data.alhpa=0.1: no such setting of \[data\]; did you mean alpha\?"),
    ("data", "num_clients", 0, r"data.num_clients=0: must be at least 1"),
    ("data", "test_share", 1.0, r"data.test_share=1.0: must be in \[0, 1\)"),
    ("data", "corruption_severity", 9, r"data.corruption_severity=9: must be 1 to 5"),
]
IMPORTED = r"package.module:name|not a function|called with nothing"
KINDS: dict[str, Callable[..., Any]] = {
    "training": Training,
    "evaluation": Evaluation,
    "model": personafl.ModelChoice,
    "data": personafl.Data,
}


def one_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    assert_line(str(caught.value), message)


def assert_line(said: str, message: str) -> None:
    assert re.search(message, said), said
    assert "\n" not in said and len(said) < 900


def spoken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command line says of a mistake: one line, exit code 2, and nothing written."""
    monkeypatch.setattr(sys, "argv", ["personafl", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    assert end.value.code == 2 and not said.out
    lines = [line for line in said.err.splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1 and lines[0].startswith("personafl: ")
    return lines[0].removeprefix("personafl: ")


def as_text(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else ",".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )


@pytest.mark.parametrize(
    ("section", "key", "value", "message"), SETTINGS, ids=[f"{s}.{k}={v}"[:40] for s, k, v, _ in SETTINGS]
)
def test_a_wrong_setting_is_refused_alike_wherever_it_is_set(
    section: str,
    key: str,
    value: Any,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if not re.search(IMPORTED, message):  # what is named by a dotted path is looked at when it is needed
        one_line(lambda: KINDS[section](**{key: value}), message)
    one_line(lambda: personafl.run(algorithms="fedavg", **{section: {key: value}}), message)
    one_line(lambda: personafl.run({section: {key: value}, "algorithms": [{"name": "fedavg"}]}), message)
    said = spoken(monkeypatch, capsys, "run", "algorithms=fedavg", f"{section}.{key}={as_text(value)}", "--quiet")
    assert_line(said, message)
    assert not list(tmp_path.iterdir())


def nested(key: str, inner: dict[str, Any], depth: int) -> dict[str, Any]:
    """A table in a table in a table."""
    for _ in range(depth):
        inner = {**inner, key: inner}
    return inner


# What a call may be given wrongly: the call, and what is said.
CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: Training(0.1), r"Training\(0.1\): settings go by name, as Training\(num_rounds=\.\.\.\)"),
    (lambda: Ditto(0.1), r"Ditto\(0.1\): settings go by name"),
    (
        lambda: Ditto(proximal=1.0),  # type: ignore[call-arg]
        r"Ditto.proximal=1.0: no such setting of Ditto; did you mean proximal_weight\?",
    ),
    (lambda: Ditto(lr="fast"), r"lr='fast': must be a number"),
    (lambda: Ditto(inherit="mmd"), r"inherit='mmd': possible are .*Inherit\(\.\.\.\).*, or None"),
    (lambda: Ditto(weights="many"), r"weights='many': possible are examples, uniform"),
    (lambda: run(seeds=3), r"seeds=3: must be a list; one seed is \[3\], the first three are range\(3\)"),
    (lambda: run(seeds=None), r"seeds=None: must be a list, as range\(3\)"),
    (lambda: run(seeds=[0, 0]), r"seeds=\[0, 0\]: must differ and not be negative"),
    (lambda: run(seeds=[0.5]), r"seeds=0.5: must be a whole number"),
    (lambda: run(recipe=(X, Y)), r"recipe=.*: must be a path, a shipped name or a dict; data, model and algorithms"),
    (lambda: run(recipe="no-such"), r"recipe 'no-such': no such file, and no such shipped recipe"),
    (lambda: personafl.run("demo", 3), r"override 3: must be text"),  # type: ignore[arg-type]
    (lambda: personafl.run("demo", "alpha"), r"override 'alpha': expected section.key=value"),
    (lambda: personafl.run("demo", "dito.lr=1"), r"override dito.lr=1: 'dito' is neither a section .* nor a method"),
    (lambda: run(algorithms=3), r"algorithms=3: must be \[\[algorithms\]\] tables, names or Algorithm objects"),
    (lambda: run(algorithms=["dito"]), r"algorithm 'dito': no such algorithm; did you mean ditto\?"),
    (lambda: run(algorithms=[]), r"no algorithms: add"),
    (lambda: run(algorithms=[FedAvg(), FedAvg(lr=0.1)]), r"two methods are called 'fedavg'; give one of them another"),
    (lambda: run(algorithms=[nn.Linear(1, 1)]), r"algorithms: Linear.*: must be a name, a table with a name, or an"),
    (lambda: run(algorithms=[{"label": "x"}]), r"\[\[algorithms\]\] entry {'label': 'x'}: it has no name"),
    (lambda: run(algorithms={"a/b": "fedavg"}), r"algorithms.label='a/b': letters, digits"),
    (lambda: run(algorithms=[personafl.config.Method("a/b", "fedavg", FedAvg())]), r"algorithms.label='a/b': letters"),
    (lambda: run(algorithms=[{"name": "fedpews", "base": 3}]), r"fedpews.base: algorithms: 3: must be a name, a table"),
    (lambda: personafl.FedPeWS(base=3), r"base=3: must be an Algorithm"),  # type: ignore[arg-type]
    (
        lambda: run(algorithms=[{"name": "ditto", "inherit": {"name": [1]}}]),
        r"ditto.inherit.name=\[1\]: no such choice",
    ),
    (lambda: run(algorithms=[{"name": "ditto", "lr": np.zeros(3)}]), r"ditto.lr=array.*: must be a number"),
    (lambda: run(algorithms=[{"name": []}]), r"algorithm \[\]: no such algorithm"),
    (lambda: run(algorithms=nested("base", {"name": "fedpews"}, 5000)), r"recipe .*: nested too deeply"),
    (lambda: run(training={"lr": 10**5000}), r"training.lr=<int>: must be finite"),
    (
        lambda: run(training={"batch_size": nested("a", {}, 5000)}),
        rf"training.batch_size={NESTED}: must be a whole number",
    ),
    (lambda: run(recipe={"data": 3, "algorithms": "fedavg"}, data={"alpha": 1.0}), r"\[data\] must be a table of .* 3"),
    (lambda: run(training=Training), r"training=<class .*: must be a dict of settings or Training\(\.\.\.\)"),
    (lambda: run(training=0.1), r"training=0.1: must be a dict of settings or Training\(\.\.\.\)"),
    (lambda: run(evaluation="donor"), r"evaluation='donor': must be a dict of settings or Evaluation\(\.\.\.\)"),
    (lambda: run(model=3), r"model.name=3: must be a name, a torch.nn.Module or a function that makes one"),
    (lambda: run(model=personafl.ModelChoice), r"model=ModelChoice: a class; give an object, ModelChoice\(\.\.\.\)"),
    (lambda: run(data=3), r"data.dataset=3: must be a name, arrays \(x, y\[, clients\]\)"),
    (lambda: run(data=X), r"gave ndarray; expected a Source, \(x, y\[, clients\]\) or a list of clients' data sets"),
    (lambda: run(data=(X[:, 0], Y)), r"own: examples of shape \(40,\): must be \(N, features\) or more"),
    (lambda: run(data=(X, Y[:3])), r"40 examples but 3 labels"),
    (lambda: run(data=(X, Y, Y[:3])), r"40 examples but 3 client ids"),
    (lambda: run(data=(X * np.nan, Y)), r"(NaN|missing)"),
    (lambda: run(data=(X, Y + 10**9)), r"1000000002 is no class: they are numbered from 0, and there may be 1,000,000"),
    (
        lambda: run(data=(X, np.where(Y == 0, 2**63 - 1, Y))),
        r"9223372036854775807 is no class",
    ),
    (
        lambda: run(data=(X.astype(np.int64) + 10**9, np.stack([Y] * 6, 1))),
        r"1000000000 is no class",
    ),
    (lambda: run(data=(X, Y, np.array(["a", "b\udcff", "c"])[Y])), r"client 'b\\udcff': its name must be UTF-8"),
    (lambda: run(data="a\udcff/b"), r"data.dataset='a\\udcff/b': must be UTF-8 without a zero byte"),
    (lambda: run(out="a\0b"), r"'a\\x00b': must be UTF-8 without a zero byte"),
    (lambda: run(data=(X, Y), model=Shapeless), r"model Shapeless: called with \(\(6,\), 3\): .*missing 1 required"),
    (
        lambda: run(data=(X, Y), model=nn.Linear(5, 3)),
        r"model.name='object:Linear': fails on a batch of float32 of shape \(2, 6\)",
    ),
    (
        lambda: run(data=(X, Y), training={"loss": flat}),
        r"must give one number per example, gave \(\) for two examples",
    ),
    (lambda: run(device="tpu"), r"^device tpu: possible are auto, cpu, cuda, cuda:N"),
    (lambda: run(device="cuda:9"), r"^device cuda:9: this machine has \d+ CUDA devices"),
    (lambda: run(store="tape"), r"^store tape: possible are auto, device, host, disk"),
    (lambda: run(threads=0), r"^threads 0: must be at least 1"),
    (lambda: run(threads=100_000), r"^threads 100000: must be at least 1 and at most 1024"),
    (lambda: FedAvg(optimizer="adamw", momentum=0.9), r"momentum=0.9: adamw has none; use optimizer=sgd"),
    (lambda: personafl.COPFL(optimizer="sgd"), r"optimizer='sgd': MAMO is the optimiser, .* moments=False takes"),
    (lambda: personafl.Result.load("no-such-folder"), r"no-such-folder: not a run folder, it has no recipe.toml"),
    (
        lambda: Simulation(worlds.model(), worlds.federation(), FedAvg(), worlds.training()),  # type: ignore[arg-type]
        r"Simulation\(federation=.*\): must be Federation; the order is federation, model, algorithm, training",
    ),
    (
        lambda: Simulation(worlds.federation(), worlds.model(), "fedavg", worlds.training()),  # type: ignore[arg-type]
        r"Simulation\(algorithm='fedavg'\): must be Algorithm; .* personafl.run takes names, arrays and modules",
    ),
    (
        lambda: Simulation(worlds.federation(), worlds.model(), FedAvg(), {"lr": 0.1}),  # type: ignore[arg-type]
        r"Simulation\(training={'lr': 0.1}\): must be Training",
    ),
]


@torch.inference_mode()
def inside_inference_mode() -> Any:
    return Simulation(worlds.federation(), worlds.model(), FedAvg(), worlds.training())


CALLS.append((inside_inference_mode, r"torch.inference_mode is on: tensors made within cannot be trained"))


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[str(i) for i in range(len(CALLS))])
def test_a_wrong_call_is_refused_in_one_line(call: Callable[[], Any], message: str) -> None:
    one_line(call, message)


# What the command line may be told wrongly beside settings.
WORDS: list[tuple[tuple[str, ...], str]] = [
    (("run", "--seeds", "a"), r"--seeds a: expected whole numbers, such as 0,1,2"),
    (("run", "--seeds", "1,1"), r"--seeds 1,1: must differ and not be negative"),
    (("run", "demmo"), r"recipe 'demmo': no such file, and no such shipped recipe; did you mean demo\?"),
    (("run", "algorithms=dito"), r"algorithm 'dito': no such algorithm; did you mean ditto\?"),
    (("run", "algorithms="), r"no algorithms"),
    (("run", "num_rounds=2"), r"override num_rounds=2: did you mean training.num_rounds=2\?"),
    (("run", "ditto.proximal=1"), r"ditto.proximal=1: no such setting of ditto; did you mean proximal_weight\?"),
    (("run", "trainng.lr=1"), r"override trainng.lr=1: 'trainng' is neither a section"),
    (("run", "--device", "tpu"), r"^device tpu: possible are"),
    (("run", "data.dataset=nothing.npz"), r"data.dataset='nothing.npz': no such file"),
    (("run", "model.name=no.such:Thing"), r"model 'no.such:Thing': cannot be imported"),
    (("run", "training.loss=no.such:thing"), r"loss 'no.such:thing': cannot be imported"),
    (("info", "dito"), r"info dito: no such name; did you mean ditto\?"),
    (("compare", "nowhere"), r"nowhere: no finished run here"),
]


@pytest.mark.parametrize(("words", "message"), WORDS, ids=[" ".join(w) for w, _ in WORDS])
def test_a_wrong_command_is_refused_in_one_line(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    said = spoken(monkeypatch, capsys, *words)
    assert_line(said, message)
    assert not list(tmp_path.iterdir())


# Texts of recipes that are none.
TEXTS: list[tuple[str, str]] = [
    ("a = " + "[" * 5000, r"not valid TOML: nested too deeply"),
    ("a = " + "{a = " * 3000 + "1" + "}" * 3000, r"not valid TOML: nested too deeply"),
    (f"[data.{'.'.join(['a'] * 3000)}]\nx = 1", rf"data.a={NESTED}: no such setting of \[data\]"),
    (
        f"[[algorithms]]\nname = 'fedpews'\n[algorithms.{'.'.join(['base'] * 5000)}]\nname = 'ditto'",
        rf"fedpews.base: \[\[algorithms\]\] entry {NESTED}: it has no name",
    ),
    ("[training]\nlr = " + "1" * 5000, r"not valid TOML: Exceeds the limit"),
    ("algorithms = 3", r"algorithms=3: must be"),
    ("data = 'x'", r"\[data\] must be a table of settings, it is 'x'"),
    ("[[algorithms]]\nname = 'fedpews'\nbase = 3", r"fedpews.base: algorithms: 3: must be a name"),
    ("[training]\nbatch_size = 1180591620717411303424", r"training.batch_size=1180591620717411303424: must be below"),
    ("[[algorithms]]\nname = 'fedavg'\nlabel = \"a\\u001b\"", r"algorithms.label='a\\x1b': letters, digits"),
]


@pytest.mark.parametrize(("text", "message"), TEXTS, ids=[m for _, m in TEXTS])
def test_a_text_that_is_no_recipe_is_refused_in_one_line(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(text)
    one_line(lambda: personafl.run("mine.toml"), message)
    for command in ("run", "partition"):
        assert_line(spoken(monkeypatch, capsys, command, "mine.toml"), message)


LABELS: dict[str, list[Any]] = {
    r"letters, digits and . _": ["a/b", "..", ".lock", "a\0", "a\x1b[1m", "a\nb", "$x$", "a|b", 3],
    r"must not end in": ["table.md", "report.html", "recipe.toml", "run.json", "split.json", "Table.MD"],
    r"at most 200 bytes": ["x" * 300, "é" * 101, " ", "a ", " a"],
}


@pytest.mark.parametrize(("label", "told"), [(label, told) for told, of in LABELS.items() for label in of])
def test_a_label_that_can_name_no_folder_is_refused_before_a_run(label: Any, told: str, tmp_path: Path) -> None:
    for methods in ({label: "fedavg"}, [{"name": "fedavg", "label": label}]):
        one_line(lambda given=methods: run(algorithms=given, out=tmp_path / "o"), rf"algorithms.label=.*: {told}")  # type: ignore[misc]
    assert not list(tmp_path.iterdir())


def test_paths_of_any_text_are_written_so_that_they_can_be_read(tmp_path: Path) -> None:
    odd = tmp_path / 'a\nb \x1b[31m "c" \\ $d$ [bold]'
    odd.mkdir()
    for client in ("one\ntwo", "\x1b]0;x\x07"):
        (odd / f"{client}.csv").write_text("a,b,label\n" + "".join(f"{i},{i % 3},{i % 2}\n" for i in range(20)))
    quick = {"num_rounds": 1, "local_epochs": 1, "join_ratio": 1.0}
    made = run(data=str(odd), training=quick, evaluation={"shift": "none"}, out=tmp_path / "run\n\x1b")
    again = personafl.Result.load(tmp_path / "run\n\x1b")
    assert again.recipe.data.dataset == str(odd)
    assert [c["name"] for c in again["fedavg"].clients] == [c["name"] for c in made["fedavg"].clients]
    assert {c["name"] for c in made["fedavg"].clients} == {"one\ntwo", "\x1b]0;x\x07"}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere all names of files are text")
def test_a_file_whose_name_is_no_text_is_refused_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "a,label\n" + "".join(f"{i},{i % 2}\n" for i in range(20))
    for name in (b"data/caf\xe9.csv", b"data/b.csv", b"caf\xe9/a.csv"):
        path = Path(os.fsdecode(name))
        path.parent.mkdir(exist_ok=True)
        path.write_text(rows)
    for data, told in (
        ("data", r"data: client 'caf\\udce9': its name must be UTF-8"),
        (os.fsdecode(b"caf\xe9"), r"data.dataset='caf\\udce9': must be UTF-8 without a zero byte"),
    ):
        one_line(lambda named=data: run(data=named, out="o"), told)  # type: ignore[misc]
        assert_line(spoken(monkeypatch, capsys, "run", f"data.dataset={data}", "--out", "o"), told)
    here = Path(os.fsdecode(b"caf\xe9")).absolute()
    monkeypatch.chdir(here)  # the place of data of one's own is written out
    Path("mine").mkdir()
    Path("mine/a.csv").write_text(rows)
    one_line(lambda: run(data="mine", out=tmp_path / "o"), r"caf\\udce9/mine': must be UTF-8 without a zero byte")
    assert not (tmp_path / "o" / "fedavg").exists()


# What looks wrong and has one plain meaning: it is taken.
def test_what_has_a_plain_meaning_is_taken(tmp_path: Path) -> None:
    assert personafl.config.load({"algorithms": ["fedavg", "ditto"]}).algorithms[1].name == "ditto"
    (tmp_path / "short.toml").write_text('algorithms = ["fedavg"]\n')
    assert personafl.config.load(tmp_path / "short.toml").algorithms[0].label == "fedavg"
    assert Training(lr=np.float32(0.5), num_rounds=np.int64(3)) == Training(lr=0.5, num_rounds=3)  # type: ignore[arg-type]
    assert Evaluation(degrees=0.5).degrees == (0.5,)  # type: ignore[arg-type]
    taken = Simulation(worlds.federation(), worlds.module(), FedAvg, worlds.training())
    assert taken.algorithm == Simulation(worlds.federation(), worlds.model(), FedAvg(), worlds.training()).algorithm
    assert personafl.run("training.num_rounds=1", algorithms=FedAvg)["fedavg"].label == "fedavg"
