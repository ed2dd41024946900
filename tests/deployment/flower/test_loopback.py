"""Deployments of real processes against the simulator. Slow: minutes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from personafl.deployment.flower.processes import environment, family, free_port, option, program
from personafl.deployment.server_files import ServerFiles
from tests.deployment.flower.loopback import deploy, parity, recipe_text, simulated, worst, write_clients

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_a_deployment_over_tls_with_keys_gives_the_simulators_numbers(tmp_path: Path) -> None:
    found = parity("dm-pfl", "float64", tmp_path)
    assert found.server < 1e-9 and found.kept < 1e-9 and found.masks == 1.0
    assert found.bytes_equal
    # Flower counts each message with its framing, and ours with the recipe and what else is told: 3 nodes, 5 exchanges.
    for ours, flower in zip(found.ours, found.flower, strict=True):
        assert ours < flower < ours + 15 * 6000


def test_flowers_own_simulation_gives_the_simulators_numbers(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    write_clients(tmp_path / "data")
    text = recipe_text("ditto", tmp_path / "data", precision="float64")
    (tmp_path / "recipe.toml").write_text(text)
    sim = simulated(text)
    folder = tmp_path / "deployment"
    deploy("init", str(tmp_path / "recipe.toml"), str(folder), "--clients", "3")
    env = environment(tmp_path / "home", folder) | {
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    begun = set(family(1))
    words = ["run", str(folder / "app"), "--federation-config", "num-supernodes=3 client-resources-num-cpus=1"]
    try:
        subprocess.run(
            [program("flwr"), *words, "-c", option("folder", folder)], env=env, check=True, capture_output=True
        )
        end = time.monotonic() + 600
        while not (folder / "results" / "summary.json").exists():
            assert time.monotonic() < end
            time.sleep(1)
    finally:  # Flower leaves a SuperLink behind
        for pid in set(family(1)) - begun:
            if str(env["FLWR_HOME"]) in _environ(pid):
                os.kill(pid, signal.SIGKILL)
    told = json.loads((folder / "server" / "state.json").read_text())
    totals = told["numbers"]["state"]["totals"]
    assert (totals["up_bytes"], totals["down_bytes"]) == (sim.totals.up_bytes, sim.totals.down_bytes)
    loaded = ServerFiles(folder / "server").load()
    assert loaded is not None and worst(sim.server, loaded[1]) < 1e-9


def _environ(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""
