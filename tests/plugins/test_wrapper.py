"""Wrappers: every hook of a method is the inner method's, unless a wrapper says otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch

from personafl import FedAvg
from personafl.core.algorithm import Algorithm
from personafl.core.types import Download, Round, Setup, Stage
from personafl.plugins.wrapper import NOT_FORWARDED, PREDICTION, MethodWrapper, TrainingWrapper
from tests import worlds

FUNCTIONS = {n for n, _ in inspect.getmembers(Algorithm, inspect.isfunction) if not n.startswith("_")}
HOOKS = sorted(FUNCTIONS - NOT_FORWARDED)
SPECIAL = {"screen", "evaluated"}  # forwarded by methods of their own
STATES = ("server", "known", "kept", "down", "upload", "sums", "lasting")


@dataclass(frozen=True, kw_only=True)
class Recorder(FedAvg):
    """Notes which hook is called with which arguments, and returns a state of its own."""

    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


def _recording(name: str) -> Callable[..., Any]:
    def hook(self: Recorder, *args: Any, **named: Any) -> dict[str, int]:
        self.calls.append((name, args, named))
        return {"w": 2}

    return hook


@dataclass(frozen=True, kw_only=True)
class Plain(MethodWrapper):
    """A wrapper that changes nothing and has its own entries under `mine/`."""

    prefix: ClassVar[str] = "mine"

    def inner_stage(self, stage: Stage) -> Stage:
        return Stage(stage.number - 10)


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> Plain:
    for name in FUNCTIONS - {"bind", "check", "check_task"}:
        monkeypatch.setattr(Recorder, name, _recording(name), raising=False)
    return Plain(base=Recorder())


def example(name: str) -> Any:
    """An argument of a hook in which the wrapper has an entry of its own."""
    if name in STATES:
        return {"w": 1, "mine/w": 3}
    return {"rnd": Round(Stage(12), 0.5), "stage": Stage(12)}.get(name, name)


def inner(value: Any) -> Any:
    """The same, as the inner method must see it."""
    if isinstance(value, dict):
        return {"w": 1}
    if isinstance(value, Round):
        return Round(Stage(2), 0.5)
    return Stage(2) if isinstance(value, Stage) else value


def test_what_is_not_forwarded_exists() -> None:
    assert NOT_FORWARDED <= FUNCTIONS
    assert set(PREDICTION) <= NOT_FORWARDED


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("name", [h for h in HOOKS if h not in SPECIAL])
def test_a_hook_is_the_inner_methods_without_what_the_wrapper_added(wrapped: Plain, name: str, by_name: bool) -> None:
    parameters = list(inspect.signature(getattr(Algorithm, name)).parameters)[1:]
    given = {n: example(n) for n in parameters}
    result = getattr(wrapped, name)(**given) if by_name else getattr(wrapped, name)(*given.values())
    assert isinstance(wrapped.base, Recorder)
    ((called, args, named),) = wrapped.base.calls
    assert called == name
    expected = {n: inner(value) for n, value in given.items()}
    assert (named if by_name else dict(zip(parameters, args, strict=True))) == expected
    replaces = name in ("keep", "remember", "aggregate", "withdraw", "without_uploads")
    assert result == ({"w": 2, "mine/w": 3} if replaces else {"w": 2})


def test_both_parts_of_a_download_are_stripped(wrapped: Plain) -> None:
    down = Download(shared={"w": torch.ones(1), "mine/a": torch.ones(1)}, own={"mine/b": torch.ones(1)})
    wrapped.newcomer({}, down, torch.tensor([0]))
    assert isinstance(wrapped.base, Recorder)
    ((_, args, _),) = wrapped.base.calls
    assert (set(args[1].shared), set(args[1].own)) == ({"w"}, set())


def unforwarded(kind: type[Algorithm]) -> set[str]:
    """The public functions of an algorithm class that a wrapper neither forwards nor names."""
    functions = {n for n, _ in inspect.getmembers(kind, inspect.isfunction) if not n.startswith("_")}
    return functions - NOT_FORWARDED - vars(MethodWrapper).keys()


@dataclass(frozen=True, kw_only=True)
class LaterHook(Algorithm):
    """Stands for an `Algorithm` to which a hook was added."""

    def added_later(self, server: Any) -> Any:
        return server


def test_every_hook_is_forwarded_and_one_that_is_not_would_be_seen() -> None:
    assert unforwarded(Algorithm) == set()
    assert unforwarded(LaterHook) == {"added_later"}


def test_a_wrapper_predicts_by_its_own_model_and_a_training_wrapper_by_the_methods() -> None:
    for name in PREDICTION:
        assert getattr(MethodWrapper, name) is getattr(Algorithm, name)
        assert name in vars(TrainingWrapper)


def test_names_of_a_wrapped_method_are_those_of_the_method() -> None:
    method = FedAvg().bind(Setup(worlds.model().info, worlds.training(), 6))
    assert Plain.around(method).called == "FedAvg"
