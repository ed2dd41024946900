"""`deployment.toml` and `client.toml`: how a server and its clients reach each other, and how the files are written."""

from __future__ import annotations

import dataclasses
import ipaddress
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import tomli_w

from personafl.core.errors import UserError
from personafl.core.settings import Section, setting

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServerLink(Section):
    """The table `[link]` of `deployment.toml`."""

    section: ClassVar[str] = "link"

    address: str = setting("localhost:8443", "host:port under which clients reach the server; nginx.conf listens there")
    port: int = setting(9443, "port of Flower's SuperLink on 127.0.0.1; only nginx.conf leads to it")

    def check(self) -> None:
        _, port = split_address("link.address", self.address)
        self.hold([("port", 0 < self.port < 65536 and self.port != port, f"1 to 65535 and not {port}, the address's")])


@dataclass(frozen=True)
class ClientLink(Section):
    """The table `[link]` of `client.toml`; relative paths are relative to the file."""

    section: ClassVar[str] = "link"

    address: str = setting("localhost:8443", "host:port of the server")
    ca: str = setting("ca.crt", "certificate of the CA that the server's certificate is signed by")
    key: str = setting("node.key", "private key of this client; nobody else may have it")

    def check(self) -> None:
        split_address("link.address", self.address)


@dataclass(frozen=True)
class Client:
    """A `client.toml`: where it is, who the client is, and its link, with paths resolved."""

    file: Path
    id: str
    state: Path
    link: ClientLink

    @property
    def ca(self) -> Path:
        return self.file.parent / self.link.ca

    @property
    def key(self) -> Path:
        return self.file.parent / self.link.key


def split_address(where: str, address: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 address stands in brackets."""
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    plain = bare and not any(c.isspace() or c in "/\\\"';{}[]@" for c in bare)
    if not plain or (":" in bare) != (bare != host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"{where}={address!r}: must be host:port, such as fl.example.org:8443 or [2001:db8::1]:8443")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Whether a host of `split_address` is this machine and can be reached from no other."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def read_client(file: Path) -> Client:
    """A `client.toml`, as far as starting a node needs it; the client app reads the rest."""
    file = file.absolute()
    tables = read_tables(file)
    table = tables["client"] if isinstance(tables.get("client"), dict) else {}
    for key in ("id", "data"):
        if not isinstance(table.get(key), str) or not table[key]:
            raise UserError(f"{file}: [client] needs {key} = a text; it has {table.get(key)!r}")
    state = table.get("state", "state")
    if not isinstance(state, str) or not state:
        raise UserError(f"{file}: client.state={state!r}: must be a folder")
    return Client(file, table["id"], file.parent / state, section(ClientLink, tables, file))


def section(kind: type[Any], tables: dict[str, Any], file: Path) -> Any:
    """The object of a table of a file."""
    table = tables.get(kind.section, {})
    if not isinstance(table, dict):
        raise UserError(f"{file}: [{kind.section}] must be a table")
    try:
        return kind(**table)
    except UserError as e:
        raise UserError(f"{file}: {e}") from None


def read_tables(file: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    if not file.is_file():
        raise UserError(f"{file}: no such file")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file}: not valid TOML: {e}") from None


def commented(made: Section) -> str:
    """A section as a table of TOML with every setting, each under the sentence that explains it."""
    lines = [f"[{made.section}]"]
    for f in dataclasses.fields(made):
        value = getattr(made, f.name)
        text = "" if value is None else tomli_w.dumps({f.name: value}).strip()
        lines += [f"# {f.metadata['help']}", text or f"# {f.name} ="]
    return "\n".join(lines) + "\n"
