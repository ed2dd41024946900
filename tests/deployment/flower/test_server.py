"""The server: what it starts, what it says, and a deployment of real processes."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.interceptors.http.superexec_auth import SuperExecAuthHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from personafl.core.errors import UserError
from personafl.deployment.flower import control, expiry, keys, proxy, server
from personafl.deployment.flower.folder import Folder
from personafl.deployment.flower.processes import answers, environment, free_port, program
from personafl.deployment.flower.server import EndedError, Hearer, Server
from tests.deployment.flower.folders import made, with_keys
from tests.deployment.flower.test_processes import alive, script, waited

ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


class Asked:
    """A `Stop` that is asked for once a condition holds."""

    def __init__(self, condition: Callable[[], bool] = lambda: False) -> None:
        self._condition = condition

    def __bool__(self) -> bool:
        return self._condition()

    def wait(self, seconds: float) -> bool:
        return waited(self._condition, min(seconds, 0.05))


def test_a_superlink_is_bound_to_the_loopback_interface_and_asks_for_keys(tmp_path: Path) -> None:
    folder = made(tmp_path, link=9555)
    command = " ".join(server._superlink(folder, plain=False))
    assert "--host 127.0.0.1 --port 9555 " in command and f"--database {folder.home}/link.db" in command
    assert "--enable-supernode-auth" in command and f"--ssl-keyfile {folder.keys}/server.key" in command
    assert "--disable-runtime-dependency-installation" in command and "--insecure" not in command
    plain = " ".join(server._superlink(folder, plain=True))
    assert "--host 127.0.0.1 --port 9555 " in plain and plain.endswith("--insecure")


def test_a_server_without_keys_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path, link=free_port())
    with pytest.raises(UserError, match=r"ca\.crt: no such file; personafl deploy keys .* makes it"):
        server.serve(folder, plain=False, proxied=False, say=print)


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        folder = with_keys(tmp_path, link=held.getsockname()[1])
        with pytest.raises(UserError, match=r"\(link\.port\) is in use; is this server running already"):
            server.serve(folder, plain=False, proxied=False, say=print)


def test_a_certificate_for_another_host_is_refused(tmp_path: Path) -> None:
    folder = with_keys(tmp_path, link=free_port())
    folder.deployment.write_text(folder.deployment.read_text().replace("localhost:", "fl.example.org:"))
    with pytest.raises(UserError, match=r"server\.crt: is for .*localhost, not for fl\.example\.org \(link\.address\)"):
        server.serve(folder, plain=False, proxied=False, say=print)


def test_a_certificate_that_has_expired_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_keys(tmp_path)
    later = keys.expires(folder.keys / "server.crt")
    monkeypatch.setattr(expiry, "utc_now", lambda: later)
    with pytest.raises(UserError, match=r"keys/server\.crt expired on .* UTC\. .* bring keys/ca\.key back, move"):
        server._check_keys(folder, print)


def test_a_configuration_of_an_older_version_is_told(fake: Folder) -> None:
    said: list[str] = []
    server._check_limits(fake, said.append)
    assert not said
    fake.nginx.write_text(fake.nginx.read_text().replace("include flower/nginx/nodes.conf;", ""))
    server._check_limits(fake, said.append)
    (line,) = said
    assert "nginx.conf was written by an older version" in line and "Limits for strangers" in line


def test_a_server_that_knows_no_client_says_so(tmp_path: Path) -> None:
    folder, said = made(tmp_path), list[str]()
    keys.make(folder, 0)
    server._check_keys(folder, said.append)
    assert said == ["no client can take part: keys/ has no public key of a node (.pub)"]


def test_what_a_superlink_says_is_put_into_words(tmp_path: Path) -> None:
    """Lines of Flower 1.41."""
    folder, said, logged = made(tmp_path), list[str](), list[str]()
    folder.home.mkdir()
    (folder.home / "nodes.json").write_text('{"client-0": "11"}')
    lines = [
        "INFO :      [Fleet.ActivateNode] Activated node_id=11",
        '2026 INFO [uvicorn.access] 127.0.0.1:5 - "POST /v1/fleet/pull-messages HTTP/1.1" 200',
        "INFO :      [Fleet.DeactivateNode] Deactivated node_id=11",
        "INFO :      [Fleet.ActivateNode] Activated node_id=12",
        "ERROR :     [ApiError:2004] ..., exception: No SuperNode found with the given public key.",
        "ERROR :     [ApiError:2004] ..., exception: SuperNode with node ID 11 could not be activated.",
        '2026 INFO [uvicorn.access] 127.0.0.1:5 - "POST /v1/fleet/activate-node HTTP/1.1" 412',
    ]
    hearer = Hearer(folder, logged.append, said.append, lambda: 0.0)
    for line in lines:
        hearer(line)
    assert said[:3] == ["client-0 is online", "client-0 is offline", "node 12 is online"]
    assert said[3].startswith("a client was refused: its public key is not in keys/")
    assert said[4].startswith("a client was refused: the SuperLink still counts on its last connection")
    assert logged == [line for line in lines if not line.endswith(" 200")]  # requests that went well are no news
    for line in lines[4:6] * 900:
        hearer(line)
    assert len(said) == 5  # what is refused again and again is told once a minute


# Listens at the port it is given; ends by itself where a file says so.
FAKE = """
import pathlib, socket, sys, time
s = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
print("listening", flush=True)
while not pathlib.Path({end!r}).exists():
    time.sleep(0.02)
print("ERROR : the disk is full", flush=True)
sys.exit(3)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A folder whose SuperLink is a script."""
    path = script(tmp_path / "flower-superlink", FAKE.format(end=str(tmp_path / "end")))
    monkeypatch.setattr(server, "program", lambda name: path)
    monkeypatch.setattr(server, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(server, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(server, "adopt", lambda: None)  # the family of this process is not the server's alone
    monkeypatch.setattr(server, "end_family", lambda: None)
    monkeypatch.setattr(control, "stop_runs", lambda folder: ["5"])
    folder = with_keys(tmp_path / "fed", link=free_port())
    folder.logs.mkdir()
    return folder


def test_keys_that_come_and_go_while_a_server_runs_are_seen(fake: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(control, "synchronise", lambda folder, say: seen.append(sorted(control.public_keys(folder))))
    said: list[str] = []
    made = Server(fake, False, None, said.append)
    try:
        made.start(Asked())  # type: ignore[arg-type]
        assert said == ["run 5 ended with the server before; personafl deploy start goes on with it"]
        (fake.keys / "client-1.pub").unlink()
        made.watch(Asked(lambda: len(seen) == 2))  # type: ignore[arg-type]
    finally:
        made.stop()
    assert seen == [["client-0", "client-1"], ["client-0"]]
    assert "listening" in (fake.logs / "superlink.log").read_text()


def test_a_certificate_that_is_about_to_expire_is_named_while_the_server_runs(
    fake: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "synchronise", lambda folder, say: None)
    now = [keys.expires(fake.keys / "server.crt") - datetime.timedelta(days=31, hours=12)]
    said: list[str] = []
    watch = expiry.ExpiryWatch(lambda: expiry.server_certificates(fake), said.append, now=lambda: now[0])
    watch.look()
    made = Server(fake, False, None, lambda line: None, watch.look)
    try:
        made.start(Asked())  # type: ignore[arg-type]
        now[0] += datetime.timedelta(days=3)
        made.watch(Asked(lambda: bool(said)))  # type: ignore[arg-type]
    finally:
        made.stop()
    (line,) = said
    assert line.startswith("keys/server.crt expires in 28 days, on ")


def test_a_superlink_that_ends_is_told_with_its_last_error(fake: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "synchronise", lambda folder, say: None)
    made = Server(fake, False, None, print)
    try:
        made.start(Asked())  # type: ignore[arg-type]
        (fake.root.parent / "end").touch()
        with pytest.raises(EndedError, match=r"the SuperLink ended by itself \(exit code 3\); .*: the disk is full"):
            made.watch(Asked())  # type: ignore[arg-type]
    finally:
        made.stop()


def test_a_server_starts_again_what_ends_and_stops_when_it_is_told(
    fake: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "synchronise", lambda folder, say: None)
    said: list[str] = []
    end = fake.root.parent / "end"

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("ready"):
            end.touch() if len(said) < 4 else os.kill(os.getpid(), signal.SIGTERM)
        elif "starting again" in line:
            end.unlink()

    server.serve(fake, plain=True, proxied=True, say=say)
    assert "can start runs and so run code on every node" in said[0]
    assert [line.split()[0] for line in said] == ["PLAIN:", "run", "ready;", "the", "run", "ready;", "stopped;"]
    assert not answers(fake.link().port)


def test_what_a_server_writes_is_private(fake: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "synchronise", lambda folder, say: None)
    fake.results.mkdir()
    for path in (fake.results, fake.logs, fake.keys):
        path.chmod(0o755)  # as mkdir -p makes it

    def say(line: str) -> None:
        if line.startswith("ready"):
            os.kill(os.getpid(), signal.SIGTERM)

    before = os.umask(0o022)
    try:
        server.serve(fake, plain=True, proxied=True, say=say)
    finally:
        os.umask(before)
    folders = [fake.results, fake.logs, fake.keys, fake.home, fake.server]
    assert {oct(path.stat().st_mode & 0o777) for path in folders} == {"0o700"}
    assert (fake.logs / "superlink.log").stat().st_mode & 0o777 == 0o600


def test_a_superlink_that_never_starts_is_an_error(fake: Folder) -> None:
    (fake.root.parent / "end").touch()
    with pytest.raises(EndedError, match="the SuperLink ended by itself"):
        server.serve(fake, plain=True, proxied=True, say=print)


# Below: real processes of Flower.

SERVER_APP = """\
import json, pathlib, time
import numpy
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


def packed(blob):
    return RecordDict({"p": ArrayRecord({"b": Array(dtype="bytes", shape=(len(blob),), stype="test", data=blob)})})


@app.main()
def main(grid, context):
    folder = pathlib.Path(context.run_config["folder"])
    if (folder / "fail").exists():
        raise RuntimeError("as the test wants it")
    blob = (folder / "blob").read_bytes()
    until = time.monotonic() + 120
    while len(nodes := list(grid.get_node_ids())) < 2 and time.monotonic() < until:
        time.sleep(0.2)
    out = [Message(packed(blob), dst_node_id=n, message_type="train", group_id="0", ttl=120.0) for n in nodes]
    waiting, replies = set(grid.push_messages(out)), {}
    while waiting and time.monotonic() < until:
        for reply in grid.pull_messages(waiting):
            waiting.discard(reply.metadata.reply_to_message_id)
            told = str(reply.error) if reply.has_error() else dict(reply.content["c"])
            if not reply.has_error():
                told["right"] = reply.content["p"]["b"].data == bytes(numpy.frombuffer(blob, "u1") ^ told.pop("key"))
            replies[str(reply.metadata.src_node_id)] = told
        time.sleep(0.2)
    (folder / "replies.json").write_text(json.dumps(replies))
    while (folder / "linger").exists():
        time.sleep(0.1)
"""
CLIENT_APP = """\
import os, pathlib
import numpy
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    file = context.node_config["client"]
    key = 1 + int(pathlib.Path(file).parent.name[-1])  # another for each: equal pieces are sent once
    blob = bytes(numpy.frombuffer(message.content["p"]["b"].data, "u1") ^ key)
    content = ArrayRecord({"b": Array(dtype="bytes", shape=(len(blob),), stype="test", data=blob)})
    told = {"client": file, "telemetry": os.environ["FLWR_TELEMETRY_ENABLED"], "key": key}
    return Message(RecordDict({"p": content, "c": ConfigRecord(told)}), reply_to=message)
"""


class Shown:
    """A command that runs: its process, and what it has printed."""

    def __init__(self, process: subprocess.Popen[bytes], file: Path) -> None:
        self.process, self._file = process, file

    @property
    def text(self) -> str:
        return self._file.read_text(errors="replace")

    def says(self, words: str, seconds: float = 120.0) -> None:
        assert waited(lambda: words in self.text or self.process.poll() is not None, seconds), self.text
        assert words in self.text, self.text


class Place:
    """Where commands run; all that they start carries a mark by which it is found."""

    def __init__(self, root: Path, folder: Folder) -> None:
        self.root, self.folder = root, folder
        self.env = os.environ | {"PERSONAFL_TEST_MARK": str(root), "COLUMNS": "300"}

    def command(self, *words: object) -> list[str]:
        return [sys.executable, "-m", "personafl", "deploy", *map(str, words)]

    def call(self, *words: object) -> subprocess.CompletedProcess[str]:
        command = self.command(*words)
        return subprocess.run(
            command, env=self.env, cwd=self.root, capture_output=True, text=True, timeout=300, check=False
        )

    def flwr(self, *words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        command = [program("flwr"), *words, "--format", "json"]
        return subprocess.run(command, env=env, cwd=self.root, capture_output=True, text=True, timeout=120, check=False)

    @contextmanager
    def running(self, name: str, *words: object) -> Iterator[Shown]:
        file = self.root / f"{name}.out"
        with file.open("wb") as out:
            process = subprocess.Popen(
                self.command(*words), env=self.env, cwd=self.root, stdout=out, stderr=subprocess.STDOUT
            )
        try:
            yield Shown(process, file)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def left(self) -> list[int]:
        """Processes that run and were started from here, by whichever way."""
        mark, found = f"PERSONAFL_TEST_MARK={self.root}".encode(), []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                marked = mark in entry.read_bytes().split(b"\0")
            except OSError:
                continue
            if marked and alive(int(entry.parent.name)):
                found.append(int(entry.parent.name))
        return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A deployment folder with apps that send bytes there and back, and nothing left running behind it."""
    folder = with_keys(tmp_path / "a fed", port=free_port(), link=free_port())
    (folder.app / "personafl_app" / "server.py").write_text(SERVER_APP)
    (folder.app / "personafl_app" / "client.py").write_text(CLIENT_APP)
    found = Place(tmp_path, folder)
    try:
        yield found
    finally:
        for pid in found.left():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_deployment_of_real_processes(place: Place) -> None:
    """SuperLink, nginx where it is installed, and two nodes, with TLS and keys: what works, and who does not get in."""
    folder, root = place.folder, place.root
    (folder.root / "blob").write_bytes(os.urandom(20 * 2**20))  # four pieces of the largest size
    proxied = proxy.find() is not None
    with ExitStack() as stack:
        served = stack.enter_context(
            place.running("server", "server", folder.root, *([] if proxied else ["--no-proxy"]))
        )
        served.says("ready")
        files = []
        for i in range(2):
            shutil.copytree(folder.clients / f"client-{i}", root / f"machine {i}")
            files.append(root / f"machine {i}" / "client.toml")
            (root / f"machine {i}" / "data").mkdir()
            (root / f"machine {i}" / "data" / "mine.csv").write_text("x,y\n1,0\n")
            if not proxied:
                files[i].write_text(
                    files[i].read_text().replace(folder.link().address, f"localhost:{folder.link().port}")
                )
        nodes = [stack.enter_context(place.running(f"node{i}", "client", files[i])) for i in range(2)]
        for node in nodes:
            node.says("online at localhost:")

        for pid in place.left():  # nobody but the client's own process is given its task
            words = command_line(pid).split(" --")
            if "flower-supernode" in words[0]:
                port = next(int(word.removeprefix("port ")) for word in words if word.startswith("port "))
                assert acquire_task(port) == 401
                secret = next(word.partition(" ")[2] for word in words if word.startswith("superexec-auth-secret-file"))
                assert acquire_task(port, Path(secret).read_bytes()) == 200

        done = place.call("start", folder.root, "--wait")
        assert done.returncode == 0, done.stderr + done.stdout
        replies = json.loads((folder.root / "replies.json").read_text())
        names = {node: name for name, node in control.registered(folder).items()}
        assert {names[node]: answer for node, answer in replies.items()} == {
            f"client-{i}": {"client": str(files[i]), "telemetry": "0", "right": True} for i in range(2)
        }
        told = json.loads(place.call("status", folder.root, "--json").stdout)
        assert sorted((n["name"], n["status"]) for n in told["nodes"]) == [
            ("client-0", "online"),
            ("client-1", "online"),
        ]
        assert told["run"]["status"] == "finished:completed"
        size = 2 * 20 * 2**20  # of two blobs each way; what Flower adds is small
        assert all(size <= told["run"][f"{way}_bytes"] <= 1.02 * size for way in ("inbound", "outbound"))

        # A run that fails is told with its reason; flwr's own command would have ended with 0.
        (folder.root / "fail").touch()
        failed = place.call("start", folder.root, "--wait")
        assert failed.returncode == 1 and "finished:failed" in failed.stderr and "as the test wants it" in failed.stderr
        (folder.root / "fail").unlink()

        # Whom the server does not know stays outside, and so does a server that the client does not know.
        other = with_keys(root / "other", clients=1)
        mine, theirs = root / "machine 0", other.clients / "client-0"
        address = nodes[0].text.partition("online at ")[2].split()[0]
        stranger = ["client", "--data", ".", "--client-id", "eve", "--link", address, "--state", root / "eve"]
        with place.running("eve", *stranger, "--ca", mine / "ca.crt", "--key", theirs / "node.key") as eve:
            eve.says("the server refuses this client's key")
            served.says("a client was refused: its public key is not in keys/")
        wrong = place.call(*stranger, "--ca", theirs / "ca.crt", "--key", mine / "node.key")
        assert wrong.returncode == 1 and "is not signed by the CA this client was given" in wrong.stderr

        if proxied:  # from outside, nobody starts or lists runs, not even with the CA's certificate
            home = root / "outside"
            home.mkdir()
            shutil.copy(folder.home / "config.toml", home)
            config = (home / "config.toml").read_text()
            (home / "config.toml").write_text(config.replace(f"127.0.0.1:{folder.link().port}", folder.link().address))
            env = environment(home, home)
            within = environment(folder.home, home)
            assert json.loads(place.flwr("list", "link", env=within).stdout)["success"]  # what is refused outside
            for asked in (["list", "link"], ["run", str(folder.app), "link"], ["supernode", "list", "link"]):
                outside = place.flwr(*asked, env=env)
                assert '"success": true' not in outside.stdout and "404" in outside.stdout + outside.stderr
        assert len(control.runs(folder)) == 2

        # Asked to end, a node is offline at once and comes back at once; its key revoked, it does not.
        nodes[1].process.terminate()
        served.says("client-1 is offline")
        assert nodes[1].process.wait(60) == 0
        with place.running("again", "client", files[1]) as again:
            again.says("online at localhost:")
            assert "refuses" not in again.text
            (folder.keys / "client-1.pub").unlink()
            served.says("client-1: its key is revoked")
            again.says("the server refuses this client's key")

        # A server that is asked to end in the middle of a run takes the server app with it.
        (folder.root / "linger").touch()
        assert place.call("start", folder.root).returncode == 0
        assert waited(lambda: any("flwr-serverapp" in command_line(pid) for pid in place.left()), 120)
        refused = place.call("start", folder.root)
        assert refused.returncode == 2 and "is under way" in refused.stderr
        served.process.terminate()
        assert served.process.wait(60) == 0
        assert "stopped; a run that was under way goes on with personafl deploy start" in served.text
        nodes[0].says("no connection to")
    assert waited(lambda: not place.left(), 30), [command_line(pid) for pid in place.left()]


def acquire_task(port: int, secret: bytes = b"") -> int:
    """The status of what a SuperNode answers to somebody of its machine who asks for its task."""
    interceptors = [SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[ACQUIRE])] if secret else []
    with RuntimeHttpClient.from_server_address(f"127.0.0.1:{port}", True, None, interceptors) as client:
        try:
            client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-clientapp"]))
        except httpx.HTTPStatusError as e:
            return e.response.status_code
    return 200


def command_line(pid: int) -> str:
    """The command line of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
