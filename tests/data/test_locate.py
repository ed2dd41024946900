"""Where data sets are looked for, and what is said where they are not."""

import numpy as np
import pytest

from personafl.data import catalogue, images, signals
from personafl.data.catalogue import Entry, FileSpec, Remote
from personafl.data.locate import MissingDataError, data_folders, find, user_cache
from tests.data.written import PIXELS, archive, md5, put


def test_what_is_missing_is_explained_in_one_message(home):
    with pytest.raises(MissingDataError) as e:
        images.cifar10()
    told = str(e.value)
    for needed in ("CIFAR-10", "cifar-10-batches-bin/", "test_batch.bin", "cifar-10-batches-py/", "PERSONAFL_OFFLINE"):
        assert needed in told
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz" in told
    assert str(home) in told and str(user_cache()) in told


def test_what_is_missing_of_a_set_that_is_half_there_is_named(home):
    put(home / "cifar-10-batches-bin" / "data_batch_1.bin", b"x")
    put(home / "cifar-10-binary.tar.gz.part", b"1234")
    with pytest.raises(MissingDataError) as e:
        images.cifar10()
    assert "cifar-10-batches-bin lacks data_batch_2.bin, data_batch_3.bin" in str(e.value)
    assert "cifar-10-binary.tar.gz.part is half-downloaded (4 bytes)" in str(e.value)


def test_the_named_folder_comes_before_the_cache(home):
    put(user_cache() / "wisdm.npz", b"")
    assert find("wisdm").root == user_cache()
    put(home / "wisdm.npz", b"")
    assert find("wisdm").root == home


def test_without_a_named_folder_downloads_go_to_the_cache(home, monkeypatch):
    monkeypatch.delenv("PERSONAFL_DATA")
    assert data_folders() == [user_cache()]


def test_a_set_is_downloaded_and_unpacked_on_first_use(server, home, monkeypatch):
    rows = np.c_[np.zeros(2, np.uint8), np.array([1, 2], np.uint8), PIXELS[:2]].tobytes()
    body = archive("tar", {"cifar-100-binary/train.bin": rows, "cifar-100-binary/test.bin": rows})
    server.held["cifar-100-binary.tar.gz"] = body
    entry = Entry(
        "CIFAR-100",
        catalogue.CATALOGUE["cifar100"].layouts,
        (Remote(f"{server.url}cifar-100-binary.tar.gz", FileSpec(len(body), (md5(body),))),),
    )
    monkeypatch.setitem(catalogue.CATALOGUE, "cifar100", entry)
    with pytest.raises(MissingDataError, match="turned off by PERSONAFL_OFFLINE"):
        images.cifar100(check=False)
    monkeypatch.delenv("PERSONAFL_OFFLINE")
    for _ in range(2):
        assert images.cifar100(check=False).y.tolist() == [1, 2, 1, 2]
    assert len(server.asked) == 1 and not (home / "cifar-100-binary.tar.gz").exists()


def test_a_download_that_fails_says_what_to_put_where(server, home, monkeypatch):
    entry = Entry("WISDM", catalogue.CATALOGUE["wisdm"].layouts, (Remote(f"{server.url}gone.tar.gz"),))
    monkeypatch.setitem(catalogue.CATALOGUE, "wisdm", entry)
    monkeypatch.delenv("PERSONAFL_OFFLINE")
    with pytest.raises(MissingDataError, match=r"the download failed: .* 404") as e:
        signals.wisdm()
    assert "WISDM_ar_v1.1_transformed.arff" in str(e.value)
