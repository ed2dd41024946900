"""Pickles that hold arrays, and those that would do more."""

import pickle

import numpy as np
import pytest

from personafl.data import formats
from personafl.data.checksums import DataError
from tests.data.written import PIXELS, Harm, put


def test_a_pickle_may_hold_arrays_of_every_protocol(tmp_path):
    for protocol in range(2, 6):
        path = put(tmp_path / "b", pickle.dumps({"data": PIXELS, b"labels": [1] * 12, "name": b"raw"}, protocol))
        assert np.array_equal(formats.read_cifar_python(path, "labels", 10)[0].reshape(12, -1), PIXELS)


def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for harmful in (Harm(), {"data": Harm()}, {"data": np.array([Harm()], object)}):
        with pytest.raises(DataError, match=r"not a data batch: it asks for \w+\.mkdir"):
            formats.read_pickle(put(tmp_path / "b", pickle.dumps(harmful)))
    assert not (tmp_path / "harm").exists()
