"""LocalOnly, FedAvg, FedAvg+FT and FedAvg with adaptive inference."""

from __future__ import annotations

import pytest
import torch

from personafl import FedAvg, FedAvgAdaptive, FedAvgFT, LocalOnly
from personafl.core.errors import UserError
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


def test_local_sends_nothing_and_has_no_global_model() -> None:
    sim = worlds.simulation(LocalOnly())
    sim.run()
    assert (sim.totals.up_bytes, sim.totals.down_bytes) == (0, 0)
    assert sim.common() is None
    assert sim.rows[-1]["global"] is None


def test_local_trains_a_client_only_when_it_is_selected() -> None:
    sim = worlds.simulation(LocalOnly(), num_rounds=1)
    chosen = set(sim.cohort(sim.schedule[0]).tolist())
    sim.run()
    kept = sim.store.gather(sim.everybody)
    for c in range(6):
        stays = all(torch.equal(kept[n][c], sim.model.initial[n]) for n in kept)
        assert stays == (c not in chosen)


def test_fine_tuning_starts_from_the_final_global_model_and_costs_one_session_more() -> None:
    plain, tuned = worlds.simulation(FedAvg(), join_ratio=1.0), worlds.simulation(FedAvgFT(), join_ratio=1.0)
    plain.run()
    for _ in range(8):
        tuned.step()
    before = tuned.deployed_models(tuned.model, tuned.everybody)  # until then the global model answers
    for n, t in plain.server.items():
        assert torch.equal(before[n], t.expand(6, *t.shape))
    flops = tuned.totals.flops
    tuned.run()
    after = tuned.deployed_models(tuned.model, tuned.everybody)
    assert torch.equal(tuned.server["head.weight"], plain.server["head.weight"])
    assert not torch.equal(after["head.weight"], before["head.weight"])
    assert tuned.totals.flops / flops == pytest.approx(9 / 8)  # all clients took part in all 8 rounds
    assert tuned.totals.up_bytes == plain.totals.up_bytes
    assert tuned.totals.paper_bytes == plain.totals.paper_bytes
    assert tuned.totals.down_bytes == plain.totals.down_bytes * 9 / 8


def test_fine_tuning_epochs_can_be_set() -> None:
    costs = []
    for epochs in (1.0, 3.0):
        sim = worlds.simulation(FedAvgFT(finetune_epochs=epochs))
        for _ in range(8):
            sim.step()
        before = sim.totals.flops
        sim.run()
        costs.append(sim.totals.flops - before)
    assert costs[1] == pytest.approx(3 * costs[0])


def test_negative_fine_tuning_is_refused() -> None:
    with pytest.raises(ValueError, match=r"finetune_epochs=-1.0: must not be negative"):
        FedAvgFT(finetune_epochs=-1.0)


def test_adaptive_inference_by_name_is_fedavg_with_two_slots() -> None:
    named = worlds.simulation(FedAvgAdaptive())
    composed = worlds.simulation(FedAvg(prior_free=True, inference="batch"))
    for sim in (named, composed):
        sim.run()
    assert all(torch.equal(t, composed.server[n]) for n, t in named.server.items())
    assert [row["personal"] for row in named.rows if "personal" in row] == [
        row["personal"] for row in composed.rows if "personal" in row
    ]
    assert named.algorithm.evaluated("after_aggregation") == composed.algorithm.evaluated("after_aggregation")


def test_adaptive_inference_needs_classes() -> None:
    with pytest.raises(UserError, match=r"FedAvgAdaptive needs one class per example \(how often it occurs\)"):
        FedAvgAdaptive().bind(Setup(worlds.model().info, worlds.training(task="regression"), 6))


def test_the_learning_rate_decays_and_drops_at_milestones() -> None:
    training = worlds.training(lr=1.0, lr_decay=0.5, lr_milestones=(2, 3))
    assert [training.rate(t) for t in range(4)] == pytest.approx([1.0, 0.5, 0.25 * 0.1, 0.125 * 0.01])
