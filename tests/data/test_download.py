"""Downloads from a server that fails in every way."""

import pytest

from personafl.data import download
from personafl.data.catalogue import FileSpec, Remote
from personafl.data.checksums import DataError
from tests.data.written import archive, md5, put

BODY = bytes(range(256)) * 4000  # several blocks


def remote(server, body=BODY, known=True):
    server.held["big file.bin".replace(" ", "+")] = body
    return Remote(f"{server.url}big+file.bin?download=1", FileSpec(len(BODY), (md5(BODY),)) if known else FileSpec())


def test_a_download_is_verified_and_told(server, tmp_path):
    told = []
    path = download.download(remote(server), tmp_path / "to", lambda *t: told.append(t))
    assert path == tmp_path / "to" / "big file.bin" and path.read_bytes() == BODY
    assert told[0] == ("big file.bin", 0, len(BODY)) and told[-1] == ("big file.bin", len(BODY), len(BODY))
    assert [p.name for p in path.parent.iterdir()] == ["big file.bin"]
    download.download(remote(server), tmp_path / "to")
    assert len(server.asked) == 1  # what is there is not fetched again


def test_an_interrupted_download_goes_on_where_it_stopped(server, tmp_path):
    server.cut = 2
    assert download.download(remote(server), tmp_path).read_bytes() == BODY
    half, rest = len(BODY) // 2, len(BODY) // 4
    assert [r for _, r in server.asked] == [None, f"bytes={half}-", f"bytes={half + rest}-"]


def test_a_download_that_failed_is_resumed_by_the_next_call(server, tmp_path):
    server.cut = 1
    with pytest.raises(download.UnreachableError, match=r"ended early; 512,000 bytes are kept in .*\.part"):
        download.download(remote(server), tmp_path, tries=1)
    assert not (tmp_path / "big file.bin").exists()
    assert download.download(remote(server), tmp_path).read_bytes() == BODY
    assert server.asked[-1][1] == "bytes=512000-"


def test_a_download_stopped_by_hand_is_resumed(server, tmp_path):
    def stop(name, have, total):
        if have:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.download(remote(server), tmp_path, stop)
    have = (tmp_path / "big file.bin.part").stat().st_size
    assert 0 < have < len(BODY)
    assert download.download(remote(server), tmp_path).read_bytes() == BODY
    assert server.asked[-1][1] == f"bytes={have}-"


def test_a_server_without_ranges_gives_all_of_it_again(server, tmp_path):
    server.ranges = False
    put(tmp_path / "big file.bin.part", BODY[:1000])
    assert download.download(remote(server), tmp_path).read_bytes() == BODY


def test_a_half_that_does_not_fit_is_thrown_away(server, tmp_path):
    for half in (b"?" * 1000, BODY + b"too long", b"?" * len(BODY)):
        put(tmp_path / "big file.bin.part", half)
        path = download.download(remote(server), tmp_path)
        assert path.read_bytes() == BODY
        path.unlink()


def test_a_half_that_is_whole_only_gets_its_name(server, tmp_path):
    put(tmp_path / "big file.bin.part", BODY)
    assert download.download(remote(server), tmp_path).read_bytes() == BODY


def test_without_a_checksum_a_download_starts_clean(server, tmp_path):
    put(tmp_path / "big file.bin.part", b"?" * 1000)
    assert download.download(remote(server, known=False), tmp_path).read_bytes() == BODY
    assert server.asked == [("big+file.bin", None)]


def test_what_is_not_the_file_is_not_kept(server, tmp_path):
    with pytest.raises(DataError, match=r"what came is not the file: .* corrupted"):
        download.download(remote(server, BODY[:-1] + b"!"), tmp_path)
    with pytest.raises(download.UnreachableError, match="the server says 404"):
        download.download(Remote(f"{server.url}nothing"), tmp_path)
    assert not list(tmp_path.iterdir())
    put(tmp_path / "big file.bin", BODY[:10])
    with pytest.raises(DataError, match="is truncated: 10 of"):
        download.download(remote(server), tmp_path)


def test_nobody_at_the_other_end_is_told(tmp_path):
    with pytest.raises(download.UnreachableError, match="refused"):
        download.download(Remote("http://127.0.0.1:9/x"), tmp_path)


def test_archives_inside_archives_are_unpacked_and_none_leaves_its_folder(tmp_path):
    inner = archive("zip", {"UCI HAR Dataset/train/y_train.txt": b"1\n", "../out.txt": b""})
    path = put(tmp_path / "to" / "har.zip", archive("zip", {"UCI HAR Dataset.zip": inner}))
    download.unpack(path, tmp_path / "to")
    assert (tmp_path / "to" / "UCI HAR Dataset" / "train" / "y_train.txt").read_bytes() == b"1\n"
    assert not (tmp_path / "to" / "UCI HAR Dataset.zip").exists() and not (tmp_path / "out.txt").exists()
    path = put(tmp_path / "to" / "bad.tar.gz", archive("tar", {"../out.txt": b""}))
    with pytest.raises(DataError, match=r"bad\.tar\.gz: cannot be unpacked"):
        download.unpack(path, tmp_path / "to")
    assert not (tmp_path / "out.txt").exists()
    with pytest.raises(DataError, match="cannot be unpacked"):
        download.unpack(put(path, path.read_bytes()[:30]), tmp_path / "to")
