"""Puts a method and what fills its slots together."""

from __future__ import annotations

from personafl.core.algorithm import Algorithm
from personafl.core.contribution import Contribution
from personafl.core.inherited import Inherited
from personafl.core.types import Setup


def assembled(algorithm: Algorithm, setup: Setup) -> Algorithm:
    """The method bound to a model and a training, within the parts its settings ask for."""
    method = algorithm.bind(setup)
    if algorithm.weights.startswith("cowa"):
        if method.private() >= frozenset(method.info.parameters):
            raise ValueError(f"weights={algorithm.weights!r}: {type(algorithm).__name__} sends nothing to be weighed")
        method = Contribution.around(
            method,
            gradient=algorithm.weights != "cowa-prediction",
            prediction=algorithm.weights != "cowa-gradient",
            at_server=algorithm.weights == "cowa-server",
        )
    if algorithm.inherit is not None:
        method = Inherited.around(method, slot=algorithm.inherit)
    return method
