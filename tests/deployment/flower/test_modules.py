"""Modules of one's own: copied by init, handed to clients, and named at once where they are missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from personafl.core.errors import UserError
from personafl.deployment import coordinator
from personafl.deployment import federation_spec as world_module
from personafl.deployment import node as node_module
from personafl.deployment.federation_spec import FORMAT
from personafl.deployment.flower import control, folder, keys, modules
from personafl.deployment.messages import Reply, Request
from tests.deployment import worlds

NET = """
import torch
from torch import nn

from {helper} import WIDTH


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.first, self.last = nn.Linear(shape[-1] * shape[-2], WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, x):
        return self.last(torch.relu(self.first(x.flatten(1))))
"""


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """No module of these names has been imported before, by another test, or is after."""
    path = list(sys.path)
    forget()
    yield
    sys.path[:] = path
    forget()


def forget() -> None:
    for name in [n for n in sys.modules if n.startswith("own_")]:
        del sys.modules[name]


def written(home: Path) -> Path:
    """A recipe and the modules of its model beside it."""
    home.mkdir()
    (home / "own_net.py").write_text(NET.format(helper="own_width"))
    (home / "own_width.py").write_text("import os\n\nWIDTH = 4\n")
    (home / "own_other.py").write_text("raise RuntimeError\n")
    (home / "own.toml").write_text(worlds.recipe("fedavg", model={"name": "own_net:Net"}))
    return home / "own.toml"


def test_init_copies_the_modules_of_a_recipe_and_keys_hands_them_to_clients(tmp_path: Path) -> None:
    """With those beside them that they import, and no others."""
    said: list[str] = []
    path = written(tmp_path / "own")
    made = folder.init(str(path), [], tmp_path / "fed", 2, None, say=said.append)
    assert {p.name for p in made.modules.iterdir()} == {"own_net.py", "own_width.py"}
    assert said == [f"copied to {made.modules}: own_net.py, own_width.py"]
    keys.make(made, 2)
    for name in ("client-0", "client-1"):
        copies = made.clients / name / "modules"
        assert {p.name: p.read_text() for p in copies.iterdir()} == {
            p.name: p.read_text() for p in made.modules.iterdir()
        }


def test_a_package_is_copied_whole(tmp_path: Path) -> None:
    path = written(tmp_path / "own")
    package = path.parent / "own_package"
    (package / "inner").mkdir(parents=True)
    (package / "__pycache__").mkdir()
    for file in ("__init__.py", "inner/__init__.py", "inner/sizes.json", "__pycache__/x.pyc", ".hidden"):
        (package / file).write_text("")
    (package / "template.py").write_text("class {{ name }}:\n")  # no Python, and never imported
    (package / "inner" / "net.py").write_text(NET.format(helper="own_width"))
    path.write_text(worlds.recipe("fedavg", model={"name": "own_package.inner.net:Net"}))
    made = folder.init(str(path), [], tmp_path / "fed", 2, None)
    copied = {str(p.relative_to(made.modules)) for p in made.modules.rglob("*") if p.is_file()}
    inside = {f"own_package/{n}" for n in ("__init__.py", "inner/__init__.py", "inner/sizes.json", "inner/net.py")}
    inside |= {"own_package/template.py"}
    assert copied == {"own_width.py"} | inside


def test_a_method_and_a_loss_are_copied_too(tmp_path: Path) -> None:
    path = written(tmp_path / "own")
    home = path.parent
    (home / "own_method.py").write_text(
        "from dataclasses import dataclass\nimport personafl\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Mine(personafl.FedAvg):\n    pass\n"
    )
    (home / "own_loss.py").write_text("def loss(out, y):\n    return (out[..., 0] - y) ** 2\n")
    path.write_text(
        worlds.recipe("fedavg", training={"loss": "own_loss:loss"}).replace('"fedavg"', '"own_method:Mine"')
    )
    made = folder.init(str(path), [], tmp_path / "fed", 2, None)
    assert {p.name for p in made.modules.iterdir()} == {"own_loss.py", "own_method.py"}


def test_what_is_installed_is_named_and_not_copied(tmp_path: Path) -> None:
    path, said = written(tmp_path / "own"), list[str]()
    path.write_text(worlds.recipe("fedavg", training={"loss": "pytest:approx"}))
    made = folder.init(str(path), [], tmp_path / "fed", 2, None, say=said.append)
    assert said == ["to be installed on every machine, in the same version: pytest"] and not made.modules.exists()


def test_what_a_copied_module_imports_is_copied_or_named(tmp_path: Path) -> None:
    """A folder without __init__.py, in it an import of an installed package; PyTorch comes with personafl."""
    path, said = written(tmp_path / "own"), list[str]()
    (path.parent / "own_parts").mkdir()
    (path.parent / "own_parts" / "width.py").write_text("import hypothesis\nimport numpy\n\nWIDTH = 4\n")
    (path.parent / "own_net.py").write_text(NET.format(helper="own_parts.width"))
    made = folder.init(str(path), [], tmp_path / "fed", 2, None, say=said.append)
    assert {str(p.relative_to(made.modules)) for p in made.modules.rglob("*.py")} == {
        "own_net.py",
        "own_parts/width.py",
    }
    assert said[-1] == "to be installed on every machine, in the same version: hypothesis"


def test_a_missing_module_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    path = written(tmp_path / "own")
    (path.parent / "own_net.py").unlink()
    with pytest.raises(UserError, match=r"model\.name 'own_net:Net': cannot be imported: No module named 'own_net'"):
        folder.init(str(path), [], tmp_path / "fed", 2, None)
    assert not (tmp_path / "fed").exists()


def test_what_is_too_large_is_to_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "own")
    monkeypatch.setattr(modules, "MOST_BYTES", 100)
    with pytest.raises(UserError, match=r"\(own_net\.py, own_width\.py\) have .* install them as a package"):
        folder.init(str(path), [], tmp_path / "fed", 2, None)


def test_the_server_looks_for_the_modules_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process like that of its app, which has no working directory of the user's."""
    path = written(tmp_path / "own")
    made = folder.init(str(path), [], tmp_path / "fed", 2, None)
    monkeypatch.chdir(path.parent)
    control.check_recipe_imports(made)
    (made.modules / "own_width.py").unlink()
    why = r"'own_net:Net': cannot be imported: No module named 'own_width'\. Put its module into .*fed/modules"
    with pytest.raises(UserError, match=why):
        control.submit(made)


def test_a_recipe_without_code_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process"))
    made = folder.init("demo", ["algorithms=fedavg"], tmp_path / "fed", 2, None)
    control.check_recipe_imports(made)


def test_a_client_without_the_module_says_so_in_its_first_answer_and_is_taken_once_it_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every message has a process of its own, which finds what has been put there."""
    text = worlds.recipe("fedavg", training={"num_rounds": 1}, model={"name": "own_net:Net"})
    path = written(tmp_path / "own")
    monkeypatch.setattr(coordinator, "RETRY", -1.0)
    monkeypatch.setattr(node_module, "build_parts", world_module.build_parts)
    seen: list[str] = []

    def spoil(node: int, request: Request, answer: Callable[[Request], Reply]) -> Reply:
        with pytest.MonkeyPatch.context() as patch:
            if node == 102 and len(seen) < 2:  # a machine without the file
                patch.setattr(sys, "path", [p for p in sys.path if p != str(path.parent)])
                patch.delitem(sys.modules, "own_net", raising=False)
            reply = answer(request)
        if request.kind == "describe" and reply.told.get("error"):
            seen.append(reply.told["error"])
        return reply

    monkeypatch.syspath_prepend(str(path.parent))
    server, _ = worlds.deployed(text, tmp_path, spoil=spoil)
    server.run()
    why = (
        "model.name 'own_net:Net': cannot be imported: No module named 'own_net'. "
        "At the client it has to be installed, or its file has to be beside client.toml or in modules/ there."
    )
    assert seen == [why, why]
    assert f"client c2 is not used: {seen[0]}" in caplog.text
    assert [m.closed for m in server.roster.members] == [True] * 4


def test_a_server_without_the_module_ends_before_it_waits_for_anybody(tmp_path: Path) -> None:
    text = worlds.recipe("fedavg", model={"name": "own_missing:Net"})
    with pytest.raises(UserError, match=r"No module named 'own_missing'\. At the server its module has to be in"):
        worlds.deployed(text, tmp_path)


def test_a_module_that_fails_is_named_without_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "own")
    monkeypatch.syspath_prepend(str(path.parent))
    text = worlds.recipe("fedavg", model={"name": "own_other:Net"})
    node = worlds.nodes(tmp_path, 1)[100]
    reply = node.answer(Request("describe", {"experiment": "e", "number": 0, "recipe": text, "format": FORMAT}))
    assert reply.told["error"].startswith("model.name 'own_other:Net': cannot be imported: RuntimeError. At the client")
