"""What is set at the server (`deployment.toml`) and at a client (`client.toml`)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

from personafl.core.errors import UserError
from personafl.core.settings import Section, setting
from personafl.storage import files

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
OTHER_KEY = (
    "client %s is refused, since its key is that of client %s at the server, keys/%s.pub: use the key that was made "
    'for it, or set client.id="%s"'
)
"""What a client says that has another client's key; `deploy client` ends with it."""
S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Deployment(Section):
    """Who must be there, how long is waited; the `[deployment]` table of `deployment.toml`."""

    section: ClassVar[str] = "deployment"

    name: str = setting("federation", "what the federation is called")
    clients: int = setting(3, "clients that take part; those that come beyond them are newcomers")
    start: int = setting(0, "clients that must be there before a run begins or is resumed; 0: all of them")
    quorum: int = setting(0, "updates that a stage needs before the next one begins; 0: half of its sampled clients")
    quorum_timeout: float = setting(3600.0, "seconds without a new update after which a stage is given up")
    without_quorum: Literal["stop", "skip"] = setting(
        "stop", "what becomes of a stage that is given up: stop ends the run, which can be resumed, skip leaves it out"
    )
    offline: Literal["skip", "wait"] = setting("skip", "what is done about sampled clients that are not there")
    wait: float = setting(120.0, "seconds a round waits for them at most, where it waits")
    start_timeout: float = setting(
        3600.0, "seconds that are waited for the clients that a run begins or is resumed with"
    )
    round_timeout: float = setting(600.0, "seconds after which a client's answer is not waited for any longer")
    labels: tuple[str, ...] = setting((), "names of the classes, in order; empty: clients tell which they have")
    bind: bool = setting(True, "whether a client's name must be that of its public key: client-3 for keys/client-3.pub")

    def check(self) -> None:
        self.hold(
            [
                ("name", NAME.fullmatch(self.name) is not None, "letters, digits and . _ -, at most 64"),
                ("clients", 1 <= self.clients <= 10**6, "at least 1 and at most 1000000"),
                ("start", 0 <= self.start <= self.clients, f"at least 0 and at most clients ({self.clients})"),
                ("quorum", 0 <= self.quorum <= self.clients, f"at least 0 and at most clients ({self.clients})"),
                ("quorum_timeout", self.quorum_timeout > 0, "greater than 0"),
                ("wait", self.wait >= 0, "not negative"),
                ("start_timeout", self.start_timeout > 0, "greater than 0"),
                ("round_timeout", self.round_timeout > 0, "greater than 0"),
                ("labels", len(set(self.labels)) == len(self.labels), "different names"),
            ]
        )

    @property
    def at_start(self) -> int:
        return self.start or self.clients

    @classmethod
    def read(cls, path: Path) -> Self:
        return read_table(path, cls)


@dataclass(frozen=True)
class ClientSettings(Section):
    """Who a client is and where its data are; the `[client]` table of `client.toml`."""

    section: ClassVar[str] = "client"

    id: str = setting("", "what the client is called, the same for ever")
    data: str = setting("", "a folder, package.module:load, or recipe:K for client K of the recipe's own data")
    state: str = setting("state", "folder of what the client keeps and of its model")
    device: str = setting("cpu", "where it trains: cpu, cuda, cuda:1")
    threads: int = setting(0, "threads of an operation; 0: as many as PyTorch has")

    def check(self) -> None:
        self.hold(
            [
                ("id", NAME.fullmatch(self.id) is not None, "letters, digits and . _ -, at most 64"),
                ("data", bool(self.data), "a folder or package.module:load"),
                ("state", bool(self.state), "a folder"),
                ("threads", 0 <= self.threads <= 1024, "at least 0 and at most 1024"),
            ]
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """The table of a file; folders in it are relative to the file."""
        told = read_table(path, cls)
        home = path.resolve().parent
        data = told.data if ":" in told.data else str(home / told.data)
        values = {n: getattr(told, n) for n in cls.names()}
        return cls(**(values | {"data": data, "state": str(home / told.state)}))


def read_table(path: Path, kind: type[S]) -> S:
    """A section from the table of its name in a TOML file, where other tables are left alone."""
    try:
        held: dict[str, Any] = tomllib.loads(files.read_text(path))
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path}: cannot be read: {e}") from None
    table = held.get(kind.section)
    if not isinstance(table, dict):
        raise UserError(f"{path}: must have a table [{kind.section}]")
    try:
        found: S = kind(**table)
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    return found
