"""Puts a method and what fills its slots together."""

from __future__ import annotations

import torch

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.contribution import Contribution
from personafl.core.inherited import Inherited
from personafl.core.types import Payload, Round, Setup, Stage


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
            literal=algorithm.weights == "cowa-literal",
        )
    if algorithm.inherit is not None:
        if algorithm.inherit.transfer in ("mmd", "l2") and algorithm.inherit.weight:
            method.features()
        method = Inherited.around(method, slot=algorithm.inherit)
    require_common(method, method.inference)
    return method


def require_common(method: Algorithm, inference: str) -> None:
    """Refuse an inference that needs a global model where the method has no complete one, before anything runs."""
    if inference == "own":
        return
    blank = {n: torch.zeros(s) for n, s in method.info.shapes.items()}
    one = torch.zeros(1, dtype=torch.int64)
    sent = method.download(method.init_server(blank), method.init_known(blank, one), Round(Stage(number=0), 0.0))
    down = tree.received(sent, 1)
    statistics: Payload = {n: blank[n][None] for n in method.info.buffers}
    if method.common(statistics | down) is None:
        raise ValueError(f"inference={inference!r} needs a global model, which {method.called} has not")
