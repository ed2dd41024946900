"""The records of a run (`summary.json`, `metrics.jsonl`, `clients.csv`), read back; what is damaged is named."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from personafl.core.errors import UserError
from personafl.core.plain_text import from_spreadsheet_cell, harmless
from personafl.core.types import Row, Summary
from personafl.evaluation import final
from personafl.storage import files

_NUMBER = (int, float)
_MEAN = {"mean": _NUMBER, "std?": _NUMBER}
_ROUND = (int, type(None))
# What must be there and of which type, as far as a table or a figure looks at it.
_SUMMARY: dict[str, Any] = {
    "label": str,
    "algorithm": str,
    "evaluated_model": str,
    "seed": int,
    "rounds": int,
    "lr": _NUMBER,
    "accuracy": {"personal": {**_MEAN, "worst": _NUMBER}, "unseen?": _MEAN},
    "communication": {"mib_per_client": _NUMBER},
    "compute": {"flops_per_client": _NUMBER},
    "time": {"seconds": _NUMBER},
    "environment?": {"execution?": str},
    "hashes": {"*": (str, type(None))},
    "metric?": {"name": str, "better": str},
    "shift~": {"degrees": {"#": _MEAN}, "average": _NUMBER},
    "faults?": {
        "faulty_clients?": list,
        "quarantined?": {"clients": list, "first_round": int, "why": {"*": int}},
        **dict.fromkeys(("dropped?", "busy?", "late?", "stale?"), int),
        "kept_model?": list,
    },
    "validation?": {"best_round": int, "personal": _MEAN},
    "diverged?": dict.fromkeys(("clients", "of", "first_round", "final"), int),
    "stopped?": {"by": str, "on": str, "rounds": int},
    "rounds_to_target?": {"#": {"personal": _ROUND, "global": _ROUND}},
    "robustness?": {
        "corruptions?": {"*": {"*": _MEAN}},
        "corruption_average?": {"std": _NUMBER},
        "whole_corruptions?": {"*": {"*": _MEAN}},
        "whole_corruption_average?": {"std": _NUMBER},
        "whole_clean?": _MEAN,
        "shift_corruptions?": {"*": {"*": _MEAN}},
        "shift_corruption_average?": {"std": _NUMBER},
        "change?": {"inputs": int, "levels": {"*": _NUMBER}, "recovery": {"*": int}, "curve": list},
        "rotations?": {"#": _MEAN},
        "expected?": {"#": _MEAN},
    },
}
_ROW: dict[str, Any] = {"round": int, "phase": str, "personal?": _MEAN}


def read_summary(path: Path) -> Summary:
    """A `summary.json`."""
    return _record(path, "not a summary of a run", _read(path), _SUMMARY)


def read_rounds(path: Path, size: int | None = None) -> list[Row]:
    """The rows of a `metrics.jsonl`, or those in so many bytes it begins with."""
    lines = _read(path, size).splitlines()
    return [_record(path, f"line {i} is not of a run", line, _ROW) for i, line in enumerate(lines, 1)]


def read_clients(path: Path) -> list[Row]:
    """The rows of a `clients.csv`."""
    try:
        held = list(csv.DictReader(io.StringIO(_read(path), newline="")))
    except csv.Error as e:
        raise UserError(f"{path}: not a table of clients: {e}") from None
    return [_client(path, number, row) for number, row in enumerate(held, 1)]


def _client(path: Path, number: int, row: Mapping[Any, Any]) -> Row:
    out: Row = {}
    for name, value in row.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UserError(f"{path}: client {number} has more or fewer cells than there are columns")
        try:
            column = from_spreadsheet_cell(name)
            if name in final.TOLD:
                out[column] = from_spreadsheet_cell(value)
            else:
                out[column] = int(value) if value.isdecimal() else float(value)
        except ValueError:
            raise UserError(f"{path}: client {number}, column {name[:40]}: {value[:40]!r} is no number") from None
    return out


def _read(path: Path, size: int | None = None) -> str:
    try:
        text = files.read_text(path)
        return text if size is None else text.encode()[:size].decode()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from None


def _record(path: Path, what: str, text: str, wanted: Mapping[str, Any]) -> Row:
    try:
        found: Row = _spelt(json.loads(text))
    except RecursionError:
        raise UserError(f"{path}: {what}: nested too deeply") from None
    except ValueError as e:
        raise UserError(f"{path}: {what}: {e}") from None
    if wrong := misfit(found, wanted):
        raise UserError(f"{path}: {what}: {wrong}")
    return found


def _spelt(value: Any) -> Any:
    """The same with every text made harmless."""
    if isinstance(value, dict):
        return {harmless(k): _spelt(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_spelt(v) for v in value]
    return harmless(value) if isinstance(value, str) else value


def misfit(found: Any, wanted: Any, place: str = "") -> str:
    """What is missing or of another type, and where; nothing where all is well.

    `?` behind a key marks what may be missing, `~` what may be null; `*` stands for any key, `#` for any number.
    """
    if not isinstance(wanted, Mapping):
        if isinstance(found, int) and abs(found) >= 2**63:
            return f"{place} is {str(found)[:20]}..., too large a number"
        fine = isinstance(found, wanted) and not isinstance(found, bool)
        return "" if fine else f"{place} is {_kind(found)}"
    if not isinstance(found, dict):
        return f"{place or 'it'} is {_kind(found)}"
    for key, inner in wanted.items():
        name = key.rstrip("?~")
        if key in "*#":
            told = next((w for k, v in found.items() if (w := misfit(v, inner, _join(place, k)))), "")
            told = told or next(
                (f"{_join(place, k)} is no number" for k in found if key == "#" and not _numeric(k)), ""
            )
        elif name not in found:
            told = "" if key.endswith("?") else f"it has no {_join(place, name)}"
        elif found[name] is None and key.endswith("~"):
            told = ""
        else:
            told = misfit(found[name], inner, _join(place, name))
        if told:
            return told
    return ""


def _join(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _numeric(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _kind(value: Any) -> str:
    names = {dict: "a table", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names[type(value)]
