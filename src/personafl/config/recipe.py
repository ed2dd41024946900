"""A run as frozen dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import nn

from personafl.config.names import described, given_again
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.faults import Faults
from personafl.core.plain_text import is_text
from personafl.core.settings import Section, refuse_unknown, setting, shortened, typed, unknown
from personafl.core.types import BufferPolicy, Training
from personafl.data import DATASETS, PARTITIONS, normalize
from personafl.data.client_corruption import CORRUPTED_BY_DEFAULT, PER_CLIENT
from personafl.data.corruptions import CORRUPTIONS, SEVERITIES
from personafl.data.missing import Missing
from personafl.data.partition import deal_test_parts, declared_settings, knows_clients
from personafl.data.small_clients import SmallClients
from personafl.evaluation.settings import Evaluation
from personafl.models import MODELS, StackedModel

AUTO = "auto"
"""The value of a setting that goes by what the data are."""


@dataclass(frozen=True)
class Data(Section):
    """Which data, and who holds what; the settings of the partition are keys of `[data]` beside these.

    `dataset` is a name, or data of one's own: a folder, a .npz file, `package.module:function`, or in Python arrays
    `(x, y)` or `(x, y, clients)`, a list of clients' data sets, a `FederatedDataset`, a `Source` or a `Federation`.
    """

    section: ClassVar[str] = "data"

    dataset: Any = setting("digits", "a data set by name, a folder, a .npz file or package.module:function")
    partition: str = setting(AUTO, "who holds what: a rule, a .json file of personafl partition --save, or auto")
    num_clients: int | None = setting(None, "how many clients; default: all a partition knows of, else 20")
    partition_settings: Mapping[str, Any] = field(default_factory=dict)  # as the partition declares them
    official_test: Literal["pooled", "dealt", "global"] = setting(
        "pooled", "what becomes of the test part data came with"
    )
    test_share: float = setting(
        0.25,
        "share of each client's samples held out for testing; 0 needs official_test=global",
    )
    validation_share: float = setting(0.0, "share of a client's samples that is for validation")
    unseen_ratio: float = setting(0.0, "share of the clients that join only after training")
    corruption: str = setting(AUTO, "of the images themselves: one for all, per-client or none")
    corruption_severity: int = setting(5, "of this corruption, 1 to 5")
    normalize: Any = setting(AUTO, "of what models see: standardize, half, none, or [mean, std] by channel or column")
    normalize_targets: Literal["auto"] | bool = setting(
        AUTO, "whether to standardise targets for training; auto: only for regression"
    )
    label: tuple[str, ...] = setting((), "label columns of tables; none: label, y, target or the last")
    missing: Missing = setting("refuse", "what becomes of missing values in data of one's own")
    image_size: int = setting(0, "pixels that pictures of one's own are resized to; 0: they are all of one size")
    small_clients: SmallClients = setting("refuse", "what becomes of natural clients too small for their parts")

    @classmethod
    def arranged(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Keywords with the settings of partitions among them, as fields."""
        declared = declared_settings(str(given.get("partition", "")))
        own = {k: v for k, v in given.items() if k in declared}
        if not own:
            return given
        rest = {k: v for k, v in given.items() if k not in declared}
        return rest | {"partition_settings": {**given.get("partition_settings", {}), **own}}

    @classmethod
    def names(cls) -> list[str]:
        return [*super().names(), *declared_settings()]

    @property
    def from_file(self) -> bool:
        """Whether a file says who holds what."""
        return self.partition.endswith(".json")

    @property
    def named(self) -> str:
        """What the data are called in a recipe's text."""
        return self.dataset if isinstance(self.dataset, str) else described(self.dataset)

    def check(self) -> None:
        self._check_dataset()
        if self.partition not in (AUTO, *PARTITIONS) and not self.from_file:
            raise UserError(
                f"data.partition={self.partition!r}: {unknown('partition', self.partition, (AUTO, *PARTITIONS))}, "
                "or a .json file that personafl partition --save wrote"
            )
        if self.corruption not in (possible := (AUTO, "none", PER_CLIENT, *CORRUPTIONS)):
            raise UserError(f"data.corruption={self.corruption!r}: {unknown('corruption', self.corruption, possible)}")
        object.__setattr__(self, "normalize", normalize.checked(self.normalize))
        self.hold(
            [
                ("num_clients", self.num_clients is None or self.num_clients >= 1, "at least 1"),
                ("test_share", 0 <= self.test_share < 1, "in [0, 1)"),
                ("validation_share", 0 <= self.validation_share < 1, "in [0, 1)"),
                ("unseen_ratio", 0 <= self.unseen_ratio < 1, "in [0, 1)"),
                ("corruption_severity", self.corruption_severity in SEVERITIES, "1 to 5"),
                ("label", len(set(self.label)) == len(self.label), "names of columns, each once"),
                ("image_size", self.image_size >= 0, "a number of pixels, or 0 to leave pictures as they are"),
            ]
        )
        settled = self.from_file or self.partition == AUTO
        if self.official_test == "dealt" and self.partition not in deal_test_parts() and not settled:
            raise UserError(
                f"data.official_test='dealt': {self.partition} cannot deal a test part by the same rule; "
                f"possible are {', '.join(deal_test_parts())}"
            )
        if self.official_test != "dealt" and self.test_share + self.validation_share >= 1:
            raise UserError(
                f"data.test_share={self.test_share} + validation_share={self.validation_share} leave no training data"
            )
        if not self.test_share and self.official_test == "pooled" and not self.from_file:
            raise UserError(
                "data.test_share=0.0: clients would have no test data. With data.official_test=global, all clients are "
                "tested on the test part that the data came with"
            )
        self._fill()

    def _check_dataset(self) -> None:
        name = self.dataset
        if isinstance(name, Path):
            name = str(name)
        if isinstance(name, str):
            given_again("data.dataset", name, "data")
            if not is_text(name):
                raise UserError(f"data.dataset={name!r}: must be UTF-8 without a zero byte")
            there = name in DATASETS or any(c in name for c in ":/\\") or name.endswith(".npz") or Path(name).is_dir()
            if not name or not there:
                raise UserError(
                    f"data.dataset={name!r}: {unknown('data set', name, DATASETS)}, or a folder with a file "
                    "per client, or a .npz file with x, y and optionally clients, or package.module:function"
                )
            if name not in DATASETS and Path(name).is_dir() and "/" not in name and "\\" not in name:
                name = f"./{name}"  # a folder's name that is seen to be one, also where the folder is not there
        elif name is None or isinstance(name, (bool, int, float, type)):
            raise UserError(
                f"data.dataset={shortened(name)}: must be a name, arrays (x, y[, clients]), a list of clients' data "
                "sets, a Source or a Federation"
            )
        object.__setattr__(self, "dataset", name)

    def _fill(self) -> None:
        """Put what data set and partition have in the place of what was left open."""
        if self.corruption == AUTO:
            corrupted = isinstance(self.dataset, str) and self.dataset in CORRUPTED_BY_DEFAULT
            object.__setattr__(self, "corruption", PER_CLIENT if corrupted else "none")
        declared, settings = declared_settings(self.partition), dict(self.partition_settings)
        refuse_unknown("data", settings, declared, "[data]")
        for key, value in settings.items():
            settings[key] = typed(f"data.{key}", value, declared[key].type)
            try:
                declared[key].check(settings[key])
            except UserError as e:
                raise UserError(f"data.{e}") from None
        if self.partition != AUTO:
            own = {} if self.from_file else PARTITIONS[self.partition].settings
            settings = {n: settings.get(n, s.default) for n, s in own.items()}
            if self.num_clients is None and not self.from_file and not knows_clients(self.partition):
                object.__setattr__(self, "num_clients", 20)
        object.__setattr__(self, "partition_settings", settings)


@dataclass(frozen=True)
class ModelChoice(Section):
    """Which network. In Python `name` may be an `nn.Module` or a function that makes one."""

    section: ClassVar[str] = "model"

    name: Any = setting(AUTO, "a network by name or package.module:Class; auto: the data set's default")
    head: str = setting("", "pattern of the head's parameter names; empty: the last linear layer")
    buffers: BufferPolicy = setting("average", "what becomes of running statistics")

    @property
    def named(self) -> str:
        """What the network is called in a recipe's text."""
        return self.name if isinstance(self.name, str) else described(self.name)

    def check(self) -> None:
        name = self.name
        if isinstance(name, str):
            given_again("model.name", name, "model")
            if name != AUTO and name not in MODELS and ":" not in name:
                raise UserError(
                    f"model.name={name!r}: {unknown('model', name, (AUTO, *MODELS))}, or package.module:Class"
                )
        elif not isinstance(name, (nn.Module, StackedModel)) and not callable(name):
            raise UserError(
                f"model.name={shortened(name)}: must be a name, a torch.nn.Module or a function that makes one"
            )


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
    faults: Faults = field(default_factory=Faults)
    algorithms: tuple[Method, ...] = ()
    open: frozenset[str] = frozenset()  # settings, as `training.lr`, that the data decide when they are there

    def with_seed(self, seed: int) -> Recipe:
        return dataclasses.replace(self, training=dataclasses.replace(self.training, seed=seed))


SECTIONS: dict[str, type[Any]] = {
    "data": Data,
    "model": ModelChoice,
    "training": Training,
    "evaluation": Evaluation,
    "faults": Faults,
}


def is_function(dataset: str) -> bool:
    """Whether `data.dataset` is `package.module:function`, not a folder with such a name."""
    return ":" in dataset and not Path(dataset).is_dir()


def values(section: Any) -> dict[str, Any]:
    """The settings of a section as its table has them, those of a partition in their place."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if f.name == "partition_settings":
            out |= value
        elif value is not None:
            out[f.name] = value if _plain(value) else described(value)
    return out


def _plain(value: object) -> bool:
    """Whether TOML can write it."""
    return all(map(_plain, value)) if isinstance(value, tuple) else isinstance(value, (str, int, float))


def unused(recipe: Recipe) -> dict[str, str]:
    """The settings that have no effect in a recipe, as `section.key`, and why."""
    data, out = recipe.data, dict[str, str]()
    declared = declared_settings(data.partition)
    of_test_parts = {n for n, s in declared.items() if s.of_test_part}
    if data.from_file:
        named = {"num_clients", "official_test", "test_share", "validation_share", "unseen_ratio", "small_clients"}
        used, why = set[str](), "the partition file says who holds what"
    elif data.partition == AUTO:
        named, used, why = set(), set(declared), ""
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
    name = data.dataset
    if isinstance(name, str) and name in DATASETS:
        out["data.missing"] = "goes with data of one's own"
    if not isinstance(name, str) or name in DATASETS or name.endswith(".npz") or is_function(name):
        out |= {f"data.{n}": "goes with a folder of one's own" for n in ("label", "image_size")}
    if recipe.training.optimizer != "sgd":
        out["training.momentum"] = f"{recipe.training.optimizer} has none"
    if data.corruption == "none":
        out["data.corruption_severity"] = "data.corruption=none"
    if not recipe.evaluation.corruptions:
        out["evaluation.severities"] = "no evaluation.corruptions"
        out["evaluation.corrupted"] = "no evaluation.corruptions"
    faults = recipe.faults
    if not faults.straggler_ratio:
        out["faults.late"] = "faults.straggler_ratio=0"
    if not faults.faulty_ratio:
        out |= {f"faults.{n}": "faults.faulty_ratio=0" for n in ("fault", "strength")}
    elif not faults.attack:
        out["faults.strength"] = f"faults.fault={faults.fault}"
    return out
