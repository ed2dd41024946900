"""What a partition is: a function with declared settings, what it is asked and what it answers."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from personafl.core.errors import UserError
from personafl.data.ragged import Indices


@dataclass(frozen=True)
class PartitionRequest:
    """What is to be divided, over how many clients; a partition looks at what it needs."""

    labels: NDArray[np.int64]
    classes: int
    num_clients: int  # 0: as many as there are, where the data say so
    rng: np.random.Generator
    clients: NDArray[np.int64] | None = None  # [N] natural client of each example; -1: of one that is left out
    sources: NDArray[np.int64] | None = None  # [N] which data set each example came from
    part: str = "data set"  # what is divided, in messages
    train_size: int = 0  # of a test part: how many training samples the first client has

    def subset(self, rows: Indices, part: str = "data set", train_size: int = 0) -> PartitionRequest:
        """The same asked of these rows only, with the same draws."""
        clients, sources = (None if ids is None else ids[rows] for ids in (self.clients, self.sources))
        rng = copy.deepcopy(self.rng)  # so that asking again gives the same
        labels = self.labels[rows]
        return PartitionRequest(labels, self.classes, self.num_clients, rng, clients, sources, part, train_size)

    @property
    def is_test(self) -> bool:
        """Whether it is a test part that is divided."""
        return self.part == "test part"

    @property
    def least(self) -> int:
        """The fewest samples a client may have: 40 (10 test samples at a quarter), or half the average if less."""
        return max(2, int(min(10 / 0.25, len(self.labels) / self.num_clients / 2)))


@dataclass(frozen=True)
class PartitionResult:
    """Who holds which rows, and what is worth reporting about how it came about."""

    rows: Sequence[Indices]
    notes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """What a setting of a partition means and what it must be: the metadata of an `Annotated` keyword.

    Name, type and default are those of the keyword.
    """

    help: str
    must: str = ""  # be, in messages
    holds: Callable[[Any], bool] = lambda _: True
    of_test_part: bool = False  # about a test part that is dealt (data.official_test)
    name: str = ""
    type: Any = None
    default: Any = None

    def check(self, value: Any) -> None:
        if not self.holds(value):
            shown = list(value) if isinstance(value, tuple) else value
            raise UserError(f"{self.name}={shown}: must be {self.must}")


@dataclass(frozen=True)
class Partitioner:
    """A partition: the function, and the settings its keywords declare."""

    function: Callable[..., PartitionResult]
    deals_test_part: bool = False  # asked with the same draws, it deals the classes of another set to the same clients
    knows_clients: bool = False  # it needs no num_clients
    needs_classes: bool = True  # it looks at labels

    @cached_property
    def settings(self) -> dict[str, Setting]:
        """The settings by name, `num_clients` aside, which all have."""
        hints = typing.get_type_hints(self.function, include_extras=True)
        out = {}
        for name, keyword in inspect.signature(self.function).parameters.items():
            if keyword.kind is keyword.KEYWORD_ONLY:
                kind, setting = typing.get_args(hints[name])
                out[name] = dataclasses.replace(setting, name=name, type=kind, default=keyword.default)
        return out

    @property
    def summary(self) -> str:
        """The first sentence of its description."""
        return (inspect.getdoc(self.function) or "").split("\n\n")[0].replace("\n", " ")

    def __call__(self, request: PartitionRequest, **settings: Any) -> PartitionResult:
        """Divide, with the checks common to all partitions."""
        for name, value in settings.items():
            if name not in self.settings:
                possible = ", ".join(self.settings) or "none"
                raise UserError(f"{self.function.__name__}: no setting {name!r}; possible are {possible}")
            self.settings[name].check(value)
        if request.num_clients < 1 and not self.knows_clients:
            raise UserError(f"num_clients={request.num_clients}: must be at least 1")
        if request.num_clients > len(request.labels) // 2:
            raise UserError(
                f"num_clients={request.num_clients}: the {request.part} has {len(request.labels)} samples, "
                "two are needed per client"
            )
        return self.function(request, **settings)


def partitioner(
    *, deals_test_part: bool = False, knows_clients: bool = False, needs_classes: bool = True
) -> Callable[[Callable[..., PartitionResult]], Partitioner]:
    """Make a partition of a function of a request and of keywords annotated with a `Setting` each."""
    return lambda function: Partitioner(function, deals_test_part, knows_clients, needs_classes)
