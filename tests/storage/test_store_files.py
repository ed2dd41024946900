"""Commits of a store in a folder: every committed state can be gone back to, wherever the process ended."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from personafl.core.errors import UserError
from personafl.core.types import Params
from personafl.storage import store as module
from personafl.storage.store import Store
from personafl.storage.store_files import StoreFiles
from tests.storage.test_files import recorded

State = dict[int, tuple[list[float], list[bool]]]


def fresh(ids: Tensor) -> Params:
    return {
        "w": ids.double().unsqueeze(1).expand(-1, 3),
        "on": torch.ones(len(ids), 9, dtype=torch.bool),
        "n": ids.float(),
    }


def written(ids: list[int], draw: random.Random) -> Params:
    values = torch.tensor([[draw.random() for _ in range(3)] for _ in ids], dtype=torch.float64)
    bits = torch.tensor([[draw.random() < 0.5 for _ in range(9)] for _ in ids])
    return {"w": values, "on": bits, "n": values[:, 0].float()}


def held(store: Store) -> State:
    """All rows, by client."""
    found: State = {}
    for ids, rows in store.parts():
        for i, c in enumerate(ids.tolist()):
            found[c] = (rows["w"][i].tolist(), rows["on"][i].tolist())
    return found


def played(folder: Path, draw: random.Random, rounds: int) -> tuple[Store, dict[int, State]]:
    """A store after some rounds, committed after each with the last two kept, and what it was at those."""
    store = Store(fresh, folder)
    store.commit(0)
    states: dict[int, State] = {0: {}}
    for number in range(1, rounds + 1):
        for _ in range(draw.randint(0, 3)):
            write(store, draw)
        store.commit(number)
        states[number] = held(store)
        store.forget(number - 1)
    return store, {n: states[n] for n in (rounds - 1, rounds) if n in states}


def write(store: Store, draw: random.Random) -> None:
    ids = draw.sample(range(40), draw.randint(1, 6))
    store.scatter(torch.tensor(ids), written(ids, draw))


@pytest.mark.parametrize("seed", range(8))
def test_each_kept_commit_is_gone_back_to_from_any_later_write(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    store, states = played(tmp_path / "a", draw, rounds=draw.randint(1, 5))
    for _ in range(draw.randint(1, 4)):
        write(store, draw)  # behind the last commit
    assert held(store) != states[max(states)]
    back = Store.reopened(fresh, tmp_path / "a", max(states))
    assert held(back) == states[max(states)]
    write(back, draw)  # and on from there, then further back
    earlier = Store.reopened(fresh, tmp_path / "a", min(states))
    assert held(earlier) == states[min(states)]
    write(earlier, draw)
    assert held(Store.reopened(fresh, tmp_path / "a", min(states))) == states[min(states)]


def test_what_was_forgotten_takes_no_room_and_has_no_way_back(tmp_path: Path) -> None:
    _, states = played(tmp_path, random.Random(1), rounds=6)
    assert sorted(p.name for p in tmp_path.glob("undo-*")) == ["undo-5.bin", "undo-6.bin"]
    with pytest.raises(UserError, match="no way back to checkpoint 3; those there are: 5, 6"):
        Store.reopened(fresh, tmp_path, 3)
    assert states.keys() == {5, 6}


class Ended(BaseException):
    """The process, in place of a SIGKILL."""


def ending(monkeypatch: pytest.MonkeyPatch, after: int) -> Callable[[], int]:
    """End at the n-th thing done to the files or to mapped rows; how many there were."""
    count = 0

    def ended() -> bool:
        nonlocal count
        count += 1
        return count == after + 1

    def wrapped(module: object, name: str) -> None:
        real = getattr(module, name)

        def call(*given: object, **named: object) -> object:
            if ended():
                if name == "write":  # half of it gets there
                    number, data = given
                    real(number, bytes(data)[: len(bytes(data)) // 2])  # type: ignore[call-overload]
                raise Ended
            return real(*given, **named)

        monkeypatch.setattr(module, name, call)

    for name in ("write", "fsync", "fdatasync", "replace", "ftruncate", "posix_fallocate", "unlink"):
        wrapped(os, name)
    wrapped(Tensor, "index_copy_")
    return lambda: count


def test_a_commit_is_found_again_wherever_the_process_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more round and its commit, cut at every write, also in going back itself."""
    after, whole = 0, False
    while not whole:
        folder = tmp_path / str(after)
        store, states = played(folder, random.Random(3), rounds=3)
        with monkeypatch.context() as cut:
            count = ending(cut, after)
            try:
                write(store, draw := random.Random(9))
                write(store, draw)
                store.commit(4)
                store.forget(3)
                whole = True
            except Ended:
                pass
            done = count()
        kept = StoreFiles(folder, kept=True).commits
        assert 3 in kept
        with monkeypatch.context() as cut:
            ending(cut, after % 7)
            with contextlib.suppress(Ended):
                Store.reopened(fresh, folder, 3)
        assert held(Store.reopened(fresh, folder, 3)) == states[3]
        after += 1
    assert after > 15 and done == after - 1


class Watched:
    """A mapped file whose flushes are noted."""

    def __init__(self, name: str, held: mmap.mmap, calls: list[tuple[str, str]]) -> None:
        self.name, self.held, self.calls = name, held, calls

    def flush(self) -> None:
        self.calls.append(("flush", self.name))
        self.held.flush()


def test_rows_are_noted_before_they_are_written_and_on_the_disk_before_they_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut leaves of calls in this order can be gone back from; the order is what is looked at."""
    calls = recorded(monkeypatch)
    store, draw = Store(fresh, tmp_path), random.Random(0)
    store.scatter(torch.tensor([1, 2]), written([1, 2], draw))
    store.commit(0)
    calls.clear()
    copied = Tensor.index_copy_
    monkeypatch.setattr(Tensor, "index_copy_", lambda *given: (calls.append(("rows", "")), copied(*given))[1])
    store.scatter(torch.tensor([2, 3]), written([2, 3], draw))
    assert calls == [("write", "undo-0.bin"), ("fsync", "undo-0.bin"), *[("rows", "")] * 3]
    assert store._files is not None
    maps = store._files._maps
    watched = {n: Watched(n, m, calls) for n, m in maps.items()}
    monkeypatch.setattr(store._files, "_maps", watched)
    calls.clear()
    store.commit(1)
    flushed = [("flush", n) for n in watched]
    assert {n for _, n in flushed} == {"ids.bin", "sums.bin", "w.rows", "on.rows", "n.rows"}
    part = "commits.json.part"
    assert calls == [*flushed, ("write", part), ("fsync", part), ("replace", "commits.json"), ("fsync", tmp_path.name)]


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    played(tmp_path, random.Random(5), rounds=3)
    raw = bytearray((tmp_path / "w.rows").read_bytes())
    raw[3] ^= 16
    (tmp_path / "w.rows").write_bytes(raw)
    with pytest.raises(UserError, match=r"damaged, the rows of clients .* are not what was written"):
        Store.reopened(fresh, tmp_path, 3)
    store = Store.opened(fresh, tmp_path)
    with pytest.raises(UserError, match="damaged"):
        store.gather(torch.tensor(store.ids))


def test_a_damaged_undo_file_is_not_taken_for_one_that_was_cut_short(tmp_path: Path) -> None:
    draw = random.Random(5)
    store, states = played(tmp_path, draw, rounds=3)
    for _ in range(3):
        write(store, draw)
    path = tmp_path / "undo-3.bin"
    whole, rows = path.read_bytes(), {p.name: p.read_bytes() for p in tmp_path.iterdir() if p != path}
    path.write_bytes(whole[:30] + bytes([whole[30] ^ 1]) + whole[31:])
    with pytest.raises(UserError, match=r"undo-3.bin: damaged"):
        Store.reopened(fresh, tmp_path, 3)
    for more in (whole[:25], whole[:9], bytes(20), bytes(4096)):  # cut short, or made longer and not yet written
        path.write_bytes(whole + more)
        for name, raw in rows.items():
            (tmp_path / name).write_bytes(raw)
        assert held(Store.reopened(fresh, tmp_path, 3)) == states[3]


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    store, _ = played(tmp_path, random.Random(5), rounds=3)
    os.truncate(tmp_path / "n.rows", 4 * (len(store) - 1))
    with pytest.raises(UserError, match=r"n.rows: it has room for \d+ rows, \d+ are in use"):
        Store.reopened(fresh, tmp_path, 3)


def test_a_disk_without_room_is_an_error_before_a_row_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, states = played(tmp_path, random.Random(5), rounds=3)

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    many = list(range(100, 100 + module.FEWEST * 40))
    with pytest.raises(OSError, match="No space left"):
        store.scatter(torch.tensor(many), written(many, random.Random(0)))
    monkeypatch.undo()
    assert held(Store.reopened(fresh, tmp_path, 3)) == states[3]


@pytest.mark.skipif(os.geteuid() != 0 or not Path("/proc/mounts").exists(), reason="mounts a small file system")
def test_a_full_disk_is_an_error_and_no_signal(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if os.system(f"mount -t tmpfs -o size=2m none {small} 2>/dev/null"):
        pytest.skip("no file system can be mounted here")
    try:
        store = Store(lambda ids: {"w": torch.zeros(len(ids), 50_000)}, small / "store", expected=1000)
        with pytest.raises(OSError, match="No space left"):
            deque((store.scatter(torch.tensor([c]), {"w": torch.ones(1, 50_000)}) for c in range(100)), maxlen=0)
        assert 5 <= len(store) <= 11  # 200 kB each
    finally:
        os.system(f"umount -l {small}")
