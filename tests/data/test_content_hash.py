"""What a hash of examples covers, and how often it is taken."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

import personafl
from personafl.core.normalization import Normalization
from personafl.data import content_hash as hashing
from personafl.data.content_hash import content_hash


def test_every_byte_counts(tmp_path: Path) -> None:
    """Five mebibytes of a file, two thirds of whose examples are zeroed, and one in which a single bit differs."""
    x = np.random.default_rng(0).integers(1, 256, (5120, 32, 32), dtype=np.uint8)
    y = np.arange(len(x)) % 3
    zeroed, flipped = x * (np.arange(len(x)) % 3 == 0)[:, None, None], x.copy()
    flipped[-1, -1, -2] ^= 1
    digests = {personafl.arrays(held, y).digest for held in (x, zeroed.astype(np.uint8), flipped, x.copy())}
    assert len(digests) == 3
    assert content_hash(torch.from_numpy(x)) == hashlib.sha256(x.tobytes()).digest()


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool, torch.bfloat16])
def test_numbers_of_any_kind_and_order_are_hashed_by_their_values(kind: torch.dtype) -> None:
    x = (torch.arange(24).view(4, 6) % 2).to(kind)
    assert content_hash(x) == content_hash(x.clone()) == content_hash(x.T.contiguous().T)
    assert content_hash(x) != content_hash(x.flip(1))


def test_of_what_is_too_large_blocks_count_from_the_first_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks of 2 of 20 bytes: at 0, 6, 12 and 18, a third of what lies between apart."""
    monkeypatch.setattr(hashing, "WHOLE", 8)
    monkeypatch.setattr(hashing, "BLOCK", 2)
    plain = torch.zeros(20, dtype=torch.uint8)
    seen = [i for i in range(20) if content_hash(plain) != content_hash(plain + (torch.arange(20) == i))]
    assert seen == [0, 1, 6, 7, 12, 13, 18, 19]


def test_a_tensor_is_hashed_once_until_it_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    hashed = hashing._hashed
    monkeypatch.setattr(hashing, "_hashed", lambda x: (taken.append(len(x)), hashed(x))[1])
    plain = personafl.arrays(torch.ones(6, 2), [0, 1] * 3)
    normal = dataclasses.replace(plain, normalization=Normalization((0.5,), (2.0,)))
    first = {plain.digest, normal.digest}
    assert len(first) == 2 and taken == [6]  # one for all that share it
    plain.x[0, 0] = 2
    assert dataclasses.replace(plain).digest not in first and taken == [6, 6]
    with torch.inference_mode():
        assert content_hash(torch.ones(6, 2)) == hashed(torch.ones(6, 2))
