"""Units for systemd."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from personafl.flower import units


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    programs, root = tmp_path / "bin", tmp_path / "a folder"
    programs.mkdir()
    root.mkdir()
    (programs / "personafl").symlink_to(sys.executable)  # systemd looks whether it can be executed
    server, client = tmp_path / "personafl-server.service", tmp_path / "personafl-client.service"
    server.write_text(units.server(programs, root))
    client.write_text(units.client().replace("/opt/personafl/bin", str(programs)).replace("/srv/personafl", str(root)))
    for unit in (server, client):
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
        )
        ours = [line for line in done.stderr.splitlines() if "personafl" in line]
        assert not ours, ours
    broken = tmp_path / "personafl-broken.service"
    broken.write_text(units.server(tmp_path / "nowhere", root))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", broken], capture_output=True, text=True, check=False
    )
    assert "personafl-broken.service" in done.stderr  # it does look
