"""A client's data grow, shrink and change: rows stay in the part they were drawn for."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from personafl import Source, config
from personafl.core.errors import UserError
from personafl.data.federated import Split, split_client
from personafl.deployment import local_data
from personafl.deployment.local_data import LocalData
from personafl.deployment.settings import ClientSettings
from personafl.deployment.stored_split import StoredSplit, digest_rows

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
EIGHTY = [float(i) for i in range(80)]
HERE = "tests.deployment.test_stored_split"


class Ward:
    """A client whose rows are told apart by the number in their first column."""

    def __init__(self, root: Path, **data: Any) -> None:
        self.root, self.file = root, root / "split"
        self.recipe = config.load({"data": {"test_share": 0.25, **data}, "algorithms": [{"name": "fedavg"}]})

    def holds(self, numbers: list[float], labels: dict[float, int] | None = None, name: str = "a.npz") -> None:
        home = self.root / "data"
        home.mkdir(exist_ok=True)
        x = np.array([[n, 1.0] for n in numbers], np.float32)
        y = np.array([(labels or {}).get(n, int(n) % 3) for n in numbers])
        np.savez(home / name, x=x, y=y)

    def load(self, data: str = "") -> LocalData:
        """What the client has for its next message; as a node does, it stores how rows were divided."""
        settings = ClientSettings(id="ward", data=data or str(self.root / "data"))
        found = local_data.load(settings, self.recipe, 3, StoredSplit.read(self.file))
        if found.split is not None:
            found.split.write(self.file)
        return found

    def parts(self, data: str = "") -> dict[Split, list[float]]:
        return parts_of(self.load(data))


def parts_of(found: LocalData) -> dict[Split, list[float]]:
    """The numbers of each part's rows, in their order."""
    return {part: found.source.x[found.rows[part]].flatten(1)[:, 0].tolist() for part in SPLITS}


@pytest.fixture
def ward(tmp_path: Path) -> Ward:
    return Ward(tmp_path)


def test_the_first_split_is_the_simulator_s_and_stays(ward: Ward) -> None:
    ward.holds(EIGHTY)
    drawn = split_client(3, np.arange(80), 0, 0.25, 0.0)
    first = ward.parts()
    assert first == {part: [float(i) for i in drawn[part]] for part in SPLITS}
    written = ward.file.read_bytes()
    again = ward.load()
    assert parts_of(again) == first and again.split is None  # nothing new to store
    assert ward.file.read_bytes() == written


@pytest.mark.parametrize("where", ["behind", "between", "before", "in another file"])
def test_rows_that_come_later_leave_the_others_where_they_are(where: str, ward: Ward) -> None:
    ward.holds(EIGHTY)
    first = ward.parts()
    later = [100.0 + i for i in range(40)]
    mixed = [n for pair in itertools.zip_longest(EIGHTY, later) for n in pair if n is not None]
    orders = {"behind": EIGHTY + later, "between": mixed, "before": (later + EIGHTY)[::-1], "in another file": EIGHTY}
    ward.holds(orders[where])
    if where == "in another file":
        ward.holds(later, name="0-comes-first.npz")
    then = ward.parts()
    assert {part: then[part][: len(first[part])] for part in SPLITS} == first  # also in the order of before
    assert [len(then[part]) for part in SPLITS] == [90, 0, 30]  # a quarter of 120
    assert sorted(itertools.chain(*then.values())) == EIGHTY + later
    assert ward.parts() == then


def test_a_share_is_kept_as_rows_come_one_by_one(tmp_path: Path) -> None:
    ward = Ward(tmp_path, validation_share=0.1)
    before: dict[Split, list[float]] = {part: [] for part in SPLITS}
    for count in range(10, 50):
        ward.holds(EIGHTY[:count])
        found = ward.parts()
        assert all(found[part][: len(before[part])] == before[part] for part in SPLITS)
        assert abs(len(found["test"]) - count / 4) <= 1 and abs(len(found["validation"]) - count / 10) <= 1
        before = found


def test_rows_that_are_removed_are_missing_from_their_part_and_may_come_back(ward: Ward) -> None:
    ward.holds(EIGHTY)
    first = ward.parts()
    ward.holds(EIGHTY[40:])
    assert ward.parts() == {part: [n for n in first[part] if n >= 40] for part in SPLITS}
    ward.holds(EIGHTY)
    assert ward.parts() == first


def test_data_that_are_wholly_other_are_divided_afresh(ward: Ward, caplog: pytest.LogCaptureFixture) -> None:
    ward.holds(EIGHTY)
    first = ward.parts()
    assert not caplog.records
    ward.holds([n + 1000 for n in EIGHTY])
    then = ward.parts()
    assert then == {part: [n + 1000 for n in first[part]] for part in SPLITS}  # the simulator's draw, again
    assert "none of its rows is one that was divided before" in caplog.text
    ward.holds(EIGHTY)
    assert ward.parts() == first


def test_a_corrected_label_does_not_move_a_row(ward: Ward) -> None:
    ward.holds(EIGHTY)
    first = ward.parts()
    ward.holds(EIGHTY[::-1], labels=dict.fromkeys(EIGHTY[::2], 2))
    assert ward.parts() == first
    assert ward.parts() == first and ward.load().split is None  # the new labels are stored


def test_a_copy_of_a_row_is_in_the_part_of_the_row(ward: Ward) -> None:
    ward.holds(EIGHTY)
    first = ward.parts()
    ward.holds(EIGHTY * 3, labels={5.0: 1})
    then = ward.parts()
    assert {part: sorted(then[part]) for part in SPLITS} == {part: sorted(first[part] * 3) for part in SPLITS}


def test_new_copies_of_one_another_are_in_one_part(ward: Ward) -> None:
    ward.holds(EIGHTY)
    ward.parts()
    ward.holds(EIGHTY + [100.0 + i // 4 for i in range(80)])
    then = ward.parts()
    new = {part: {n for n in then[part] if n >= 100} for part in SPLITS}
    assert len(new["train"]) + len(new["test"]) == 20 and not new["train"] & new["test"]
    assert len(then["test"]) == 40


def test_equal_rows_that_were_divided_are_as_many_in_each_part_as_before(ward: Ward) -> None:
    """Three kinds of rows: after the first draw each kind is in both parts, as in a simulation."""
    kinds = [float(i % 3) for i in range(80)]
    ward.holds(kinds)
    first = ward.parts()
    assert set(first["train"]) == set(first["test"]) == {0.0, 1.0, 2.0}
    ward.holds(sorted(kinds))
    assert ward.parts() == first
    ward.holds(kinds + [1.0] * 40)  # these are drawn one by one, so that the share of test rows stays
    assert [len(ward.parts()[part]) for part in SPLITS] == [90, 0, 30]


def test_without_test_rows_or_training_rows_nothing_is_made_of_the_others(ward: Ward) -> None:
    ward.holds(EIGHTY)
    first = ward.parts()
    for part, name in (("train", "test"), ("test", "training")):
        ward.holds(first[part])  # type: ignore[index]
        with pytest.raises(UserError, match=f"data: no {name} row is left of those that were divided before"):
            ward.load()
    ward.holds([*first["train"], 100.0])
    assert ward.parts()["test"] == [100.0]


def test_a_split_that_is_lost_is_drawn_as_the_first_was(ward: Ward) -> None:
    ward.holds(EIGHTY)
    first = ward.parts()
    ward.file.unlink()
    assert ward.parts() == first


@pytest.mark.parametrize("damage", ["cut", "a bit", "empty", "another's", "no header", "a folder"])
def test_a_damaged_split_is_not_taken_for_a_lost_one(damage: str, ward: Ward) -> None:
    ward.holds(EIGHTY)
    ward.parts()
    whole = ward.file.read_bytes()
    flipped = bytearray(whole)
    flipped[-40] ^= 1
    made = {
        "cut": whole[:-32],
        "a bit": bytes(flipped),
        "empty": b"",
        "another's": b"[1, 2]\n",
        "no header": whole[whole.index(b"\n") :],
    }
    if damage == "a folder":
        ward.file.unlink()
        ward.file.mkdir()
    else:
        ward.file.write_bytes(made[damage])
    with pytest.raises(UserError, match=r"the file is damaged, so it is not known which|cannot be read"):
        ward.load()


def test_parts_that_the_data_come_with_are_left_alone(tmp_path: Path) -> None:
    """Without a validation share nothing is drawn, so nothing is stored; else the training part is divided."""
    for share in (0.0, 0.25):
        ward = Ward(tmp_path, validation_share=share)
        ward.holds(EIGHTY[:40], name="train.npz")
        ward.holds(EIGHTY[40:], name="test.npz")
        first = ward.parts()
        assert first["test"] == EIGHTY[40:] and ward.file.exists() == (share > 0)
    ward.holds(EIGHTY[:40] + [100.0 + i for i in range(40)], name="train.npz")
    then = ward.parts()
    assert then["validation"][:10] == first["validation"] and then["train"][:30] == first["train"]
    assert [len(then[part]) for part in SPLITS] == [60, 20, 40]


GROUPS = 12


def grouped() -> Source:
    """Rows in groups of five."""
    x = torch.arange(GROUPS * 5.0).reshape(-1, 1)
    return Source("groups", x, torch.zeros(len(x), dtype=torch.int64), 2, groups=np.repeat(np.arange(GROUPS), 5))


def test_groups_are_not_split_apart_by_new_rows(ward: Ward, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = grouped()
    first_rows = np.arange(60) % 5 < 3  # three of each group at first
    assert whole.groups is not None

    def some() -> Source:
        keep = torch.from_numpy(first_rows)
        groups = np.repeat(np.arange(GROUPS), 5)[first_rows]
        return dataclasses.replace(whole, x=whole.x[keep], y=whole.y[keep], groups=groups)

    monkeypatch.setattr(f"{HERE}.grouped", some)
    first = ward.parts(f"{HERE}:grouped")
    assert len(first["test"]) == 9  # three groups of three of twelve groups
    monkeypatch.setattr(f"{HERE}.grouped", lambda: whole)
    then = ward.parts(f"{HERE}:grouped")
    groups = {part: {int(n) // 5 for n in then[part]} for part in SPLITS}
    assert groups == {part: {int(n) // 5 for n in first[part]} for part in SPLITS}
    assert [len(then[part]) for part in SPLITS] == [45, 0, 15]


# Digests


def test_a_row_is_known_by_its_values_alone() -> None:
    one = Source("a", torch.tensor([[1.0, 0.0]]), torch.tensor([1]), 2, class_names=("ant", "bee"))
    two = Source("b", torch.tensor([[2.0, 3.0], [1.0, -0.0]]), torch.tensor([0, 2]), 3, class_names=("ant", "b", "bee"))
    assert digest_rows(one)[0] == digest_rows(two)[1] != digest_rows(two)[0]
    other = dataclasses.replace(one, y=torch.tensor([0]))
    assert digest_rows(other)[0][:16] == digest_rows(one)[0][:16]  # that of the inputs
    assert digest_rows(other)[0][16:] != digest_rows(one)[0][16:]


def test_a_filled_value_counts_as_missing(tmp_path: Path) -> None:
    """The mean that fills a missing value changes as rows come."""
    ward = Ward(tmp_path, missing="mean")
    home = tmp_path / "data"
    home.mkdir()
    lines = [f"{i},{'' if i % 4 else i},{i % 2}" for i in range(40)]
    (home / "a.csv").write_text("\n".join(["number,part,label", *lines[:20]]))
    first = ward.parts()
    (home / "a.csv").write_text("\n".join(["number,part,label", *lines]))
    then = ward.parts()
    assert {part: then[part][: len(first[part])] for part in SPLITS} == first and len(then["test"]) == 10


def test_neither_new_categories_nor_the_order_of_columns_move_a_row(tmp_path: Path) -> None:
    """A new category is a new feature of every row."""
    ward = Ward(tmp_path)
    home = tmp_path / "data"
    home.mkdir()
    rows = [(str(i), "east" if i % 2 else "west", str(i % 3)) for i in range(60)]
    names = ("number", "ward", "label")
    (home / "a.csv").write_text("\n".join(",".join(row) for row in [names, *rows[:40]]))
    first = ward.parts()
    more = [(n, "cellar" if int(n) >= 50 else kind, label) for n, kind, label in rows]
    (home / "a.csv").write_text("\n".join(",".join((n, kind, label)) for n, kind, label in [names, *more]))
    then = ward.parts()
    assert {part: then[part][: len(first[part])] for part in SPLITS} == first and len(then["test"]) == 15
    (home / "a.csv").write_text("\n".join(",".join((kind, label, n)) for n, kind, label in [names, *more]))
    found = ward.load()
    assert found.source.feature_names == ("ward=cellar", "ward=east", "ward=west", "number")
    assert {part: found.source.x[found.rows[part]][:, 3].tolist() for part in SPLITS} == then
