"""What server and clients of an experiment agree on, and the parts both build from it."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from personafl import config
from personafl.config import Recipe, components
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.normalization import Normalization
from personafl.core.plain_text import is_text
from personafl.core.tasks import as_targets
from personafl.core.types import LOSSES, Params, Setup, Stage, TaskName, TrainedTask, Training
from personafl.data import Source
from personafl.data.columns import MOST_CATEGORIES, Column, name_features
from personafl.deployment.own_code import import_own_code
from personafl.models import MODELS, StackedModel
from personafl.models.sample_outputs import MOST_OUTPUTS, outputs_difference
from personafl.plugins.assemble import assembled
from personafl.version import __version__

DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (torch.float32, torch.float64, torch.uint8, torch.int64, torch.int32, torch.int16, torch.bool)
}
FORMAT = 1
"""The format of checkpoints, of clients' private state and of messages, which server and clients must share.

Versions of the package with the same format can be mixed, and an experiment that one of them began goes on with
another. Raise it with every change after which they could not: another field or meaning in what is stored or sent,
another `core/wire.py`, another name or shape of a method's state, another draw of splits, cohorts or minibatches for
a seed.
"""
MOST_CLIENTS = 10**6
MOST_CLASSES = 10_000  # of a deployment: one client's word makes everybody's last layer as large
MOST_NAME, MOST_NAMES = 256, 2**18  # characters of a label or column, and of all of them
MOST_AXES, MOST_NUMBERS = 8, 2**28  # of an example; a server makes up two of the form clients tell


@dataclass(frozen=True)
class Form:
    """What examples and targets look like: the same for all clients."""

    shape: tuple[int, ...]  # of an example
    dtype: str
    task: TaskName
    target: tuple[int, ...]  # shape of an example's target
    classes: int
    class_names: tuple[str, ...] | None = None
    feature_names: tuple[str, ...] | None = None
    model: str = ""  # what model.name = "auto" means for them
    columns: tuple[Column, ...] | None = None  # of a table, with the categories of those that hold text

    @classmethod
    def of(cls, source: Source) -> Self:
        return cls(
            tuple(source.x.shape[1:]),
            str(source.x.dtype).removeprefix("torch."),
            source.task,
            tuple(source.y.shape[1:]),
            source.classes,
            source.class_names,
            source.feature_names,
            source.model,
            source.columns,
        )

    @classmethod
    def read(cls, told: Any) -> Self:
        """From what JSON made of one."""
        try:
            lists = {"shape", "target", "class_names", "feature_names"}
            held: dict[str, Any] = {k: tuple(v) if k in lists and v is not None else v for k, v in told.items()}
            if told.get("columns") is not None:
                held["columns"] = tuple(_column(*c) for c in told["columns"])
            made = cls(**held)
            whole = all(type(d) is int and 0 < d < 2**31 for d in (*made.shape, *made.target, made.classes))
            if not whole or made.dtype not in DTYPES or made.task not in LOSSES or made.classes > MOST_CLASSES:
                raise ValueError
            if any(len(s) > MOST_AXES or math.prod(s) > MOST_NUMBERS for s in (made.shape, made.target)):
                raise ValueError
            if made.class_names is not None and len(set(made.class_names)) != made.classes:
                raise ValueError
            names = (*(made.class_names or ()), *(made.feature_names or ()))
            if not all(isinstance(n, str) and is_text(n) and len(n) <= MOST_NAME for n in names):
                raise ValueError
            if made.name_length > MOST_NAMES or made.model not in (
                "",
                *MODELS,
            ):  # a name of ours, no code to import
                raise ValueError
            if made.columns is not None and not made._has_columns(made.columns):
                raise ValueError
        except (TypeError, ValueError, AttributeError):
            raise UserError("not a description of examples") from None
        return made

    def _has_columns(self, columns: Sequence[Column]) -> bool:
        """Whether the features are those of these columns."""
        names = self.feature_names or ()
        if not columns or len({c.name for c in columns}) != len(columns):
            return False
        if self.shape != (len(names),) or sum(c.width for c in columns) != len(names):
            return False
        return all(mine == named for mine, named in zip(names, name_features(columns), strict=True))

    def with_columns(self, columns: tuple[Column, ...]) -> Form:
        """The same where a table has these columns."""
        names = tuple(name_features(columns))
        return dataclasses.replace(self, shape=(len(names),), feature_names=names, columns=columns)

    @property
    def name_length(self) -> int:
        """Characters of all names of classes and features."""
        return sum(map(len, (*(self.class_names or ()), *(self.feature_names or ()))))

    def unlike(self, other: Form) -> str:
        """In what this differs from another that it must be like; classes and categories aside, which may be fewer."""
        if self.columns is not None and other.columns is not None:
            if why := _unlike_columns(self.columns, other.columns):
                return why
            apart = {"classes", "class_names", "shape", "feature_names", "columns"}
        else:
            apart = {"classes", "class_names"}
        for f in dataclasses.fields(self):
            if f.name in apart:
                continue
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine != theirs:
                return f"{f.name} {mine!r:.80}, others have {theirs!r:.80}"
        if (self.class_names is None) != (other.class_names is None):
            return "labels that are numbers where others' are text, or the other way round"
        return ""

    def stand_in(
        self, normalization: Normalization | None, target_normalization: Normalization | None = None
    ) -> Source:
        """Two made-up examples of this form, for a model to be built with."""
        draw = torch.Generator().manual_seed(0)
        dtype = DTYPES[self.dtype]
        if dtype.is_floating_point:
            x = torch.randn(2, *self.shape, generator=draw).to(dtype)
        elif dtype == torch.uint8:
            x = torch.randint(256, (2, *self.shape), generator=draw, dtype=dtype)
        else:  # tokens: every vocabulary has the first
            x = torch.zeros(2, *self.shape, dtype=dtype)
        y = as_targets(torch.zeros(2, *self.target), self.task)
        return Source(
            "stand-in",
            x,
            y,
            self.classes,
            self.model,
            task=self.task,
            normalization=normalization,
            target_normalization=target_normalization,
        )


def _column(name: Any, categories: Any) -> Column:
    """A column from what JSON made of it."""
    if not isinstance(name, str) or len(name) > MOST_NAME:
        raise ValueError
    if categories is None:
        return Column(name)
    if not isinstance(categories, list | tuple) or not 0 < len(categories) <= MOST_CATEGORIES:
        raise ValueError
    if not all(isinstance(c, str) for c in categories) or list(categories) != sorted(set(categories)):
        raise ValueError
    return Column(name, tuple(categories))


def _unlike_columns(mine: Sequence[Column], others: Sequence[Column]) -> str:
    """In what columns of a table differ from others, their order and their categories aside."""
    names, wanted = {c.name: c for c in mine}, {c.name: c for c in others}
    if lacking := next((n for n in wanted if n not in names), None):
        return f"no column {lacking!r:.80}, which others have"
    if extra := next((n for n in names if n not in wanted), None):
        return f"column {extra!r:.80}, which others do not have"
    for name, column in names.items():
        if (column.categories is None) != (wanted[name].categories is None):
            held, there = ("numbers" if c.categories is None else "text" for c in (column, wanted[name]))
            return f"{held} in column {name!r:.80}, where others have {there}"
    return ""


MeanAndStd = tuple[tuple[float, ...], tuple[float, ...]]


def _mean_and_std(told: Any) -> MeanAndStd | None:
    """From what JSON made of one."""
    return None if told is None else (tuple(map(float, told[0])), tuple(map(float, told[1])))


@dataclass(frozen=True)
class World:
    """All that is agreed on; what a client is told with every request."""

    experiment: str
    version: str  # of the package that the experiment began with
    recipe: str  # as TOML
    clients: int
    examples: int  # that all of them train on; 0: not known
    form: Form
    normalization: MeanAndStd | None  # of inputs
    target_normalization: MeanAndStd | None = None
    init: str = ""  # hash of the first weights
    format: int = FORMAT
    outputs: tuple[float, ...] = ()  # of the model on the server, by `sample_outputs`

    def told(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, told: Any) -> Self:
        """From what JSON made of one."""
        try:
            normalizations = {n: _mean_and_std(told[n]) for n in ("normalization", "target_normalization")}
            held = {"format": 0} | {k: v for k, v in told.items() if k != "form"} | normalizations
            held["outputs"] = tuple(map(float, told.get("outputs", ())))
            made = cls(**held, form=Form.read(told["form"]))
            texts = (made.experiment, made.version, made.recipe, made.init)
            counts = type(made.clients) is int and 1 <= made.clients <= MOST_CLIENTS
            counts = counts and type(made.examples) is int and 0 <= made.examples <= MOST_CLIENTS * 2**32
            counts = counts and type(made.format) is int
            counts = counts and len(made.outputs) <= MOST_OUTPUTS and all(map(math.isfinite, made.outputs))
            if not counts or not all(isinstance(t, str) for t in texts) or not made._normalizes():
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as e:
            if isinstance(e, UserError):
                raise
            raise UserError("not a description of an experiment") from None
        return made

    def _normalizes(self) -> bool:
        """Whether what inputs and targets are normalised by fits them."""
        form = self.form
        if self.target_normalization is not None and form.task != "regression":
            return False
        components = (self.normalize(), form.shape), (self.normalize_targets(), form.target)
        return all(
            made is None or (made.size in (1, *shape[:1]) and all(map(math.isfinite, (*made.mean, *made.std))))
            for made, shape in components
        )

    def normalize(self) -> Normalization | None:
        return None if self.normalization is None else Normalization(*self.normalization, len(self.form.shape))

    def normalize_targets(self) -> Normalization | None:
        found = self.target_normalization
        return None if found is None else Normalization(*found, len(self.form.target))


def check_format(whose: str, told: Mapping[str, Any]) -> None:
    """Refuse what a version of the package with another format has written or sent.

    Args:
        whose: What is refused, as the beginning of a sentence.
        told: What it says of itself, with its `format` and the `version` of the package.

    Raises:
        UserError: The format is not that of this version.
    """
    if why := other_format(told):
        raise UserError(f"{whose} has {why}")


def other_format(told: Mapping[str, Any]) -> str:
    """In what the format that is told differs from that of this version; nothing where it does not."""
    number, version = told.get("format", 0), told.get("version")
    if type(number) is int and number == FORMAT:
        return ""
    return (
        f"format {number!r:.40} (personafl {version!r:.40}) and this is personafl {VERSION} with format {FORMAT}; "
        "install versions of the same format"
    )


@dataclass(frozen=True)
class Parts:
    """What a world is made into: the same on the server and on every node."""

    recipe: Recipe
    algorithm: Algorithm
    task: TrainedTask
    model: StackedModel
    device: torch.device

    @property
    def training(self) -> Training:
        return self.algorithm.setup.training

    @property
    def initial(self) -> Params:
        return self.model.initial

    def schedule(self) -> list[Stage]:
        return self.algorithm.schedule()


def read_recipe(text: object, *, trust: bool = True, hint: str = "") -> Recipe:
    """The recipe of a deployment, checked: one method, and nothing a deployment cannot do.

    Code of one's own that it names is imported, and `hint` is what to do where that fails; without `trust` such code is
    refused.
    """
    if not isinstance(text, str):
        raise UserError(f"recipe {text!r:.40}: no text")
    try:
        tables = tomllib.loads(text)
        if trust:
            import_own_code(tables, hint)
        recipe = config.load(tables, trust=trust)
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise UserError(f"recipe.toml: {e}") from None
    check_recipe(recipe)
    return recipe


def check_recipe(recipe: Recipe) -> None:
    """Refuse what no server could do without its clients' data, or what only a simulation has."""
    if len(recipe.algorithms) != 1:
        labels = ", ".join(m.label for m in recipe.algorithms)
        raise UserError(f"algorithms: a deployment has one method, these are {labels}")
    asked, faults = recipe.evaluation, recipe.faults
    if asked.shift != "none":
        raise UserError(
            f"evaluation.shift={asked.shift!r}: other clients' test samples stay with them in a deployment; use none"
        )
    if asked.split != "test":
        raise UserError(f"evaluation.split={asked.split!r}: is for simulations; clients are judged by their test data")
    if asked.matrix:
        raise UserError("evaluation.matrix=true: no client sees another's test samples in a deployment")
    if asked.corruptions or asked.rotations or asked.change:
        raise UserError("evaluation.corruptions, evaluation.rotations and evaluation.change are for simulations")
    if faults.active:
        raise UserError("[faults]: a deployment has its own")


def build_parts(world: World, device: str = "cpu", *, trust: bool = True) -> Parts:
    """The model, the method and the task of a world."""
    recipe = read_recipe(world.recipe, trust=trust)
    source = world.form.stand_in(world.normalize(), world.normalize_targets())
    kind = source.task
    if recipe.training.task not in ("auto", kind):
        raise UserError(f"training.task={recipe.training.task!r}: the clients' targets are of {kind}")
    training = dataclasses.replace(recipe.training, task=kind)
    where = torch.device(device)
    dtype = torch.float64 if training.precision == "float64" else torch.float32
    model = components.model(recipe, source)
    model.to(where, dtype, training.arithmetic)
    task = TrainedTask(
        model,
        config.criterion(training.loss, LOSSES[kind], "training.loss"),
        components.metric(recipe, kind),
    )
    setup = Setup(model.info, training, world.clients, world.examples)
    algorithm = assembled(recipe.algorithms[0].algorithm, setup)
    return Parts(recipe, algorithm, task, model, where)


class OtherModelError(UserError):
    """A client's model is not the one agreed on."""


def check_model(world: World, parts: Parts) -> None:
    """Refuse a model that is not the one agreed on: other first weights, or other outputs for the same weights.

    Args:
        world: What is agreed on, with the hash of the first weights and outputs at the server.
        parts: What is made of it here.

    Raises:
        OtherModelError: The model is another.
    """
    if (mine := parts.model.initial_hash()) != world.init:
        raise OtherModelError(
            f"the first weights differ: {mine} here, {world.init} at the server (model code, frozen weights that are "
            "not the same everywhere, PyTorch?)"
        )
    if difference := outputs_difference(parts.model.sample_outputs, world.outputs):
        raise OtherModelError(
            "it runs model code that gives other outputs than the server's for the same weights "
            f"({difference}); the module of the model must be the same everywhere"
        )


VERSION = __version__
