"""Named tensors in a file, with what it is checked by: safetensors keeps neither their order nor a checksum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from personafl.core import tree
from personafl.core.errors import UserError
from personafl.core.types import Params
from personafl.storage import files


def write_tensors(path: Path, tensors: Params) -> dict[str, Any]:
    """Write a whole file in place of the one there may be; what `read_tensors` must be told of it."""
    held = tree.copied({n: t.detach().cpu() for n, t in tensors.items()})  # two that share memory are two in the file
    return {"stamp": files.write(path, save(held)), "names": list(tensors)}


def read_tensors(path: Path, told: Any) -> Params:
    """The tensors of a file that is still what was written, in their order; else `UserError`."""
    try:
        stamp, names = files.Stamp.read(told["stamp"]), [str(n) for n in told["names"]]
        files.check(path.parent, {path.name: stamp})
        held = tree.copied(load_file(path))
        return {n: held[n] for n in names}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as e:
        if isinstance(e, UserError):
            raise
        raise UserError(f"{path}: cannot be read: {e}") from None
