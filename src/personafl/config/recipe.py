"""A run as frozen dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from personafl.core.algorithm import Algorithm
from personafl.core.types import BufferPolicy, Evaluation, Training
from personafl.data import DATASETS, PARTITIONS
from personafl.data.missing import Missing
from personafl.data.partition import declared_settings, knows_clients
from personafl.data.small_clients import SmallClients


@dataclass(frozen=True)
class Data:
    """Which data, and who holds what; the settings of the partition are keys of `[data]` beside these."""

    dataset: str = "digits"
    partition: str = "dirichlet"
    num_clients: int = 0  # 0: all of a natural partition or one per source, else 20
    partition_settings: Mapping[str, Any] = field(default_factory=dict)  # as the partition declares them
    official_test: Literal["pooled", "dealt", "global"] = "pooled"  # what becomes of the test part data came with
    test_share: float = 0.25
    validation_share: float = 0.0
    unseen_ratio: float = 0.0
    corruption: str = "none"  # of the images themselves: one for all, or one per client
    corruption_severity: int = 5
    label: tuple[str, ...] = ()  # columns of .csv and .parquet files; none: label, y, target or the last
    missing: Missing = "refuse"  # what becomes of missing values in data of one's own
    image_size: int = 0  # pixels that pictures of one's own are resized to; 0: they are all of one size
    small_clients: SmallClients = "refuse"  # natural clients with too few samples for their parts

    @property
    def from_file(self) -> bool:
        """Whether a file says who holds what."""
        return self.partition.endswith(".json")


@dataclass(frozen=True)
class ModelChoice:
    """Which network; `auto` is the data set's default."""

    name: str = "auto"
    head: str = ""  # pattern of parameter names; empty: the last linear layer
    buffers: BufferPolicy = "average"


@dataclass(frozen=True)
class Method:
    """One entry of a comparison."""

    label: str
    name: str
    algorithm: Algorithm


@dataclass(frozen=True)
class Recipe:
    """A whole run."""

    name: str
    data: Data = field(default_factory=Data)
    model: ModelChoice = field(default_factory=ModelChoice)
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)
    algorithms: tuple[Method, ...] = ()

    def with_seed(self, seed: int) -> Recipe:
        return dataclasses.replace(self, training=dataclasses.replace(self.training, seed=seed))


SECTIONS: dict[str, type[Any]] = {"data": Data, "model": ModelChoice, "training": Training, "evaluation": Evaluation}


def is_function(dataset: str) -> bool:
    """Whether `data.dataset` is `package.module:function`, not a folder with such a name."""
    return ":" in dataset and not Path(dataset).is_dir()


def values(section: Any) -> dict[str, Any]:
    """The settings of a section as its table has them, those of a partition in their place."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        out |= value if f.name == "partition_settings" else {f.name: value}
    return out


def unused(recipe: Recipe) -> dict[str, str]:
    """The settings that have no effect in a recipe, as `section.key`, and why."""
    data, out = recipe.data, dict[str, str]()
    declared = declared_settings(data.partition)
    of_test_parts = {n for n, s in declared.items() if s.of_test_part}
    if data.from_file:
        named = {"num_clients", "official_test", "test_share", "validation_share", "unseen_ratio", "small_clients"}
        used, why = set[str](), "the partition file says who holds what"
    else:
        used, why = set(PARTITIONS[data.partition].settings), f"{data.partition} does not use it"
        named = {"num_clients"} if knows_clients(data.partition) and not data.num_clients else set()
        if data.official_test == "dealt":
            out["data.test_share"] = "the test part is dealt"
        else:
            out |= {f"data.{n}": "goes with official_test=dealt" for n in of_test_parts}
        if data.partition != "natural":
            out["data.small_clients"] = "goes with partition=natural"
    out = {f"data.{n}": why for n in sorted(named | (declared.keys() - used))} | out
    if data.dataset in DATASETS:
        out["data.missing"] = "goes with data of one's own"
    if data.dataset in DATASETS or data.dataset.endswith(".npz") or is_function(data.dataset):
        out |= {f"data.{n}": "goes with a folder of one's own" for n in ("label", "image_size")}
    if data.corruption == "none":
        out["data.corruption_severity"] = "data.corruption=none"
    if not recipe.evaluation.corruptions:
        out["evaluation.severities"] = "no evaluation.corruptions"
    return out
