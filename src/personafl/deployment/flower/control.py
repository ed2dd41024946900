"""The server's side of a SuperLink, by the command `flwr`: nodes and their keys, runs."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from personafl.core.errors import UserError
from personafl.deployment.flower.folder import Folder
from personafl.deployment.flower.private_files import make_private
from personafl.deployment.flower.processes import answers, call, environment, option
from personafl.deployment.own_code import named_code
from personafl.deployment.settings import Deployment
from personafl.storage import files

WAIT_SECONDS = 3.0  # between questions whether a run has ended
AWAY_SECONDS = 120.0  # that a server may be away while one waits
LINK = "link"
"""What the SuperLink is called in Flower's settings."""


_IMPORT_RECIPE = """\
import sys
from pathlib import Path
from personafl.core.errors import UserError
from personafl.deployment.federation_spec import read_recipe
try:
    read_recipe(Path(sys.argv[1]).read_text(encoding="utf-8"), hint=sys.argv[2])
except UserError as e:
    sys.exit(str(e))
"""


@dataclass(frozen=True)
class Run:
    """A run as the SuperLink tells of it."""

    id: str
    status: str  # pending, starting, running, finished:completed, finished:failed, finished:stopped
    details: str
    inbound: int  # bytes, by Flower's own count
    outbound: int
    seconds: float

    @property
    def finished(self) -> bool:
        return self.status.startswith("finished")

    @property
    def completed(self) -> bool:
        return self.status == "finished:completed"


def write_settings(folder: Folder, plain: bool) -> None:
    """Flower's `config.toml`: where the SuperLink is."""
    link: dict[str, Any] = {"address": f"127.0.0.1:{folder.link().port}"}
    link |= {"insecure": True} if plain else {"root-certificates": str(folder.keys / "ca.crt")}
    make_private(folder.home)  # its database holds what clients send
    text = tomli_w.dumps({"superlink": {"default": LINK, LINK: link}})
    (folder.home / "config.toml").write_text(text, encoding="utf-8")


def has_keys(root: Path) -> bool:
    """Whether the nodes of a deployment have keys: not in plain mode, and not where there is no SuperLink of ours."""
    file = Folder(root).home / "config.toml"
    if not file.is_file():
        return False
    try:
        told = tomllib.loads(file.read_text(encoding="utf-8"))
        return told["superlink"][LINK].get("insecure") is not True
    except (OSError, ValueError, KeyError, AttributeError):
        return True  # rather refuse a client than let it take another's name


def is_up(folder: Folder) -> bool:
    """Whether the SuperLink can be asked."""
    return (folder.home / "config.toml").is_file() and answers(folder.link().port)


def ask(folder: Folder, *arguments: str) -> dict[str, Any]:
    """An answer of `flwr`."""
    if not is_up(folder):
        raise UserError(f"{folder.root}: its server is not running; personafl deploy server starts it")
    return call(arguments, environment(folder.home, folder.root), folder.root)


def nodes(folder: Folder) -> dict[str, str]:
    """The status of every node by its id: registered, online, offline or unregistered."""
    return {n["node-id"]: n["status"] for n in ask(folder, "supernode", "list", LINK)["nodes"]}


def runs(folder: Folder) -> list[Run]:
    """All runs, the newest first."""
    found = ask(folder, "list", LINK)["runs"]
    return [_run(r) for r in sorted(found, key=lambda r: str(r["pending-at"]), reverse=True)]


def run(folder: Folder, number: str) -> Run:
    """One run."""
    return _run(ask(folder, "list", LINK, "--run-id", number)["runs"][0])


def _run(told: dict[str, Any]) -> Run:
    traffic = told["network-traffic"]
    return Run(
        id=str(told["run-id"]),
        status=str(told["status"]),
        details=str(told["status-details"]),
        inbound=int(traffic["inbound-bytes"]),
        outbound=int(traffic["outbound-bytes"]),
        seconds=float(told["elapsed"]),
    )


def check_recipe_imports(folder: Folder) -> None:
    """Refuse a recipe whose code the server's app could not import, in a process like that app's.

    Raises:
        UserError: A module is missing or broken.
    """
    try:
        text = files.read_text(folder.recipe)
        named = named_code(tomllib.loads(text))
    except (OSError, ValueError, RecursionError):  # the server app says what is wrong with it
        return
    if not named:
        return
    hint = f"Put its module into {folder.modules} and, at every client, into modules/ beside its client.toml."
    command = [sys.executable, "-c", _IMPORT_RECIPE, str(folder.recipe), hint]
    env = environment(folder.home, folder.modules, folder.root)
    done = subprocess.run(command, env=env, cwd=folder.root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{folder.recipe}: {(done.stderr.strip().splitlines() or ['it cannot be read'])[-1]}")


def submit(folder: Folder) -> str:
    """Start a run and give its id; refused while another is under way."""
    Deployment.read(folder.deployment)
    check_recipe_imports(folder)
    if busy := [r.id for r in runs(folder) if not r.finished]:
        raise UserError(
            f"run {busy[0]} is under way; wait for it, or stop it: {by_hand(folder)} flwr stop {busy[0]} {LINK}"
        )
    started = ask(folder, "run", str(folder.app), LINK, "-c", option("folder", folder.root))
    return str(started["run-id"])


def await_end(folder: Folder, number: str) -> Run:
    """A run once it has ended; a server that is started again in the meantime is waited for."""
    away: float | None = None  # since when it cannot be asked
    why = ""
    while True:
        found = None
        if is_up(folder):
            try:
                found = run(folder, number)
            except UserError as e:  # it may go away while it is asked
                why = f": {e}"
        if found is not None and found.finished:
            return found
        away = None if found is not None else away or time.monotonic()
        if away is not None and time.monotonic() - away > AWAY_SECONDS:
            raise UserError(f"{folder.root}: its server has stopped; run {number} had not ended{why}")
        time.sleep(WAIT_SECONDS)


def stop_runs(folder: Folder) -> list[str]:
    """Mark the runs as stopped that are under way by the SuperLink's word, and give their ids."""
    stopped = [r.id for r in runs(folder) if not r.finished]
    for number in stopped:
        ask(folder, "stop", number, LINK)
    return stopped


def by_hand(folder: Folder) -> str:
    """What makes a `flwr` command speak to this folder's SuperLink."""
    return f"FLWR_TELEMETRY_ENABLED=0 FLWR_HOME={shlex.quote(str(folder.home))}"


def registered(folder: Folder) -> dict[str, str]:
    """Which node id each public key was registered under, by the name of its file."""
    file = _registry(folder)
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{file}: damaged; remove it, and flower/link.db with it, to register all keys anew")
    return {str(k): str(v) for k, v in found.items()}


def public_keys(folder: Folder) -> dict[str, str]:
    """The public keys of the nodes that may take part, by the names of their files."""
    return {p.stem: p.read_text(encoding="utf-8").strip() for p in sorted(folder.keys.glob("*.pub"))}


def synchronise(folder: Folder, say: Callable[[str], None]) -> None:
    """Make the nodes that the SuperLink admits those whose public keys are in the folder."""
    known, there = registered(folder), nodes(folder)
    admitted = {name: node for name, node in known.items() if there.get(node) not in (None, "unregistered")}
    wanted = public_keys(folder)
    for name in sorted(admitted.keys() - wanted.keys()):
        ask(folder, "supernode", "unregister", admitted[name], LINK)
        say(f"{name}: its key is revoked (keys/{name}.pub is gone)")
        del admitted[name]
        _keep(folder, admitted)
    for name in sorted(wanted.keys() - admitted.keys()):
        try:
            answer = ask(folder, "supernode", "register", str(folder.keys / f"{name}.pub"), LINK, "--name", name)
        except UserError as e:
            if "[code: 23]" not in str(e):
                raise
            say(f"{name}: keys/{name}.pub was revoked before, or stands there twice; make a new key")
            continue
        admitted[name] = str(answer["node-id"])
        _keep(folder, admitted)
    _keep(folder, admitted)


def _registry(folder: Folder) -> Path:
    return folder.home / "nodes.json"


def _keep(folder: Folder, names: dict[str, str]) -> None:
    file = _registry(folder)
    draft = file.with_suffix(".tmp")
    draft.write_text(json.dumps(names, indent=1), encoding="utf-8")
    draft.replace(file)
