"""Who takes part: a function of seed and round, the same for a federation and for a roster."""

from __future__ import annotations

import torch
from torch import Tensor

from personafl import Training
from personafl.core.types import Stage
from personafl.engine import sampling

SIZES = [5, 9, 5, 1, 9, 2]


class Six:
    num_clients = 6

    def train_sizes(self, ids: Tensor) -> Tensor:
        return torch.tensor(SIZES)[ids]


HALF = Training(join_ratio=0.5, seed=3)


def test_the_largest_come_first_and_equal_ones_by_number() -> None:
    assert sampling.largest_first(Six(), torch.tensor([3, 4, 0, 2, 1, 5])).tolist() == [1, 4, 0, 2, 5, 3]


def test_stages_of_all_and_of_nobody() -> None:
    assert sampling.cohort(Six(), HALF, Stage(number=0, who="all")).tolist() == [1, 4, 0, 2, 5, 3]
    assert sampling.cohort(Six(), HALF, Stage(number=0, who="nobody")).tolist() == []


def test_a_cohort_is_a_function_of_seed_and_round() -> None:
    found = [sampling.cohort(Six(), HALF, Stage(number=t)).tolist() for t in range(8)]
    assert found == [sampling.cohort(Six(), HALF, Stage(number=t, phase="other")).tolist() for t in range(8)]
    assert all(len(set(c)) == 3 for c in found) and len({tuple(c) for c in found}) > 3
    other = Training(join_ratio=0.5, seed=4)
    assert found != [sampling.cohort(Six(), other, Stage(number=t)).tolist() for t in range(8)]


def test_who_is_evaluated_is_the_same_in_every_round() -> None:
    assert sampling.evaluated(Six(), HALF, 6).tolist() == sampling.evaluated(Six(), HALF, 99).tolist()
    assert len(sampling.evaluated(Six(), HALF, 2)) == 2
    assert sampling.evaluated(Six(), HALF, 2).tolist() == sampling.evaluated(Six(), HALF, 2).tolist()


def test_a_sample_of_all_clients_is_all_of_them_in_every_round() -> None:
    whole = Training(join_ratio=1.0, seed=3)
    assert all(sampling.cohort(Six(), whole, Stage(number=t)).tolist() == [1, 4, 0, 2, 5, 3] for t in range(3))
