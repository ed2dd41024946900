"""CO-PFL: personal masks that grow, moments for each side, a mean over those who share."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from personafl import COPFL, Evaluation, FedAvg, Federation, Simulation, Source, StackedModel
from personafl.core import tree
from personafl.core.local_work import ClientState
from personafl.core.types import Masked, Round, Setup, Stage
from personafl.engine.dry_run import estimate_cost
from personafl.engine.local import run_local_work
from personafl.sparse import masks
from tests import checks, worlds
from tests.references.world import world

SLOW = {"lr": 0.02, "join_ratio": 1.0}  # a step of Adam is as long as its rate
PLAIN = COPFL(select_share=0.0, weights="uniform")


def sides(sim: Simulation) -> dict[str, Tensor]:
    """Every client's personal positions, 1 = personal."""
    return tree.under(checks.everyone(sim), "mask")


def count(sim: Simulation) -> Tensor:
    return sum(masks.active(m) for m in sides(sim).values())  # type: ignore[return-value]


def reached(sim: Simulation) -> dict[str, Tensor]:
    """Where every client has had a gradient."""
    return tree.under(checks.everyone(sim), "reached")


def size(sim: Simulation) -> int:
    return sum(t.numel() for t in sim.model.initial.values())


class Padded(nn.Module):
    """A 3x3 convolution over images of one pixel: of its 18 weights the 16 at the border only see padding.

    With two biases and a head of 6 weights and 3 biases, 13 of its 29 positions can have a gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.conv(x).flatten(1))
        return out


MOVABLE = 13


def padded_world() -> dict[str, Any]:
    """Six ragged clients with images of one pixel, and the model for them."""
    draw = torch.Generator().manual_seed(0)
    rows = sum(worlds.SIZES)
    y = torch.randint(3, (rows,), generator=draw)
    x = torch.randn(rows, 1, 1, 1, generator=draw) + y.view(-1, 1, 1, 1)
    parts = np.split(np.arange(rows), np.cumsum(worlds.SIZES)[:-1])
    fed = Federation.build(Source("pixels", x, y, 3), parts, 0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return {"fed": fed, "model": StackedModel(Padded(), x[:2])}


def normed_world() -> dict[str, Any]:
    """Five ragged clients, and an MLP with a batch norm in it."""
    module, federation = world("norm", (16, 15, 10, 9, 4))
    return {"fed": federation, "model": StackedModel(module, federation.source.x[:2])}


# Limits


def test_with_nothing_personal_and_equal_weights_the_first_round_is_fedavg_under_adam() -> None:
    a = checks.played(PLAIN, num_rounds=1, lr=0.02)
    b = checks.played(FedAvg(weights="uniform"), num_rounds=1, lr=0.02, optimizer="adam")
    checks.assert_close(b.server, a.server)


def test_with_nothing_personal_and_equal_weights_it_is_fedavg_under_adam_that_remembers() -> None:
    """By hand: one torch.optim.Adam per client for the whole run, the server's mean copied in every round."""
    sim = worlds.simulation(PLAIN, lr=0.02, num_rounds=4, batch_size=64)
    modules = [worlds.module().double() for _ in range(6)]
    rules = [torch.optim.Adam(m.parameters(), lr=0.02) for m in modules]
    server = {n: t.clone() for n, t in sim.model.initial.items()}
    for stage in sim.schedule:
        ids = sim.cohort(stage).tolist()
        for c in ids:
            modules[c].load_state_dict(server)
            x, y = checks.rows_of(sim, c)
            for _ in range(2):
                rules[c].zero_grad()
                torch.nn.functional.cross_entropy(modules[c](x), y).backward()
                rules[c].step()
        server = {n: sum(modules[c].state_dict()[n] for c in ids) / len(ids) for n in server}
        sim.step()
        checks.assert_close(server, sim.server, tolerance=1e-9)


def test_without_moments_too_it_is_fedavg() -> None:
    a, b = checks.played(dataclasses.replace(PLAIN, moments=False)), checks.played(FedAvg(weights="uniform"))
    checks.assert_close(b.server, a.server)


# Masks


def test_masks_only_grow_and_never_pass_their_bound() -> None:
    """p = 0.2, gamma = 0.5 and r positions with a gradient: 0.2 r, 0.4 r, then 0.5 r positions for good.

    r grows from round to round, as units that were idle fire.
    """
    sim = worlds.simulation(COPFL(select_share=0.2, personal_bound=0.5), **SLOW)
    before = sides(sim)
    wanted = torch.zeros(6, dtype=torch.int64)
    for _ in range(4):
        sim.step()
        after = sides(sim)
        assert all(bool((after[n] | ~before[n]).all()) for n in before)  # what was personal is
        r = sum(masks.active(m) for m in reached(sim).values())
        wanted = torch.minimum(wanted + (0.2 * r.double()).long(), (0.5 * r.double()).long())
        assert count(sim).tolist() == wanted.tolist()
        before = after
    assert 0 < int(wanted.min()) < int(wanted.max()) <= 0.5 * size(sim)


def test_a_client_that_is_not_sampled_keeps_its_mask() -> None:
    sim = worlds.simulation(COPFL(select_share=0.2), lr=0.02, num_rounds=1)
    chosen = set(sim.cohort(sim.schedule[0]).tolist())
    sim.run()
    assert [int(n) > 0 for n in count(sim)] == [c in chosen for c in range(6)]


def test_the_positions_that_moved_most_turn_personal() -> None:
    sim = worlds.simulation(COPFL(select_share=0.2), **SLOW)
    _, ids, done = checks.rehearsed(sim)
    moved = torch.cat([tree.flat((done.local.params[n] - t).abs()) for n, t in sim.model.initial.items()], 1)
    chosen = torch.cat([tree.flat(done.kept[f"mask/{n}"]) for n in sim.model.initial], 1)
    for i in range(len(ids)):
        had = sum(int(done.kept[f"reached/{n}"][i].sum()) for n in sim.model.initial)
        assert int(chosen[i].sum()) == int(0.2 * had)
        assert moved[i][chosen[i]].min() >= moved[i][~chosen[i]].max()


def test_selection_per_tensor_bounds_every_tensor() -> None:
    sim = worlds.simulation(COPFL(select_share=0.3, personal_bound=0.4, selection="tensor"), **SLOW)
    before = {n: masks.active(m) for n, m in sides(sim).items()}
    for _ in range(3):
        sim.step()
        had, now = reached(sim), {n: masks.active(m) for n, m in sides(sim).items()}
        for n, k in now.items():
            step, most = ((share * masks.active(had[n]).double() + 1e-9).long() for share in (0.3, 0.4))
            assert k.tolist() == torch.minimum(before[n] + step, most).tolist()
        before = now


@pytest.mark.parametrize(
    ("ranking", "share", "bound", "unreached", "joins"),
    [
        ("shared", 0.5, 1.0, [], [2, 3]),  # the two largest of those still shared
        ("all", 0.5, 1.0, [], [2]),  # of the two largest of all one is personal
        ("all", 0.75, 1.0, [], [2, 3]),
        ("all", 0.75, 0.5, [], [2]),  # room for one, which is the larger
        ("all", 0.25, 1.0, [], []),  # the largest of all is personal
        ("all", 0.75, 0.25, [], []),  # no room
        ("shared", 0.34, 1.0, [2], [3]),  # 0.34 of 3 is one position, and the largest of those shared does not count
        ("all", 0.67, 1.0, [2], [3]),  # positions 1 and 3 are the largest two
        ("shared", 0.5, 0.5, [0, 2, 3], []),  # half of one position is none
    ],
)
def test_which_positions_the_top_p_is_among(
    ranking: str, share: float, bound: float, unreached: list[int], joins: list[int]
) -> None:
    """Position 1 is personal; by size the changes stand in the order 1, 2, 3, 0. Weight decay moves all of them."""
    model = StackedModel(torch.nn.Linear(4, 1, bias=False), torch.zeros(2, 4))
    method = COPFL(ranking=ranking, select_share=share, personal_bound=bound)
    bound_method = method.bind(Setup(model.info, worlds.training(), 1))
    mask = torch.tensor([[[False, True, False, False]]])
    end = torch.tensor([[[0.1, -0.9, 0.8, -0.3]]])
    fixed = {"mask/weight": mask, "begin/weight": torch.zeros_like(end), "reached/weight": mask}
    fixed["moments-shared/reached/weight"] = torch.tensor([[[i not in unreached for i in range(4)]]])
    local = ClientState({"weight": end}, fixed)
    assert bound_method._selected(local)["weight"].flatten().nonzero().flatten().tolist() == sorted([1, *joins])


# Positions without a gradient


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ranking": "all", "select_share": 0.5},
        {"weight_decay": 0.1},  # moves the border's weights too, and Adam as far as any other
        {"moments": False, "weight_decay": 0.1},
        {"moments": False, "optimizer": "adamw", "weight_decay": 0.1},
        {"phases": "sequential"},
    ],
    ids=str,
)
def test_weights_that_never_get_a_gradient_neither_turn_personal_nor_count(settings: dict[str, Any]) -> None:
    """gamma = 0.5 of 13 movable positions is 6. Of all 29 it is 14, which is more than there are to share."""
    sim = worlds.simulation(COPFL(**settings), **SLOW, **padded_world())
    for _ in range(4):
        sim.step()
        border = sides(sim)["conv.weight"].clone()
        border[..., 1, 1] = False
        assert not border.any()
        assert {n: int(m[0].sum()) for n, m in reached(sim).items()} == {
            "conv.weight": 2,
            "conv.bias": 2,
            "head.weight": 6,
            "head.bias": 3,
        }
    assert count(sim).tolist() == [6] * 6
    assert [row["personal_share"] for row in sim.rows][-1] == pytest.approx(6 / MOVABLE)
    moved = (checks.everyone(sim)["own/conv.weight"] - sim.model.initial["conv.weight"]).abs()
    moved[..., 1, 1] = 0
    assert bool((moved > 1e-12).any()) == ("weight_decay" in settings)  # means of equal numbers round at 1e-16


def test_per_tensor_the_border_of_a_kernel_does_not_count_either() -> None:
    """Half of 2, 2, 6 and 3 positions: 1, 1, 3 and 1."""
    sim = checks.played(COPFL(selection="tensor", select_share=0.5), num_rounds=4, **SLOW, **padded_world())
    assert {n: masks.active(m).tolist() for n, m in sides(sim).items()} == {
        "conv.weight": [1] * 6,
        "conv.bias": [1] * 6,
        "head.weight": [3] * 6,
        "head.bias": [1] * 6,
    }


@pytest.mark.parametrize("moments", [True, False])
def test_a_stack_finds_the_same_movable_positions_as_each_client_alone(moments: bool) -> None:
    method = COPFL(moments=moments, weight_decay=0.1)
    checks.assert_a_stack_equals_each_client_alone(method, num_rounds=4, lr=0.02, **padded_world())


def test_a_client_that_never_trained_has_nothing_personal_and_knows_of_no_gradient() -> None:
    sim = worlds.simulation(COPFL(), lr=0.02, num_rounds=1)
    chosen = set(sim.cohort(sim.schedule[0]).tolist())
    sim.run()
    for c in set(range(6)) - chosen:
        assert not any(bool(m[c].any()) for m in [*reached(sim).values(), *sides(sim).values()])


def test_a_bias_before_a_batch_norm_does_not_count() -> None:
    """The batch's mean takes it out again: its gradient is zero but for rounding."""
    sim = checks.played(COPFL(), num_rounds=2, **SLOW, **normed_world())
    had = reached(sim)
    assert not had["first.bias"].any()
    assert all(bool(m.any()) for n, m in had.items() if n != "first.bias")


def test_counting_all_positions_as_printed_a_mask_swallows_all_that_moves_and_one_warning_says_so() -> None:
    """0.25 of 29 positions are 7, so 7 and then all 13 movable ones turn personal."""
    sim = worlds.simulation(COPFL(budget="all"), num_rounds=4, **SLOW, **padded_world())
    sim.step()
    with pytest.warns(
        UserWarning, match=r"at 6 of this round's clients, at least 99.9 % .* budget=reached"
    ) as messages:
        sim.step()
    assert len(messages) == 1
    sim.step()
    sim.step()
    assert [row["personal_share"] for row in sim.rows] == pytest.approx([7 / 13, 1, 1, 1])


def test_the_usual_budget_warns_only_where_the_bound_is_all_there_is() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checks.played(COPFL(), num_rounds=4, **SLOW, **padded_world())
    with pytest.warns(UserWarning, match=r"A smaller personal_bound \(it is 1.0\) keeps weights shared\."):
        checks.played(COPFL(personal_bound=1.0, select_share=0.5), num_rounds=4, **SLOW, **padded_world())


def test_an_estimate_of_costs_which_trains_nothing_counts_all_positions() -> None:
    costs = [
        estimate_cost(COPFL(budget=b), worlds.model(), worlds.training(), num_clients=6, examples=14)
        for b in ("reached", "all")
    ]
    none = estimate_cost(COPFL(select_share=0.0), worlds.model(), worlds.training(), num_clients=6, examples=14)
    assert costs[0] == costs[1]
    assert costs[0].up_bytes < none.up_bytes


# Moments


def test_a_position_that_changes_sides_takes_no_moment_along() -> None:
    sim = worlds.simulation(COPFL(select_share=0.1), **SLOW)
    sim.step()
    sim.step()
    before, was = sides(sim), checks.everyone(sim)
    sim.step()
    after, now = sides(sim), checks.everyone(sim)
    turned = stayed = shared = 0
    for n in after:
        new, old = after[n] & ~before[n], before[n]
        for kind in ("first", "second"):
            of = {side: now[f"moments-{side}/{kind}/{n}"] for side in ("shared", "personal")}
            assert not of["shared"][after[n]].any()  # left nothing behind
            assert not of["personal"][new].any()  # and starts at nothing
            assert not of["personal"][~after[n]].any()
            stayed += int((of["personal"][old] != 0).sum())
            shared += int((of["shared"][~after[n]] != 0).sum())
        turned += int(new.sum())
        # Three sessions of the shared side, two in which there was anything personal.
        steps = now[f"moments-shared/steps/{n}"], now[f"moments-personal/steps/{n}"]
        assert torch.equal(steps[0], 1.5 * was[f"moments-shared/steps/{n}"])
        assert torch.equal(steps[1], 2 * was[f"moments-personal/steps/{n}"])
        assert torch.equal(steps[0] * 2, steps[1] * 3)
    assert turned > 0
    assert stayed > 0
    assert shared > 0


def test_a_session_goes_on_with_the_moments_of_the_last_one() -> None:
    """m' = b1^k m + ...: after one step, what the old moment gives is 0.9 of it."""
    sim = worlds.simulation(COPFL(select_share=0.0), local_steps=1, batch_size=64, **SLOW)
    sim.step()
    kept = checks.everyone(sim)
    c = 2
    x, y = checks.rows_of(sim, c)
    grads = checks.gradient(tree.select(sim.server, sim.model.info.shapes), x, y)
    sim.step()
    now = checks.everyone(sim)
    for n, g in grads.items():
        m, v = (kept[f"moments-shared/{kind}/{n}"][c] for kind in ("first", "second"))
        torch.testing.assert_close(now[f"moments-shared/first/{n}"][c], 0.9 * m + 0.1 * g)
        torch.testing.assert_close(now[f"moments-shared/second/{n}"][c], 0.999 * v + 0.001 * g * g)


@pytest.mark.parametrize("moments", [True, False])
def test_mamo_takes_neither_the_recipes_weight_decay_nor_its_clipping(moments: bool) -> None:
    """Eqs. 4 and 5 have none; without MAMO the recipe's optimiser is asked for, with both."""
    plain = checks.played(COPFL(moments=moments), num_rounds=2, **SLOW)
    for change in ({"weight_decay": 0.1}, {"grad_clip": 0.05}):
        other = checks.played(COPFL(moments=moments), num_rounds=2, **SLOW, **change)
        same = [torch.equal(plain.server[n], other.server[n]) for n in plain.model.info.parameters]
        assert all(same) if moments else not any(same)
        told = checks.played(COPFL(moments=moments, **change), num_rounds=2, **SLOW)
        assert not any(torch.equal(plain.server[n], told.server[n]) for n in plain.model.info.parameters)


# Phases


def test_both_phases_begin_at_the_same_point_unless_sequential() -> None:
    """The personal side trains first and alike; only in sequence the shared side sees what it became."""
    ends = {}
    for phases in ("parallel", "sequential"):
        sim = worlds.simulation(COPFL(select_share=0.2, phases=phases), **SLOW)
        sim.step()  # nobody has anything personal yet: the same
        ends[phases] = (checks.everyone(sim), checks.rehearsed(sim)[2].local.params)
    checks.assert_agree(ends["parallel"][0], ends["sequential"][0])
    order = sim.cohort(sim.schedule[1])
    for n, m in tree.under(ends["parallel"][0], "mask").items():
        a, b, m = ends["parallel"][1][n], ends["sequential"][1][n], m[order]
        assert torch.equal(a[m], b[m])
    assert any(not torch.equal(ends["parallel"][1][n], ends["sequential"][1][n]) for n in sim.model.info.shapes)


def test_in_parallel_the_shared_side_never_sees_the_personal_one() -> None:
    """Its result is that of a client whose personal positions stand still."""
    sim = worlds.simulation(COPFL(select_share=0.2), **SLOW)
    sim.step()
    _, ids, done = checks.rehearsed(sim)
    still = dataclasses.replace(
        sim.algorithm.base,  # type: ignore[attr-defined]
        select_share=0.0,  # plays the shared side only
    )
    kept = tree.without(sim.store.gather(ids), "cowa")
    rnd = Round(sim.schedule[1], 0.02)
    received = tree.received(sim.download(ids, rnd), len(ids))
    local = still.start(kept, tree.without(received, "cowa"), rnd)
    data = sim.federation.examples("train", ids)
    alone, _ = run_local_work(sim.task, local, still.turns(local, rnd), data, sim.training, rnd)
    for n, m in tree.under(kept, "mask").items():
        assert torch.equal(alone.params[n][~m], done.local.params[n][~m])
        assert torch.equal(alone.params[n][m], kept[f"own/{n}"][m])


@pytest.mark.parametrize("moments", [True, False])
def test_in_parallel_running_statistics_are_those_of_the_shared_phase_from_where_the_session_began(
    moments: bool,
) -> None:
    """The personal phase trains on minibatches of its own, and what it made of them is taken back."""
    sim = worlds.simulation(COPFL(select_share=0.2, moments=moments), **SLOW, **normed_world())
    sim.step()
    _, ids, done = checks.rehearsed(sim)
    kept, rnd = tree.without(sim.store.gather(ids), "cowa"), Round(sim.schedule[1], 0.02)
    method = sim.algorithm.base  # type: ignore[attr-defined]
    local = method.start(kept, tree.without(tree.received(sim.download(ids, rnd), len(ids)), "cowa"), rnd)
    shared = method.turns(local, rnd)[2]
    data = sim.federation.examples("train", ids)
    alone, _ = run_local_work(sim.task, local, [shared], data, sim.training, rnd)
    for n in ("norm.running_mean", "norm.running_var"):
        assert torch.equal(done.kept[n], alone.params[n])
        assert not torch.equal(done.kept[n], kept[n])


def test_a_phase_that_moves_nothing_leaves_running_statistics_alone() -> None:
    """In sequence a client with nothing personal has no first phase; in parallel one with nothing shared no second."""
    for phases, filled, playing in (("sequential", False, 2), ("parallel", True, 0)):
        sim = worlds.simulation(COPFL(phases=phases), **SLOW, **normed_world())
        method = sim.algorithm.base  # type: ignore[attr-defined]
        ids, rnd = sim.everybody, Round(sim.schedule[1], 0.02)
        kept = tree.without(checks.everyone(sim), "cowa")
        kept |= {n: torch.full_like(m, filled) for n, m in kept.items() if n.startswith("mask/")}
        local = method.start(kept, tree.without(tree.received(sim.download(ids, rnd), len(ids)), "cowa"), rnd)
        turns = method.turns(local, rnd)
        data = sim.federation.examples("train", ids)
        together, _ = run_local_work(sim.task, local, turns, data, sim.training, rnd)
        alone, _ = run_local_work(sim.task, local, [turns[playing]], data, sim.training, rnd)
        checks.assert_agree(together.params, alone.params)


def test_running_statistics_never_travel_nor_reach_another_client() -> None:
    """Also under the policy that averages them, which CO-PFL does not follow."""
    sim = worlds.simulation(COPFL(), **SLOW, **normed_world())
    statistics = {"norm.running_mean", "norm.running_var"}
    assert sim.model.info.policy == "average"
    assert statistics == sim.model.info.buffers
    for _ in range(2):
        rnd, ids, done = checks.rehearsed(sim)
        down = sim.download(ids, rnd)
        assert not statistics & (down.shared.keys() | down.own.keys() | done.upload.keys() | sim.server.keys())
        sim.step()
        kept = checks.everyone(sim)
        for n in statistics:
            assert torch.equal(kept[n][ids], done.local.params[n])
            assert torch.equal(sim.deployed_models(sim.model, sim.everybody)[n], kept[n])
            assert len({tuple(row.tolist()) for row in kept[n]}) == 5  # every client's are its own


# The server

ROUND = Round(Stage(0), 0.1)


def merged(rule: str, server_lr: float = 1.0) -> tuple[list[float], float]:
    """The server's row of four positions after two uploads, and the union of masks it notes."""
    model = StackedModel(torch.nn.Linear(4, 1, bias=False), torch.zeros(2, 4))
    setup = Setup(model.info, worlds.training(server_lr=server_lr), 2)
    algorithm = COPFL(server_rule=rule).bind(setup)
    shared = torch.tensor([[[True, True, False, False]], [[True, False, True, False]]])
    values = torch.tensor([[[1.0, 2.0, 0.0, 0.0]], [[5.0, 0.0, 3.0, 0.0]]])
    upload = {"weight": Masked(values, shared), "aux/personal": torch.tensor([0.5, 0.25], dtype=torch.float64)}
    terms = algorithm.summands(upload, torch.tensor([1.0, 3.0], dtype=torch.float64), ROUND)
    sums = {n: t.sum(0, dtype=torch.float64) for n, t in terms.items()}
    server = algorithm.init_server({"weight": torch.tensor([[10.0, 20.0, 30.0, 40.0]])})
    after = algorithm.aggregate(server, sums, ROUND)
    assert algorithm.notes(after)["personal_share"] == 0.375  # (0.5 + 0.25) / 2, whatever clients count
    return after["weight"][0].tolist(), algorithm.notes(after)["union_of_masks"]


def test_the_mean_is_over_those_who_share_a_position() -> None:
    """(1 * 1 + 3 * 5) / 4 = 4 where both share, the one value where one does, the old one where nobody does."""
    assert merged("renormalised") == ([4.0, 2.0, 3.0, 40.0], 0.75)


def test_the_literal_rule_agrees_where_nobody_personalises_and_freezes_the_rest() -> None:
    assert merged("literal") == ([4.0, 20.0, 30.0, 40.0], 0.75)


def test_a_server_rate_of_a_half_goes_half_way_where_anybody_shares() -> None:
    assert merged("renormalised", 0.5)[0] == [7.0, 11.0, 16.5, 40.0]


def test_the_rules_agree_as_long_as_nobody_personalises() -> None:
    both = [
        checks.played(COPFL(select_share=0.0, server_rule=r), num_rounds=3, **SLOW) for r in ("renormalised", "literal")
    ]
    checks.assert_agree(*(tree.without(sim.server, "cowa/coverage") for sim in both))
    assert [r["union_of_masks"] for r in both[0].rows] == [0.0] * 3


def test_the_literal_rule_freezes_the_union_of_masks_and_rows_say_how_much_that_is() -> None:
    sim = worlds.simulation(COPFL(select_share=0.1, server_rule="literal"), **SLOW)
    for _ in range(3):
        old = dict(sim.server)
        told = sim.step()["union_of_masks"]
        union = {n: m.any(0) for n, m in sides(sim).items()}
        for n, m in union.items():
            assert torch.equal(sim.server[n][m], old[n][m])
        assert any(not torch.equal(sim.server[n][~m], old[n][~m]) for n, m in union.items())
        assert told == pytest.approx(sum(int(m.sum()) for m in union.values()) / size(sim))
    assert told > 0.2


# Traffic, weights, ablations


def test_only_shared_positions_are_uploaded() -> None:
    sim = worlds.simulation(COPFL(select_share=0.2), **SLOW)
    sim.step()
    _, _, done = checks.rehearsed(sim)
    for n in sim.model.info.parameters:
        sent = done.upload[n]
        assert isinstance(sent, Masked)
        assert torch.equal(sent.mask, ~done.kept[f"mask/{n}"])
        assert not sent.values[done.kept[f"mask/{n}"]].any()
    assert done.upload.keys() - set(sim.model.info.parameters) == {"aux/personal", "cowa/score"}


def test_weights_sum_to_one() -> None:
    sim = worlds.simulation(COPFL(), **SLOW)
    for _ in range(4):
        sim.step()
        alpha = sim.download(sim.everybody, sim.now).own["cowa/share"]
        assert float(alpha.sum()) == pytest.approx(1.0, abs=1e-12)
        assert float(alpha.min()) > 0
        assert len({round(a, 9) for a in alpha.tolist()}) == 6


def first_round(**settings: object) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Server, models and masks after a round that begins alike."""
    sim = worlds.simulation(dataclasses.replace(COPFL(select_share=0.2), **settings), **SLOW)
    sim.step()
    kept = checks.everyone(sim)
    return tree.select(sim.server, sim.model.info.shapes), tree.under(kept, "own"), tree.under(kept, "mask")


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def test_without_cowa_only_the_mean_differs() -> None:
    usual, without = first_round(), first_round(weights="uniform")
    assert equal(usual[1], without[1])
    assert equal(usual[2], without[2])
    assert not equal(usual[0], without[0])


def test_without_pwpm_only_masks_and_the_mean_differ() -> None:
    usual, without = first_round(), first_round(select_share=0.0)
    assert equal(usual[1], without[1])
    assert not any(bool(m.any()) for m in without[2].values())
    assert not equal(usual[0], without[0])


def test_without_mamo_clients_train_by_the_recipes_optimiser_and_keep_no_moments() -> None:
    usual, without = first_round(), first_round(moments=False)
    assert not equal(usual[1], without[1])
    sim = worlds.simulation(COPFL(moments=False), **SLOW)
    assert not any("moments" in n for n in checks.everyone(sim))
    assert any("moments" in n for n in checks.everyone(worlds.simulation(COPFL(), **SLOW)))


def test_a_client_is_judged_by_the_model_it_last_trained() -> None:
    """Algorithm 1, line 8: g_n is its own, not the server's, also rounds later; who never trained has the server's."""
    sim = worlds.simulation(COPFL(select_share=0.2), lr=0.02, num_rounds=3)
    trained: dict[int, dict[str, Tensor]] = {}
    for _ in range(3):
        _, ids, done = checks.rehearsed(sim)
        trained |= {c: tree.take(done.local.params, torch.tensor(i)) for i, c in enumerate(ids.tolist())}
        sim.step()
    last = sim.cohort(sim.schedule[-1]).tolist()
    assert set(last) < set(trained) < set(range(6))  # some paused, some never came
    ready = sim.deployed_models(sim.model, sim.everybody)
    for c in range(6):
        for n in sim.model.info.parameters:
            assert torch.equal(ready[n][c], trained[c][n] if c in trained else sim.server[n]), (c, n)


def test_with_the_servers_shared_part_it_is_judged_by_its_own_values_at_personal_positions() -> None:
    sim = checks.played(COPFL(select_share=0.2, answers="server"), num_rounds=3, **SLOW)
    ready, kept = sim.deployed_models(sim.model, sim.everybody), checks.everyone(sim)
    for n, m in tree.under(kept, "mask").items():
        assert torch.equal(ready[n][m], kept[f"own/{n}"][m])
        assert torch.equal(ready[n][~m], sim.server[n].expand_as(m)[~m])
        assert m.any()


def test_whose_shared_part_answers_changes_no_training() -> None:
    own, server = (checks.played(COPFL(select_share=0.2, answers=a), num_rounds=3, **SLOW) for a in ("own", "server"))
    checks.assert_agree(own.server, server.server)
    checks.assert_agree(checks.everyone(own), checks.everyone(server))


def test_the_words_for_what_is_judged_follow_the_setting() -> None:
    server = COPFL(answers="server")
    assert "last session" in COPFL().evaluated("after_aggregation")
    assert server.evaluated("after_aggregation").startswith("the global model at shared positions")
    surer = dataclasses.replace(server, inference="per-sample").evaluated("after_aggregation")
    assert surer.startswith("per sample the surer of the global model and the global model at shared positions")
    assert server.evaluated("after_local") == COPFL().evaluated("after_local")


def test_adaptive_inference_chooses_between_the_server_and_the_clients_last_model() -> None:
    sim = checks.played(COPFL(select_share=0.2, inference="per-sample"), num_rounds=2, **SLOW)
    ready, kept = sim.deployed_models(sim.model, sim.everybody), checks.everyone(sim)
    for n in sim.model.info.parameters:
        assert torch.equal(ready[n], kept[f"own/{n}"])
        assert torch.equal(ready[f"global/{n}"], sim.server[n].expand_as(ready[n]))


def test_judged_right_after_training_it_is_the_model_just_trained() -> None:
    late = Evaluation(shift="none", eval_every=1, when="after_local", clients="selected")
    sim = worlds.simulation(COPFL(select_share=0.2), evaluation=late, **SLOW)
    sim.step()
    _, ids, done = checks.rehearsed(sim)
    sim.step()
    checks.assert_agree(sim.evaluated_models(sim.model, ids), done.local.params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"select_share": 1.1}, r"select_share=1.1: must be in \[0, 1\]"),
        ({"personal_bound": -0.1}, r"personal_bound=-0.1: must be in \[0, 1\]"),
        ({"beta2": 1.0}, r"beta2=1.0: must be in \[0, 1\)"),
        ({"server_rule": "mean"}, "possible are renormalised, literal"),
        ({"phases": "both"}, "possible are parallel, sequential"),
        ({"answers": "both"}, "possible are own, server"),
        ({"ranking": "personal"}, "possible are shared, all"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        COPFL(**settings)  # type: ignore[arg-type]


def test_shares_of_millions_of_positions_are_counted_exactly() -> None:
    """0.3 of 8,388,613 is 2516583.9, which float32 rounds to 2516584."""
    size = 2**23 + 5
    nothing = torch.zeros(1, size, dtype=torch.bool)
    grown = COPFL(select_share=0.3)._grown(torch.ones(1, size), nothing, ~nothing)
    assert int(grown.sum()) == 2516583


def test_shares_of_a_hundred_positions_are_counted_exactly() -> None:
    """0.29 * 100 is 28.999999999999996 in floating point."""
    nothing, moved = torch.zeros(1, 100, dtype=torch.bool), torch.arange(100.0).view(1, 100)
    for settings in ({"select_share": 0.29, "personal_bound": 1.0}, {"select_share": 1.0, "personal_bound": 0.29}):
        grown = COPFL(**settings)._grown(moved, nothing, ~nothing)
        assert torch.equal(grown, moved >= 71)
