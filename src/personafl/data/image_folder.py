"""Clients' pictures in folders named for their classes: `CLIENT/CLASS/PICTURE`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from personafl.core.errors import UserError
from personafl.data.client_data import ClientData
from personafl.data.client_files import PICTURES, ClientFiles, listed
from personafl.data.dataset import Array
from personafl.storage.npz import told

MOST_PIXELS = 2**25  # of a picture; cameras make fewer
_GREY = ("1", "L", "LA")  # modes that become one channel of bytes
_COLOUR = ("P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")  # those that become three


def read_image_folders(clients: Sequence[ClientFiles], size: int = 0) -> list[ClientData]:
    """Pictures as bytes `[n, channels, height, width]`, three channels if any of them has colours.

    All must be of one size, or are resized to `size` x `size`. A label is the name of its folder.
    """
    paths = [[p for home in c.classes for p in _pictures(home)] for c in clients]
    flat = [p for mine in paths for p in mine]
    if not flat:
        raise UserError(
            f"{clients[0].classes[0]}: no pictures in it; possible are {', '.join(PICTURES)} "
            "(files of other kinds lie in their client's folder itself)"
        )
    read = [_pixels(p, size) for p in flat]
    for path, pixels in zip(flat, read, strict=True):
        if pixels.shape[1:] != read[0].shape[1:]:
            ours, first = (f"{x.shape[2]} x {x.shape[1]}" for x in (pixels, read[0]))
            raise UserError(
                f"{path}: {ours} pixels, but {flat[0]} has {first}; data.image_size={min(read[0].shape[1:])} "
                "would resize all"
            )
    shape = (max(len(x) for x in read), *read[0].shape[1:])
    pictures = iter(read)
    return [
        ClientData(
            c.name,
            np.array([np.broadcast_to(next(pictures), shape) for _ in mine], np.uint8),
            np.array([p.parent.name for p in mine], np.str_),
        )
        for c, mine in zip(clients, paths, strict=True)
    ]


def _pictures(home: Path) -> list[Path]:
    there = listed(home, PICTURES)
    if inner := next((p for p in there if p.is_dir()), None):
        raise UserError(f"{inner}: a folder within the pictures of class {home.name}; they lie at CLIENT/CLASS/PICTURE")
    return [p for p in there if p.suffix.lower() in PICTURES]


def check_pixels(size: tuple[int, int]) -> None:
    """Refuse a picture so large that it is damaged, before it is decoded."""
    if size[0] * size[1] > MOST_PIXELS:
        raise ValueError(f"{size[0]} x {size[1]} pixels, more than {MOST_PIXELS:,}")


def _pixels(path: Path, size: int) -> Array:
    """A picture as bytes with channels first."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(path.read_bytes())) as picture:  # lengths within a file may say anything
            check_pixels(picture.size)
            if picture.mode not in (*_GREY, *_COLOUR):
                raise UserError(f"{path}: its pixels are {picture.mode}, not bytes; save it with 8 bits per channel")
            plain = picture.convert("L" if picture.mode in _GREY else "RGB")
    except UserError:
        raise
    except Exception as e:  # a damaged file may raise anything
        raise UserError(f"{path}: not a readable picture: {told(e)}") from None
    if size and plain.size != (size, size):
        plain = plain.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(plain)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
