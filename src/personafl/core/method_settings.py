"""The settings of a method: those that all methods have, and how they are checked and shown."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from personafl.core.display import Displayed, in_notebook
from personafl.core.errors import UserError
from personafl.core.plugin_points import INFERENCE, INHERIT, ROBUST, WEIGHTS, Filling, Inference
from personafl.core.settings import BOUNDS, SettingsMeta, filled, hints, setting, typed
from personafl.core.table import Table
from personafl.core.types import OptimizerName

RECIPE = "recipe"
FROM_TRAINING = ("optimizer", "lr", "momentum", "weight_decay", "grad_clip")
"""The settings a method takes from the recipe's `[training]` where its own value is None, `"recipe"` in TOML."""


@dataclass(frozen=True, kw_only=True, repr=False)
class MethodSettings(Displayed, metaclass=SettingsMeta):
    """The settings that every method has; a method adds its own with `setting`."""

    from_recipe: ClassVar[tuple[str, ...]] = FROM_TRAINING  # settings whose None, `"recipe"` in TOML, is the recipe's

    optimizer: OptimizerName | None = setting(
        None, "optimiser of local training (recipe: training.optimizer)", get_args(OptimizerName)
    )
    lr: float | None = setting(None, "learning rate (recipe: training.lr)")
    momentum: float | None = setting(None, "momentum of sgd, 0 for none (recipe: training.momentum)")
    weight_decay: float | None = setting(None, "weight decay, 0 for none (recipe: training.weight_decay)")
    grad_clip: float | None = setting(
        None, "largest norm of a client's gradient, 0 for any (recipe: training.grad_clip)"
    )
    weights: str = setting("examples", "what a client counts in the server's mean", WEIGHTS)
    inherit: Filling | None = setting(None, "a private model inherited from session to session", fillings=INHERIT)
    robust: Filling | None = setting(None, "how the server's mean is made robust", fillings=ROBUST)
    inference: str | Inference = setting(
        "own", "how a client answers: by its own model, or by a rule", INFERENCE, fillings=INFERENCE
    )
    prior_free: bool = setting(False, "whether local training leaves out how often classes occur at a client")

    def __init_subclass__(cls, **words: Any) -> None:
        """Methods are shown by the settings that are not their defaults; `dataclass` would show all."""
        super().__init_subclass__(**words)
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = Displayed.__repr__  # type: ignore[method-assign]

    def _facts(self) -> dict[str, object]:
        given = {f.name: getattr(self, f.name) for f in self.settings() if getattr(self, f.name) != f.default}
        return {name: repr(value) for name, value in given.items()}

    def _repr_html_(self) -> str:
        rows = []
        for f in self.settings():
            value = getattr(self, f.name)
            shown = RECIPE if value is None and f.name in self.from_recipe else str(value)
            rows.append((f.name, shown, f.metadata.get("help", "")))
        return in_notebook(Table(("setting", "value", "meaning"), rows, caption=type(self).__name__))

    def __post_init__(self) -> None:
        of_type = hints(type(self))
        for f in self.settings():
            choices, value = f.metadata.get("choices"), getattr(self, f.name)
            kinds_of = f.metadata.get("fillings") or {}
            fillings = tuple(kind for kind in kinds_of.values() if kind is not None)
            if fillings and isinstance(value, Mapping):
                value = filled(f.name, value, kinds_of)
                object.__setattr__(self, f.name, value)
            if choices and isinstance(value, fillings):
                continue
            if fillings and not choices and value is not None and not isinstance(value, fillings):
                kinds = ", ".join(f"{kind.__name__}(...)" for kind in fillings)
                raise UserError(f"{f.name}={value!r}: possible are {kinds}, or None")
            if f.name in of_type and not choices:
                value = typed(f.name, value, of_type[f.name])
                object.__setattr__(self, f.name, value)
            if choices and value not in choices and (value is not None or f.name not in self.from_recipe):
                raise UserError(f"{f.name}={value!r}: possible are {', '.join(choices)}")
        if self.optimizer in ("adam", "adamw") and self.momentum:
            raise UserError(f"momentum={self.momentum}: {self.optimizer} has none; use optimizer=sgd")
        for name, (fine, must) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not fine(value):
                raise UserError(f"{name}={value}: must be {must}")
        self.check()

    @classmethod
    def settings(cls) -> tuple[dataclasses.Field[Any], ...]:
        """The fields a recipe may set; one with another default keeps the words of the class that introduced it."""
        return _settings(cls)

    def check(self) -> None:
        """Raise `UserError` for impossible settings."""


@functools.cache
def _settings(kind: type[MethodSettings]) -> tuple[dataclasses.Field[Any], ...]:
    found = []
    for f in dataclasses.fields(kind):
        if f.name != "bound":
            above = (getattr(c, "__dataclass_fields__", {}).get(f.name) for c in kind.__mro__)
            told = copy.copy(f)
            told.metadata = next((g.metadata for g in above if g is not None and g.metadata), f.metadata)
            found.append(told)
    return tuple(found)
