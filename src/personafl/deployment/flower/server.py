"""`personafl deploy server`: a SuperLink on the loopback interface and the proxy in front of it, kept running."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable

from personafl.core.errors import UserError
from personafl.deployment.flower import control, expiry, keys, proxy
from personafl.deployment.flower.folder import Folder
from personafl.deployment.flower.logs import BoundedLog
from personafl.deployment.flower.private_files import private_files
from personafl.deployment.flower.processes import Child, Stop, adopt, answers, end_family, environment, program
from personafl.deployment.flower.settings import split_address
from personafl.deployment.settings import Deployment

PLAIN = (
    "PLAIN: no encryption and no keys. Whoever reaches 127.0.0.1:{port}, which is every user of this machine, can "
    "start runs and so run code on every node."
)
START_SECONDS = 120.0  # that a SuperLink may take to answer
AGAIN_SECONDS = 5.0
LOOK_SECONDS = 2.0  # between looks at processes and keys
SAY_AGAIN_SECONDS = 60.0  # between two times that the same refusal is told

LOGS = {"superlink": 50, "nginx": 10, "refused": 10}
"""The logs that a server writes, and how many MB of each are kept."""

_REQUEST = re.compile(r'"(POST|GET) /v1/\S+ HTTP/[\d.]+" 2\d\d')
_JOINED = re.compile(r"Activated node_id=(\d+)")
_LEFT = re.compile(r"Deactivated node_id=(\d+)")
_SAID = {
    "No SuperNode found with the given public key": "a client was refused: its public key is not in keys/ "
    "(logs/refused.log has its address)",
    "could not be activated": "a client was refused: the SuperLink still counts on its last connection, for up to a "
    "minute after a kill; it will try again",
}


@private_files()
def serve(folder: Folder, plain: bool, proxied: bool, say: Callable[[str], None]) -> None:
    """Run until asked to stop; a SuperLink or proxy that ends by itself is started again."""
    link = folder.link()
    Deployment.read(folder.deployment)  # what is wrong with it is said now, not in the first run
    control.check_recipe_imports(folder)
    nginx = None if plain or not proxied else proxy.find()
    if answers(link.port):
        raise UserError(f"port {link.port} of 127.0.0.1 (link.port) is in use; is this server running already?")
    for path in folder.make_private():
        say(f"{path}: other users of this machine can enter this folder, and its mode cannot be changed")
    control.write_settings(folder, plain)
    if plain:
        say(PLAIN.format(port=link.port))
    else:
        _check_keys(folder, say)
    if nginx is not None:
        proxy.check(nginx, folder.root, link)
        _check_limits(folder, say)
        if proxy.is_root():
            say("nginx reads requests of strangers as root: run the server as a user of its own, as systemd/ does")
    watch = expiry.ExpiryWatch(lambda: [] if plain else expiry.server_certificates(folder), say)
    watch.look()
    adopt()
    with Stop() as stop:
        while not stop:
            server = Server(folder, plain, nginx, say, watch.look)
            try:
                server.start(stop)
                if not stop:
                    _tell(folder, plain, proxied, nginx, say)
                server.watch(stop)
            except EndedError as e:
                if not server.ready:
                    raise
                say(f"{e}; starting again in {AGAIN_SECONDS:.0f} s")
            finally:
                server.stop()
            stop.wait(AGAIN_SECONDS if not stop else 0)
    say("stopped; a run that was under way goes on with personafl deploy start once the server is back")


class EndedError(RuntimeError):
    """A process that should run has ended."""


class Server:
    """A SuperLink and the proxy in front of it."""

    def __init__(
        self,
        folder: Folder,
        plain: bool,
        nginx: str | None,
        say: Callable[[str], None],
        check_certificates: Callable[[], None] = lambda: None,
    ) -> None:
        """`check_certificates` is called again and again while the server runs."""
        self.folder, self.plain, self.nginx, self.say = folder, plain, nginx, say
        self._check_certificates = check_certificates
        self.ready = False
        self._children: dict[str, Child] = {}
        self._logs = {name: BoundedLog(folder.logs / f"{name}.log", size) for name, size in LOGS.items()}
        self._admitted: dict[str, str] = {}

    def start(self, stop: Stop) -> None:
        """Start both and admit the nodes whose keys are there; returns early where asked to stop."""
        env, port = environment(self.folder.home, self.folder.modules, self.folder.root), self.folder.link().port
        hearer = Hearer(self.folder, self._logs["superlink"].write, self.say)
        self._children["the SuperLink"] = Child(_superlink(self.folder, self.plain), env, self.folder.root, hearer)
        until = time.monotonic() + START_SECONDS
        while not answers(port) and not stop:
            self._still()
            if time.monotonic() > until:
                raise EndedError(f"the SuperLink does not answer; see {self.folder.logs / 'superlink.log'}")
            stop.wait(0.2)
        if stop:
            return
        for number in control.stop_runs(self.folder):
            self.say(f"run {number} ended with the server before; personafl deploy start goes on with it")
        self._synchronise()
        if self.nginx is not None:
            command = proxy.command(self.nginx, self.folder.root)
            self._children["nginx"] = Child(command, env, self.folder.root, self._hear_nginx)
        self.ready = True

    def watch(self, stop: Stop) -> None:
        """Until asked to stop: see that both run, and that the admitted nodes are those whose keys are there."""
        while not stop.wait(LOOK_SECONDS):
            self._still()
            self._check_certificates()
            if control.public_keys(self.folder) != self._admitted:
                self._synchronise()

    def stop(self) -> None:
        for child in reversed(self._children.values()):
            child.stop()
        end_family()
        for log in self._logs.values():
            log.close()

    def _synchronise(self) -> None:
        if self.plain:
            return
        self._admitted = control.public_keys(self.folder)
        if proxy.write_admitted_keys(self.folder.root, self._admitted.values()) and "nginx" in self._children:
            self._children["nginx"].process.send_signal(signal.SIGHUP)  # it reads its configuration again
        control.synchronise(self.folder, self.say)

    def _hear_nginx(self, line: str) -> None:
        kind, _, rest = line.partition(" ")
        if kind == "refused":
            self._logs["refused"].write(rest)
        else:
            self._logs["nginx"].write(line)

    def _still(self) -> None:
        """Refuse to go on without one of the processes."""
        for name, child in self._children.items():
            if (code := child.ended()) is not None:
                child.clear()
                raise EndedError(f"{name} ended by itself (exit code {code}); {_last_words(self.folder)}")


class Hearer:
    """Writes what the SuperLink says to its log, without the requests that went well, and tells what matters."""

    def __init__(
        self,
        folder: Folder,
        write: Callable[[str], None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._write, self._say, self._clock = folder, write, say, clock
        self._said_at: dict[str, float] = {}

    def __call__(self, line: str) -> None:
        if _REQUEST.search(line):
            return
        self._write(line)
        for pattern, words in ((_JOINED, "is online"), (_LEFT, "is offline")):
            if found := pattern.search(line):
                self._say(f"{self._name(found[1])} {words}")
        for part, words in _SAID.items():
            if part in line and self._clock() - self._said_at.get(part, -SAY_AGAIN_SECONDS) >= SAY_AGAIN_SECONDS:
                self._said_at[part] = self._clock()
                self._say(words)

    def _name(self, node: str) -> str:
        names = {v: k for k, v in control.registered(self._folder).items()}
        return names.get(node, f"node {node}")


def _superlink(folder: Folder, plain: bool) -> list[str]:
    command = [program("flower-superlink"), "--host", "127.0.0.1", "--port", str(folder.link().port)]
    command += ["--database", str(folder.home / "link.db"), "--disable-runtime-dependency-installation"]
    if plain:
        return [*command, "--insecure"]
    certificates = {"ca": "ca.crt", "cert": "server.crt", "key": "server.key"}
    files = {name: str(folder.keys / file) for name, file in certificates.items()}
    command += ["--ssl-ca-certfile", files["ca"], "--ssl-certfile", files["cert"], "--ssl-keyfile", files["key"]]
    return [*command, "--enable-supernode-auth"]


def _check_keys(folder: Folder, say: Callable[[str], None]) -> None:
    """Refuse a folder without keys, or whose certificate does not fit its address."""
    for name in ("ca.crt", "server.crt", "server.key"):
        if not (folder.keys / name).is_file():
            raise UserError(f"{folder.keys / name}: no such file; personafl deploy keys {folder.root} makes it")
    host, _ = split_address("link.address", folder.link().address)
    certificate = folder.keys / "server.crt"
    if host not in (given := keys.hosts_of(certificate)):
        raise UserError(
            f"{certificate}: is for {', '.join(sorted(given))}, not for {host} (link.address); move it and server.key "
            "away and make keys again"
        )
    now = expiry.utc_now()
    for found in expiry.server_certificates(folder):
        if now >= found.expires:
            raise UserError(f"{folder.root}: {found.warning(now)}")
    if not control.public_keys(folder):
        say("no client can take part: keys/ has no public key of a node (.pub)")


def _check_limits(folder: Folder, say: Callable[[str], None]) -> None:
    """Say where a configuration lets strangers send more than it should."""
    if proxy.NODES_FILE not in folder.nginx.read_text(encoding="utf-8"):
        say(
            f"{folder.nginx} was written by an older version and does not limit what strangers can send. Replace it "
            'as docs/deployment.md says under "Limits for strangers".'
        )


def _last_words(folder: Folder) -> str:
    for name in ("superlink.log", "nginx.log"):
        file = folder.logs / name
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")[-50:] if file.is_file() else []
        if told := [line for line in lines if re.search(r"ERROR|\[emerg\]|Error:", line)]:
            return f"the last error in {file} is: {told[-1].strip()[-300:]}"
    return f"see {folder.logs}"


def _tell(folder: Folder, plain: bool, proxied: bool, nginx: str | None, say: Callable[[str], None]) -> None:
    link = folder.link()
    if plain:
        say(f"ready; clients of this machine: personafl deploy client --plain with link.address 127.0.0.1:{link.port}")
    elif nginx is not None:
        say(f"ready; clients reach this server at {link.address}, through nginx")
    elif proxied:
        say(
            f"ready, but no client can reach it: nginx is not installed. Install it and start this command again, or "
            f"put another proxy in front of 127.0.0.1:{link.port} that passes POST /v1/fleet/ and nothing else"
        )
    else:
        say(f"ready without a proxy: one of your own must pass POST /v1/fleet/ to 127.0.0.1:{link.port}, nothing else")
