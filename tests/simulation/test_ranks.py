"""Several processes give the numbers of one, in float64."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

import personafl
from personafl import (
    ALGORITHMS,
    DMPFL,
    Algorithm,
    Ditto,
    Evaluation,
    Faults,
    FedAvg,
    FedPAC,
    FedPHP,
    FedSelect,
    Machine,
    Robust,
    Simulation,
)
from personafl.core.types import Params
from personafl.simulation import ranks
from personafl.simulation.ranks import SingleProcess, balanced
from tests import checks, worlds

T = TypeVar("T")
# Ranks have other stacks than one process, so the sums behind a gradient have another order. In float64 that changes a
# sum of 64 products of numbers around 1 by up to 64 * 2^-53 = 7e-15, and a weight in 32 steps of rate 0.5 by up to
# 32 * 0.5 * 7e-15 = 1e-13, had it not moved since; the rest is for what the change itself does to later gradients.
TOLERANCE = 1e-12
# Adam divides a gradient by its own size plus eps: at the usual 1e-8 such a change may grow by 1e8.
DAMPED: dict[str, dict[str, float]] = {"co-pfl": {"eps": 0.1}}
HANGS = 1800  # seconds: no machine is that slow
FEDERATION, MODEL = worlds.federation(), worlds.model()


class Threaded(SingleProcess):
    """Ranks that are threads of one process; what they exchange is pickled, as between processes."""

    def __init__(self, rank: int, size: int, box: list[bytes], gate: threading.Barrier) -> None:
        self.rank, self.size, self.box, self.gate = rank, size, box, gate

    def gather(self, mine: T) -> list[T]:
        self.box[self.rank] = pickle.dumps(mine)
        self.gate.wait(HANGS)
        out = [pickle.loads(b) for b in self.box]
        self.gate.wait(HANGS)
        return out

    def first(self, mine: T) -> list[T]:
        found = self.gather(mine)
        return [] if self.rank else found

    def sum(self, mine: Params) -> Params:
        found = [p for p in self.gather(mine) if p]
        return {n: torch.stack([p[n] for p in found]).sum(0) for n in found[0]} if found else {}


def together(size: int, work: Callable[[SingleProcess], T]) -> list[T]:
    """What every one of so many ranks makes of the same work."""
    box, gate = [b""] * size, threading.Barrier(size)
    out: dict[int, T] = {}
    trouble: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            out[rank] = work(Threaded(rank, size, box, gate))
        except BaseException as e:
            trouble.append(e)
            gate.abort()

    threads = [threading.Thread(target=one, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for e in trouble:
        if not isinstance(e, threading.BrokenBarrierError):
            raise e
    return [out[r] for r in range(size)]


def simulated(algorithm: Algorithm, world: SingleProcess | None = None, **options: Any) -> Simulation:
    evaluation = options.pop("evaluation", Evaluation(eval_every=2, draws=2, degrees=(0.5, 1.0)))
    fed = options.pop("fed", FEDERATION)
    rounds = 8 if isinstance(algorithm, DMPFL) else 4
    faults = options.pop("faults", None)
    own = worlds.training(**({"num_rounds": rounds, "local_epochs": 1} | options))
    machine = Machine(ranks=world or SingleProcess())
    sim = Simulation(fed, MODEL, algorithm, own, evaluation, machine=machine, faults=faults)
    sim.run()
    return sim


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Nested records agree, numbers to rounding; times and places aside."""
    if isinstance(a, dict):
        skipped = {"seconds", "time", "environment"}
        assert a.keys() - skipped == b.keys() - skipped, where
        for key in a.keys() - skipped:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, float) and isinstance(b, float):
        assert math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE), (where, a, b)
    else:
        assert a == b, where


def assert_same_run(sim: Simulation, alone: Simulation) -> None:
    """Every number of a run, and on the first rank every client's state."""
    checks.assert_agree(sim.server, alone.server, TOLERANCE)
    assert sim.totals == alone.totals
    assert_same(sim.rows, alone.rows)
    if sim.ranks.rank == 0:
        checks.assert_agree(checks.everyone(sim), checks.everyone(alone), TOLERANCE)
        for a, b in ((sim.known, alone.known), (sim.store, alone.store)):
            assert sorted(a.ids) == sorted(b.ids)
        checks.assert_agree(sim.known.gather(sim.everybody), alone.known.gather(sim.everybody), TOLERANCE)


# Who plays whom


def test_the_largest_go_first_each_to_the_rank_with_least() -> None:
    # 5 to rank 0, 4 to rank 1, 3 to rank 1 (4 < 5), 3 to rank 0 (5 < 7), 3 to rank 1 (7 < 8)
    assert balanced(torch.tensor([3, 5, 3, 4, 3]), 2).tolist() == [1, 0, 0, 1, 1]
    assert balanced(torch.zeros(0, dtype=torch.int64), 2).tolist() == []


def test_a_clients_state_stays_on_one_rank() -> None:
    # Minibatches of 5: the clients' 28, 6, 16, 10, 3, 22 examples are 6, 2, 4, 2, 1, 5 steps.
    # 6 to rank 0, 5 and 4 to rank 1, 2 (client 1) to rank 0, 2 (client 3) to rank 0 (8 < 9), 1 to rank 1 (9 < 10).
    owned = [{0, 1, 3}, {2, 4, 5}]
    sims = together(2, lambda world: simulated(Ditto(), world))
    for sim, mine in zip(sims, owned, strict=True):
        assert set(sim.placement.mine(sim.everybody).tolist()) == mine
        assert sim.store.ids and set(sim.store.ids) <= mine


def test_cohorts_are_balanced_by_work_alone_where_clients_keep_nothing() -> None:
    (sim, *_) = together(2, lambda world: simulated(FedAvg(), world))
    assert sim.placement.owners is None
    # 6 to rank 0, 5 and 1 to rank 1
    assert sim.placement.places(torch.tensor([0, 5, 4])).tolist() == [0, 1, 1]


def test_balance_is_the_mean_ranks_work_over_the_busiest_ranks() -> None:
    (sim, *_) = together(2, lambda world: simulated(Ditto(), world, num_rounds=2))
    steps, owner = torch.tensor([6, 2, 4, 2, 1, 5]), torch.tensor([0, 0, 1, 0, 1, 1])
    loads = [[int(steps[c][owner[c] == r].sum()) for r in (0, 1)] for c in map(sim.cohort, sim.schedule)]
    assert sim.placement.balance == sum(map(sum, loads)) / 2 / sum(map(max, loads))


# The same numbers


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.filterwarnings("ignore:.*leave room", "ignore:.*units for")
def test_three_ranks_give_the_numbers_of_one(name: str) -> None:
    algorithm = ALGORITHMS[name](**DAMPED.get(name, {}))
    alone = simulated(algorithm)

    def work(world: SingleProcess) -> Simulation:
        sim = simulated(algorithm, world)
        sim.collect()
        return sim

    for sim in together(3, work):
        assert_same_run(sim, alone)


@pytest.mark.parametrize("algorithm", [FedAvg(weights="cowa"), Ditto(), FedPAC(), FedPHP()], ids=lambda a: a.called)
@pytest.mark.parametrize(
    "evaluation",
    [
        Evaluation(eval_every=1, when="after_local", clients="selected", shift="none"),
        Evaluation(eval_every=2, clients=2, train_loss=True, matrix=True),
    ],
    ids=["after_local", "matrix"],
)
def test_evaluation_is_that_of_one_rank(algorithm: Algorithm, evaluation: Evaluation) -> None:
    alone = simulated(algorithm, evaluation=evaluation)

    def work(world: SingleProcess) -> tuple[Simulation, Any]:
        sim = simulated(algorithm, world, evaluation=evaluation)
        return sim, sim.evaluations()

    expected = alone.evaluations()
    for sim, found in together(3, work):
        assert_same(sim.rows, alone.rows)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[n], expected[n]) for n in expected)


@pytest.mark.parametrize("algorithm", [FedAvg(), Ditto(), FedPAC(), FedAvg(robust=Robust(rule="krum", share=0.3))])
@pytest.mark.parametrize(
    "faults",
    [
        Faults(drop_rate=0.2, straggler_ratio=0.4, late="stale", faulty_ratio=0.2, fault="shape"),
        Faults(faulty_ratio=1.0, fault="duplicate"),
        Faults(faulty_ratio=1.0, fault="empty"),
    ],
    ids=["some", "twice", "nobody"],
)
def test_faults_are_those_of_one_rank(algorithm: Algorithm, faults: Faults) -> None:
    options = {"faults": faults, "join_ratio": 1.0}
    alone = simulated(algorithm, **options)
    assert any("quarantined" in r for r in alone.rows)

    def work(world: SingleProcess) -> Simulation:
        sim = simulated(algorithm, world, **options)
        sim.collect()
        return sim

    for sim in together(2, work):
        assert_same_run(sim, alone)


def test_what_clients_received_that_vanished_is_counted_by_the_rank_that_knows_them() -> None:
    """FedSelect's downloads shrink as a client's personal positions grow, which its rank alone has on record."""
    options = {"faults": Faults(drop_rate=0.4), "join_ratio": 1.0, "num_rounds": 5}
    alone = simulated(FedSelect(select_interval=1), **options)
    assert sum(r.get("dropped", 0) for r in alone.rows)
    for sim in together(2, lambda world: simulated(FedSelect(select_interval=1), world, **options)):
        assert sim.totals.down_bytes == alone.totals.down_bytes
        assert sim.totals.paper_bytes == alone.totals.paper_bytes


def test_where_everybody_diverges_all_ranks_end_with_an_evaluation() -> None:
    """After three of eight rounds, none of which was due to be evaluated: the evaluation at the end takes all ranks.

    The second minibatch of a client is the one whose loss is not finite, so everybody has two epochs.
    """
    fed = worlds.federation()
    fed = dataclasses.replace(fed, source=dataclasses.replace(fed.source, x=fed.source.x.double() * 1e200))
    evaluation = Evaluation(eval_every=8, shift="none")
    options = {"fed": fed, "num_rounds": 8, "join_ratio": 1.0, "local_epochs": 2, "evaluation": evaluation}
    alone = simulated(Ditto(), **options)
    assert [r.get("stopped") for r in alone.rows] == [None, None, "diverged"]
    assert ["personal" in r for r in alone.rows] == [False, False, True]

    def work(world: SingleProcess) -> Simulation:
        sim = simulated(Ditto(), world, **options)
        sim.collect()
        return sim

    for sim in together(2, work):
        assert sim.state.diverged == alone.state.diverged == set(range(6))
        assert_same_run(sim, alone)


def test_newcomers_are_those_of_one_rank() -> None:
    fed = dataclasses.replace(FEDERATION, num_clients=4, unseen=2)
    alone = simulated(Ditto(), fed=fed).newcomers()
    assert together(2, lambda world: simulated(Ditto(), world, fed=fed).newcomers()) == [alone, alone]


# Real processes

METHODS = "fedavg,ditto,dm-pfl,fedpac,co-pfl"
QUICK = (
    f"algorithms={METHODS}",
    f"co-pfl.eps={DAMPED['co-pfl']['eps']}",
    "training.num_rounds=2",
    "training.local_epochs=2",
    "training.batch_size=64",
    "training.precision=float64",
    "evaluation.eval_every=2",
    "evaluation.draws=1",
    "data.num_clients=6",
)


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PERSONAFL_OFFLINE": "1"} | more


@pytest.mark.filterwarnings("ignore:.*leave room")
@pytest.mark.slow
def test_torchrun_gives_the_run_folder_of_one_process(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "personafl", "run"]
    options = ["--json", "--profile", "--device", "cpu", "--threads", "2", "--out", str(tmp_path / "two")]
    found = subprocess.run(
        [sys.executable, *launch, *QUICK, *options],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=HANGS,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    alone = personafl.run(None, *QUICK, device="cpu")
    told = json.loads(found.stdout)  # printed once
    assert_same(told, [m.summary for m in alone.methods.values()])
    assert [s["environment"]["threads"] for s in told] == [2] * len(told)  # of each process
    loaded = personafl.Result.load(tmp_path / "two")
    x = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
    for label in METHODS.split(","):
        one, two = alone[label], loaded[label]
        assert_same(two.rows, one.rows)
        sims = two.simulation, one.simulation
        checks.assert_agree(sims[0].server, sims[1].server, TOLERANCE)
        for a, b in (tuple(sim.store for sim in sims), tuple(sim.known for sim in sims)):
            assert sorted(a.ids) == sorted(b.ids)
            checks.assert_agree(a.gather(sims[0].everybody), b.gather(sims[0].everybody), TOLERANCE)
        for client in range(6):
            torch.testing.assert_close(*(m.client(client).predict(x) for m in (two, one)), rtol=1e-10, atol=1e-10)
        spent = json.loads((tmp_path / "two" / label / "seed-0" / "profile.json").read_text())
        assert len(spent["ranks"]) == 2 and spent["parts"]["waiting"] > 0


SCRIPT = """
import datetime, json, os, signal, sys, time, torch
import torch.distributed as dist
from personafl.simulation import ranks
def played(world, how):
    rank = torch.tensor(float(world.rank), dtype=torch.float64)
    print(world.size, world.gather(world.rank), world.first(world.rank), flush=True)
    found = world.sum({"a": rank + 1, "b": torch.ones(2)} if world.rank else {})
    print(float(found["a"]), [t.data_ptr() % 64 for t in found.values()], flush=True)
    print(dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout, flush=True)
    if world.rank == 1:
        os._exit(7) if how == "gone" else time.sleep(HANGS)
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2))  # so far both may have been slow
    world.gather(None)
def begun(how, rank, port):
    if child := os.fork():
        return child
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=port)
    sys.stdout = open(f"{how}-{rank}", "w")
    try:
        with ranks.process_group("cpu", datetime.timedelta(seconds=HANGS)) as world:
            played(world, how)
    except ConnectionError as e:
        print(e, flush=True)
        os._exit(1)
    os._exit(0)
cases = dict(zip(("gone", "silent"), sys.argv[1:]))
both = {how: [begun(how, rank, port) for rank in (0, 1)] for how, port in cases.items()}
codes = {how: os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) for how, (first, _) in both.items()}
for _, second in both.values():
    os.kill(second, signal.SIGKILL)
print(json.dumps(codes))
""".replace("HANGS", str(HANGS))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, list[list[str]]]]:
    """How two ranks ended, and what each said: processes of their own, forked where all is imported."""
    home = tmp_path_factory.mktemp("ended")
    with socket.socket() as one, socket.socket() as two:
        for s in (one, two):
            s.bind(("localhost", 0))
        ports = [str(s.getsockname()[1]) for s in (one, two)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *ports],
        capture_output=True,
        text=True,
        env=environment(WORLD_SIZE="2", MASTER_ADDR="localhost"),
        cwd=home,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = {how: [(home / f"{how}-{rank}").read_text().splitlines() for rank in (0, 1)] for how in ("gone", "silent")}
    return {how: (code, said[how]) for how, code in json.loads(done.stdout).items()}


@pytest.mark.parametrize("how", ["gone", "silent"])
def test_a_rank_that_is_gone_or_silent_ends_the_others(how: str, ended: dict[str, tuple[int, list[list[str]]]]) -> None:
    code, said = ended[how]
    assert said[0][:2] == ["2 [0, 1] [0, 1]", "2.0 [0, 0]"]  # each sum where PyTorch allocates
    assert said[0][2] == said[1][2] == str(datetime.timedelta(seconds=HANGS))
    assert said[1][:2] == ["2 [0, 1] []", "2.0 [0, 0]"]
    assert said[0][3].startswith("rank 0 of 2: another rank is gone or silent: ")
    assert code == 1


# Which device


def started(monkeypatch: pytest.MonkeyPatch, local: int, gpus: int) -> None:
    about = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": str(local), "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in about.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


def test_each_process_takes_a_gpu_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    started(monkeypatch, local=1, gpus=4)
    assert (ranks.launched(), ranks.device_of("cuda"), ranks.device_of("cpu")) == (8, "cuda:1", "cpu")
    with pytest.raises(ValueError, match="8 processes take a GPU each; use cuda"):
        ranks.device_of("cuda:2")
    started(monkeypatch, local=3, gpus=2)
    assert ranks.device_of("cuda") == "cuda:1"


def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with ranks.process_group("cpu") as world:
        assert type(world) is SingleProcess
        assert world.gather(3) == world.first(3) == [3]
    assert ranks.device_of("cuda:1") == "cuda:1"
