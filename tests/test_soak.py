"""The soak test's judgement, by made-up series; and that it runs."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
from benchmarks import soak
from benchmarks.soak import Sample, judged, noise, slope

MIB = 2**20


def series(rounds: int = 400, spread: float = 20.0) -> list[Sample]:
    """Rounds that are all alike but for the allocator, and for a machine that is slow for a while."""
    draw = np.random.default_rng(0)
    out = []
    for i in range(rounds):
        slow = 3.0 if i > rounds / 2 else 1.0
        memory = int((300 + spread * draw.uniform(-1, 1)) * MIB)
        out.append(Sample(i, 0.5 * slow * draw.uniform(0.9, 1.1), 0.1 * slow * draw.uniform(0.9, 1.1), memory, 7, 2))
    return out


def broken(samples: list[Sample]) -> list[str]:
    return [v.name for v in judged(samples) if v.broken]


def test_what_stays_the_same_passes() -> None:
    assert broken(series()) == []
    assert broken(series(spread=0.0)) == []


@pytest.mark.parametrize(("kib", "spread"), [(39, 20.0), (17, 1.0), (5, 0.0)])
def test_memory_that_grows_is_found(kib: int, spread: float) -> None:
    """One bias of a cohort; what is a leak however noisy; and more than rows of metrics where there is no noise."""
    grown = [dataclasses.replace(s, memory=s.memory + kib * 1024 * s.round) for s in series(1000, spread)]
    assert broken(grown) == ["memory, MiB"]


def test_rows_of_metrics_are_no_leak() -> None:
    assert broken([dataclasses.replace(s, memory=s.memory + 1024 * s.round) for s in series(spread=0.0)]) == []


def test_growth_before_the_fiftieth_round_is_not_judged() -> None:
    early = [dataclasses.replace(s, memory=s.memory - MIB * max(0, 50 - s.round), handles=3) for s in series()]
    late = [dataclasses.replace(s, handles=7) for s in early[50:]]
    assert broken(early[:50] + late) == []


@pytest.mark.parametrize("name", ["handles", "threads"])
def test_one_handle_or_thread_more_is_found(name: str) -> None:
    samples = series()
    samples[321] = dataclasses.replace(samples[321], **{name: 8})
    assert broken(samples) == [name]


def test_rounds_that_become_slower_are_found_and_a_slower_machine_is_not() -> None:
    """By 20 % over 1000 rounds: at the middles of both stretches, 100 and 950, by 2 and 19 %, which is 17 % slower."""
    slower = [dataclasses.replace(s, seconds=s.seconds * (1 + 0.2 * s.round / 1000)) for s in series(1000)]
    assert broken(slower) == ["a round, pieces"]
    assert (
        broken([dataclasses.replace(s, seconds=2 * s.seconds, calibration=2 * s.calibration) for s in series()]) == []
    )


def test_the_slope_is_that_of_a_line_and_has_no_noise() -> None:
    line = 5.0 + 3.0 * np.arange(100)
    assert slope(line) == 3.0
    assert noise(line) == pytest.approx(0, abs=1e-12)  # of numbers up to 302: rounding
    line[40] += 1000  # one step does not move a median
    assert slope(line) == pytest.approx(3.0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_runs_and_tells(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether so few rounds on a busy machine keep the bounds is another matter."""
    monkeypatch.setattr(soak, "WARM", 4)
    monkeypatch.setattr(soak, "STRETCH", 4)
    monkeypatch.setattr(soak, "APART", 2)
    monkeypatch.setattr(sys, "argv", ["soak.py", "--rounds", "12", "--cohort", "20", "--store", "disk"])
    with pytest.raises(SystemExit) as end:
        soak.main()
    told = capsys.readouterr().out
    assert "ditto, rows on disk: 12 rounds of 20 clients" in told
    assert (end.value.code == 1) == ("BROKEN" in told)
    assert [line.split()[0] for line in told.splitlines()[2:]] == ["memory,", "handles", "threads", "a"]


def test_fewer_rounds_than_can_be_compared_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["soak.py", "--rounds", "249"])
    with pytest.raises(SystemExit):
        soak.main()
    assert "--rounds 249: 50 to warm up and twice 100 to compare are the fewest" in capsys.readouterr().err
