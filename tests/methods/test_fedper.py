"""FedPer, and LG-FedAvg as its complement: what stays, and what travels."""

from __future__ import annotations

import pytest
import torch

from personafl import Algorithm, FedPer, FedRep, LGFedAvg
from personafl.core.types import Round
from personafl.engine.local import client_round
from tests import worlds


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


def test_fedper_moves_body_and_head_at_once_where_fedrep_takes_turns() -> None:
    for cls, count in ((FedPer, 1), (FedRep, 2)):
        sim = worlds.simulation(cls())
        assert len(sim.algorithm.turns(None, Round(sim.schedule[0], 0.1))) == count  # type: ignore[arg-type]
