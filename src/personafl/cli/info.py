"""`personafl list` and `info`: what there is."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from personafl import config
from personafl.cli.terminal import console, find_own_code, print_table
from personafl.config.recipe import SECTIONS
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.method_settings import RECIPE
from personafl.core.table import Table

if TYPE_CHECKING:
    from personafl.data.partition.partitioner import Partitioner


def _first_sentence(thing: object) -> str:
    return (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")


def _algorithms() -> dict[str, str]:
    from personafl.methods import ALGORITHMS

    return {name: _first_sentence(cls) for name, cls in ALGORITHMS.items()}


def _datasets() -> dict[str, str]:
    from personafl.data import DATASETS

    return {name: _first_sentence(load) for name, load in DATASETS.items()}


def _partitions() -> dict[str, str]:
    from personafl.data import PARTITIONS

    return {name: found.summary for name, found in PARTITIONS.items()}


def _models() -> dict[str, str]:
    from personafl.models import MODELS

    return {name: entry.summary for name, entry in MODELS.items()}


def _recipes() -> dict[str, str]:
    return {name: text.split("\n", 1)[0].lstrip("# ") for name, text in config.recipes().items()}


def _corruptions() -> dict[str, str]:
    from personafl.data.corruptions import CORRUPTIONS

    return {name: _first_sentence(make) for name, make in CORRUPTIONS.items()}


def _rules() -> dict[str, str]:
    from personafl.core.plugin_points import INFERENCE

    return {n: _first_sentence(kind) if kind else "The client's own model answers." for n, kind in INFERENCE.items()}


LISTS: dict[str, Callable[[], dict[str, str]]] = {
    "algorithms": _algorithms,
    "datasets": _datasets,
    "partitions": _partitions,
    "corruptions": _corruptions,
    "models": _models,
    "inference": _rules,
    "recipes": _recipes,
}

KINDS = {
    "algorithms": "methods of federated learning",
    "datasets": "data sets by name",
    "partitions": "ways to divide a data set over clients",
    "corruptions": "of images, for training and for evaluation",
    "models": "networks by name",
    "inference": "rules by which a client answers",
    "recipes": "whole comparisons",
}
"""What each list is of."""


def _of_partition(name: str) -> list[str]:
    from personafl.data.partition import PARTITIONS

    found = PARTITIONS[name]
    more = (inspect.getdoc(found.function) or "").partition("\n\n")[2]
    return [*([more] if more else []), *_partition_details(found)]


def _partition_details(found: Partitioner) -> list[str]:
    return [
        f"data.num_clients: {'all, unless given' if found.knows_clients else 'how many clients there are'}",
        *(f"data.{n} = {_written(s.default)}: {s.help}" for n, s in found.settings.items()),
        *(["may deal a test part in the same way (data.official_test=dealt)"] if found.deals_test_part else []),
    ]


def _of_corruption(name: str) -> list[str]:
    from personafl.data.corruptions import CORRUPTIONS, PARAMETERS

    words = list(inspect.signature(CORRUPTIONS[name]).parameters)[2:]
    steps = [", ".join(f"{w} {v:g}" for w, v in zip(words, values, strict=True)) for values in PARAMETERS[name]]
    return [f"severity {severity}: {step}" for severity, step in enumerate(steps, 1)]


def _of_rule(name: str) -> list[str]:
    from personafl.core.plugin_points import INFERENCE

    lines = _rule_details(INFERENCE[name])
    return [*lines, "docs/inference.md has more of them."] if lines else []


def _rule_details(kind: Any) -> list[str]:
    return [f"inference.{f.name} = {_written(f.default)}: {f.metadata.get('help', '')}" for f in _fields(kind)]


def _fields(kind: Any) -> tuple[Any, ...]:
    return dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()


def _written(default: Any) -> str:
    """A plain default as a recipe would write it."""
    return str(default).lower() if isinstance(default, bool) else str(default)


DETAILS: dict[str, Callable[[str], list[str]]] = {
    "partitions": _of_partition,
    "corruptions": _of_corruption,
    "inference": _of_rule,
    "recipes": lambda name: [config.recipes()[name]],
}


def list_(
    what: Annotated[
        str | None, typer.Argument(help="algorithms, datasets, partitions, corruptions, models, inference or recipes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """Show what there is; without an argument, what can be listed."""
    if what is not None and what not in LISTS:
        raise UserError(f"list {what}: {config.unknown('list', what, LISTS)}")
    found = LISTS[what]() if what else KINDS
    if as_json:
        print(json.dumps([{"name": n, "summary": s} for n, s in found.items()]))
        return
    print_table(Table((), list(found.items())))


def info(
    name: Annotated[
        str,
        typer.Argument(
            help="An algorithm, data set, partition, corruption, model, rule of inference or recipe; a section of "
            "recipes, as training; one key, as training.momentum; or your own code, package.module:Name."
        ),
    ],
) -> None:
    """Explain one thing by name."""
    from personafl.methods import ALGORITHMS

    if name in SECTIONS:
        _section(name)
        return
    if name in LISTS:
        list_(name)
        return
    if name in ALGORITHMS:
        _explain(name, ALGORITHMS[name])
        return
    if ":" in name:
        _explain_own(name)
        return
    for kind, found in LISTS.items():
        if name in (entries := found()):
            console.print(f"{kind.rstrip('s')} {name}: {entries[name]}")
            for more in DETAILS[kind](name) if kind in DETAILS else []:
                console.print(more)
            return
    section, dot, _ = name.partition(".")
    if section in ALGORITHMS or (dot and difflib.get_close_matches(section, SECTIONS)):
        _key(name)
        return
    known = [*SECTIONS, *(n for found in LISTS.values() for n in found())]
    raise UserError(f"info {name}: {config.unknown('name', name, known)}, or package.module:Name for your own code")


def _section(name: str) -> None:
    """All keys of a section of recipes."""
    from personafl.config import reference

    rows = [(key.dotted, key.type, key.default, key.help) for key in reference.keys(name)]
    print_table(Table(("key", "type", "default", "meaning"), rows))
    console.print(f"personafl info {name}.KEY has more of one; docs/reference.md has all.")


def _key(dotted: str) -> None:
    """One key of a section, or one setting of a method."""
    from personafl.config import reference

    try:
        key = reference.key(dotted)
    except UserError as e:
        raise UserError(f"info {e}") from None
    open_ = f"{key.default}; without a recipe, on other data than the demo's, by the data"
    lines = {
        "type": key.type,
        "default": open_ if reference.by_data(dotted) else key.default,
        "possible": key.possible,
        "looked at by": key.looked_at_by,
    }
    console.print(f"{dotted}: {key.help}")
    for word, text in lines.items():
        if text:
            console.print(f"  {word}: {text}")


def _explain_own(path: str) -> None:
    """A method, model, partition, rule of inference or function of the user's own, by its dotted path."""
    from torch import nn

    from personafl.data.partition.partitioner import Partitioner

    find_own_code()
    thing = config.imported(path, "info")
    if isinstance(thing, type) and issubclass(thing, Algorithm):
        _explain(path, thing)
    elif isinstance(thing, Partitioner):
        _print_own(path, "partition", thing.function, f'PARTITIONS["NAME"] = {thing.function.__name__}')
        for line in _partition_details(thing):
            console.print(line)
    elif isinstance(thing, type) and hasattr(thing, "measure") and hasattr(thing, "decide"):
        _print_own(path, "inference", thing, f'INFERENCE["NAME"] = {thing.__name__}')
        for line in _rule_details(thing):
            console.print(line)
    elif isinstance(thing, nn.Module) or (isinstance(thing, type) and issubclass(thing, nn.Module)):
        _print_own(path, "model", thing, f"model.name={path}")
        console.print(f"personafl doctor {path} says how clients run through it.")
    elif callable(thing):
        keys = ("data.dataset", "model.name", "training.loss", "evaluation.metric")
        _print_own(path, "function", thing, " or ".join(f"{key}={path}" for key in keys))
    else:
        raise UserError(
            f"info {path}: it is of type {type(thing).__name__}; possible are an Algorithm, a torch.nn.Module, a "
            "partition, a rule of inference and a function"
        )


def _print_own(path: str, kind: str, thing: Any, usage: str) -> None:
    """What a thing of the user's own is, its description, and how a run uses it."""
    console.print(f"{kind} {path}: {_own_description(thing)}\n")
    console.print(f"used as: {usage}")


def _own_description(thing: Any) -> str:
    """The docstring of a class, a function or an object's class; not an inherited one, nor what `dataclass` writes."""
    described = thing if isinstance(thing, type) or inspect.isroutine(thing) else type(thing)
    text = vars(described).get("__doc__") if isinstance(described, type) else described.__doc__
    if not text or text.startswith(f"{described.__name__}("):
        return "it has no description (docstring)."
    return inspect.cleandoc(text)


def _explain(name: str, cls: Any) -> None:
    from personafl.config import reference

    module = sys.modules[cls.__module__]
    console.print(f"{name}: {_own_description(cls)}\n")
    if about := inspect.getdoc(module):
        console.print(f"{about}\n")
    console.print(f"evaluated: {cls.evaluates}")
    console.print(f"a newcomer gets: {cls.newcomers}\n")
    rows = []
    for f in cls.settings():
        choices = f.metadata.get("choices")
        meaning = f.metadata.get("help", "") + (f" ({', '.join(choices)})" if choices else "")
        filled = dataclasses.is_dataclass(f.default) and not isinstance(f.default, Algorithm)
        default = RECIPE if f.default is None and f.name in cls.from_recipe else reference.toml_value(f.default)
        rows.append((f.name, "a table:" if filled else default, meaning))
        for g in dataclasses.fields(f.default) if filled else ():
            inner = reference.toml_value(getattr(f.default, g.name))
            rows.append((f"  {f.name}.{g.name}", inner, g.metadata.get("help", "")))
    print_table(Table(("setting", "default", "meaning"), rows))
