"""Where clients' rows go, what is left for stacks, and memory under a limit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from personafl import Evaluation, FedAvg, Machine, Simulation
from personafl.core import torch_state
from personafl.core.types import ModelInfo
from personafl.simulation import execution_plan
from personafl.simulation.execution_plan import ExecutionPlan
from personafl.storage.store import HOST
from tests import checks, worlds


def test_rows_go_to_the_first_home_with_four_times_their_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = torch.device("cuda")
    free = {"cuda": 4000.0, "cpu": 8000.0}
    monkeypatch.setattr(execution_plan, "_free", lambda device: free[device.type])
    home = [execution_plan.store_location("auto", rows, 10, gpu, None, tmp_path)[0] for rows in (100, 101, 200, 201)]
    assert home == [gpu, HOST, HOST, tmp_path]
    assert execution_plan.store_location("auto", 201, 10, HOST, None, tmp_path)[0] == tmp_path
    assert execution_plan.store_location("device", 400, 10, gpu, None, None)[0] == gpu
    with pytest.raises(ValueError, match=r"store='device': up to 401 clients of 10 bytes, .* use auto or a folder"):
        execution_plan.store_location("device", 401, 10, gpu, None, None)
    temporary = execution_plan.store_location("auto", 201, 10, HOST, None, None)[0]
    assert isinstance(temporary, Path) and temporary.is_dir()


def test_what_is_left_of_a_limit_is_for_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, gib = torch.device("cuda"), 2**30
    monkeypatch.setattr(execution_plan, "_used", lambda device: 0.5 * gib)
    monkeypatch.setattr(execution_plan, "_free", lambda device: 100.0 * gib)
    home, room = execution_plan.store_location("auto", 10, gib // 40, gpu, 2.5, None)
    assert home == gpu
    assert room == pytest.approx(0.8 * (2.5 - 0.5 - 0.25) * gib)
    with pytest.raises(ValueError, match=r"memory=0.4: 0.50 GiB are in use before the first round; allow more"):
        execution_plan.store_location("auto", 10, 10, gpu, 0.4, None)


GIB = 2**30


@pytest.mark.parametrize(
    ("cohort", "room", "chunk", "lanes"),
    [
        (20, 0.0, 42, 8),  # 16 GiB but for eight minibatches: 15.5 / 0.3688
        (20, 4.0 * GIB, 8, 8),  # 3.5 / 0.3688 is 9 clients, of which whole rounds of the lanes
        (3, 0.0, 42, 3),
        (20, 0.5 * GIB, 1, 4),  # half of it for what passes through the lanes
        (20, 0.01 * GIB, 1, 1),
    ],
)
def test_lanes_and_stacks_of_models_that_run_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, cohort: int, room: float, chunk: int, lanes: int
) -> None:
    """Eleven million weights: nine times as many numbers a client are 0.3688 GiB; a minibatch leaves 0.0625 GiB."""
    monkeypatch.setattr(execution_plan, "_free", lambda device: 100.0 * GIB)
    info = ModelInfo({"w": (11_000_000,)}, frozenset(), frozenset(), (), 0.0, 131_072, "average")
    model = SimpleNamespace(info=info, one_by_one=True, random=False, stacks=False)
    training = worlds.training(batch_size=64, precision="tf32", join_ratio=cohort / 100)
    sizes = torch.full((100,), 480)
    plan = execution_plan.choose(model, training, torch.device("cuda"), sizes, room=room)  # type: ignore[arg-type]
    assert (plan.chunk, plan.lanes, plan.workers) == (chunk, lanes, 1)


@pytest.mark.parametrize(("activations", "chunk"), [(15_625, 0), (15_626, 1)])
def test_large_minibatches_run_one_by_one_on_a_cpu(activations: int, chunk: int) -> None:
    """64 examples of 15,625 numbers are a million."""
    info = ModelInfo({"w": (10,)}, frozenset(), frozenset(), (), 0.0, activations, "average")
    model = SimpleNamespace(info=info, one_by_one=False, random=False, stacks=True)
    training = worlds.training(batch_size=64)
    plan = execution_plan.choose(model, training, torch.device("cpu"), torch.full((100,), 480), threads=2)  # type: ignore[arg-type]
    assert (plan.chunk == 1) == bool(chunk)
    assert plan.workers == (2 if chunk else 1)


def cpu_plan(
    weights: int, *, stacks: bool = True, precision: str = "float32", flops: float = 1e6, **given: Any
) -> ExecutionPlan:
    info = ModelInfo({"w": (weights,)}, frozenset(), frozenset(), (), flops, 10, "average")
    model = SimpleNamespace(info=info, one_by_one=False, random=False, stacks=stacks)
    training = worlds.training(batch_size=64, precision=precision)
    return execution_plan.choose(model, training, torch.device("cpu"), torch.full((100,), 480), **given)  # type: ignore[arg-type]


def test_stacks_on_a_cpu_have_weights_of_8_mib_and_run_side_by_side() -> None:
    assert cpu_plan(2**21 // 10).chunk == 10  # 4 bytes each
    assert cpu_plan(2**21 // 10, precision="float64").chunk == 5
    assert cpu_plan(2**21).chunk == 5  # no fewer
    assert cpu_plan(2**21 // 10, chunk=50).chunk == 50  # as asked
    several = [cpu_plan(2**21 // each, threads=16).workers for each in (10, 25, 50, 200)]  # of 50 clients a round
    assert several == [5, 2, 1, 1]
    assert [cpu_plan(2**21 // 10, threads=n).chunk for n in (1, 2, 5)] == [10, 10, 10]  # whatever the threads


def test_stacks_side_by_side_stay_under_a_limit() -> None:
    """A client takes nine times 0.8 MiB and 0.01 MiB of a pass: 300 MiB are for 41 of them, so four stacks."""
    plans = [cpu_plan(2**21 // 10, threads=16, room=room) for room in (300 * 2.0**20, 100 * 2.0**20, 10 * 2.0**20)]
    assert [(plan.chunk, plan.workers) for plan in plans] == [(10, 4), (10, 1), (1, 1)]


def test_the_smallest_convolutions_are_stacked_on_a_cpu() -> None:
    """Three times the forward pass of 64 examples are a step: 4e7 FLOP, or a little more."""
    assert cpu_plan(10, stacks=False, flops=4e7 / 192, threads=2).chunk > 1
    assert cpu_plan(10, stacks=False, flops=4.1e7 / 192, threads=2).chunk == 1
    assert cpu_plan(10, stacks=True, flops=1e9, threads=2).chunk > 1


def test_threads_of_a_client_leave_fewer_clients_at_a_time() -> None:
    found = [cpu_plan(10, stacks=False, threads=6, threads_per_client=n) for n in (1, 2, 4, 99)]
    assert [(plan.workers, plan.operations) for plan in found] == [(6, 1), (3, 2), (1, 4), (1, 6)]
    assert cpu_plan(10, threads=6, threads_per_client=2).operations == 2


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_threads_of_a_client_change_rounding_alone(kind: str) -> None:
    """In float64 sums of some hundred products near one, in another order, are 1e-14 apart; a few steps are no more."""

    def played(count: int) -> Simulation:
        with torch_state.threads(2):
            machine = Machine(threads_per_client=count)
            fed, own = worlds.federation(kind), worlds.training(num_rounds=2)
            sim = Simulation(fed, worlds.model(kind), FedAvg(), own, Evaluation(shift="none"), machine=machine)
        sim.run()
        return sim

    one, two = played(1), played(2)
    assert (one.plan.operations, two.plan.operations) == (1, 2)
    checks.assert_agree(one.server, two.server, 1e-12)


def test_results_of_workers_do_not_pile_up() -> None:
    """A reader that stops after the first result has let few others be begun."""
    begun = []
    plan = execution_plan.ExecutionPlan(1, 2, 1)
    found = execution_plan.each(
        plan, worlds.model(), torch.arange(1000), lambda _, ids: begun.append(ids), lambda ids: ids
    )
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert len(begun) <= 4 * 2 + 1


PEAK = """
import json, sys, warnings
import numpy as np, torch
from pathlib import Path
from personafl import ALGORITHMS, Evaluation, Federation, Machine, Simulation, Source, StackedModel, Training
from personafl.models import MLP

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

torch.set_num_threads(1)
name, more, rounds, clients = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), 100
y = torch.arange(1000) % 10
rows = np.arange(clients * 20).reshape(clients, 20) % 1000
fed = Federation.build(Source("toy", torch.randn(1000, 64), y, 10), list(rows), 0)
model = StackedModel(MLP(64, 400, 200, 10), fed.source.x[:2])
training = Training(num_rounds=rounds, join_ratio=1.0, local_epochs=1, batch_size=10, lr=0.01, momentum=0.9)
limit = memory("VmRSS:") + more * 2**20 if more else None
algorithm = ALGORITHMS[name](**({"iterations": 1} if name == "dm-pfl" else {}))
machine = Machine(memory=limit and limit / 2**30, chunk=0 if more else clients)  # else in one stack
sim = Simulation(fed, model, algorithm, training, Evaluation(shift="none"), machine=machine)
sim.run()
print(json.dumps({"peak": memory("VmHWM:"), "limit": limit, "chunk": sim.plan.chunk}))
"""


def peak(name: str, more: float, rounds: int) -> dict[str, float]:
    """The peak of a process that trains 100 clients of 108,210 weights; it may take so many MiB (0: any) for it."""
    words = [name, str(more), str(rounds)]
    done = subprocess.run([sys.executable, "-c", PEAK, *words], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="memory is read from /proc")
@pytest.mark.parametrize("name", ["fedavg", *(pytest.param(n, marks=pytest.mark.slow) for n in ("ditto", "dm-pfl"))])
def test_memory_stays_under_a_limit(name: str) -> None:
    """Without one, a stack has 8 MiB of weights: 19 clients."""
    found = peak(name, 120 if name == "fedavg" else 180, rounds=4)
    assert found["peak"] <= found["limit"]
    assert 1 < found["chunk"] < 2**23 // (4 * 108_210)
    if name == "dm-pfl":
        free = peak(name, 0, rounds=1)
        assert free["chunk"] >= 100
        assert free["peak"] > found["limit"]  # the limit was one
