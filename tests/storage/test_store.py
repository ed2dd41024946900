"""Rows of clients in each of their homes, and the files of a folder."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from personafl import DMPFL
from personafl.core.errors import UserError
from personafl.storage import store as module
from personafl.storage import store_files
from personafl.storage.store import Store, row_bytes
from tests import worlds


def fresh(ids):
    """A client that never took part: its weights are its own id, its mask is all true."""
    return {"w": ids.double().unsqueeze(1).expand(-1, 2), "mask": torch.ones(len(ids), 3, dtype=torch.bool)}


def rows(ids, value):
    return {
        "w": torch.full((len(ids), 2), value, dtype=torch.float64) + torch.tensor(ids).unsqueeze(1),
        "mask": torch.zeros(len(ids), 3, dtype=torch.bool),
    }


@pytest.fixture(params=["memory", "folder"])
def home(request, tmp_path):
    return torch.device("cpu") if request.param == "memory" else tmp_path / "store"


@pytest.fixture
def stored(home):
    def make(*ids, value=1000.0):
        store = Store(fresh, home)
        store.scatter(torch.tensor(ids), rows(ids, value))
        return store

    return make


def test_rows_survive_in_the_order_asked_for(stored):
    store = stored(4, 7, 2)
    out = store.gather(torch.tensor([2, 4]))
    assert out["w"].tolist() == [[1002, 1002], [1004, 1004]]
    assert not out["mask"].any()
    assert out["mask"].dtype == torch.bool


def test_unseen_clients_are_fresh(stored):
    out = stored(4).gather(torch.tensor([8, 9]))
    assert out["w"].tolist() == [[8, 8], [9, 9]]
    assert out["mask"].all()


def test_gathering_a_fresh_client_does_not_store_it(stored):
    store = stored(4)
    store.gather(torch.tensor([8, 4, 9]))
    assert store.ids == [4]


def test_seen_and_unseen_clients_mix_in_place(stored):
    out = stored(4, 7).gather(torch.tensor([9, 7, 1, 4]))
    assert out["w"].tolist() == [[9, 9], [1007, 1007], [1, 1], [1004, 1004]]
    assert out["mask"].any(1).tolist() == [True, False, True, False]


def test_later_rows_replace_earlier_ones_and_leave_the_others(stored):
    store = stored(4, 7)
    store.scatter(torch.tensor([7]), rows([7], 2000.0))
    assert store.gather(torch.tensor([4, 7]))["w"].tolist() == [[1004, 1004], [2007, 2007]]


def test_the_store_grows_with_its_clients(home):
    store = Store(fresh, home)
    for c in range(20):
        store.scatter(torch.tensor([c]), rows([c], 1000.0))
    store.scatter(torch.arange(15, 40), rows(list(range(15, 40)), 2000.0))  # five known, twenty new
    expected = [1000.0 + c for c in range(15)] + [2000.0 + c for c in range(15, 40)]
    assert store.gather(torch.arange(40))["w"][:, 0].tolist() == expected
    assert sorted(store.ids) == list(range(40))


def test_memory_depends_on_the_clients_seen_not_on_their_ids(stored):
    store = stored(10**6, 3)
    store.scatter(torch.tensor([999_999]), rows([999_999], 1000.0))
    assert store.ids == [10**6, 3, 999_999]
    assert store.gather(torch.tensor([999_999, 10**6]))["w"].tolist() == [[1_000_999] * 2, [1_001_000] * 2]
    assert len(store) == 3
    assert len(store._columns["w"].rows) <= max(2 * 3, module.FEWEST)


def test_what_was_gathered_is_a_copy(stored):
    store = stored(4, 7)
    store.gather(torch.tensor([4, 7]))["w"].zero_()
    store.gather(torch.tensor([4, 9]))["w"].zero_()
    assert store.gather(torch.tensor([4, 7]))["w"].tolist() == [[1004, 1004], [1007, 1007]]


def test_what_was_scattered_is_a_copy_without_a_graph(home):
    kept = rows([4], 1000.0)
    kept["w"].requires_grad_()
    store = Store(fresh, home)
    store.scatter(torch.tensor([4]), kept)
    kept["w"].detach().zero_()
    out = store.gather(torch.tensor([4]))["w"]
    assert out.tolist() == [[1004, 1004]]
    assert not out.requires_grad


def hollow(ids):
    """Tensors without elements, of several types, beside one with some."""
    count = len(ids)
    return {
        "none": torch.zeros(count, 0),
        "flat": torch.zeros(count, 2, 0, dtype=torch.float64),
        "bits": torch.zeros(count, 0, dtype=torch.bool),
        "w": ids.double(),
    }


def test_tensors_without_elements_are_kept_too(home, tmp_path):
    def write(store, ids, by):
        store.scatter(ids, hollow(ids) | {"w": ids.double() + by})

    store = Store(hollow, home)
    write(store, torch.tensor([3, 1]), 10)
    store.commit(0)
    write(store, torch.arange(3, 3 + module.FEWEST), 20)  # row 0 is written over, and there are more than at first
    wanted = {n: (t.shape, t.dtype) for n, t in hollow(torch.arange(3)).items()}
    found = store.gather(torch.tensor([1, 2, 3]))
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == wanted
    assert found["w"].tolist() == [11, 2, 23]
    store.save(tmp_path / "rows")
    copy = Store(hollow)
    copy.load(tmp_path / "rows")
    assert copy.gather(torch.tensor([1, 2, 3]))["w"].tolist() == [11, 2, 23]
    if isinstance(home, Path):
        back = Store.reopened(hollow, home, 0)
        assert back.ids == [3, 1]
        assert back.gather(torch.tensor([1, 2, 3]))["w"].tolist() == [11, 2, 13]


def test_rows_under_other_names_than_those_of_fresh_clients_are_refused(home):
    store, kept = Store(fresh, home), rows([4], 1.0)
    store.scatter(torch.tensor([4]), kept)
    with pytest.raises(UserError, match=r"'late': clients keep it but do not begin with it; .* in every round"):
        store.scatter(torch.tensor([4]), kept | {"late": torch.ones(1, 2)})
    with pytest.raises(UserError, match="'mask': clients begin with it but do not keep it"):
        Store(fresh).scatter(torch.tensor([4]), {"w": kept["w"]})


def test_a_method_that_keeps_nothing_stores_nothing():
    store = Store(lambda ids: {})
    store.scatter(torch.tensor([1, 2]), {})
    assert store.ids == []
    assert store.gather(torch.tensor([1, 2])) == {}


def test_a_row_is_its_values_and_a_bit_for_each_truth_value(stored):
    store = stored(4, 7)
    assert store.row_bytes == row_bytes(fresh(torch.tensor([0]))) == 2 * 8 + 1  # two float64; three bits are a byte
    assert store._columns["mask"].rows.dtype == torch.uint8


@pytest.mark.parametrize("shape", [(), (1,), (8,), (3, 5), (2, 3, 4)])
def test_truth_values_of_every_shape_come_back(home, shape):
    draw = torch.Generator().manual_seed(0)
    mask = torch.rand(5, *shape, generator=draw) < 0.5
    store = Store(lambda ids: {"m": torch.zeros(len(ids), *shape, dtype=torch.bool)}, home)
    store.scatter(torch.arange(5), {"m": mask})
    assert torch.equal(store.gather(torch.tensor([3, 0, 4]))["m"], mask[[3, 0, 4]])


def test_bits_are_the_same_however_they_are_packed():
    """The device packs by arithmetic, the host by NumPy; both must read what the other wrote."""
    mask = torch.rand(4, 13, generator=torch.Generator().manual_seed(0)) < 0.5
    powers = 2 ** torch.arange(8)
    padded = torch.nn.functional.pad(mask.long(), (0, 3)).view(4, 2, 8)
    assert torch.equal(module._packed(mask).long(), (padded * powers).sum(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64])
def test_types_are_kept(home, dtype):
    values = torch.arange(6).view(3, 2).to(dtype)
    store = Store(lambda ids: {"v": torch.zeros(len(ids), 2, dtype=dtype)}, home)
    store.scatter(torch.tensor([5, 1, 3]), {"v": values})
    out = store.gather(torch.tensor([1, 5]))["v"]
    assert out.dtype == dtype
    assert torch.equal(out, values[[1, 0]])


def test_rows_come_in_parts_by_rising_id(stored):
    store = stored(9, 2, 7, 5, 4)
    parts = list(store.parts(2 * store.row_bytes))
    assert [ids.tolist() for ids, _ in parts] == [[2, 4], [5, 7], [9]]
    assert [t["w"][:, 0].tolist() for _, t in parts] == [[1002, 1004], [1005, 1007], [1009]]
    assert list(Store(fresh).parts()) == []


def test_a_store_is_written_as_safetensors_a_part_at_a_time(stored, tmp_path, monkeypatch):
    store = stored(9, 2, 7)
    monkeypatch.setattr(module, "PART", 20)  # one row of two float64
    store.save(tmp_path / "all.safetensors")
    held = load_file(tmp_path / "all.safetensors")
    assert held["ids"].tolist() == [2, 7, 9]
    assert held["w"].tolist() == [[1002, 1002], [1007, 1007], [1009, 1009]]
    assert held["mask"].shape == (3, 3)
    assert held["mask"].dtype == torch.bool
    Store(fresh).save(tmp_path / "none.safetensors")
    assert load_file(tmp_path / "none.safetensors")["ids"].tolist() == []


def test_rows_that_were_saved_come_back_in_the_order_of_their_tensors(tmp_path):
    """Sums over tensors go by it, and the format sorts names."""
    store = Store(fresh)
    store.scatter(torch.tensor([4]), dict(reversed(rows([4], 1.0).items())))
    store.save(tmp_path / "all.safetensors")
    again = Store(fresh)
    again.load(tmp_path / "all.safetensors")
    assert list(again.gather(torch.tensor([4]))) == list(store.gather(torch.tensor([4]))) == ["mask", "w"]


def test_expected_rows_are_made_room_for_at_once():
    store = Store(fresh, expected=50)
    store.scatter(torch.tensor([3]), rows([3], 1000.0))
    before = store._columns["w"].rows.data_ptr()
    store.scatter(torch.arange(50), rows(list(range(50)), 1000.0))
    assert store._columns["w"].rows.data_ptr() == before
    store.scatter(torch.tensor([50]), rows([50], 1000.0))  # one more than expected
    assert store.gather(torch.tensor([50, 3]))["w"][:, 0].tolist() == [1050, 1003]


# In a folder


def kept(folder: Path, *ids: int) -> Store:
    store = Store(fresh, folder)
    store.scatter(torch.tensor(ids), rows(ids, 1000.0))
    store.commit(0)
    return store


def test_nothing_is_created_before_something_is_stored(tmp_path):
    store = Store(fresh, tmp_path / "store")
    store.gather(torch.tensor([1, 2]))
    store.scatter(torch.tensor([1]), {})
    assert not (tmp_path / "store").exists()
    assert store.disk_bytes() == 0


def test_a_store_can_be_opened_again(tmp_path):
    kept(tmp_path, 10**6, 3)
    again = Store.opened(fresh, tmp_path)
    assert again.ids == [10**6, 3]
    out = again.gather(torch.tensor([3, 8, 10**6]))
    assert out["w"][:, 0].tolist() == [1003, 8, 1_001_000]
    assert out["mask"].any(1).tolist() == [False, True, False]


def test_a_store_opened_for_reading_leaves_its_files_as_they_are(tmp_path):
    kept(tmp_path, 4)
    copy = Store.opened(fresh, tmp_path)
    for c in range(3000):  # more than there is room for
        copy.scatter(torch.tensor([c]), rows([c], 2000.0))
    assert copy.gather(torch.tensor([4, 2999]))["w"][:, 0].tolist() == [2004, 4999]
    again = Store.reopened(fresh, tmp_path, 0)
    assert again.ids == [4]
    assert again.gather(torch.tensor([4]))["w"].tolist() == [[1004, 1004]]
    again.scatter(torch.tensor([5]), rows([5], 3000.0))
    again.commit(1)
    assert Store.opened(fresh, tmp_path).gather(torch.tensor([4, 5]))["w"][:, 0].tolist() == [1004, 3005]


def test_a_folder_says_what_is_in_it(tmp_path):
    one = {"personal/fc.weight": torch.ones(1, 2, 3), "mask/fc.weight": torch.ones(1, 2, 3) > 0}
    store = Store(lambda ids: one, tmp_path)
    store.scatter(torch.tensor([1]), one)
    found = json.loads((tmp_path / "store.json").read_text())
    assert found == {
        "format": 2,
        "tensors": {
            "personal/fc.weight": {"file": "personal%2Ffc.weight.rows", "shape": [2, 3], "dtype": "float32"},
            "mask/fc.weight": {"file": "mask%2Ffc.weight.rows", "shape": [2, 3], "dtype": "bool"},
        },
    }
    store.commit(7)
    assert json.loads((tmp_path / "commits.json").read_text()) == {"format": 2, "rows": {"7": 1}}
    row = np.packbits([1] * 6, bitorder="little").tobytes() + np.ones(6, np.float32).tobytes()  # by name
    assert np.fromfile(tmp_path / "sums.bin", np.int64)[0] == zlib.crc32(row)
    assert (tmp_path / "mask%2Ffc.weight.rows").stat().st_size == module.FEWEST  # six bits are a byte


def test_files_take_up_what_was_written(tmp_path):
    """They are made for 1,024 rows of 400 kB; two are written, and little more than these is on the disk."""
    store = Store(lambda ids: {"w": torch.zeros(len(ids), 100_000)}, tmp_path)
    store.scatter(torch.tensor([70, 7]), {"w": torch.ones(2, 100_000)})
    assert (tmp_path / "w.rows").stat().st_size == 1024 * 400_000
    assert 800_000 <= store.disk_bytes() < 1_000_000 + store_files.AHEAD


def test_mapped_pages_that_were_let_go_hold_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(store_files, "RESIDENT", 10)
    store = Store(fresh, tmp_path)
    for c in range(50):
        store.scatter(torch.tensor([c]), rows([c], 1000.0))
    assert store.gather(torch.arange(50))["w"][:, 0].tolist() == [1000.0 + c for c in range(50)]


def test_a_write_that_was_cut_short_is_found(tmp_path, monkeypatch):
    store = kept(tmp_path, 4, 7)
    monkeypatch.setattr(module, "_packed", lambda t: 1 / 0)  # the second part of a write
    with pytest.raises(ZeroDivisionError):
        store.scatter(torch.tensor([4]), rows([4], 2000.0))
    with pytest.raises(ValueError, match="was written to behind its last checkpoint"):
        Store.opened(fresh, tmp_path)


def test_what_is_no_store_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no store here, store.json is missing"):
        Store.opened(fresh, tmp_path)
    kept(tmp_path / "a", 4)
    with pytest.raises(ValueError, match="the folder is not empty; choose another"):
        Store(fresh, tmp_path / "a")
    (tmp_path / "a" / "w.rows").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"w.rows: 3 bytes are no whole number of rows of 16"):
        Store.opened(fresh, tmp_path / "a")
    (tmp_path / "a" / "store.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match="format 1, this version reads format 2"):
        Store.opened(fresh, tmp_path / "a")


def test_a_row_of_dm_pfl_is_its_weights_and_a_bit_for_each() -> None:
    """A layer of 6 x 12, 12 x 8 and 8 x 3 weights: 192 float64, 9 + 12 + 3 bytes of masks, a counter."""
    sim = worlds.simulation(DMPFL())
    assert row_bytes(sim.store.fresh(torch.arange(1))) == 8 * 192 + 9 + 12 + 3 + 4


def header(folder, **changes):
    path = folder / "store.json"
    held = json.loads(path.read_text())
    held["tensors"]["w"] |= changes
    path.write_text(json.dumps(held))


def numbers(name, *values):
    def write(folder):
        (folder / name).write_bytes(np.array(values, np.int64).tobytes())

    return write


def commits(folder, rows):
    (folder / "commits.json").write_text(json.dumps({"format": 2, "rows": {"0": rows}}))


DAMAGE = {
    "no table": (lambda f: (f / "store.json").write_text("[1]"), "format None"),
    "no tensors": (lambda f: (f / "store.json").write_text('{"format": 2}'), "it names no tensors"),
    "brackets": (lambda f: (f / "store.json").write_text("[" * 100_000), "missing or not readable"),
    "a function for a type": (lambda f: header(f, dtype="load"), "'w' has no shape and type"),
    "no shape": (lambda f: header(f, shape=None), "'w' has no shape and type"),
    "a negative shape": (lambda f: header(f, shape=[-2]), "'w' has no shape and type"),
    "a shape past counting": (lambda f: header(f, shape=[2**39, 2**39]), "'w' has no shape and type"),
    "another shape": (lambda f: header(f, shape=[2, 1]), r"w has shape \(2,\) here and \(2, 1\) there"),
    "no undo file": (lambda f: (f / "undo-0.bin").unlink(), r"undo-0\.bin: No such file"),
    "no commits": (lambda f: (f / "commits.json").unlink(), "no store here, commits.json is missing"),
    "no numbers": (lambda f: commits(f, "many"), "commits.json: damaged"),
    "more rows than there are": (lambda f: commits(f, 2000), r"room for 1024 rows, 2000 are in use"),
    "fewer than none": (lambda f: commits(f, -1), "commits.json: damaged"),
    "a client past counting": (numbers("ids.bin", 4, 2**40), r"client 1099511627776 is not in 0\.\."),
    "a client below 0": (numbers("ids.bin", 4, -1), r"client -1 is not in 0\.\."),
    "a client twice": (numbers("ids.bin", 4, 4), "a client has two rows"),
}


@pytest.mark.parametrize(("damage", "told"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_files_are_refused_in_one_line(tmp_path, damage, told):
    kept(tmp_path, 4, 5)
    assert Store.opened(fresh, tmp_path).ids == [4, 5]
    damage(tmp_path)
    with pytest.raises(UserError, match=told) as refused:
        Store.opened(fresh, tmp_path)
    assert "\n" not in str(refused.value)
