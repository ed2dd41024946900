"""A model around another, for those that change what goes in or what comes out."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from personafl.core.types import Model, Params


class ModelAround:
    """All of `model`; what differs is overridden."""

    def __init__(self, model: Model) -> None:
        self.model, self.info = model, model.info

    def weights(self, params: Params) -> Params:
        """The weights it runs with."""
        return params

    def real(self, valid: Tensor | None) -> Tensor | None:
        """Which inputs are no padding."""
        return valid

    def given(self, out: Tensor) -> Tensor:
        """What it gives for these outputs."""
        return out

    def __call__(self, params: Params, x: Tensor, valid: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        return self.given(self.model(self.weights(params), x, self.real(valid), keys))

    def features(
        self,
        params: Params,
        x: Tensor,
        valid: Tensor | None = None,
        keys: Tensor | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        z, out = self.model.features(self.weights(params), x, self.real(valid), keys, change)
        return z, self.given(out)
