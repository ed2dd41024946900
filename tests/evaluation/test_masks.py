"""How alike masks are, by hand and pair by pair."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from personafl import COPFL, DMPFL, Algorithm, DMPFLPlus, Evaluation, FedAvg, FedPeWS, FedSelect, Inherit
from personafl.core import tree
from personafl.core.types import Params
from personafl.evaluation import masks
from personafl.simulation.ranks import SingleProcess
from tests import checks
from tests.simulation.test_ranks import together


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


def one_by_one(held: Params, common: Params) -> dict[str, Any]:
    """What is told of each client, position by position."""
    count = tree.rows(held)
    own = [{n: m[c].flatten().tolist() for n, m in held.items()} for c in range(count)]
    flat = [[v for row in mine.values() for v in row] for mine in own]
    pairs = [[sum(a == b for a, b in zip(i, j, strict=True)) / len(i) for j in flat] for i in flat]
    shared = {
        n: [sum(a and b for a, b in zip(mine[n], theirs.flatten().tolist(), strict=True)) for mine in own]
        for n, theirs in common.items()
    }
    return {"ids": list(range(count)), "pairs": pairs} | ({"by_client": shared} if shared else {})


ALONE = ("ids", "pairs", "by_client")


def test_pairs_and_clients_by_hand_in_the_order_of_ids() -> None:
    """Clients 7, 2 and 5: of six positions, pairs of the first two agree at 2 + 2, 1 + 0 and 3 + 0."""
    clients = masks.each_client(OWN | COMMON)
    found = masks.summary(masks.sums(OWN | COMMON), [7, 2, 5], clients)
    assert found is not None
    assert found["ids"] == [2, 5, 7]
    assert found["pairs"] == [
        pytest.approx([1, 3 / 6, 4 / 6]),
        pytest.approx([3 / 6, 1, 1 / 6]),
        pytest.approx([4 / 6, 1 / 6, 1]),
    ]
    assert found["by_client"] == {"a": [1, 2, 1], "b": [1, 0, 1]}
    usual = masks.summary(masks.sums(OWN | COMMON))
    assert {n: v for n, v in found.items() if n not in ALONE} == usual


def test_masks_of_more_than_one_block_are_compared_as_position_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_BLOCK", 2)  # of 16 positions
    draw = torch.Generator().manual_seed(0)
    held = {n: torch.rand(5, *shape, generator=draw) < 0.4 for n, shape in {"a": (7, 3), "b": (11,), "c": ()}.items()}
    found = masks.summary(masks.sums(held), range(5), masks.each_client(held))
    assert found is not None
    assert {n: v for n, v in found.items() if n in ALONE} == one_by_one(held, {})


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("method", [DMPFL(**BUSY), FedSelect(select_interval=1)], ids=["dm-pfl", "fedselect"])
def test_a_runs_clients_are_told_one_by_one(method: Algorithm, chunk: int) -> None:
    sim = checks.played(method, chunk=chunk)
    found = sim.masks()
    assert found is not None
    held = tree.under(checks.everyone(sim), "mask")
    wanted = one_by_one(held, tree.under(sim.server, "mask"))
    assert {n: v for n, v in found.items() if n in ALONE} == wanted
    assert json.loads(json.dumps(found)) == found


def test_of_more_clients_than_the_limit_nobody_is_told_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = checks.played(DMPFL(**BUSY))
    usual = sim.masks()
    assert usual is not None and usual["clients"] == 6
    monkeypatch.setattr(masks, "LIMIT", 6)
    assert sim.masks() == usual
    monkeypatch.setattr(masks, "LIMIT", 5)
    monkeypatch.setattr(masks, "each_client", lambda _: pytest.fail("the masks were brought together"))
    assert sim.masks() == {n: v for n, v in usual.items() if n not in ALONE}


@pytest.mark.parametrize("ranks", [2, 8])  # of eight, two have nobody
def test_ranks_bring_the_masks_together(ranks: int) -> None:
    alone = checks.played(DMPFL(**BUSY)).masks()
    assert alone is not None

    def work(world: SingleProcess) -> dict[str, Any] | None:
        return checks.played(DMPFL(**BUSY), ranks=world).masks()

    for found in together(ranks, work):
        assert found is not None
        assert {n: found[n] for n in ALONE} == {n: alone[n] for n in ALONE}
        assert found["whole"] == pytest.approx(alone["whole"], rel=1e-12)
