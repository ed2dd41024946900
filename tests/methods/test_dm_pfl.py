"""DM-PFL's invariants, by numbers derived in sight."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from personafl import DMPFL, Evaluation, FedAvg, FedDST, Simulation, StackedModel, Training
from personafl.core import tree
from personafl.core.local_work import ClientState, GradientPass, Turn
from personafl.core.types import Masked, Round, Setup, Stage
from personafl.engine.dry_run import estimate_cost
from personafl.engine.local import client_round
from personafl.methods.dm_pfl import phases
from personafl.models import MODELS
from personafl.sparse import masks
from tests import checks, worlds

BUSY = DMPFL(readjust_share=0.3, readjust_interval=1)


def masks_of(sim: Simulation, prefix: str = "mask") -> dict[str, Tensor]:
    return tree.under(sim.store.gather(sim.everybody), prefix)


# Schedule


def test_three_hundred_rounds_in_two_iterations() -> None:
    assert phases(300, 2) == [
        ("masks", 0, 75),
        ("global", 75, 112),
        ("personal", 112, 150),
        ("masks", 150, 225),
        ("global", 225, 262),
        ("personal", 262, 300),
    ]


@pytest.mark.parametrize("rounds", range(1, 60))
@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
def test_phases_cover_every_round_once_and_begin_with_masks(rounds: int, iterations: int) -> None:
    plan = phases(rounds, iterations)
    assert [t for _, a, b in plan for t in range(a, b)] == list(range(rounds))
    assert plan[0][0] == "masks"
    if rounds >= 4:
        assert [p for p, _, _ in plan] == ["masks", "global", "personal"] * max(1, min(iterations, rounds // 4))


def test_few_rounds_run_what_fits_masks_first() -> None:
    assert phases(1, 2) == [("masks", 0, 1)]
    assert phases(2, 2) == [("masks", 0, 1), ("global", 1, 2)]
    assert phases(3, 2) == [("masks", 0, 1), ("global", 1, 2), ("personal", 2, 3)]
    assert phases(4, 2) == [("masks", 0, 2), ("global", 2, 3), ("personal", 3, 4)]


def test_too_many_iterations_are_said_to_be_cut() -> None:
    with pytest.warns(UserWarning, match="6 rounds leave room for 1 of DM-PFL's 2 iterations"):
        worlds.simulation(DMPFL(), num_rounds=6)


def test_a_starved_layer_is_pointed_out() -> None:
    """6 x 12 = 72 dense weights of 192 leave the other layers little at S = 0.7, and nothing at 0.9."""
    with pytest.warns(UserWarning, match=r"allocation=feddst_first_dense leaves only .* of layers.1.weight"):
        worlds.simulation(DMPFL(sparsity=0.7))


def test_no_iterations_train_masks_only() -> None:
    assert phases(10, 0) == [("masks", 0, 10)]


def test_each_client_gets_its_expected_share_of_refinement_at_once() -> None:
    """E = 5, join 0.1, 38 rounds of refinement: 19 epochs at the rates of rounds 112 to 149."""
    training = Training(num_rounds=300, join_ratio=0.1, local_epochs=5, lr=0.1, lr_decay=0.99)
    algorithm = DMPFL().bind(Setup(worlds.model().info, training, 100))
    stages = algorithm.schedule()
    assert [s.who for s in stages[112:150]] == ["all"] + ["nobody"] * 37
    turns = algorithm.turns(None, Round(stages[112], training.rate(112)))  # type: ignore[arg-type]
    assert sum(t.epochs for t in turns) == pytest.approx(5 * 0.1 * 38)  # type: ignore[union-attr]
    rates = [t.lr for t in turns]  # type: ignore[union-attr]
    assert rates[0] == pytest.approx(0.1 * 0.99**112)
    assert rates[-1] == pytest.approx(0.1 * 0.99 ** (112 + 18 * 2))  # the 19th epoch begins 36 rounds in
    assert rates == sorted(rates, reverse=True)  # type: ignore[type-var]


def test_the_expected_share_is_that_of_the_cohort() -> None:
    """0.45 of six clients are a cohort of two: a third of the two rounds of refinement, of two epochs each."""
    training = Training(num_rounds=8, join_ratio=0.45, local_epochs=2, lr=0.1)
    algorithm = DMPFL(iterations=1).bind(Setup(worlds.model().info, training, 6))
    assert phases(8, 1)[-1] == ("personal", 6, 8)
    turns = algorithm.turns(None, Round(algorithm.schedule()[6], 0.1))  # type: ignore[arg-type]
    assert [t.epochs for t in turns] == pytest.approx([1.0, 1 / 3])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("steps", "lengths"), [(1, [1]), (4, [3, 1]), (5, [4, 1]), (6, [4, 2]), (9, [7, 2]), (11, [8, 3])]
)
@pytest.mark.parametrize("method", [DMPFL, FedDST])
def test_the_last_fifth_of_local_steps_is_rounded_up(
    method: type[DMPFL] | type[FedDST], steps: int, lengths: list[int]
) -> None:
    """ceil(K / 5) steps come after the masks are readjusted, the others before."""
    algorithm = method(readjust_interval=1)
    training = worlds.training(local_steps=steps)
    bound = algorithm.bind(Setup(worlds.model().info, training, 6))
    turns = bound.masked_turns(Round(Stage(0, phase="masks"), 0.1))
    assert [t.steps for t in turns if isinstance(t, Turn)] == lengths
    assert isinstance(turns[-2], GradientPass)


# Masks


def test_initial_masks_are_the_largest_weights_and_common_to_all() -> None:
    sim = worlds.simulation(DMPFL())
    budget = sim.algorithm.budget()  # type: ignore[attr-defined]
    assert budget["layers.0.weight"] == 72  # the first layer, 6 x 12, stays dense
    for n, k in budget.items():
        m_g, w = sim.server[f"mask/{n}"], sim.model.initial[n].abs()
        assert int(m_g.sum()) == k
        assert k == m_g.numel() or w[m_g].min() >= w[~m_g].max()
        assert torch.equal(masks_of(sim)[n], m_g.expand(6, *m_g.shape))


def test_readjusting_keeps_every_layers_number_and_changes_masks() -> None:
    sim = worlds.simulation(BUSY)
    before = masks_of(sim)
    sim.step()
    after = masks_of(sim)
    chosen = sim.cohort(sim.schedule[0])
    for n in before:
        assert torch.equal(masks.active(before[n]), masks.active(after[n]))
    assert any(not torch.equal(before[n][c], after[n][c]) for n in before for c in chosen.tolist())


def test_masks_stand_still_in_both_refinements() -> None:
    sim = worlds.simulation(BUSY)
    seen = set()
    while sim.played < len(sim.schedule):
        phase = sim.schedule[sim.played].phase
        before = (masks_of(sim), tree.under(sim.server, "mask"))
        sim.step()
        after = (masks_of(sim), tree.under(sim.server, "mask"))
        if phase != "masks":
            seen.add(phase)
            for old, new in zip(before, after, strict=True):
                assert all(torch.equal(old[n], new[n]) for n in old)
    assert seen == {"global", "personal"}


def test_readjusting_after_training_uploads_new_positions_as_zeros() -> None:
    def new_values(when: str) -> Tensor:
        sim = worlds.simulation(dataclasses.replace(BUSY, readjust_when=when))
        rnd, ids = Round(sim.schedule[0], 0.1), sim.cohort(sim.schedule[0])
        down = sim.download(ids, rnd)
        kept = sim.store.gather(ids)
        sent = client_round(sim.algorithm, sim.task, sim.federation.examples("train", ids), kept, down, rnd).upload
        grown = [t.values[t.mask & ~kept[f"mask/{n}"]] for n, t in sent.items() if isinstance(t, Masked)]
        return torch.cat(grown)

    late, early = new_values("after_training"), new_values("before_last_epoch")
    assert len(late) > 0
    assert torch.equal(late, torch.zeros_like(late))
    assert (early != 0).float().mean() > 0.9  # trained for one more epoch


# Refinement


def test_refining_globally_leaves_clients_alone_and_moves_only_the_mask() -> None:
    sim = worlds.simulation(BUSY)
    while sim.schedule[sim.played].phase != "global":
        sim.step()
    kept, server = sim.store.gather(sim.everybody), dict(sim.server)
    sim.step()
    assert all(torch.equal(t, kept[n]) for n, t in sim.store.gather(sim.everybody).items())
    for n, m in tree.under(server, "mask").items():
        assert torch.equal(sim.server[n][~m], server[n][~m])
        assert not torch.equal(sim.server[n][m], server[n][m])


def test_while_the_global_model_is_refined_a_client_answers_as_before() -> None:
    """Right after local training of this phase, too: theta_c is made of w_g as the client received it."""
    late = Evaluation(shift="none", eval_every=1, when="after_local", clients="selected")
    sim = worlds.simulation(BUSY, evaluation=late)
    while sim.schedule[sim.played].phase != "global":
        sim.step()
    ids = sim.cohort(sim.schedule[sim.played])
    came = sim.deployed_models(sim.model, ids)
    _, _, trained = checks.rehearsed(sim)
    row = sim.step()
    judged, models = sim.state.trained_cohort  # type: ignore[misc]
    assert judged.tolist() == ids.tolist()
    checks.assert_agree(models, came)
    assert row["personal"] == row["before"]
    n = "layers.1.weight"
    assert not torch.allclose(trained.local.params[n], came[n])


def test_a_later_masks_phase_begins_with_what_clients_have_at_personal_positions() -> None:
    """Who was not sampled for the refinement in between answers with zeros there, and trains on from what it had."""
    sim = worlds.simulation(dataclasses.replace(BUSY, personal_share="sampled"), num_rounds=8, join_ratio=0.34)
    while sim.schedule[sim.played].number < 4:
        sim.step()
    stage = sim.schedule[sim.played]
    refined = checks.everyone(sim)["aux/refined"]
    ids = (refined == 0).nonzero().flatten()
    assert stage.phase == "masks" and 0 < len(ids) < 6
    kept, rnd = sim.store.gather(ids), Round(stage, 0.1)
    local = sim.algorithm.start(kept, tree.received(sim.download(ids, rnd), len(ids)), rnd)
    had = []
    for n, own in sim.algorithm._own_positions(local).items():  # type: ignore[attr-defined]
        assert torch.equal(local.params[n][own], kept[f"personal/{n}"][own])
        had.append(kept[f"personal/{n}"][own])
    assert torch.cat(had).any()


@pytest.mark.parametrize("share", ["once", "sampled"])
def test_refining_personally_holds_shared_positions_and_biases(share: str) -> None:
    sim = worlds.simulation(dataclasses.replace(BUSY, personal_share=share), num_rounds=16)
    while sim.schedule[sim.played].phase != "personal":
        sim.step()
    server = dict(sim.server)
    ids = sim.cohort(sim.schedule[sim.played])
    sim.step()
    assert all(torch.equal(sim.server[n], t) for n, t in server.items())
    kept = sim.store.gather(ids)
    ready = sim.deployed_models(sim.model, ids)
    moved = 0
    for n, m_g in tree.under(server, "mask").items():
        m_c, w_c = kept[f"mask/{n}"], kept[f"personal/{n}"]
        shared, own = m_c & m_g, m_c & ~m_g
        assert torch.equal(w_c[shared], server[n].expand_as(w_c)[shared])  # bitwise
        moved += int((w_c[own] != 0).sum())  # the refinement began at zero there
        # Eq. 4 rebuilds what is evaluated.
        theta = torch.where(shared, server[n], 0) + torch.where(own, w_c, 0)
        assert torch.equal(ready[n], theta)
    assert moved > 0
    assert torch.equal(ready["head.bias"], server["head.bias"].expand_as(ready["head.bias"]))


def test_without_reset_refinement_begins_from_the_masks_phase() -> None:
    def start(reset: bool) -> Tensor:
        sim = worlds.simulation(dataclasses.replace(BUSY, reset_personal=reset))
        while sim.schedule[sim.played].phase != "personal":
            sim.step()
        stage, ids = sim.schedule[sim.played], sim.everybody
        rnd = Round(stage, 0.1)
        down = tree.received(sim.download(ids, rnd), len(ids))
        local = sim.algorithm.start(sim.store.gather(ids), down, rnd)
        return torch.cat([local.params[n][m] for n, m in sim.algorithm._own_positions(local).items()])  # type: ignore[attr-defined]

    assert torch.equal(start(True), torch.zeros_like(start(True)))
    assert (start(False) != 0).float().mean() > 0.5


def test_a_client_never_refined_answers_with_personal_positions_at_zero() -> None:
    """With `sampled` refinement some clients have no turn: they take the reset theta_c (methods' reading)."""
    sim = worlds.simulation(dataclasses.replace(BUSY, personal_share="sampled"), num_rounds=8, join_ratio=0.34)
    sim.run()
    refined = sim.store.gather(sim.everybody)["aux/refined"]
    left_out = (refined < 2).nonzero().flatten()
    assert 0 < len(left_out) < 6
    ready, kept = sim.deployed_models(sim.model, left_out), sim.store.gather(left_out)
    for n, m_g in tree.under(sim.server, "mask").items():
        own = kept[f"mask/{n}"] & ~m_g
        assert torch.equal(ready[n][own], torch.zeros_like(ready[n][own]))


# Aggregation

MASKS_ROUND = Round(Stage(0, phase="masks"), 0.1)


def elected(upload: Masked, n: list[float], **settings: object) -> tuple[Tensor, Tensor]:
    """w_g and m_g of a single 1 x 4 layer of which two positions may stay, from the clients' uploads."""
    model = StackedModel(torch.nn.Linear(4, 1, bias=False), torch.zeros(2, 4))
    algorithm = DMPFL(sparsity=0.5, allocation="feddst", **settings).bind(  # type: ignore[arg-type]
        Setup(model.info, worlds.training(), len(n))
    )
    server = {
        "weight": torch.tensor([[0.5, 10.0, 20.0, 30.0]]),
        "mask/weight": torch.tensor([[True, False, False, True]]),
    }
    terms = algorithm.summands({"weight": upload}, torch.tensor(n, dtype=torch.float64), MASKS_ROUND)
    after = algorithm.aggregate(server, {k: t.sum(0, dtype=torch.float64) for k, t in terms.items()}, MASKS_ROUND)
    return after["weight"][0], after["mask/weight"][0]


def test_equation_five_averages_over_those_who_hold_a_position() -> None:
    held = torch.tensor([[[True, True, False, False]], [[True, False, True, False]]])
    values = torch.tensor([[[1.0, 2.0, 0.0, 0.0]], [[5.0, 0.0, 3.0, 0.0]]])
    w_g, m_g = elected(Masked(values, held), [1.0, 3.0])
    # position 0: (1 * 1 + 3 * 5) / 4 = 4; 1 and 2: one holder each; 3: nobody, keeps 30
    assert w_g.tolist() == [4.0, 2.0, 3.0, 30.0]
    # Votes 2/2, 1/2, 1/2, 0/2; position 3 was global and nobody spoke on it, so it may stay: 30 and 4 are largest.
    assert m_g.tolist() == [True, False, False, True]


def test_the_literal_reading_drops_positions_without_votes() -> None:
    held = torch.tensor([[[True, True, False, False]], [[True, False, True, False]]])
    values = torch.tensor([[[1.0, 2.0, 0.0, 0.0]], [[5.0, 0.0, 3.0, 0.0]]])
    _, m_g = elected(Masked(values, held), [1.0, 3.0], uncovered="drop")
    assert m_g.tolist() == [True, False, True, False]  # 4 and 3


def test_disjoint_masks_return_each_clients_weights() -> None:
    held = torch.tensor([[[True, True, False, False]], [[False, False, True, True]]])
    values = torch.tensor([[[1.0, 2.0, 0.0, 0.0]], [[0.0, 0.0, 3.0, 4.0]]])
    w_g, _ = elected(Masked(values, held), [5.0, 7.0])
    assert w_g.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_three_of_ten_votes_are_not_more_than_thirty_per_cent() -> None:
    held = torch.zeros(10, 1, 4, dtype=torch.bool)
    held[:3, 0, 0] = True
    held[:4, 0, 1] = True
    values = torch.where(held, torch.tensor([9.0, 1.0, 0.0, 0.0]), 0.0)
    _, m_g = elected(Masked(values, held), [1.0] * 10, uncovered="drop")
    assert m_g.tolist() == [False, True, False, False]  # sparser than its budget of two, and not refilled
    _, m_g = elected(Masked(values, held), [1.0] * 10, uncovered="drop", refill=True)
    assert m_g.tolist() == [False, True, False, True]  # the largest of the rest is 30 at position 3


def test_votes_can_count_examples_instead_of_clients() -> None:
    held = torch.zeros(4, 1, 4, dtype=torch.bool)
    held[0, 0, 0] = True  # one of four clients, but 70 of 100 examples
    held[1:3, 0, 1] = True  # two of four clients, 20 of 100 examples
    values = torch.where(held, torch.ones(4), 0.0)
    sizes = [70.0, 10.0, 10.0, 10.0]
    _, counted = elected(Masked(values, held), sizes, uncovered="drop")
    _, weighted = elected(Masked(values, held), sizes, uncovered="drop", votes="weighted")
    assert counted.tolist() == [False, True, False, False]
    assert weighted.tolist() == [True, False, False, False]


def test_full_masks_make_the_first_phase_fedavg() -> None:
    dense = worlds.simulation(DMPFL(sparsity=0.0, iterations=0))
    fedavg = worlds.simulation(FedAvg())
    dense.run()
    fedavg.run()
    for n, t in fedavg.server.items():
        torch.testing.assert_close(dense.server[n], t, rtol=1e-12, atol=1e-12)


# Traffic and cost


def test_an_upload_under_the_mask_just_received_carries_values_only() -> None:
    sim = worlds.simulation(BUSY)
    known = {}
    while sim.played < len(sim.schedule):
        stage = sim.schedule[sim.played]
        rnd, ids = Round(stage, 0.1), sim.cohort(stage)
        if stage.up:
            down = sim.download(ids, rnd)
            data = sim.federation.examples("train", ids)
            sent = client_round(sim.algorithm, sim.task, data, sim.store.gather(ids), down, rnd).upload
            known[stage.phase] = {t.known for t in sent.values() if isinstance(t, Masked)}
        sim.step()
    assert known == {"masks": {False}, "global": {True}}


@pytest.mark.slow
def test_costs_of_table_four_by_accounting_alone() -> None:
    """DM-PFL's Table 4 at S = 0.5: 40.3 % of FedAvg's traffic (+- 1 point), 63.9 % of its FLOP (+- 2 points)."""
    model = StackedModel(MODELS["cifar-cnn"].build((3, 32, 32), 10), torch.zeros(2, 3, 32, 32))
    training = Training(num_rounds=300, join_ratio=0.1, local_epochs=5, batch_size=64)
    fedavg = estimate_cost(FedAvg(), model, training, num_clients=100, examples=450)
    dmpfl = estimate_cost(DMPFL(), model, training, num_clients=100, examples=450)
    assert fedavg.paper_mib == pytest.approx(30 * 797_962 * 4 / 2**20)  # 91.3; the paper prints 90.75
    assert fedavg.flops == pytest.approx(30 * 5 * 450 * 3 * 2.94437e7, rel=1e-5)
    assert dmpfl.paper_mib / fedavg.paper_mib == pytest.approx(0.403, abs=0.01)
    assert dmpfl.flops / fedavg.flops == pytest.approx(0.639, abs=0.02)
    assert dmpfl.dense_flops / fedavg.flops == pytest.approx(1.0, abs=0.01)
    # Real bytes, headers and masks both ways, tell the same story.
    assert (dmpfl.up_bytes + dmpfl.down_bytes) / (fedavg.up_bytes + fedavg.down_bytes) == pytest.approx(
        0.411, abs=0.005
    )


def test_a_rehearsal_costs_what_the_run_costs() -> None:
    """Equal clients, all of them in every round: the expectation is exact."""
    fed = worlds.federation(sizes=(16,) * 4)
    for algorithm in (FedAvg(), DMPFL()):
        sim = worlds.simulation(algorithm, fed=fed, join_ratio=1.0)
        sim.run()
        told = estimate_cost(algorithm, worlds.model(), worlds.training(join_ratio=1.0), num_clients=4, examples=12)
        assert told.flops == pytest.approx(sim.totals.flops / 4)
        assert told.paper_mib * 2**20 == pytest.approx(sim.totals.paper_bytes / 4)
        assert told.up_bytes == pytest.approx(sim.totals.up_bytes / 4)
        assert told.down_bytes == pytest.approx(sim.totals.down_bytes / 4)


# Regrowth


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("inactive", [1, 1, 0, 1, 1, 0]),  # 3 comes straight back, before 4 has its place
        ("elsewhere", [1, 1, 0, 0, 1, 1]),  # only 4 and 5 were inactive before
        ("all", [1, 1, 0, 0, 0, 0]),  # the two largest gradients are those of 0 and 1, which are active: lost
    ],
)
def test_the_scope_of_regrowth_by_hand(scope: str, expected: list[int]) -> None:
    """Half of four active weights go, the smallest: 2 and 3. Two grow by the gradient."""
    sim = worlds.simulation(DMPFL(regrow_scope=scope))
    local = ClientState(
        {"w": torch.tensor([[4.0, -3.0, 2.0, 1.0, 0.0, 0.0]])},
        {"mask/w": torch.tensor([[True, True, True, True, False, False]])},
    )
    grads = {"w": torch.tensor([[9.0, 8.0, 1.0, -2.0, 3.0, 0.5]])}
    new = sim.algorithm.readjustment(0.5).update(local, grads)  # type: ignore[attr-defined]
    assert new.fixed["mask/w"][0].int().tolist() == expected
    assert new.params["w"][0].tolist() == [
        v * m for v, m in zip([4.0, -3.0, 2.0, 1.0, 0.0, 0.0], expected, strict=True)
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 1.0}, r"sparsity=1.0: must be in \[0, 1\)"),
        ({"sparsity": -0.1}, r"sparsity=-0.1: must be in \[0, 1\)"),
        ({"readjust_interval": 0}, "readjust_interval=0: must be at least 1"),
        ({"votes": "many"}, "votes='many': possible are counted, weighted"),
        ({"allocation": "flat"}, "allocation='flat': possible are feddst_first_dense"),
        ({"iterations": -1}, "iterations=-1: must not be negative"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DMPFL(**settings)  # type: ignore[arg-type]
