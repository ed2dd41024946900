"""FedDST: one sparse model, its budget, and how long its mask moves."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from personafl import FedAvg, FedDST, StackedModel
from personafl.core import tree
from personafl.core.types import Masked, Round, Setup, Stage
from tests import checks, worlds

BUSY = FedDST(readjust_share=0.3, readjust_interval=1)


def test_a_dense_mask_makes_it_fedavg() -> None:
    dense, fedavg = checks.played(FedDST(sparsity=0.0, readjust_interval=1)), checks.played(FedAvg())
    checks.assert_close(fedavg.server, dense.server)
    assert all(bool(m.all()) for m in tree.under(dense.server, "mask").values())


@pytest.mark.parametrize("allocation", ["feddst_first_dense", "erk"])
def test_the_budget_of_every_layer_is_kept(allocation: str) -> None:
    sim = worlds.simulation(dataclasses.replace(BUSY, allocation=allocation))
    budget = sim.algorithm.budget()  # type: ignore[attr-defined]
    seen = [tree.under(sim.server, "mask")]
    for _ in sim.schedule:
        sim.step()
        seen.append(tree.under(sim.server, "mask"))
        for n, k in budget.items():
            assert int(seen[-1][n].sum()) == k
            assert not sim.server[n][~seen[-1][n]].any()  # pruned weights are zero
    assert any(not torch.equal(seen[0][n], seen[-1][n]) for n in budget)


def test_clients_keep_the_budget_too_and_grow_elsewhere_than_they_pruned() -> None:
    sim = worlds.simulation(BUSY)
    _, _, done = checks.rehearsed(sim)
    grown = 0
    for n, k in sim.algorithm.budget().items():  # type: ignore[attr-defined]
        mask, before = done.upload[n].mask, sim.server[f"mask/{n}"]  # type: ignore[union-attr]
        assert [int(m.sum()) for m in mask] == [k] * 3
        # As many new ones as a share of the budget, or as there is room for.
        wanted = min(-(-3 * k // 10), before.numel() - k)
        assert [int((m & ~before).sum()) for m in mask] == [wanted] * 3
        grown += wanted
    assert grown > 0


def test_grown_positions_start_at_zero() -> None:
    late = worlds.simulation(dataclasses.replace(BUSY, readjust_when="after_training"))
    _, _, done = checks.rehearsed(late)
    for n in late.algorithm.budget():  # type: ignore[attr-defined]
        sent = done.upload[n]
        assert isinstance(sent, Masked)
        grown = sent.mask & ~late.server[f"mask/{n}"]
        assert not sent.values[grown].any()
        assert sent.values[sent.mask & ~grown].all()
    early = worlds.simulation(BUSY)
    _, _, done = checks.rehearsed(early)
    sent = done.upload["layers.1.weight"]
    grown = sent.mask & ~early.server["mask/layers.1.weight"]  # type: ignore[union-attr]
    assert sent.values[grown].any()  # type: ignore[union-attr]  # trained for an epoch since


def test_readjustment_is_annealed_and_stops_at_half() -> None:
    """0.3 / 2 (1 + cos(pi t / 4)) over 8 rounds: 0.3 at first, half of it at round 2, nothing from round 4 on."""
    algorithm = worlds.simulation(BUSY).algorithm
    shares = [algorithm.readjusted(Round(Stage(t), 0.1)) for t in range(8)]  # type: ignore[attr-defined]
    assert shares[0] == pytest.approx(0.3)
    assert shares[2] == pytest.approx(0.15)
    assert shares[1] > shares[2] > shares[3] > 0
    assert shares[4:] == [0.0] * 4


def test_from_then_on_the_mask_stands_still_and_does_not_travel_up() -> None:
    sim = worlds.simulation(BUSY)
    for t in range(8):
        _, _, done = checks.rehearsed(sim)
        assert {e.known for e in done.upload.values() if isinstance(e, Masked)} == {t >= 4}
        before = tree.under(sim.server, "mask")
        sim.step()
        if t >= 4:
            checks.assert_agree(tree.under(sim.server, "mask"), before)


def test_the_mean_is_over_holders_and_pruned_back_by_magnitude() -> None:
    """Positions 4, 2, 3 and one nobody holds; two may stay: 4 and 3."""
    model = StackedModel(torch.nn.Linear(4, 1, bias=False), torch.zeros(2, 4))
    algorithm = FedDST(sparsity=0.5, allocation="feddst").bind(Setup(model.info, worlds.training(), 2))
    assert algorithm.budget() == {"weight": 2}
    held = torch.tensor([[[True, True, False, False]], [[True, False, True, False]]])
    values = torch.tensor([[[1.0, 2.0, 0.0, 0.0]], [[5.0, 0.0, 3.0, 0.0]]])
    rnd = Round(Stage(0), 0.1)
    terms = algorithm.summands({"weight": Masked(values, held)}, torch.tensor([1.0, 3.0], dtype=torch.float64), rnd)
    server = {"weight": torch.tensor([[9.0, 0, 0, 9.0]]), "mask/weight": torch.tensor([[True, False, False, True]])}
    after = algorithm.aggregate(server, {n: t.sum(0, dtype=torch.float64) for n, t in terms.items()}, rnd)
    assert after["weight"].tolist() == [[4.0, 0.0, 3.0, 0.0]]
    assert after["mask/weight"].tolist() == [[True, False, True, False]]


def test_everybody_answers_by_the_sparse_global_model() -> None:
    sim = checks.played(BUSY, num_rounds=3)
    ready = sim.deployed_models(sim.model, sim.everybody)
    checks.assert_agree(ready, tree.stack(tree.without(sim.server, "mask"), 6))
    assert checks.everyone(sim) == {}
