"""What a client keeps of an experiment, on its own disk, by the stage after which it had it.

A client may have played a stage whose result the server never took: the connection broke, the server was killed, the
update was refused. So the state behind a stage is written beside the one before it, and the next request says which of
them the server knows of. That one is gone on from; older ones are removed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from personafl.core.types import Params
from personafl.deployment.tensor_files import read_tensors, write_tensors
from personafl.storage import files

_FILE = re.compile(r"kept-(\d{6})\.json")


class PrivateState:
    """The states one client has of one experiment."""

    def __init__(self, root: Path, experiment: str, client: str) -> None:
        self.folder = root / experiment / client
        self.folder.mkdir(parents=True, exist_ok=True)

    def stages(self) -> list[int]:
        """The stages behind which there is a state, the newest last."""
        found = (_FILE.fullmatch(p.name) for p in self.folder.iterdir())
        return sorted(int(m[1]) for m in found if m)

    def load(self, stage: int) -> Params | None:
        """The state behind a stage, a stack of one; None where there is none, or where it is damaged."""
        path = self._path(stage)
        try:
            return read_tensors(path, json.loads(files.read_text(path.with_suffix(".json"))))
        except (OSError, ValueError, RecursionError):
            return None

    def save(self, stage: int, kept: Params, *, acknowledged: int) -> None:
        """Write the state behind a stage; of older ones keep the one the server knows of."""
        path = self._path(stage)
        files.remove(path.with_suffix(".json"))  # a repeated stage: the old file is none while it is written over
        files.write(path.with_suffix(".json"), json.dumps(write_tensors(path, kept)))
        mine = {self._path(at).with_suffix(s) for at in (stage, acknowledged) for s in (".json", ".safetensors")}
        for other in sorted(self.folder.glob("kept-*")):  # what says that a state is there goes before it
            if other not in mine:
                files.remove(other)

    def _path(self, stage: int) -> Path:
        return self.folder / f"kept-{stage:06d}.safetensors"
