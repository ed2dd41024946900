"""Pickles that hold arrays, and those that would do more."""

import io
import pickle

import numpy as np
import pytest

from personafl.data import formats
from personafl.data.checksums import DataError
from personafl.data.unpickle import unpickle, unwrap
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


@pytest.mark.parametrize("protocol", [2, 5])
def test_an_array_that_claims_more_than_its_bytes_is_refused(protocol):
    raw = pickle.dumps(np.arange(7, dtype=np.uint8), protocol)
    assert unwrap(unpickle(io.BytesIO(raw))).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert raw.count(b"K\x07\x85") == 1  # the shape: (7,)
    with pytest.raises(pickle.UnpicklingError, match=r"an array of shape \(255,\) with 7 bytes"):
        unpickle(io.BytesIO(raw.replace(b"K\x07\x85", b"K\xff\x85")))
