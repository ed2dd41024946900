"""From a recipe to a run: what it leaves open decided, and each method's simulation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from personafl import config
from personafl.config import Method, Recipe, defaults
from personafl.config.components import (
    default_model,
    federation,
    metric,
    model,
    note_clients,
    settled_normalization,
    settled_partition,
    source,
)
from personafl.core.errors import Note, UserError
from personafl.core.normalization import as_inputs
from personafl.core.types import LOSSES
from personafl.data import Federation, Source
from personafl.data.client_corruption import corrupt_source
from personafl.data.shift import Shift
from personafl.engine import dry_run
from personafl.engine.checks import check_data
from personafl.evaluation import matrix
from personafl.evaluation.metrics import METRICS, default_loss, default_metric
from personafl.models import StackedModel
from personafl.simulation.machine import Machine, with_precision
from personafl.simulation.simulator import Simulation


def simulation(
    recipe: Recipe,
    method: Method,
    *,
    fed: Federation | None = None,
    network: StackedModel | None = None,
    machine: Machine | None = None,
    shift: Shift | None = None,
) -> Simulation:
    """One method of a recipe, ready to run."""
    fed = fed or federation(recipe)
    return Simulation(
        fed,
        network or model(recipe, fed.source),
        method.algorithm,
        recipe.training,
        recipe.evaluation,
        criterion=config.criterion(recipe.training.loss, LOSSES[fed.source.task], "training.loss"),
        metric=metric(recipe, fed.source.task),
        machine=machine,
        shift=shift,
        faults=recipe.faults,
    )


def _resolve_task(recipe: Recipe, data: Source) -> Recipe:
    """The recipe with its task, loss and metric by name; refused where they do not fit the targets."""
    task, training, evaluation = data.task, recipe.training, recipe.evaluation
    loss = default_loss(task) if training.loss == "auto" else training.loss
    score = default_metric(task) if evaluation.metric == "auto" else evaluation.metric
    for what, name, known in (("training.loss", loss, LOSSES), ("evaluation.metric", score, METRICS)):
        if isinstance(name, str) and ":" not in name and name not in known[task]:
            raise UserError(
                f"{what}={name!r}: not for {task}, which the targets of {data.name} are ({_told(data.y)}); "
                f"possible are {', '.join(known[task])}, or package.module:function"
            )
    if training.task == "auto":
        _note_task(data)
    return replace(
        recipe, training=replace(training, task=task, loss=loss), evaluation=replace(evaluation, metric=score)
    )


def _note_task(data: Source) -> None:
    """Warn where targets may be meant otherwise than their type says."""
    if data.task == "regression" and bool((data.y == data.y.round()).all()):
        what, other = "are whole numbers of a floating type", "classification takes them for classes"
    elif data.task == "classification":
        _note_classes(data)
        return
    elif data.task == "sequence" and bool(((data.y == 0) | (data.y == 1)).all()):
        what, other = "are 0 and 1 in rows of whole numbers", "multilabel takes them for labels"
    else:
        return
    warnings.warn(f"the targets of {data.name} {what}, taken for {data.task}; training.task={other}", stacklevel=3)


def _note_classes(data: Source) -> None:
    """Refuse numbers that would be far more classes than examples, and say where some classes never occur."""
    there = len(torch.unique(data.y))
    if data.classes > max(1000, len(data.y)):
        raise UserError(
            f"{data.name} has {len(data.y)} examples and whole numbers up to {data.classes - 1} as targets. "
            "training.task=regression predicts them as numbers; training.task=classification takes them for "
            f"{data.classes} classes"
        )
    if data.classes > max(50, len(data.y) // 2):
        warnings.warn(
            f"{data.name} has {data.classes} classes and {len(data.y)} examples; training.task=regression takes its "
            "labels for numbers",
            Note,
            stacklevel=4,
        )
    elif there < data.classes:
        missing = int((torch.bincount(data.y, minlength=data.classes) == 0).nonzero()[0, 0])
        warnings.warn(
            f"{data.classes - there} of the {data.classes} classes of {data.name} have no example, such as {missing}",
            Note,
            stacklevel=4,
        )


def _told(y: Tensor) -> str:
    return f"{str(y.dtype).removeprefix('torch.')} of shape {tuple(y.shape)}"


def resolved(
    recipe: Recipe, seeds: Sequence[int], device: str = "cpu", data: Source | None = None
) -> tuple[Recipe, dict[int, Federation]]:
    """The recipe with `auto` replaced by what it means, and its data divided for every seed.

    Every method's hooks are gone through once, for one client and without training, before anything is written: what
    cannot work is said first.
    """
    data = (data or source(recipe)).as_task(recipe.training.task)
    if data.x.dim() < 2:
        raise UserError(f"{data.name}: examples of shape {tuple(data.x.shape)}: must be (N, features) or more")
    data = corrupt_source(data, recipe.data.corruption, recipe.data.corruption_severity)
    recipe = _resolve_task(replace(recipe, training=with_precision(recipe.training, device)), data)
    if not isinstance(recipe.data.dataset, (str, Federation)):
        recipe = replace(recipe, data=replace(recipe.data, dataset=data))
    if recipe.model.name == config.AUTO:
        recipe = replace(recipe, model=replace(recipe.model, name=default_model(data)))
    recipe = settled_normalization(settled_partition(recipe, data), data).with_seed(seeds[0])
    feds = {seed: federation(recipe.with_seed(seed), data) for seed in seeds}
    recipe, told = defaults.settled(recipe, feds[seeds[0]])
    if told:
        warnings.warn(told, Note, stacklevel=3)
    note_clients(recipe, data)
    matrix.check(recipe.evaluation, feds[seeds[0]], device)
    check_data(feds[seeds[0]], recipe.training, recipe.evaluation)
    data = feds[seeds[0]].source
    network = model(recipe, data)
    if network.slower_than_stack:
        message = (
            f"{type(network.module).__name__} runs {network.execution}. This is slower than a stack of all clients"
        )
        warnings.warn(message, Note, stacklevel=3)
    for method in recipe.algorithms:
        dry_run.check(method.algorithm, network, recipe.training, feds[seeds[0]].num_clients)
    _check_scoring(recipe, network, data)
    return recipe, feds


def _check_scoring(recipe: Recipe, network: StackedModel, data: Source) -> None:
    """Loss and metric must give one number per example, or what the metric's own `reduce` takes."""
    whole = not data.y.is_floating_point()  # of classes, the one that takes the most outputs
    rows = torch.tensor(
        [0, int(data.y.flatten(1).amax(1).argmax() if data.y.dim() > 1 else data.y.argmax()) if whole else 1]
    )
    x = as_inputs(data.x[rows], next(iter(network.initial.values())).dtype, data.normalization)
    with torch.no_grad():
        out = network({n: t[None] for n, t in network.initial.items()}, x[None])[0]
    y = data.y[rows]
    units = data.target_normalization
    normalized = (out, y) if units is None else (out, units(y, y.dtype))
    own = (out, y) if units is None else (units.restore(out, 1), y)
    judged = metric(recipe, data.task)
    loss = config.criterion(recipe.training.loss, LOSSES[data.task], "training.loss")
    for what, name, rule, given, several in (
        ("training.loss", recipe.training.loss, loss, normalized, False),
        ("evaluation.metric", recipe.evaluation.metric, judged.per_example, own, judged.reduce is not None),
    ):
        name = name if isinstance(name, str) else config.described(name)
        try:
            found = rule(*given)
        except (RuntimeError, TypeError, ValueError, IndexError) as e:
            raise UserError(
                f"{what}={name!r}: fails on outputs of shape {tuple(out.shape)} (model.name={recipe.model.named!r}) "
                f"and targets of shape {tuple(y.shape)}{f' up to {int(y.max())}, counted from 0' if whole else ''}: {e}"
            ) from None
        if not isinstance(found, Tensor) or found.shape[:1] != (2,) or found.dim() != (2 if several else 1):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            must = "a row of numbers" if several else "one number"
            hint = (
                "; a loss of PyTorch's takes reduction='none'" if isinstance(found, Tensor) and not found.dim() else ""
            )
            raise UserError(
                f"{what}={name!r}: must give {must} per example, gave {shape} for two examples with outputs of shape "
                f"{tuple(out.shape)} and targets of shape {tuple(y.shape)}{hint}"
            )
    if judged.reduce is not None:
        number = judged.of_client(judged.per_example(*own))
        if number.shape != ():
            raise UserError(
                f"evaluation.metric={judged.name!r}: reduce must give one number for (n, S) and one for each of "
                f"(n, ..., S), gave {tuple(number.shape)} for two examples"
            )
