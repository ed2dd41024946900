"""Requests and replies as Flower's records: JSON in a config record, each blob as one raw array.

One array per blob, because Flower stores and sends every array on its own; raw, because its other forms add a header.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from personafl.core.errors import UserError

STYPE = "personafl.wire.v3"
MOST_TEXT = 2**24  # bytes of JSON


def to_records(told: dict[str, Any], blobs: Sequence[bytes]) -> RecordDict:
    """What is said, and the tensors that go with it."""
    arrays = {str(i): Array(dtype="bytes", shape=(len(b),), stype=STYPE, data=b) for i, b in enumerate(blobs)}
    return RecordDict({"told": ConfigRecord({"json": json.dumps(told)}), "blobs": ArrayRecord(arrays)})


def from_records(records: RecordDict) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """The inverse; anything else is refused (`UserError`)."""
    try:
        text = records.config_records["told"]["json"]
        arrays = records.array_records["blobs"]
        if not isinstance(text, str) or len(text) > MOST_TEXT:
            raise ValueError("no text, or too long")
        told = json.loads(text)
        if not isinstance(told, dict):
            raise ValueError("not a table")
        held = [arrays[str(i)] for i in range(len(arrays))]
        if any(a.stype != STYPE for a in held):
            raise ValueError(f"tensors as {next(a.stype for a in held if a.stype != STYPE)!r:.40}, not as {STYPE}")
        return told, tuple(bytes(a.data) for a in held)
    except (KeyError, ValueError, TypeError, RecursionError) as e:
        raise UserError(f"a message that is none of personafl's: {e}") from None
