"""Which files are whose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from personafl.core.errors import UserError
from personafl.data.client_files import find_clients, listed, natural_order

KINDS = (".csv", ".npz")


def put(home: Path, *names: str) -> Path:
    for name in names:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("")
    return home


def refusal(home: Path) -> str:
    with pytest.raises(UserError) as refused:
        find_clients(home, KINDS)
    return str(refused.value).replace(str(home), "HOME")


def test_numbers_in_names_count_as_numbers() -> None:
    names = ["b", "a-10", "a-2", "10", "9", "a"]
    assert sorted(names, key=natural_order) == ["9", "10", "a", "a-2", "a-10", "b"]


def test_a_client_is_a_file_or_a_folder_of_files_in_natural_order(tmp_path: Path) -> None:
    put(tmp_path, "c-10.csv", "c-2/day-10.csv", "c-2/day-9.CSV", "c-2/notes.txt", "c-3.npz", "README.md")
    found = find_clients(tmp_path, KINDS)
    assert [c.name for c in found] == ["c-2", "c-3", "c-10"]
    assert [p.name for p in found[0].files] == ["day-9.CSV", "day-10.csv"]


def test_folders_within_a_client_s_folder_are_classes(tmp_path: Path) -> None:
    (client,) = find_clients(put(tmp_path, "a/dog/1.png", "a/cat/1.png"), KINDS)
    assert ([p.name for p in client.classes], client.files) == (["cat", "dog"], ())


def test_hidden_files_are_left_alone(tmp_path: Path) -> None:
    put(tmp_path, "a.csv", ".b.csv", ".git/c.csv", "d/e.csv", "d/.f.csv")
    (tmp_path / ".loop").symlink_to(".loop")
    assert [(c.name, len(c.files)) for c in find_clients(tmp_path, KINDS)] == [("a", 1), ("d", 1)]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.csv/b.csv"], "HOME/a.csv: named like a .csv file, but it is a folder"),
        (["a/b.csv/c.csv"], "HOME/a/b.csv: named like a .csv file, but it is a folder"),
        (["a.csv", "a.npz"], "HOME: a.csv and a.npz name the same client"),
        (["a.csv", "a/b.csv"], "HOME: a and a.csv name the same client"),
        (["a/b.csv", "a/c/d.csv"], "HOME/a/c: a folder beside the files of client a"),
        (["a/notes.txt"], "HOME/a: nothing that can be read in it; possible are .csv, .npz"),
        (["notes.txt"], "HOME: no client's file in it; possible are .csv, .npz, a folder"),
        (["1.png"], "HOME/1.png: a picture must lie in a folder named for its class"),
        (["a/1.png"], "HOME/a/1.png: a picture must lie in a folder named for its class"),
        (["a/cat/1.png", "b.csv"], "HOME: a holds pictures, b.csv does not"),
        (["a.csv", "b/cat/1.png"], "HOME: b holds pictures, a.csv does not"),
    ],
)
def test_what_cannot_be_a_client_is_named(tmp_path: Path, names: list[str], message: str) -> None:
    assert refusal(put(tmp_path, *names)).startswith(message)


@pytest.mark.parametrize(
    ("link", "target", "message"),
    [
        ("b.csv", "b.csv", "HOME/b.csv: cannot be read: Too many levels of symbolic links"),
        ("b.csv", "c.csv", "HOME/b.csv: cannot be read: No such file or directory"),
        ("b", ".", "HOME/b: a link to a folder that it lies in"),
        ("d/b", "..", "HOME/d/b: a link to a folder that it lies in"),
    ],
)
def test_links_that_lead_nowhere_or_back_are_named(tmp_path: Path, link: str, target: str, message: str) -> None:
    put(tmp_path, "a.csv")
    (tmp_path / "d").mkdir()
    (tmp_path / link).symlink_to(target)
    assert refusal(tmp_path) == message


def test_what_is_neither_file_nor_folder_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.csv")
    assert refusal(tmp_path) == "HOME/a.csv: named like a .csv file, but it is neither a file nor a folder"


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(ValueError, match=f"{tmp_path}: cannot be read: Permission denied"):
        listed(tmp_path)
