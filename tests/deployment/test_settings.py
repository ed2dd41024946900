"""The two files people write."""

from __future__ import annotations

from pathlib import Path

import pytest

from personafl.core.errors import UserError
from personafl.deployment.settings import ClientSettings, Deployment


def test_folders_are_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "client.toml"
    path.write_text('[client]\nid = "a"\ndata = "here"\nstate = "/var/state"\n[other]\nx = 1\n')
    found = ClientSettings.read(path)
    assert found.data == str(tmp_path / "here") and found.state == "/var/state"
    path.write_text('[client]\nid = "a"\ndata = "own.module:load"\n')
    assert ClientSettings.read(path).data == "own.module:load"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", r"must have a table \[deployment\]"),
        ("deployment = 5", r"must have a table \[deployment\]"),
        ("[deployment", "cannot be read"),
        ("[deployment]\nclients = 0", "at least 1"),
        ("[deployment]\nclients = 2\nstart = 3", r"at least 0 and at most clients \(2\)"),
        ("[deployment]\nclients = 2\nquorum = 3", r"at least 0 and at most clients \(2\)"),
        ("[deployment]\nquorum_timeout = 0", "greater than 0"),
        ("[deployment]\nround_timeout = 0", "greater than 0"),
        ('[deployment]\nname = "../x"', "letters, digits"),
        ('[deployment]\nlabels = ["a", "a"]', "different names"),
        ('[deployment]\noffline = "maybe"', "skip"),
        ("[deployment]\nnodes = 3", "nodes"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "deployment.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=why) as e:
        Deployment.read(path)
    assert str(path) in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("change", [{"id": "../x"}, {"id": ""}, {"data": ""}, {"threads": -1}, {"state": ""}])
def test_a_client_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(change))):
        ClientSettings(**({"id": "a", "data": "x"} | change))  # type: ignore[arg-type]


def test_all_clients_are_waited_for_unless_fewer_are_enough() -> None:
    assert Deployment(clients=4).at_start == 4 and Deployment(clients=4, start=2).at_start == 2
