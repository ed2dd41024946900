"""Ranks that end together: with their launcher, and when one of them gives no sign of life."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, HashStore  # type: ignore[attr-defined]

from personafl.simulation import heartbeat
from personafl.simulation.heartbeat import Heartbeat
from personafl.simulation.ranks import LostError, process_group

HANGS = 300  # seconds: no machine is that slow
SHORT = 0.06  # a timeout that tests wait for; nothing fails where the threads come to run later


class Ended:
    """Told of an end instead of the process."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.there = threading.Event()

    def __call__(self, rank: int, message: str) -> None:
        self.told.append(message)
        self.there.set()


# A clock that is set, and ranks that are looked at by hand


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(heartbeat, "monotonic", lambda: now[0])
    return now


def looked_at(count: int, store: heartbeat.Store) -> list[Heartbeat]:
    return [Heartbeat(store, r, count, 60.0) for r in range(count)]


def test_a_rank_whose_number_stands_still_for_too_long_is_named(clock: list[float]) -> None:
    """Ranks 0 and 1 count every ten seconds; rank 2 did so once, at 10."""
    signs = looked_at(3, HashStore())
    for second in range(10, 71, 10):
        clock[0] = 1000.0 + second
        for s in signs if second == 10 else signs[:2]:
            s.exchange()
        signs[0].exchange()  # rank 2's first sign was seen at 10 by all
        assert signs[0].trouble(late=10) is None
    clock[0] = 1080.0  # more than 60 after 10
    signs[0].exchange()
    told = "rank 2 is silent: no sign of life for 60 seconds (PERSONAFL_HEARTBEAT_TIMEOUT)"
    assert signs[0].trouble(late=10) == told


def test_a_rank_that_has_left_is_not_silent(clock: list[float]) -> None:
    store = HashStore()
    signs = looked_at(2, store)
    signs[1].exchange()
    signs[1].start()
    signs[1].stop()
    assert store.add("1", 0) < 0
    for second in range(0, 3600, 10):
        clock[0] = 1000.0 + second
        signs[0].exchange()
        assert signs[0].trouble(late=10) is None


def test_rank_0_is_silent_where_its_store_does_not_answer(clock: list[float]) -> None:
    signs = looked_at(3, HashStore())
    clock[0] += 60
    assert signs[2].trouble(late=10) is None
    clock[0] += 1
    assert str(signs[2].trouble(late=10)).startswith("rank 0 is silent")


def test_who_was_stopped_itself_gives_the_others_time(clock: list[float]) -> None:
    """As when all ranks of a machine are stopped and go on: all numbers are old then."""
    signs = looked_at(2, HashStore())
    clock[0] += 3600
    assert signs[0].trouble(late=3600) is None
    clock[0] += 60
    signs[0].exchange()
    assert signs[0].trouble(late=10) is None
    clock[0] += 1
    signs[0].exchange()
    assert str(signs[0].trouble(late=10)).startswith("rank 1 is silent")


# Threads


def test_a_silent_rank_is_found_while_nobody_looks() -> None:
    ended = Ended()
    signs = Heartbeat(HashStore(), 0, 2, SHORT, ended)
    signs.start()
    assert ended.there.wait(HANGS)
    assert ended.told[0].startswith("rank 0 of 2: rank 1 is silent: no sign of life for 0.06 seconds")
    signs.stop()


class Stopped:
    """A store whose holder does not answer."""

    def __init__(self) -> None:
        self.waits = threading.Event()

    def add(self, key: str, amount: int) -> int:
        self.waits.wait(HANGS)
        return 0


def test_rank_0_is_found_silent_while_its_store_is_waited_for() -> None:
    store, ended = Stopped(), Ended()
    signs = Heartbeat(store, 2, 3, SHORT, ended)
    signs.start()
    assert ended.there.wait(HANGS)
    assert ended.told[0].startswith("rank 2 of 3: rank 0 is silent")
    store.waits.set()
    signs.stop()


class Gone:
    def add(self, key: str, amount: int) -> int:
        raise DistNetworkError("Connection reset by peer")


def test_a_store_that_is_gone_ends_nobody() -> None:
    """Rank 0 may be through; had it died, the next collective would tell."""
    ended = Ended()
    signs = Heartbeat(Gone(), 1, 2, SHORT, ended)
    signs.start()
    signs.stop()
    assert not any(t.is_alive() for t in signs._threads)
    assert not ended.told


def test_a_launcher_that_is_gone_ends_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(heartbeat, "PARENT", os.getppid() + 1)
    ended = Ended()
    signs = Heartbeat(HashStore(), 1, 2, SHORT, ended)
    signs._watch()
    assert ended.told == ["rank 1 of 2: its launcher is gone"]
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")  # whoever started it, it was not torchrun
    assert not heartbeat.launcher_gone()
    heartbeat.die_with_launcher()  # so it is not asked for


def test_the_end_is_a_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    heartbeat.ended(0, "rank 0 of 2: rank 1 is silent")
    assert codes == [1] and capsys.readouterr().err == "personafl: rank 0 of 2: rank 1 is silent\n"


def test_the_timeout_is_a_minute_or_what_a_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(heartbeat.VARIABLE, raising=False)
    assert heartbeat.timeout() == 60
    monkeypatch.setenv(heartbeat.VARIABLE, "2.5")
    assert heartbeat.timeout() == 2.5
    for wrong in ("0", "-1", "soon", "nan", "inf"):
        monkeypatch.setenv(heartbeat.VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"PERSONAFL_HEARTBEAT_TIMEOUT={wrong}: must be a number of seconds"):
            heartbeat.timeout()


# Real processes

# Both ranks write to the same pipe. With PYTHONUNBUFFERED, print would write each of its arguments apart, and the lines
# of two ranks would mix; os.write writes a line at once.
RANK = r"""
import os, personafl, torch
os.write(1, f"{os.environ['RANK']} {os.getpid()}\n".encode())
torch.manual_seed(0)  # ranks that begin with different weights are refused
data = torch.randn(60, 4), torch.arange(60) % 2, torch.arange(60) // 10
def watch(label, seed, stages, row):
    if row["round"] == 0:
        os.write(1, b"playing\n")
personafl.run(
    data=data, model=torch.nn.Linear(4, 2), algorithms=["fedavg"], device="cpu", watch=watch,
    training={"num_rounds": 10**6}, evaluation={"eval_every": 10**6, "shift": "none"},
)
"""


IMPORTING = r"""
import os, time, personafl
launcher = os.getppid()  # asked before the line is printed, for the test kills the launcher as soon as it has read it
os.write(1, f"{os.environ['RANK']} {launcher}\n".encode())
while os.getppid() == launcher:  # as if PyTorch's import took that long
    time.sleep(0.01)
import torch
from personafl.simulation import ranks
with ranks.process_group("cpu"):
    os.write(1, b"joined\n")
"""


@contextmanager
def torchrun(script: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Two ranks; none of them is left at the end."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    kept = os.environ | {"OMP_NUM_THREADS": "1", "PERSONAFL_OFFLINE": "1"} | environment
    launcher = subprocess.Popen(words, env=kept, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate()


def playing(launcher: subprocess.Popen[str]) -> dict[str, int]:
    """The process number of each rank, once they have played a round."""
    assert launcher.stdout is not None
    lines = iter(launcher.stdout.readline, "playing\n")
    return {rank: int(number) for rank, number in map(str.split, lines)}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the ranks themselves look for their launcher")
@pytest.mark.slow
def test_ranks_end_with_torchrun_and_with_a_rank_that_is_stopped(tmp_path: Path) -> None:
    """The ranks hold the launcher's pipes: they are closed when the last process is gone, and not before."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    with torchrun(script) as killed, torchrun(script, PERSONAFL_HEARTBEAT_TIMEOUT="10") as launcher:
        assert playing(killed).keys() == {"0", "1"}
        killed.send_signal(signal.SIGKILL)
        _, said = killed.communicate(timeout=HANGS)
        assert killed.returncode == -signal.SIGKILL
        assert "personafl:" not in said  # the system ended them, before they would have noticed

        os.kill(playing(launcher)["1"], signal.SIGSTOP)
        assert launcher.stderr is not None
        line = next(text for text in iter(launcher.stderr.readline, "") if text.startswith("personafl:"))
        about = "no sign of life for 10 seconds (PERSONAFL_HEARTBEAT_TIMEOUT)"
        assert line == f"personafl: rank 0 of 2: rank 1 is silent: {about}\n"

        # torchrun has asked the stopped rank to end, and would kill it in half a minute.
        launcher.send_signal(signal.SIGKILL)
        launcher.communicate(timeout=HANGS)


@pytest.mark.skipif(sys.platform == "win32", reason="a process there keeps the number of its parent")
@pytest.mark.slow
def test_ranks_that_import_while_their_launcher_is_killed_end_as_soon_as_they_look(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(IMPORTING)
    with torchrun(script) as launcher:
        assert launcher.stdout is not None
        begun = {launcher.stdout.readline() for _ in range(2)}
        assert begun == {f"{rank} {launcher.pid}\n" for rank in range(2)}
        launcher.send_signal(signal.SIGKILL)
        out, said = launcher.communicate(timeout=HANGS)  # until the last rank has closed its end
        assert out == ""
        assert said.count("personafl: the launcher of this rank is gone\n") == 2


NOTED = """
import os, sys, personafl
print("torch" in sys.modules, sys.modules["personafl.simulation.heartbeat"].PARENT == os.getppid())
"""


def test_the_launcher_is_noted_before_pytorch_is_imported() -> None:
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "x"}
    done = subprocess.run([sys.executable, "-c", NOTED], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"


def test_a_rank_whose_launcher_does_not_answer_waits_no_longer_than_for_a_sign_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as nobody:  # it holds the port and does not listen
        nobody.bind(("localhost", 0))
        there = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(nobody.getsockname()[1])}
        ranks_of = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        for name, value in (there | ranks_of | {heartbeat.VARIABLE: "0.2"}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        about = (
            rf"rank 1 of 2: the launcher is gone: no answer at localhost:\d+ for 0.2 seconds \({heartbeat.VARIABLE}\)"
        )
        with (
            pytest.raises(LostError, match=about),
            process_group("cpu", datetime.timedelta(seconds=5)),
        ):
            raise AssertionError("it has joined nobody")
