"""Scores of clients whose answers go by more than one input: by those given at once, or by those before.

Inputs come in an order drawn for each client, the same for all methods. A rule for batches sees so many of them at a
time, all at once by default. A rule for streams sees one after the other, from what the client knew before the first;
where it is to have seen some before those that are judged, the last ones of the same order come first, unlabelled and
unscored, again from the start where there are fewer, so that each is scored once.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from personafl.core import rng, tree
from personafl.core.algorithm import Algorithm
from personafl.core.plugin_points import Inference
from personafl.core.types import Examples, Metric, Params, TrainedTask
from personafl.evaluation import evaluate
from personafl.evaluation.settings import Evaluation


def asked(algorithm: Algorithm) -> bool:
    """Whether a method's answers go by more than one input."""
    return algorithm.rule is not None and algorithm.rule.together


def client_scores(
    algorithm: Algorithm,
    task: TrainedTask,
    ready: Params,
    data: Examples,
    evaluation: Evaluation,
    activations: float,
    *,
    in_order: bool = False,
) -> list[Tensor]:
    """Per client the score of each of its examples, by whatever its method answers by; see `evaluate.scores`.

    `in_order`: they come as they are, from what the client knew before the first.
    """
    rule = algorithm.rule
    if rule is None or not rule.together:
        return evaluate.scores(algorithm.predict, task, ready, data, activations)
    both = functools.partial(evaluate.both_outputs, algorithm)
    given = evaluate.outputs(both, task, ready, data, activations)
    if in_order:
        as_they_are = torch.arange(data.rows.shape[1], device=data.rows.device).expand(data.rows.shape)
        return scores(rule, task.metric, ready, given, data, as_they_are, evaluation.batch)
    order = shuffled(data, algorithm.setup.training.seed)
    return scores(rule, task.metric, ready, given, data, order, evaluation.batch, evaluation.inputs_before)


def shuffled(data: Examples, seed: int) -> Tensor:
    """The order in which each client meets its examples, as places in its row: `[C, n]`, padding last."""
    keys = rng.key(seed, "inputs", 0, data.ids).unsqueeze(1)
    device = data.rows.device
    return rng.order(tree.sent(keys, device), tree.sent(data.count, device).unsqueeze(1), data.rows.shape[1])[:, 0]


@torch.no_grad()
def scores(
    rule: Inference,
    metric: Metric,
    deployed: Params,
    given: Tensor,
    data: Examples,
    order: Tensor,
    batch: int = 0,
    before: int = 0,
) -> list[Tensor]:
    """Per client the score of each of its examples, from outputs of both models `[C, n, 2, K]`."""
    clients, width = order.shape
    own, common = (_at(given[:, :, i], order) for i in (0, 1))
    count = tree.sent(data.count, order.device).unsqueeze(1)
    valid = torch.arange(width, device=order.device) < count
    ready, answers = dict(deployed), []
    if rule.in_turn and before:
        back = (torch.arange(before, device=order.device) - before) % count.clamp(min=1)  # places in the order
        known = count.expand(-1, before) > 0
        ready |= rule.decide(ready, _at(own, back), _at(common, back), known)[1]
    size = width if rule.in_turn or not batch else batch
    for first in range(0, width, max(size, 1)):
        now = slice(first, first + size)
        answers.append(rule.decide(ready, own[:, now], common[:, now], valid[:, now])[0])
    out = torch.cat(answers, 1) if answers else own
    y = data.y[data.rows].gather(1, order)
    found = metric.per_example(out.flatten(0, 1), y.flatten(0, 1)).float()
    found = found.view(clients, width, *found.shape[1:])
    places = order.view(clients, width, *[1] * (found.dim() - 2)).expand_as(found)
    back_in_place = torch.zeros_like(found).scatter(1, places, found)
    return [row[:n] for row, n in zip(back_in_place.unbind(), data.count.tolist(), strict=True)]


def _at(values: Tensor, places: Tensor) -> Tensor:
    """Values `[C, n, K]` at places `[C, m]`."""
    return values.gather(1, places.unsqueeze(2).expand(-1, -1, values.shape[2]))
