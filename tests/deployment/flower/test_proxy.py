"""The reverse proxy: what nginx passes on to a SuperLink, and that it is nodes' calls alone."""

from __future__ import annotations

import base64
import http.server
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from personafl.core.errors import UserError
from personafl.deployment.flower import control, proxy
from personafl.deployment.flower.folder import Folder
from personafl.deployment.flower.processes import Child, answers, free_port
from personafl.deployment.flower.settings import ServerLink
from tests.deployment.flower.folders import made, with_keys
from tests.deployment.flower.test_processes import waited

needs_nginx = pytest.mark.skipif(proxy.find() is None, reason="nginx is not installed")

# Request targets that lead to the Control or Runtime API for some reader of them, or to no call of a node's.
TRICKS = [
    "/v1/control/list-runs",
    "/v1/runtime/get-nodes",
    "/v1/fleet/../control/list-runs",
    "/v1/fleet/%2e%2e/control/list-runs",
    "/v1/fleet/%2E%2E%2Fcontrol/list-runs",
    "/v1/fleet/..%2fcontrol%2flist-runs",
    "/v1/fleet/..;/control/list-runs",
    "/v1/fleet\\..\\control/list-runs",
    "/v1/control/../fleet/pull-messages",
    "/v1/control/list-runs/../../fleet/pull-messages",
    "/v1/control/list-runs?/../../fleet/pull-messages",
    "/v1/control/list-runs#/../../fleet/pull-messages",
    "/v1/fleet/pull-messages#/../../control/list-runs",
    "/v1/fleet/pull-messages?/../../control/list-runs",
    "/v1/fleet/pull-messages/",
    "/v1/fleet/pull-messages/../../control/list-runs",
    "//v1/control/list-runs",
    "/v1//control/list-runs",
    "//v1/fleet/pull-messages",
    "/./v1/control/list-runs",
    "/v1/%63ontrol/list-runs",
    "/v1/%66leet/pull-messages",
    "/V1/CONTROL/LIST-RUNS",
    "/V1/FLEET/pull-messages",
    "/v1/fleet/PULL-messages",
    "https://localhost/v1/control/list-runs",
    "http://127.0.0.1:9443/v1/control/list-runs",
    "https://localhost/v1/fleet/../control/list-runs",
    "/v1/fleet/",
    "/v1/fleet",
    "/v1",
    "/",
    "/docs",
    "/openapi.json",
]
MALFORMED = ["/v1/fleet/%00", "/v1/control/list-runs%00/../../fleet/x", "*", "v1/control/list-runs"]


def test_the_configuration_listens_where_clients_come_and_leads_to_the_superlink() -> None:
    text = proxy.text(ServerLink(address="fl.example.org:443", port=7000))
    assert "listen 443 ssl;" in text and "# listen [::]:443 ssl;" in text
    assert [line.strip() for line in text.splitlines() if "proxy_pass" in line] == [
        "proxy_pass https://127.0.0.1:7000/v1/fleet/activate-node;",
        "proxy_pass https://127.0.0.1:7000/v1/fleet/$call;",
    ]
    assert "        listen [::]:443 ssl;" in proxy.text(ServerLink(address="[2001:db8::1]:443"))


def listens(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip().startswith("listen ")]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.5", "[::1]", "LOCALHOST."])
def test_an_address_of_the_loopback_interface_is_open_to_this_machine_alone(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "has_ipv6", lambda: True)
    text = proxy.text(ServerLink(address=f"{host}:8443"))
    first = host if host == "127.0.0.5" else "127.0.0.1"
    assert listens(text) == [f"listen {first}:8443 ssl;", "listen [::1]:8443 ssl;"]
    monkeypatch.setattr(proxy, "has_ipv6", lambda: False)
    assert listens(proxy.text(ServerLink(address="localhost:8443"))) == ["listen 127.0.0.1:8443 ssl;"]


@pytest.mark.parametrize("host", ["fl.example.org", "10.0.0.1", "localhost.example.org"])
def test_another_address_is_open_on_all_interfaces(host: str) -> None:
    assert listens(proxy.text(ServerLink(address=f"{host}:8443"))) == ["listen 8443 ssl;"]


def test_nginx_is_told_the_public_keys_that_nodes_send(tmp_path: Path) -> None:
    folder = with_keys(tmp_path / "fed")
    known = control.public_keys(folder)
    assert proxy.write_admitted_keys(folder.root, known.values()) and not proxy.write_admitted_keys(
        folder.root, known.values()
    )
    text = (folder.root / "flower" / "nginx" / "nodes.conf").read_text()
    assert text.count(' "";') == 2 and "map $http_flwr_public_key $stranger {" in text
    assert all(f'"{key_header(folder, name)}" "";' in text for name in known)
    assert "default $remote_addr;" in text
    assert proxy.write_admitted_keys(folder.root, [known["client-0"], "no key"])  # a file that is no key lets nobody in
    assert (folder.root / "flower" / "nginx" / "nodes.conf").read_text().count(' "";') == 1


def test_with_a_flower_that_names_no_such_header_no_key_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("flwr.supercore.constant.FLEET_HTTP_PUBLIC_KEY_HEADER")
    assert proxy.write_admitted_keys(tmp_path, [])
    assert 'default "";' in (tmp_path / "flower" / "nginx" / "nodes.conf").read_text()


def test_a_configuration_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "fed")
    with pytest.raises(UserError, match=r"does not lead to 127\.0\.0\.1:944, the link\.port"):
        proxy.check("nginx", folder.root, ServerLink(port=944))
    folder.nginx.unlink()
    with pytest.raises(UserError, match=r"nginx\.conf: no such file; with --no-proxy"):
        proxy.check("nginx", folder.root, ServerLink())


@needs_nginx
def test_nginx_takes_the_configuration_and_a_wrong_one_is_refused_in_its_words(tmp_path: Path) -> None:
    folder = with_keys(tmp_path / "a fed")
    nginx = proxy.find()
    assert nginx is not None
    folder.logs.mkdir()
    proxy.check(nginx, folder.root, folder.link())
    folder.nginx.write_text(folder.nginx.read_text().replace("proxy_buffering", "proxy_bufering"))
    with pytest.raises(UserError, match=r'nginx refuses it: .*unknown directive "proxy_bufering"'):
        proxy.check(nginx, folder.root, folder.link())


class Link(http.server.BaseHTTPRequestHandler):
    """A SuperLink that notes what arrives."""

    arrived: list[tuple[str, int]]
    addresses: list[str | None]  # from which it came by the proxy's word

    def do_POST(self) -> None:
        size = 0
        self.addresses.append(self.headers.get("X-Forwarded-For"))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while piece := int(self.rfile.readline(), 16):
                size += len(self.rfile.read(piece + 2)) - 2
            self.rfile.readline()
        else:
            size = len(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        self.arrived.append((self.path, size))
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"link")

    do_GET = do_POST  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


def key_header(folder: Folder, name: str) -> str:
    """A registered public key as Flower's nodes send it."""
    key = serialization.load_ssh_public_key((folder.keys / f"{name}.pub").read_bytes())
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return base64.b64encode(public_key_to_bytes(key)).decode()


class Front:
    """nginx in front of such a SuperLink."""

    def __init__(self, folder: Folder, port: int, handler: type[Link], child: Child, lines: list[str]) -> None:
        self.folder, self.port, self._handler, self.child, self.lines = folder, port, handler, child, lines

    @property
    def arrived(self) -> list[tuple[str, int]]:
        return self._handler.arrived

    @property
    def addresses(self) -> list[str | None]:
        return self._handler.addresses

    def ask(self, method: str, target: str, body: bytes = b"", head: str = "", registered: bool = True) -> int:
        """The status of an answer to a request that is sent as it stands, by default with a node's public key."""
        context = ssl.create_default_context(cafile=str(self.folder.keys / "ca.crt"))
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as s,
        ):
            head = head or f"Content-Length: {len(body)}\r\n"
            if registered:
                head += f"flwr-public-key: {key_header(self.folder, 'client-0')}\r\n"
            s.sendall(f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{head}\r\n".encode())
            s.sendall(body)
            return int(s.makefile("rb").readline().split()[1])


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    nginx = proxy.find()
    assert nginx is not None
    port, link = free_port(), free_port()
    folder = with_keys(tmp_path / "fed", port=port, link=link)
    folder.logs.mkdir()
    proxy.write_admitted_keys(folder.root, control.public_keys(folder).values())
    proxy.check(nginx, folder.root, folder.link())
    handler = type("Noting", (Link,), {"arrived": [], "addresses": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", link), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder.keys / "server.crt", folder.keys / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    lines: list[str] = []
    child = Child(proxy.command(nginx, folder.root), dict(os.environ), folder.root, lines.append)
    try:
        assert waited(lambda: answers(port))
        yield Front(folder, port, handler, child, lines)
    finally:
        child.stop()
        server.shutdown()
        server.server_close()


@pytest.mark.slow
@needs_nginx
def test_calls_of_nodes_get_through_and_nothing_else(front: Front) -> None:
    assert front.ask("POST", "/v1/fleet/pull-messages", b"abc") == 200
    assert front.ask("POST", "https://localhost/v1/fleet/push-object", b"abc") == 200  # absolute, and a node's call
    assert front.arrived == [("/v1/fleet/pull-messages", 3), ("/v1/fleet/push-object", 3)]
    for method in ("POST", "GET"):
        assert {target: front.ask(method, target) for target in TRICKS} == dict.fromkeys(TRICKS, 404)
        assert {target: front.ask(method, target) for target in MALFORMED} == dict.fromkeys(MALFORMED, 400)
    for method in ("GET", "PUT", "DELETE", "OPTIONS"):
        assert front.ask(method, "/v1/fleet/pull-messages") == 404
    both = "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"  # two lengths, by which a request could hide another
    hidden = b"0\r\n\r\nPOST /v1/control/list-runs HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert front.ask("POST", "/v1/fleet/pull-messages", hidden, both) == 400
    assert len(front.arrived) == 2
    assert any('"POST /v1/control/list-runs HTTP/1.1" 404' in line for line in front.lines)


@pytest.mark.slow
@needs_nginx
def test_the_superlink_is_told_the_address_of_a_client_and_not_what_the_client_says(front: Front) -> None:
    head = "Content-Length: 0\r\nX-Forwarded-For: 203.0.113.9\r\n"
    assert front.ask("POST", "/v1/fleet/pull-messages", head=head) == 200
    assert front.ask("POST", "/v1/fleet/activate-node", head=head, registered=False) == 200
    assert front.addresses == ["127.0.0.1"] * 2


@pytest.mark.slow
@needs_nginx
def test_pieces_of_a_payload_pass_and_a_body_larger_than_any_does_not(front: Front) -> None:
    assert front.ask("POST", "/v1/fleet/push-object", bytes(6 * 2**20)) == 200
    chunks = b"5\r\nabcde\r\n0\r\n\r\n"
    assert front.ask("POST", "/v1/fleet/push-object", chunks, "Transfer-Encoding: chunked\r\n") == 200
    assert [size for _, size in front.arrived] == [6 * 2**20, 5]
    assert front.ask("POST", "/v1/fleet/push-object", head=f"Content-Length: {9 * 2**20}\r\n") == 413
    assert len(front.arrived) == 2


@pytest.mark.slow
@needs_nginx
def test_a_body_without_a_registered_key_is_not_passed_on(front: Front) -> None:
    assert front.ask("POST", "/v1/fleet/push-object", bytes(6 * 2**20), registered=False) == 401
    assert front.ask("POST", "/v1/fleet/pull-messages", b"abc", registered=False) == 401
    assert not front.arrived
    assert front.ask("POST", "/v1/fleet/activate-node", b"abc", registered=False) == 200  # it is told why by Flower
    assert front.ask("POST", "/v1/fleet/activate-node", bytes(9000), registered=False) == 413
    assert front.arrived == [("/v1/fleet/activate-node", 3)]
    assert proxy.write_admitted_keys(front.folder.root, [])  # the keys are revoked
    front.child.process.send_signal(signal.SIGHUP)
    asked = lambda: {front.ask("POST", "/v1/fleet/pull-messages") for _ in range(5)}  # noqa: E731
    assert waited(lambda: asked() == {401})  # nginx ends its old processes a moment later


@pytest.mark.slow
@needs_nginx
def test_a_stranger_who_asks_too_often_is_refused_with_few_lines(front: Front) -> None:
    asked = [front.ask("POST", "/v1/fleet/activate-node", registered=False) for _ in range(40)]
    assert 10 <= asked.count(200) <= 20 and asked.count(200) + asked.count(503) == 40
    assert {front.ask("GET", "/", registered=False) for _ in range(100)} == {404}
    told = [line for line in front.lines if line.startswith("refused 127.0.0.1 ")]
    assert 20 <= len(told) <= 45
    assert [front.ask("POST", "/v1/fleet/pull-messages") for _ in range(40)] == [200] * 40  # a node is not slowed


@pytest.mark.slow
@needs_nginx
def test_a_superlink_that_is_somebody_else_s_is_not_spoken_to(front: Front, tmp_path: Path) -> None:
    """nginx looks at the SuperLink's certificate: with another CA it does not pass anything on."""
    other = with_keys(tmp_path / "other")
    shutil.copy(other.keys / "ca.crt", front.folder.keys / "ca2.crt")
    nginx, port = proxy.find(), free_port()
    assert nginx is not None
    text = (
        front.folder.nginx.read_text()
        .replace("keys/ca.crt", "keys/ca2.crt")
        .replace(f"{front.port} ssl", f"{port} ssl")
    )
    front.folder.nginx.write_text(text.replace("nginx.pid", "nginx2.pid"))
    process = subprocess.Popen(proxy.command(nginx, front.folder.root))
    try:
        assert waited(lambda: answers(port))
        assert Front(front.folder, port, front._handler, front.child, []).ask("POST", "/v1/fleet/pull-messages") == 502
        assert not front.arrived
    finally:
        process.terminate()
        process.wait(60)


def test_the_configuration_checks_the_superlink_and_passes_calls_of_nodes_alone() -> None:
    """By its text, where there is no nginx to try it with."""
    text = proxy.text(ServerLink(address="fl.example.org:8443", port=9443))
    for line in (
        "proxy_ssl_verify on;",
        "ssl_protocols TLSv1.2 TLSv1.3;",
        "proxy_request_buffering on;",
        "client_max_body_size 6m;",
        'if ($request_uri !~ "^/v1/fleet/[a-z-]+$") {',
        "proxy_pass https://127.0.0.1:9443/v1/fleet/$call;",
    ):
        assert text.count(line) == 1, line
    assert text.count("location ") == 4 and text.count("proxy_pass") == 2
    assert text.count("if ($request_method != POST) {") == 2
