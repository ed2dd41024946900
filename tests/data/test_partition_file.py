"""Partitions as files: the same federation again, or one line that says why not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from personafl import config, experiment
from personafl.data import Federation, Source, federated, partition_file

SOURCE = Source("toy", torch.arange(40.0).unsqueeze(1), torch.arange(40) % 4, 4)


def built(**more: Any) -> Federation:
    parts = [np.arange(0, 16), np.arange(16, 26), np.arange(26, 36)]
    return Federation.build(SOURCE, parts, 5, validation_share=0.2, notes={"samples_moved": 2}, unseen=1, **more)


def saved(path: Path, **changes: Any) -> Path:
    """The file of the federation, with some of its entries changed."""
    partition_file.save(built(), path / "p.json", {"alpha": 0.3})
    held = json.loads((path / "p.json").read_text())
    (path / "p.json").write_text(json.dumps(held | changes))
    return path / "p.json"


def test_what_is_saved_comes_back_the_same(tmp_path: Path) -> None:
    fed = built()
    back = partition_file.load(saved(tmp_path), SOURCE)
    assert back.digest() == fed.digest()
    assert (back.num_clients, back.unseen, back.notes) == (2, 1, {"samples_moved": 2})
    for split in partition_file.SPLITS:
        one, two = (f.examples(split, torch.arange(3)) for f in (fed, back))
        assert torch.equal(one.rows, two.rows) and torch.equal(one.count, two.count)


def test_a_common_test_set_comes_back(tmp_path: Path) -> None:
    parts = [np.arange(0, 16), np.arange(16, 26)]
    fed = Federation.build(SOURCE, parts, 5, test_share=0.0, official=np.arange(26, 36))
    partition_file.save(fed, tmp_path / "p.json")
    back = partition_file.load(tmp_path / "p.json", SOURCE)
    assert back.digest() == fed.digest()
    assert [back.rows("test", c).tolist() for c in range(2)] == [list(range(26, 36))] * 2


def test_splits_drawn_late_are_saved_as_they_would_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federated, "LAZY_FROM", 2)
    late = built()
    found = partition_file.save(late, tmp_path / "p.json")
    monkeypatch.undo()
    assert late.digest() != found == built().digest()
    assert partition_file.load(tmp_path / "p.json", SOURCE).digest() == found


def test_clients_images_are_corrupted_as_without_the_file(tmp_path: Path) -> None:
    more = ["data.num_clients=3", "data.corruption=per-client", "data.corruption_severity=2"]
    first = experiment.federation(config.load(None, more))
    partition_file.save(first, tmp_path / "p.json")
    again = experiment.federation(config.load(None, [*more[1:], f"data.partition={tmp_path / 'p.json'}"]))
    assert torch.equal(first.source.x, again.source.x)
    assert not torch.equal(first.source.x, experiment.federation(config.load(None, more[:1])).source.x)


def test_a_test_part_of_no_client_comes_along(tmp_path: Path) -> None:
    fed = built(official=np.arange(36, 40))
    partition_file.save(fed, tmp_path / "p.json")
    back = partition_file.load(tmp_path / "p.json", SOURCE)
    assert back.official is not None and back.official.tolist() == [36, 37, 38, 39]


def test_the_file_tells_people_what_it_is(tmp_path: Path) -> None:
    held = json.loads(saved(tmp_path).read_text())
    assert (held["format"], held["dataset"], held["examples"]) == (1, "toy", 40)
    assert held["data"] == {"alpha": 0.3}
    assert held["hash"] == built().digest()
    assert [len(r) for r in held["clients"]["train"]] == [16 - 4 - 3, 10 - 2 - 2, 10 - 2 - 2]  # 25 % and 20 % less


def test_labels_decide_whether_it_is_the_same_data(tmp_path: Path) -> None:
    path = saved(tmp_path)
    renamed = dataclasses.replace(SOURCE, name="moved")
    assert partition_file.load(path, renamed).digest() == built().digest()
    other = dataclasses.replace(SOURCE, name="other", y=SOURCE.y.flip(0))
    with pytest.raises(
        ValueError, match=r"p\.json: divides toy \(40 examples\), not other \(40 examples\): its labels"
    ):
        partition_file.load(path, other)


def held(train: Any = None, validation: Any = None, test: Any = None) -> dict[str, Any]:
    """Clients of a file, one split of them replaced."""
    fed = built()
    out = {s: [fed.rows(s, c).tolist() for c in range(3)] for s in partition_file.SPLITS}
    given = {"train": train, "validation": validation, "test": test}
    return {"clients": out | {s: v for s, v in given.items() if v is not None}}


TRAIN = held()["clients"]["train"]
TEST = held()["clients"]["test"]

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "format": ({"format": 2}, r"not a partition file of format 1 \(format: 2\)"),
    "examples": ({"examples": 41}, "divides toy"),
    "labels": ({"labels": 3}, "'labels' is missing or of the wrong kind"),
    "unseen": ({"unseen": True}, "'unseen' is missing or of the wrong kind"),
    "all unseen": ({"unseen": 3}, "3 of 3 clients held out"),
    "negative unseen": ({"unseen": -1}, "-1 of 3 clients held out"),
    "notes": ({"notes": {"a": "b"}}, "notes must be whole numbers"),
    "clients": ({"clients": []}, "'clients' is missing or of the wrong kind"),
    "no test": ({"clients": {"train": TRAIN, "validation": [[]] * 3}}, "no list of clients for test"),
    "fewer": (held(test=TEST[:2]), "3 clients in train, 3 clients in validation, 2 clients in test: must be as many"),
    "text": (held(train=["0", *TRAIN[1:]]), "train rows of client 0 must be a list of whole numbers"),
    "fractions": (held(train=[[0.5], *TRAIN[1:]]), "train rows of client 0 must be a list of whole numbers"),
    "truth": (held(train=[[True], *TRAIN[1:]]), "train rows of client 0 must be a list of whole numbers"),
    "beyond": (held(train=[[40], *TRAIN[1:]]), r"client 0 holds row 40 in train; rows are 0\.\.39"),
    "negative": (held(train=[*TRAIN[:2], [-1]]), "client 2 holds row -1 in train"),
    "huge": (held(train=[[10**30], *TRAIN[1:]]), "client 0 holds row 1000"),
    "two clients": (
        held(train=[[*TRAIN[0], TRAIN[1][0]], *TRAIN[1:]]),
        "in train of client 0 and in train of client 1",
    ),
    "two splits": (held(test=[[*TEST[0], TRAIN[0][0]], *TEST[1:]]), "in train of client 0 and in test of client 0"),
    "twice": (held(train=[TRAIN[0] * 2, *TRAIN[1:]]), "in train of client 0 and in train of client 0"),
    "official": ({"official": [TRAIN[2][0]]}, "in train of client 2 and in the official test rows"),
    "official rows": ({"official": [99]}, "holds row 99 in official"),
    "bare": (held(train=[[], *TRAIN[1:]]), "client 0 has no train samples"),
    "untested": (held(test=[TEST[0], [], TEST[2]]), "client 1 has no test samples"),
    "moved": (held(train=[TRAIN[0][::-1], *TRAIN[1:]]), r"its hash is \w{16} but its rows give \w{16}: damaged"),
    "hash": ({"hash": "0" * 16}, "its hash is 0000000000000000 but"),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_a_file_that_cannot_be_true_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    changes, message = WRONG[case]
    with pytest.raises(ValueError, match=message) as refused:
        partition_file.load(saved(tmp_path, **changes), SOURCE)
    assert "p.json: " in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{", '{"format": 1}', "[" * 100_000, "\xff", "9" * 5000, '{"format": NaN}'],
    ids=["empty", "list", "null", "cut", "bare", "deep", "latin", "long", "nan"],
)
def test_what_is_no_partition_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="not a partition file") as refused:
        partition_file.load(tmp_path / "p.json", SOURCE)
    assert "\n" not in str(refused.value)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    for end in range(0, len(whole), 7):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="not a partition file"):
            partition_file.load(path, SOURCE)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no\.json: no such file; personafl partition RECIPE --save .* makes one"):
        partition_file.load(tmp_path / "no.json", SOURCE)
    with pytest.raises(ValueError, match="cannot be read"):
        partition_file.load(tmp_path, SOURCE)
