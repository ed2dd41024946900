"""How alike masks are, by hand and pair by pair."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from personafl import COPFL, DMPFL, Algorithm, DMPFLPlus, Evaluation, FedAvg, FedPeWS, FedSelect, Inherit
from personafl.core import tree
from personafl.core.types import Params
from personafl.evaluation import masks
from tests import checks


def bits(*rows: str) -> Tensor:
    return torch.tensor([[c == "1" for c in row] for row in rows])


# Three clients. Tensor a: pairs agree at 2, 1 and 3 of 4 positions; b: at 2, 0 and 0 of 2.
OWN = {"a": bits("1100", "1010", "1011"), "b": bits("11", "11", "00")}
COMMON = {"global/a": bits("1001").expand(3, 4), "global/b": bits("10").expand(3, 2)}


def test_similarity_overlap_and_density_by_hand() -> None:
    found = masks.summary(masks.sums(OWN | COMMON))
    assert found is not None
    assert found["clients"] == 3
    assert found["similarity"] == pytest.approx({"a": (2 + 1 + 3) / 12, "b": 2 / 6})
    assert found["density"] == pytest.approx({"a": 7 / 12, "b": 4 / 6})
    assert found["shared"] == pytest.approx({"a": (1 + 1 + 2) / 3, "b": (1 + 1 + 0) / 3})
    # of 2, 2 and 3 positions; of 2, 2 and none, which is all there
    assert found["overlap"] == pytest.approx({"a": (1 / 2 + 1 / 2 + 2 / 3) / 3, "b": (1 / 2 + 1 / 2 + 1) / 3})
    assert found["whole"] == pytest.approx(
        {
            "similarity": (4 + 1 + 3) / 18,
            "density": 11 / 18,
            "shared": 6 / 3,
            "overlap": (2 / 4 + 2 / 4 + 2 / 3) / 3,
        }
    )


def test_a_mask_of_one_position_is_in_the_servers_or_not() -> None:
    """0 of 1 for the first client, 1 of 1 for the second, 1 of 2 for the third."""
    held = {"a": bits("100", "010", "110"), "global/a": bits("011").expand(3, 3)}
    found = masks.summary(masks.sums(held))
    assert found is not None
    assert found["overlap"] == pytest.approx({"a": (0 + 1 + 1 / 2) / 3})


def test_the_sums_of_parts_are_those_of_all() -> None:
    whole = masks.sums(OWN | COMMON)
    parts = [masks.sums(tree.take(OWN | COMMON, slice(a, b))) for a, b in ((0, 1), (1, 3))]
    checks.assert_agree({n: parts[0][n] + parts[1][n] for n in whole}, whole, 1e-15)


def test_without_a_global_mask_there_is_no_overlap_and_of_one_client_no_similarity() -> None:
    found = masks.summary(masks.sums(OWN))
    assert found is not None
    assert found.keys() == {"clients", "similarity", "density", "whole"}
    assert found["whole"].keys() == {"similarity", "density"}
    alone = masks.summary(masks.sums(tree.take(OWN | COMMON, slice(1))))
    assert alone is not None
    assert alone.keys() == {"clients", "density", "overlap", "shared", "whole"}
    assert masks.summary(masks.sums({})) is None


def by_pairs(held: Params) -> dict[str, float]:
    """The mean agreement over pairs, each compared."""
    out = {}
    for n, m in held.items():
        same = [float((m[i] == m[j]).double().mean()) for i, j in combinations(range(len(m)), 2)]
        out[n] = sum(same) / len(same)
    return out


BUSY = {"readjust_share": 0.3, "readjust_interval": 1}


@pytest.mark.parametrize("chunk", [0, 2])
@pytest.mark.parametrize(
    "method",
    [
        DMPFL(**BUSY),
        DMPFLPlus(**BUSY),
        FedSelect(select_interval=1),
        COPFL(lr=0.01),
        DMPFL(**BUSY, inherit=Inherit()),
        FedPeWS(base=DMPFL(**BUSY, iterations=1), warmup_share=0.3),
    ],
    ids=["dm-pfl", "dm-pfl-plus", "fedselect", "co-pfl", "inherited", "warmed-up"],
)
def test_a_runs_masks_are_compared_as_pair_by_pair(method: Algorithm, chunk: int) -> None:
    sim = checks.played(method, chunk=chunk)
    found = sim.masks()
    assert found is not None
    held = tree.under(checks.everyone(sim), "mask")
    wanted = by_pairs(held)
    assert found["similarity"] == pytest.approx(wanted, rel=1e-12)
    assert 0 < min(wanted.values()) < 1
    assert found["density"] == pytest.approx({n: float(m.double().mean()) for n, m in held.items()}, rel=1e-12)
    if f"mask/{next(iter(held))}" in sim.server:  # DM-PFL's m_g
        shared = {n: (m & sim.server[f"mask/{n}"]).flatten(1).sum(1).double() for n, m in held.items()}
        share = {n: float((s / held[n].flatten(1).sum(1)).mean()) for n, s in shared.items()}
        assert found["shared"] == pytest.approx({n: float(s.mean()) for n, s in shared.items()}, rel=1e-12)
        assert found["overlap"] == pytest.approx(share, rel=1e-12)
    else:
        assert "overlap" not in found


def test_a_method_without_masks_has_none() -> None:
    assert checks.played(FedAvg(), num_rounds=1).masks() is None


def test_the_masks_are_those_of_the_clients_that_are_evaluated() -> None:
    few = Evaluation(shift="none", eval_every=10_000, clients=4)
    sim = checks.played(DMPFL(**BUSY), evaluation=few)
    ids = sim.evaluated_clients(sim.schedule[-1])
    found = sim.masks()
    assert found is not None
    assert found["clients"] == len(ids) == 4
    wanted = by_pairs(tree.under(sim.store.gather(ids), "mask"))
    assert found["similarity"] == pytest.approx(wanted, rel=1e-12)
