"""Pictures in folders: client, class, picture."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from personafl.core.errors import UserError
from personafl.data import custom


def put(home: Path, name: str, value: int = 0, size: tuple[int, int] = (3, 2), mode: str = "L") -> Path:
    """A picture of one value in all channels; `size` is width and height."""
    path = home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = Image.fromarray(np.full((size[1], size[0]), value, np.uint8))
    plain.convert(mode).save(path)
    return home


def refusal(home: Path, **settings: int) -> str:
    with pytest.raises(UserError) as refused:
        custom.folder(home, **settings)
    return str(refused.value).replace(str(home), "HOME")


def test_a_folder_per_client_with_one_per_class(tmp_path: Path) -> None:
    for value, name in enumerate(["b/dog/10.png", "b/dog/9.bmp", "a/cat/x.png", "a/emu/x.jpg"]):
        put(tmp_path, name, value)
    (tmp_path / "a" / "dog").mkdir()  # it has none of them
    (tmp_path / "a" / "cat" / "Thumbs.db").write_text("left alone")
    (tmp_path / "a" / "cat" / ".hidden.png").write_text("left alone")
    made = custom.folder(tmp_path)
    assert made.names == ("a", "b")
    assert made.class_names == ("cat", "dog", "emu")
    assert made.y.tolist() == [0, 2, 1, 1]
    assert (made.x.dtype, made.x.shape) == (torch.uint8, (4, 1, 2, 3))
    assert made.x[[0, 2, 3], 0, 0, 0].tolist() == [2, 1, 0]  # 9 comes before 10; .jpg is not exact
    assert made.feature_names is None


def test_grey_becomes_colour_where_any_picture_has_colours(tmp_path: Path) -> None:
    put(tmp_path, "a/cat/1.png", 7)
    put(tmp_path, "a/cat/2.png", 8, mode="LA")
    put(tmp_path, "b/cat/1.png", 9, mode="RGBA")
    made = custom.folder(tmp_path)
    assert made.x.shape == (3, 3, 2, 3)
    assert [set(x.flatten().tolist()) for x in made.x] == [{7}, {8}, {9}]


def test_webp_is_read(tmp_path: Path) -> None:
    made = custom.folder(put(put(tmp_path, "a/cat/1.webp", mode="RGB"), "a/dog/1.png"))
    assert (made.x.shape, made.y.tolist()) == ((2, 3, 2, 3), [0, 1])


def test_channels_keep_their_places(tmp_path: Path) -> None:
    colours = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    (tmp_path / "a" / "cat").mkdir(parents=True)
    Image.fromarray(colours).save(tmp_path / "a" / "cat" / "1.png")
    assert torch.equal(custom.folder(tmp_path).x[0], torch.from_numpy(colours).permute(2, 0, 1))


def test_pictures_are_of_one_size_or_resized(tmp_path: Path) -> None:
    put(put(tmp_path, "a/cat/1.png", 5), "b/cat/1.png", 6, size=(4, 5))
    said = "HOME/b/cat/1.png: 4 x 5 pixels, but HOME/a/cat/1.png has 3 x 2; data.image_size=2 would resize all"
    assert refusal(tmp_path) == said
    made = custom.folder(tmp_path, image_size=2)
    assert made.x.tolist() == [[[[5, 5], [5, 5]]], [[[6, 6], [6, 6]]]]


def test_pictures_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    put(tmp_path, "a/cat/1.png", mode="I;16")
    assert refusal(tmp_path) == "HOME/a/cat/1.png: its pixels are I;16, not bytes; save it with 8 bits per channel"
    (tmp_path / "a" / "cat" / "1.png").write_bytes(b"\x89PNG")
    assert refusal(tmp_path).startswith("HOME/a/cat/1.png: not a readable picture: ")
    (tmp_path / "a" / "cat" / "1.png").unlink()
    (tmp_path / "a" / "cat" / "1.png").mkdir()
    assert refusal(tmp_path) == "HOME/a/cat/1.png: named like a .png file, but it is a folder"


def test_folders_without_pictures_are_named(tmp_path: Path) -> None:
    (tmp_path / "a" / "cat").mkdir(parents=True)
    assert refusal(tmp_path).startswith("HOME/a/cat: no pictures in it; possible are .png, .jpg, .jpeg, .bmp, .webp (")
    put(tmp_path, "b/cat/1.png")
    assert refusal(tmp_path).endswith("client a: no examples")
    put(tmp_path, "a/cat/more/1.png")
    assert refusal(tmp_path).startswith("HOME/a/cat/more: a folder within the pictures of class cat")


def test_settings_of_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "a/cat/1.png")
    with pytest.raises(ValueError, match=r"data\.label goes with \.csv and \.parquet files, and these are pictures"):
        custom.folder(tmp_path, label=["cat"])


def test_a_picture_too_large_to_be_one_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    put(tmp_path, "ann/cat/a.png")
    raw = bytearray((tmp_path / "ann/cat/a.png").read_bytes())
    raw[16:24] = struct.pack(">II", 2**13, 2**13)  # width and height of its first chunk, and that chunk's checksum
    raw[29:33] = struct.pack(">I", zlib.crc32(raw[12:29]))
    (tmp_path / "ann/cat/a.png").write_bytes(raw)
    assert refusal(tmp_path) == ("HOME/ann/cat/a.png: not a readable picture: 8192 x 8192 pixels, more than 33,554,432")


def test_a_picture_with_a_damaged_palette_is_refused_in_one_line(tmp_path: Path) -> None:
    put(tmp_path, "ann/cat/a.bmp", mode="P")
    raw = bytearray((tmp_path / "ann/cat/a.bmp").read_bytes())
    raw[46:50] = struct.pack("<I", 2**31)  # how many colours there are
    (tmp_path / "ann/cat/a.bmp").write_bytes(raw)
    assert refusal(tmp_path).startswith("HOME/ann/cat/a.bmp: not a readable picture: ")
