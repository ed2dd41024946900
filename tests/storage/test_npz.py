"""Arrays in files, and files that say they hold more than they do."""

import io
import struct
import zipfile

import numpy as np
import pytest

from personafl.core.errors import UserError
from personafl.storage.npz import read_npy, read_npz
from tests.data.written import Harm

KINDS = ["<f4", ">f8", "<i8", "u1", "?", "<U3"]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_come_back_as_they_were(tmp_path, save):
    arrays = {k.strip("<>?") or "b": np.arange(6).reshape(2, 3).astype(k) for k in KINDS}
    arrays |= {"number": np.array(3.5), "empty": np.zeros((0, 4)), "turned": np.asfortranarray(np.ones((2, 3)))}
    save(tmp_path / "a.npz", **arrays)
    found = read_npz(tmp_path / "a.npz")
    assert list(found) == list(arrays)
    assert all(found[n].dtype == a.dtype and np.array_equal(found[n], a) for n, a in arrays.items())
    assert list(read_npz(tmp_path / "a.npz", ("empty", "none"))) == ["empty"]
    np.save(tmp_path / "a.npy", arrays["f4"])
    assert np.array_equal(read_npy(tmp_path / "a.npy"), arrays["f4"])


def npy(shape, kind, data=b""):
    """A file of this header before these bytes."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": kind, "fortran_order": False, "shape": shape})
    return out.getvalue() + data


HEADERS = {
    "more numbers than bytes": npy((2**40,), "<f4", b"1234"),
    "fewer numbers than bytes": npy((1,), "<f4", b"12345678"),
    "values without a size": npy((2**40,), "<U0"),
    "a shape past counting": npy((2**62, 2**62), "<f4"),
    "a negative shape": npy((-1,), "<f4"),
    "characters that there are not": npy((1,), "<U1", b"\xff\xff\xff\xff"),
    "half characters": npy((1,), ">U1", b"\x00\x00\xd8\x00"),
    "records": npy((1,), [("a", "<U1")], b"\xff\xff\xff\xff"),
    "objects": npy((1,), "|O", b"\x80\x04N."),
    "no header": b"\x93NUMPY\x01\x00",
    "a header of brackets": b"\x93NUMPY\x01\x00" + struct.pack("<H", 5000) + b"(" * 5000,
    "a header of gigabytes": b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1),
    "half a length": b"\x93NUMPY\x02\x00\x01",
    "nothing": b"",
    "text": b"x,y\n1,2\n",
}


@pytest.mark.parametrize("raw", HEADERS.values(), ids=HEADERS)
def test_a_header_that_does_not_fit_is_refused_in_one_line(tmp_path, raw):
    (tmp_path / "a.npy").write_bytes(raw)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", raw)
    for read, path in ((read_npy, tmp_path / "a.npy"), (read_npz, tmp_path / "a.npz")):
        with pytest.raises(UserError, match=rf"{path.name}: not a readable {path.suffix} file") as refused:
            read(path)
        assert "\n" not in str(refused.value)


def test_an_archive_that_claims_more_than_its_bytes_can_become_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(2))
    raw = (tmp_path / "a.npz").read_bytes()
    size = struct.pack("<I", 128 + 16)
    assert raw.count(size) >= 2
    (tmp_path / "a.npz").write_bytes(raw.replace(size * 2, size + struct.pack("<I", 2**31)))
    with pytest.raises(UserError, match=r"x\.npy claims 2147483648 bytes, which its 144 cannot become"):
        read_npz(tmp_path / "a.npz")


def test_compression_that_numpy_does_not_write_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", npy((1,), "<f4", b"1234"))
    with pytest.raises(UserError, match="compressed in a way that NumPy does not write"):
        read_npz(tmp_path / "a.npz")


def test_a_pickle_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", x=np.array([Harm()], object))
    np.save("a.npy", np.array([Harm()], object))
    for read, name in ((read_npz, "a.npz"), (read_npy, "a.npy")):
        with pytest.raises(UserError, match="it holds Python objects"):
            read(tmp_path / name)
    assert not (tmp_path / "harm").exists()


def test_a_file_that_is_not_there_is_named(tmp_path):
    for read in (read_npz, read_npy):
        with pytest.raises(UserError, match="none: cannot be read: No such file"):
            read(tmp_path / "none")
