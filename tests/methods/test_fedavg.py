"""FedAvg: the mean, the server's learning rate, and the schedule of the clients' rate."""

from __future__ import annotations

import pytest
import torch

from personafl import FedAvg
from personafl.core.types import Round, Setup, Stage
from tests import worlds

RND = Round(Stage(0), 0.1)


def bound(**changes: object) -> FedAvg:
    return FedAvg().bind(Setup(worlds.model().info, worlds.training(**changes), 6))


def test_the_server_takes_the_mean_by_examples() -> None:
    sent = {"w": torch.tensor([[1.0, 0.0], [4.0, 8.0]])}
    terms = bound().summands(sent, torch.tensor([1.0, 3.0], dtype=torch.float64), RND)
    sums = {n: t.sum(0) for n, t in terms.items()}
    # (1 * 1 + 3 * 4) / 4 = 3.25 and (1 * 0 + 3 * 8) / 4 = 6
    assert bound().aggregate({"w": torch.zeros(2)}, sums, RND)["w"].tolist() == [3.25, 6.0]


def test_a_server_rate_of_a_half_goes_half_way() -> None:
    sums = {"w": torch.tensor([8.0]), "aux/weight": torch.tensor(2.0)}  # mean 4
    assert bound(server_lr=0.5).aggregate({"w": torch.tensor([1.0])}, sums, RND)["w"].tolist() == [2.5]


def test_the_learning_rate_decays_and_drops_at_milestones() -> None:
    training = worlds.training(lr=1.0, lr_decay=0.5, lr_milestones=(2, 3))
    assert [training.rate(t) for t in range(4)] == pytest.approx([1.0, 0.5, 0.25 * 0.1, 0.125 * 0.01])
