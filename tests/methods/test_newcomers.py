"""Clients held out of training, who join when it is over."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from personafl import (
    ALGORITHMS,
    APFL,
    COPFL,
    DMPFL,
    Algorithm,
    Ditto,
    Evaluation,
    FedAvg,
    FedAvgFT,
    FedPer,
    FedPeWS,
    FedPHP,
    FedProx,
    FedRep,
    FedSelect,
    LGFedAvg,
    LocalOnly,
    Scaffold,
    Simulation,
)
from personafl.core import tree
from personafl.core.types import Stage
from personafl.data import Federation
from personafl.engine.sampling import largest_first
from tests import checks, worlds

SHORT = {"num_rounds": 3, "local_epochs": 1, "batch_size": 12}


NEW = torch.tensor([4, 5])  # of six, the last two are held out


HEAD = {"head.weight", "head.bias"}


BUSY: dict[str, dict[str, object]] = {
    "dm-pfl": {"iterations": 1, "readjust_share": 0.3, "readjust_interval": 1},
    "dm-pfl-plus": {"iterations": 1, "readjust_share": 0.3, "readjust_interval": 1},
    "co-pfl": {"lr": 0.01},
}


Finished = tuple[Algorithm, Simulation, dict[str, Tensor]]


def federation(unseen: int, sizes: tuple[int, ...] = worlds.SIZES) -> Federation:
    usual = worlds.federation()
    edges = np.cumsum((0, *sizes))
    parts = [np.arange(a, b) for a, b in pairwise(edges)]
    return Federation.build(usual.source, parts, 0, unseen=unseen)


def simulation(algorithm: Algorithm, **options: Any) -> Simulation:
    return worlds.simulation(algorithm, fed=federation(2), **SHORT | options)


def joined(algorithm: Algorithm, **options: Any) -> tuple[Simulation, dict[str, Tensor]]:
    """A finished run, and what its newcomers predict with."""
    sim = simulation(algorithm, **options)
    sim.run()
    return sim, sim.newcomer_models(sim.model, largest_first(sim.federation, NEW))


@pytest.fixture(scope="module", params=sorted(ALGORITHMS))
def finished(request: pytest.FixtureRequest) -> Finished:
    """A method, its finished run, and what its newcomers predict with."""
    algorithm = ALGORITHMS[request.param](**BUSY.get(request.param, {}))
    return algorithm, *joined(algorithm)


# They take no part


def test_clients_held_out_are_never_sampled_scored_or_asked() -> None:
    sim = simulation(FedAvg(), evaluation=Evaluation(shift="none", eval_every=1))
    drawn = {int(c) for t in range(50) for c in sim.cohort(Stage(t))}
    assert drawn == {0, 1, 2, 3}
    assert sorted(sim.cohort(Stage(0, who="all")).tolist()) == [0, 1, 2, 3]
    sim.run()
    table, _ = sim.clients_table()
    assert [r["client"] for r in table] == [0, 1, 2, 3]
    assert sim.algorithm.setup.num_clients == 4


def test_the_run_is_that_of_a_federation_without_them(finished: Finished) -> None:
    algorithm, with_them, _ = finished  # who have been looked at since
    without = checks.played(algorithm, fed=federation(0, worlds.SIZES[:4]), **SHORT)
    checks.assert_agree(with_them.server, without.server)
    checks.assert_agree(checks.everyone(with_them), checks.everyone(without))
    assert set(with_them.store.ids) <= {0, 1, 2, 3}
    assert with_them.totals == without.totals
    drop = ("seconds",)
    assert [tree.exclude(r, drop) for r in with_them.rows] == [tree.exclude(r, drop) for r in without.rows]


@pytest.mark.parametrize("shift", ["donor", "pool"])
def test_their_test_data_is_nobodys_shift(shift: str) -> None:
    judge = Evaluation(shift=shift, eval_every=100, draws=3)  # type: ignore[arg-type]
    with_them = simulation(FedAvg(), evaluation=judge)
    without = worlds.simulation(FedAvg(), fed=federation(0, worlds.SIZES[:4]), evaluation=judge, **SHORT)
    assert with_them.hashes()["shift"] == without.hashes()["shift"]
    for sim in (with_them, without):
        sim.run()
    assert with_them.clients_table() == without.clients_table()


# They join


def test_newcomers_of_every_method_have_an_accuracy(finished: Finished) -> None:
    algorithm, sim, ready = finished
    found = sim.newcomers()
    assert found is not None
    assert 0 <= found["mean"] <= 1
    assert all(math.isfinite(v) for v in found.values())
    order = largest_first(sim.federation, NEW)
    x = sim.federation.source.x[:3]
    right = []
    for i, c in enumerate(order.tolist()):
        own = {n: t[i : i + 1] for n, t in ready.items()}
        assert sim.algorithm.predict(sim.model, own, x[None]).isfinite().all()
        tx, ty = checks.rows_of(sim, c, "test")
        guess = sim.algorithm.predict(sim.model, own, tx[None])[0].argmax(1)
        right.append(float((guess == ty).double().mean()))
    assert found["mean"] == pytest.approx(sum(right) / 2)
    assert algorithm.newcomers


def test_newcomers_in_a_stack_are_newcomers_alone(finished: Finished) -> None:
    _, sim, together = finished
    for i, c in enumerate(largest_first(sim.federation, NEW).tolist()):
        alone = sim.newcomer_models(sim.model, torch.tensor([c]))
        checks.assert_agree({n: t[i : i + 1] for n, t in together.items()}, alone, 1e-10)


@pytest.mark.parametrize("algorithm_", [FedAvg(), FedProx(), Scaffold(), FedPeWS()], ids=lambda a: type(a).__name__)
def test_a_newcomer_to_one_model_for_all_takes_it_as_it_is(algorithm_: Algorithm) -> None:
    sim, ready = joined(algorithm_)
    common = sim.common()
    assert common is not None
    checks.assert_agree(ready, {n: t.expand(2, *t.shape[1:]) for n, t in common.items()})


@pytest.mark.parametrize("cls", [FedPer, FedRep])
def test_a_newcomer_to_a_shared_body_trains_a_head_on_it(cls: type[Algorithm]) -> None:
    """The initial head under the global body, which stands still: two steps of the head, by hand."""
    sim, ready = joined(cls(), batch_size=64, local_epochs=2)
    body = set(sim.model.info.shapes) - HEAD
    for i, c in enumerate(largest_first(sim.federation, NEW).tolist()):
        expected = {n: sim.server[n] if n in body else sim.model.initial[n] for n in ready}
        for _ in range(2):
            g = checks.gradient(expected, *checks.rows_of(sim, c))
            expected = expected | {n: expected[n] - 0.1 * g[n] for n in HEAD}
        checks.assert_close(expected, {n: t[i] for n, t in ready.items()})


def test_a_newcomer_to_a_shared_head_trains_features_under_it() -> None:
    sim, ready = joined(LGFedAvg())
    for n in sim.model.info.shapes:
        assert torch.equal(ready[n][0], sim.server[n]) if n in HEAD else n not in sim.server
        assert not torch.equal(ready[n][0], sim.model.initial[n])


def test_a_newcomer_to_nobody_trains_the_initial_model() -> None:
    sim, ready = joined(LocalOnly(), batch_size=64)
    c = int(largest_first(sim.federation, NEW)[0])
    g = checks.gradient(dict(sim.model.initial), *checks.rows_of(sim, c))
    checks.assert_close({n: t - 0.1 * g[n] for n, t in sim.model.initial.items()}, {n: t[0] for n, t in ready.items()})


@pytest.mark.parametrize("cls", [FedAvgFT, FedPHP, FedSelect])
def test_a_newcomer_to_a_model_that_is_tuned_tunes_the_global_one(cls: type[Algorithm]) -> None:
    """One step from the server's model; FedPHP's inherited model teaches nothing, for it is the received one."""
    sim, ready = joined(cls(), batch_size=64)
    c = int(largest_first(sim.federation, NEW)[0])
    start = tree.select(sim.server, sim.model.info.shapes)
    g = checks.gradient(start, *checks.rows_of(sim, c))
    share = 0.99 if cls is FedPHP else 1.0  # (1 - lambda) of the loss
    checks.assert_close({n: t - 0.1 * share * g[n] for n, t in start.items()}, {n: t[0] for n, t in ready.items()})


def test_a_newcomer_with_a_personal_model_begins_it_as_the_global_one() -> None:
    """One step of Ditto's personal solver from w: the pull is zero there."""
    sim, ready = joined(Ditto(proximal_weight=3.0), batch_size=64)
    c = int(largest_first(sim.federation, NEW)[0])
    g = checks.gradient(sim.server, *checks.rows_of(sim, c))
    checks.assert_close({n: t - 0.1 * g[n] for n, t in sim.server.items()}, {n: t[0] for n, t in ready.items()})
    apfl, mixed = joined(APFL(alpha=0.0, learn_alpha=False))
    checks.assert_close(apfl.server, {n: t[0] for n, t in mixed.items()})  # nothing private: the global model


def test_a_newcomer_to_dm_pfl_is_given_the_global_mask_and_weights() -> None:
    sim = simulation(DMPFL(**BUSY["dm-pfl"]), num_rounds=4)  # type: ignore[arg-type]
    sim.run()
    down = sim.download(NEW, sim.now)
    kept = sim.algorithm.newcomer(sim.model.initial, down, NEW)
    for n, m_g in tree.under(sim.server, "mask").items():
        assert torch.equal(kept[f"mask/{n}"], m_g.expand(2, *m_g.shape))
        assert torch.equal(kept[f"personal/{n}"], torch.where(m_g, sim.server[n], 0).expand(2, *m_g.shape))


def test_a_newcomer_to_dm_pfl_refines_positions_of_its_own_only() -> None:
    sim, ready = joined(DMPFL(**BUSY["dm-pfl"]), num_rounds=4)  # type: ignore[arg-type]
    own = 0
    for n, m_g in tree.under(sim.server, "mask").items():
        for row in ready[n]:
            theta_g = torch.where(m_g, sim.server[n], 0)
            kept = row[m_g] != 0  # it may have pruned some of the global positions
            assert torch.equal(row[m_g][kept], theta_g[m_g][kept])
            own += int((row[~m_g] != 0).sum())
    assert own > 0
    assert torch.equal(ready["head.bias"][0], sim.server["head.bias"])


def test_a_newcomer_to_co_pfl_keeps_what_moved_most_and_shares_the_rest() -> None:
    """A quarter of the positions that its session moved: the others had no gradient."""
    sim, ready = joined(COPFL(select_share=0.25, lr=0.01, answers="server"))
    _, trained = joined(COPFL(select_share=0.25, lr=0.01))
    names = sim.model.info.parameters
    for c in range(2):
        moved, kept = (sum(int((own[n][c] != sim.server[n]).sum()) for n in names) for own in (trained, ready))
        assert kept == int(0.25 * moved) > 0


def test_a_newcomer_to_co_pfl_answers_with_all_it_trained() -> None:
    sim, ready = joined(COPFL(select_share=0.25, lr=0.01))
    total = sum(t.numel() for t in sim.model.initial.values())
    differs = sum(int((ready[n] != sim.server[n]).sum()) for n in sim.model.info.parameters) / 2
    assert differs > 0.5 * total  # a unit may be idle on all of its examples


def test_newcomers_draw_batches_nobody_drew_in_training() -> None:
    """Their session has a round number of its own, behind the last."""
    sim, first = joined(FedAvgFT())
    again = sim.newcomer_models(sim.model, largest_first(sim.federation, NEW))
    checks.assert_agree(first, again)
    late = simulation(FedAvgFT())
    assert [s.number for s in late.schedule][-1] == 3  # the session is of round 4
