"""A run as frozen dataclasses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from personafl.core.algorithm import Algorithm
from personafl.core.types import BufferPolicy, Evaluation, Training
from personafl.data import PARTITIONS
from personafl.data.partition import KNOW_THEIR_CLIENTS


@dataclass(frozen=True)
class Data:
    """Which data, and who holds what."""

    dataset: str = "digits"
    partition: str = "dirichlet"
    num_clients: int = 0  # 0: all of a natural partition or one per source, else 20
    alpha: float = 0.3
    classes_per_client: int = 2
    samples_per_class: int = 0  # of each of a client's classes, for shards; 0: all
    samples_per_client: int = 0  # for dominant; 0: 600, or fewer where those do not suffice
    uniform_share: float = 0.2  # of them, over all classes alike
    official_test: Literal["pooled", "dealt", "global"] = "pooled"  # what becomes of the test part data came with
    test_samples_per_class: int = 0  # samples_per_class of a test part that is dealt
    test_samples_per_client: int = 0  # samples_per_client of it; 0: half of those for training, or fewer as fits
    test_share: float = 0.25
    validation_share: float = 0.0
    unseen_ratio: float = 0.0
    corruption: str = "none"  # of the images themselves: one for all, or one per client
    corruption_severity: int = 5

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

_OF_TEST_PARTS = ("test_samples_per_class", "test_samples_per_client")


def unused(recipe: Recipe) -> dict[str, str]:
    """The settings that have no effect in a recipe, as `section.key`, and why."""
    data, out = recipe.data, dict[str, str]()
    if data.from_file:
        named = {"num_clients", "official_test", "test_share", "validation_share", "unseen_ratio", *_OF_TEST_PARTS}
        used, why = frozenset[str](), "the partition file says who holds what"
    else:
        used, why = PARTITIONS[data.partition].uses, f"{data.partition} does not use it"
        named = {"num_clients"} if data.partition in KNOW_THEIR_CLIENTS and not data.num_clients else set()
        if data.official_test == "dealt":
            out["data.test_share"] = "the test part is dealt"
        else:
            out |= {f"data.{n}": "goes with official_test=dealt" for n in _OF_TEST_PARTS}
    rules = set().union(*(r.uses for r in PARTITIONS.values()))
    out = {f"data.{n}": why for n in sorted(named | (rules - used))} | out
    if data.corruption == "none":
        out["data.corruption_severity"] = "data.corruption=none"
    if not recipe.evaluation.corruptions:
        out["evaluation.severities"] = "no evaluation.corruptions"
    return out
