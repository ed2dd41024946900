"""Baselines by their limiting cases and by single steps worked out by hand."""

from __future__ import annotations

import dataclasses
import tomllib

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from personafl import (
    APFL,
    FML,
    MOON,
    Algorithm,
    FedAvg,
    FedMMD,
    FedNova,
    FedPer,
    FedProx,
    FedRep,
    Inherit,
    LGFedAvg,
    LocalOnly,
    Scaffold,
    StackedModel,
    config,
)
from personafl.core import batches, tree, wire
from personafl.core.local import client_round
from personafl.core.optim import SGD
from personafl.core.types import Batch, Round
from personafl.slots.mmd import mmd
from tests import checks, worlds

EQUAL = (16, 16, 16, 16)  # rows of clients that all take the same number of steps


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], names: object = None) -> None:
    for n in names or a:  # type: ignore[attr-defined]
        torch.testing.assert_close(a[n], b[n], rtol=1e-11, atol=1e-11)


def played(algorithm: Algorithm, sizes: tuple[int, ...] = worlds.SIZES, **options: object):
    sim = worlds.simulation(algorithm, fed=worlds.federation(sizes=sizes), **options)
    sim.run()
    return sim


def gradient(params: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The gradient of the mean cross-entropy of one client's plain module."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in params.items()}
    loss = functional.cross_entropy(torch.func.functional_call(worlds.module().double(), leaves, (x,)), y)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


# FedProx


def test_without_pull_fedprox_is_fedavg() -> None:
    assert_close(played(FedProx(proximal_weight=0.0)).server, played(FedAvg()).server)


def test_the_pull_of_fedprox_keeps_clients_near() -> None:
    def strayed(weight: float) -> float:
        sim = played(FedProx(proximal_weight=weight), num_rounds=1, local_epochs=6)
        return float(sum((sim.server[n] - sim.model.initial[n]).square().sum() for n in sim.server))

    assert strayed(5.0) < 0.5 * strayed(0.0)


def test_the_second_step_of_fedprox_is_the_papers() -> None:
    """w_2 = w_1 - eta (grad F(w_1) + mu (w_1 - w_0)) on one full batch seen twice."""
    sim = worlds.simulation(FedProx(proximal_weight=0.7), batch_size=64, local_epochs=2, num_rounds=1, join_ratio=0.01)
    client = sim.cohort(sim.schedule[0])
    rows = sim.federation.examples("train", client).rows[0]
    x, y = sim.federation.source.x[rows], sim.federation.source.y[rows]
    w0 = dict(sim.model.initial)
    g0 = gradient(w0, x, y)
    w1 = {n: w0[n] - 0.1 * g0[n] for n in w0}
    g1 = gradient(w1, x, y)
    sim.run()
    assert_close(sim.server, {n: w1[n] - 0.1 * (g1[n] + 0.7 * (w1[n] - w0[n])) for n in w0})


# FedPer and LG-FedAvg


def test_what_fedper_and_lg_fedavg_share_is_each_others_complement() -> None:
    per, lg = worlds.simulation(FedPer()), worlds.simulation(LGFedAvg())
    head = {"head.weight", "head.bias"}
    assert lg.server.keys() == head
    assert per.server.keys() == sim_names(per) - head
    assert set(lg.store.gather(lg.everybody)) == per.server.keys()
    assert set(per.store.gather(per.everybody)) == head


@pytest.mark.parametrize("algorithm", [FedPer(), LGFedAvg(), LGFedAvg(shared_layers=2)])
def test_what_is_private_is_in_no_message(algorithm: Algorithm) -> None:
    sim = worlds.simulation(algorithm)
    rnd, ids = Round(sim.schedule[0], 0.1), sim.cohort(sim.schedule[0])
    down = sim.download(ids, rnd)
    data = sim.federation.examples("train", ids)
    done = client_round(sim.algorithm, sim.task, data, sim.store.gather(ids), down, rnd)
    private = sim.algorithm.private()
    assert private == set(done.kept)
    assert set(done.upload) == set(down.shared) == sim_names(sim) - private
    assert not down.own
    assert any(not torch.equal(done.kept[n][0], sim.model.initial[n]) for n in private)


def sim_names(sim) -> set[str]:
    return set(sim.model.info.shapes)


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
        assert_close(plain.server, whole)
        common = sim.common()
        assert common is not None
        assert_close(tree.stack(plain.server, 1), common)
        assert_close(plain.deployed_models(plain.model, plain.everybody), sim.deployed_models(sim.model, sim.everybody))
    assert (sim.totals.up_bytes, sim.totals.down_bytes) == (plain.totals.up_bytes, plain.totals.down_bytes)
    sim.step()
    assert_close(tree.stack(tree.under(sim.server, "start"), 6), sim.store.gather(sim.everybody))
    assert sim.totals.up_bytes == plain.totals.up_bytes
    before, sent = {n: t.clone() for n, t in sim.server.items()}, sim.totals.up_bytes
    rnd, ids, done = checks.rehearsed(sim)
    assert set(done.upload) == set(sim.download(ids, rnd).shared) == set(sim.model.info.head)
    sim.step()
    head = wire.size({n: sim.server[n] for n in sim.model.info.head})
    assert sim.totals.up_bytes - sent == 3 * head
    assert_close(tree.under(before, "start"), tree.under(sim.server, "start"))  # FedAvg's stay as they were
    kept = sim.store.gather(ids)["layers.0.weight"]
    assert not torch.equal(kept[0], kept[1])
    assert sim.common() is None


def test_a_newcomer_begins_with_the_features_of_the_warm_start() -> None:
    sim = played(LGFedAvg(warm_start=0.5), num_rounds=2)
    down = sim.algorithm.download(sim.server, {}, sim.now)
    kept = sim.algorithm.newcomer(sim.model.initial, down, torch.tensor([6]))
    assert_close(tree.stack(tree.under(sim.server, "start"), 1), kept)
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
    assert_close(sim.store.gather(sim.everybody), plain.store.gather(sim.everybody), statistics)
    assert_close(plain.deployed_models(plain.model, plain.everybody), sim.deployed_models(sim.model, sim.everybody))
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


def test_fedper_moves_body_and_head_at_once_where_fedrep_takes_turns() -> None:
    for cls, count in ((FedPer, 1), (FedRep, 2)):
        sim = worlds.simulation(cls())
        assert len(sim.algorithm.turns(None, Round(sim.schedule[0], 0.1))) == count  # type: ignore[arg-type]


# SCAFFOLD


def test_the_first_round_of_scaffold_is_fedavg() -> None:
    assert_close(
        played(FedAvg(weights="uniform"), num_rounds=1).server,
        played(Scaffold(), num_rounds=1).server,
    )
    second = played(FedAvg(weights="uniform"), num_rounds=4, join_ratio=1.0).server["head.weight"]
    assert not torch.allclose(second, played(Scaffold(), num_rounds=4, join_ratio=1.0).server["head.weight"])


def test_control_variates_after_one_step_are_the_clients_gradients() -> None:
    """c_i+ = 0 - 0 + (x - y) / (1 eta) = grad F_i(x); c = (|S| / N) mean of them."""
    sim = worlds.simulation(Scaffold(), local_steps=1, batch_size=64, join_ratio=0.5)
    ids = sim.cohort(sim.schedule[0])
    sim.step()
    kept = sim.store.gather(ids)
    mean: dict[str, Tensor] = {}
    for i, c in enumerate(ids.tolist()):
        rows = sim.federation.examples("train", torch.tensor([c])).rows[0]
        g = gradient(dict(sim.model.initial), sim.federation.source.x[rows], sim.federation.source.y[rows])
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
        g = gradient(x, sim.federation.source.x[data.rows[0]], sim.federation.source.y[data.rows[0]])
        mean = {n: mean.get(n, 0) + size * t for n, t in g.items()}
    assert len(set(sim.federation.sizes("train")[ids].tolist())) == len(ids) == 3
    sim.step()
    for n, t in mean.items():
        torch.testing.assert_close(sim.server[n], x[n] - 0.1 * t / total, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(sim.server[f"control/{n}"], t / 85, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weights", ["uniform", "examples", "cowa"])
def test_the_control_variate_is_always_the_mean_of_the_clients(weights: str) -> None:
    """Of all clients, also where some of them take part: else the corrections would not cancel, and add up."""
    sim = played(Scaffold(weights=weights))
    own, rows = sim.store.gather(sim.everybody), [28.0, 6.0, 16.0, 10.0, 3.0, 22.0]
    count = torch.tensor(rows if weights == "examples" else [1.0] * 6, dtype=torch.float64)
    for n, c in tree.under(sim.server, "control").items():
        mean = (own[f"own/{n}"] * tree.column(count, own[f"own/{n}"])).sum(0) / count.sum()
        torch.testing.assert_close(c, mean, rtol=1e-9, atol=1e-12)  # float64 sums of eight rounds


def test_scaffold_takes_plain_steps_whatever_the_recipe_has() -> None:
    """Option II reads the mean gradient off the distance, which momentum would make longer."""
    plain = played(Scaffold(), num_rounds=4).server
    for recipe in ({"momentum": 0.9}, {"grad_clip": 0.01}, {"optimizer": "adam", "momentum": 0.9}):
        found = played(Scaffold(), num_rounds=4, **recipe).server
        assert all(torch.equal(found[n], plain[n]) for n in plain)
    heavy = played(Scaffold(momentum=0.9), num_rounds=4).server
    assert not torch.allclose(heavy["head.weight"], plain["head.weight"])
    assert_close(played(Scaffold(momentum=None), num_rounds=4, momentum=0.9).server, heavy)
    decayed = played(Scaffold(), num_rounds=4, weight_decay=0.1).server
    assert not torch.allclose(decayed["head.weight"], plain["head.weight"])


def test_scaffold_can_be_told_to_take_the_recipes_momentum() -> None:
    raw = {"training": {"momentum": 0.9}, "algorithms": [{"name": "scaffold"}]}
    told, usual = config.load(raw, ["scaffold.momentum=recipe"]), config.load(raw)
    assert (told.algorithms[0].algorithm, usual.algorithms[0].algorithm) == (Scaffold(momentum=None), Scaffold())
    for recipe in (told, usual):
        assert config.load(tomllib.loads(config.dump(recipe))) == recipe


def test_scaffold_sends_twice_the_model() -> None:
    scaffold, fedavg = played(Scaffold()), played(FedAvg())
    assert scaffold.totals.paper_bytes == pytest.approx(2 * fedavg.totals.paper_bytes)


# FedNova


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_equal_steps_fednova_is_fedavg(momentum: float) -> None:
    assert_close(played(FedNova(), EQUAL, momentum=momentum).server, played(FedAvg(), EQUAL, momentum=momentum).server)


def test_fednova_weighs_directions_not_distances() -> None:
    """One round by hand: w - (sum p_i tau_i) sum p_i (w - w_i) / tau_i."""
    nova = worlds.simulation(FedNova(), num_rounds=1, join_ratio=1.0)
    stage, ids = nova.schedule[0], nova.cohort(nova.schedule[0])
    rnd, data = Round(stage, 0.1), nova.federation.examples("train", ids)
    plain = FedAvg().bind(nova.algorithm.setup)
    down = nova.download(ids, rnd)
    done = client_round(plain, nova.task, data, {}, down, rnd).local
    p = data.count.double() / data.count.sum()
    tau = done.steps.double()  # type: ignore[union-attr]
    assert len(set(tau.tolist())) > 1
    w = nova.server["head.weight"].clone()
    d = torch.stack([(w - done.params["head.weight"][i]) / tau[i] for i in range(len(ids))])
    nova.step()
    expected = w - (p * tau).sum() * (p.view(-1, 1, 1) * d).sum(0)
    torch.testing.assert_close(nova.server["head.weight"], expected, rtol=1e-10, atol=1e-10)


NOVA_LENGTHS = [
    # rho and eta mu; ||a||_1 after 1, 2, 3 and 4 steps: sums of where one gradient has brought the model, step by step
    (0.0, 0.0, [1, 2, 3, 4]),
    (0.5, 0.0, [1, 1 + 1.5, 1 + 1.5 + 1.75, 1 + 1.5 + 1.75 + 1.875]),  # 1 + rho + ... + rho^k
    (0.0, 0.2, [1, 1 + 0.8, 1 + 0.8 + 0.64, 1 + 0.8 + 0.64 + 0.512]),  # (1 - eta mu)^k
    (0.5, 0.2, [1, 1 + 1.3, 1 + 1.3 + 1.19, 1 + 1.3 + 1.19 + 0.897]),  # velocities .5-.2, .15-.26, -.055-.238
    (0.0, 1.5, [1, 1 + 0.5, 1 + 0.5 + 0.25, 1 + 0.5 + 0.25 + 0.125]),  # (-.5)^k: a norm, not a sum
]


@pytest.mark.parametrize(("rho", "pull", "lengths"), NOVA_LENGTHS)
def test_the_length_of_local_work_by_hand(rho: float, pull: float, lengths: list[float]) -> None:
    sim = worlds.simulation(FedNova(), momentum=rho)
    found = sim.algorithm._length(torch.tensor([4, 1, 3, 2]), pull)  # type: ignore[attr-defined]
    torch.testing.assert_close(found, torch.tensor([lengths[k - 1] for k in (4, 1, 3, 2)], dtype=torch.float64))
    tau = torch.arange(1, 5, dtype=torch.float64)  # the paper's closed forms
    if pull == 0:
        paper = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
        torch.testing.assert_close(paper, torch.tensor(lengths, dtype=torch.float64))
    elif rho == 0 and pull < 1:
        torch.testing.assert_close((1 - (1 - pull) ** tau) / pull, torch.tensor(lengths, dtype=torch.float64))


def test_on_a_constant_gradient_the_length_is_the_distance() -> None:
    """w - w_i = eta a_i g where every step has the same g, by the engine's own optimiser; here all a_k are positive."""
    rho, eta, mu = 0.5, 0.1, 2.0
    rule, w = SGD(rho), {"w": torch.zeros(1, 1, dtype=torch.float64)}
    memory, found = rule.init(w), []
    for _ in range(6):
        rule.step(w, {"w": 1 + mu * w["w"]}, memory, {"w": None}, eta)
        found.append(-w["w"].item() / eta)
    sim = worlds.simulation(FedNova(), momentum=rho)
    lengths = sim.algorithm._length(torch.arange(1, 7), eta * mu)  # type: ignore[attr-defined]
    torch.testing.assert_close(lengths, torch.tensor(found, dtype=torch.float64))


@pytest.mark.parametrize(("rho", "mu", "of_two", "of_four"), [(0.5, 0.0, 2.5, 6.125), (0.0, 2.0, 1.8, 2.952)])
def test_a_round_of_fednova_with_momentum_and_with_a_pull(rho: float, mu: float, of_two: float, of_four: float) -> None:
    """w - tau_eff sum p_i (w - w_i) / a_i; tau_eff sum p_i a_i, with a pull sum p_i tau_i. Eta mu is 0.2."""
    nova = worlds.simulation(FedNova(proximal_weight=mu), num_rounds=1, join_ratio=1.0, momentum=rho)
    ids, rnd = nova.cohort(nova.schedule[0]), Round(nova.schedule[0], 0.1)
    data, down = nova.federation.examples("train", ids), nova.download(ids, rnd)
    done = client_round(FedProx(proximal_weight=mu).bind(nova.algorithm.setup), nova.task, data, {}, down, rnd).local
    tau = [12, 10, 8, 4, 4, 2]  # two epochs of minibatches of five over 28, 22, 16, 10, 6 and 3 rows
    assert done.steps is not None and done.steps.tolist() == tau
    if rho:
        a = [sum(sum(rho**j for j in range(k + 1)) for k in range(t)) for t in tau]
    else:
        a = [sum((1 - 0.1 * mu) ** k for k in range(t)) for t in tau]
    assert (a[5], a[4], a[3]) == pytest.approx((of_two, of_four, of_four))
    sent = client_round(nova.algorithm, nova.task, data, {}, down, rnd).upload
    torch.testing.assert_close(sent["aux/a"], torch.tensor(a, dtype=torch.float64))
    p = [n / int(data.count.sum()) for n in data.count.tolist()]
    tau_eff = sum(q * t for q, t in zip(p, tau if mu else a, strict=True))
    w = nova.server["head.weight"].clone()
    d = [(w - done.params["head.weight"][i]) / a[i] for i in range(6)]
    nova.step()
    expected = w - tau_eff * sum(q * t for q, t in zip(p, d, strict=True))
    torch.testing.assert_close(nova.server["head.weight"], expected, rtol=1e-10, atol=1e-10)


def test_the_server_momentum_of_fednova_by_hand() -> None:
    """u_1 = D_1 / eta_1; w_2 = w_1 - eta_2 (beta u_1 + D_2 / eta_2) = w_1 - D_2 - beta (eta_2 / eta_1) D_1."""
    plain, slow = (worlds.simulation(FedNova(server_momentum=b), num_rounds=2, lr_decay=0.5) for b in (0.0, 0.6))
    w0 = dict(plain.server)
    plain.step()
    slow.step()
    w1 = dict(plain.server)
    assert_close(slow.server, w1, w1)
    down = slow.download(slow.everybody, Round(slow.schedule[1], 0.05))
    assert down.shared.keys() == w0.keys()
    plain.step()
    slow.step()
    assert_close(slow.server, {n: plain.server[n] - 0.6 * 0.5 * (w0[n] - w1[n]) for n in w0}, w0)
    assert slow.totals.down_bytes == plain.totals.down_bytes


def test_fednova_with_a_pull_and_equal_steps_goes_further_than_fedprox() -> None:
    """All a_i equal: w - (tau / a) (w - mean), where FedProx goes to the mean. 12 rows: 2 epochs of 3 minibatches."""
    nova, prox = (played(m(proximal_weight=2.0), EQUAL, num_rounds=1) for m in (FedNova, FedProx))
    a = (1 - 0.8**6) / 0.2
    w = nova.model.initial
    assert_close(nova.server, {n: w[n] - 6 / a * (w[n] - prox.server[n]) for n in w})


# APFL


def test_apfl_with_nothing_private_answers_as_fedavg() -> None:
    apfl, fedavg = played(APFL(alpha=0.0, learn_alpha=False)), played(FedAvg())
    assert_close(apfl.server, fedavg.server)
    ready = apfl.deployed_models(apfl.model, apfl.everybody)
    assert_close(ready, {n: t.expand(6, *t.shape) for n, t in fedavg.server.items()})


def test_apfl_with_all_private_is_local() -> None:
    apfl, local = played(APFL(alpha=1.0, learn_alpha=False)), played(LocalOnly())
    assert_close(apfl.deployed_models(apfl.model, apfl.everybody), local.deployed_models(local.model, local.everybody))


def test_apfl_learns_its_share_from_the_first_minibatch() -> None:
    """alpha - eta <v - w, grad F(vbar)>, v and w as the round begins."""
    sim = worlds.simulation(APFL(alpha=0.4), batch_size=64, join_ratio=1.0, num_rounds=3, local_epochs=1)
    sim.step()
    kept, received = sim.store.gather(sim.everybody), dict(sim.server)
    sim.step()
    after = sim.store.gather(sim.everybody)["aux/alpha"]
    for c in range(6):
        rows = sim.federation.examples("train", torch.tensor([c])).rows[0]
        alpha = float(kept["aux/alpha"][c])
        v = {n: t[c] for n, t in tree.under(kept, "personal").items()}
        mix = {n: alpha * v[n] + (1 - alpha) * received[n] for n in v}
        g = gradient(mix, sim.federation.source.x[rows], sim.federation.source.y[rows])
        slope = sum(float(((v[n] - received[n]) * g[n]).sum()) for n in v)
        assert float(after[c]) == pytest.approx(min(max(alpha - 0.1 * slope, 0.0), 1.0), abs=1e-9)
    assert len(set(after.tolist())) > 1


# FML


def test_without_teaching_fml_is_local_beside_uniform_fedavg() -> None:
    fml, local, fedavg = played(FML(alpha=1.0, beta=1.0)), played(LocalOnly()), played(FedAvg(weights="uniform"))
    assert_close(fml.deployed_models(fml.model, fml.everybody), local.deployed_models(local.model, local.everybody))
    assert_close(fml.server, fedavg.server)


def test_with_teaching_alone_the_private_model_approaches_the_meme() -> None:
    """alpha = 0: the private model sees no label, only the meme's probabilities."""
    sim = played(FML(alpha=0.0, beta=1.0), num_rounds=30, join_ratio=1.0)
    ready = sim.deployed_models(sim.model, sim.everybody)
    x = sim.federation.source.x[:20].expand(6, 20, -1)
    with torch.no_grad():
        private = sim.model(ready, x).softmax(-1)
        meme = sim.model(tree.stack(sim.server, 6), x).softmax(-1)
        start = sim.model(tree.stack(sim.model.initial, 6), x).softmax(-1)
    assert (private - meme).abs().mean() < 0.7 * (start - meme).abs().mean()


# MOON and FedMMD


def test_without_their_terms_moon_and_fedmmd_are_fedavg() -> None:
    plain = played(FedAvg()).server
    assert_close(played(MOON(contrast_weight=0.0)).server, plain)
    assert_close(played(FedMMD(discrepancy_weight=0.0)).server, plain)


def test_moon_is_fedavg_until_a_client_comes_back() -> None:
    assert_close(played(MOON(), num_rounds=1).server, played(FedAvg(), num_rounds=1).server)
    again = played(MOON(), num_rounds=2, join_ratio=1.0).server["head.weight"]
    assert not torch.allclose(again, played(FedAvg(), num_rounds=2, join_ratio=1.0).server["head.weight"])


def test_the_contrast_of_moon_by_hand() -> None:
    """-log(e^{s_g / tau} / (e^{s_g / tau} + e^{s_p / tau})), z what enters the last layer."""
    sim = worlds.simulation(MOON(contrast_weight=2.0, temperature=0.5), join_ratio=1.0, num_rounds=3)
    sim.step()
    ids = sim.cohort(sim.schedule[1])
    rnd = Round(sim.schedule[1], 0.1)
    down = tree.received(sim.download(ids, rnd), len(ids))
    local = sim.algorithm.start(sim.store.gather(ids), down, rnd)
    local = dataclasses.replace(local, params={n: t + 0.1 for n, t in local.params.items()})
    data = sim.federation.examples("train", ids)
    (batch, _), *_ = batches.in_order(data, 5, torch.float64)
    loss = sim.algorithm._contrast(sim.task, local, batch)  # type: ignore[attr-defined]
    c, n = 1, int(batch.count[1])
    x, y = batch.x[c, :n], batch.y[c, :n]
    previous = {k: t[c] for k, t in tree.under(local.fixed, "previous").items()}
    z, z_g, z_p = (hidden(p, x) for p in ({k: t[c] for k, t in local.params.items()}, sim.server, previous))
    near, far = (torch.cosine_similarity(z, o, dim=1) / 0.5 for o in (z_g, z_p))
    contrast = -(near.exp() / (near.exp() + far.exp())).log()
    logits = z @ local.params["head.weight"][c].T + local.params["head.bias"][c]
    expected = functional.cross_entropy(logits, y) + 2.0 * contrast.mean()
    torch.testing.assert_close(loss[c], expected, rtol=1e-10, atol=1e-10)


def hidden(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """What enters the head of the small MLP."""
    for i in range(2):
        x = (x @ params[f"layers.{i}.weight"].T + params[f"layers.{i}.bias"]).relu()
    return x


def test_the_discrepancy_by_a_double_loop_and_without_padding() -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, 4, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    count = torch.tensor([4, 2])
    valid = torch.arange(4) < count.unsqueeze(1)
    batch = Batch(a, a, valid, count, torch.zeros(2))
    for c, n in enumerate(count.tolist()):
        points = [*a[c, :n], *b[c, :n]]
        d = torch.tensor([[float((p - q).square().sum()) for q in points] for p in points], dtype=torch.float64)
        width = d.sum() / (len(points) ** 2 - len(points))
        k = sum(torch.exp(-d / (width * 2**i / 4)) for i in range(5))
        expected = (k[:n, :n] + k[n:, n:] - k[:n, n:] - k[n:, :n]).mean()
        torch.testing.assert_close(mmd(a, b, batch)[c], expected, rtol=1e-10, atol=1e-10)
    assert mmd(a, a, batch).abs().max() < 1e-12


def test_the_projection_of_moon_is_averaged_with_the_model() -> None:
    """The MLP's eight features: two layers of 8 x 8, in the server's state, both payloads and what answers."""
    names = {f"projection/{n}" for n in ("hidden_weight", "hidden_bias", "output_weight", "output_bias")}
    sim = worlds.simulation(MOON(projection=True), join_ratio=1.0)
    first = {n: sim.server[n].clone() for n in names}
    for n, t in first.items():
        assert t.shape == ((8, 8) if n.endswith("weight") else (8,))
        assert 0.1 < t.abs().max() <= 8**-0.5  # as PyTorch's linear layers
    _, ids, done = checks.rehearsed(sim)
    sim.step()
    size = sim.federation.sizes("train")[ids].double()
    sent = tree.values(done.upload)
    for n in names:
        mean = torch.einsum("c,c...->...", size, sent[n]) / size.sum()
        torch.testing.assert_close(sim.server[n], mean, rtol=1e-12, atol=1e-12)
        assert not torch.equal(sim.server[n], first[n])
        torch.testing.assert_close(checks.everyone(sim)[f"previous/{n}"][ids], sent[n])
    x = sim.federation.source.x[:4].double()
    w = sim.server
    h = checks.hidden(w, x)
    z = (h @ w["projection/hidden_weight"].T + w["projection/hidden_bias"]).relu() @ w["projection/output_weight"].T
    expected = (z + w["projection/output_bias"]) @ w["head.weight"].T + w["head.bias"]
    found = sim.algorithm.predict(sim.model, sim.deployed_models(sim.model, sim.everybody), x.expand(6, *x.shape))
    torch.testing.assert_close(found, expected.expand(6, 4, 3))


def test_a_projection_keeps_the_contract() -> None:
    options = {"num_rounds": 3, "local_epochs": 1}
    checks.assert_a_stack_equals_each_client_alone(MOON(projection=True), **options)
    checks.assert_counted_bytes_are_packed_bytes(MOON(projection=True), **options)
    checks.assert_nothing_hidden_travels(MOON(projection=True), **options)


def test_a_projection_costs_five_forward_passes_of_its_two_layers() -> None:
    without, with_it = (
        played(MOON(), num_rounds=1, join_ratio=1.0),
        played(MOON(projection=True), num_rounds=1, join_ratio=1.0),
    )
    seen = 2 * sum((28, 6, 16, 10, 3, 22))  # two epochs of all clients' rows
    assert with_it.totals.flops - without.totals.flops == seen * 5 * 2 * (2 * 64 + 8)


def test_teachers_cost_a_forward_pass_each() -> None:
    base = played(FedAvg()).totals.flops  # three forward passes an example
    assert played(FedMMD()).totals.flops == pytest.approx(base * 4 / 3)
    assert played(MOON()).totals.flops == pytest.approx(base * 5 / 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedProx(proximal_weight=-1.0), "proximal_weight"),
        (lambda: FedNova(proximal_weight=-1.0), "proximal_weight"),
        (lambda: FedNova(server_momentum=1.0), r"server_momentum=1.0: must be in \[0, 1\)"),
        (lambda: LGFedAvg(shared_layers=0), "shared_layers"),
        (lambda: APFL(alpha=2.0), "alpha"),
        (lambda: FML(beta=-0.1), "beta"),
        (lambda: MOON(temperature=0.0), "temperature"),
        (lambda: LGFedAvg(warm_start=1.0), r"warm_start=1.0: must be in \[0, 1\)"),
        (lambda: MOON(projection=True, inherit=Inherit()), "projection=True: not with inherit"),
        (lambda: MOON(projection=True, weights="cowa"), "projection=True: not with inherit or weights by contribution"),
        (lambda: FedMMD(discrepancy_weight=-1.0), "discrepancy_weight"),
        (lambda: FedAvg(weights="many"), "possible are examples, uniform"),
    ],
)
def test_impossible_settings_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
