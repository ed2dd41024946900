"""The model a client ends up with, on its own disk: written by its node, loaded and used without any server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from personafl.core.display import Displayed
from personafl.core.errors import UserError
from personafl.core.plain_text import list_names
from personafl.core.types import Params
from personafl.data import batches
from personafl.deployment.federation_spec import Parts, World, build_parts
from personafl.deployment.tensor_files import read_tensors, write_tensors
from personafl.models import StackedModel
from personafl.models.client_module import ClientModule
from personafl.models.frozen_weights import SAVED_FROZEN, complex_as_pairs, pairs_as_complex
from personafl.models.sample_outputs import outputs_difference
from personafl.storage import files

MODEL = "model"  # folder of it, among what the client keeps
_TENSORS, _FROZEN, _ABOUT = "deployed.safetensors", "frozen.safetensors", "model.json"


@dataclass(frozen=True, repr=False)
class LocalModel(Displayed):
    """One client's model: `module` is an ordinary one, `predict` what it says about examples."""

    client: str
    module: ClientModule
    world: World
    scores: dict[str, Any]  # of it, on the client's own test data

    def _facts(self) -> dict[str, object]:
        form = self.world.form
        return {"client": self.client, "method": self.module.algorithm.called, "shape": form.shape, **self.scores}

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """What the outputs stand for, where labels are text."""
        return self.world.form.class_names

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """The columns of an example, in their order, where the data are tables."""
        return self.world.form.feature_names

    @property
    def categories(self) -> dict[str, tuple[str, ...]]:
        """The columns of a table that hold text, each with its categories in the order of its features."""
        return {c.name: c.categories for c in self.world.form.columns or () if c.categories is not None}

    @torch.no_grad()
    def predict(self, x: Tensor | np.ndarray[Any, Any]) -> Tensor:
        """Outputs `[B, K]` for examples `[B, ...]` as the client's data have them.

        Those of regression are in the units of the client's targets.
        """
        given = torch.as_tensor(x)
        wanted = self.world.form.shape
        if tuple(given.shape[1:]) != wanted:
            raise UserError(f"predict: examples of shape {tuple(given.shape)}: must be (examples, {str(wanted)[1:-1]})")
        given = given.to(next(self.module.networks.parameters()).device)
        rule = self.module.algorithm.rule
        size = max(len(given), 1) if rule is not None and rule.together else batches.SWEEP
        blocks = torch.split(given.clone(memory_format=torch.contiguous_format), size)
        return torch.cat([self.module(block) for block in blocks])


def write_model(
    folder: Path, client: str, world: World, deployed: Params, scores: dict[str, Any], model: StackedModel
) -> None:
    """Write what a client predicts with, a stack of one, in place of what is there.

    Of weights that no client trains, the smaller ones and a hash of each are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files.remove(folder / _ABOUT)  # half a model is none
    held = write_tensors(folder / _TENSORS, deployed)
    frozen = {
        "hashes": model.frozen_hashes,
        "tensors": write_tensors(folder / _FROZEN, complex_as_pairs(model.small_frozen)),
    }
    about = {"client": client, "world": world.told(), "tensors": held, "frozen": frozen, "scores": scores}
    files.write(folder / _ABOUT, json.dumps(about, indent=1))


def load_model(folder: str | Path, *, device: str = "cpu", trust: bool = False) -> LocalModel:
    """The model a node left in a folder; code of one's own that its recipe names is imported where it is trusted."""
    home = Path(folder)
    if not (home / _ABOUT).is_file():
        raise UserError(
            f"{home}: no model is in it; a client's is in STATE/EXPERIMENT/CLIENT/{MODEL} after the last round"
        )
    try:
        about = json.loads(files.read_text(home / _ABOUT))
        deployed, world = read_tensors(home / _TENSORS, about["tensors"]), World.read(about["world"])
        client, scores = str(about["client"]), dict(about["scores"])
        frozen = None if "frozen" not in about else _read_frozen(home, about["frozen"])
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(f"{home}: not a client's model: {e}") from None
    parts = build_parts(world, device, trust=trust)
    _restore_frozen(parts.model, home, frozen, world.init)
    if difference := outputs_difference(parts.model.sample_outputs, world.outputs):
        raise UserError(
            f"{home}: the model gives other outputs than that of the deployment for the same weights ({difference}). "
            "Its code, or a tensor in it that is neither a parameter nor a buffer, has changed; use the module that "
            "the deployment had"
        )
    return LocalModel(client, _module(parts, deployed, world), world, scores)


def _read_frozen(home: Path, told: Any) -> tuple[Params, dict[str, str]]:
    """Frozen weights and the hashes of all, as `write_model` left them."""
    hashes = {str(n): str(h) for n, h in dict(told["hashes"]).items()}
    return read_tensors(home / _FROZEN, told["tensors"]), hashes


def _restore_frozen(model: StackedModel, home: Path, frozen: tuple[Params, dict[str, str]] | None, init: str) -> None:
    """Give a model the frozen weights it was trained with; refuse others where only their hash is there."""
    if frozen is None:  # written before frozen weights were
        if model.frozen_hashes and init and model.initial_hash() != init:
            raise UserError(
                f"{home}: the model has weights that no client trains ({list_names(sorted(model.frozen_hashes), 3)}), "
                f"which this folder does not hold, and those built here are not known to be the same: all first "
                f"weights together have the hash {model.initial_hash()} here and {init} in the deployment. Build the "
                "model with the weights of the deployment"
            )
        return
    values, hashes = pairs_as_complex(frozen[0], model.frozen), frozen[1]
    model.restore_frozen({n: t for n, t in values.items() if n in model.frozen and t.shape == model.frozen[n].shape})
    now = model.frozen_hashes
    if differ := [n for n in hashes | now if hashes.get(n) != now.get(n)]:
        raise UserError(
            f"{home}: the model has other frozen weights than the deployment: {list_names(differ)} differ. Weights "
            f"that no client trains are saved up to {SAVED_FROZEN >> 20} MiB, beyond that only hashed; build the model "
            "with the weights the deployment had"
        )


def _module(parts: Parts, deployed: Params, world: World) -> ClientModule:
    placed = {n: t.to(parts.device) for n, t in deployed.items()}
    return ClientModule(parts.model, parts.algorithm, placed, world.normalize(), world.normalize_targets())
