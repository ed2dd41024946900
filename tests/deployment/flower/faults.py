"""What happens to real federations, done to one on this machine.

    python -m tests.deployment.flower.faults                 all of it, about half an hour
    python -m tests.deployment.flower.faults --only slow-node,server-app-killed

Every fault is provoked in real processes with TLS and keys. What must hold is asserted; what was seen is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from personafl.deployment.flower.processes import family
from tests.deployment.flower.loopback import Loopback, recipe_text, scratch, simulated, worst, write_clients

Fault = Callable[[Path], str]
FAULTS: dict[str, Fault] = {}

# Data of a client as its own module loads them, which may do something else besides.
MODULE = """
import os, time
import numpy as np

def load(client):
    held = np.load(os.environ["MINE"])
    x, y = held["x"], held["y"]
    {what}
    cut = len(y) // 4
    return (x[cut:], y[cut:]), (x[:cut], y[:cut])
"""


def fault(function: Fault) -> Fault:
    FAULTS[function.__name__.replace("_", "-")] = function
    return function


def federation(box: Path, method: str = "ditto", rounds: int = 3, count: int = 3, **settings: Any) -> Loopback:
    write_clients(box / "data", count)
    text = recipe_text(method, box / "data", num_rounds=rounds, precision="float64")
    loop = Loopback(box / "loop", text, box / "data", count, **({"round_timeout": 60.0} | settings))
    loop.server()
    return loop


def own_module(loop: Loopback, client: int, what: str) -> dict[str, str]:
    """Let a client's data come from a module of its own; the environment it needs."""
    home = loop.home(client)
    (home / "mine.py").write_text(MODULE.format(what=what))
    loop.change(home / "client.toml", {"data": "mine:load"})
    return {"MINE": str(loop.data / f"client-{client}" / "mine.npz")}


def started(loop: Loopback) -> subprocess.Popen[str]:
    """Start a run, and go on here while it is under way."""
    return subprocess.Popen(
        [*loop.inside("server"), sys.executable, "-m", "personafl", "deploy", "start", str(loop.folder), "--wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def server_log(loop: Loopback) -> str:
    """What the server app said."""
    path = loop.folder / "logs" / "rounds.log"
    return path.read_text(errors="replace") if path.exists() else ""


def line_about(loop: Loopback, words: str) -> str:
    """The first line of the server's log with these words."""
    for line in (*server_log(loop).splitlines(), *loop.log("server").splitlines()):
        if re.search(words, line):
            return re.sub(r"^[\d\-:, .]*(INFO|WARNING|ERROR)?\s*:?\s*", "", line).strip()
    raise AssertionError(f"no line about {words!r}: {server_log(loop)[-4000:]}")


def find(parent: int, words: str) -> list[int]:
    """Processes below one whose command line has these words."""
    found = []
    for pid in family(parent):
        with contextlib.suppress(OSError):
            if words in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(pid)
    return found


def sound(loop: Loopback, count: int = 3, lost: int = 0) -> dict[str, Any]:
    """Every client has its model and what it kept, as of the stage the server knows of."""
    told, _, _ = loop.state()
    members = told["members"]
    assert [m["closed"] for m in members] == [True] * count, members
    assert sum(m["lost"] for m in members) == lost
    for i in range(count):
        if members[i]["acknowledged"] >= 0:  # else nothing of it was ever taken, and it has what all began with
            assert loop.kept(i) is not None
        assert list(loop.home(i).glob("state/*/*/model/model.json"))
    assert len(loop.rows()) == len({(r["round"], r["phase"]) for r in loop.rows()})
    return told


def same_as_simulated(loop: Loopback, count: int = 3) -> str:
    """Nothing of a fault is left in the result."""
    sim = simulated((loop.folder / "recipe.toml").read_text())
    _, server, _ = loop.state()
    apart = max(
        worst(sim.server, server), *(worst(sim.store.gather(torch.tensor([i])), loop.kept(i)) for i in range(count))
    )
    assert apart < 1e-9, apart
    return f"the result is the simulator's to {apart:.0e}"


def processes(loop: Loopback, name: str) -> list[int]:
    pid = loop.processes[name].pid
    return [pid, *family(pid)]


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@fault
def node_killed_between_rounds(box: Path) -> str:
    with federation(box) as loop:
        for i in range(3):
            loop.client(i)
        run = started(loop)
        loop.until(lambda: (loop.folder / "server" / "state.json").exists() and played(loop) >= 1, 300)
        kill_all(processes(loop, "client-1"))
        loop.processes.pop("client-1").wait()
        loop.client(1)
        assert run.wait(900) == 0, run.stdout.read() if run.stdout else ""
        _completed(loop, 1)
        sound(loop)
        return line_about(loop, r"client client-1.*(gone|not there|died|answer)")


@fault
def node_killed_while_it_trains(box: Path) -> str:
    with federation(box) as loop:
        slow = own_module(loop, 1, "time.sleep(8)")
        for i in range(3):
            loop.client(i, **(slow if i == 1 else {}))
        run = started(loop)
        loop.until(lambda: (loop.folder / "server" / "state.json").exists(), 300)
        loop.until(lambda: bool(find(loop.processes["client-1"].pid, "flwr-clientapp")), 120)
        time.sleep(3)
        kill_all(processes(loop, "client-1"))
        loop.processes.pop("client-1").wait()
        loop.client(1, **slow)
        assert run.wait(900) == 0, run.stdout.read() if run.stdout else ""
        _completed(loop, 1)
        sound(loop)
        return line_about(loop, r"client client-1.*(gone|not there|died|answer)")


@fault
def node_killed_once_its_state_is_written(box: Path) -> str:
    """Behind training, before the server has the answer: the state is one ahead, and is gone back from."""
    with federation(box) as loop:
        for i in range(3):
            loop.client(i)
        run = started(loop)
        states = loop.home(1) / "state"
        loop.until(lambda: bool(list(states.glob("*/*/kept-000001.json"))), 300)
        kill_all(processes(loop, "client-1"))
        loop.processes.pop("client-1").wait()
        ahead = _acknowledged(loop, 1)
        loop.client(1)
        assert run.wait(900) == 0, run.stdout.read() if run.stdout else ""
        _completed(loop, 1)
        sound(loop)
        return f"its state was of stage 1, the server knew of {ahead}; at the end both are of the same"


@fault
def server_app_killed(box: Path) -> str:
    with federation(box) as loop:
        for i in range(3):
            loop.client(i)
        run = started(loop)
        loop.until(lambda: (loop.folder / "server" / "state.json").exists() and played(loop) >= 1, 300)
        pids = find(loop.processes["server"].pid, "flwr-serverapp")
        assert pids
        kill_all(pids)
        code = run.wait(300)
        said = (run.stdout.read() if run.stdout else "").strip().splitlines()[-1]
        assert code == 1, (code, said)
        again(loop)
        sound(loop)
        return f"{said.removeprefix('personafl: ')}; started again, {same_as_simulated(loop)}"


@fault
def superlink_killed(box: Path) -> str:
    with federation(box) as loop:
        for i in range(3):
            loop.client(i)
        run = started(loop)
        loop.until(lambda: (loop.folder / "server" / "state.json").exists() and played(loop) >= 1, 300)
        kill_all(find(loop.processes["server"].pid, "flower-superlink"))
        code = run.wait(300)
        loop.until(lambda: loop.log("server").count("ready") >= 2, 180, "the SuperLink once more")
        again(loop)
        sound(loop)
        return f"the run ended with {code}; the server started the SuperLink again, {same_as_simulated(loop)}"


@fault
def slow_node(box: Path) -> str:
    with federation(box, round_timeout=30.0) as loop:
        slow = own_module(
            loop, 2, "time.sleep(45 if os.path.exists(os.path.dirname(os.environ['MINE']) + '/slow') else 0)"
        )
        for i in range(3):
            loop.client(i, **(slow if i == 2 else {}))
        run = started(loop)
        loop.until(lambda: (loop.folder / "server" / "state.json").exists(), 300)
        (loop.data / "client-2" / "slow").touch()
        loop.until(lambda: played(loop) >= 2, 300)
        (loop.data / "client-2" / "slow").unlink()
        assert run.wait(900) == 0, run.stdout.read() if run.stdout else ""
        sound(loop)
        return line_about(loop, r"client client-2.*no answer")


PATCH = "from personafl.core import wire; real = wire.pack; wire.pack = lambda payload, **k: "
BAD = {
    "truncated": ("real(payload, **k)[:-9]", r"a message of \d+ bytes, its header says \d+"),
    "oversized": ("real(payload | {'more': __import__('torch').zeros(10**6)}, **k)", r"over the limit|not asked"),
    "of another version": ("b'PFL9' + real(payload, **k)[4:]", r"version"),
    "not finite": ("real({n: t * float('nan') for n, t in payload.items()}, **k)", r"finite"),
}
"""What a client makes of its update, and what the server says of it."""


@fault
def bad_payloads(box: Path) -> str:
    """Four clients that send something else than their update, and one that does not."""
    count = 1 + len(BAD)
    with federation(box, rounds=2, count=count, quorum=1) as loop:  # else the server would wait for a second
        loop.client(0)
        for i, (how, _) in enumerate(BAD.values(), 1):
            loop.client(i, **own_module(loop, i, PATCH + how))
        run = started(loop)
        assert run.wait(1200) == 0, run.stdout.read() if run.stdout else ""
        told, server, _ = loop.state()
        assert all(bool(t.isfinite().all()) for t in server.values())
        assert [m["acknowledged"] for m in told["members"]] == [1, -1, -1, -1, -1]
        for row in loop.rows():
            assert {q["client"] for q in row["quarantined"]} == {1, 2, 3, 4}, row
        words = [f"client client-{i}:.*({said})" for i, (_, said) in enumerate(BAD.values(), 1)]
        return " | ".join(line_about(loop, w) for w in words)


@fault
def unregistered_key_and_wrong_ca(box: Path) -> str:
    with federation(box, rounds=1, count=2) as loop:
        for i in range(2):
            loop.client(i)
        stranger = loop.home(1).parent / "stranger"
        shutil.copytree(loop.home(1), stranger, ignore=shutil.ignore_patterns("state"))
        loop.change(stranger / "client.toml", {"id": "stranger"})
        with Loopback(box / "other", (loop.root / "recipe.toml").read_text(), loop.data, 1) as other:
            shutil.copy(other.home(0) / "node.key", stranger / "node.key")
            loop.launch("stranger", "client", str(stranger / "client.toml"))
            loop.until(lambda: _exited(loop, "stranger"), 400, "the stranger's end")
            key_line = loop.log("stranger").strip().splitlines()[-1]
            shutil.copy(other.home(0) / "ca.crt", stranger / "ca.crt")
            loop.launch("wrong-ca", "client", str(stranger / "client.toml"))
            loop.until(lambda: _exited(loop, "wrong-ca"), 400, "the end of who trusts another CA")
            ca_line = loop.log("wrong-ca").strip().splitlines()[-1]
        loop.command("start", str(loop.folder), "--wait")
        told = sound(loop, 2)
        assert [m["name"] for m in told["members"]] == ["client-0", "client-1"]
        return f"{key_line} | {ca_line}"


@fault
def full_disk_at_a_node(box: Path) -> str:
    """A file system of its own for a client's state, filled up and emptied again."""
    with federation(box) as loop:
        state = loop.home(1) / "state"
        state.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(state)], check=True)
        try:
            for i in range(3):
                loop.client(i)
            run = started(loop)
            loop.until(lambda: (loop.folder / "server" / "state.json").exists() and played(loop) >= 1, 300)
            with contextlib.suppress(OSError), (state / "ballast").open("wb") as file:
                while True:
                    file.write(bytes(4096))
                    file.flush()
            loop.until(lambda: "space" in server_log(loop), 300, "a full disk")
            (state / "ballast").unlink()
            assert run.wait(900) == 0, run.stdout.read() if run.stdout else ""
            sound(loop)
            return line_about(loop, r"client client-1.*space")
        finally:
            for i in range(3):
                with contextlib.suppress(KeyError, ProcessLookupError):
                    loop.kill(f"client-{i}")
            subprocess.run(["umount", "-l", str(state)], check=True)


@fault
def state_lost_at_a_node(box: Path) -> str:
    with federation(box, method="scaffold") as loop:
        for i in range(3):
            loop.client(i)
        run = started(loop)
        loop.until(lambda: (loop.folder / "server" / "state.json").exists() and played(loop) >= 1, 300)
        shutil.rmtree(loop.home(1) / "state")
        assert run.wait(900) == 0, run.stdout.read() if run.stdout else ""
        sound(loop, lost=1)
        _, server, _ = loop.state()
        own = [loop.kept(i) for i in range(3)]
        for n, t in server.items():
            if n.startswith("control/"):
                mean = sum(k[f"own/{n.removeprefix('control/')}"][0] for k in own) / 3
                assert torch.allclose(t, mean, rtol=0, atol=1e-9), n
        return line_about(loop, r"client client-1 lost")


def again(loop: Loopback) -> None:
    """Start a run, as soon as the last one is known to have ended."""
    for _ in range(20):
        done = loop.command("start", str(loop.folder), "--wait", check=False)
        if done.returncode == 0:
            return
        time.sleep(5)
    raise AssertionError(done.stdout + done.stderr)


def _completed(loop: Loopback, client: int) -> None:
    """Start again where the run ended before a client that was killed, and is refused for a minute, was back."""
    if loop.summary()["without_model"]:
        loop.until(lambda: loop.log(f"client-{client}").count("online at") >= 2, 180, "the client once more")
        again(loop)


def _exited(loop: Loopback, name: str) -> bool:
    return loop.processes[name].poll() is not None


def played(loop: Loopback) -> int:
    with contextlib.suppress(ValueError, KeyError, OSError):
        told = json.loads((loop.folder / "server" / "state.json").read_text())
        return int(told["numbers"]["state"]["played"])
    return 0


def _acknowledged(loop: Loopback, client: int) -> int:
    told = json.loads((loop.folder / "server" / "state.json").read_text())
    return int(told["numbers"]["members"][client]["acknowledged"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(FAULTS))
    parser.add_argument("--list", action="store_true")
    told = parser.parse_args()
    if told.list:
        print("\n".join(FAULTS))
        return
    failed = False
    for name in told.only.split(","):
        begun = time.monotonic()
        with scratch() as box:
            try:
                print(f"{name}: {FAULTS[name](box)} ({time.monotonic() - begun:.0f} s)", flush=True)
            except Exception:
                failed = True
                print(f"{name}: FAILED ({time.monotonic() - begun:.0f} s)\n{traceback.format_exc()}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
