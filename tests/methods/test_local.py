"""LocalOnly: clients that train alone."""

from __future__ import annotations

import torch

from personafl import LocalOnly
from tests import worlds


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
