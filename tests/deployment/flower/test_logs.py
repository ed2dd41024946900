"""Logs that stay small whatever comes from the network."""

from __future__ import annotations

from pathlib import Path

from personafl.deployment.flower.logs import BoundedLog


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(file: Path) -> list[str]:
    """What a log says, without the times."""
    return [line.split(" ", 2)[2] for line in file.read_text().splitlines()]


def test_a_flood_of_lines_is_cut_off_and_counted(tmp_path: Path) -> None:
    clock = Clock()
    log = BoundedLog(tmp_path / "a.log", 10, burst=3, per_second=0.5, clock=clock)
    for number in range(900):
        log.write(f"line {number}")
    assert lines(tmp_path / "a.log") == ["line 0", "line 1", "line 2"]
    clock.now = 2.0  # one more line by then
    log.write("later")
    log.write("too early")
    log.close()
    assert lines(tmp_path / "a.log")[3:] == [
        "(897 lines were left out here: too many came at once)",
        "later",
        "(1 lines were left out here: too many came at once)",
    ]


def test_a_log_keeps_no_more_than_it_may(tmp_path: Path) -> None:
    clock = Clock()
    log = BoundedLog(tmp_path / "a.log", 1, burst=10, per_second=10.0, clock=clock)
    for _ in range(2000):
        clock.now += 1.0
        log.write("x" * 1500)  # 2 MB as they are cut
    log.close()
    kept = [p.stat().st_size for p in tmp_path.iterdir()]
    assert len(kept) == 5 and 800_000 < sum(kept) <= 1_000_000


def test_a_long_line_is_cut(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "a.log", 1)
    log.write("x" * 100_000)
    log.close()
    assert 1000 < (tmp_path / "a.log").stat().st_size < 1100
