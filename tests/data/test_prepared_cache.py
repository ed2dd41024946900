"""Arrays kept in a fast form until their files change."""

import numpy as np
import torch

from personafl.data import checksums, images
from personafl.data.locate import user_cache
from personafl.data.prepared_cache import prepared_arrays
from tests.data.written import put, real


def test_what_is_prepared_is_built_once_and_again_when_an_input_changes(home):
    source = put(home / "raw", b"1")
    built = []

    def build():
        built.append(source.read_bytes())
        return {"x": np.frombuffer(built[-1], np.uint8)}

    for _ in range(2):
        assert prepared_arrays("toy", home, [source], build)["x"].tolist() == [49]
    assert built == [b"1"]
    put(source, b"22")
    assert prepared_arrays("toy", home, [source], build)["x"].tolist() == [50, 50]
    prepared_arrays("toy", home, [source], build, size=3)
    assert built == [b"1", b"22", b"22"]


def test_a_damaged_prepared_file_is_made_anew(home):
    source, right = put(home / "raw", b"1"), {"x": np.arange(1000)}
    prepared_arrays("toy", home, [source], lambda: right)
    path = home / ".prepared" / "toy.npz"
    whole = path.read_bytes()
    at = whole.index(np.arange(500, 510).tobytes())
    for damaged in (whole[:-100], whole[:at] + b"!" + whole[at + 1 :], b""):
        path.write_bytes(damaged)
        assert np.array_equal(prepared_arrays("toy", home, [source], lambda: right)["x"], right["x"])
        assert path.read_bytes()[-100:] == whole[-100:]


def test_what_cannot_be_kept_beside_the_data_is_kept_in_the_cache(home):
    source = put(home / "raw", b"1")
    put(home / ".prepared", b"a file where the folder should be")
    prepared_arrays("toy", home, [source], lambda: {"x": np.arange(3)})
    assert (user_cache() / "prepared" / "toy.npz").exists()


def test_real_cifar10_once_prepared_is_not_read_again(monkeypatch):
    real("cifar10")
    first = images.cifar10()

    def again(*_):
        raise AssertionError("the official files were read or hashed a second time")

    monkeypatch.setattr(images, "read_cifar_binary", again)
    monkeypatch.setattr(images, "read_cifar_python", again)
    monkeypatch.setattr(checksums, "file_digest", again)
    assert torch.equal(images.cifar10().x, first.x)
