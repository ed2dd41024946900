"""Shakespeare from tiny files, and the real one where $PERSONAFL_DATA has it."""

import json

import numpy as np
import pytest
import torch

from personafl.data import text
from personafl.data.checksums import DataError
from personafl.data.locate import find
from tests.data.written import leaf, put, real, sha256


def test_leaf_shakespeare_is_taken_as_it_is(home):
    run = "ab\n" + "z" * 77
    leaf(home / "shakespeare", {"PLAY_HAMLET": {"x": [run], "y": ["é"]}}, {"PLAY_HAMLET": {"x": [run], "y": ["}"]}})
    got = text.shakespeare()
    assert "".join(text.ALPHABET[c] for c in got.x[0]) == run
    assert got.y.tolist() == [1, 79] and got.clients.tolist() == [0, 0]  # an unknown character is a blank
    leaf(home / "shakespeare", {"A": {"x": [run[1:]], "y": ["a"]}}, {})
    with pytest.raises(DataError, match="example 0 has 79 characters in place of 80"):
        text.shakespeare()


def test_the_alphabet_has_eighty_different_characters():
    assert len(text.ALPHABET) == len(set(text.ALPHABET)) == 80


def test_windows_are_the_eighty_characters_before_each():
    spoken = "".join(chr(ord("a") + i % 26) for i in range(100))
    x, y = text.windows(spoken)
    assert x.shape == (99, 80)  # every character but the first is foretold
    assert "".join(text.ALPHABET[c] for c in x[0]) == " " * 79 + "a" and text.ALPHABET[y[0]] == "b"
    assert "".join(text.ALPHABET[c] for c in x[98]) == spoken[19:99] and text.ALPHABET[y[98]] == spoken[99]
    assert np.array_equal(text.windows(spoken, 7)[0], x[::7])


def test_blocks_are_whole_speeches_of_a_thousand_characters_or_more():
    speeches = ["a" * 600, "b" * 600, "c" * 1000, "d" * 10]
    assert text.blocks(speeches) == ["a" * 600 + "\n" + "b" * 600, "c" * 1000 + "\n" + "d" * 10]
    assert text.blocks(["a", "b"]) == ["a\nb"] and text.blocks([]) == []


def test_roles_are_clients_and_their_last_speeches_are_for_testing(home):
    roles = [
        {"play": "P", "role": "ONCE", "speeches": ["SingleProcess."]},
        {"play": "P", "role": "TWICE", "speeches": ["One two.", "Three."]},
        {"play": "P", "role": "OFTEN", "speeches": ["x" * 1000] * 9 + ["y" * 500]},
    ]
    put(home / "shakespeare" / "roles.json", json.dumps(roles))
    got = text.shakespeare()
    # 8 and 6 characters give 7 and 5 windows; of ten speeches two are for testing: 1,501 characters with the newline
    assert [int(((got.clients == c) & (got.test == t)).sum()) for c in (1, 2) for t in (0, 1)] == [7, 5, 8 * 999, 1500]
    assert 0 not in got.clients and got.x.shape[1] == 80 and got.classes == 80
    assert np.unique(got.groups[got.clients == 2]).size == 8 + 1 and np.unique(got.groups).size == 2 + 9
    put(home / "shakespeare" / "roles.json", '[{"role": 1}]')
    with pytest.raises(DataError, match="is not a list of"):
        text.shakespeare()


def test_real_shakespeare_by_role():
    real("shakespeare")
    if find("shakespeare").kind != "roles":
        pytest.skip("the counts are those of roles.json, not of LEAF's files")
    got = text.shakespeare(stride=10)
    both = [np.unique(got.clients[m]) for m in (got.test, ~got.test)]
    assert len(both[0]) == len(both[1]) == 1129  # every role with two or more speeches trains and is tested
    assert 0.18 < got.test.mean() < 0.22
    whole = text.shakespeare()
    assert len(whole.y) == 4_263_489 and torch.equal(whole.x[0], got.x[0])
    assert sha256(whole.x.to(torch.uint8).numpy()) == "f231f09dcdd37531e015e3dd839469dc796549811f02d0869e4c0aec1e517f97"
    assert sha256(whole.y.numpy()) == "2d191af9f9bb15af1a4047b725a527d59b286adc7a8307b10fc147dbdb9cd94e"
    assert np.bincount(whole.y)[:4].tolist() == [102381, 696251, 9006, 0]
