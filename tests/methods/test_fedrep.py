"""FedRep: what stays, what travels, in which order they train."""

from __future__ import annotations

import pytest
import torch

from personafl import FedRep
from personafl.core.types import Round
from personafl.engine.local import client_round
from tests import worlds

HEAD = {"head.weight", "head.bias"}


def test_the_head_never_leaves_the_client() -> None:
    sim = worlds.simulation(FedRep())
    assert not HEAD & sim.server.keys()
    ids = sim.cohort(sim.schedule[0])
    rnd = Round(sim.schedule[0], 0.1)
    down = sim.download(ids, rnd)
    done = client_round(
        sim.algorithm, sim.task, sim.federation.examples("train", ids), sim.store.gather(ids), down, rnd
    )
    assert done.kept.keys() == HEAD
    assert not HEAD & done.upload.keys()
    assert set(done.upload) | HEAD == set(sim.model.info.shapes)


def test_the_head_trains_before_the_body() -> None:
    """With no body epochs left to move it, the uploaded body is the received one."""
    sim = worlds.simulation(FedRep(head_epochs=2.0, body_epochs=0.001))  # rounds to no step at all
    body = {n: t.clone() for n, t in sim.server.items()}
    sim.step()
    for n, t in body.items():
        torch.testing.assert_close(sim.server[n], t)
    ids = sim.cohort(sim.schedule[0])
    assert not torch.equal(sim.store.gather(ids)["head.weight"][0], sim.model.initial["head.weight"])


def test_the_body_trains_under_the_new_head() -> None:
    """Two turns played by hand: head from the received model, then body under that head."""
    sim = worlds.simulation(FedRep(), local_epochs=1)
    stage = sim.schedule[0]
    ids = sim.cohort(stage)[:1]
    data = sim.federation.examples("train", ids)
    rnd = Round(stage, 0.1)
    down = sim.download(ids, rnd)
    done = client_round(sim.algorithm, sim.task, data, sim.store.gather(ids), down, rnd)
    head_only = FedRep(head_epochs=1.0, body_epochs=0.001).bind(sim.algorithm.setup)
    first = client_round(head_only, sim.task, data, sim.store.gather(ids), down, rnd)
    assert torch.equal(done.kept["head.weight"], first.kept["head.weight"])
    assert not torch.equal(done.local.params["layers.0.weight"], first.local.params["layers.0.weight"])


def test_a_head_only_epoch_costs_a_forward_pass_and_the_head() -> None:
    """DM-PFL's Table 4: E head epochs (about a third of a full epoch each) and E body epochs."""
    sim = worlds.simulation(FedRep(), "cnn")
    stage = sim.schedule[0]
    ids = sim.cohort(stage)
    data = sim.federation.examples("train", ids)
    rnd = Round(stage, 0.1)
    work = client_round(sim.algorithm, sim.task, data, sim.store.gather(ids), sim.download(ids, rnd), rnd).work
    forward = sum(2 * layer.macs + layer.outputs for layer in sim.model.info.layers)
    head = 2 * sim.model.info.layers[-1].macs + sim.model.info.layers[-1].outputs
    per_example = (forward + 2 * head) + (3 * forward - head)  # head turn, then body turn
    assert work.flops.tolist() == pytest.approx([2 * n * per_example for n in data.count.tolist()])


def test_a_final_stage_trains_every_head() -> None:
    sim = worlds.simulation(FedRep(final_head_epochs=1.0), num_rounds=2)
    assert [(s.phase, s.who, s.up) for s in sim.schedule][-1] == ("head", "all", False)
    sim.run()
    kept = sim.store.gather(sim.everybody)["head.weight"]
    assert all(not torch.equal(row, sim.model.initial["head.weight"]) for row in kept)
