"""The fuzzing tool: a short run over every reader, all that was ever found, and that it finds what there is to find."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tools import fuzz
from tools.fuzz import TARGETS, Target

from personafl.core.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")  # readers may warn of what they were given

SHORT = {"codec": 2000, "picture": 20, "pfllib": 40, "run": 10, "checkpoint": 8, "request": 40}
"""Inputs of a target; others have 60."""


def kept() -> list[Path]:
    return sorted(p for p in fuzz.CORPUS.glob("*/*") if p.parent != fuzz.BODIES)


def test_the_corpus_belongs_to_targets() -> None:
    assert {p.parent.name for p in kept()} <= TARGETS.keys()
    assert len(list(fuzz.BODIES.iterdir())) > 20


@pytest.mark.parametrize("name", TARGETS)
def test_valid_files_are_read(name: str, tmp_path: Path) -> None:
    """Else what is made of them would end at the first check."""
    assert TARGETS[name].read(TARGETS[name].seeds()[0], tmp_path) is not None


@pytest.mark.parametrize("name", sorted({p.parent.name for p in kept()}))
def test_what_was_found_once_is_refused_in_one_line_and_little_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [p for p in kept() if p.parent.name == name]
    monkeypatch.setattr(Target, "input", lambda self, number, seed, files: paths[number].read_bytes())
    found = fuzz.fuzzed(name, len(paths), 0, seconds=0, memory_mib=512)
    assert {paths[n].name: told for n, told in found} == {}


def test_what_reached_every_line_of_the_codec_is_a_payload_or_refused(tmp_path: Path) -> None:
    for path in sorted(fuzz.BODIES.iterdir()):
        assert fuzz.tried(TARGETS["codec"], fuzz.sealed(path.read_bytes()), tmp_path) == "", path


@pytest.mark.parametrize("name", TARGETS)
def test_a_short_run_finds_nothing(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    files = target.files(name)
    for number in range(SHORT.get(name, 60)):
        assert fuzz.tried(target, target.input(number, 7, files), tmp_path) == "", f"{name}, seed 7, input {number}"


# The tool itself


def test_inputs_are_a_function_of_seed_and_number() -> None:
    target = TARGETS["codec"]
    files = target.files("codec")
    first = [target.input(i, 0, files) for i in range(50)]
    assert first == [target.input(i, 0, files) for i in range(50)]
    assert len(set(first)) > 40
    assert first != [target.input(i, 1, files) for i in range(50)]


def test_most_messages_and_archives_are_sealed_again() -> None:
    """A message whose checksum is wrong says nothing of what is behind that check."""
    for name in ("codec", "npz"):
        target = TARGETS[name]
        files, form = target.files(name), target.form
        assert form is not None
        inputs = [target.input(i, 0, files) for i in range(200)]
        assert sum(form.closed(form.opened(raw)) == raw for raw in inputs if form.opened(raw)) > 120


def raising(e: BaseException) -> Target:
    def read(_: bytes, __: Path) -> None:
        raise e

    return Target(read, lambda: [b"abc"])


def hidden(e: BaseException) -> UserError:
    """An error of ours in place of another."""
    try:
        try:
            raise e
        except type(e):
            raise UserError("a file that is no good") from None
    except UserError as ours:
        return ours


def test_a_finding_is_any_error_but_ours(tmp_path: Path) -> None:
    assert fuzz.tried(raising(UserError("x: must be y")), b"", tmp_path) == ""
    assert fuzz.tried(raising(hidden(KeyError("x"))), b"", tmp_path) == ""
    assert fuzz.tried(raising(KeyError("x")), b"", tmp_path).startswith("KeyError at ")
    assert fuzz.tried(raising(hidden(MemoryError())), b"", tmp_path).startswith("MemoryError at ")
    assert fuzz.tried(raising(UserError("x\ny")), b"", tmp_path).startswith("not one line")
    assert fuzz.tried(raising(UserError("")), b"", tmp_path).startswith("not one line")


def test_a_process_that_ends_and_one_that_hangs_and_one_that_takes_all_memory_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of inputs 0..5 two end the process, one takes too long, and one asks for more memory than there may be."""

    def read(raw: bytes, _: Path) -> None:
        if raw in (b"1", b"3"):
            os._exit(9)
        if raw == b"2":
            time.sleep(60)
        if raw == b"4":
            bytearray(2**32)

    target = Target(read, lambda: [b"valid"])
    monkeypatch.setattr(Target, "input", lambda self, number, seed, files: b"%d" % number)
    monkeypatch.setitem(TARGETS, "bad", target)
    found = dict(fuzz.fuzzed("bad", 6, 0, seconds=1, memory_mib=256))
    assert {n: told.split(":")[0].split(" at ")[0] for n, told in found.items()} == {
        1: "the process ended with 9",
        2: "TooLong",
        3: "the process ended with 9",
        4: "MemoryError",
    }
