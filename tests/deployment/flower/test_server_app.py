"""The ServerApp: what it needs to begin."""

from __future__ import annotations

from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from personafl.core.errors import UserError
from personafl.deployment.flower import client_app, server_app
from personafl.deployment.flower.in_process import RUN, InProcessGrid


def test_a_folder_without_its_files_is_refused_and_its_log_says_so(tmp_path: Path) -> None:
    told = {"folder": str(tmp_path)}
    grid = InProcessGrid(client_app.app, {}, told)
    context = Context(RUN, 1, {}, RecordDict(), told)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"deployment.toml: cannot be read"):
        server_app.app(grid, context)
    (tmp_path / "deployment.toml").write_text("[deployment]\nclients = 1\n")
    with pytest.raises(UserError, match=r"recipe.toml: cannot be read"):
        server_app.app(grid, context)
    lines = (tmp_path / "logs" / server_app.LOG).read_text().splitlines()
    assert len(lines) == 2 and "the run ended" in lines[0] and "recipe.toml" in lines[1]
