"""Who is faulty, who vanishes and who is late: functions of seed, round and client."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from personafl import Faults, UserError


def test_faulty_clients_are_a_share_and_more_of_them_contain_fewer() -> None:
    drawn = [Faults(faulty_ratio=r).faulty(0, 50) for r in (0.0, 0.1, 0.4, 1.0)]
    assert [int(d.sum()) for d in drawn] == [0, 5, 20, 50]
    assert all((a <= b).all() for a, b in pairwise(drawn))
    assert not torch.equal(drawn[2], Faults(faulty_ratio=0.4).faulty(1, 50))


def test_draws_go_by_round_and_client_alone() -> None:
    faults, ids = Faults(drop_rate=0.3, straggler_ratio=0.3), torch.arange(20_000)
    for draw in (faults.dropped, faults.straggling):
        found = draw(0, 4, ids)
        assert abs(float(found.double().mean()) - 0.3) < 5 * (0.3 * 0.7 / 20_000) ** 0.5  # five deviations
        assert torch.equal(draw(0, 4, ids[[7, 3]]), found[[7, 3]])
        assert not torch.equal(draw(0, 5, ids), found)
    assert not torch.equal(faults.dropped(0, 4, ids), faults.straggling(0, 4, ids))
    assert not Faults().dropped(0, 4, ids).any()


def test_numbers_that_are_none_are_faults_by_name() -> None:
    """As the command line reads `faults.fault=nan`."""
    assert [Faults(fault=float(f)).fault for f in ("nan", "inf")] == ["nan", "inf"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drop_rate": 1.5}, r"faults.drop_rate=1.5: must be in \[0, 1\]"),
        ({"straggler_ratio": -0.1}, r"faults.straggler_ratio=-0.1: must be in \[0, 1\]"),
        ({"faulty_ratio": 2}, r"faults.faulty_ratio=2.0: must be in \[0, 1\]"),
        ({"strength": 0}, "faults.strength=0.0: must be greater than 0"),
        ({"fault": "lies"}, "faults.fault='lies': possible are nan, inf, shape, .*, sign-flip, noise"),
        ({"late": "keep"}, "faults.late='keep': possible are drop, stale"),
        ({"droprate": 0.1}, r"faults.droprate=0.1: no such setting of \[faults\]; did you mean drop_rate?"),
    ],
)
def test_impossible_faults_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Faults(**settings)  # type: ignore[arg-type]
