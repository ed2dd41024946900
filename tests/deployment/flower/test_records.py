"""Requests and replies as Flower's records."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from personafl.core.errors import UserError
from personafl.deployment.flower.records import MOST_TEXT, STYPE, from_records, to_records


@pytest.mark.parametrize("blobs", [(), (b"one",), (b"", b"two", b"three")])
def test_what_is_sent_is_what_arrives(blobs: tuple[bytes, ...]) -> None:
    told = {"a": [1, 2.5, None, "ü"], "b": {"c": True}}
    assert from_records(to_records(told, blobs)) == (told, blobs)


def test_eleven_blobs_stay_in_order() -> None:
    blobs = tuple(bytes([i]) for i in range(11))
    assert from_records(to_records({}, blobs))[1] == blobs


def records(text: Any = "{}", arrays: dict[str, Array] | None = None, **more: Any) -> RecordDict:
    return RecordDict({"told": ConfigRecord({"json": text}), "blobs": ArrayRecord(arrays or {}), **more})


def array(stype: str = STYPE) -> Array:
    return Array(dtype="bytes", shape=(1,), stype=stype, data=b"x")


@pytest.mark.parametrize(
    "given",
    [
        RecordDict(),
        RecordDict({"told": ConfigRecord({"json": "{}"})}),
        RecordDict({"blobs": ArrayRecord()}),
        RecordDict({"told": ArrayRecord(), "blobs": ConfigRecord()}),
        records(5),
        records(b"{}"),
        records("[]"),
        records("{"),
        records("[" * 10**5),
        records('{"a": 1' + "0" * 5000 + "}"),
        records('"' + "x" * MOST_TEXT + '"'),
        records(json.dumps({}), {"1": array()}),
        records(json.dumps({}), {"0": array("numpy.ndarray")}),
    ],
)
def test_anything_else_is_refused_in_one_line(given: RecordDict) -> None:
    with pytest.raises(UserError, match="a message that is none of personafl's: ") as e:
        from_records(given)
    assert len(str(e.value)) < 300 and "\n" not in str(e.value)
