"""What is measured and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from personafl.core.errors import UserError
from personafl.core.settings import Section, setting, unknown
from personafl.core.types import Criterion, Metric
from personafl.data.corruptions import CORRUPTIONS, SEVERITIES
from personafl.evaluation.metrics import METRICS, names


@dataclass(frozen=True)
class Evaluation(Section):
    """What is measured and when; the `[evaluation]` section of a recipe."""

    section: ClassVar[str] = "evaluation"

    split: Literal["test", "validation"] = setting(
        "test", "the data clients are judged by; with validation, test data are not looked at"
    )
    eval_every: int = setting(10, "rounds between evaluations; the last round is always evaluated")
    shift: Literal["donor", "pool", "label", "none"] = setting("donor", "whose test samples replace a client's own")
    degrees: tuple[float, ...] = setting((0.0, 0.2, 0.4, 0.6, 0.8, 1.0), "shares of the test samples replaced")
    draws: int = setting(5, "draws of donors that are averaged over")
    corruptions: tuple[str, ...] = setting((), "of test images, by name; all: the standard fifteen")
    severities: tuple[int, ...] = setting((1, 2, 3, 4, 5), "of these corruptions")
    corrupted: Literal["own", "whole", "both"] = setting(
        "own", "whose images these are of: a client's own, the whole test set for every client, or both"
    )
    rotations: tuple[float, ...] = setting((), "of clients' own test images, in degrees")
    matrix: bool = setting(False, "every client's model on every client's test set")
    batch: int = setting(0, "inputs that inference=batch or mixture sees at once; 0: all that are judged together")
    inputs_before: int = setting(0, "inputs of the same kind a client's stream has seen before those that are judged")
    input_counts: tuple[int, ...] = setting(
        (), "more numbers of inputs to judge by: at once with inference=batch or mixture, before with stream"
    )
    change: int = setting(
        0, "inputs of each part of a stream that changes abruptly: own, shifted, own again; 0: there is none"
    )
    corrupt_shifted: bool = setting(False, "the corruptions also of clients' test sets at full shift")
    when: Literal["after_aggregation", "after_local"] = setting(
        "after_aggregation", "evaluate what clients hold after the server's step, or after their own training"
    )
    clients: Literal["all", "selected"] | int = setting("all", "who is evaluated between rounds: all, selected, or N")
    metric: str | Metric | Criterion = setting(
        "auto", "what models are judged by: a name or package.module:function; auto: by the task"
    )
    targets: tuple[float, ...] = setting((), "scores of which it is told after how many rounds they were reached")
    train_loss: bool = setting(False, "also the loss of the same models on all of the clients' training data")

    def check(self) -> None:
        for kind in self.corruptions:
            if kind not in ("all", *CORRUPTIONS):
                raise UserError(
                    f"evaluation.corruptions={kind!r}: {unknown('corruption', kind, ('all', *CORRUPTIONS))}"
                )
        known = ["auto", *names(METRICS)]
        if isinstance(self.metric, str) and ":" not in self.metric and self.metric not in known:
            raise UserError(
                f"evaluation.metric={self.metric!r}: {unknown('metric', self.metric, known)}, "
                "or package.module:function"
            )
        self.hold(
            [
                ("eval_every", self.eval_every >= 1, "at least 1"),
                ("draws", 1 <= self.draws <= 10_000, "at least 1 and at most 10000"),
                ("degrees", all(0 <= d <= 1 for d in self.degrees), "shares in [0, 1]"),
                ("degrees", len(self.degrees) > 0, "at least one share"),
                (
                    "severities",
                    len(self.severities) > 0 and set(self.severities) <= set(SEVERITIES),
                    "some of 1 to 5",
                ),
                *((n, _distinct(getattr(self, n)), "named once each") for n in _LISTS),
                ("corruptions", len(self.corruptions) == 1 or "all" not in self.corruptions, "all, or some kinds"),
                ("targets", self.metric != "accuracy" or all(0 < t <= 1 for t in self.targets), "shares in (0, 1]"),
                ("batch", self.batch >= 0, "a number of inputs, 0 for all"),
                ("inputs_before", 0 <= self.inputs_before <= 10_000, "at least 0 and at most 10000"),
                (
                    "input_counts",
                    all(0 <= n <= 10_000 for n in self.input_counts),
                    "numbers of inputs, at least 0 and at most 10000",
                ),
                ("change", 0 <= self.change <= 10_000, "at least 0 and at most 10000"),
                ("change", not self.change or self.shift != "none", "0 without shift"),
                (
                    "corrupt_shifted",
                    not self.corrupt_shifted or (self.shift != "none" and len(self.corruptions) > 0),
                    "false without shift or without corruptions",
                ),
                ("clients", not isinstance(self.clients, int) or self.clients >= 1, "all, selected or at least 1"),
            ]
        )
        if self.when == "after_local":
            if isinstance(self.clients, int):
                raise UserError(
                    f"evaluation.clients={self.clients}: after local training only those selected have something "
                    "to score"
                )
            object.__setattr__(self, "clients", "selected")


_LISTS = ("degrees", "corruptions", "severities", "rotations", "targets", "input_counts")


def _distinct(values: tuple[object, ...]) -> bool:
    return len(set(values)) == len(values)
