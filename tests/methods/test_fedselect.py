"""FedSelect: what turns personal, when, and what the server then averages."""

from __future__ import annotations

import dataclasses
import math
import warnings

import pytest
import torch
from torch import Tensor, nn

from personafl import FedAvg, FedSelect, Simulation, StackedModel
from personafl.core import tree
from personafl.core.local_work import ClientState
from personafl.core.types import Masked, Round, Stage
from personafl.sparse import masks
from tests import checks, worlds

EAGER = FedSelect(select_interval=1)
ALL = {"join_ratio": 1.0, "num_rounds": 6, "local_epochs": 1}
WEIGHTS = {"layers.0.weight", "layers.1.weight", "head.weight"}


def sides(sim: Simulation) -> dict[str, Tensor]:
    return tree.under(checks.everyone(sim), "mask")


def test_with_nothing_selected_it_is_uniform_fedavg_without_its_last_mean() -> None:
    a = checks.played(FedSelect(select_share=0.0, select_interval=1), num_rounds=5)
    b = checks.played(FedAvg(weights="uniform"), num_rounds=4)
    checks.assert_close(b.server, a.server)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())  # type: ignore[no-any-return]


def test_running_statistics_stay_with_the_client_whatever_the_policy() -> None:
    """So without selection it is FedAvg that keeps them local."""

    def normed(policy: str) -> StackedModel:
        torch.manual_seed(0)
        return StackedModel(Normed(), worlds.federation().source.x[:2], policy=policy)  # type: ignore[arg-type]

    a = checks.played(FedSelect(select_share=0.0), num_rounds=4, model=normed("average"))
    b = checks.played(FedAvg(weights="uniform"), num_rounds=3, model=normed("local"))
    assert tree.without(a.server, "aux").keys() == b.server.keys()
    assert not any("running" in n for n in a.server)
    checks.assert_close(b.server, a.server)


def test_masks_grow_every_third_round_but_the_first() -> None:
    sim = worlds.simulation(FedSelect(), join_ratio=1.0, num_rounds=8, local_epochs=1)
    grew = []
    for _ in sim.schedule:
        before = sides(sim)
        sim.step()
        after = sides(sim)
        assert all(bool((after[n] | ~before[n]).all()) for n in before)
        grew.append(any(not torch.equal(before[n], after[n]) for n in before))
    assert grew == [t in (3, 6) for t in range(8)]


def test_the_weights_that_moved_most_since_the_last_selection_turn_personal() -> None:
    sim = worlds.simulation(EAGER, **ALL)
    assert set(sides(sim)) == WEIGHTS  # biases never do
    sim.step()
    snapshot = {n: sim.model.initial[n].expand(6, *sim.model.initial[n].shape) for n in WEIGHTS}
    for _ in range(2):
        before, ids = sides(sim), sim.everybody
        sim.step()
        kept, after = checks.everyone(sim), sides(sim)
        for n in WEIGHTS:
            moved = (kept[f"own/{n}"] - snapshot[n]).abs()
            for c in ids.tolist():
                free = ~before[n][c]
                joined = after[n][c] & free
                assert int(joined.sum()) == math.ceil(0.25 * int(free.sum()))
                assert moved[c][joined].min() >= moved[c][free & ~after[n][c]].max()
        snapshot = {n: kept[f"own/{n}"] for n in WEIGHTS}  # own state at this selection


def test_a_tensor_beyond_the_bound_gets_no_more() -> None:
    """p = 0.5 of what is left: 0.5, 0.75, 0.875 of 72, 96 and 24; above 0.6 it stops, so at 0.75."""
    sim = checks.played(FedSelect(select_interval=1, select_share=0.5, personal_bound=0.6), **ALL)
    for n, m in sides(sim).items():
        assert masks.active(m).tolist() == [0.75 * sim.model.initial[n].numel()] * 6


def test_the_mean_uses_the_masks_from_before_their_update_and_those_who_share() -> None:
    sim = worlds.simulation(EAGER, **ALL)
    for t in range(3):
        _, ids, done = checks.rehearsed(sim)
        before, old = sim.store.gather(ids), dict(sim.server)
        sim.step()
        for n in WEIGHTS:
            sent = done.upload[n]
            assert isinstance(sent, Masked)
            assert sent.known  # the server's own mask of this client
            assert torch.equal(sent.mask, ~before[f"mask/{n}"])
            count = sent.mask.sum(0)
            mean = torch.where(count > 0, sent.values.sum(0) / count.clamp(min=1), old[n])
            torch.testing.assert_close(sim.server[n], mean)
        torch.testing.assert_close(sim.server["head.bias"], tree.values(done.upload)["head.bias"].mean(0))
        assert any(n.startswith("mask/") for n in done.upload) == (t > 0)


def test_a_client_is_sent_what_it_shares_and_keeps_its_own_elsewhere() -> None:
    sim = worlds.simulation(EAGER, **ALL)
    for _ in range(3):
        sim.step()
    kept, rnd = checks.everyone(sim), sim.now
    down = sim.download(sim.everybody, rnd)
    local = sim.algorithm.start(kept, tree.received(down, 6), rnd)
    for n in WEIGHTS:
        m = kept[f"mask/{n}"]
        assert m.any()
        assert torch.equal(down.own[n].mask, ~m)  # type: ignore[union-attr]
        assert torch.equal(local.params[n][m], kept[f"own/{n}"][m])
        assert torch.equal(local.params[n][~m], sim.server[n].expand_as(m)[~m])


def test_personal_and_shared_positions_train_in_alternating_epochs() -> None:
    sim = worlds.simulation(EAGER, join_ratio=1.0, num_rounds=6, local_epochs=2)
    turns = [sim.algorithm.turns(None, dataclasses.replace(sim.now, stage=s)) for s in sim.schedule]  # type: ignore[arg-type]
    assert [[t.stream for t in plays] for plays in turns[1:3]] == [  # type: ignore[union-attr]
        ["batches", "batches"],
        ["personal", "batches", "personal", "batches"],
    ]
    assert {t.epochs for plays in turns for t in plays} == {1.0}  # type: ignore[union-attr]


def test_the_last_round_is_not_averaged_and_clients_answer_as_they_left() -> None:
    sim = worlds.simulation(EAGER, **ALL)
    assert [s.up for s in sim.schedule] == [True] * 5 + [False]
    for _ in range(5):
        sim.step()
    server = dict(sim.server)
    _, ids, done = checks.rehearsed(sim)
    sim.step()
    checks.assert_agree(sim.server, server)
    checks.assert_agree(sim.deployed_models(sim.model, ids), done.local.params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"select_share": -0.1}, r"select_share=-0.1: must be in \[0, 1\]"),
        ({"personal_bound": 1.5}, r"personal_bound=1.5: must be in \[0, 1\]"),
        ({"select_interval": 0}, "select_interval=0: must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedSelect(**settings)  # type: ignore[arg-type]


def test_a_share_of_a_hundred_positions_is_counted_exactly() -> None:
    """0.07 * 100 is 7.000000000000001 in floating point, which rounded up were 8."""
    moved, nothing = torch.arange(100.0).view(1, 100), torch.zeros(1, 100, dtype=torch.bool)
    local = ClientState({"w": moved}, {"mask/w": nothing, "snapshot/w": torch.zeros(1, 100)})
    chosen = FedSelect(select_share=0.07)._selected(local, Round(Stage(number=3), 0.1))["w"]
    assert torch.equal(chosen, moved >= 93)


def test_matrices_turn_personal_whatever_they_are_called() -> None:
    """And norms, whose scale is a weight by name; biases and other vectors never do."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.shift = nn.Parameter(torch.full((6, 6), 0.1)), nn.Parameter(torch.zeros(6))
            self.norm, self.rnn = nn.LayerNorm(6), nn.RNN(6, 4, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.rnn(self.norm(x @ self.mix + self.shift).unsqueeze(1))[0][:, -1])
            return out

    model = StackedModel(Named(), worlds.federation().source.x[:2])
    sim = worlds.simulation(FedSelect(), model=model)
    held = tree.under(sim.store.gather(sim.everybody), "mask")
    assert list(held) == ["mix", "norm.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0", "head.weight"]


def with_dead_inputs(dead: int) -> StackedModel:
    """The usual model; so many of six inputs never reach it, as the first weights of these never get a gradient."""

    class Masking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(6, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.first(x * (torch.arange(6) >= dead)).tanh())

    return StackedModel(Masking(), torch.rand(2, 6))


def test_one_warning_says_when_all_that_moves_is_personal() -> None:
    """60 % of 30 and 15 positions: all 5 that move of the first layer and 9 of the head's 15; then all of the head."""
    method = FedSelect(select_interval=1, select_share=0.6, personal_bound=1.0)
    sim = worlds.simulation(method, model=with_dead_inputs(5), join_ratio=1.0, num_rounds=7)
    sim.step()
    sim.step()
    shares = {n: m.double().flatten(1).mean(1) for n, m in sides(sim).items()}
    assert shares["first.weight"].tolist() == [18 / 30] * 6 and shares["head.weight"].tolist() == [9 / 15] * 6
    sim.step()  # 13 of the head's 15, and two more next time
    with pytest.warns(UserWarning, match=r"FedSelect: at 6 of this round's clients, at least 99.9 % .* 0\.6\)"):
        sim.step()
    sim.step()  # does not say so again


def test_no_warning_where_some_of_what_moves_stays_shared() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dead in (0, 3):
            method = FedSelect(select_interval=1)
            checks.played(method, model=with_dead_inputs(dead), join_ratio=1.0, num_rounds=4)
