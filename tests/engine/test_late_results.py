"""Results that come after their round: left out, or used in the next one as they are."""

from __future__ import annotations

import json

import pytest
import torch

from personafl import ALGORITHMS, DMPFL, Ditto, Faults, FedAvg, FedSelect
from personafl.core import tree
from personafl.simulation.state import RunState
from tests import checks, worlds

STALE = Faults(straggler_ratio=0.4, late="stale")
TOLERANCE = 1e-12  # tests/simulation/test_ranks.py derives it


def test_late_results_that_are_left_out_are_those_of_clients_that_were_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = Faults(straggler_ratio=0.5)
    sim, alone = (worlds.simulation(Ditto(), num_rounds=4, faults=f) for f in (faults, None))
    cohort = alone.cohort
    monkeypatch.setattr(alone, "cohort", lambda s: (ids := cohort(s))[~faults.straggling(0, s.number, ids)])
    sim.run()
    alone.run()
    checks.assert_agree(sim.server, alone.server, TOLERANCE)
    checks.assert_agree(checks.everyone(sim), checks.everyone(alone), TOLERANCE)
    late = [int(faults.straggling(0, s.number, sim.cohort(s)).sum()) for s in sim.schedule]
    assert sum(late) and [r.get("late", 0) for r in sim.rows] == late
    assert [r["clients"] for r in sim.rows] == [3] * 4  # they trained
    assert sim.totals.up_bytes > alone.totals.up_bytes and sim.totals.flops > alone.totals.flops


def test_a_stale_result_is_in_the_next_mean_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    sim, plain = (worlds.simulation(FedAvg(), num_rounds=4, join_ratio=1.0, faults=f) for f in (STALE, None))
    first = worlds.watch_uploads(plain, monkeypatch)
    plain.step()  # the uploads of the first round, late or not
    ((cohort, upload, _),) = first
    ids, late = cohort.tolist(), STALE.straggling(0, 0, cohort)
    assert 0 < int(late.sum()) < len(ids)
    seen = worlds.watch_uploads(sim, monkeypatch)
    sim.step()
    in_time = [c for c, is_late in zip(ids, late, strict=True) if not is_late]
    assert [c for came, _, _ in seen for c in came.tolist()] == in_time
    assert sim.state.late is not None
    busy = sim.state.late.ids.tolist()
    assert busy == [c for c, is_late in zip(ids, late, strict=True) if is_late]
    seen.clear()
    sim.step()
    assert seen[-1][0].tolist() == busy  # behind those of the round
    sizes = sim.federation.sizes("train").double()
    for n in sim.server:
        total, weight = torch.zeros_like(sim.server[n]), 0.0
        for came, sent, _ in seen:
            for c, w in zip(came.tolist(), tree.values(sent)[n], strict=True):
                total, weight = total + sizes[c] * w, weight + float(sizes[c])
        torch.testing.assert_close(sim.server[n], total / weight, rtol=0, atol=1e-14)
        sent_late = tree.values(upload)[n][late]
        torch.testing.assert_close(tree.values(seen[-1][1])[n], sent_late, rtol=0, atol=TOLERANCE)
    assert sim.rows[1]["stale"] == len(busy)


def test_a_late_client_is_busy_until_its_result_arrives_and_keeps_it_then() -> None:
    sim = worlds.simulation(Ditto(), num_rounds=6, join_ratio=1.0, faults=STALE)
    arrived = 0
    for _ in sim.schedule:
        late = sim.state.late
        if late is not None:
            kept = sim.store.gather(late.ids)
            assert any(not torch.equal(t, late.kept[n]) for n, t in kept.items())
        sim.step()
        if late is not None:
            arrived += 1
            assert sim.rows[-1]["busy"] == sim.rows[-1]["stale"] == len(late.ids)
            assert sim.rows[-1]["clients"] == 6 - len(late.ids)
            now = sim.store.gather(late.ids)
            assert all(torch.equal(t, late.kept[n]) for n, t in now.items())
    assert arrived >= 2


@pytest.mark.filterwarnings("ignore:.*leave room")
def test_a_late_result_of_another_phase_is_left_out_and_recorded() -> None:
    sim = worlds.simulation(DMPFL(), num_rounds=8, join_ratio=1.0, faults=STALE)
    sim.run()
    for row, after in zip(sim.rows, sim.rows[1:], strict=False):
        if row["phase"] != after["phase"] and row.get("late"):
            why = f"a late update of phase {row['phase']} in phase {after['phase']}"
            assert [q["why"] for q in after["quarantined"]] == [why] * row["late"]
            assert "stale" not in after and "busy" not in after
    assert sum("quarantined" in r for r in sim.rows) >= 2


def test_a_late_result_that_this_round_does_not_ask_for_is_left_out() -> None:
    """FedSelect sends masks in the rounds that select, so in the next one they are not asked for."""
    method = FedSelect(select_interval=2)
    sim = worlds.simulation(method, num_rounds=6, join_ratio=1.0, faults=STALE)
    sim.run()
    (row,) = (r for r in sim.rows if r["round"] == 3)
    assert {q["why"] for q in row["quarantined"]} == {"late: 'mask/layers.0.weight' is not asked for"}


@pytest.mark.parametrize("name", ["ditto", "fedpac", "dm-pfl"])
@pytest.mark.filterwarnings("ignore:.*leave room")
def test_a_run_goes_on_from_a_packed_state_as_if_it_had_not_stopped(name: str) -> None:
    whole, parts = (worlds.simulation(ALGORITHMS[name](), num_rounds=8, faults=STALE) for _ in range(2))
    whole.run()
    for _ in parts.schedule:
        parts.step()
        numbers, tensors = parts.state.packed()
        parts.state = RunState.unpacked(json.loads(json.dumps(numbers)), tensors, parts.rows, parts.device)
    checks.assert_agree(parts.server, whole.server, 0)
    checks.assert_agree(checks.everyone(parts), checks.everyone(whole), 0)
    assert any("stale" in r for r in whole.rows)
    assert [r.get("stale") for r in parts.rows] == [r.get("stale") for r in whole.rows]
