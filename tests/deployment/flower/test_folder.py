"""The deployment folder that init writes."""

from __future__ import annotations

import ast
import configparser
import os
import stat
import tomllib
from pathlib import Path

import pytest

from personafl import config
from personafl.core.errors import UserError
from personafl.deployment.flower import folder
from personafl.deployment.flower.folder import Folder
from personafl.deployment.flower.private_files import private_files
from tests.deployment.flower.folders import made


def test_a_folder_has_all_that_a_deployment_needs(tmp_path: Path) -> None:
    found = made(tmp_path / "fed", clients=3)
    written = {str(p.relative_to(found.root)) for p in found.root.rglob("*") if p.is_file()}
    app = {f"app/personafl_app/{n}.py" for n in ("__init__", "server", "client")} | {"app/pyproject.toml"}
    units = {"systemd/personafl-server.service", "systemd/personafl-client.service"}
    assert written == {"recipe.toml", "deployment.toml", "client.toml", "nginx.conf"} | app | units
    assert [m.name for m in config.load(str(found.recipe)).algorithms] == ["fedavg"]
    deployment = tomllib.loads(found.deployment.read_text())
    assert (deployment["deployment"]["name"], deployment["deployment"]["clients"]) == ("fed", 3)
    assert deployment["link"] == {"address": "localhost:8443", "port": 9443}
    client = tomllib.loads(found.client.read_text())
    assert client["link"] == {"address": "localhost:8443", "ca": "ca.crt", "key": "node.key"}
    assert client["client"]["id"] == folder.CLIENT
    assert Folder.open(tmp_path / "fed") == found


def test_every_setting_stands_under_a_comment(tmp_path: Path) -> None:
    found = made(tmp_path / "fed")
    for file in (found.deployment, found.client):
        lines = file.read_text().splitlines()
        settings = [i for i, line in enumerate(lines) if " = " in line and not line.startswith("#")]
        assert len(settings) >= 7 and all(lines[i - 1].startswith("# ") for i in settings)


def test_the_app_has_no_dependencies_and_takes_the_apps_of_the_package(tmp_path: Path) -> None:
    found = made(tmp_path / "fed")
    project = tomllib.loads((found.app / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == []
    assert project["tool"]["flwr"]["app"]["config"] == {"folder": ""}  # what is overridden must be there
    for side, component in project["tool"]["flwr"]["app"]["components"].items():
        module, _, name = component.partition(":")
        tree = ast.parse((found.app / f"{module.replace('.', '/')}.py").read_text())
        (taken,) = (n for n in tree.body if isinstance(n, ast.ImportFrom))
        (set_,) = (n for n in tree.body if isinstance(n, ast.Assign))  # Flower looks for an assignment
        assert (taken.module, taken.names[0].name) == ("personafl.deployment.flower", side.replace("app", "_app"))
        assert ast.unparse(set_) == f"{name} = _module.app"


def test_units_start_the_commands(tmp_path: Path) -> None:
    found = made(tmp_path / "a fed")
    unit = configparser.ConfigParser(interpolation=None, strict=False)  # filters of system calls add up
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(found.root / "systemd" / "personafl-server.service")
    assert unit["Service"]["ExecStart"].endswith(f'personafl" deploy server "{found.root}"')
    assert unit["Service"]["KillMode"] == "mixed"
    assert unit["Service"]["ReadWritePaths"] == f'"{found.root}"'
    assert "AmbientCapabilities" in unit["Service"] and not unit["Service"]["AmbientCapabilities"]
    low = folder.init("demo", ["algorithms=fedavg"], tmp_path / "low", 2, "fl.example.org:443")
    text = (low.root / "systemd" / "personafl-server.service").read_text()
    assert "AmbientCapabilities=CAP_NET_BIND_SERVICE\n" in text


def test_folders_with_secrets_are_closed_also_where_they_were_open(tmp_path: Path) -> None:
    found = made(tmp_path / "fed")
    for name in ("server", "results", "logs", "flower", "keys"):
        (found.root / name).mkdir()
        (found.root / name).chmod(0o755)  # as mkdir -p makes it
    assert found.make_private() == []
    for name in ("server", "results", "logs", "flower", "keys"):
        assert stat.S_IMODE((found.root / name).stat().st_mode) == 0o700, name


def test_files_are_private_and_the_mask_is_put_back(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with private_files():
            (tmp_path / "a").touch()
            (tmp_path / "b").mkdir()
        (tmp_path / "c").touch()
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in "abc"}
    assert modes == {"a": 0o600, "b": 0o700, "c": 0o644}


def test_a_folder_that_cannot_be_closed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network drive, or where another user owns it."""
    found = made(tmp_path / "fed")
    found.logs.mkdir()
    found.logs.chmod(0o755)

    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "chmod", refuse)
    assert found.make_private() == [found.logs]


def test_several_methods_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a deployment runs one method, this recipe has fedavg, ditto; choose with"):
        folder.init("demo", ["algorithms=fedavg,ditto"], tmp_path / "fed", 2, None)
    assert not (tmp_path / "fed").exists()


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(UserError, match="is there already and not empty"):
        made(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    assert made(tmp_path).deployment.is_file()


@pytest.mark.parametrize("name", ['a"b', "a$b", "a;b", "a\nb", "100%"])
def test_a_path_that_flower_nginx_or_systemd_would_misread_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="the path must be without"):
        made(tmp_path / name)


def test_the_number_of_clients_is_the_recipe_s_unless_given(tmp_path: Path) -> None:
    found = folder.init("demo", ["algorithms=fedavg", "data.num_clients=7"], tmp_path / "fed", None, None)
    assert tomllib.loads(found.deployment.read_text())["deployment"]["clients"] == 7
    with pytest.raises(UserError, match=r"--clients 0: must be at least 1"):
        made(tmp_path / "other", clients=0)


def test_a_name_is_one_that_settings_take(tmp_path: Path) -> None:
    found = made(tmp_path / "._my första fed")
    assert tomllib.loads(found.deployment.read_text())["deployment"]["name"] == "my-f-rsta-fed"


def test_what_is_no_deployment_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no deployment folder"):
        Folder.open(tmp_path)


def test_what_cannot_stop_early_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"DMPFL cannot be combined with training\.target=0\.9, because"):
        folder.init("demo", ["algorithms=dm-pfl", "training.target=0.9"], tmp_path / "fed", 2, None)
    assert not (tmp_path / "fed").exists()
