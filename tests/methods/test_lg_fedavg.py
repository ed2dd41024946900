"""LG-FedAvg: what stays, what travels, and the warm start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from personafl import FedAvg, LGFedAvg, StackedModel
from personafl.core import tree, wire
from personafl.core.types import Round
from personafl.engine.local import client_round
from tests import checks, worlds


def test_lg_fedavg_can_share_more_layers() -> None:
    sim = worlds.simulation(LGFedAvg(shared_layers=2))
    assert sim.server.keys() == {"layers.1.weight", "layers.1.bias", "head.weight", "head.bias"}


def test_a_warm_start_of_lg_fedavg_is_fedavg_until_features_are_handed_over() -> None:
    """0.5 * 6 = 3 rounds, in which whole models travel; then all clients keep the same features, and go apart."""
    sim = worlds.simulation(LGFedAvg(warm_start=0.5), num_rounds=6)
    plain = worlds.simulation(FedAvg(weights="uniform"), num_rounds=6)
    plan = [(s.number, s.phase, s.who, s.up) for s in sim.schedule]
    assert plan[:5] == [
        (0, "fedavg", "sampled", True),
        (1, "fedavg", "sampled", True),
        (2, "fedavg", "sampled", True),
        (3, "hand-over", "all", False),
        (3, "train", "sampled", True),
    ]
    for _ in range(3):
        sim.step()
        plain.step()
        whole = tree.without(sim.server, "start") | tree.under(sim.server, "start")
        checks.assert_close(plain.server, whole)
        common = sim.common()
        assert common is not None
        checks.assert_close(tree.stack(plain.server, 1), common)
        checks.assert_close(
            plain.deployed_models(plain.model, plain.everybody), sim.deployed_models(sim.model, sim.everybody)
        )
    assert (sim.totals.up_bytes, sim.totals.down_bytes) == (plain.totals.up_bytes, plain.totals.down_bytes)
    sim.step()
    checks.assert_close(tree.stack(tree.under(sim.server, "start"), 6), sim.store.gather(sim.everybody))
    assert sim.totals.up_bytes == plain.totals.up_bytes
    before, sent = {n: t.clone() for n, t in sim.server.items()}, sim.totals.up_bytes
    rnd, ids, done = checks.rehearsed(sim)
    assert set(done.upload) == set(sim.download(ids, rnd).shared) == set(sim.model.info.head)
    sim.step()
    head = wire.size({n: sim.server[n] for n in sim.model.info.head})
    assert sim.totals.up_bytes - sent == 3 * head
    checks.assert_close(tree.under(before, "start"), tree.under(sim.server, "start"))  # FedAvg's stay as they were
    kept = sim.store.gather(ids)["layers.0.weight"]
    assert not torch.equal(kept[0], kept[1])
    assert sim.common() is None


def test_a_newcomer_begins_with_the_features_of_the_warm_start() -> None:
    sim = checks.played(LGFedAvg(warm_start=0.5), num_rounds=2)
    down = sim.algorithm.download(sim.server, {}, sim.now)
    kept = sim.algorithm.newcomer(sim.model.initial, down, torch.tensor([6]))
    checks.assert_close(tree.stack(tree.under(sim.server, "start"), 1), kept)
    assert not torch.equal(kept["layers.0.weight"][0], sim.model.initial["layers.0.weight"])
    sim.newcomer_models(sim.model, torch.tensor([0]))  # a session of its own goes through


@pytest.mark.parametrize("options", [{}, {"kind": "cnn"}])
def test_a_warm_start_keeps_the_contract(options: dict[str, str]) -> None:
    short = {"num_rounds": 4, "local_epochs": 1} | options
    checks.assert_a_stack_equals_each_client_alone(LGFedAvg(warm_start=0.5), **short)
    checks.assert_counted_bytes_are_packed_bytes(LGFedAvg(warm_start=0.5), **short)
    checks.assert_nothing_hidden_travels(LGFedAvg(warm_start=0.5), **short)


def test_statistics_that_stay_stay_in_a_warm_start_too() -> None:
    """A batch norm below the head, its running statistics local."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    model = StackedModel(module, worlds.federation().source.x[:2], policy="local")
    sim = worlds.simulation(LGFedAvg(warm_start=0.5), model=model, num_rounds=4)
    plain = worlds.simulation(FedAvg(weights="uniform"), model=model, num_rounds=4)
    for _ in range(2):
        sim.step()
        plain.step()
    statistics = [n for n in model.info.shapes if n in model.info.buffers]
    assert statistics
    checks.assert_close(sim.store.gather(sim.everybody), plain.store.gather(sim.everybody), statistics)
    checks.assert_close(
        plain.deployed_models(plain.model, plain.everybody), sim.deployed_models(sim.model, sim.everybody)
    )
    sim.run()


def test_lg_fedavg_averages_heads_uniformly() -> None:
    sim = worlds.simulation(LGFedAvg(), num_rounds=1, join_ratio=1.0)
    stage, ids = sim.schedule[0], sim.cohort(sim.schedule[0])
    rnd = Round(stage, 0.1)
    down = sim.download(ids, rnd)
    data = sim.federation.examples("train", ids)
    sent = client_round(sim.algorithm, sim.task, data, sim.store.gather(ids), down, rnd).upload
    sim.step()
    torch.testing.assert_close(sim.server["head.weight"], sent["head.weight"].mean(0))  # type: ignore[union-attr]
