"""A client's node: what is made of its words, and when it is started again."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from personafl.core.errors import UserError
from personafl.deployment.flower import client, settings
from personafl.deployment.flower.client import Hearer, RefusedError
from personafl.deployment.settings import OTHER_KEY
from tests.deployment.flower.folders import with_keys
from tests.deployment.flower.test_processes import script

# What SuperNodes of Flower 1.41 have printed.
WRONG_CA = (
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer certificate (_ssl.c:1006)"
)
WRONG_HOST = (
    "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: IP address mismatch, certificate is not valid for "
    "'10.0.0.1'. (_ssl.c:1006)"
)
EXPIRED = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1006)"
NOT_YET = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate is not yet valid (_ssl.c:1006)"
NO_TLS = "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)"
NOT_FOUND = "Client error '404 Not Found' for url 'https://host:1/v1/fleet/activate-node'"
REFUSED = "[code: 2004] Failed to activate SuperNode."


def heard(*lines: str) -> tuple[Hearer, list[str]]:
    said: list[str] = []
    hearer = Hearer("host:1", said.append)
    for line in lines:
        hearer(line)
    return hearer, said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (WRONG_CA, "the certificate of host:1 is not signed by the CA this client was given"),
        (WRONG_HOST, "the server's certificate is not for host: make one with personafl deploy keys --host host"),
        (EXPIRED, "the certificate of host:1, or the ca.crt of this client, has expired"),
        (NOT_YET, "the certificate of host:1 is not valid yet: the clock of this machine"),
        (NO_TLS, "no encrypted connection to host:1"),
        (NOT_FOUND, "host:1 answers, but is no server of a deployment"),
    ],
)
def test_what_starting_again_does_not_help_against_is_told(line: str, words: str) -> None:
    hearer, said = heard("ERROR :     SSL/TLS handshake error detected.", line)
    assert hearer.fatal.startswith(words) and not said


def test_a_lost_connection_is_told_once() -> None:
    retry = "WARNING :   Connection attempt failed, retrying in 1.50 seconds"
    _, said = heard(
        "INFO :      SuperNode ID: 12", retry, retry, "INFO :      Connection successful after 3.00 seconds"
    )
    assert said == [
        "online at host:1",
        "no connection to host:1; it is tried again until there is one",
        "connected to host:1",
    ]


def test_other_lines_are_passed_on_but_not_what_uvicorn_says_of_itself() -> None:
    _, said = heard("INFO:     Started server process [1]", "", "INFO :", "INFO :      [RUN 1, ROUND 2]", "of the app")
    assert said == ["of the app"]


def test_a_file_is_written_for_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    file = client.write(Path("me"), "me", "data", "host:1", Path("ca.crt"), Path("k"))
    found = settings.read_client(file)
    assert (found.id, found.state.resolve(), found.ca, found.key) == (
        "me",
        tmp_path / "me",
        tmp_path / "ca.crt",
        tmp_path / "k",
    )
    assert settings.read_tables(file)["client"]["data"] == str(tmp_path / "data")
    file = client.write(Path("me"), "me", "mine.code:load", "host:1", None, None)
    assert settings.read_tables(file)["client"]["data"] == "mine.code:load"


# The process that starts the app: it only notes with which secret it was started, and waits for the SuperNode's start.
STARTER = """
import pathlib, sys, time
while not pathlib.Path({starts!r}).exists():
    time.sleep(0.01)
secret = pathlib.Path(sys.argv[sys.argv.index("--superexec-auth-secret-file") + 1])
with (secret.parent / "seen").open("a") as f:
    f.write(f"{{oct(secret.stat().st_mode & 0o777)}} {{secret.read_text()}}\\n")
print({app!r}, flush=True)
time.sleep(600)
"""


class World:
    """A client whose SuperNode is a script; it counts starts in a file."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = with_keys(root / "fed")
        self.file = folder.clients / "client-0" / "client.toml"
        self.root, self._patch = root, monkeypatch
        (self.file.parent / "data").mkdir()
        (self.file.parent / "data" / "mine.csv").write_text("x,y\n1,0\n")
        self.said: list[str] = []
        monkeypatch.setattr(client, "RETRY_SECONDS", 0.0)

    def node(self, text: str, app: str = "") -> None:
        """Let the SuperNode run these lines, and its app print one."""
        starts = str(self.root / "starts")
        begin = f"""
import os, sys, time
with open({starts!r}, "a") as f:
    f.write(" ".join(sys.argv[1:]) + "\\n")
count = len(open({starts!r}).readlines())
"""
        programs = {
            "flower-supernode": script(self.root / "flower-supernode", begin + text),
            "flower-superexec": script(self.root / "flower-superexec", STARTER.format(starts=starts, app=app)),
        }
        self._patch.setattr(client, "program", programs.__getitem__)

    def starts(self) -> list[str]:
        return (self.root / "starts").read_text().splitlines()

    def take_part(self, plain: bool = False) -> None:
        client.take_part(self.file, plain, self.said.append)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_a_wrong_ca_ends_the_client(world: World) -> None:
    world.node(f"print({WRONG_CA!r}); sys.exit(1)")
    with pytest.raises(RefusedError, match="not signed by the CA"):
        world.take_part()
    (start,) = world.starts()
    home = world.file.parent
    assert f"--root-certificates {home}/ca.crt --auth-supernode-private-key {home}/node.key" in start
    assert f'--node-config client="{world.file}"' in start and "--insecure" not in start


def test_a_killed_node_is_started_again_until_the_server_takes_it(world: World) -> None:
    """It is killed, refused twice as its old session has not lapsed, and taken."""
    world.node(
        f"""
if count == 1:
    os.kill(os.getpid(), 9)
if count <= 3:
    print({REFUSED!r}); sys.exit(1)
print("SuperNode ID: 1", flush=True)
os.kill(os.getppid(), {int(signal.SIGTERM)})
time.sleep(600)
"""
    )
    world.take_part()
    assert len(world.starts()) == 4
    assert [line.partition(" (")[0] for line in world.said[:1]] == ["the SuperNode ended by itself"]
    assert [line.startswith("the server refuses this client's key") for line in world.said[1:3]] == [True, True]
    assert world.said[3:] == ["online at localhost:8443", "stopped"]


def test_another_client_s_key_ends_the_client(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its app says so, in a process that ends; the SuperNode would go on."""
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.0)
    world.node("print('SuperNode ID: 1', flush=True); time.sleep(600)", app=OTHER_KEY % ("me", "c-1", "c-1", "c-1"))
    with pytest.raises(RefusedError, match=r"^client me is refused, .* client c-1 at the server, keys/c-1\.pub: use"):
        world.take_part()
    assert len(world.starts()) == 1


def test_a_client_s_state_is_closed_to_others(world: World) -> None:
    state = world.file.parent / "state"
    state.mkdir()
    state.chmod(0o755)
    written = state / "written"
    world.node(f"open({str(written)!r}, 'w').close(); print({NO_TLS!r}); sys.exit(1)")
    before = os.umask(0o022)
    try:
        with pytest.raises(RefusedError):
            world.take_part()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (state, state / "flower", written)]
    assert modes == [0o700, 0o700, 0o600]


def test_the_process_that_starts_the_app_has_a_secret_of_its_own(world: World) -> None:
    """Without it every user of the machine could take the task, with the model, from the SuperNode's port."""
    seen = world.file.parent / "state" / "flower" / "seen"
    world.node(
        f"""
import pathlib
while not pathlib.Path({str(seen)!r}).exists() or len(open({str(seen)!r}).readlines()) < count:
    time.sleep(0.02)
os.kill(os.getppid(), {int(signal.SIGTERM)}) if count == 2 else os.kill(os.getpid(), 9)
time.sleep(600)
"""
    )
    world.take_part()
    for start in world.starts():
        assert f"--isolation process --superexec-auth-secret-file {seen.parent}/app.secret" in start
    first, second = (line.split() for line in seen.read_text().splitlines())
    assert first[0] == second[0] == "0o600" and len(first[1]) == 64 and first[1] != second[1]


def test_a_client_whose_app_cannot_be_started_starts_again(world: World) -> None:
    world.node(f"os.kill(os.getppid(), {int(signal.SIGTERM)}) if count == 2 else None; time.sleep(600)")
    script(
        world.root / "flower-superexec",
        "import os, time; os.path.exists('again') and time.sleep(600); open('again', 'w')",
    )
    world.take_part()
    assert world.said[0].startswith("the process that starts the app has ended by itself; starting again")


def test_a_key_that_stays_refused_ends_the_client(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LAPSE_SECONDS", 0.0)
    world.node(f"print({REFUSED!r}); sys.exit(1)")
    with pytest.raises(RefusedError, match="it is not registered there"):
        world.take_part()
    assert len(world.starts()) == 2


def test_plain_is_without_keys_says_what_it_means_and_stays_on_the_machine(world: World) -> None:
    world.node(f"print({NO_TLS!r}); sys.exit(1)")
    with pytest.raises(RefusedError):
        world.take_part(plain=True)
    (start,) = world.starts()
    assert start.endswith("--insecure") and "node.key" not in start
    assert "run code in this client" in world.said[0]
    world.file.write_text(world.file.read_text().replace("localhost:8443", "fl.example.org:8443"))
    with pytest.raises(UserError, match=r"--plain with link\.address=fl\.example\.org:8443: only within one machine"):
        world.take_part(plain=True)


def test_a_client_without_its_key_is_refused_before_anything_starts(world: World) -> None:
    (world.file.parent / "node.key").unlink()
    with pytest.raises(UserError, match=r"node\.key: no such file"):
        world.take_part()
    assert not (world.root / "starts").exists()


def test_a_node_has_a_flower_home_and_code_of_its_own(world: World) -> None:
    world.node('print("SSL" and "[SSL", os.environ["FLWR_HOME"], os.environ["PYTHONPATH"], flush=True); sys.exit(1)')
    heard: list[str] = []
    monkeypatch = world._patch
    monkeypatch.setattr(Hearer, "__call__", lambda self, line: (heard.append(line), setattr(self, "fatal", "x"))[0])
    with pytest.raises(RefusedError):
        world.take_part()
    _, home, path = heard[0].split(" ")
    assert home == str(world.file.parent / "state" / "flower")
    assert path.split(os.pathsep)[-2:] == [str(world.file.parent / "modules"), str(world.file.parent)]


FAILED = "Connection attempt failed, retrying in 1.00 seconds"


def test_a_connection_that_breaks_while_the_client_is_stopped_is_not_told(world: World) -> None:
    for stopping in (False, True):
        said: list[str] = []
        Hearer("host:1", said.append, lambda stopping=stopping: stopping)(FAILED)  # type: ignore[misc]
        assert bool(said) is not stopping
    world.node(
        f"""
import signal
def ended(*_):
    print({FAILED!r}, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, ended)
print("SuperNode ID: 1", flush=True)
os.kill(os.getppid(), {int(signal.SIGTERM)})
time.sleep(600)
"""
    )
    world.take_part()
    assert world.said == ["online at localhost:8443", "stopped"]
