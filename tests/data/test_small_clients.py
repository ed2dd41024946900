"""Natural clients with too few samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from personafl import experiment
from personafl.core.errors import UserError
from personafl.data.dataset import Source
from personafl.data.small_clients import without_small_clients
from tests.data.written import recipe_of

NAMES = ("anna", "ben", "cleo")


def source(sizes: list[int], **more: Any) -> Source:
    """Clients with so many samples each."""
    n = sum(sizes)
    x, y = torch.arange(float(n)).unsqueeze(1), torch.zeros(n, dtype=torch.int64)
    return Source("mine", x, y, 1, clients=np.repeat(np.arange(len(sizes)), sizes), names=NAMES, **more)


def left(data: Source, test: str = "pooled", test_share: float = 0.25, validation_share: float = 0.0) -> list[int]:
    """The client of each example, small ones left out."""
    found, count = without_small_clients(data, "drop", test, test_share, validation_share)
    assert count == len(np.unique(data.clients)) - len(set(found[found >= 0]))
    return found.tolist()


def refusal(data: Source, test: str = "pooled", test_share: float = 0.25, validation_share: float = 0.0) -> str:
    with pytest.raises(UserError) as refused:
        without_small_clients(data, "refuse", test, test_share, validation_share)
    return str(refused.value)


def test_a_client_needs_a_sample_for_each_part() -> None:
    data = source([4, 1, 2])
    assert left(data) == [0, 0, 0, 0, -1, 2, 2]
    assert left(data, validation_share=0.1) == [0, 0, 0, 0, -1, -1, -1]
    said = "mine: client ben has 1 sample, too few for a training and a test part; data.small_clients=drop leaves"
    assert said in refusal(data)
    said = "client ben has 1 sample, too few for a training, a validation and a test part (2 such clients in all)"
    assert said in refusal(data, validation_share=0.1)


def test_shares_count() -> None:
    data = source([10, 4, 10])
    assert left(data, test_share=0.9) == [0] * 10 + [-1] * 4 + [2] * 10  # round(3.6) of four for testing
    assert "ben has 4 samples, too few for" in refusal(data, test_share=0.9)


def test_samples_of_one_group_are_one() -> None:
    data = source([4, 4, 4], groups=np.array([0, 0, 1, 1, 2, 2, 2, 2, 3, 4, 5, 6]))
    assert left(data) == [0] * 4 + [-1] * 4 + [2] * 4
    assert "client ben has 4 samples, too few for a training and a test part: its samples form 1 groups" in refusal(
        data
    )


def test_a_client_needs_test_samples_where_they_are_dealt() -> None:
    data = source([3, 2, 2], test=np.array([0, 0, 1, 0, 0, 1, 1], bool))
    assert left(data, "dealt") == [0, 0, 0, -1, -1, -1, -1]
    said = refusal(data, "dealt")
    assert said.startswith("mine: client ben has no test samples (2 such clients in all); data.small_clients=drop ")
    assert said.endswith("data.official_test=pooled splits test samples off")
    assert left(data, "pooled") == [0, 0, 0, 1, 1, 2, 2]


def test_who_is_all_in_the_test_part_is_no_client_where_that_is_the_server_s() -> None:
    data = source([4, 2, 2], test=np.array([0, 0, 1, 1, 0, 1, 1, 1], bool))
    assert left(data, "global") == [0, 0, 0, 0, -1, -1, 2, 2]  # the third is not asked of
    assert "client ben has 1 sample, too few for a training and a test part; data" in refusal(data, "global")


def test_somebody_must_be_left() -> None:
    with pytest.raises(ValueError, match="no natural client has enough samples"):
        left(source([1, 1, 1]))


def test_numbers_stand_in_for_names_and_absent_clients_are_not_small() -> None:
    plain = Source("mine", torch.zeros(4, 1), torch.zeros(4).long(), 1, clients=np.array([0, 0, 4, 7]))
    assert "client 4 has 1 sample, too few for a training and a test part (2 such clients" in refusal(plain)
    whole = source([2, 2, 2])
    assert without_small_clients(whole, "refuse", "pooled", 0.25, 0.0)[1] == 0


def three() -> list[TensorDataset]:
    """The second has one sample, and each has one class."""
    return [
        TensorDataset(torch.arange(float(n)).unsqueeze(1), torch.full((n,), k)) for n, k in ((8, 0), (1, 1), (6, 1))
    ]


def test_a_run_refuses_or_drops_them_and_says_how_many() -> None:
    name = "tests.data.test_small_clients:three"
    with pytest.raises(ValueError, match=r"three: client 1 has 1 sample, .*data\.small_clients=drop"):
        experiment.federation(recipe_of(name))
    made = experiment.federation(recipe_of(name, small_clients="drop"))
    assert made.names == ("0", "2")
    assert made.notes == {"clients_left_out": 0, "small_clients_left_out": 1}
    drawn = experiment.federation(recipe_of(name, small_clients="drop", num_clients=2))
    assert drawn.names == ("0", "2")  # the small one is never drawn
    result = experiment.run(recipe_of(name, small_clients="drop"))  # clients with one class train and are scored
    assert [r["name"] for r in result["local"].clients] == ["0", "2"]
