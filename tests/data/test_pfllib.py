"""PFLlib's folders, read and written."""

from __future__ import annotations

import contextlib
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from personafl import config, experiment
from personafl.data import Federation, Source
from personafl.data.pfllib import pfllib, read_client_npz, to_pfllib
from tests.data.written import Bomb, recipe_of


def pfllib_file(path: Path, data: Any) -> None:
    """As PFLlib writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as f:
        np.savez_compressed(f, data=data)


def as_pfllib_reads(path: Path) -> dict[str, np.ndarray]:
    """As PFLlib reads it."""
    with path.open("rb") as f:
        return np.load(f, allow_pickle=True)["data"].tolist()


def images(n: int, start: int, **kind: Any) -> dict[str, np.ndarray]:
    x = np.arange(start, start + n * 8, dtype=np.float32).reshape(n, 2, 2, 2)
    return {"x": np.asarray(x, **kind), "y": (start + np.arange(n)) % 3}


def test_pfllibs_folder_is_read_with_its_test_parts(tmp_path: Path) -> None:
    held = {(part, c): images(n, 10 * c + 100 * n) for c in range(11) for part, n in (("train", 3), ("test", 2))}
    for (part, c), data in held.items():
        pfllib_file(tmp_path / part / f"{c}.npz", data)
    (tmp_path / "config.json").write_text('{"num_clients": 11, "num_classes": 5}')
    made = pfllib(tmp_path)
    assert made.names == tuple(map(str, range(11)))  # 2 before 10
    assert made.classes == 5
    assert made.clients is not None and made.test is not None
    for (part, c), data in held.items():
        mine = (made.clients == c) & (made.test == (part == "test"))
        assert np.array_equal(made.x[mine].numpy(), data["x"])
        assert np.array_equal(made.y[mine].numpy(), data["y"])


@pytest.mark.parametrize(
    "data",
    [
        {"x": np.asfortranarray(images(3, 0)["x"]), "y": np.array([0, 1, 2])},
        {"x": images(3, 0)["x"].astype(">f8"), "y": np.array([0, 1, 2], np.int32)},
        {"x": list(images(3, 0)["x"]), "y": [0, 1, 2]},
        {"x": images(3, 0)["x"], "y": [np.int64(0), np.int64(1), np.int64(2)]},
        {"x": images(6, 0)["x"][::2].swapaxes(1, 2), "y": np.array([0.0, 1.0, 2.0])},
    ],
    ids=["fortran", "big-endian", "lists", "numbers", "strided"],
)
def test_arrays_are_read_however_they_lie(tmp_path: Path, data: dict[str, Any]) -> None:
    for part in ("train", "test"):
        pfllib_file(tmp_path / part / "0.npz", data)
    made = pfllib(tmp_path)
    assert np.array_equal(made.x[:3].numpy(), np.asarray(data["x"], np.float32))
    assert made.y.tolist() == [0, 1, 2] * 2


def test_a_hostile_pickle_is_refused_by_name_and_not_run(tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    pfllib_file(tmp_path / "train" / "0.npz", Bomb(sign))
    pfllib_file(tmp_path / "test" / "0.npz", images(1, 0))
    with pytest.raises(ValueError, match=r"0\.npz: not a readable \.npz file: it asks for (posix|nt)\.system"):
        pfllib(tmp_path)
    pfllib_file(tmp_path / "train" / "0.npz", {"x": Bomb(sign), "y": np.zeros(1)})
    with pytest.raises(ValueError, match="refused"):
        pfllib(tmp_path)
    assert not sign.exists()
    as_pfllib_reads(tmp_path / "train" / "0.npz")  # without our reader it would have run
    assert sign.exists()


class Calls:
    """Pickled as a call of something that is only an argument of other calls."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return np.ndarray, ((10,),)


def edited(path: Path, change: Any) -> None:
    """The file again with its pickle changed."""
    with zipfile.ZipFile(path) as archive:
        raw = archive.read("data.npy")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.npy", change(raw))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-40], "not a readable .npz file"),
        (lambda raw: raw[:100], "npz"),
        (lambda raw: raw[: raw.index(b"\x80")] + pickle.dumps({"x": 1, "y": 2}), "must be a dict of x and y"),
        (lambda raw: raw[: raw.index(b"\x80")] + pickle.dumps(Calls()), "npz"),
        (lambda raw: raw.replace(b"f4", b"O8"), "not a readable .npz file: it has a damaged array"),
        (lambda raw: raw.replace(b"f4", b"f8"), "not a readable .npz file: it has an array of shape"),
        (lambda raw: raw.replace(b"f4", b"V4"), "not of numbers"),
        (lambda raw: raw.replace(b"K\x03K\x02K\x02K\x02", b"K\x03K\xffK\x02K\x02"), "an array of shape"),
    ],
    ids=["cut short", "no pickle", "no arrays", "a call", "objects", "longer numbers", "records", "more rows"],
)
def test_a_damaged_pickle_is_refused_in_one_line(tmp_path: Path, change: Any, message: str) -> None:
    for part in ("train", "test"):
        pfllib_file(tmp_path / part / "0.npz", images(3, 0))
    edited(tmp_path / "train" / "0.npz", change)
    with pytest.raises(ValueError, match=message) as refused:
        pfllib(tmp_path)
    assert "\n" not in str(refused.value)


def test_whatever_is_changed_in_a_file_it_is_read_or_refused(tmp_path: Path) -> None:
    path, draw = tmp_path / "0.npz", np.random.default_rng(0)
    pfllib_file(path, {"x": images(3, 0)["x"], "y": [np.int64(0), 1, 2]})
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        raw = archive.read("data.npy")
    for i in range(150):
        changed = bytearray(raw if i % 2 else whole)
        for place in draw.integers(0, len(changed), draw.integers(1, 4)):
            changed[place] = draw.integers(256)
        path.write_bytes(changed)
        if i % 2:
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("data.npy", bytes(changed))
        with contextlib.suppress(ValueError):
            x, y = read_client_npz(path)
            assert x.dtype.kind in "fiub" and y.dtype.kind in "fiub"


def test_an_incomplete_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match=r"no train/\*\.npz in it"):
        pfllib(tmp_path)
    pfllib_file(tmp_path / "train" / "0.npz", images(1, 0))
    with pytest.raises(ValueError, match=r"client 0 has train/0\.npz but no test/0\.npz"):
        pfllib(tmp_path)
    pfllib_file(tmp_path / "test" / "0.npz", {"x": np.zeros(2)})
    with pytest.raises(ValueError, match=r"test.0\.npz: data must be a dict of x and y"):
        pfllib(tmp_path)
    pfllib_file(tmp_path / "test" / "0.npz", {"x": np.array([[1, 2], "a"], object), "y": np.zeros(2)})
    with pytest.raises(ValueError, match="x must be an array of numbers"):
        pfllib(tmp_path)
    pfllib_file(tmp_path / "test" / "0.npz", images(1, 0))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not a readable configuration"):
        pfllib(tmp_path)


def test_what_is_written_for_pfllib_comes_back_exactly(tmp_path: Path) -> None:
    recipe = config.load(None, ["data.num_clients=6", "data.alpha=0.5", "data.validation_share=0.1"])
    fed = experiment.federation(recipe)
    to_pfllib(fed, tmp_path / "out", partition="dirichlet", alpha=0.5)
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    statistic = said.pop("Size of samples for labels in clients")
    assert [dict(client) for client in statistic] == [
        {k: int(n) for k, n in enumerate(row) if n} for row in fed.class_counts()
    ]
    assert said == {
        "num_clients": 6, "num_classes": 10, "non_iid": True, "balance": False, "partition": "dir", "alpha": 0.5,
        "batch_size": 10,
    }  # fmt: skip
    back = pfllib(tmp_path / "out")
    assert back.clients is not None and back.test is not None
    for c in range(6):
        for part, splits in (("train", ("train", "validation")), ("test", ("test",))):
            held = [fed.examples(s, torch.tensor([c])) for s in splits]
            rows = torch.cat([h.rows[0, : int(h.count)] for h in held])
            mine = (back.clients == c) & (back.test == (part == "test"))
            assert torch.equal(back.x[mine], fed.source.x[rows])
            assert torch.equal(back.y[mine], fed.source.y[rows])
            theirs = as_pfllib_reads(tmp_path / "out" / part / f"{c}.npz")
            assert theirs["x"].dtype == np.float32 and theirs["y"].dtype == np.int64
            assert np.array_equal(theirs["x"], fed.source.x[rows].numpy())
    with pytest.raises(ValueError, match="not an empty folder"):
        to_pfllib(fed, tmp_path / "out")


def test_a_pfllib_folder_keeps_its_split_when_it_is_dealt_and_written_again(tmp_path: Path) -> None:
    for c in range(3):
        for part, n in (("train", 6), ("test", 2)):
            pfllib_file(tmp_path / "in" / part / f"{c}.npz", images(n, 50 * c + n))
    fed = experiment.federation(recipe_of(str(tmp_path / "in"), official_test="dealt"))
    assert fed.sizes("train").tolist() == [6] * 3
    assert fed.sizes("test").tolist() == [2] * 3
    to_pfllib(fed, tmp_path / "out", partition="natural")
    for c in range(3):
        for part in ("train", "test"):
            one, two = (as_pfllib_reads(tmp_path / home / part / f"{c}.npz") for home in ("in", "out"))
            orders = [np.argsort(d["x"][:, 0, 0, 0]) for d in (one, two)]  # training rows are shuffled
            for name in "xy":
                assert np.array_equal(one[name][orders[0]], two[name][orders[1]])


def test_bytes_are_written_as_the_models_see_them(tmp_path: Path) -> None:
    x = torch.tensor([0, 51, 102, 255], dtype=torch.uint8).view(4, 1, 1, 1)
    source = Source("bytes", x, torch.zeros(4, dtype=torch.int64), 1)
    to_pfllib(Federation.build(source, [np.arange(4)], 0), tmp_path / "out")
    found = np.concatenate([as_pfllib_reads(tmp_path / "out" / p / "0.npz")["x"] for p in ("train", "test")])
    assert sorted(found.ravel().tolist()) == pytest.approx([0, 0.2, 0.4, 1.0])
