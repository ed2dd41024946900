"""The model a client ends up with, on its own disk: written by its node, loaded and used without any server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from personafl.core import batches, files
from personafl.core.display import Displayed
from personafl.core.errors import UserError
from personafl.core.types import Params
from personafl.deployment.tensor_files import read_tensors, write_tensors
from personafl.deployment.world import Parts, World, build_parts
from personafl.models.client_module import ClientModule

MODEL = "model"  # folder of it, among what the client keeps
_TENSORS, _ABOUT = "deployed.safetensors", "model.json"


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


def write_model(folder: Path, client: str, world: World, deployed: Params, scores: dict[str, Any]) -> None:
    """Write what a client predicts with, a stack of one, in place of what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    files.remove(folder / _ABOUT)  # half a model is none
    held = write_tensors(folder / _TENSORS, deployed)
    about = {"client": client, "world": world.told(), "tensors": held, "scores": scores}
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
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(f"{home}: not a client's model: {e}") from None
    parts = build_parts(world, device, trust=trust)
    return LocalModel(client, _module(parts, deployed, world), world, scores)


def _module(parts: Parts, deployed: Params, world: World) -> ClientModule:
    placed = {n: t.to(parts.device) for n, t in deployed.items()}
    return ClientModule(parts.model, parts.algorithm, placed, world.normalize(), world.normalize_targets())
