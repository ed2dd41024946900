"""Calls side by side in processes."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from personafl.core.errors import UserError
from personafl.experiment.jobs import side_by_side


def told(value: int) -> tuple[int, int]:
    return value, os.getpid()


def fails(path: Path) -> None:
    raise UserError(f"{path}: no")


def test_one_job_runs_here_in_order() -> None:
    assert list(side_by_side([partial(told, v) for v in (3, 1, 2)], 1)) == [
        (i, (v, os.getpid())) for i, v in enumerate((3, 1, 2))
    ]


def test_several_run_elsewhere_and_are_told_apart_by_their_place() -> None:
    found = dict(side_by_side([partial(told, v) for v in (3, 1, 2)], 2))
    assert {i: v for i, (v, _) in found.items()} == {0: 3, 1: 1, 2: 2}
    assert os.getpid() not in {pid for _, pid in found.values()}


def test_what_is_wrong_in_one_is_said_here(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gone: no"):
        list(side_by_side([partial(fails, tmp_path / "gone")] * 3, 2))
