"""Same seed, same numbers: what of the surroundings of a run may change, and how closely the results agree.

To the last bit, with the same execution plan: in another process, wherever clients' rows are kept, with one thread or
two. To rounding in float64: with other stacks, and on two ranks. docs/design.md says the same in words;
tests/test_machine.py has more on threads, tests/simulation/test_ranks.py all methods on ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from personafl import ALGORITHMS, Evaluation, Simulation
from personafl.core import torch_state
from personafl.simulation import execution_plan
from personafl.simulation.machine import Machine
from personafl.simulation.ranks import SingleProcess
from tests import checks, worlds
from tests.simulation.test_ranks import DAMPED, assert_same_run, together

METHODS = ("fedavg", "ditto", "dm-pfl", "fedpac", "co-pfl", "fedphp")
STORES = ("device", "host", "disk")
ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.filterwarnings("ignore:.*leave room")


def simulated(name: str, precision: str, threads: int = 1, **machine: Any) -> Simulation:
    """All six clients of the small federation, four of them in a round."""
    algorithm = ALGORITHMS[name](**DAMPED.get(name, {}))
    rounds = 8 if name == "dm-pfl" else 4
    training = worlds.training(num_rounds=rounds, join_ratio=0.67, local_epochs=1, precision=precision)
    evaluation = Evaluation(eval_every=2, draws=1, degrees=(1.0,))
    with torch_state.threads(threads):
        sim = Simulation(
            worlds.federation(), worlds.model(), algorithm, training, evaluation, machine=Machine("cpu", **machine)
        )
        sim.run()
        sim.collect()
    return sim


# To the last bit


def digest(sim: Simulation) -> str:
    """Of every number of a run: what server and clients hold, rows of metrics but for times, all scores."""
    held = {"server": sim.server, "kept": checks.everyone(sim), "known": sim.known.gather(sim.everybody)}
    out = hashlib.sha256(json.dumps([{k: v for k, v in r.items() if k != "seconds"} for r in sim.rows]).encode())
    for where, part in held.items():
        for n in sorted(part):
            out.update(f"{where} {n}".encode() + part[n].contiguous().numpy().tobytes())
    for n, scores in sorted(sim.evaluations().items()):
        out.update(n.encode() + scores.tobytes())
    return out.hexdigest()


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """One thread, rows on the device."""
    return {name: digest(simulated(name, "float32", store="device")) for name in METHODS}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("name", METHODS)
def test_stores_and_threads_change_no_bit(
    name: str, store: str, threads: int, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution_plan, "SMALL", 0.0)  # else products this small stay on one thread
    sim = simulated(name, "float32", threads, store=tmp_path / "rows" if store == "disk" else store)
    assert sim.plan.threads == threads and (sim.store.disk_bytes() > 0) == (store == "disk" and len(sim.store) > 0)
    assert digest(sim) == expected[name]


def test_a_fresh_process_changes_no_bit(expected: dict[str, str]) -> None:
    """Nor does the order of sets, which another hash seed changes."""
    words = "import json, torch; torch.set_num_threads(1); from tests import test_same_numbers as t; "
    words += "print(json.dumps({n: t.digest(t.simulated(n, 'float32', store='host')) for n in t.METHODS}))"
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", words],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr.decode()
    assert json.loads(told.stdout) == expected


def test_another_seed_changes_the_numbers(expected: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that equal digests say something."""
    usual = worlds.training
    monkeypatch.setattr(worlds, "training", lambda **changes: usual(**changes, seed=1))
    for name in METHODS:
        assert digest(simulated(name, "float32", store="device")) != expected[name]


# To rounding, in float64


@pytest.fixture(scope="module")
def alone() -> dict[str, Simulation]:
    """Each cohort as one stack, in one process."""
    return {name: simulated(name, "float64") for name in METHODS}


@pytest.mark.parametrize(("chunk", "size"), [(1, 1), (3, 1), (0, 2), (1, 2), (3, 2)])
@pytest.mark.parametrize("name", METHODS)
def test_stacks_and_ranks_change_rounding_alone(name: str, chunk: int, size: int, alone: dict[str, Simulation]) -> None:
    """The bound is that of ranks (tests/simulation/test_ranks.py): sums of gradients in another order."""

    def work(world: SingleProcess) -> Simulation:
        return simulated(name, "float64", chunk=chunk, ranks=world)

    for sim in [work(SingleProcess())] if size == 1 else together(size, work):
        assert_same_run(sim, alone[name])
