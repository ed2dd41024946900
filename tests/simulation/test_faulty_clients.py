"""What faulty clients send, and that nothing of it but its record is left in a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from personafl import ALGORITHMS, Algorithm, Ditto, Evaluation, Faults, FedAvg, Federation, FedPeWS, Simulation
from personafl.core import rng, tree, wire
from personafl.core.local_work import ClientState, LocalWork, own_loss, whole
from personafl.core.types import Batch, Masked, Params, Payload, Round, Stage, Task
from personafl.engine.admission import Update, refusal, schema
from personafl.engine.server_round import ServerRound
from personafl.simulation.faulty_clients import attacking, sent
from tests import checks, worlds

# Whether a client is in a stack or not changes how products of the others are summed;
# tests/simulation/test_ranks.py derives the bound.
TOLERANCE = 1e-12
# Adam divides a gradient by its own size plus eps: at the usual 1e-8 such a change may grow by 1e8.
DAMPED: dict[str, dict[str, float]] = {"co-pfl": {"eps": 0.1}}


def simulated(algorithm: Algorithm, faults: Faults | None = None, **options: object) -> Simulation:
    return worlds.simulation(algorithm, **({"join_ratio": 0.67, "num_rounds": 4, "faults": faults} | options))  # type: ignore[arg-type]


def without(sim: Simulation, absent: Callable[[Stage, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> Simulation:
    """The same, its cohorts less some clients; whoever has to stay alone is not in the cohort at all."""
    cohort = sim.cohort
    monkeypatch.setattr(sim, "cohort", lambda stage: (ids := cohort(stage))[~absent(stage, ids)])
    return sim


def one(client: int) -> Callable[[Stage, Tensor], Tensor]:
    return lambda stage, ids: ids == client


def assert_same_but_for(client: int, sim: Simulation, alone: Simulation) -> None:
    """The server, and all that is kept and known of every other client."""
    checks.assert_agree(sim.server, alone.server, TOLERANCE)
    others = sim.everybody[sim.everybody != client]
    for a, b in ((sim.store, alone.store), (sim.known, alone.known)):
        checks.assert_agree(a.gather(others), b.gather(others), TOLERANCE)


def poisoned(client: int, factor: float) -> Federation:
    """One client whose training examples are that much too large."""
    fed = worlds.federation()
    x = fed.source.x.double()
    x[fed.splits["train"][client]] *= factor
    return dataclasses.replace(fed, source=dataclasses.replace(fed.source, x=x))


# Training that is not finite


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.filterwarnings("ignore:.*leave room", "ignore:.*units for")
def test_a_client_whose_training_is_not_finite_is_left_out_of_every_method(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Examples of 1e200 are to float64 what those of 1e30 are to float32: the product of two is no number."""
    rounds, wild = 8 if name.startswith("dm-pfl") else 4, 0
    method = ALGORITHMS[name](**DAMPED.get(name, {}))
    sim = simulated(method, fed=poisoned(wild, 1e200), num_rounds=rounds)
    alone = without(simulated(method, num_rounds=rounds), one(wild), monkeypatch)
    sim.run()
    alone.run()
    assert all(t.isfinite().all() for t in sim.server.values() if t.is_floating_point())
    assert_same_but_for(wild, sim, alone)
    failed = []
    for row, stage in zip(sim.rows, sim.schedule, strict=True):
        there = wild in sim.cohort(stage).tolist()
        if stage.phase == "personal" and "quarantined" not in row:  # DM-PFL's, where none of its positions is its own
            continue
        failed.append(stage)
        assert [q["client"] for q in row.get("quarantined", [])] == [wild] * there
        assert row.get("diverged", 0) == there
        assert all(q["why"].endswith("is not finite") for q in row.get("quarantined", []))
    assert sim.state.diverged == {wild}
    fresh = sim.algorithm.init_clients(sim.model.initial, torch.tensor([wild]))
    if failed == sim.schedule:
        checks.assert_agree(sim.store.gather(torch.tensor([wild])), fresh, 0)  # what it keeps is what it began with


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedpac", "co-pfl", "scaffold", "fedpews"])
@pytest.mark.filterwarnings("ignore:.*leave room", "ignore:.*units for")
def test_a_stage_played_in_hope_is_played_again_where_that_was_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where numbers are looked at behind a stage: everything is what it is with a look at each."""
    method = ALGORITHMS[name]()
    careful, hopeful = (simulated(method, fed=poisoned(0, 1e200)) for _ in range(2))
    calm = simulated(method)
    careful.run()
    monkeypatch.setattr(Simulation, "_plays_optimistically", lambda self: True)
    played: list[int] = []
    real = Simulation._stage

    def stage(sim: Simulation, now: ServerRound) -> dict[str, object]:
        played.append(sim.played)
        return real(sim, now)

    monkeypatch.setattr(Simulation, "_stage", stage)
    hopeful.run()
    assert len(played) > len(set(played)) == len(hopeful.schedule)  # some twice
    times = ("seconds",)
    for one, other in zip(careful.rows, hopeful.rows, strict=True):
        assert {k: v for k, v in one.items() if k not in times} == {k: v for k, v in other.items() if k not in times}
    everybody = careful.everybody
    for a, b in (
        (careful.server, hopeful.server),
        (careful.store.gather(everybody), hopeful.store.gather(everybody)),
        (careful.known.gather(everybody), hopeful.known.gather(everybody)),
    ):
        checks.assert_agree(a, b, 0)
    assert careful.state.diverged == hopeful.state.diverged == {0}
    played.clear()
    calm.run()
    assert played == list(range(len(calm.schedule)))  # once where all is well


class OddLoss(FedAvg):
    """Client 0's loss is infinite, its gradients and weights are not."""

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        def loss(task: Task, local: ClientState, batch: Batch) -> Tensor:
            assert local.ids is not None
            return own_loss(task, local, batch) + torch.where(local.ids == 0, math.inf, 0.0)

        return [self.usual_turn(whole(self.info.parameters), loss=loss)]


class OddServer(FedAvg):
    """In the third round uploads are so large that the new model is not finite."""

    def upload(self, local: ClientState, rnd: Round) -> Payload:
        sent = super().upload(local, rnd)
        return {n: t * 1e200 for n, t in tree.values(sent).items()} if rnd.number == 2 else sent

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        new = super().aggregate(server, sums, rnd)
        return {n: t * 1e200 for n, t in new.items()} if rnd.number == 2 else new


class Mending(FedAvg):
    """Writes over uploads that are no numbers before anybody has looked at them."""

    def summands(self, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        for t in tree.values(upload).values():
            t.nan_to_num_()
        return super().summands(upload, weights, rnd)


@pytest.mark.parametrize(("method", "wild"), [(OddLoss, False), (OddServer, False), (Mending, True)])
def test_hope_is_given_up_wherever_the_number_was(
    method: type[FedAvg], wild: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    careful, hopeful = (simulated(method(), fed=poisoned(0, 1e200) if wild else None) for _ in range(2))
    careful.run()
    monkeypatch.setattr(Simulation, "_plays_optimistically", lambda self: True)
    hopeful.run()
    for one, other in zip(careful.rows, hopeful.rows, strict=True):
        assert {k: v for k, v in one.items() if k != "seconds"} == {k: v for k, v in other.items() if k != "seconds"}
    checks.assert_agree(careful.server, hopeful.server, 0)
    assert careful.state.diverged == hopeful.state.diverged == (set() if method is OddServer else {0})
    kept = [row.get("kept_model", "") for row in hopeful.rows]
    assert any(kept) == (method is OddServer)


def test_float32_and_1e30_as_well() -> None:
    fed = worlds.federation()
    fed.source.x[fed.splits["train"][2]] *= 1e30
    sim = simulated(FedAvg(), fed=fed, precision="float32", num_rounds=6)
    sim.run()
    assert sim.state.diverged == {2}
    assert all(t.isfinite().all() for t in sim.server.values())


def test_who_is_scored_after_training_that_failed_has_what_it_came_with() -> None:
    scored = Evaluation(when="after_local", shift="none", eval_every=1)
    sim = simulated(Ditto(), fed=poisoned(0, 1e200), join_ratio=1.0, num_rounds=2, evaluation=scored)
    sim.step()
    assert sim.state.trained_cohort is not None
    ids, models = sim.state.trained_cohort
    (row,) = (ids == 0).nonzero().flatten().tolist()
    assert all(torch.equal(models[n][row], t) for n, t in sim.model.initial.items())
    assert "nonfinite_models" not in sim.rows[-1]
    other = 1 - min(row, 1)
    assert not torch.equal(models["head.weight"][other], sim.model.initial["head.weight"])


def test_a_newcomer_whose_session_failed_has_what_it_was_given() -> None:
    fed = dataclasses.replace(poisoned(4, 1e200), num_clients=4, unseen=2)
    sim = simulated(Ditto(), fed=fed, num_rounds=1)
    sim.run()
    models = sim.newcomer_models(sim.model, torch.tensor([5, 4]))
    assert all(torch.equal(models[n][1], sim.server[n]) for n in sim.server)
    assert not torch.equal(models["head.weight"][0], sim.server["head.weight"])


def test_a_new_model_that_is_not_finite_is_not_taken() -> None:
    sim = simulated(OddServer(), num_rounds=4)
    sim.step()
    sim.step()
    before = tree.copied(sim.server)
    sim.step()
    checks.assert_agree(sim.server, before, 0)
    sim.step()
    assert [r.get("kept_model") for r in sim.rows] == [None, None, "the new one was not finite", None]
    assert all(t.isfinite().all() for t in sim.server.values())


# Clients that vanish


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedpac", "scaffold"])
def test_a_dropped_client_is_one_that_was_not_in_the_cohort(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults(drop_rate=0.4)
    sim = simulated(ALGORITHMS[name](), faults)
    alone = without(simulated(ALGORITHMS[name]()), lambda stage, ids: faults.dropped(0, stage.number, ids), monkeypatch)
    dropped = [faults.dropped(0, s.number, sim.cohort(s)) for s in sim.schedule]
    down = sim.download(torch.tensor([0]), Round(sim.schedule[0], 0.1))
    sim.run()
    alone.run()
    assert 0 < sum(int(d.sum()) for d in dropped) < sum(len(d) for d in dropped)
    assert [r.get("dropped", 0) for r in sim.rows] == [int(d.sum()) for d in dropped]
    checks.assert_agree(sim.server, alone.server, 0)
    checks.assert_agree(checks.everyone(sim), checks.everyone(alone), 0)
    # It had received the model, whose size does not change.
    each = wire.size(down.shared) + (wire.size(tree.row_of(down.own, 0)) - wire.size({}) if down.own else 0)
    lost = each * sum(int(d.sum()) for d in dropped)
    assert sim.totals.down_bytes == alone.totals.down_bytes + lost
    assert (sim.totals.up_bytes, sim.totals.flops) == (alone.totals.up_bytes, alone.totals.flops)


# Uploads that are refused

WHY = {
    "nan": "layers.0.weight is not finite",
    "inf": "layers.0.weight is not finite",
    "shape": "layers.0.weight is of shape (1, 12, 6), not (12, 6)",
    "names": "layers.0.weight is missing",
    "stale": "an update of stage {before} in stage {now}",
    "empty": "an empty update",
}


@pytest.mark.parametrize(("fault", "through_wire"), [*((f, False) for f in WHY), ("nan", True), ("shape", True)])
@pytest.mark.parametrize("name", ["fedpac", "ditto"])
def test_a_faulty_client_changes_nothing_but_the_record(
    fault: str, name: str, through_wire: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim = simulated(ALGORITHMS[name](), Faults(faulty_ratio=0.2, fault=fault), through_wire=through_wire)  # type: ignore[arg-type]
    (faulty,) = sim.faulty.nonzero().flatten().tolist()  # 0.2 of 6 is 1
    alone = without(simulated(ALGORITHMS[name]()), one(faulty), monkeypatch)
    sim.run()
    alone.run()
    assert_same_but_for(faulty, sim, alone)
    seen = [(r["round"], q) for r in sim.rows for q in r.get("quarantined", [])]
    assert seen and all(q["client"] == faulty for _, q in seen)
    for t, q in seen:
        assert q["why"] == WHY[fault].format(before=t - 1, now=t)
    assert not any("diverged" in r for r in sim.rows)
    assert sim.totals.up_bytes > alone.totals.up_bytes  # what was sent counts


def test_of_an_update_sent_twice_the_first_is_taken() -> None:
    sim, plain = simulated(Ditto(), Faults(faulty_ratio=0.2, fault="duplicate")), simulated(Ditto())
    sim.run()
    plain.run()
    checks.assert_agree(sim.server, plain.server, 0)
    checks.assert_agree(checks.everyone(sim), checks.everyone(plain), 0)
    again = [q for r in sim.rows for q in r.get("quarantined", [])]
    (faulty,) = sim.faulty.nonzero().flatten().tolist()
    times = sum(faulty in sim.cohort(s).tolist() for s in sim.schedule)
    assert again == [{"client": faulty, "why": "a second update in the same round"}] * times
    each = plain.totals.up_bytes // sum(len(sim.cohort(s)) for s in sim.schedule)  # all uploads are of one size
    assert sim.totals.up_bytes == plain.totals.up_bytes + times * each


def test_a_round_with_nobody_left_keeps_the_model_and_says_so() -> None:
    for faults in (Faults(faulty_ratio=1.0, fault="empty"), Faults(drop_rate=1.0)):
        for method in (FedAvg(), ALGORITHMS["fedpac"]()):
            sim = simulated(method, faults)
            before = tree.copied(sim.server)
            sim.run()
            checks.assert_agree(sim.server, before, 0)
            assert [r["kept_model"] for r in sim.rows] == ["no update was left"] * 4
            assert not sim.store.ids and not sim.known.ids


def test_a_warm_up_whose_last_round_brought_nothing_hands_over_all_the_same() -> None:
    sim = simulated(FedPeWS(warmup_share=0.5), Faults(), num_rounds=4)
    sim.step()
    sim.faults = Faults(drop_rate=1.0)
    sim.step()
    assert sim.rows[-1]["kept_model"] == "no update was left"
    warm = tree.under(sim.server, "warm/x")
    assert not torch.equal(warm["head.weight"], sim.model.initial["head.weight"])
    assert all(torch.equal(sim.server[n], t) for n, t in warm.items())


# Attacks that pass for uploads


def test_an_attack_moves_the_other_way_or_anywhere_as_far_as_it_says() -> None:
    begun = {"w": torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)}
    local = ClientState({"w": torch.tensor([[2.0, 1.0], [3.0, 4.0]], dtype=torch.float64), "own/w": torch.ones(2, 1)})
    second, keys = torch.tensor([False, True]), rng.key(0, "attack", 0, torch.tensor([4, 9]))
    flipped = attacking(Faults(fault="sign-flip", strength=2.0), begun, local, second, keys).params
    assert flipped["w"].tolist() == [[2.0, 1.0], [-6.0, -8.0]]  # 0 - 2 (3, 4)
    assert flipped["own/w"] is local.params["own/w"]
    noisy = attacking(Faults(fault="noise", strength=3.0), begun, local, second, keys).params["w"]
    assert noisy[0].tolist() == [2.0, 1.0]
    assert float(noisy[1].norm()) == pytest.approx(15.0)  # 3 |(3, 4)|
    assert float(noisy[1, 0] / noisy[1, 1]) != pytest.approx(3 / 4)
    alone = {n: t[1:] for n, t in local.params.items()}
    again = attacking(
        Faults(fault="noise", strength=3.0), {"w": begun["w"][1:]}, ClientState(alone), second[1:], keys[1:]
    )
    assert torch.equal(again.params["w"], noisy[1:])
    still = attacking(Faults(fault="noise"), local.params, local, second, keys).params["w"]
    assert torch.equal(still, local.params["w"])  # who did not move has no length to give


def test_noise_stays_where_the_model_moved() -> None:
    """A position outside of the client's mask did not; a tensor with noise there would not fit its mask."""
    begun = {"w": torch.tensor([[1.0, 0.0, 2.0]], dtype=torch.float64)}
    local = ClientState({"w": torch.tensor([[1.5, 0.0, 2.5]], dtype=torch.float64)})
    keys = rng.key(0, "attack", 0, torch.tensor([4]))
    noisy = attacking(Faults(fault="noise"), begun, local, torch.tensor([True]), keys).params["w"]
    assert (noisy != local.params["w"]).tolist() == [[True, False, True]]


@pytest.mark.parametrize("fault", ["sign-flip", "noise"])
@pytest.mark.parametrize("name", ["fedavg", "dm-pfl", "fednova"])
@pytest.mark.filterwarnings("ignore:.*leave room")
def test_an_attack_is_admitted_and_changes_uploads_alone(
    fault: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_by: list[list[Payload]] = []
    for faults in (Faults(), Faults(faulty_ratio=0.5, fault=fault)):  # type: ignore[arg-type]
        sim = simulated(ALGORITHMS[name](), faults, join_ratio=1.0, num_rounds=1)
        seen = worlds.watch_uploads(sim, monkeypatch)
        sim.run()
        sent_by.append([upload for _, upload, _ in seen])
        assert "quarantined" not in sim.rows[-1]
    (honest,), (changed,) = sent_by
    assert schema(honest) == schema(changed)
    which = sim.faulty[sim.cohort(sim.schedule[0])]
    for n, t in tree.values(honest).items():
        same = (tree.flat(t) == tree.flat(tree.values(changed)[n])).all(1)
        assert torch.equal(~same, which) or n.startswith("aux/"), n
        if n in sim.server and isinstance(t, Tensor) and fault == "sign-flip" and name == "fedavg":
            mirrored = 2 * sim.model.initial[n] - t[which]
            torch.testing.assert_close(tree.values(changed)[n][which], mirrored, rtol=0, atol=1e-15)
    for n, m in tree.masks(honest).items():
        assert torch.equal(m, tree.masks(changed)[n])


def test_what_is_sent_is_refused_by_what_was_asked_for() -> None:
    mask = torch.tensor([[[False, True]]])
    honest: Payload = {"aux/n": torch.tensor([3]), "w": Masked(torch.tensor([[[0.0, 2.0]]]), mask)}
    wanted, update = schema(honest), Update(7, 2, tree.row_of(honest, 0), 5)
    for fault in ("nan", "inf", "shape", "names", "stale", "empty"):
        (found,) = sent(fault, update)  # type: ignore[arg-type]
        assert found.client == 7 and refusal(found, wanted, 2, 5), fault
    assert torch.equal(update.payload["w"].values, torch.tensor([[0.0, 2.0]]))  # type: ignore[union-attr]
    (broken,) = sent("nan", update)
    travels = broken.payload["w"]
    assert isinstance(travels, Masked)
    assert travels.values.isnan().tolist() == [[True, False]] and travels.mask.all()  # outside of the mask it would not
    assert sent("duplicate", update) == [update, update]
