"""Shakespeare's plays, one client per role: the next character from the 80 before it."""

from __future__ import annotations

from typing import Any

import numpy as np

from personafl.core.errors import UserError
from personafl.data.checksums import DataError
from personafl.data.dataset import Array, Source, from_arrays
from personafl.data.formats import leaf_inputs, read_json, read_leaf
from personafl.data.locate import DatasetFiles, obtain
from personafl.data.prepared_cache import prepared_arrays

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 characters."""
LENGTH = 80
_BLOCK = 1000  # characters: so less than a tenth of the windows begin with blanks
_CODES = np.full(256, ALPHABET.index(" "), np.uint8)  # any other character is read as a blank
_CODES[[ord(c) for c in ALPHABET]] = np.arange(len(ALPHABET))


def encode(text: str) -> Array:
    """The numbers of a text's characters in the alphabet."""
    return _CODES[np.frombuffer(text.encode("latin1", "replace"), np.uint8)]


def windows(text: str, stride: int = 1) -> tuple[Array, Array]:
    """The 80 characters before each but the first, `[n, 80]`, and that one, `[n]`; blanks stand before the text."""
    codes = encode(" " * (LENGTH - 1) + text)
    if len(text) < 2:
        return np.zeros((0, LENGTH), np.uint8), np.zeros(0, np.uint8)
    runs = np.lib.stride_tricks.sliding_window_view(codes, LENGTH + 1)[::stride]
    return runs[:, :LENGTH], runs[:, LENGTH]


def blocks(speeches: list[str]) -> list[str]:
    """Whole speeches behind one another, cut where a block has a thousand characters; the last takes the rest."""
    out: list[str] = []
    open_block: list[str] = []
    for speech in speeches:
        open_block.append(speech)
        if sum(map(len, open_block)) >= _BLOCK:
            out.append("\n".join(open_block))
            open_block = []
    if open_block:
        out[-1:] = ["\n".join([*out[-1:], *open_block])]
    return out


def read_roles(found: DatasetFiles, stride: int = 1) -> dict[str, Array]:
    """Windows of every role with two or more speeches: the last fifth of its speeches, at least one, is for testing.

    Windows lie within blocks, so those of two blocks share no character. Unlike LEAF's, the first windows of a
    block are filled up with blanks: a third of the roles say too little for a whole one to train and one to test.
    """
    path = found.path("roles.json")
    held = read_json(path)
    xs, ys, clients, groups, test = [], [], [], [], []
    block = 0
    try:
        roles = [[str(s) for s in role["speeches"]] for role in held]
    except (KeyError, TypeError) as e:
        raise DataError(f'{path} is not a list of {{"play", "role", "speeches"}}: {e}') from None
    for client, speeches in enumerate(roles):
        if len(speeches) < 2:
            continue
        kept = len(speeches) - max(1, len(speeches) // 5)
        for late, part in enumerate((speeches[:kept], speeches[kept:])):
            for text in blocks(part):
                x, y = windows(text, stride)
                xs.append(x)
                ys.append(y)
                clients.append(np.full(len(y), client))
                groups.append(np.full(len(y), block))
                test.append(np.full(len(y), bool(late)))
                block += 1
    if not sum(map(len, ys)):
        raise DataError(f"{path} has no role with two speeches")
    parts = {"x": xs, "y": ys, "clients": clients, "groups": groups, "test": test}
    return {n: np.concatenate(p) for n, p in parts.items()}


def _leaf_row(x: Any, y: Any) -> tuple[Array, Array]:
    for i, run in enumerate(x):
        if len(run) != LENGTH:
            raise UserError(f"example {i} has {len(run)} characters in place of {LENGTH}")
    if any(len(c) != 1 for c in y):
        raise UserError("a label is not one character")
    return encode("".join(x)).reshape(len(x), LENGTH), encode("".join(y))


def shakespeare(stride: int = 1) -> Source:
    """Shakespeare by role, from LEAF's files or a roles.json; x are character numbers `[N, 80]`.

    A roles.json gives a window every `stride` characters; LEAF's files are taken as they are.
    """
    found = obtain("shakespeare")
    if found.kind == "roles":
        held = read_roles(found, stride)
    else:
        held = prepared_arrays("shakespeare", found.root, leaf_inputs(found), lambda: read_leaf(found, _leaf_row))
    x = held["x"].astype(np.int16)  # bytes would be pixels, which are scaled
    return from_arrays("shakespeare", {**held, "x": x}, len(ALPHABET), "char-lstm")
