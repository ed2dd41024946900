"""HAR and WISDM from tiny files, and the real ones where $PERSONAFL_DATA has them."""

import io

import numpy as np
import pytest
import torch

from personafl.data import signals
from personafl.data.checksums import DataError
from personafl.data.locate import find
from tests.data.written import put, real, sha256


def write_har(folder, split, x, y, subject):
    names = [f"{k}_{a}" for k in ("body_acc", "body_gyro", "total_acc") for a in "xyz"]
    for c, name in enumerate(names):
        lines = io.StringIO()
        np.savetxt(lines, x[:, c], fmt="%.7e")
        put(folder / split / "Inertial Signals" / f"{name}_{split}.txt", lines.getvalue())
    put(folder / split / f"y_{split}.txt", "".join(f"{k}\n" for k in y))
    put(folder / split / f"subject_{split}.txt", "".join(f"{k}\n" for k in subject))


def recording(seed, count):
    """Windows that overlap by half: `[count, 9, 128]`."""
    raw = np.random.default_rng(seed).normal(size=(9, 64 * (count + 1))).astype(np.float32)
    return np.stack([raw[:, 64 * i : 64 * i + 128] for i in range(count)])


def test_har_has_signals_subjects_and_recordings(home):
    folder = home / "UCI HAR Dataset"
    train, test = np.concatenate([recording(0, 3), recording(1, 2)]), recording(2, 2)
    write_har(folder, "train", train, [1, 1, 1, 6, 6], [3, 3, 3, 3, 3])
    write_har(folder, "test", test, [2, 2], [4, 4])
    got = signals.har()
    assert got.x.shape == (7, 9, 128) and got.x.dtype == torch.float32
    assert np.allclose(got.x.numpy(), np.concatenate([train, test]), rtol=1e-6)
    assert got.y.tolist() == [0, 0, 0, 5, 5, 1, 1] and got.clients.tolist() == [3] * 5 + [4] * 2
    assert got.groups.tolist() == [0, 0, 0, 1, 1, 2, 2] and got.test.tolist() == [False] * 5 + [True] * 2


def test_a_recording_ends_with_the_person_or_one_channel_that_does_not_go_on():
    x = recording(0, 4)
    assert signals.segments(x, np.array([1, 1, 1, 1])).tolist() == [0, 0, 0, 0]
    assert signals.segments(x, np.array([1, 1, 2, 2])).tolist() == [0, 0, 1, 1]
    x[1, 8, 64] += 1
    assert signals.segments(x, np.array([1, 1, 1, 1])).tolist() == [0, 0, 1, 1]


def test_har_features_are_used_where_there_are_some(home):
    folder = home / "UCI HAR Dataset"
    write_har(folder, "train", recording(0, 2), [1, 1], [1, 1])
    write_har(folder, "test", recording(1, 1), [2], [2])
    with pytest.raises(DataError, match="the 561 features are not in this copy"):
        signals.har_features()
    for split, rows in (("train", 2), ("test", 1)):
        put(folder / split / f"X_{split}.txt", (" ".join(["0.5"] * 561) + "\n") * rows)
    got = signals.har_features()
    assert got.x.shape == (3, 561) and got.groups.tolist() == [0, 0, 1]
    assert signals.har().x.shape == (3, 9, 128)


def test_har_features_alone_group_runs_of_one_activity(home):
    folder = home / "UCI HAR Dataset"
    for split, y, who in (("train", [1, 1, 2, 2], [1, 1, 1, 5]), ("test", [2], [2])):
        put(folder / split / f"X_{split}.txt", (" ".join(["0.5"] * 561) + "\n") * len(y))
        put(folder / split / f"y_{split}.txt", "".join(f"{k}\n" for k in y))
        put(folder / split / f"subject_{split}.txt", "".join(f"{k}\n" for k in who))
    assert signals.har_features().groups.tolist() == [0, 0, 1, 2, 3]
    with pytest.raises(DataError, match="no Inertial Signals; use har-features"):
        signals.har()


def test_damaged_har_files_are_named(home):
    folder = home / "UCI HAR Dataset"
    write_har(folder, "train", recording(0, 2), [1, 1], [1, 1])
    write_har(folder, "test", recording(1, 1), [2], [2])
    path = folder / "train" / "Inertial Signals" / "body_gyro_y_train.txt"
    whole = path.read_bytes()
    line = len(whole) // 2
    for content, told in (
        (whole[:-40], "is truncated or corrupted"),
        (whole[:line], "is truncated: 1 of 2 windows"),
        (b"", "is truncated: it is empty"),
        (b"1 2 3\n1 2 3\n", "3 numbers to a line in place of 128"),
    ):
        put(path, content)
        with pytest.raises(DataError, match=rf"body_gyro_y_train\.txt {told}|{told}"):
            signals.har()
    path.unlink()
    with pytest.raises(DataError, match=r"body_gyro_y_train\.txt is missing"):
        signals.har()


ARFF = """@relation activity
@attribute "UNIQUE_ID" numeric
@attribute "user" numeric
@attribute "X0" numeric
@attribute "XPEAK" numeric
@attribute "class" { "Walking" , "Jogging" }
@data
1,33,1.0,10,Jogging
2,33,2.0,?,"Walking"
3,17,3.0,30,Standing
"""


def test_wisdm_is_read_from_arff(home):
    put(home / "WISDM_ar_v1.1" / "WISDM_ar_v1.1_transformed.arff", ARFF)
    got = signals.wisdm()
    assert got.y.tolist() == [1, 0, 5] and got.clients.tolist() == [33, 33, 17] and got.classes == 6
    # 1, 2, 3 and 10, 20, 30, for ? becomes the mean of 10 and 30: their deviation is sqrt(2 / 3) of a step
    assert torch.allclose(got.x, torch.tensor([-(1.5**0.5), 0.0, 1.5**0.5]).unsqueeze(1).expand(3, 2))


def test_wisdm_is_read_from_npz(home):
    np.savez(home / "wisdm.npz", x=np.ones((2, 43), np.float32), y=np.array([0, 5]), user=np.array([1, 36]))
    got = signals.wisdm()
    assert got.x.tolist() == [[0.0] * 43] * 2 and got.clients.tolist() == [1, 36]
    np.savez(home / "wisdm.npz", x=np.ones((2, 43)))
    with pytest.raises(DataError, match=r"wisdm\.npz has no y, user: it has x"):
        signals.wisdm()
    put(home / "wisdm.npz", (home / "wisdm.npz").read_bytes()[:-30])
    with pytest.raises(DataError, match=r"wisdm\.npz is truncated or corrupted"):
        signals.wisdm()


def test_damaged_arff_lines_are_named(tmp_path):
    for content, told in (
        (ARFF[:-12], "line 10 has 4 of 5 fields"),
        (ARFF.replace("Standing", "Flying"), "line 10: activity 'Flying' is not one of Walking"),
        (ARFF.replace("3.0", "3.x"), "corrupted at line 10"),
        (ARFF[: ARFF.index("1,33")], "nothing after its head"),
    ):
        with pytest.raises(DataError, match=told):
            signals.read_arff(put(tmp_path / "a.arff", content))


def test_real_har_has_857_recordings_of_one_person_and_activity_each():
    real("har")
    got = signals.har()
    assert np.bincount(got.y).tolist() == [1722, 1544, 1406, 1777, 1906, 1944]
    assert got.x.shape == (10299, 9, 128) and torch.isfinite(got.x).all()
    assert np.unique(got.clients[got.test]).tolist() == [2, 4, 9, 10, 12, 13, 18, 20, 24]
    assert int(got.test.sum()) == 2947 and np.unique(got.clients).tolist() == list(range(1, 31))
    assert sha256(got.y.numpy()) == "08ffc234f9407d20092453dd92ed1047b7dd428a486c48cbb6c29a6fd2945377"
    if find("har").kind == "signals":
        assert sha256(got.x.numpy()) == "d8fcf4e316361ee85c8808f9cbd6abc48f42b7f9a2ac97fc344096fa8190af5f"
        assert len(np.unique(got.groups)) == 857
        assert got.groups is not None and got.clients is not None
        assert len(np.unique(np.stack([got.groups, got.clients, got.y.numpy()]), axis=1).T) == 857
    held = np.bincount(got.clients)[1:]
    assert (held.min(), held.max()) == (281, 409)


def test_no_half_of_a_real_har_window_is_in_two_recordings():
    real("har")
    got = signals.har()
    where: dict[bytes, int] = {}
    for group, window in zip(got.groups.tolist(), got.x.numpy(), strict=True):
        for half in (window[:, :64], window[:, 64:]):
            assert where.setdefault(half.tobytes(), group) == group


def test_real_wisdm():
    real("wisdm")
    got = signals.wisdm()
    assert np.bincount(got.y).tolist() == [2081, 1625, 632, 528, 306, 246] and got.x.shape == (5418, 43)
    assert np.unique(got.clients).tolist() == list(range(1, 37))
    held = np.bincount(got.clients)[1:]
    assert (held.min(), held.max()) == (60, 273)
    assert sha256(got.y.numpy()) == "dd051ee5712c20bef5b5313faa923945320ba2834e313c698c778bef680d6139"
    assert sha256(got.clients) == "fb4df1c039faf01c38dcabb4fc1c82feae7edb6e61b66df36938b8d90f16dd6b"
    assert torch.allclose(got.x.mean(0), torch.zeros(43), atol=1e-4)
    # standardised numbers may differ in their last bit from machine to machine
    assert got.x[[0, 1000, 5417], [0, 20, 42]].tolist() == pytest.approx([-0.746406, -0.962417, -3.559701], abs=1e-5)
