"""Where the time goes: the parts add up, and without a clock nothing is counted."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import personafl
from personafl import Ditto, cli
from personafl.simulation import profile
from personafl.simulation.profile import PARTS, Clock, NoClock
from tests import worlds

QUICK = ("algorithms=fedavg", "training.num_rounds=2", "training.local_epochs=1", "evaluation.draws=1")


class Ticks(threading.local):
    """A time that passes when told to, in each thread for itself."""

    now = 0.0

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    found = Ticks()
    monkeypatch.setattr("personafl.simulation.profile.time.perf_counter", lambda: found.now)
    return found


def spent(clock: Clock) -> dict[str, float]:
    return {n: s for n, s in clock.report()["parts"].items() if s}


def test_time_belongs_to_the_innermost_part(ticks: Ticks) -> None:
    clock = Clock()
    ticks.pass_(1)
    with clock("training"):
        ticks.pass_(2)
        with clock("data"):
            ticks.pass_(4)
        ticks.pass_(8)
    ticks.pass_(16)
    assert spent(clock) == {"other": 17, "training": 10, "data": 4}
    assert clock.report()["seconds"] == 31


def test_rounds_have_their_own_parts(ticks: Ticks) -> None:
    clock = Clock()
    ticks.pass_(5)
    for number in range(2):
        clock.lap()
        with clock("training"):
            ticks.pass_(1 + number)
        clock.lap({"round": number, "phase": "train"})
        ticks.pass_(3)
    rounds = clock.report()["rounds"]
    assert [r["seconds"] for r in rounds] == [r["parts"]["training"] for r in rounds] == [1, 2]
    assert spent(clock) == {"other": 5 + 2 * 3, "training": 1 + 2}


def test_threads_share_out_the_time_that_passes(ticks: Ticks) -> None:
    clock = Clock()

    def work() -> None:
        with clock("training"):
            ticks.pass_(3)
            with clock("store"):
                ticks.pass_(2)
            ticks.pass_(3)

    with clock("evaluation"):
        for _ in range(2):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        ticks.pass_(8)  # the two worked side by side: 12 + 4 seconds in 8
    assert spent(clock) == {"training": 8 * 12 / 16, "store": 8 * 4 / 16}


@pytest.mark.parametrize("kind", ["mlp", "cnn"])  # in one stack, and in threads
def test_the_parts_are_the_time_of_a_run(kind: str) -> None:
    before = time.perf_counter()
    clock = Clock()
    begun = time.perf_counter()
    sim = worlds.simulation(Ditto(), kind, clock=clock)
    sim.run()
    done = time.perf_counter()
    found = clock.report()
    passed = time.perf_counter() - before
    assert (done - begun) * (1 - 1e-9) <= found["seconds"] <= passed * (1 + 1e-9)  # a sum of many times is rounded
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    assert found["parts"].keys() == PARTS.keys()
    assert all(found["parts"][n] > 0 for n in ("training", "data", "evaluation", "aggregation", "store", "wire"))
    for row, lap in zip(sim.rows, found["rounds"], strict=True):
        assert (lap["round"], lap["phase"]) == (row["round"], row["phase"])
        assert 0 < row["seconds"] <= lap["seconds"] == pytest.approx(sum(lap["parts"].values()))


def test_a_clock_changes_no_number() -> None:
    sims = [worlds.simulation(Ditto(), clock=clock) for clock in (Clock(), NoClock())]
    for sim in sims:
        sim.run()
    assert all((sims[0].server[n] == sims[1].server[n]).all() for n in sims[0].server)


def test_ranks_are_reported_by_their_mean() -> None:
    def report(training: float, waiting: float) -> dict[str, object]:
        parts = dict.fromkeys(PARTS, 0.0) | {"training": training, "waiting": waiting}
        lap = {"round": 0, "phase": "train", "seconds": training + waiting, "parts": parts}
        return {"seconds": training + waiting, "parts": parts, "rounds": [lap]}

    found = profile.merged([report(3.0, 1.0), report(1.0, 3.0)])
    assert (found["seconds"], found["parts"]["training"], found["parts"]["waiting"]) == (4, 2, 2)
    assert (found["rounds"][0]["seconds"], found["rounds"][0]["parts"]["waiting"]) == (4, 2)
    assert [r["waiting"] for r in found["ranks"]] == [1, 3]


def test_the_table_leaves_out_what_is_small_everywhere() -> None:
    parts = dict.fromkeys(PARTS, 0.0) | {"training": 6.0, "evaluation": 3.0, "wire": 0.01, "other": 0.99}
    laps = [{"round": t, "phase": "train", "parts": parts | {"training": s}} for t, s in enumerate((0.0, 1.0, 2.0))]
    table = profile.table({"a": {"seconds": 10.0, "parts": parts, "rounds": laps}})
    assert table.columns == ["Time", "Seconds", "Round", "training", "evaluation", "other"]
    # A round without training does not count; the median of 1 + 1 and 2 + 1 seconds is 2.5.
    assert table.rows == [["a", "10.00", "2500.0 ms", "60 %", "30 %", "10 %"]]


def test_a_run_tells_where_the_time_went_when_asked(tmp_path: Path) -> None:
    said = CliRunner().invoke(cli.app, ["run", *QUICK, "--quiet", "--profile", "--out", str(tmp_path / "a")])
    assert said.exit_code == 0, said.output
    assert "Seconds" in said.output and "training" in said.output
    found = json.loads((tmp_path / "a" / "fedavg" / "seed-0" / "profile.json").read_text())
    assert found["parts"]["setup"] > 0 and found["parts"]["files"] > 0 and len(found["rounds"]) == 2
    quiet = personafl.run(None, *QUICK, out=tmp_path / "b", device="cpu")
    assert quiet["fedavg"].profile is None
    assert not (tmp_path / "b" / "fedavg" / "seed-0" / "profile.json").exists()
