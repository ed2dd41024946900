"""Files held against what they should be."""

import hashlib

import pytest

from personafl.data.catalogue import FileSpec
from personafl.data.checksums import DataError, verify
from tests.data.written import md5, put


def test_a_file_is_truncated_swapped_too_long_or_corrupted(tmp_path):
    right, other = b"right", b"other"
    known = FileSpec(5, (md5(right),))
    path = put(tmp_path / "a.bin", right)
    verify(path, known)
    put(path, right[:3])
    with pytest.raises(DataError, match=r"a\.bin is truncated: 3 of 5 bytes"):
        verify(path, known)
    put(path, other)
    with pytest.raises(DataError, match=r"a\.bin is swapped: it holds what belongs into b\.bin"):
        verify(path, known, {"b.bin": FileSpec(None, (md5(other),))})
    with pytest.raises(DataError, match=r"a\.bin is corrupted: its checksum is"):
        verify(path, known)
    put(path, b"a longer one")
    with pytest.raises(DataError, match="is swapped: it holds what belongs into c"):
        verify(path, known, {"b.bin": FileSpec(), "c": FileSpec(12)})
    put(path, right + b"!")
    with pytest.raises(DataError, match="6 bytes in place of 5"):
        verify(path, known)


def test_a_file_may_have_a_sha256_in_place_of_an_md5(tmp_path):
    path = put(tmp_path / "a", b"right")
    verify(path, FileSpec(None, (hashlib.sha256(b"right").hexdigest(),)))
    with pytest.raises(DataError, match="corrupted"):
        verify(path, FileSpec(None, (hashlib.sha256(b"wrong").hexdigest(),)))
