"""Puts a method and what fills its slots together."""

from __future__ import annotations

import torch

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.errors import UserError
from personafl.core.hook_checks import check_method
from personafl.core.plugin_points import WEIGHTS
from personafl.core.types import Payload, Round, Setup, Stage, Training
from personafl.plugins.label_prior import LabelPrior
from personafl.plugins.prior_free import PriorFree
from personafl.plugins.wrapper import responsible


def assembled(algorithm: Algorithm, setup: Setup) -> Algorithm:
    """The method bound to a model and a training, within what its slots are filled with."""
    method: Algorithm = algorithm.bind(setup)
    if algorithm.prior_free:
        method = PriorFree.around(method)
    if (wrap := WEIGHTS[algorithm.weights]) is not None:
        method = wrap(method)
    if algorithm.robust is not None:
        method = algorithm.robust.around(method)
    if algorithm.inherit is not None:
        method = algorithm.inherit.around(method)
    check_method(method)
    require_common(method, method)
    require_all_rounds(method, setup.training)
    return method


def require_all_rounds(method: Algorithm, training: Training) -> None:
    """Raise `UserError` if training may stop early and the bound method depends on the number of rounds."""
    if (key := training.stops_early) and method.needs_all_rounds():
        name = responsible(method, lambda part: part.needs_all_rounds())
        raise UserError(
            f"{name} cannot be combined with training.{key}={getattr(training, key)}, because it depends on the number "
            f"of rounds (training.num_rounds). Remove training.{key}."
        )


def require_common(method: Algorithm, wanted: Algorithm) -> None:
    """Refuse an inference that needs a global model where a method has no complete one, before anything runs."""
    if wanted.rule is None or not wanted.rule.asks_global:
        return
    blank = {n: torch.zeros(s) for n, s in method.info.shapes.items()}
    one = torch.zeros(1, dtype=torch.int64)
    sent = method.download(method.init_server(blank), method.init_known(blank, one), Round(Stage(number=0), 0.0))
    down = tree.received(sent, 1)
    statistics: Payload = {n: blank[n][None] for n in method.info.buffers}
    if method.common(statistics | down) is None:
        why = wanted.without_common(method.called)
        instead = "; with share=1 a client's own model is asked alone"
        raise UserError(f"{why}{instead}") if isinstance(wanted.rule, LabelPrior) else why
