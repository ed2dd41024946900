"""Numbers that are given for good."""

from __future__ import annotations

import torch

from personafl.deployment.roster import Roster


def test_numbers_are_given_in_natural_order_and_stay() -> None:
    roster = Roster(3)
    roster.add(["c10", "c9"])
    roster.add(["a", "c1"])
    assert [(m.name, m.number) for m in roster.members] == [("c9", 0), ("c10", 1), ("a", 2), ("c1", 3)]
    again = Roster.read(3, roster.told())
    assert again.members == roster.members and again.num_clients == 3


def test_who_has_not_come_has_no_examples() -> None:
    roster = Roster(3)
    (first,) = roster.add(["x"])
    first.sizes = {"train": 7}
    assert roster.train_sizes(torch.tensor([2, 0, 1])).tolist() == [0, 7, 0]
    assert roster.numbered(1) is None and roster.numbered(-1) is None and roster.named("y") is None
