"""A real federation on this machine: SuperLink, proxy and SuperNodes as processes, with TLS and keys.

    python -m tests.deployment.flower.loopback parity --methods dm-pfl,fedrep --precision float64
    python -m tests.deployment.flower.loopback faults --only node-killed,slow

`parity` plays each method over real processes and compares it with the simulator; `faults` does to a federation what
happens to real ones, and says what came of it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from personafl import Simulation, config
from personafl.core import tree
from personafl.core.types import Params
from personafl.deployment.flower.processes import family, free_port
from personafl.deployment.flower.proxy import find
from personafl.deployment.private_state import PrivateState
from personafl.deployment.server_files import ServerFiles
from personafl.experiment import run_setup

METHODS = ("dm-pfl", "dm-pfl-plus", "fedavg-ft", "fedrep", "ditto", "fedphp", "co-pfl", "fedpews")
SIZES = (120, 90, 60)
RECIPE: dict[str, Any] = {
    "model": {"name": "mlp"},
    "training": {"num_rounds": 2, "join_ratio": 1.0, "local_epochs": 1, "batch_size": 20, "lr": 0.1},
    "evaluation": {"shift": "none", "eval_every": 2},
}


def write_clients(root: Path, count: int = 3) -> list[Path]:
    """A folder for each client with its own data, and one with a file for each, as a simulation reads them."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = digits.images[:, None].astype(np.float32), digits.target
    order = np.argsort((y + np.random.default_rng(0).normal(0, 2, len(y))).astype(int), kind="stable")
    (root / "all").mkdir(parents=True)
    homes, at = [], 0
    for i in range(count):
        size = SIZES[i % len(SIZES)]
        rows = order[at : at + size]
        at += size
        homes.append(root / f"client-{i}")
        homes[i].mkdir()
        np.savez(homes[i] / "mine.npz", x=x[rows], y=y[rows])
        shutil.copy(homes[i] / "mine.npz", root / "all" / f"client-{i}.npz")
    return homes


def recipe_text(method: str | dict[str, Any], data: Path, model: str = "mlp", **training: Any) -> str:
    """A recipe of one method over the clients' files."""
    table = RECIPE | {"data": {"dataset": str(data / "all"), "partition": "natural"}, "model": {"name": model}}
    table |= {"training": RECIPE["training"] | training}
    entry = {"name": method} if isinstance(method, str) else method
    return config.dump(config.load({**table, "algorithms": [entry]}))


def simulated(text: str) -> Simulation:
    """The same federation in the simulator."""
    with tempfile.TemporaryDirectory() as box:
        path = Path(box) / "recipe.toml"
        path.write_text(text)
        recipe = config.load(path)
    recipe, feds = run_setup.resolved(recipe, [recipe.training.seed])
    sim = run_setup.simulation(recipe, recipe.algorithms[0], fed=feds[recipe.training.seed])
    sim.run()
    return sim


def deploy(*words: str, check: bool = True, inside: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """One of the commands that come to an end, behind what a host of a network needs in front of it."""
    done = subprocess.run(
        [*inside, sys.executable, "-m", "personafl", "deploy", *words], capture_output=True, text=True, check=False
    )
    if check and done.returncode:
        raise AssertionError(f"deploy {' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


class Loopback:
    """A deployment folder and its processes; all of them end with it."""

    def __init__(self, root: Path, text: str, data: Path, count: int = 3, **settings: Any) -> None:
        self.root, self.count, self.data = root, count, data
        self.folder = root / "deployment"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        root.mkdir(parents=True, exist_ok=True)
        (root / "recipe.toml").write_text(text)
        self.port, outer = free_port(), free_port()
        self.address = f"{self.host()}:{outer}"
        self.command(
            *("init", str(root / "recipe.toml"), str(self.folder), "--clients", str(count)),
            *("--address", self.address, "--port", str(self.port)),
        )
        self.change(self.folder / "deployment.toml", settings)
        self.command("keys", str(self.folder))
        for i in range(count):
            own: dict[str, Any] = {"data": str(data / f"client-{i}"), "threads": 1}
            if find() is None:  # then the nodes go to the SuperLink itself
                own |= {"address": f"localhost:{self.port}"}
            self.change(self.home(i) / "client.toml", own)

    def home(self, client: int) -> Path:
        """What a client was given, and where it keeps its state."""
        return self.folder / "clients" / f"client-{client}"

    @staticmethod
    def change(path: Path, values: dict[str, Any]) -> None:
        """Set values of a TOML file, whatever table they are in."""
        lines = path.read_text().splitlines()
        for name, value in values.items():
            at = [i for i, line in enumerate(lines) if line.startswith(f"{name} =")]
            assert len(at) == 1, (path, name)
            lines[at[0]] = f"{name} = {json.dumps(value)}"
        path.write_text("\n".join(lines) + "\n")

    def host(self) -> str:
        """The server's address."""
        return "localhost"

    def inside(self, name: str) -> list[str]:
        """What stands in front of the commands of a host: `server`, `client-0` and so on."""
        return []

    def command(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return deploy(*words, check=check, inside=self.inside("server"))

    def launch(self, name: str, *words: str, **env: str) -> None:
        """Start one of the commands that stay in the foreground."""
        with (self.root / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self.inside(name), sys.executable, "-m", "personafl", "deploy", *words],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
            )

    def server(self) -> None:
        proxy = [] if find() else ["--no-proxy"]
        before = self.log("server").count(" ready")
        self.launch("server", "server", str(self.folder), *proxy)
        self.until(lambda: self.log("server").count(" ready") > before, 90, "the server")

    def client(self, number: int, **env: str) -> None:
        self.launch(f"client-{number}", "client", str(self.home(number) / "client.toml"), **env)

    def log(self, name: str) -> str:
        path = self.root / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def until(self, fine: Callable[[], bool], seconds: float, what: str = "") -> None:
        end = time.monotonic() + seconds
        while not fine():
            if time.monotonic() > end:
                raise AssertionError(f"{what or fine} did not come about; {self.log('server')[-3000:]}")
            time.sleep(0.3)

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "results" / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "results" / "summary.json").read_text())
        return found

    def state(self) -> tuple[dict[str, Any], Params, dict[int, Params]]:
        found = ServerFiles(self.folder / "server").load()
        assert found is not None
        return found

    def kept(self, number: int) -> Params:
        """What a client keeps, as far as the server knows of it."""
        told, _, _ = self.state()
        member = told["members"][number]
        own = PrivateState(self.home(number) / "state", told["experiment"], member["name"])
        found = own.load(member["acknowledged"])
        assert found is not None
        return found

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """End a command with all its processes."""
        process = self.processes.pop(name)
        _end(process, number)

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            with contextlib.suppress(ProcessLookupError):
                self.kill(name, signal.SIGTERM)


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    started = family(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(25)
    for pid in [process.pid, *started]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def worst(a: Params, b: Params) -> float:
    """The largest difference of two trees of the same names."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max((float((a[n].double() - b[n].double()).abs().max()) for n in a if a[n].numel()), default=0.0)


def mask_agreement(a: Params, b: Params) -> float:
    """The share of truth values that agree."""
    pairs = [(a[n], b[n]) for n in a if a[n].dtype == torch.bool]
    total = sum(t.numel() for t, _ in pairs)
    return sum(int((x == y).sum()) for x, y in pairs) / total if total else 1.0


@dataclasses.dataclass(frozen=True)
class Parity:
    """How far a deployment is from the simulator."""

    method: str
    precision: str
    server: float
    kept: float
    masks: float
    bytes_equal: bool
    ours: tuple[int, int]  # up and down, with what was sent for scores
    flower: tuple[int, int]
    messages: int
    seconds: float


def parity(method: str, precision: str, box: Path, rounds: int = 2) -> Parity:
    """One method over three real nodes, compared with the simulator."""
    begun = time.monotonic()
    write_clients(box / "data")
    text = recipe_text(method, box / "data", precision=precision, num_rounds=rounds)
    sim = simulated(text)
    with Loopback(box / "loop", text, box / "data") as loop:
        loop.server()
        for i in range(3):
            loop.client(i)
        loop.command("start", str(loop.folder), "--wait")
        told, server, _ = loop.state()
        kept = [(sim.store.gather(torch.tensor([i])), loop.kept(i)) for i in range(3)]
        totals = told["state"]["totals"]
        collected = json.loads(loop.command("collect", str(loop.folder), "--json").stdout)
    whole = {f"server/{n}": t for n, t in sim.server.items()}
    other = {f"server/{n}": t for n, t in server.items()}
    for i, (a, b) in enumerate(kept):
        whole |= tree.prefixed(a, str(i))
        other |= tree.prefixed(b, str(i))
    traffic = collected["flower"] or {}
    return Parity(
        method,
        precision,
        worst(sim.server, server),
        max(worst(a, b) for a, b in kept),
        mask_agreement(whole, other),
        (totals["up_bytes"], totals["down_bytes"]) == (sim.totals.up_bytes, sim.totals.down_bytes),
        (totals["up_bytes"], totals["down_bytes"] + told["state"]["evaluation_bytes"]),
        (int(traffic.get("inbound_bytes", 0)), int(traffic.get("outbound_bytes", 0))),
        len(loop.rows()),
        time.monotonic() - begun,
    )


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="loop-", ignore_cleanup_errors=True) as box:
        yield Path(box)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["parity"])
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--precision", default="float64")
    parser.add_argument("--rounds", type=int, default=2)
    told = parser.parse_args()
    for method in told.methods.split(","):
        for precision in told.precision.split(","):
            with scratch() as box:
                print(json.dumps(dataclasses.asdict(parity(method, precision, box, told.rounds))), flush=True)


if __name__ == "__main__":
    main()
