"""`personafl deploy client`: a SuperNode in the foreground, started again where that helps."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import tomli_w

from personafl.core.errors import UserError
from personafl.deployment.flower import expiry, keys
from personafl.deployment.flower.folder import CLIENT, usable
from personafl.deployment.flower.private_files import make_private, private_files, write_new
from personafl.deployment.flower.processes import Child, Stop, environment, free_port, option, program
from personafl.deployment.flower.settings import Client, ClientLink, commented, is_loopback, read_client, split_address
from personafl.deployment.settings import NAME, OTHER_KEY, ClientSettings

PLAIN = (
    "PLAIN: no encryption and no keys. Whoever reaches {address}, which is every user of this machine, can start runs "
    "and so run code in this client, with its data."
)
RETRY_SECONDS = 10.0
ANSWER_SECONDS = 10.0  # in which what a client's app has said reaches the server, too
LAPSE_SECONDS = 120.0  # a SuperLink counts on a killed node's connection for about 60

# What uvicorn says of itself, and what is told above in other words.
_NOISE = re.compile(
    r"^INFO\s*:\s*$|^INFO:  |FastAPI lifespan|Starting Flower Super|Exit Code: 305"
    r"|Failed to initialize the connection|For more information|could not establish a connection"
    r"|handshake error detected|HTTP Request: |^[\d\-]+ [\d:,]+\s*$|\[RUN \d+, ROUND|Received: |Sent reply|^\s*$"
    r"|SuperExec authentication is experimental|may change in future releases"
)

_OTHER_KEY = re.compile(OTHER_KEY.replace("%s", NAME.pattern))
# The process that starts the app waits for the SuperNode, and ends with it.
_APP_NOISE = re.compile(r"Connection attempt failed|Connection successful|Starting Flower|SuperExec terminated")

REFUSED = (
    "the server refuses this client's key: it is not registered there (keys/<client>.pub of the server's folder), or "
    "this client was killed less than a minute ago, or runs elsewhere with the same key"
)


class RefusedError(RuntimeError):
    """Why a node cannot work, in words for whoever runs it."""


class Hearer:
    """Prints what a SuperNode says, and understands why it ends."""

    def __init__(self, address: str, say: Callable[[str], None], stopping: Callable[[], bool] = lambda: False) -> None:
        """`stopping` tells whether the client was asked to end, when connections break as they should."""
        self._address, self._say, self._stopping = address, say, stopping
        self.refused = False  # whether the server knows no such key, or not yet again
        self.fatal = ""  # what starting again does not help against
        self._waiting = False

    def __call__(self, line: str) -> None:
        if "SuperNode ID:" in line:
            self._waiting = False
            self._say(f"online at {self._address}")
        elif "Connection attempt failed" in line:
            if not self._waiting and not self._stopping():
                self._say(f"no connection to {self._address}; it is tried again until there is one")
            self._waiting = True
        elif "Connection successful" in line:
            self._waiting = False
            self._say(f"connected to {self._address}")
        elif "[code: 2004]" in line:
            self.refused = True
        elif "CERTIFICATE_VERIFY_FAILED" in line:
            self.fatal = self._certificate(line)
        elif line.startswith("[SSL"):
            self.fatal = self.fatal or f"no encrypted connection to {self._address}: is it the address of the server?"
        elif "Not Found" in line and "/v1/fleet/" in line:
            self.fatal = f"{self._address} answers, but is no server of a deployment"
        elif line and not _NOISE.search(line):
            self._say(line)

    def hear_app(self, line: str) -> None:
        """Print what the app says, and the process that starts it."""
        if found := _OTHER_KEY.search(line):
            self.fatal = found[0]
        elif line and not _APP_NOISE.search(line) and not _NOISE.search(line):
            self._say(line)

    def _certificate(self, line: str) -> str:
        if "mismatch" in line or "not valid for" in line:
            host, _ = split_address("link.address", self._address)
            return (
                f"the server's certificate is not for {host}: make one with personafl deploy keys --host {host} at the "
                "server, or use a name it is for"
            )
        if "expired" in line:
            return (
                f"the certificate of {self._address}, or the ca.crt of this client, has expired, unless this machine's "
                f"clock ({time.strftime('%Y-%m-%d %H:%M')}) is wrong. Whoever runs the server can make a new one with "
                "personafl deploy keys"
            )
        if "not yet valid" in line:
            return (
                f"the certificate of {self._address} is not valid yet: the clock of this machine "
                f"({time.strftime('%Y-%m-%d %H:%M')}) is behind the server's"
            )
        return (
            f"the certificate of {self._address} is not signed by the CA this client was given (link.ca): either the "
            "file is another deployment's, or somebody else answers there"
        )


def write(home: Path, client_id: str, data: str, link: str, ca: Path | None, key: Path | None) -> Path:
    """A `client.toml` for what was given on the command line, in the folder of the client's state."""
    given = {"ca": ca, "key": key}
    paths = {name: str(path.absolute()) for name, path in given.items() if path is not None}
    where = data if ":" in data and not Path(data).exists() else str(Path(data).absolute())
    table = tomli_w.dumps({"client": {"id": client_id, "data": where, "state": "."}})
    text = f"{table}\n{commented(ClientLink(address=link, **paths))}"
    make_private(home)
    file = home / "client.toml"
    file.write_text(text, encoding="utf-8")
    return file


def take_part(file: Path, plain: bool, say: Callable[[str], None], code: Path | None = None) -> None:
    """Run a client until asked to stop; raises `RefusedError` where it cannot take part.

    Modules of its own are found in `modules` beside the file, and in the folder `code`, by default that of the file.
    """
    if file.is_dir():
        raise UserError(f"{file}: is a folder; give the client.toml in it")
    client = read_client(file)
    _check_data(ClientSettings.read(file))
    _check(client, plain)
    if plain:
        say(PLAIN.format(address=client.link.address))
    home = client.state / "flower"
    for path in (client.state, home):
        if not make_private(path):
            say(f"{path}: other users of this machine can enter this folder, and its mode cannot be changed")
    env = environment(home, client.file.parent / "modules", code or client.file.parent)
    watch = expiry.ExpiryWatch(lambda: [] if plain else expiry.client_certificates(client), say, hours=6.0)
    first: float | None = None  # when refused for the first time, of refusals one after the other
    with private_files(), Stop() as stop:
        while not stop:
            hearer = Hearer(client.link.address, say, lambda: bool(stop))
            port, secret = free_port(), _new_secret(home)
            node, starter_command = _supernode(client, plain, port, secret), _superexec(port, secret)
            child = Child(node, env, client.file.parent, hearer)
            starter = Child(starter_command, env, client.file.parent, hearer.hear_app)
            try:
                while child.ended() is None and starter.ended() is None and not stop and not hearer.fatal:
                    watch.look()
                    stop.wait(0.2)
                if hearer.fatal and child.ended() is None and not stop:
                    stop.wait(ANSWER_SECONDS)
                exit_code = child.ended()
            finally:
                child.stop()
                starter.stop()
            if stop:
                break
            if hearer.fatal:
                raise RefusedError(hearer.fatal)
            now = time.monotonic()
            first = (first or now) if hearer.refused else None
            if first is not None and now - first > LAPSE_SECONDS:
                raise RefusedError(REFUSED)
            why = REFUSED if hearer.refused else _ending(exit_code)
            say(f"{why}; starting again in {RETRY_SECONDS:.0f} s")
            stop.wait(RETRY_SECONDS)
    say("stopped")


def _ending(code: int | None) -> str:
    """Why a client's processes have ended, of which the SuperNode ended with `code`, or not by itself."""
    if code is None:
        return "the process that starts the app has ended by itself"
    if code == 0:  # as Flower ends where a signature is not taken
        return "the server does not take this client's signature: its key was revoked, or its clock is wrong"
    return f"the SuperNode ended by itself (exit code {code})"


def _check_data(told: ClientSettings) -> None:
    """Refuse the template, and a folder of data that is not there; what is in it is looked at in a run."""
    if told.id == CLIENT:
        raise UserError(
            f'client.id="{CLIENT}": this is the template; each client has its own, clients/client-0 and so on'
        )
    home = Path(told.data)
    if ":" not in told.data and not (home.is_dir() and any(home.iterdir())):
        what = "is empty" if home.is_dir() else "no such folder"
        raise UserError(f"client.data={told.data!r}: {what}; set data in client.toml to the client's own")


def _check(client: Client, plain: bool) -> None:
    host, _ = split_address("link.address", client.link.address)
    if plain and not is_loopback(host):
        raise UserError(f"--plain with link.address={client.link.address}: only within one machine, at 127.0.0.1")
    if not usable(str(client.file)):
        raise UserError(f"{client.file}: the path must be without quotation marks, backslashes, $, %, ;, braces")
    if not plain:
        keys.check_certificate(client.ca)
        keys.check_node_key(client.key)


def _new_secret(home: Path) -> Path:
    """Write a secret by which the SuperNode knows the process that starts its app; another one at every start."""
    file = home / "app.secret"
    file.unlink(missing_ok=True)
    write_new(file, secrets.token_hex(32).encode())
    return file


# A SuperNode hands its tasks, which hold the model, to whoever asks at a port of 127.0.0.1. Any user of the machine can
# do that, unless what asks is a process of its own (`--isolation process`) that has to sign with a secret.
def _superexec(port: int, secret: Path) -> list[str]:
    """The process that takes tasks from the SuperNode and starts the client app for each."""
    command = [program("flower-superexec"), "--insecure", "--runtime-api-address", f"127.0.0.1:{port}"]
    return [*command, "--superexec-auth-secret-file", str(secret), "--parent-pid", str(os.getpid())]


def _supernode(client: Client, plain: bool, port: int, secret: Path) -> list[str]:
    command = [program("flower-supernode"), "--superlink", client.link.address, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--isolation", "process", "--superexec-auth-secret-file", str(secret)]
    command += ["--node-config", option("client", client.file)]
    if plain:
        return [*command, "--insecure"]
    return [*command, "--root-certificates", str(client.ca), "--auth-supernode-private-key", str(client.key)]
