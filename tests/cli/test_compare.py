"""Run folders side by side: what is missing, damaged or oddly named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from personafl import cli
from tests.evaluation.summaries import summary

Said = tuple[int, str, str]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Said]:
    """`personafl compare` in an empty folder: exit code, and what it printed as one line each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")

    def run(*words: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["personafl", "compare", *words])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, " ".join(out.split()), " ".join(err.split())

    return run


def ran(folder: str, methods: dict[str, list[int]], asked: list[int], **changes: Any) -> Path:
    """A run folder in which these seeds of each method are finished."""
    home = Path(folder)
    home.mkdir(parents=True)
    (home / "run.json").write_text(
        json.dumps({"methods": list(methods), "seeds": asked, "rounds": 1, "conditions": {}})
    )
    for label, seeds in methods.items():
        for seed in seeds:
            at = home / label / f"seed-{seed}"
            at.mkdir(parents=True)
            (at / "summary.json").write_text(json.dumps(summary(label, seed, 0.9, 0.5) | changes))
            (at / "metrics.jsonl").write_text('{"round": 0, "phase": "train", "personal": {"mean": 0.9}}\n')
            arrays = {"ids": np.arange(2), "edges": np.array([0, 1, 3]), "scores": np.ones(3)}
            np.savez(at / "evaluations.npz", **arrays)  # type: ignore[arg-type]
    return home


def test_what_is_not_finished_is_told_in_every_form(compare: Callable[..., Said]) -> None:
    ran("one", {"local": [0, 1, 2], "fedavg-ft": [0]}, [0, 1, 2])
    ran("two", {"ditto": [0, 1]}, [0, 1, 2])
    whole = "Partial: 3 of 9 runs are not finished: one/fedavg-ft (seeds 1, 2), two/ditto (seed 2)."
    code, out, _ = compare("one", "two", "--html", "t.html", "--md", "t.md", "--latex", "t.tex")
    assert code == 0 and whole in out
    assert all(whole in Path(f"t.{kind}").read_text() for kind in ("html", "md", "tex"))
    unequal = "the methods do not have the same seeds (one/local: 0, 1, 2; one/fedavg-ft: 0; two/ditto: 0, 1)"
    assert unequal in out and unequal in Path("t.html").read_text()
    code, out, _ = compare("one")
    assert "Partial: 2 of 6 runs are not finished: fedavg-ft (seeds 1, 2)." in out
    code, out, _ = compare("one/local/seed-0")  # one that was asked for is whole
    assert code == 0 and "Partial" not in out
    ran("three", {"local": []}, [0])
    code, _, err = compare("one", "three")
    assert code == 2 and err == (
        "personafl: three: nothing in this run folder is finished; personafl resume goes on with it"
    )


DAMAGE: list[tuple[str, bytes, str]] = [
    ("local/seed-0/summary.json", b"{}", "summary.json: not a summary of a run: it has no label"),
    ("local/seed-0/summary.json", b'{"label"', "summary.json: not a summary of a run: Expecting ':'"),
    ("local/seed-0/metrics.jsonl", b'{"round": 0, "ph', "metrics.jsonl: line 1 is not of a run: Unterminated string"),
    ("local/seed-0/evaluations.npz", b"PK\x03\x04", "evaluations.npz: not a readable .npz file: "),
    ("local/seed-0/evaluations.npz", b"", "evaluations.npz: not a readable .npz file: "),
    ("run.json", b"[]", "run.json: not written by personafl run"),
    ("run.json", b"\xff", "run.json: not written by personafl run"),
    ("run.json", b"[" * 10**5, "run.json: not written by personafl run"),
]


@pytest.mark.parametrize(("file", "content", "told"), DAMAGE, ids=[f"{f}: {t}" for f, _, t in DAMAGE])
def test_a_damaged_folder_ends_in_one_line(file: str, content: bytes, told: str, compare: Callable[..., Said]) -> None:
    (ran("one", {"local": [0]}, [0]) / file).write_bytes(content)
    code, out, err = compare("one", "--html", "t.html")
    assert code == 2 and not out and err.startswith(f"personafl: one/{file}: "), err
    assert told in err and "Traceback" not in err and not Path("t.html").exists()


def test_names_of_folders_and_methods_do_nothing(compare: Callable[..., Said]) -> None:
    odd = "$a$ [bold]:x: \x1b[31m<b>\n|"
    ran(odd, {"local": [0]}, [0], evaluated_model="\x1b]0;mine\x07 [red]theirs")
    ran("two", {"local": [0]}, [0])
    code, out, err = compare(odd, "two", "--html", "t.html", "--md", "t.md", "--latex", "t.tex")
    assert code == 0, err
    assert "\x1b" not in out and r"$a$ [bold]:x: \x1b[31m<b>\n|/local" in out and r"\x1b]0;mine\x07 [red]theirs" in out
    page, table = Path("t.html").read_text(), Path("t.md").read_text()
    assert "<b>" not in page and page.count("<svg") == 3 and "\x1b" not in page + table
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and len({line.replace(r"\|", "").count("|") for line in rows}) == 1
    code, _, err = compare("no\x1b[31m\nwhere")
    assert code == 2 and err.startswith(r"personafl: no\x1b[31m where: no finished run here")
