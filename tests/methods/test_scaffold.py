"""SCAFFOLD: control variates, and the steps and weights they are made with."""

from __future__ import annotations

import tomllib

import pytest
import torch
from torch import Tensor

from personafl import FedAvg, Scaffold, config
from personafl.core import tree
from tests import checks, worlds


def test_the_first_round_of_scaffold_is_fedavg() -> None:
    checks.assert_close(
        checks.played(FedAvg(weights="uniform"), num_rounds=1).server,
        checks.played(Scaffold(), num_rounds=1).server,
    )
    second = checks.played(FedAvg(weights="uniform"), num_rounds=4, join_ratio=1.0).server["head.weight"]
    assert not torch.allclose(second, checks.played(Scaffold(), num_rounds=4, join_ratio=1.0).server["head.weight"])


def test_control_variates_after_one_step_are_the_clients_gradients() -> None:
    """c_i+ = 0 - 0 + (x - y) / (1 eta) = grad F_i(x); c = (|S| / N) mean of them."""
    sim = worlds.simulation(Scaffold(), local_steps=1, batch_size=64, join_ratio=0.5)
    ids = sim.cohort(sim.schedule[0])
    sim.step()
    kept = sim.store.gather(ids)
    mean: dict[str, Tensor] = {}
    for i, c in enumerate(ids.tolist()):
        rows = sim.federation.examples("train", torch.tensor([c])).rows[0]
        g = checks.gradient(dict(sim.model.initial), sim.federation.source.x[rows], sim.federation.source.y[rows])
        for n, t in g.items():
            torch.testing.assert_close(kept[f"own/{n}"][i], t, rtol=1e-9, atol=1e-9)
            mean[n] = mean.get(n, 0) + t / len(ids)
    for n, t in mean.items():
        torch.testing.assert_close(sim.server[f"control/{n}"], t * len(ids) / 6, rtol=1e-9, atol=1e-9)


def test_examples_weigh_both_means_of_scaffold() -> None:
    """One step with c = c_i = 0: x - eta sum n_i g_i / n_S, and c = sum n_i g_i / 85, the rows of all six clients."""
    sim = worlds.simulation(Scaffold(weights="examples"), local_steps=1, batch_size=64, join_ratio=0.5)
    ids = sim.cohort(sim.schedule[0])
    mean: dict[str, Tensor] = {}
    x, total = dict(sim.model.initial), 0
    for c in ids.tolist():
        data = sim.federation.examples("train", torch.tensor([c]))
        size, total = int(data.count), total + int(data.count)
        g = checks.gradient(x, sim.federation.source.x[data.rows[0]], sim.federation.source.y[data.rows[0]])
        mean = {n: mean.get(n, 0) + size * t for n, t in g.items()}
    assert len(set(sim.federation.sizes("train")[ids].tolist())) == len(ids) == 3
    sim.step()
    for n, t in mean.items():
        torch.testing.assert_close(sim.server[n], x[n] - 0.1 * t / total, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(sim.server[f"control/{n}"], t / 85, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weights", ["uniform", "examples", "cowa"])
def test_the_control_variate_is_always_the_mean_of_the_clients(weights: str) -> None:
    """Of all clients, also where some of them take part: else the corrections would not cancel, and add up."""
    sim = checks.played(Scaffold(weights=weights))
    own, rows = sim.store.gather(sim.everybody), [28.0, 6.0, 16.0, 10.0, 3.0, 22.0]
    count = torch.tensor(rows if weights == "examples" else [1.0] * 6, dtype=torch.float64)
    for n, c in tree.under(sim.server, "control").items():
        mean = (own[f"own/{n}"] * tree.column(count, own[f"own/{n}"])).sum(0) / count.sum()
        torch.testing.assert_close(c, mean, rtol=1e-9, atol=1e-12)  # float64 sums of eight rounds


def test_scaffold_takes_plain_steps_whatever_the_recipe_has() -> None:
    """Option II reads the mean gradient off the distance, which momentum would make longer."""
    plain = checks.played(Scaffold(), num_rounds=4).server
    for recipe in ({"momentum": 0.9}, {"grad_clip": 0.01}, {"optimizer": "adam", "momentum": 0.9}):
        found = checks.played(Scaffold(), num_rounds=4, **recipe).server
        assert all(torch.equal(found[n], plain[n]) for n in plain)
    heavy = checks.played(Scaffold(momentum=0.9), num_rounds=4).server
    assert not torch.allclose(heavy["head.weight"], plain["head.weight"])
    checks.assert_close(checks.played(Scaffold(momentum=None), num_rounds=4, momentum=0.9).server, heavy)
    decayed = checks.played(Scaffold(), num_rounds=4, weight_decay=0.1).server
    assert not torch.allclose(decayed["head.weight"], plain["head.weight"])


def test_scaffold_can_be_told_to_take_the_recipes_momentum() -> None:
    raw = {"training": {"momentum": 0.9}, "algorithms": [{"name": "scaffold"}]}
    told, usual = config.load(raw, ["scaffold.momentum=recipe"]), config.load(raw)
    assert (told.algorithms[0].algorithm, usual.algorithms[0].algorithm) == (Scaffold(momentum=None), Scaffold())
    for recipe in (told, usual):
        assert config.load(tomllib.loads(config.dump(recipe))) == recipe


def test_scaffold_sends_twice_the_model() -> None:
    scaffold, fedavg = checks.played(Scaffold()), checks.played(FedAvg())
    assert scaffold.totals.paper_bytes == pytest.approx(2 * fedavg.totals.paper_bytes)
