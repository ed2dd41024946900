"""What a client keeps on its disk: behind a stage or not, never in between."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from personafl.core.types import Params
from personafl.deployment.private_state import PrivateState
from personafl.storage import files

BEFORE: Params = {"b": torch.tensor([[1.0, 2.0]]), "a": torch.tensor([[True]])}
AFTER: Params = {"b": torch.tensor([[3.0, 4.0]]), "a": torch.tensor([[False]])}


def equal(found: Params | None, wanted: Params) -> bool:
    return found is not None and list(found) == list(wanted) and all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_a_state_is_what_was_saved(tmp_path: Path) -> None:
    state = PrivateState(tmp_path, "e", "c")
    state.save(3, BEFORE, acknowledged=-1)
    assert state.stages() == [3] and equal(state.load(3), BEFORE)
    assert state.load(2) is None and state.load(-1) is None


def test_nothing_kept_is_a_state(tmp_path: Path) -> None:
    """Methods without private parts have it, and it is not lost."""
    state = PrivateState(tmp_path, "e", "c")
    state.save(0, {}, acknowledged=-1)
    assert state.stages() == [0] and state.load(0) == {}


def test_the_one_the_server_knows_of_is_kept_and_no_other(tmp_path: Path) -> None:
    state = PrivateState(tmp_path, "e", "c")
    for stage, acknowledged in ((0, -1), (2, 0), (3, 0), (5, 3)):
        state.save(stage, BEFORE, acknowledged=acknowledged)
    assert state.stages() == [3, 5]
    assert len(list(state.folder.iterdir())) == 4


def test_what_a_kill_left_behind_is_removed(tmp_path: Path) -> None:
    state = PrivateState(tmp_path, "e", "c")
    stray = [state.folder / "kept-000001.safetensors", state.folder / "kept-000000.json.part"]
    for path in stray:
        path.write_bytes(b"half")
    state.save(2, BEFORE, acknowledged=-1)
    assert not any(p.exists() for p in stray) and state.stages() == [2]


def test_clients_and_experiments_are_apart(tmp_path: Path) -> None:
    for experiment, client, kept in (("e", "c", BEFORE), ("e", "d", AFTER), ("f", "c", AFTER)):
        PrivateState(tmp_path, experiment, client).save(1, kept, acknowledged=-1)
    assert equal(PrivateState(tmp_path, "e", "c").load(1), BEFORE)
    assert equal(PrivateState(tmp_path, "e", "d").load(1), AFTER)
    assert equal(PrivateState(tmp_path, "f", "c").load(1), AFTER)


@pytest.mark.parametrize("again", [False, True], ids=["a new stage", "the same stage again"])
def test_a_kill_between_any_two_changes_of_files_leaves_a_whole_state(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one the server knows of is always there; that of the stage is the new one, the old one, or none."""
    root = tmp_path / "root"
    copies: list[Path] = []
    state = PrivateState(root, "e", "c")
    state.save(1, BEFORE, acknowledged=-1)
    if again:
        state.save(2, BEFORE, acknowledged=1)

    def copied() -> None:
        copies.append(tmp_path / str(len(copies)))
        shutil.copytree(root, copies[-1])

    for name in ("write", "publish", "remove"):

        def changing(*given: object, real: object = getattr(files, name)) -> object:
            copied()
            return real(*given)  # type: ignore[operator]

        monkeypatch.setattr(files, name, changing)
    state.save(2, AFTER, acknowledged=1)
    copied()
    assert len(copies) >= 6
    ended = []
    for home in copies:
        found = PrivateState(home, "e", "c")
        assert equal(found.load(1), BEFORE)
        held = found.load(2)
        assert held is None or equal(held, AFTER) or (again and equal(held, BEFORE))
        ended.append(equal(held, AFTER))
        assert (2 in found.stages()) == (held is not None)
    assert ended[-1] and not ended[0]


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize("damage", [b"", b"[]", b"{", b'{"stamp": 1, "names": 2}', b"[" * 10**5, None])
def test_a_damaged_state_is_lost(damage: bytes | None, suffix: str, tmp_path: Path) -> None:
    state = PrivateState(tmp_path, "e", "c")
    state.save(1, BEFORE, acknowledged=-1)
    path = state.folder / f"kept-000001{suffix}"
    path.unlink() if damage is None else path.write_bytes(damage)
    assert state.load(1) is None
