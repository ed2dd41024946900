"""The ServerApp: what it needs to begin."""

from __future__ import annotations

from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from personafl.core.errors import UserError
from personafl.flower import client_app, server_app
from personafl.flower.in_process import RUN, InProcessGrid


def test_a_folder_without_a_recipe_is_refused(tmp_path: Path) -> None:
    told = {"folder": str(tmp_path)}
    grid = InProcessGrid(client_app.app, {}, told)
    with pytest.raises(UserError, match=r"recipe.toml: cannot be read"):
        server_app.app(grid, Context(RUN, 1, {}, RecordDict(), told))  # type: ignore[arg-type]
