"""The server's checkpoint: a server that is killed anywhere goes on as if it had not been."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from personafl.core.errors import UserError
from personafl.deployment import coordinator
from personafl.deployment.coordinator import Coordinator
from personafl.deployment.server_files import STATE, ServerFiles
from personafl.storage import files
from tests.deployment import worlds

HERE = "tests.deployment.test_server_files"


class Small(nn.Sequential):
    """Little to write."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))


def photographed(root: Path, to: Path, patch: pytest.MonkeyPatch) -> list[Path]:
    """Copies of a folder, one before every write of the server to its own part of it, one within every row's."""
    write, write_all, home = files.write, files.write_all, root / "server-folder"
    found: list[Path] = []

    def copied() -> None:
        found.append(to / str(len(found)))
        shutil.copytree(root, found[-1])

    def before(path: Path, data: bytes | str) -> files.Stamp:
        if home in path.parents:
            copied()
        return write(path, data)

    def within(target: int, data: bytes | memoryview) -> None:
        if bytes(data[:9]) == b'{"round":':
            write_all(target, data[:20])
            copied()
            data = data[20:]
        write_all(target, data)

    patch.setattr(files, "write", before)
    patch.setattr(files, "write_all", within)
    return found


def summary(server: Coordinator) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((server.results.folder / "summary.json").read_text())
    return {k: v for k, v in found.items() if k not in ("time", "experiment")}


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("scaffold", {"training": {"num_rounds": 2}}),
        ("dm-pfl", {"evaluation": {"eval_every": 2, "when": "after_local"}}),
    ],
)
def test_a_server_that_is_killed_between_writes_comes_to_the_same(
    method: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to the same bytes: those of a stage that is played again are counted once, as they are in a simulation.

    What a killed server had sent is nowhere written down, and the cost of a method is no matter of its machine.
    """
    text = worlds.recipe(method, model={"name": f"{HERE}:Small"}, **changes)
    monkeypatch.setattr(coordinator, "build_parts", worlds.BUILT)
    whole, _ = worlds.deployed(text, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        copies = photographed(tmp_path / "whole", tmp_path / "copies", patch)
        whole.run()
    sim = worlds.simulated(text)
    worlds.same_run(whole, tmp_path / "whole", sim)
    assert len(copies) > 15
    for root in copies[:: 2 if method == "scaffold" else 5]:
        begun = (root / "server-folder" / "server" / STATE).exists()
        second, _ = worlds.deployed(text, root)
        second.run()
        assert (second.experiment == whole.experiment) == begun
        assert second.results.rows() == whole.results.rows(), root.name
        assert summary(second) == summary(whole), root.name
        assert second.state.evaluation_bytes == whole.state.evaluation_bytes
        worlds.same_state(second, root, sim)
        there = {str(p.relative_to(second.files.folder)) for p in second.files.folder.rglob("*") if p.is_file()}
        assert there == {*second.files.held, STATE, "roster.json"}


def saved(home: Path) -> ServerFiles:
    made = ServerFiles(home)
    made.save({"a": 1}, {"w": torch.ones(2)}, {0: {"x": torch.zeros(1)}, 3: {"x": torch.ones(1)}}, {0, 3})
    return made


def test_a_checkpoint_is_what_was_saved(tmp_path: Path) -> None:
    first = saved(tmp_path)
    first.save({"a": 2}, {"b": torch.ones(1), "a": torch.zeros(1)}, {3: {"x": torch.full((1,), 5.0)}}, {0, 3})
    found = ServerFiles(tmp_path).load()
    assert found is not None
    numbers, server, rows = found
    assert numbers == {"a": 2} and list(server) == ["b", "a"]
    assert rows.keys() == {3} and rows[3]["x"].tolist() == [5.0]


def test_rows_that_did_not_change_are_not_written_again(tmp_path: Path) -> None:
    files_ = saved(tmp_path)
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "rows").iterdir()}
    files_.save({"a": 2}, {"w": torch.ones(2)}, {0: {"x": torch.zeros(1)}, 3: {"x": torch.ones(1)}}, {0})
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "rows").iterdir()}
    assert after.keys() == {"0-2.safetensors", "3-1.safetensors"}
    assert after["3-1.safetensors"] == before["3-1.safetensors"]


def test_files_of_no_checkpoint_are_removed(tmp_path: Path) -> None:
    saved(tmp_path)
    stray = [tmp_path / "model-9.safetensors", tmp_path / "rows" / "7-9.safetensors.part"]
    for path in stray:
        path.write_bytes(b"half")
    assert ServerFiles(tmp_path).load() is not None
    assert not any(p.exists() for p in stray)


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert ServerFiles(tmp_path).load() is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda home: (home / "model-1.safetensors").unlink(),
        lambda home: (home / "rows" / "3-1.safetensors").write_bytes(b"x"),
        lambda home: (home / STATE).write_text("{"),
        lambda home: (home / STATE).write_text("[]"),
        lambda home: (home / STATE).write_text('{"number": 1}'),
        lambda home: (home / STATE).write_bytes(b"\xff"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(spoil: Callable[[Path], object], tmp_path: Path) -> None:
    saved(tmp_path)
    spoil(tmp_path)
    with pytest.raises(UserError) as e:
        ServerFiles(tmp_path).load()
    assert len(str(e.value).splitlines()) == 1 and str(tmp_path) in str(e.value)
