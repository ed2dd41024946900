"""`personafl deploy`: what is said, and the exit codes."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from personafl import cli
from personafl.deployment.flower import client, control, server
from personafl.deployment.flower.control import Run

Said = tuple[int, str, str]


@pytest.fixture
def deploy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Said]:
    """`personafl deploy` in an empty folder: exit code, and what it printed as one line each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")

    def run(*words: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["personafl", "deploy", *words])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, " ".join(out.split()), " ".join(err.split())

    return run


@pytest.fixture
def fed(deploy: Callable[..., Said]) -> Path:
    assert deploy("init", "demo", "fed", "algorithms=fedavg", "--clients", "2")[0] == 0
    return Path("fed")


def test_without_flower_a_deployment_says_how_to_get_it(
    deploy: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "flwr" else found(name, *rest))
    code, _, err = deploy("init", "demo", "fed")
    assert (code, err) == (2, "personafl: personafl deploy needs Flower: pip install 'personafl[flower]'")


def test_init_and_keys_say_what_comes_next(deploy: Callable[..., Said]) -> None:
    code, out, _ = deploy(
        "init", "demo", "fed", "algorithms=fedavg", "--clients", "2", "--address", "fl.example.org:443"
    )
    assert code == 0 and out.startswith("written to fed look through") and out.endswith("personafl deploy keys fed")
    code, out, _ = deploy("keys", "fed", "--host", "10.0.0.1")
    assert code == 0 and out.startswith("new: ca.key, ca.crt, server.key, server.crt, client-0, client-1 ")
    for words in (
        "ca.key away and keep it offline",
        "each client gets its own folder",
        "ca.crt, node.key, client.toml",
    ):
        assert words in out
    code, out, _ = deploy("keys", "fed", "--clients", "3")
    assert code == 0 and out.startswith("new: client-2 ")
    assert deploy("keys", "fed")[1].startswith("new: nothing, all was there ")


@pytest.mark.parametrize("command", ["keys", "server", "start", "status", "collect"])
def test_a_folder_of_something_else_is_refused(deploy: Callable[..., Said], command: str) -> None:
    code, _, err = deploy(command, ".")
    assert (code, err) == (
        2,
        "personafl: .: no deployment folder (no deployment.toml); personafl deploy init makes one",
    )


def test_several_methods_are_refused(deploy: Callable[..., Said]) -> None:
    code, _, err = deploy("init", "demo", "fed")
    assert code == 2 and "a deployment runs one method" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "missing are --data, --client-id, --link, --ca, --key"),
        (["--data", "d", "--plain"], "missing are --client-id, --link"),
        (["client.toml", "--data", "d"], "client.toml has all settings: leave --data away, or the file"),
        (["client.toml"], "client.toml: no such file"),
    ],
)
def test_a_client_is_told_what_it_needs(deploy: Callable[..., Said], words: list[str], told: str) -> None:
    code, _, err = deploy("client", *words)
    assert code == 2 and told in err


def test_options_of_a_client_are_its_file(deploy: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(
        client, "take_part", lambda file, plain, say, code: seen.update(file=file, plain=plain, code=code)
    )
    Path("data").mkdir()
    words = ["--data", "data", "--client-id", "me", "--link", "localhost:1", "--plain"]
    assert deploy("client", *words) == (0, "", "")
    assert seen == {"file": Path("me/client.toml"), "plain": True, "code": Path.cwd()}


def test_a_client_that_cannot_take_part_ends_with_1(
    deploy: Callable[..., Said], fed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise client.RefusedError("the certificate is wrong")

    monkeypatch.setattr(client, "take_part", refuse)
    assert deploy("client", "fed/client.toml") == (1, "", "personafl: the certificate is wrong")


def test_a_server_that_does_not_start_ends_with_1(
    deploy: Callable[..., Said], fed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(*_: object) -> None:
        raise server.EndedError("the SuperLink ended by itself")

    monkeypatch.setattr(server, "serve", end)
    assert deploy("server", "fed") == (1, "", "personafl: the SuperLink ended by itself")


def test_start_prints_the_run_and_wait_tells_how_it_ended(
    deploy: Callable[..., Said], fed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "submit", lambda folder: "77")
    code, out, _ = deploy("start", "fed")
    assert code == 0 and out == (
        f"run 77; its log: FLWR_TELEMETRY_ENABLED=0 FLWR_HOME={Path.cwd()}/fed/flower flwr log 77 link"
    )
    monkeypatch.setattr(control, "await_end", lambda *_: Run("77", "finished:completed", "", 1, 1, 1.0))
    assert deploy("start", "fed", "--wait")[:2] == (0, f"{out} run 77 is completed; personafl deploy collect fed")
    monkeypatch.setattr(control, "await_end", lambda *_: Run("77", "finished:failed", "no memory", 1, 1, 1.0))
    assert deploy("start", "fed", "--wait") == (1, out, "personafl: run 77: finished:failed: no memory")


def test_status_and_collect_in_words_and_as_json(deploy: Callable[..., Said], fed: Path) -> None:
    assert deploy("status", "fed") == (0, "server not running", "")
    assert json.loads(deploy("status", "fed", "--json")[1])["nodes"] == []
    code, _, err = deploy("collect", "fed")
    assert code == 2 and "no stage is done; no run is under way, personafl deploy start begins one" in err
    results = fed / "results"
    results.mkdir()
    (results / "summary.json").write_text('{"accuracy": {"personal": {"mean": 0.5}}}')
    (results / "clients.csv").write_text("client,own\na,0.25\nb,0.75\n")
    code, out, _ = deploy("collect", "fed")
    assert code == 0 and out.startswith("client own a 0.2500 b 0.7500 accuracy, personal: 0.5000 (mean over clients, ")
    assert json.loads(deploy("collect", "fed", "--json")[1])["clients"][1] == {"client": "b", "own": 0.75}


def test_the_page_names_commands_and_options_that_there_are(deploy: Callable[..., Said]) -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "deployment.md").read_text().split())
    named = re.findall(r"personafl deploy (\w+)((?: (?!personafl|&&)[^`]*?)?)(?=`| personafl |$)", text)
    options: dict[str, set[str]] = {}
    for command, rest in named:
        options.setdefault(command, set()).update(re.findall(r"--[a-z-]+", rest))
    assert options.keys() == {"init", "keys", "server", "client", "start", "status", "collect"}
    assert options["client"] >= {"--data", "--client-id", "--link", "--ca", "--key", "--state", "--plain"}
    for command, given in options.items():
        told = deploy(command, "--help")[1]
        assert all(option in told for option in given), command


@pytest.mark.parametrize("command", ["server", "client"])
def test_plain_says_what_it_means(deploy: Callable[..., Said], command: str) -> None:
    assert "who reaches the port can run code" in deploy(command, "--help")[1]
