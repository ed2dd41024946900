"""Scores example by example."""

from __future__ import annotations

import torch
from torch import Tensor

from personafl.core.types import Metric, Model, Params, Task
from personafl.evaluation import evaluate, metrics
from tests import worlds


class Noting:
    """A model that notes what it is told of padding, and answers with zeros."""

    def __init__(self) -> None:
        self.info, self.told = worlds.model().info, list[Tensor | None]()

    def __call__(self, params: Params, x: Tensor, valid: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        self.told.append(valid)
        return x.new_zeros(*x.shape[:2], 3)


def test_a_model_is_told_of_padding_unless_its_caller_says_which_inputs_are_real() -> None:
    """Test sets of 9 and 2 rows, of which the method also shows the first two alone."""
    model = Noting()
    task = Task(model, metrics.cross_entropy, Metric(metrics.accuracy))  # type: ignore[arg-type]
    both = torch.ones(2, 2, dtype=torch.bool)

    def predict(shown: Model, own: Params, x: Tensor) -> Tensor:
        shown(own, x[:, :2], both)
        return shown(own, x)

    data = worlds.federation().examples("test", torch.tensor([0, 1]))
    found = evaluate.scores(predict, task, {"w": torch.zeros(2, 1)}, data, 0.0)
    assert [len(row) for row in found] == [9, 2]
    first, second = model.told
    assert first is both
    assert second is not None and second.tolist() == [[True] * 9, [True] * 2 + [False] * 7]
