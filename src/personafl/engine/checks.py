"""What a simulation is refused for before it is made."""

from __future__ import annotations

import torch
from torch import nn

from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.faults import Faults
from personafl.core.normalization import as_inputs
from personafl.core.settings import shortened
from personafl.core.types import TaskName, Training
from personafl.data.federated import Federation
from personafl.evaluation import image_transforms, metrics
from personafl.evaluation.settings import Evaluation
from personafl.models.stacked import StackedModel


def check_data(federation: Federation, training: Training, evaluation: Evaluation) -> None:
    """Refuse what these data cannot be asked for."""
    image_transforms.check(evaluation, federation.source)
    if evaluation.shift == "label" and (task := federation.source.task) != "classification":
        raise UserError(
            f"evaluation.shift='label': it changes the mix of classes, and {task} has none; use donor or pool"
        )
    check_stopping(int(federation.splits["validation"].offsets[-1]), federation.source.task, training, evaluation)
    check_augmentation(federation.source.name, tuple(federation.source.x.shape[1:]), training)


def check_augmentation(name: str, shape: tuple[int, ...], training: Training) -> None:
    """Refuse to augment what are no images."""
    if training.augment != "none" and len(shape) != 3:
        raise UserError(
            f"training.augment={training.augment!r}: {name} is no set of images, its examples are of shape {shape}; "
            "use none"
        )


def check_stopping(validation: int, task: TaskName, training: Training, evaluation: Evaluation) -> None:
    """Refuse to stop by what is not there or cannot be reached; `validation` is how many examples there are for it."""
    if training.patience and not validation:
        raise UserError(
            f"training.patience={training.patience}: needs validation data, and there are none; set "
            "data.validation_share, such as 0.1"
        )
    metric = evaluation.metric if evaluation.metric != "auto" else metrics.default_metric(task)
    if training.target is not None and metric in metrics.PERCENT and not 0 < training.target <= 1:
        raise UserError(f"training.target={training.target:g}: must be a share in (0, 1]")


def check_calibration(validation: int, algorithm: Algorithm, evaluation: Evaluation) -> None:
    """Refuse answers that are fitted to validation data where there are none, or where these are to judge them."""
    if algorithm.rule is None or not (asks := algorithm.rule.asks_validation):
        return
    if evaluation.split == "validation":
        raise UserError(
            f"inference.{asks}: it fits answers to the validation data, by which evaluation.split='validation', as of "
            "a sweep, would judge them; leave it out here, and have it in the run that follows"
        )
    if not validation:
        raise UserError(
            f"inference.{asks}: needs validation data, and there are none; set data.validation_share, such as 0.1, or "
            "leave it out"
        )


def checked_parts(
    federation: object, model: object, algorithm: object, training: object, evaluation: object, faults: object
) -> tuple[StackedModel, Algorithm]:
    """What a simulation is made of, or one line about what is in the wrong place."""
    if torch.is_inference_mode_enabled():
        raise UserError("torch.inference_mode is on: tensors made within cannot be trained; leave it first")
    if isinstance(algorithm, type) and issubclass(algorithm, Algorithm):
        algorithm = algorithm()
    if isinstance(model, nn.Module) and isinstance(federation, Federation):
        source = federation.source
        model = StackedModel(model, as_inputs(source.x[:2], torch.float32, source.normalization))
    wanted = (
        ("federation", federation, Federation),
        ("model", model, StackedModel),
        ("algorithm", algorithm, Algorithm),
        ("training", training, Training),
        ("evaluation", evaluation or Evaluation(), Evaluation),
        ("faults", faults or Faults(), Faults),
    )
    for name, value, kind in wanted:
        if not isinstance(value, kind):
            raise UserError(
                f"Simulation({name}={shortened(value)}): must be {kind.__name__}; the order is federation, model, "
                "algorithm, training, evaluation, and personafl.run takes names, arrays and modules"
            )
    assert isinstance(model, StackedModel) and isinstance(algorithm, Algorithm) and isinstance(federation, Federation)
    federation.source.check_outputs(model.info.outputs)
    return model, algorithm
