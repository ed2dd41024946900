"""Files of every format, and damaged ones."""

import gzip
import pickle

import numpy as np
import pytest

from personafl.data import formats
from personafl.data.checksums import DataError
from tests.data.written import DIGITS, PIXELS, idx, put


def test_damaged_idx_files_are_named(tmp_path):
    whole = idx(DIGITS["train"][0])
    zipped = gzip.compress(whole)
    for content, told in (
        (whole[:-1], r"truncated: 2,367 of 2,368 bytes"),  # 16 + 3 * 784 = 2368
        (whole[:6], "truncated: its head has 6 of 16 bytes"),
        (whole + b"!", "corrupted"),
        (idx(DIGITS["train"][1]), "swapped: it holds an array of 1 dimensions, not of 3"),
        (b"<html>", "not an idx file: it begins with 3c68746d"),
        (b"", "not an idx file: it begins with nothing"),
        (zipped[:-20], "truncated: its gzip stream ends early"),
        (zipped[:-8] + b"12345678", "corrupted"),
    ):
        with pytest.raises(DataError, match=told):
            formats.read_idx(put(tmp_path / "file", content), 3)


def test_damaged_cifar_files_are_named(tmp_path):
    path = tmp_path / "file"
    whole = np.c_[np.arange(12, dtype=np.uint8), PIXELS].tobytes()
    with pytest.raises(DataError, match=r"truncated: 36,875 bytes are not a whole number of 3073-byte examples"):
        formats.read_cifar_binary(put(path, whole[:-1]), 1, 100)
    with pytest.raises(DataError, match=r"label 11 is not in 0\.\.9"):
        formats.read_cifar_binary(put(path, whole), 1, 10)
    batch = pickle.dumps({"data": PIXELS, "labels": [1] * 12})
    for content, told in (
        (batch[:-1000], "is truncated"),
        (b"", "is truncated"),
        (pickle.dumps([1]), "holds a list, not a dictionary"),
        (pickle.dumps({"data": PIXELS}), "not a data batch with data and labels: it has data"),
        (pickle.dumps({"data": PIXELS[:, 1:], "labels": [1] * 12}), "is corrupted: data uint8"),
        (pickle.dumps({"data": PIXELS, "labels": [-1] * 12}), "is corrupted: labels -1"),
        (b"<html>" * 10, "is"),
    ):
        with pytest.raises(DataError, match=told):
            formats.read_cifar_python(put(path, content), "labels", 10)
