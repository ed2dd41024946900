"""What a recipe is refused for before any client is waited for, as far as that does not hang on their data."""

from __future__ import annotations

from dataclasses import replace

import torch

from personafl.config import Recipe
from personafl.core.errors import UserError
from personafl.core.types import Setup
from personafl.engine.checks import check_calibration, check_stopping
from personafl.models import MODELS, StackedModel
from personafl.plugins.assemble import assembled, require_all_rounds

SHAPE, CLASSES = (1, 8, 8), 2  # of examples a stand-in for the model is made for


def check_before_clients(recipe: Recipe, clients: int) -> None:
    """Refuse what is known to be impossible before any client is there."""
    check_calibration(int(recipe.data.validation_share > 0), recipe.algorithms[0].algorithm, recipe.evaluation)
    _check_stopping(recipe, clients)


def _check_stopping(recipe: Recipe, clients: int) -> None:
    """Refuse `training.patience` and `training.target` where the method or the data's division rules them out."""
    training, kind = recipe.training, recipe.training.task
    if not training.stops_early:
        return
    known = kind != "auto" or recipe.evaluation.metric != "auto"  # else the data say what a target is a share of
    judged = training if known else replace(training, target=None)
    task = "classification" if kind == "auto" else kind
    check_stopping(int(recipe.data.validation_share > 0), task, judged, recipe.evaluation)
    whole = replace(training, patience=0, target=None, task=task)
    model = StackedModel(MODELS["mlp"].build(SHAPE, CLASSES), torch.zeros(2, *SHAPE))
    try:
        method = assembled(recipe.algorithms[0].algorithm, Setup(model.info, whole, clients, clients))
    except UserError:  # one for another model than the stand-in; it is asked again when the data are known
        return
    require_all_rounds(method, training)
