"""The ServerApp: our own rounds on Flower's grid."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from personafl.core import files
from personafl.core.errors import UserError
from personafl.deployment.coordinator import Coordinator
from personafl.deployment.settings import Deployment
from personafl.flower.control import is_plain
from personafl.flower.transport import FlowerTransport

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("personafl").setLevel(logging.INFO)
    folder = Path(str(context.run_config["folder"]))
    settings = Deployment.read(folder / "deployment.toml")
    if is_plain(folder):  # there are no keys that a name could be bound to
        settings = replace(settings, bind=False)
    try:
        recipe = files.read_text(folder / "recipe.toml")
    except (OSError, ValueError) as e:
        raise UserError(f"{folder / 'recipe.toml'}: cannot be read: {e}") from None
    Coordinator(folder, settings, recipe, FlowerTransport(grid)).run()
