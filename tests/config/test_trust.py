"""Looking at a recipe or a run folder imports nothing that it names."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import personafl
from personafl import cli, config
from personafl.config.trust import own_code
from personafl.core.errors import UserError

# A file that leaves a trace where it is imported. It has all a recipe may name.
PLANTED = """
from pathlib import Path
import numpy as np, torch, personafl
Path(__file__).with_suffix(".trace").touch()

class Net(torch.nn.Linear):
    def __init__(self, shape, classes):
        super().__init__(shape[0], classes)

class Mine(personafl.FedAvg):
    pass

def data():
    draw = np.random.default_rng(0)
    return draw.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2

def loss(out, y):
    return torch.nn.functional.cross_entropy(out, y, reduction="none")
"""
QUICK = {"num_rounds": 1, "local_epochs": 1, "join_ratio": 1.0}
X, Y = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a module in it; what remains is the trace of its import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "planted.py").write_text(PLANTED)
    yield tmp_path / "planted.trace"
    sys.modules.pop("planted", None)


PARTS: list[tuple[dict[str, Any], str]] = [
    ({"data": {"dataset": "planted:data"}}, "data.dataset='planted:data'"),
    ({"model": {"name": "planted:Net"}}, "model.name='planted:Net'"),
    ({"training": {"loss": "planted:loss"}}, "training.loss='planted:loss'"),
    ({"evaluation": {"metric": "planted:loss"}}, "evaluation.metric='planted:loss'"),
    ({"algorithms": "fedavg, planted:Mine"}, "algorithms='planted:Mine'"),
    ({"algorithms": ["planted:Mine"]}, "algorithms='planted:Mine'"),
    ({"algorithms": [{"name": "planted:Mine", "label": "a"}]}, "algorithms='planted:Mine'"),
    ({"algorithms": {"name": "planted:Mine"}}, "algorithms='planted:Mine'"),
    ({"algorithms": {"label": "planted:Mine"}}, "algorithms='planted:Mine'"),  # a method called label
    ({"algorithms": {"a": {"name": "fedpews", "base": "planted:Mine"}}}, "algorithms='planted:Mine'"),
    ({"algorithms": [{"name": "fedpews", "base": {"name": "planted:Mine"}}]}, "algorithms='planted:Mine'"),
    ({"algorithms": [{"name": "fedpews", "base": {"name": "fedpews", "base": "planted:Mine"}}]}, "'planted:Mine'"),
]


@pytest.mark.parametrize(("part", "told"), PARTS, ids=[str(p) for p, _ in PARTS])
def test_what_a_recipe_names_is_told_and_not_imported(part: dict[str, Any], told: str, planted: Path) -> None:
    sys.path.append(str(planted.parent))
    recipe = {"algorithms": ["fedavg"]} | part
    with pytest.raises(UserError) as refused:
        config.load(recipe, trust=False)
    assert told in str(refused.value) and "--trust" in str(refused.value) and "\n" not in str(refused.value)
    assert not planted.exists() and "planted" not in sys.modules


def test_all_that_is_named_is_told() -> None:
    raw = {
        "data": {"dataset": "a:data", "label": "not:code"},
        "model": {"name": "b:Net", "head": "(?:fc)"},
        "algorithms": [{"name": "c:D", "label": "not:this"}, {"name": "object:E"}, "ditto"],
    }
    assert own_code(raw) == [("data.dataset", "a:data"), ("model.name", "b:Net"), ("algorithms", "c:D")]


def test_what_a_user_gives_or_types_needs_no_trust(planted: Path) -> None:
    recipe = {"data": {"dataset": "planted:data"}, "model": {"name": "planted:Net"}, "algorithms": ["planted:Mine"]}
    given = {"data": (X, Y), "algorithms": [personafl.Ditto()]}
    made = config.load(recipe, ["model.name=elsewhere:Net"], given, trust=False)
    assert (made.model.name, made.algorithms[0].name) == ("elsewhere:Net", "ditto")
    with pytest.raises(UserError, match=r"model.name='planted:Net': it is not imported"):
        config.load(recipe, (), given, trust=False)
    with pytest.raises(UserError, match=r"algorithms='planted:Mine': it is not imported"):
        config.load(
            recipe, ["algorithms=planted:Mine"], {"data": (X, Y), "model": personafl.ModelChoice()}, trust=False
        )
    assert not planted.exists()


def spoken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["personafl", *words])
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_run_imports_what_its_recipe_names_and_looking_at_it_does_not(
    planted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.toml").write_text(
        'algorithms = ["planted:Mine"]\n[data]\ndataset = "planted:data"\nnum_clients = 2\npartition = "iid"\n'
        "[model]\nname = 'planted:Net'\n[training]\nnum_rounds = 1\nlocal_epochs = 1\n[evaluation]\nshift = 'none'\n"
    )
    code, _, err = spoken(monkeypatch, capsys, "partition", "mine.toml")
    assert code == 2 and len(err.splitlines()) == 1
    assert "mine.toml names code of its own, data.dataset='planted:data', model.name='planted:Net', " in err
    assert not planted.exists() and str(planted.parent) not in sys.path
    code, out, err = spoken(monkeypatch, capsys, "run", "mine.toml", "--out", "ran", "--quiet")
    assert code == 0 and planted.exists(), err
    assert sys.path[-1] == str(planted.parent)  # behind what is installed
    for forget in (planted.unlink, lambda: sys.modules.pop("planted"), lambda: sys.path.remove(str(planted.parent))):
        forget()
    code, out, _ = spoken(monkeypatch, capsys, "compare", "ran", "--html", "page.html")
    assert code == 0 and "planted-Mine" in out and not planted.exists()
    with pytest.raises(UserError, match=r"ran/recipe.toml names code of its own, .*; --trust, in Python trust=True"):
        personafl.Result.load("ran")
    assert not planted.exists()
    code, out, err = spoken(monkeypatch, capsys, "partition", "mine.toml", "--trust")
    assert code == 0 and "40 samples" in out and planted.exists(), err
    assert personafl.Result.load("ran", trust=True).labels == ("planted-Mine",)


def test_a_given_part_needs_no_trust_to_be_loaded(planted: Path) -> None:
    sys.path.append(str(planted.parent))
    quick = {"training": QUICK, "evaluation": {"shift": "none"}}
    ran = personafl.run({"model": {"name": "planted:Net"}, "algorithms": ["fedavg"], **quick}, data=(X, Y), out="run")
    planted.unlink()
    net = sys.modules.pop("planted").Net
    again = personafl.Result.load("run", data=(X, Y), model=net)
    assert again["fedavg"].summary["accuracy"] == ran["fedavg"].summary["accuracy"]
    assert not planted.exists() and "planted" not in sys.modules


def test_files_of_the_working_directory_stand_for_no_package_that_is_installed(tmp_path: Path) -> None:
    """`python -m` puts the working directory first; a partition of digits needs scikit-learn, its plot matplotlib."""
    for name in ("sklearn", "scipy", "matplotlib", "pandas"):
        (tmp_path / f"{name}.py").write_text(f"open({name + '.trace'!r}, 'w')")
    words = ["partition", "data.num_clients=2", "--plot", "plot.png"]
    ended = subprocess.run(
        [sys.executable, "-m", "personafl", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0 and "1797 samples" in ended.stdout, ended.stderr
    assert not list(tmp_path.glob("*.trace"))
