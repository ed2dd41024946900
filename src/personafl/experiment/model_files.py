"""What a run folder has of a model besides its parameters: weights that no client trains, and outputs to know it by."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from safetensors import SafetensorError, safe_open

from personafl.core.errors import Note, UserError
from personafl.core.plain_text import list_names
from personafl.core.types import Params
from personafl.experiment.checkpoint_files import (
    FINAL,
    save_tensors,
)
from personafl.models import StackedModel
from personafl.models.frozen_weights import SAVED_FROZEN, complex_as_pairs, pairs_as_complex, size_in_bytes
from personafl.models.sample_outputs import outputs_difference
from personafl.storage import files

OUTPUTS = "sample_outputs.json"


def note_unsaved_weights(model: StackedModel) -> None:
    """Tell that some frozen weights will have to be given again when the run is read."""
    large = [n for n in model.frozen_hashes if n not in model.small_frozen]
    if large:
        size = sum(size_in_bytes(model.frozen[n]) for n in large)
        warnings.warn(
            f"{size >> 20} MiB of weights that no client trains ({list_names(sorted(large), 3)}) are not saved in the "
            "run folder, only their hashes: reading or resuming the run needs a model with the same weights",
            Note,
            stacklevel=2,
        )


def save_frozen(path: Path, model: StackedModel) -> None:
    """Write the smaller frozen weights, and a hash of each that a module does not compute anew by itself."""
    saved = complex_as_pairs(model.small_frozen)
    save_tensors(path, saved, {"hashes": json.dumps(model.frozen_hashes)})


def restore_frozen(model: StackedModel, home: Path) -> None:
    """Give a model the frozen weights of a run; refuse one whose weights differ where the run has only their hash."""
    path = home / FINAL / "frozen.safetensors"
    values, hashes = _load_frozen(path) if path.exists() else ({}, {})
    here = model.frozen
    values = pairs_as_complex(values, here)
    model.restore_frozen({n: t for n, t in values.items() if n in here and t.shape == here[n].shape})
    now = model.frozen_hashes
    if differ := [n for n in hashes | now if hashes.get(n) != now.get(n)]:
        raise UserError(
            f"{home}: the model has other frozen weights than that of this run: {list_names(differ)} differ. Weights "
            f"that no client trains are saved up to {SAVED_FROZEN >> 20} MiB, beyond that only hashed; build the model "
            "with the weights the run had"
        )


def check_outputs(model: StackedModel, home: Path) -> None:
    """Refuse a model that gives other outputs for the same weights than that of a run."""
    path = home / FINAL / OUTPUTS
    try:
        expected = json.loads(files.read_text(path))
        if not isinstance(expected, list) or not all(isinstance(value, float) for value in expected):
            raise ValueError("not a list of numbers")
    except FileNotFoundError:  # a run of an earlier version, or one that has only been copied in part
        return
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path}: cannot be read: {e}") from None
    if difference := outputs_difference(model.sample_outputs, expected):
        raise UserError(
            f"{home}: the model gives other outputs than that of this run for the same weights ({difference}). Its "
            "code, or a tensor in it that is neither a parameter nor a buffer, has changed; build the model as the run "
            "did"
        )


def _load_frozen(path: Path) -> tuple[Params, dict[str, str]]:
    try:
        files.check_regular(path)
        with safe_open(path, "pt") as file:
            hashes = json.loads(file.metadata()["hashes"])
            if not isinstance(hashes, dict) or not all(isinstance(h, str) for h in hashes.values()):
                raise ValueError("its hashes are damaged")
            return {n: file.get_tensor(n) for n in file.keys()}, hashes  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(f"{path}: cannot be read: {e}") from None
