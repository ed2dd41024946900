"""The deployment folder: what is where in it, and `init`, which writes it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from personafl import config
from personafl.config import Recipe
from personafl.core.errors import UserError
from personafl.core.plain_text import is_text
from personafl.deployment.early_checks import check_before_clients
from personafl.deployment.federation_spec import check_recipe
from personafl.deployment.flower import modules, proxy, units
from personafl.deployment.flower.private_files import make_private
from personafl.deployment.flower.settings import ClientLink, ServerLink, commented, read_tables, section, split_address
from personafl.deployment.settings import ClientSettings, Deployment
from personafl.version import __version__

CLIENT = "CLIENT"
"""The id in the template `client.toml`, in whose place each client's own comes."""

PYPROJECT = f"""\
# A Flower app that calls the personafl installed on each machine. It names no dependencies, so that nothing is
# installed when a run starts.
[project]
name = "personafl-deployment"
version = "{__version__}"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "personafl"

[tool.flwr.app.components]
serverapp = "personafl_app.server:app"
clientapp = "personafl_app.client:app"

[tool.flwr.app.config]
folder = ""
"""

# Flower looks for an assignment to `app` in the text, so it is not imported by name.
APP = """\
from personafl.deployment.flower import {name} as _module

app = _module.app
"""


@dataclass(frozen=True)
class Folder:
    """The parts of a deployment folder."""

    root: Path

    @classmethod
    def open(cls, root: Path) -> Folder:
        """A folder that `init` has written."""
        folder = cls(root.absolute())
        if not folder.deployment.is_file():
            raise UserError(f"{root}: no deployment folder (no deployment.toml); personafl deploy init makes one")
        if not usable(str(folder.root)):
            raise UserError(f"{folder.root!s}: quotation marks, backslashes and control characters do not work in it")
        return folder

    @property
    def deployment(self) -> Path:
        return self.root / "deployment.toml"

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.toml"

    @property
    def client(self) -> Path:
        """The template of `client.toml`."""
        return self.root / "client.toml"

    @property
    def nginx(self) -> Path:
        return self.root / "nginx.conf"

    @property
    def app(self) -> Path:
        return self.root / "app"

    @property
    def keys(self) -> Path:
        """Certificates, and the public keys of the nodes that may take part."""
        return self.root / "keys"

    @property
    def clients(self) -> Path:
        """A folder for each client: what it is given."""
        return self.root / "clients"

    @property
    def home(self) -> Path:
        """Flower's own folder: its settings and the SuperLink's database."""
        return self.root / "flower"

    @property
    def modules(self) -> Path:
        """Modules of one's own that the recipe names."""
        return self.root / "modules"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def results(self) -> Path:
        return self.root / "results"

    @property
    def server(self) -> Path:
        """The server app's own folder: its checkpoint and the roster."""
        return self.root / "server"

    @property
    def roster(self) -> Path:
        """Who is who, as the server app knows it."""
        return self.server / "roster.json"

    def make_private(self) -> list[Path]:
        """Close the folders that hold keys, updates, results and logs; return those that others can still enter."""
        private = [self.keys, self.home, self.server, self.results, self.logs]
        private += [self.clients] if self.clients.is_dir() else []
        return [path for path in private if not make_private(path)]

    def link(self) -> ServerLink:
        made: ServerLink = section(ServerLink, read_tables(self.deployment), self.deployment)
        return made


def usable(text: str) -> bool:
    """Whether Flower's options, nginx and systemd take a path as it is."""
    return is_text(text) and text.isprintable() and not set(text) & set("\"'\\;{}$%")


def _without_shift(recipe: Recipe, overrides: list[str]) -> Recipe:
    """The recipe as a deployment can be scored: unless it was asked for here, test-time shift is left out."""
    if recipe.evaluation.shift == "none" or any(o.startswith("evaluation.shift=") for o in overrides):
        return recipe
    return replace(recipe, evaluation=replace(recipe.evaluation, shift="none"))


def init(
    recipe: str | None,
    overrides: list[str],
    root: Path,
    clients: int | None,
    address: str | None,
    port: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Folder:
    """Write a deployment folder for a recipe of one method, with the modules of one's own that it names.

    These are found beside the recipe, too; `say` hears which are copied and which have to be installed.
    """
    beside = Path(recipe).resolve().parent if recipe is not None and Path(recipe).is_file() else None
    with modules.importable(beside):
        chosen = _without_shift(config.anchored(config.load(recipe, overrides)), overrides)
        own = modules.find_modules(config.dump(chosen))
    if len(chosen.algorithms) != 1:
        names = ", ".join(m.label for m in chosen.algorithms)
        raise UserError(f"a deployment runs one method, this recipe has {names}; choose with algorithms=<name>")
    check_recipe(chosen)
    number = chosen.data.num_clients if clients is None else clients
    if number is None:
        raise UserError("--clients: the recipe does not say how many clients there are")
    if number < 1:
        raise UserError(f"--clients {number}: must be at least 1")
    check_before_clients(chosen, number)
    given: dict[str, Any] = {"address": address, "port": port}
    link = ServerLink(**{n: v for n, v in given.items() if v is not None})
    folder = Folder(root.absolute())
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise UserError(f"{root}: is there already and not empty; a deployment needs a new folder")
    if not usable(str(folder.root)):
        raise UserError(
            f"{root}: the path must be without quotation marks, backslashes, $, %, ;, braces and line breaks"
        )
    name = re.sub(r"[^A-Za-z0-9._-]+|^[._-]+", "-", folder.root.name).lstrip("-")[:64] or "federation"
    files = {
        folder.recipe: config.dump(chosen),
        folder.deployment: f"{commented(Deployment(name=name, clients=number))}\n{commented(link)}",
        folder.client: f"{commented(ClientSettings(id=CLIENT, data='data'))}\n"
        f"{commented(ClientLink(address=link.address))}",
        folder.nginx: proxy.text(link),
        folder.app / "pyproject.toml": PYPROJECT,
        folder.app / "personafl_app" / "__init__.py": "",
        folder.app / "personafl_app" / "server.py": APP.format(name="server_app"),
        folder.app / "personafl_app" / "client.py": APP.format(name="client_app"),
        folder.root / "systemd" / "personafl-server.service": units.server(
            Path(sys.executable).parent, folder.root, split_address("link.address", link.address)[1]
        ),
        folder.root / "systemd" / "personafl-client.service": units.client(),
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    own.copy(folder.modules)
    if own.sources:
        say(f"copied to {folder.modules}: {', '.join(own.sources)}")
    if own.installed:
        say(f"to be installed on every machine, in the same version: {', '.join(own.installed)}")
    return folder
