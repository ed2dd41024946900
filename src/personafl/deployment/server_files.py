"""The server's checkpoint: all it needs to go on behind a stage, written as one.

    server/state.json            numbers, who takes part, and the stamps of the files below; replaced last
    server/model-N.safetensors   the server's state behind checkpoint N
    server/rows/C-N.safetensors  what it knows of client C, as of checkpoint N

A checkpoint writes the rows of those that changed. Files of no checkpoint, left by a process that was killed, are
removed by the next.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from personafl.core.errors import UserError
from personafl.core.types import Params
from personafl.deployment.tensor_files import read_tensors, write_tensors
from personafl.storage import files

STATE = "state.json"


class ServerFiles:
    """The checkpoint in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "rows").mkdir(parents=True, exist_ok=True)
        self.number = 0
        self.held: dict[str, Any] = {}  # files of the checkpoint, and what they are checked by
        self.rows: dict[int, str] = {}  # files by client

    def save(self, numbers: dict[str, Any], server: Params, rows: dict[int, Params], changed: set[int]) -> None:
        """Write a checkpoint; `rows` has what is known of clients, `changed` whose has changed since the last."""
        number = self.number + 1
        model = f"model-{number}.safetensors"
        mine = {c: name for c, name in self.rows.items() if c in rows}
        mine |= {c: f"rows/{c}-{number}.safetensors" for c in sorted(changed & rows.keys())}
        new = {model: server} | {mine[c]: rows[c] for c in changed & rows.keys()}
        held = {name: self.held[name] for name in mine.values() if name in self.held}
        held |= {name: write_tensors(self.folder / name, tensors) for name, tensors in new.items()}
        told = {"number": number, "model": model, "rows": mine, "files": held, "numbers": numbers}
        files.write(self.folder / STATE, json.dumps(told))
        self.number, self.held, self.rows = number, held, mine
        self._clear()

    def load(self) -> tuple[dict[str, Any], Params, dict[int, Params]] | None:
        """Numbers, the server's state and rows of clients; None where there is no checkpoint yet."""
        path = self.folder / STATE
        if not path.exists():
            return None
        try:
            told = json.loads(files.read_text(path))
            self.number, self.held = int(told["number"]), dict(told["files"])
            self.rows = {int(c): str(n) for c, n in told["rows"].items()}
            server = read_tensors(self.folder / told["model"], self.held[told["model"]])
            rows = {c: read_tensors(self.folder / name, self.held[name]) for c, name in self.rows.items()}
            numbers = dict(told["numbers"])
        except UserError as e:
            raise UserError(f"{e}; the server cannot go on from it") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise UserError(f"{path}: cannot be read: {e}") from None
        self._clear()
        return numbers, server, rows

    def _clear(self) -> None:
        """Remove files of no checkpoint."""
        for path in (*self.folder.glob("model-*"), *(self.folder / "rows").iterdir()):
            if str(path.relative_to(self.folder)) not in self.held:
                files.remove(path)
