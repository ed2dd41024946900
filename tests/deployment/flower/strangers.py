"""What strangers without a client's private key can do to a server, done to one on this machine.

    python -m tests.deployment.flower.strangers                 all of it, about four minutes; Linux
    python -m tests.deployment.flower.strangers --scale 0.2     a fifth of the connections and requests
    python -m tests.deployment.flower.strangers --only idle,slow-headers

A server and two clients run as real processes behind nginx. The attacks come from 127.0.0.2 and further addresses of
the loopback interface, first one after the other, then all at once while the clients play two rounds, and at last those
of somebody who has come by a client's public key. Meanwhile the memory of the server's processes is measured by /proc,
and how much is written to logs. The result is a table in Markdown.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import dataclasses
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from personafl.deployment.flower.processes import family
from tests.deployment.flower.loopback import Loopback, recipe_text, scratch, write_clients

Attack = Callable[["Server", float], str]
ATTACKS: dict[str, Attack] = {}
MEMORY_MB, LOG_BYTES = 300, 1_000_000
"""What strangers may not exceed: memory of the SuperLink and of nginx together, and bytes written to logs."""

HOLD_SECONDS = 12.0  # that a connection is held open which sends nothing more
PIECE = bytes(2**16)


@dataclasses.dataclass(frozen=True)
class Server:
    """A server as a stranger sees it, and a public key of a client, which a stranger may have come by."""

    port: int
    public_key: str

    @contextlib.contextmanager
    def connection(self, address: int = 2) -> Iterator[ssl.SSLSocket]:
        """A TLS connection from 127.0.0.`address`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        source = (f"127.0.0.{address}", 0)
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=10, source_address=source) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            yield connection

    def ask(self, head: str, body: bytes = b"", address: int = 2) -> str:
        """The status of an answer."""
        try:
            with self.connection(address) as connection:
                length = f"Content-Length: {len(body)}\r\n"
                connection.sendall(f"{head}Connection: close\r\n{length}\r\n".encode() + body)
                return connection.recv(64).split(b" ")[1].decode()
        except (OSError, IndexError):
            return "cut off"


def attack(function: Attack) -> Attack:
    ATTACKS[function.__name__.replace("_", "-")] = function
    return function


def post(call: str, key: str = "", length: int | None = None) -> str:
    """The head of a node's request."""
    lines = [f"POST /v1/fleet/{call} HTTP/1.1", "Host: localhost", "Content-Type: application/protobuf"]
    lines += [f"flwr-public-key: {key}", "flwr-signature: AAAA"] if key else []
    lines += [f"flwr-timestamp: {time.strftime('%Y-%m-%dT%H:%M:%S+00:00', time.gmtime())}"] if key else []
    lines += [] if length is None else [f"Content-Length: {length}"]
    return "\r\n".join(lines) + "\r\n"


def at_once(count: int, work: Callable[[int], list[str]]) -> str:
    """Do some work that many times at once; which answers came how often."""
    answers: list[str] = []
    threads = [threading.Thread(target=lambda i=i: answers.extend(work(i))) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counted(answers)


def counted(answers: list[str]) -> str:
    return ", ".join(f"{answers.count(a)} × {a}" for a in sorted(set(answers)))


def hold_back(server: Server, key: str, size: int, address: int = 2) -> str:
    """Send all of a body but its end, as far as it is taken."""
    try:
        with server.connection(address) as connection:
            connection.sendall((post("push-object", key, size) + "\r\n").encode())
            for _ in range(size // len(PIECE) - 1):
                connection.sendall(PIECE)
            connection.settimeout(HOLD_SECONDS)
            try:
                return connection.recv(64).split(b" ")[1].decode()
            except TimeoutError:
                return "held"
    except (OSError, IndexError):
        return "cut off"


@attack
def held_back_bodies(server: Server, scale: float) -> str:
    """Ten bodies of 62 MB, held back before their end."""
    return at_once(10, lambda i: [hold_back(server, "", 62_000_000)])


@attack
def held_back_bodies_with_a_public_key(server: Server, scale: float) -> str:
    """Bodies of the largest size that is let in, with a client's public key, held back before their end."""
    return at_once(max(10, int(40 * scale)), lambda i: [hold_back(server, server.public_key, 6 * 2**20)])


@attack
def garbage(server: Server, scale: float) -> str:
    """Whole bodies of garbage of the largest size that is let in."""
    body = bytes([255]) * (6 * 2**20)
    heads = [post("push-object")] * max(1, int(6 * scale))
    return at_once(4, lambda i: [server.ask(head, body, address=2 + i) for head in heads])


@attack
def garbage_with_a_public_key(server: Server, scale: float) -> str:
    """The same with a client's public key, which is let through to the SuperLink."""
    body = bytes([255]) * (6 * 2**20)
    heads = [post("push-object", server.public_key)] * max(1, int(6 * scale))
    return at_once(4, lambda i: [server.ask(head, body, address=2 + i) for head in heads])


@attack
def refused_requests(server: Server, scale: float) -> str:
    """900 requests that lead nowhere, half of them long, from four addresses."""

    def some(i: int) -> list[str]:
        lines = ["GET /", "POST /v1/control/list-runs", f"GET /{'x' * 7900}", f"POST /v1/fleet/{'x' * 1900}"]
        heads = [f"{line} HTTP/1.1\r\nHost: localhost\r\n" for line in lines]
        return [server.ask(heads[j % 4], address=2 + i) for j in range(int(225 * scale))]

    return at_once(4, some)


@attack
def unsigned_calls(server: Server, scale: float) -> str:
    """900 calls as nodes make them, with no key or one that nobody knows."""
    unknown = base64.b64encode(b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n").decode()
    body = b"\x0a\x04AAAA"  # field 1, four bytes

    def some(i: int) -> list[str]:
        calls = [("activate-node", unknown), ("activate-node", ""), ("pull-messages", unknown)]
        heads = [post(*calls[j % 3]) for j in range(int(225 * scale))]
        return [server.ask(head, body, address=2 + i) for head in heads]

    return at_once(4, some)


@attack
def unsigned_calls_with_a_public_key(server: Server, scale: float) -> str:
    """The same with a client's public key and a wrong signature."""
    head, body = post("pull-messages", server.public_key), b"\x0a\x04AAAA"
    return at_once(4, lambda i: [server.ask(head, body, address=2 + i) for _ in range(int(225 * scale))])


@attack
def slow_headers(server: Server, scale: float) -> str:
    """Connections that send a byte of their header now and then."""
    return linger(server, int(300 * scale), b"X")


@attack
def idle(server: Server, scale: float) -> str:
    """Connections that ask for nothing."""
    return linger(server, int(500 * scale), b"")


def linger(server: Server, count: int, drip: bytes) -> str:
    """Open connections and let them be, or let a byte drip into each."""
    with contextlib.ExitStack() as stack:
        connections = []
        for i in range(count):
            with contextlib.suppress(OSError):
                connections.append(stack.enter_context(server.connection(2 + i % 4)))
                if drip:
                    connections[-1].sendall(b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        until, closed = time.monotonic() + HOLD_SECONDS, set[int]()
        while time.monotonic() < until:
            for i, connection in enumerate(connections):
                with contextlib.suppress(TimeoutError, ssl.SSLWantReadError):
                    try:
                        connection.settimeout(0)
                        if drip:
                            connection.sendall(drip)
                        elif connection.recv(1) == b"":
                            closed.add(i)
                    except (ssl.SSLWantReadError, BlockingIOError):
                        continue
                    except OSError:
                        closed.add(i)
            time.sleep(1.0)
        return f"{len(connections)} opened, {len(closed)} of them closed by the server"


class Meter:
    """The most memory that the processes of a server have had, and how much was written to logs."""

    def __init__(self, loop: Loopback) -> None:
        self._loop, self._done = loop, threading.Event()
        self.peak = dict.fromkeys(("superlink", "nginx", "both"), 0.0)  # MB
        self._thread = threading.Thread(target=self._watch)
        self._before = self._logged()
        self.log_bytes = 0

    def _watch(self) -> None:
        while not self._done.is_set():
            now = memory(self._loop.processes["server"].pid)
            now["both"] = sum(now.values())
            self.peak = {name: max(self.peak[name], now[name]) for name in self.peak}
            self._done.wait(0.1)

    def _logged(self) -> int:
        files = [*(self._loop.folder / "logs").iterdir(), self._loop.root / "server.log"]
        return sum(file.stat().st_size for file in files)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.log_bytes = self._logged() - self._before


def memory(parent: int) -> dict[str, float]:
    """Resident memory in MB of the SuperLink and of all processes of nginx."""
    found = {"superlink": 0.0, "nginx": 0.0}
    for pid in family(parent):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            kind = "superlink" if b"flower-superlink" in command else "nginx" if b"nginx" in command else None
            told = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            if kind and told:
                found[kind] += int(told[1]) / 1000
    return found


@dataclasses.dataclass(frozen=True)
class Row:
    """What an attack came to."""

    name: str
    seconds: float
    superlink: float  # MB, at most
    nginx: float
    both: float
    log_bytes: int
    answers: str

    @property
    def is_bounded(self) -> bool:
        return self.both < MEMORY_MB and self.log_bytes < LOG_BYTES

    @property
    def has_no_key(self) -> bool:
        return "public-key" not in self.name

    def line(self) -> str:
        cells = [self.name.replace("-", " "), f"{self.superlink:.0f}", f"{self.nginx:.0f}", f"{self.log_bytes:,}"]
        return f"| {' | '.join(cells)} | {self.answers} |"


HEAD = "| attack | SuperLink, MB | nginx, MB | bytes of log | answers |\n|---|---|---|---|---|"


def attacked(box: Path, names: list[str], scale: float, say: Callable[[str], None]) -> list[Row]:
    """Do the attacks to a federation one by one, then all at once while a run is under way."""
    write_clients(box / "data", 2)
    text = recipe_text("fedavg", box / "data", num_rounds=2)
    rows: list[Row] = []
    with Loopback(box / "loop", text, box / "data", 2) as loop:
        loop.server()
        for i in range(2):
            loop.client(i)
        loop.until(lambda: loop.log("server").count("is online") == 2, 120, "two clients")
        server = Server(int(loop.address.rpartition(":")[2]), public_key(loop.folder / "keys" / "client-0.pub"))
        say(HEAD)

        def measured(name: str, work: Callable[[], str]) -> None:
            begun = time.monotonic()
            with Meter(loop) as meter:
                answers = work()
            most = meter.peak
            seconds = time.monotonic() - begun
            rows.append(Row(name, seconds, most["superlink"], most["nginx"], most["both"], meter.log_bytes, answers))
            say(rows[-1].line())

        strangers = [name for name in names if "public-key" not in name]
        measured("none", lambda: time.sleep(5) or "")  # type: ignore[func-returns-value]
        for name in strangers:
            measured(name, lambda name=name: ATTACKS[name](server, scale))  # type: ignore[misc]
        measured("all of these at once, and a run", lambda: run_under_attack(loop, server, strangers, scale))
        for name in names:
            if name not in strangers:
                measured(name, lambda name=name: ATTACKS[name](server, scale))  # type: ignore[misc]
    return rows


def run_under_attack(loop: Loopback, server: Server, names: list[str], scale: float) -> str:
    """A run while every attack is repeated until it has ended, but for no longer than five minutes."""
    end, until = threading.Event(), time.monotonic() + 300

    def again(name: str) -> None:
        while not end.is_set() and time.monotonic() < until:
            ATTACKS[name](server, scale)

    threads = [threading.Thread(target=again, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    try:
        command = [sys.executable, "-m", "personafl", "deploy", "start", str(loop.folder), "--wait"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    finally:
        end.set()
        for thread in threads:
            thread.join()
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr + loop.log("server")[-2000:])
    left = loop.summary()["without_model"]
    return f"the run ended well, {2 - len(left) if isinstance(left, list) else 2 - int(left)} of 2 clients have a model"


def public_key(file: Path) -> str:
    """A client's public key as its node sends it."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    key = load_ssh_public_key(file.read_bytes())
    return base64.b64encode(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(ATTACKS))
    parser.add_argument("--scale", type=float, default=1.0)
    told = parser.parse_args()
    with scratch() as box:
        rows = attacked(box, told.only.split(","), told.scale, lambda line: print(line, flush=True))
    by_strangers = [row for row in rows if row.has_no_key]
    worst = max(row.both for row in by_strangers), sum(row.log_bytes for row in by_strangers)
    print(f"without a key: SuperLink and nginx at most {worst[0]:.0f} MB, all logs {worst[1]:,} bytes")
    sys.exit(not all(row.is_bounded for row in by_strangers))


if __name__ == "__main__":
    main()
