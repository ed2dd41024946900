"""Commands that are killed, stopped or run out of room, and go on; `tests/kills.py` does it more often and longer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from personafl import config
from personafl.experiment import run_folder
from tests import kills

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")]


def recipe(folder: Path, method: str, rounds: int = 40) -> Path:
    asked = kills.RECIPE | {"algorithms": [method], "training": kills.RECIPE["training"] | {"num_rounds": rounds}}
    (folder / "recipe.toml").write_text(config.dump(config.load(asked)))
    return folder / "recipe.toml"


def started(words: list[str]) -> subprocess.Popen[str]:
    """A command that Ctrl-C reaches, also where these tests were started in the background, which ignores it."""
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def until(rows: int, folder: Path, process: subprocess.Popen[str]) -> None:
    """Wait until a run has written so many rows."""
    while process.poll() is None:
        found = list(folder.glob("*/seed-0/metrics.jsonl"))
        if found and len(found[0].read_text().splitlines()) >= rows:
            return
        time.sleep(0.01)
    raise AssertionError(f"the run ended before: {process.communicate()}")


@pytest.mark.parametrize(("store", "step"), [("disk", 29), ("host", 29)])
def test_a_run_killed_at_some_of_its_writes_goes_on_as_if_it_had_not_been(store: str, step: int) -> None:
    """Some of about 300 and 200 points; in a process of its own, which forks before it has computed anything."""
    chosen = ["--methods", "ditto", "--stores", store, "--step", str(step), "--seed", "5"]
    words = [sys.executable, "-m", "tests.kills", *chosen]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.endswith("no run differs\n")


@pytest.mark.parametrize(("method", "store", "ranks"), [("ditto", "host", 2), ("dm-pfl", "disk", 1)])
def test_a_command_that_was_killed_goes_on(method: str, store: str, ranks: int, tmp_path: Path) -> None:
    path, cut, whole = recipe(tmp_path, method, rounds=60), tmp_path / "cut", tmp_path / "whole"
    running = started(kills.command(path, cut, store, ranks))
    until(3, cut, running)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    assert run_folder.missing(cut) == [(method, 0)]
    assert kills.ended([*kills.launcher(ranks), "resume", str(cut), "--quiet"], None) == 0
    assert kills.ended(kills.command(path, whole, store, ranks), None) == 0
    assert kills.differences(cut, whole) == []


def assert_nothing_is_lost(home: Path) -> None:
    rows = len((home / "metrics.jsonl").read_text().splitlines())
    saved = max((home / "progress").iterdir())
    assert f'"played": {rows}' in (saved / "manifest.json").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_asked_to_stop_saves_and_says_how_to_go_on(number: signal.Signals, tmp_path: Path) -> None:
    words = kills.command(recipe(tmp_path, "ditto", rounds=5000), tmp_path / "a", "host", 1)
    words[-1] = "1h"  # by itself it would not save
    running = started(words)
    until(3, tmp_path / "a", running)
    running.send_signal(number)
    _, said = running.communicate()
    assert running.returncode == 128 + number
    assert said.endswith(f"stopped; go on with: personafl resume {tmp_path / 'a'}\n")
    assert "Stopping after this round. Press Ctrl-C again to quit now." in said
    assert_nothing_is_lost(tmp_path / "a" / "ditto" / "seed-0")


def test_a_run_whose_terminal_is_closed_saves(tmp_path: Path) -> None:
    """With the progress display on, which can no longer be written: the system sends SIGHUP, and here a shell too."""
    words = kills.command(recipe(tmp_path, "ditto", rounds=5000), tmp_path / "a", "host", 1)
    words = [*words[:-1], "1h"]
    words.remove("--quiet")
    terminal, inner = os.openpty()
    running = subprocess.Popen(
        words,
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(inner)
    os.set_blocking(terminal, False)
    metrics = tmp_path / "a" / "ditto" / "seed-0" / "metrics.jsonl"
    while not metrics.is_file() or len(metrics.read_text().splitlines()) < 3:
        assert running.poll() is None
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 2**16)
        time.sleep(0.01)
    os.close(terminal)
    running.send_signal(signal.SIGHUP)
    assert running.wait() == 128 + signal.SIGHUP
    assert_nothing_is_lost(metrics.parent)


def test_under_nohup_a_run_goes_on(tmp_path: Path) -> None:
    words = kills.command(recipe(tmp_path, "fedavg", rounds=200), tmp_path / "a", "host", 1)
    running = started(["nohup", *words])
    until(3, tmp_path / "a", running)
    running.send_signal(signal.SIGHUP)
    running.communicate()
    assert running.returncode == 0
    assert run_folder.missing(tmp_path / "a") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
@pytest.mark.parametrize("store", ["disk", "host"])
def test_a_full_disk_ends_a_run_in_one_line_and_it_goes_on_once_there_is_room(store: str, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=700k none {small} 2>/dev/null"):
        pytest.skip("no file system can be mounted here")
    try:
        path = recipe(tmp_path, "ditto", rounds=8)
        found = subprocess.run(kills.command(path, small / "a", store, 1), capture_output=True, text=True, check=False)
        assert found.returncode == 1
        assert found.stderr.splitlines()[-1].startswith(
            "personafl: the disk is full: No space left on device; make room, then go on: personafl resume"
        )
        assert "Traceback" not in found.stderr
        os.system(f"mount -o remount,size=20m {small}")
        assert kills.ended([*kills.launcher(1), "resume", str(small / "a"), "--quiet"], None) == 0
        assert kills.ended(kills.command(path, tmp_path / "whole", store, 1), None) == 0
        assert kills.differences(small / "a", tmp_path / "whole") == []
    finally:
        os.system(f"umount -l {small}")
