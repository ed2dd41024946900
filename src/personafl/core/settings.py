"""Settings that check themselves: keyword, table of a recipe and command line get the same sentence."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from personafl.core.errors import UserError

# What other frameworks call our keys.
_ELSEWHERE = {
    "global_rounds": "num_rounds",
    "rounds": "num_rounds",
    "n_rounds": "num_rounds",
    "num_server_rounds": "num_rounds",
    "global_epoch": "num_rounds",
    "local_learning_rate": "lr",
    "learning_rate": "lr",
    "local_epoch": "local_epochs",
    "epochs": "local_epochs",
    "lbs": "batch_size",
    "batch": "batch_size",
    "fraction_fit": "join_ratio",
    "fraction_train": "join_ratio",
    "client_participation": "join_ratio",
    "eligible_perc": "join_ratio",
    "n_clients": "num_clients",
    "client_num": "num_clients",
    "dirichlet_alpha": "alpha",
    "eval_gap": "eval_every",
    "test_interval": "eval_every",
    "learning_rate_decay_gamma": "lr_decay",
    "class_per_client": "classes_per_client",
    "model_name": "name",
    "early_stopping_patience": "patience",
    "early_stop_patience": "patience",
    "target_accuracy": "target",
}
BOUNDS: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr": (lambda value: value > 0, "greater than 0"),
    "momentum": (lambda value: 0 <= value < 1, "in [0, 1)"),
    "weight_decay": (lambda value: value >= 0, "not negative"),
    "grad_clip": (lambda value: value >= 0, "not negative"),
}
"""What an optimiser's numbers must be, in a recipe's `[training]` and as a method's own: the rule, and its words."""
LARGEST = float(np.finfo(np.float32).max)  # of numbers that tensors can be scaled by
_INTERNAL = ("bound", "partition_settings")  # fields that are no settings of a user's
_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def unknown(what: str, given: str, possible: Collection[str], where: str = "") -> str:
    """`no such setting of [training]; did you mean num_rounds?`, or what was possible."""
    names = list(possible)
    elsewhere = _ELSEWHERE.get(given.lower())
    near = [elsewhere] if elsewhere in names else difflib.get_close_matches(given, names, 1, 0.6)
    guess = f"; did you mean {near[0]}?" if near else ";"
    listed = ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")
    return f"no such {what}{' ' + where if where else ''}{guess} possible are {listed}"


def refuse_unknown(where: str, settings: Mapping[str, Any], possible: Collection[str], owner: str) -> None:
    """Raise `UserError` for the first setting that its owner, such as `[training]` or `ditto`, does not have."""
    for key, value in settings.items():
        if key not in possible:
            raise UserError(f"{where}.{key}={shortened(value)}: {unknown('setting', key, possible, f'of {owner}')}")


def setting(
    default: Any,
    help: str,
    choices: Collection[str] = (),
    fillings: Mapping[str, type[Any] | None] | None = None,
) -> Any:
    """A setting of a section or a method, with the sentence `personafl info` prints.

    `choices` are the values it may have, `fillings` the types a table of a recipe is made into; both may be registries
    that grow.
    """
    return field(default=default, metadata={"help": help, "choices": choices, "fillings": fillings})


class SettingsMeta(type):
    """Makes objects from settings by name; a name that is none is refused with the nearest that is."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        fields = [f.name for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
        known = [n for n in fields if n not in _INTERNAL]
        if args:
            shown = ", ".join(shortened(a) for a in args)
            raise UserError(
                f"{cls.__name__}({shown}): settings go by name, as {cls.__name__}({known[0]}=...); "
                f"possible are {', '.join(known)}"
            )
        if arranged := getattr(cls, "arranged", None):
            given = arranged(given)
        section = getattr(cls, "section", "")
        names = cls.names() if hasattr(cls, "names") else known
        own = {name: value for name, value in given.items() if name not in fields}
        refuse_unknown(section or cls.__name__, own, sorted(names), f"[{section}]" if section else cls.__name__)
        return super().__call__(**given)


@dataclass(frozen=True)
class Section(metaclass=SettingsMeta):
    """A section of a recipe: its settings are of their types, and as `check` wants them, whoever made it."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            object.__setattr__(self, name, typed(f"{self.section}.{name}", getattr(self, name), hint))
        self.check()

    @classmethod
    def names(cls) -> list[str]:
        """What a table of this section may hold."""
        return [f.name for f in dataclasses.fields(cls) if f.name not in _INTERNAL]

    def check(self) -> None:
        """Raise `UserError` for settings that cannot be."""

    def hold(self, rules: Iterable[tuple[str, bool, str]]) -> None:
        """Each rule: a setting, whether it is as it must be, and what it must be."""
        for key, fine, must in rules:
            value = getattr(self, key)
            if not fine:
                shown = list(value) if isinstance(value, tuple) else value
                raise UserError(f"{self.section}.{key}={shown}: must be {must}")


@functools.cache
def hints(cls: type[Any]) -> dict[str, Any]:
    """The types of a class's settings, but for those whose names cannot be found from here."""
    try:
        found = typing.get_type_hints(cls)
    except (NameError, TypeError):  # annotations that name something of a function's own
        return {}
    return {f.name: found[f.name] for f in dataclasses.fields(cls) if f.init and f.name in found}


def shortened(value: object) -> str:
    """A value as it is shown in a message."""
    try:
        text = " ".join(repr(value).split())
    except (RecursionError, ValueError):  # nested too deeply, or too many digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def typed(where: str, value: Any, hint: Any) -> Any:
    """The value as its type asks: whole numbers pass for real ones, NumPy's for Python's, nothing else is bent."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(value, np.generic):
        value = value.item()
    if origin is Literal:
        if not isinstance(value, (str, int)) or value not in args:
            raise UserError(f"{where}={shortened(value)}: possible are {', '.join(map(str, args))}")
        return value
    if origin in (typing.Union, types.UnionType):
        return _one_of(where, value, args)
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(typed(where, v, args[0]) for v in items)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _plain(where, value, Mapping, "a table")
    if origin is Callable:
        return value if callable(value) else _refuse(where, value, "a function")
    if hint is Any or not isinstance(hint, type) or getattr(hint, "_is_protocol", False):
        return value
    if hint is float:
        return _real(where, value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        _refuse(where, value, "below 2^63")
    article = "an" if hint.__name__[0] in "AEIO" else "a"
    return _plain(where, value, hint, _KINDS.get(hint, f"{article} {hint.__name__}"))


def _one_of(where: str, value: Any, options: tuple[Any, ...]) -> Any:
    """The value as the first of several types that takes it."""
    if value is None and types.NoneType in options:
        return None
    options = tuple(o for o in options if o is not types.NoneType)
    if len(options) == 1:
        return typed(where, value, options[0])
    for option in options:
        try:
            return typed(where, value, option)
        except UserError:
            continue
    words = [str(w) for o in options for w in (typing.get_args(o) or (_KINDS.get(o, getattr(o, "__name__", o)),))]
    raise UserError(f"{where}={shortened(value)}: possible are {', '.join(words)}")


def _real(where: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        _refuse(where, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        _refuse(where, value, "finite")
    return number if abs(number) <= LARGEST else _refuse(where, value, f"at most {LARGEST:.1e} in size, as float32 is")


def _plain(where: str, value: Any, kind: type[Any], words: str) -> Any:
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        _refuse(where, value, words)
    return value


def _refuse(where: str, value: Any, words: str) -> typing.NoReturn:
    raise UserError(f"{where}={shortened(value)}: must be {words}")


def filled(where: str, table: Mapping[str, Any], fillings: Mapping[str, type[Any] | None]) -> Any:
    """What a table puts into a slot: it may name one of the fillings, else the first is meant; the rest is settings."""
    kinds = {n: kind for n, kind in fillings.items() if kind is not None}
    name = table.get("name", next(iter(kinds)))
    if isinstance(name, str) and name in fillings and name not in kinds:
        raise UserError(f"{where}.name={name!r}: it has no settings; give the name alone, without a table")
    if not isinstance(name, str) or name not in kinds:
        raise UserError(f"{where}.name={shortened(name)}: {unknown('choice', shortened(name), kinds)}")
    kind = kinds[name]
    own = {k: v for k, v in table.items() if k != "name"}
    names, of_type = [f.name for f in dataclasses.fields(kind)], hints(kind)  # type: ignore[arg-type]
    for key, v in own.items():
        if key not in names:
            whose = [n for n, of in kinds.items() if key in {f.name for f in dataclasses.fields(of)}]
            told = unknown("setting", key, names, f"of [{where}]")
            if "name" not in table and whose:
                told = f"a setting of {', '.join(whose)}; say which of them is meant, as name = {whose[0]!r}"
            raise UserError(f"{where}.{key}={shortened(v)}: {told}")
        own[key] = typed(f"{where}.{key}", v, of_type[key]) if key in of_type else v
    try:
        return kind(**own)
    except UserError as e:
        raise UserError(f"{where}: {e}") from None
