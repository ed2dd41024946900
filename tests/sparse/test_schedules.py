from itertools import pairwise

import pytest

from personafl.sparse.schedules import cosine, due


def test_the_first_round_and_every_interval_after_it_are_due():
    assert [rnd for rnd in range(10) if due(rnd, 3)] == [0, 3, 6, 9]
    assert all(due(rnd, 1) for rnd in range(5))


def test_cosine_begins_at_its_start_passes_half_and_ends_at_nothing():
    assert cosine(0.4, 0, 10) == 0.4
    assert cosine(0.4, 5, 10) == pytest.approx(0.2)
    assert cosine(0.4, 10, 10) == 0
    # a third of the way: 0.2 (1 + cos 60) = 0.2 * 1.5
    assert cosine(0.4, 4, 12) == pytest.approx(0.3)


def test_cosine_stays_at_nothing_behind_its_end():
    assert cosine(0.4, 11, 10) == 0
    assert cosine(0.4, 20, 10) == 0  # the cosine itself would be back at its start
    assert cosine(0.4, 0, 0) == 0


def test_cosine_falls_all_the_way():
    shares = [cosine(0.5, rnd, 20) for rnd in range(21)]
    assert all(a > b for a, b in pairwise(shares))
