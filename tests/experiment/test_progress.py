"""What is shown while a run goes on, and where."""

from __future__ import annotations

import io
import re
import sys
import types
from typing import Any

import pytest

import personafl
from personafl.experiment.console import Console
from personafl.experiment.progress import ProgressDisplay, Step, _Bar, _left, _Lines, _Notebook

RECIPE: dict[str, Any] = {
    "data": {"dataset": "digits", "partition": "iid", "num_clients": 3},
    "training": {"num_rounds": 2, "local_steps": 1, "batch_size": 2},
    "evaluation": {"shift": "none", "eval_every": 2},
    "algorithms": ["fedavg", "fedavg-ft"],
}


def stage(round: int, phase: str = "train", mean: float | None = None) -> dict[str, Any]:
    return {"round": round, "phase": phase} | (
        {} if mean is None else {"personal": {"mean": mean}, "metric": {"name": "accuracy", "better": "higher"}}
    )


class Recorded:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def show(self, step: Step) -> None:
        self.steps.append(step)


def test_a_run_is_silent_where_nobody_looks_on(capsys: pytest.CaptureFixture[str]) -> None:
    personafl.run(RECIPE)
    assert capsys.readouterr().out == ""


def test_a_line_per_evaluation_goes_to_a_file_where_that_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    result = personafl.run(RECIPE, seeds=[3, 4], quiet=False)
    own = {
        (label, seed): [100 * r["personal"]["mean"] for r in m.rows if "personal" in r]
        for (label, seed), m in result.methods.items()
    }
    lines = []
    for seed in (3, 4):
        lines.append(f"fedavg, seed {seed}, round 2/2 (train): accuracy {own['fedavg', seed][0]:.1f} %")
        lines.append(f"fedavg-ft, seed {seed}, round 2/2 (train): accuracy {own['fedavg-ft', seed][0]:.1f} %")
        lines.append(f"fedavg-ft, seed {seed}, finetune stage: accuracy {own['fedavg-ft', seed][1]:.1f} %")
    assert capsys.readouterr().out.splitlines() == lines


def test_a_bar_on_a_terminal_and_none_for_who_watches_or_wants_quiet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    seen: list[str] = []
    personafl.run(RECIPE, watch=lambda label, *_: seen.append(label))
    personafl.run(RECIPE, quiet=True)
    assert capsys.readouterr().out == ""
    assert seen == ["fedavg"] * 2 + ["fedavg-ft"] * 3
    personafl.run(RECIPE)
    out = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert re.search(r"fedavg-ft, finetune stage .* 4/4 +accuracy \d+\.\d %", out)  # two methods of two rounds


def test_stages_that_are_no_rounds_are_not_counted() -> None:
    """FedPeWS: a hand-over has the number of the round behind it; FedAvg+FT: a stage behind the last round."""
    progress = ProgressDisplay(runs=2, seeds=1, rounds=3)
    progress.display = shown = Recorded()
    for row in (stage(0, "warm-up"), stage(1, "hand-over"), stage(1, mean=0.5), stage(2)):
        progress("fedpews", 0, 4, row)
    for row in (stage(0), stage(1), stage(2, mean=0.25), stage(3, "finetune", 0.75)):
        progress("fedavg-ft", 0, 4, row)
    assert [s.done for s in shown.steps] == [1, 2, 2, 3, 4, 5, 6, 6]
    assert [s.score for s in shown.steps[2:5]] == ["accuracy 50.0 %", "accuracy 50.0 %", ""]
    assert (shown.steps[3].stage, shown.steps[-1].stage) == ("round 3/3 (train)", "finetune stage")
    assert shown.steps[-1].name == "fedavg-ft"  # no seed where there is one


def test_a_notebook_has_one_output_that_changes_and_ends_as_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[str] = []
    handle = types.SimpleNamespace(update=pages.append)
    fake: Any = types.ModuleType("IPython.display")
    fake.HTML = str
    fake.display = lambda page, display_id: pages.append(page) or handle
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    monkeypatch.setattr(_Notebook, "EVERY", 0.0)
    shown = _Notebook(total=4)
    shown.start()
    shown.show(Step("a<b", "round 1/2 (train)", "accuracy 50.0 %", True, 1))
    shown.stop()
    first, second, last = pages
    assert '<progress value="0" max="4">' in first
    assert '<progress value="1" max="4"></progress> a&lt;b, round 1/2 (train), accuracy 50.0 %, 1 of 4 rounds' in second
    assert re.fullmatch(r"1 of 4 rounds in \d+ s", last)


def test_what_is_left_is_told_in_the_unit_it_takes() -> None:
    """A tenth is done: nine times as long is left."""
    told = [_left(spent, 1, 10) for spent in (0.5, 10, 100, 1000, 100_000)]
    assert told == ["about 4 s left", "about 90 s left", "about 15 min left", "about 2 h left", "about 10 days left"]
    assert _left(5.0, 0, 10) == "" and _left(5.0, 10, 10) == ""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_file_is_told_once_how_long_a_long_run_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = Clock(), io.StringIO()
    monkeypatch.setattr("personafl.experiment.progress.time.monotonic", clock)
    for total in (10**6, 8):  # two seconds a round: 23 days, and ten seconds
        lines = _Lines(Console(file=out), total)
        lines.start()
        for done in range(1, 6):
            clock.now += 2
            lines.show(Step("ditto", f"round {done}/{total} (train)", "", False, done))
    assert out.getvalue() == "3 of 1000000 rounds in 6 s, about 23 days left\n"


def test_a_bar_tells_how_long_slow_rounds_will_take() -> None:
    clock = Clock()
    bar = _Bar(Console(file=io.StringIO(), force_terminal=True, get_time=clock), 50)
    for done in range(1, 4):
        clock.now += 100
        bar.show(Step("[bold]:x:\x1b", "round", "", False, done))
    assert bar.bar.tasks[0].time_remaining == 47 * 100
    assert bar.bar.tasks[0].description == "[bold]:x:\\x1b, round"
    console = Console(file=(out := io.StringIO()), force_terminal=True, width=160)
    console.print(bar.bar.get_renderable())
    assert "[bold]:x:\\x1b, round" in out.getvalue() and "1:18:20" in out.getvalue()
