"""What a finished run wrote for people, read back: refused in one line where it is damaged."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from personafl.core.errors import UserError
from personafl.evaluation import final
from personafl.sim.simulator import Row

_NUMBER = (int, float, NoneType)
_SUMMARY: Mapping[str, Any] = {
    "algorithm": str,
    "label": str,
    "seed": int,
    "rounds": int,
    "evaluated_model": str,
    "metric": {"name": str, "better": str},
    "accuracy": {"personal": {"mean": _NUMBER, "std": _NUMBER, "worst": _NUMBER}},
    "shift": (dict, NoneType),
    "communication": {"up_bytes": _NUMBER, "down_bytes": _NUMBER, "mib_per_client": _NUMBER},
    "compute": {"flops_per_client": _NUMBER},
    "time": {"seconds": _NUMBER},
    "hashes": dict,
}
_SHIFT: Mapping[str, Any] = {"degrees": dict, "average": _NUMBER}
_CELL: Mapping[str, Any] = {"mean": _NUMBER, "std": _NUMBER}


def read_summary(path: Path) -> dict[str, Any]:
    """The `summary.json` of a method and seed."""
    held: dict[str, Any] = _json(path, _text(path))
    _check(path, "", held, _SUMMARY)
    if held["shift"] is not None:
        _check(path, "shift.", held["shift"], _SHIFT)
        for degree, cell in held["shift"]["degrees"].items():
            if not _is_number(degree):
                raise UserError(f"{path}: not a summary of a run: {degree[:20]!r} is no degree of shift")
            _check(path, "shift.degrees.", cell, _CELL)
    return held


def read_rows(path: Path) -> list[Row]:
    """The `metrics.jsonl` of a method and seed: a row for each stage."""
    rows = [_json(path, line) for line in _text(path).splitlines()]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or type(row.get("round")) is not int:
            raise UserError(f"{path}, line {number}: not a row of a run, with its round")
    return rows


def read_clients(path: Path) -> list[Row]:
    """The `clients.csv` of a method and seed: a row for each client."""
    try:
        held = list(csv.DictReader(io.StringIO(_text(path), newline="")))
    except csv.Error as e:
        raise UserError(f"{path}: not a table of clients: {e}") from None
    for number, row in enumerate(held, 1):
        for name, value in row.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise UserError(f"{path}: client {number} has more or fewer cells than there are columns")
            if name not in final.TOLD and not _is_number(value):
                raise UserError(f"{path}: client {number}, column {name[:40]}: {value[:40]!r} is no number")
    return [{k: v if k in final.TOLD else _number(v) for k, v in row.items()} for row in held]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: damaged: it is no text") from None


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: damaged: {e}") from None


def _check(path: Path, within: str, held: object, wanted: Mapping[str, Any]) -> None:
    """Refuse a table that lacks an entry or has one of another kind."""
    for name, kind in wanted.items():
        value = held.get(name) if isinstance(held, dict) else held
        if not isinstance(held, dict) or name not in held:
            raise UserError(f"{path}: not a summary of a run: it has no {within}{name}")
        if isinstance(kind, Mapping):
            _check(path, f"{within}{name}.", value, kind)
        elif not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(f"{path}: not a summary of a run: {within}{name} is a {type(value).__name__}")


def _number(text: str) -> float | int:
    return int(text) if text.isdecimal() else float(text)


def _is_number(text: str) -> bool:
    try:
        _number(text)
    except ValueError:
        return False
    return True
