"""Tables of deployment.toml and client.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from personafl.core.errors import UserError
from personafl.deployment.flower import settings
from personafl.deployment.flower.settings import ClientLink, ServerLink


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("fl.example.org:8443", ("fl.example.org", 8443)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_an_address_is_host_and_port(address: str, parts: tuple[str, int]) -> None:
    assert settings.split_address("link.address", address) == parts


@pytest.mark.parametrize(
    "wrong",
    ["host", "host:", ":1", "host:0", "host:65536", "::1:8443", "https://host:1", "a b:1", "[host]:1", "h;x:1", "h:1x"],
)
def test_what_is_no_address_is_refused(wrong: str) -> None:
    with pytest.raises(UserError, match=r"link\.address='.*': must be host:port"):
        ServerLink(address=wrong)


def test_the_proxy_and_the_superlink_cannot_have_one_port() -> None:
    with pytest.raises(UserError, match=r"link\.port=8443: must be 1 to 65535 and not 8443"):
        ServerLink(address="host:8443", port=8443)


@pytest.mark.parametrize("made", [ServerLink(address="h:1"), ClientLink(address="h:1", ca="a b.crt", key='"quoted"')])
def test_a_written_table_has_every_setting_under_a_comment_and_is_read_back(made: ServerLink | ClientLink) -> None:
    text = settings.commented(made)
    assert type(made)(**tomllib.loads(text)["link"]) == made
    lines = text.splitlines()[1:]
    assert all(comment.startswith("# ") for comment in lines[::2]) and len(lines) == 2 * len(type(made).names())


def client(folder: Path, text: str) -> Path:
    file = folder / "client.toml"
    file.write_text(text)
    return file


def test_paths_of_a_client_are_relative_to_its_file(tmp_path: Path) -> None:
    found = settings.read_client(client(tmp_path, '[client]\nid = "a"\ndata = "d"\n[link]\nkey = "/k"\n'))
    assert (found.id, found.state, found.ca, found.key) == ("a", tmp_path / "state", tmp_path / "ca.crt", Path("/k"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"\[client\] needs id = a text; it has None"),
        ('client = "a"', r"\[client\] needs id"),
        ('[client]\nid = "a"', r"\[client\] needs data"),
        ('[client]\nid = "a"\ndata = "d"\nstate = 3', "client.state=3: must be a folder"),
        ('link = 3\n[client]\nid = "a"\ndata = "d"', r"\[link\] must be a table"),
        ('[client]\nid = "a"\ndata = "d"\n[link]\nadress = "h:1"', "did you mean address"),
        ("[client", "not valid TOML"),
    ],
)
def test_what_is_wrong_with_a_client_s_file_is_said(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"client\.toml: .*{words}"):
        settings.read_client(client(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone\.toml: no such file"):
        settings.read_client(tmp_path / "gone.toml")
