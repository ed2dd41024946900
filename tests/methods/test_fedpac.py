"""FedPAC: what clients measure, the mixture of heads, the pull to prototypes."""

from __future__ import annotations

import tomllib

import pytest
import torch
from torch import Tensor

from personafl import FedPAC, config
from personafl.core import tree
from personafl.core.types import Round
from personafl.data import batches
from personafl.methods.fedpac import mixture
from tests import checks, worlds

HEAD = ("head.weight", "head.bias")
ALL = {"join_ratio": 1.0, "num_rounds": 4, "local_epochs": 1}


# The mixture


def test_the_mixture_of_two_clients_by_hand() -> None:
    """V = (1, 2), |h_1 - h_2|^2 = 9. For client 1 the form is diag(1, 2 + 9), for client 2 diag(1 + 9, 2)."""
    h = torch.tensor([[0.0, 0.0], [0.0, 3.0]])
    found = mixture(h, torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(found, torch.tensor([[11 / 12, 1 / 12], [2 / 12, 10 / 12]], dtype=torch.float64))


def test_clients_alike_take_the_mean_by_certainty() -> None:
    found = mixture(torch.zeros(3, 4), torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(found, torch.tensor([[6.0, 3.0, 2.0]] * 3, dtype=torch.float64) / 11)


def test_a_client_from_afar_takes_its_own_head_only() -> None:
    """Weights below 0.001 are dropped: 1 / (1 + 1 + 10^4) is."""
    found = mixture(torch.tensor([[0.0], [100.0]]), torch.tensor([1.0, 1.0]))
    assert found.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_on_a_line_a_client_between_two_takes_from_both() -> None:
    """h = -1, 0, 1: for the one in between opposite errors cancel; the form is V I + (h_i - h_j)(h_i - h_l)."""
    found = mixture(torch.tensor([[-1.0], [0.0], [1.0]]), torch.full((3,), 0.3))
    torch.testing.assert_close(found[1], torch.full((3,), 1 / 3, dtype=torch.float64))  # P = 0.3 I + hh'
    assert float(found[0, 2]) < float(found[0, 1]) < float(found[0, 0])


def test_the_next_head_is_the_mixture_of_those_sent() -> None:
    sim = worlds.simulation(FedPAC(), **ALL)
    _, ids, done = checks.rehearsed(sim)
    sent = tree.values(done.upload)
    sim.step()
    mix = mixture(sent["stat/h"].flatten(1), sent["stat/variance"])
    down = sim.download(ids, sim.now)
    for n in HEAD:
        expected = torch.stack([sum(mix[i, j] * sent[n][j] for j in range(6)) for i in range(6)])
        torch.testing.assert_close(down.own[n], expected)
    ready = sim.deployed_models(sim.model, ids)
    torch.testing.assert_close(ready["head.weight"], down.own["head.weight"])
    checks.assert_agree(tree.exclude(ready, HEAD), {n: t.expand(6, *t.shape) for n, t in body(sim.server).items()})


def body(server: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t for n, t in server.items() if n.startswith("layers")}


def test_who_was_not_in_a_round_keeps_the_head_it_has() -> None:
    sim = worlds.simulation(FedPAC(), num_rounds=6, local_epochs=1)
    given = dict.fromkeys(range(6), sim.model.initial["head.weight"])
    for stage in sim.schedule:
        sim.step()
        now = sim.download(sim.everybody, sim.now).own["head.weight"]
        for c in range(6):
            if c in sim.cohort(stage).tolist():
                given[c] = now[c]  # type: ignore[index]
            assert torch.equal(now[c], given[c])  # type: ignore[index]


# What is measured


def test_statistics_by_a_plain_loop() -> None:
    """h_k = p_k mu_k and V = (mean |f|^2 - sum_k |p_k mu_k|^2) / n, of the received model."""
    sim = worlds.simulation(FedPAC(), **ALL)
    sim.step()
    _, ids, done = checks.rehearsed(sim)
    down = sim.download(ids, sim.now)
    sent = tree.values(done.upload)
    for i, c in enumerate(ids.tolist()):
        x, y = checks.rows_of(sim, c)
        z = checks.hidden(body(sim.server) | {n: down.own[n][i] for n in HEAD}, x)  # type: ignore[index]
        h = torch.stack([z[y == k].sum(0) / len(y) for k in range(3)])
        torch.testing.assert_close(sent["stat/h"][i], h)
        variance = (z.square().sum(1).mean() - h.square().sum()) / len(y)
        torch.testing.assert_close(sent["stat/variance"][i], variance)
        after = checks.hidden({n: t[i] for n, t in done.local.params.items()}, x)
        for k in range(3):
            if (y == k).any():
                torch.testing.assert_close(sent["prototype/mean"][i, k], after[y == k].mean(0))
            assert int(sent["prototype/count"][i, k]) == int((y == k).sum())


def test_prototypes_are_means_over_all_examples_of_a_class() -> None:
    sim = worlds.simulation(FedPAC(), **ALL)
    _, _, done = checks.rehearsed(sim)
    sent = tree.values(done.upload)
    sim.step()
    number, mean = sent["prototype/count"], sent["prototype/mean"]
    expected = (number.unsqueeze(2) * mean).sum(0) / number.sum(0).unsqueeze(1)
    torch.testing.assert_close(sim.server["prototype/mean"], expected)
    assert sim.server["prototype/have"].tolist() == [True] * 3


def test_a_class_nobody_had_keeps_its_prototype() -> None:
    algorithm = worlds.simulation(FedPAC(), **ALL).algorithm
    server = algorithm.init_server(worlds.model().initial) | {"prototype/mean": torch.full((3, 8), 7.0)}
    sums = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in server.items() if n.startswith("layers")}
    sums |= {
        "aux/weight": torch.tensor(1.0),
        "prototype/mean": torch.ones(3, 8),
        "prototype/count": torch.tensor([2.0, 0, 1]),
    }
    after = algorithm.aggregate(server, sums, Round(worlds.simulation(FedPAC()).schedule[0], 0.1))
    assert after["prototype/mean"][:, 0].tolist() == [0.5, 7.0, 1.0]
    assert after["prototype/have"].tolist() == [True, False, True]


# Training


def test_head_then_body_and_no_pull_in_the_first_round() -> None:
    sim = worlds.simulation(FedPAC(head_epochs=2.0, head_lr=0.3), **ALL)
    for t, pulled in ((0, False), (1, True)):
        plays = sim.algorithm.turns(None, Round(sim.schedule[t], 0.1))  # type: ignore[arg-type]
        _, head, below, _ = plays
        assert set(head.moves) == set(HEAD)  # type: ignore[union-attr,arg-type]
        assert (head.epochs, head.lr) == (2.0, 0.3)  # type: ignore[union-attr]
        assert set(below.moves) == set(sim.model.info.shapes) - set(HEAD)  # type: ignore[union-attr,arg-type]
        assert (below.loss == sim.algorithm._aligned) == pulled  # type: ignore[union-attr,attr-defined]


def test_the_head_can_be_told_to_take_the_rounds_rate() -> None:
    """0.2 and 0.1 in two rounds, where the authors' 0.1 stays."""
    for head_lr, rates in ((None, (0.2, 0.1)), (0.1, (0.1, 0.1))):
        sim = worlds.simulation(FedPAC(head_lr=head_lr), num_rounds=2, lr=0.2, lr_decay=0.5)
        for stage, rate in zip(sim.schedule, rates, strict=True):
            rnd = Round(stage, sim.algorithm.rate(stage))
            head = sim.algorithm.turns(None, rnd)[1]  # type: ignore[arg-type]
            assert (rnd.lr if head.lr is None else head.lr) == pytest.approx(rate)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"head_lr=0.0: must be greater than 0"):
        FedPAC(head_lr=0.0)


def test_a_recipe_can_tell_the_head_to_take_the_rounds_rate() -> None:
    raw = {"algorithms": [{"name": "fedpac"}]}
    told, usual = config.load(raw, ["fedpac.head_lr=recipe"]), config.load(raw)
    assert (told.algorithms[0].algorithm, usual.algorithms[0].algorithm) == (FedPAC(head_lr=None), FedPAC())
    for recipe in (told, usual):
        assert config.load(tomllib.loads(config.dump(recipe))) == recipe


def test_the_pull_to_prototypes_by_hand() -> None:
    """CE + lambda mean_d (f - c_y)^2; a class without a global prototype has the client's own."""
    sim = worlds.simulation(FedPAC(alignment_weight=0.4), **ALL)
    sim.step()
    sim.server["prototype/have"][2] = False
    rnd, ids = Round(sim.schedule[1], 0.1), sim.cohort(sim.schedule[1])
    local = sim.algorithm.start(sim.store.gather(ids), tree.received(sim.download(ids, rnd), 6), rnd)
    data = sim.federation.examples("train", ids)
    survey = sim.algorithm.turns(local, rnd)[0]
    local = survey.update(  # type: ignore[union-attr, call-arg]
        local,
        batches.sums(data, 64, torch.float64, lambda b: survey.measure(sim.task, local, b)),  # type: ignore[union-attr]
    )
    (batch, _), *_ = batches.in_order(data, 64, torch.float64)
    found = sim.algorithm._aligned(sim.task, local, batch)  # type: ignore[attr-defined]
    for i, c in enumerate(ids.tolist()):
        x, y = checks.rows_of(sim, c)
        params = {n: t[i] for n, t in local.params.items()}
        z = checks.hidden(params, x)
        own = z[y == 2].mean(0) if (y == 2).any() else torch.zeros(8, dtype=torch.float64)
        target = torch.stack([own if k == 2 else sim.server["prototype/mean"][k] for k in y.tolist()])
        expected = checks.cross_entropy(params, x, y) + 0.4 * ((z - target) ** 2).mean(1).mean()
        torch.testing.assert_close(found[i], expected)


def test_chunks_of_a_cohort_do_not_matter() -> None:
    checks.assert_a_stack_equals_each_client_alone(FedPAC(), num_rounds=3, local_epochs=1)
