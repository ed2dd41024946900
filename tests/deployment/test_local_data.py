"""A client's own data: folders, functions, and what is made of their labels."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from personafl import Source, config
from personafl.core.errors import UserError
from personafl.data.federated import Split
from personafl.deployment import local_data
from personafl.deployment.settings import ClientSettings
from tests.deployment import worlds

HERE = "tests.deployment.test_local_data"
X, Y = np.arange(40, dtype=np.float32).reshape(20, 2), np.arange(20) % 4
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def loaded(data: str, client: int = 0, **changes: Any) -> local_data.LocalData:
    made = config.load({"data": changes, "algorithms": [{"name": "fedavg"}]})
    return local_data.load(ClientSettings(id="ward", data=data), made, client)


def rows(found: local_data.LocalData, split: Any) -> list[float]:
    """The first numbers of a part's examples, which tell rows apart."""
    return sorted(found.source.x[found.rows[split]].flatten(1)[:, 0].tolist())


# Functions


def undivided() -> Any:
    return Source("own", torch.from_numpy(X), torch.from_numpy(Y), 4)


def halves() -> Any:
    return (X[:15], Y[:15]), (X[15:], Y[15:])


def named(client: str) -> Any:
    assert client == "ward"
    return halves()


def mapped() -> Any:
    return dict(zip(("train", "test"), halves(), strict=True))


def data_sets() -> Any:
    return tuple(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in halves())


def mapped_data_sets() -> Any:
    return dict(zip(("train", "test"), data_sets(), strict=True))


def spoken() -> Any:
    words = np.array(["cat", "dog", "ant", "bee"])[Y]
    return (X[:15], words[:15]), (X[15:], words[15:])


def a_number() -> Any:
    return 5


def ragged() -> Any:
    return (X[:15], Y[:14]), (X[15:], Y[15:])


def nothing() -> Any:
    return (X[:0], Y[:0]), (X, Y)


not_a_function = 5


@pytest.mark.parametrize("name", ["halves", "named", "mapped", "data_sets", "mapped_data_sets"])
def test_a_function_gives_a_training_and_a_test_part(name: str) -> None:
    found = loaded(f"{HERE}:{name}")
    assert rows(found, "test") == X[15:, 0].tolist() and rows(found, "train") == X[:15, 0].tolist()
    assert found.size("validation") == 0 and found.form().classes == 4 and found.form().shape == (2,)


def test_a_source_is_divided_as_a_client_of_that_number_is() -> None:
    found = [loaded(f"{HERE}:undivided", n, test_share=0.25, validation_share=0.25) for n in (0, 0, 1)]
    assert [found[0].size(s) for s in SPLITS] == [10, 5, 5]
    assert rows(found[0], "test") == rows(found[1], "test") != rows(found[2], "test")
    assert sorted(v for s in SPLITS for v in rows(found[0], s)) == X[:, 0].tolist()


def test_a_client_without_test_samples_needs_a_test_share() -> None:
    common = {"official_test": "global", "test_share": 0.0}
    assert loaded(f"{HERE}:halves", **common).size("train") == 15
    with pytest.raises(UserError, match=r"no test samples, and with data\.test_share=0 none are split off"):
        loaded(f"{HERE}:undivided", **common)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a_number", "gave int; expected"),
        ("ragged", "client ward"),
        ("not_a_function", "that is not a function"),
        ("absent", "absent"),
    ],
)
def test_what_a_function_should_not_give_is_refused(name: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        loaded(f"{HERE}:{name}")


# Labels


def test_text_labels_are_numbered_as_agreed() -> None:
    found = loaded(f"{HERE}:spoken", normalize="none")
    form = found.form()
    assert form.class_names == ("ant", "bee", "cat", "dog")
    agreed = dataclasses.replace(form, classes=6, class_names=("zebra", "dog", "cat", "bee", "ant", "yak"))
    fitted = found.fitted(agreed, None)
    assert agreed.class_names is not None
    words = [agreed.class_names[i] for i in fitted.source.y.tolist()]
    assert words == [["cat", "dog", "ant", "bee"][i] for i in Y] and fitted.source.classes == 6
    fewer = dataclasses.replace(form, classes=1, class_names=("cat",))
    with pytest.raises(UserError, match="its label 'ant' is none of those agreed on"):
        found.fitted(fewer, None)


def test_numbers_beyond_those_agreed_on_are_refused() -> None:
    found = loaded(f"{HERE}:halves")
    with pytest.raises(UserError, match="it has 4 classes, 3 were agreed on"):
        found.fitted(dataclasses.replace(found.form(), classes=3), None)
    with pytest.raises(UserError, match=r"its examples have shape \(2,\), others have \(3,\)"):
        found.fitted(dataclasses.replace(found.form(), shape=(3,)), None)


# Folders


def test_files_of_a_folder_are_one_client(tmp_path: Path) -> None:
    np.savez(tmp_path / "monday.npz", x=X[:12], y=Y[:12])
    np.savez(tmp_path / "tuesday.npz", x=X[12:], y=Y[12:])
    found = loaded(str(tmp_path), test_share=0.25)
    assert [found.size(s) for s in SPLITS] == [15, 0, 5]
    assert sorted(rows(found, "train") + rows(found, "test")) == X[:, 0].tolist()


@pytest.mark.parametrize("inside", [False, True], ids=["files", "folders"])
def test_train_and_test_are_its_parts(inside: bool, tmp_path: Path) -> None:
    for name, (x, y) in zip(("train", "test"), halves(), strict=True):
        path = tmp_path / name / "day.npz" if inside else tmp_path / f"{name}.npz"
        path.parent.mkdir(exist_ok=True)
        np.savez(path, x=x, y=y)
    found = loaded(str(tmp_path))
    assert rows(found, "test") == X[15:, 0].tolist() and rows(found, "train") == X[:15, 0].tolist()


def test_pictures_are_in_a_folder_for_each_class(tmp_path: Path) -> None:
    for i in range(12):
        home = tmp_path / ("ill" if i % 2 else "well")
        home.mkdir(exist_ok=True)
        Image.fromarray(np.full((4, 4), i, np.uint8)).save(home / f"{i}.png")
    found = loaded(str(tmp_path), test_share=0.25)
    assert found.form().class_names == ("ill", "well") and found.form().shape == (1, 4, 4)
    drawn = found.source.x[:, 0, 0, 0].long() % 2  # odd ones are ill
    assert torch.equal(found.source.y, 1 - drawn)


def test_columns_have_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,dose,kind\n1,2,x\n3,4,y\n5,6,x\n7,8,y\n")
    found = loaded(str(tmp_path), label=["kind"], test_share=0.25)
    assert found.form().feature_names == ("age", "dose") and found.form().class_names == ("x", "y")


@pytest.mark.parametrize(
    ("names", "why"),
    [(["train.npz"], "has train alone"), (["train.npz", "test.npz", "more.npz"], "beside train and test")],
)
def test_a_folder_that_is_neither_is_refused(names: list[str], why: str, tmp_path: Path) -> None:
    for name in names:
        np.savez(tmp_path / name, x=X, y=Y)
    with pytest.raises(UserError, match=why):
        loaded(str(tmp_path))


def test_no_training_samples_are_refused() -> None:
    with pytest.raises(UserError):
        loaded(f"{HERE}:nothing")


def test_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        loaded(str(tmp_path / "x"))


# Trials


def test_a_client_of_the_recipe_has_the_simulator_s_rows() -> None:
    text = worlds.recipe("fedavg", data={"validation_share": 0.2})
    fed = worlds.simulation(text).federation
    made = config.load(tomllib.loads(text))
    for n in range(4):
        found = local_data.load(ClientSettings(id="c", data=f"recipe:{n}"), made, 0)
        for split in SPLITS:
            theirs = fed.source.x[fed.rows(split, n)].float()
            assert torch.equal(found.source.x[found.rows[split]], theirs)
    for bad in ("recipe:4", "recipe:-1", "recipe:x", "recipe:"):
        with pytest.raises(UserError, match=r"is divided over clients 0\.\.3 here"):
            local_data.load(ClientSettings(id="c", data=bad), made, 0)


def test_what_inputs_are_normalised_by_is_of_training_rows_alone() -> None:
    found = loaded(f"{HERE}:halves", validation_share=0.2)
    train = found.source.x[found.rows["train"]].double()
    assert len(train) == 12 and found.size("validation") == 3 and found.size("test") == 5
    m = found.moments()
    assert m.count == 12
    np.testing.assert_allclose(m.mean, train.mean(0).numpy(), rtol=1e-12)  # float64 sums of 12 whole numbers
    np.testing.assert_allclose(m.squares, ((train - train.mean(0)) ** 2).sum(0).numpy(), rtol=1e-12)
    assert not np.allclose(m.mean, X.mean(0))
