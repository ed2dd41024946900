"""Units for systemd."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from personafl.deployment.flower import units

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
ROOT, PROGRAMS = Path("/srv/fed"), Path("/opt/personafl/bin")


def exposure(tmp_path: Path, text: str) -> float:
    """The exposure level of a unit by `systemd-analyze security`, from 0 (closed) to 10."""
    unit = tmp_path / "personafl-tried.service"
    unit.write_text(text)
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    level = re.search(r"Overall exposure level for .*: ([\d.]+)", done.stdout)
    if level is None:
        pytest.skip("this systemd-analyze cannot judge a unit that is not installed")
    return float(level[1])


@needs_systemd
def test_units_let_processes_do_little_but_their_work(tmp_path: Path) -> None:
    assert exposure(tmp_path, "[Service]\nExecStart=/bin/true\n") > 9  # what a unit without restrictions has
    assert exposure(tmp_path, units.server(PROGRAMS, ROOT)) < 3
    assert exposure(tmp_path, units.server(PROGRAMS, ROOT, port=443)) < 3
    assert exposure(tmp_path, units.client()) < 3
    without_gpu_lines = units.client().replace(units.NO_DEVICES, "")
    assert exposure(tmp_path, without_gpu_lines) < 3


def test_a_server_in_a_home_folder_can_read_it() -> None:
    assert "ProtectHome=read-only" in units.server(PROGRAMS, Path("/home/me/fed"))
    assert "ProtectHome=read-only" in units.server(Path("/root/venv/bin"), ROOT)


def test_what_pytorch_needs_is_left_open() -> None:
    for text in (units.server(PROGRAMS, ROOT), units.client()):
        assert "MemoryDenyWriteExecute=" not in text and "ProcSubset=" not in text


@needs_systemd
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
