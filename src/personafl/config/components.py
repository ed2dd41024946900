"""The parts a recipe names: data, who holds what, network, metric. Nothing here simulates."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from personafl import config
from personafl.config import Recipe
from personafl.core import rng
from personafl.core.errors import UserError
from personafl.core.normalization import as_inputs
from personafl.core.plain_text import list_names
from personafl.core.types import Metric, TaskName
from personafl.data import DATASETS, PARTITIONS, Federation, Source, arrays, custom, normalize, partition_file
from personafl.data.client_corruption import corrupt_federation
from personafl.data.missing import Missing
from personafl.data.partition import (
    PartitionRequest,
    PartitionResult,
    partition,
    partition_train,
    partition_train_and_test,
)
from personafl.data.ragged import Indices, Ragged
from personafl.data.small_clients import without_small_clients
from personafl.evaluation.metrics import METRICS
from personafl.models import MODELS, StackedModel
from personafl.storage.npz import npz_shapes, read_npz

SPLIT = "split.json"
"""Who holds what, in a run folder, where no rule of the recipe says it."""


def source(recipe: Recipe) -> Source:
    """The data set of a recipe, its targets those of the recipe's task."""
    found = _source(recipe)
    try:
        return found.as_task(recipe.training.task)
    except UserError as e:
        raise UserError(f"training.task={recipe.training.task!r}: {e}") from None


def _source(recipe: Recipe) -> Source:
    d, name, task = recipe.data, recipe.data.dataset, recipe.training.task
    if isinstance(name, Federation):
        return name.source
    if not isinstance(name, str):
        return _named(d.named, lambda: custom.convert(name, "own", missing=d.missing, task=task))
    if name in DATASETS:
        return DATASETS[name]()
    if name.endswith(".npz"):
        return _npz(Path(name), d.missing, task)
    if ":" not in name or Path(name).is_dir():
        settings: dict[str, Any] = {"label": d.label, "missing": d.missing, "image_size": d.image_size, "task": task}
        return _named(name, lambda: custom.open_folder(name, **settings))
    made = _called(config.imported(name, "data set"), name)
    return _named(name, lambda: custom.convert(made, name.rpartition(":")[2], missing=d.missing, task=task))


def _called(make: Any, name: str) -> Any:
    """What a function of one's own gives."""
    if not callable(make):
        raise UserError(f"data.dataset={name!r}: that is not a function")
    try:
        inspect.signature(make).bind()
    except (TypeError, ValueError) as e:
        raise UserError(f"data.dataset={name!r}: must be a function that is called with nothing: {e}") from None
    return make()


def _named(name: str, read: Callable[[], Source]) -> Source:
    """One's own data; what is wrong with them begins with the setting that names them."""
    try:
        return read()
    except UserError as e:
        raise UserError(f"data.dataset={name!r}: {e}") from None


def _npz(path: Path, missing: Missing, task: TaskName | Literal["auto"]) -> Source:
    if not path.is_file():
        raise UserError(f"data.dataset={str(path)!r}: no such file")
    try:
        held = read_npz(path, ("x", "y", "clients"))
        names = npz_shapes(path)
    except UserError as e:
        raise UserError(f"data.dataset={str(path)!r}: {e}") from None
    if not {"x", "y"} <= held.keys():
        raise UserError(f"data.dataset={str(path)!r}: must hold arrays x and y; it has {list_names(names, 20)}")
    return arrays(held["x"], held["y"], held.get("clients"), name=path.stem, missing=missing, task=task)


def federation(recipe: Recipe, data: Source | None = None) -> Federation:
    """The data set of a recipe, divided over clients by its seed; then corrupted and normalised as it says."""
    data = data or source(recipe)
    d = settled_normalization(recipe, data).data
    built = corrupt_federation(_clean_federation(recipe, data), d.corruption, d.corruption_severity)
    return normalize.normalized(built, d.normalize, d.normalize_targets is True)


def _clean_federation(recipe: Recipe, data: Source) -> Federation:
    d, seed = recipe.data, recipe.training.seed
    if isinstance(d.dataset, Federation):
        return d.dataset
    if d.from_file:
        return partition_file.load(d.partition, data)
    recipe = settled_partition(recipe, data)
    d = recipe.data
    draw = rng.generator(seed, "partition")
    clients, dropped = _clients(recipe, data)
    request = PartitionRequest(data.labels, data.label_count, d.num_clients or 0, draw, clients, data.sources)
    try:
        _check_partition(recipe, data)
        parts, tests, official = _divided(recipe, request, data)
    except UserError as e:
        if data.clients is None or d.partition == "natural":
            raise
        raise UserError(f"{e}; {data.name} knows its clients, data.partition=natural takes them") from None
    rows, unseen = parts.rows, 0
    if d.unseen_ratio:
        unseen = max(1, round(d.unseen_ratio * len(rows)))
        order = rng.generator(seed, "unseen").permutation(len(rows))  # the last ones are held out
        rows, tests = Ragged.of(rows).select(order), None if tests is None else Ragged.of(tests).select(order)
    return Federation.build(
        data,
        rows,
        seed,
        test_share=d.test_share,
        validation_share=d.validation_share,
        notes=parts.notes | ({"small_clients_left_out": dropped} if dropped else {}),
        unseen=unseen,
        tests=tests,
        official=official,
    )


def _clients(recipe: Recipe, data: Source) -> tuple[Indices | None, int]:
    """The natural client of each example, -1 where it is left out for its size, and how many clients that are."""
    d = recipe.data
    if d.partition != "natural" or (d.official_test != "pooled" and data.test is None):
        return data.clients, 0
    return without_small_clients(data, d.small_clients, d.official_test, d.test_share, d.validation_share)


def _check_partition(recipe: Recipe, data: Source) -> None:
    """Refuse to deal out classes where there are none."""
    if data.task != "classification" and PARTITIONS[recipe.data.partition].needs_classes:
        possible = [n for n, p in PARTITIONS.items() if not p.needs_classes]
        raise UserError(
            f"data.partition={recipe.data.partition!r}: it deals out classes, and {data.task} has none; "
            f"possible are {', '.join(possible)}"
        )


def _divided(
    recipe: Recipe, request: PartitionRequest, data: Source
) -> tuple[PartitionResult, Sequence[Indices] | None, Indices | None]:
    """Clients' rows, their test rows where those are dealt, and the test rows of no client."""
    d = recipe.data
    if d.official_test == "pooled":
        return partition(d.partition, request, **d.partition_settings), None, None
    where = f"data.official_test={d.official_test!r}"
    if data.test is None or data.test.all() or not data.test.any():
        raise UserError(f"{where}: {data.name} does not come with a training and a test part; use pooled")
    if data.groups is not None and len(both := np.intersect1d(data.groups[data.test], data.groups[~data.test])):
        raise UserError(f"{where}: group {both[0]} of {data.name} has samples in both parts; use pooled")
    if d.official_test == "dealt":
        return *partition_train_and_test(d.partition, request, data.test, **d.partition_settings), None
    found = partition_train(d.partition, request, data.test, **d.partition_settings)
    return found, None, np.flatnonzero(data.test)


def settled_partition(recipe: Recipe, data: Source) -> Recipe:
    """The recipe with `auto` replaced: the clients the data know, else classes by Dirichlet draws, or all alike."""
    if isinstance(recipe.data.dataset, Federation):
        return replace(recipe, data=replace(recipe.data, partition=SPLIT))
    if recipe.data.partition != config.AUTO:
        return recipe
    rule = "natural" if data.clients is not None else "dirichlet" if data.task == "classification" else "iid"
    return replace(recipe, data=replace(recipe.data, partition=rule))


def settled_normalization(recipe: Recipe, data: Source) -> Recipe:
    """The recipe with `auto` replaced by what it means for these data."""
    d = recipe.data
    inputs = normalize.settled(d.dataset, data) if d.normalize == config.AUTO else d.normalize
    targets = normalize.normalizes_targets(d.normalize_targets, data.task, data.name)
    return replace(recipe, data=replace(d, normalize=inputs, normalize_targets=targets))


def note_clients(recipe: Recipe, data: Source) -> None:
    """Warn where data of one's own know their clients and a run divides them otherwise."""
    d = recipe.data
    shipped = isinstance(d.dataset, str) and d.dataset in DATASETS
    if data.clients is not None and not shipped and not d.from_file and d.partition not in ("natural", config.AUTO):
        count = len(np.unique(data.clients))
        warnings.warn(f"{data.name} knows its {count} clients; data.partition=natural keeps them", stacklevel=2)


def model(recipe: Recipe, data: Source) -> StackedModel:
    """The network of a recipe, initialised by its seed."""
    choice, name = recipe.model, recipe.model.named
    if isinstance(choice.name, StackedModel):
        data.check_outputs(choice.name.info.outputs)
        return choice.name
    build: Any = choice.name
    if isinstance(build, str):
        name = default_model(data) if name == config.AUTO else name
        build = MODELS[name].build if name in MODELS else config.imported(name, "model")
    example = as_inputs(data.x[:2], torch.float32, data.normalization)
    with rng.torch_generator(), _single_precision():
        torch.manual_seed(int(rng.key(recipe.training.seed, "init")) % 2**63)
        known = name in MODELS
        module = build(tuple(data.x.shape[1:]), data.classes) if known else _users(build, data)
    if not isinstance(module, nn.Module):
        raise UserError(f"model.name={name!r}: gave {type(module).__name__}, not a torch.nn.Module")
    try:
        made = StackedModel(module, example, choice.head or None, choice.buffers)
        data.check_outputs(made.info.outputs)
        return made
    except (RuntimeError, TypeError) as e:
        what = f"{example.dtype} of shape {tuple(example.shape)}".removeprefix("torch.")
        hint = "" if example.is_floating_point() else "; examples are whole numbers: give floats, or bytes for images"
        raise UserError(f"model.name={name!r}: fails on a batch of {what}: {e}{hint}") from None


@contextmanager
def _single_precision() -> Iterator[None]:
    """New tensors in float32, whatever the process has set."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def default_model(data: Source) -> str:
    """The network of a data set, or by the shape of its examples: convolutions for images, else full layers."""
    return data.model or ("small-cnn" if data.x.dim() == 4 else "mlp")


def _users(build: Callable[..., Any], data: Source) -> Any:
    """A model of one's own: a module as it is, or what makes one.

    That is called with the shape of an example and the number of classes unless it takes nothing.
    """
    if isinstance(build, nn.Module):
        return build
    wanted: tuple[Any, ...] = (tuple(data.x.shape[1:]), data.classes)
    try:
        inspect.signature(build).bind()
        wanted = ()
    except TypeError:
        pass
    try:
        return build(*wanted)
    except TypeError as e:
        raise UserError(f"model {getattr(build, '__name__', build)}: called with {wanted or 'nothing'}: {e}") from None


def metric(recipe: Recipe, task: TaskName) -> Metric:
    """What the models of a recipe are judged by, under the name the recipe has for it."""
    name = recipe.evaluation.metric
    found = config.criterion(name, METRICS[task], "evaluation.metric")
    if isinstance(name, str) and ":" in name:
        return replace(found, name=name) if isinstance(found, Metric) else Metric(found, name)
    return found if isinstance(found, Metric) else Metric(found)
