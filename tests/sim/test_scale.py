"""Homes of clients' rows, limits of memory, and rounds that cost what their cohort costs."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from personafl import ALGORITHMS, DMPFL, Ditto, Evaluation, Federation, Result, Simulation, Source, run
from personafl.core.store import HOST, Store, row_bytes
from personafl.data.federated import LAZY_FROM, LazySplit
from personafl.data.ragged import Ragged
from personafl.sim import execution_plan
from tests import worlds

KEEPS = ("ditto", "scaffold", "fedpac", "fedselect", "co-pfl", "fedphp", "dm-pfl", "fedavg-ft")


def rounds(name: str) -> int:
    """As many as it takes for all of a method to happen: two iterations, two selections, or what comes back."""
    return {"dm-pfl": 8, "fedselect": 7}.get(name, 4)


def state(sim: Simulation) -> dict[str, Tensor]:
    """All that a simulation ended up with."""
    kept, known = sim.store.gather(sim.everybody), sim.known.gather(sim.everybody)
    return {
        f"{where}:{n}": t
        for where, part in (("server", sim.server), ("kept", kept), ("known", known))
        for n, t in part.items()
    }


@pytest.mark.parametrize("name", KEEPS)
def test_every_home_gives_the_same_numbers(name: str, tmp_path: Path) -> None:
    found = []
    for home in ("device", "host", tmp_path / "store"):
        sim = worlds.simulation(ALGORITHMS[name](), store=home, num_rounds=rounds(name))
        sim.run()
        found.append(state(sim))
        assert sim.store.home == (tmp_path / "store" / "clients" if isinstance(home, Path) else HOST)
    assert all(torch.equal(other[n], t) for other in found[1:] for n, t in found[0].items())


@pytest.fixture(scope="module", params=KEEPS)
def whole(request: pytest.FixtureRequest) -> tuple[str, dict[str, Tensor]]:
    """A method, and what it ends up with when all clients are one stack."""
    sim = worlds.simulation(ALGORITHMS[request.param](), join_ratio=1.0, chunk=100, num_rounds=rounds(request.param))
    sim.run()
    return request.param, state(sim)


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_stacks_smaller_than_the_cohort_give_the_same_numbers(
    whole: tuple[str, dict[str, Tensor]], chunk: int, tmp_path: Path
) -> None:
    """In float64; products of one client alone and of several may differ in the last bit of some thousand."""
    name, expected = whole
    sim = worlds.simulation(
        ALGORITHMS[name](), join_ratio=1.0, chunk=chunk, num_rounds=rounds(name), store=tmp_path / "store"
    )
    sim.run()
    for (n, a), b in zip(expected.items(), state(sim).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda m, n=n: f"{n}: {m}")


# Where rows go


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


def test_a_run_expects_the_clients_its_stages_come_across() -> None:
    """Six clients, three a round, eight rounds; DM-PFL's sampled phases see those drawn, its usual one sees all."""
    assert worlds.simulation(Ditto(), num_rounds=1).touched() == 3
    assert worlds.simulation(Ditto()).touched() == 6
    assert worlds.simulation(Ditto(), join_ratio=0.17, num_rounds=4).touched() == 4  # one a round
    assert worlds.simulation(DMPFL(iterations=1), join_ratio=0.17, num_rounds=4).touched() == 6
    sim = worlds.simulation(DMPFL(iterations=1, personal_share="sampled"), join_ratio=0.17, num_rounds=4)
    assert sim.touched() == 4


def test_a_row_of_dm_pfl_is_its_weights_and_a_bit_for_each() -> None:
    """A layer of 6 x 12, 12 x 8 and 8 x 3 weights: 192 float64, 9 + 12 + 3 bytes of masks, a counter."""
    sim = worlds.simulation(DMPFL())
    assert row_bytes(sim.store.fresh(torch.arange(1))) == 8 * 192 + 9 + 12 + 3 + 4


# Rounds


@pytest.fixture(scope="module")
def many() -> Federation:
    """More clients than splits are drawn for at once, of four points each."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(3, (8 * LAZY_FROM,), generator=draw)
    x = torch.randn(8 * LAZY_FROM, 6, generator=draw) + y.view(-1, 1)
    return Federation.build(Source("many", x, y, 3), Ragged.cut(np.arange(8 * LAZY_FROM), np.full(2 * LAZY_FROM, 4)), 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many rows and splits of clients are asked for."""
    found = {"rows": 0, "most": 0, "splits": 0}
    gather, client = Store.gather, LazySplit.client

    def counted(store: Store, ids: Tensor) -> dict[str, Tensor]:
        found["rows"] += len(ids)
        found["most"] = max(found["most"], len(ids))
        return gather(store, ids)

    def drawn(split: LazySplit, id: int) -> np.ndarray:
        found["splits"] += 1
        return client(split, id)

    monkeypatch.setattr(Store, "gather", counted)
    monkeypatch.setattr(LazySplit, "client", drawn)
    return found


def test_a_round_touches_its_cohort_alone(many: Federation, asked: dict[str, int], tmp_path: Path) -> None:
    """Forty thousand clients, twenty a round: rows and splits of twenty, and of those scored in the end."""
    judge = Evaluation(shift="none", eval_every=1000, clients=30)
    sim = worlds.simulation(
        DMPFL(iterations=1, personal_share="sampled"),
        fed=many,
        join_ratio=20 / many.num_clients,
        num_rounds=4,
        evaluation=judge,
        store=tmp_path / "store",
    )
    for t in range(3):
        before = dict(asked)
        sim.step()
        assert asked["splits"] - before["splits"] == 20
        assert asked["rows"] - before["rows"] == 20 * (3 if sim.schedule[t].up else 2)  # kept; known, sent and received
    assert len(sim.store) <= 4 * 20
    sim.run()
    sim.clients_table()
    assert asked["most"] == 30


def test_a_stage_of_all_clients_goes_through_in_stacks(asked: dict[str, int], tmp_path: Path) -> None:
    sizes = (5,) * 200
    sim = worlds.simulation(
        DMPFL(iterations=1),
        fed=worlds.federation(sizes=sizes),
        join_ratio=0.05,
        chunk=16,
        num_rounds=4,
        store=tmp_path / "s",
    )
    sim.run()
    assert any(s.who == "all" for s in sim.schedule)
    assert len(sim.store) == 200
    assert asked["most"] == 16


def test_nothing_of_a_stack_outlives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What many stacks leave behind would keep the memory around it from being used again."""
    alive: weakref.WeakSet[object] = weakref.WeakSet()
    most, play = [], Simulation._client_side

    def counted(*args: object) -> object:
        most.append(len(alive))
        alive.add(work := (part := play(*args)).work)  # type: ignore[arg-type]
        del work
        return part

    monkeypatch.setattr(Simulation, "_client_side", counted)
    sim = worlds.simulation(DMPFL(iterations=1), fed=worlds.federation(sizes=(5,) * 40), chunk=2, num_rounds=4)
    sim.run()
    assert len(most) > 40 / 2
    assert max(most) == 1  # the one before


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


# Limits

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
machine = Machine(memory=limit and limit / 2**30)
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
@pytest.mark.parametrize("name", ["fedavg", "ditto", "dm-pfl"])
def test_memory_stays_under_a_limit(name: str) -> None:
    found = peak(name, 320, rounds=4)
    assert found["peak"] <= found["limit"]
    assert 1 < found["chunk"] < 100
    if name == "dm-pfl":
        free = peak(name, 0, rounds=1)
        assert free["chunk"] >= 100
        assert free["peak"] > found["limit"]  # the limit was one


# The run folder

QUICK = (
    "training.num_rounds=4",
    "training.local_epochs=1",
    "data.num_clients=5",
    "algorithms=dm-pfl,scaffold",
    "dm-pfl.iterations=1",
)


def test_rows_on_disk_are_part_of_the_run_folder(tmp_path: Path) -> None:
    usual = run(None, *QUICK, out=tmp_path / "usual")
    disk = run(None, *QUICK, out=tmp_path / "disk", store="disk")
    for label in ("dm-pfl", "scaffold"):
        assert disk[label].summary["accuracy"] == usual[label].summary["accuracy"]
        home = tmp_path / "disk" / label / "seed-0"
        assert (home / "store" / "clients" / "store.json").is_file()
        assert not (home / "checkpoint" / "clients.safetensors").exists()
        told = json.loads((home / "checkpoint" / "engine.json").read_text())["store"]
        assert told["home"] == "disk"
        assert told["clients"] == len(disk[label].simulation.store)
        assert told["disk_bytes_per_client"] >= told["bytes_per_client"]
        told = json.loads((tmp_path / "usual" / label / "seed-0" / "checkpoint" / "engine.json").read_text())["store"]
        assert told["home"] == "host" and "disk_bytes_per_client" not in told
    for again in (Result.load(tmp_path / "disk"), Result.load(tmp_path / "usual")):
        for label in ("dm-pfl", "scaffold"):
            x = disk[label].simulation.federation.source.x[:3]
            for c in range(5):
                assert torch.equal(again[label].client(c).predict(x), usual[label].client(c).predict(x))


def test_rows_in_a_folder_elsewhere_are_written_to_the_run_folder(tmp_path: Path) -> None:
    done = run(None, *QUICK, store="disk")
    done.save(tmp_path / "saved")
    again = Result.load(tmp_path / "saved")
    assert again["dm-pfl"].simulation.store.ids == sorted(done["dm-pfl"].simulation.store.ids)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"store": "tape"}, r"--store tape: possible are auto, device, host, disk"),
        ({"memory": -1.0}, r"--memory -1: must be greater than 0"),
        ({"memory": 0.001}, r"memory=0.001: .* GiB are in use before the first round; allow more"),
    ],
)
def test_impossible_homes_and_limits_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(None, *QUICK, **options)  # type: ignore[arg-type]
