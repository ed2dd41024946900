"""The ServerApp: our own rounds on Flower's grid."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from logging.handlers import RotatingFileHandler
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from personafl.core.errors import UserError
from personafl.deployment.coordinator import Coordinator
from personafl.deployment.flower.control import has_keys, registered
from personafl.deployment.flower.folder import Folder
from personafl.deployment.flower.transport import FlowerTransport
from personafl.deployment.settings import Deployment
from personafl.storage import files

app = ServerApp()
LOG = "rounds.log"
"""What happened in the rounds of all runs, a line each; Flower has it for each run, `flwr log`."""


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Lines of ours to Flower's log and to a file."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    ours = logging.getLogger("personafl")
    ours.setLevel(logging.INFO)
    path.parent.mkdir(exist_ok=True)
    file = RotatingFileHandler(path, maxBytes=10**7, backupCount=4, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    ours.addHandler(file)
    try:
        yield
    except Exception as e:
        ours.error("the run ended: %s", " ".join(str(e).split()) or type(e).__name__)
        raise
    finally:
        ours.removeHandler(file)
        file.close()


@app.main()
def main(grid: Grid, context: Context) -> None:
    folder = Path(str(context.run_config["folder"]))
    with _logged(folder / "logs" / LOG):
        _run(grid, folder)


def _run(grid: Grid, folder: Path) -> None:
    settings = Deployment.read(folder / "deployment.toml")
    keyed = has_keys(folder)
    if not keyed:  # there are none that a name could be bound to
        settings = replace(settings, bind=False)
    try:
        recipe = files.read_text(folder / "recipe.toml")
    except (OSError, ValueError) as e:
        raise UserError(f"{folder / 'recipe.toml'}: cannot be read: {e}") from None
    transport = FlowerTransport(grid, (lambda: registered(Folder(folder))) if keyed else None)
    Coordinator(folder, settings, recipe, transport).run()
