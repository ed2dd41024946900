"""Contribution (COWA) by numbers derived in sight."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from personafl import (
    COPFL,
    DMPFL,
    Algorithm,
    FedAvg,
    FedDST,
    FedPAC,
    FedRep,
    FedSelect,
    LocalOnly,
    Simulation,
    StackedModel,
)
from personafl.core import tree
from personafl.core.types import Download, Masked, Params, Round, Setup, Stage
from personafl.engine.dry_run import estimate_cost
from personafl.plugins.assemble import assembled
from personafl.plugins.contribution import Contribution, _apart
from tests import checks, worlds
from tests.references import contributing as reference
from tests.references.world import TRAINING, world

TINY = StackedModel(nn.Linear(2, 1, bias=False), torch.zeros(2, 2)).to(torch.device("cpu"), torch.float64)
ALL = {"join_ratio": 1.0}


def tiny(weights: str, clients: int = 2, **changes: object) -> Contribution:
    """FedAvg on two weights and nothing else."""
    method = assembled(FedAvg(weights=weights), Setup(TINY.info, worlds.training(**changes), clients))
    assert isinstance(method, Contribution)
    return method


def vector(*rows: tuple[float, float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).view(len(rows), 1, 2)


def session(method: Contribution, kept: Params, down: Download, rnd: Round, end: Tensor) -> tuple[Params, Params]:
    """A session that ends at these weights: what is kept, and what is sent."""
    local = method.start(kept, tree.received(down, len(end)), rnd)
    local.params["weight"] = end
    return method.keep(kept, local, rnd), tree.values(method.upload(local, rnd))


def rnd(number: int) -> Round:
    return Round(Stage(number), 0.1)


def first_round(method: Contribution, begin: float = 0.0) -> tuple[Params, Params, Params]:
    """Both begin at (0, 0) and send (-1, 0) and (0, -2), and count 1 and 3: the server then is at (-0.25, -1.5)."""
    ids = torch.arange(2)
    initial = {"weight": torch.full((1, 2), begin, dtype=torch.float64)}
    server, kept, known = (
        method.init_server(initial),
        method.init_clients(initial, ids),
        method.init_known(initial, ids),
    )
    kept, sent = session(method, kept, method.download(server, known, rnd(0)), rnd(0), vector((-1, 0), (0, -2)))
    weights = torch.tensor([1.0, 3.0], dtype=torch.float64)
    sums = {n: t.sum(0) for n, t in method.summands(dict(sent), weights, rnd(0)).items()}
    known = method.remember(known, dict(sent), weights, rnd(0))
    server = method.aggregate(server, sums, rnd(0))
    assert begin or server["weight"].tolist() == [[-0.25, -1.5]]
    return server, kept, known


# G


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((3.0, 4.0), (0.0, 2.0), 1 - 0.8),
        ((1.0, 0.0), (0.0, 5.0), 1.0),
        ((1.0, 1.0), (-2.0, -2.0), 2.0),
        ((1.0, 2.0), (1.0, 2.0), 0.0),
        ((0.0, 0.0), (1.0, 2.0), 1.0),  # an update of nothing points nowhere
    ],
)
def test_one_minus_the_cosine(a: tuple[float, float], b: tuple[float, float], expected: float) -> None:
    assert float(_apart({"w": vector(a)}, {"w": vector(b)})) == pytest.approx(expected, abs=1e-12)


def test_the_cosine_is_over_all_tensors_at_once() -> None:
    """(3, 0 | 4) and (3, 0 | 0): 9 / (5 * 3)."""
    a = {"u": torch.tensor([[3.0, 0.0]]), "v": torch.tensor([[4.0]])}
    b = {"u": torch.tensor([[3.0, 0.0]]), "v": torch.tensor([[0.0]])}
    assert float(_apart(a, b)) == pytest.approx(1 - 0.6)


def test_in_a_first_session_the_gradient_score_is_one() -> None:
    method = tiny("cowa-gradient")
    initial, ids = {"weight": torch.zeros(1, 2, dtype=torch.float64)}, torch.arange(2)
    down = method.download(method.init_server(initial), method.init_known(initial, ids), rnd(0))
    _, sent = session(method, method.init_clients(initial, ids), down, rnd(0), vector((-1, 0), (0, -2)))
    assert sent["cowa/score"].tolist() == [1.0, 1.0]


def test_the_lagged_gradient_score_by_hand() -> None:
    """The server moved by D = (0.25, 1.5). Less 0.25 (1, 0) the others moved along (0, 1); less 0.75 (0, 2), (1, 0).

    Updates (3, 4) and (4, 3): cosines 4 / 5 and 4 / 5. With (4, 3) and (0, 7): 3 / 5 and 0.
    """
    method = tiny("cowa-gradient")
    server, kept, known = first_round(method)
    down = method.download(server, known, rnd(1))
    assert down.own["cowa/share"].tolist() == [0.25, 0.75]  # type: ignore[union-attr]
    at = server["weight"]
    _, sent = session(method, kept, down, rnd(1), at - vector((3, 4), (4, 3)))
    assert sent["cowa/score"].tolist() == pytest.approx([0.2, 0.2])
    _, sent = session(method, kept, down, rnd(1), at - vector((4, 3), (0, 7)))
    assert sent["cowa/score"].tolist() == pytest.approx([0.4, 1.0])


@pytest.mark.parametrize(("weights", "expected"), [("cowa", 1 / 9), ("cowa-all", 1.32)])
def test_eq_8_compares_the_positions_a_client_shares_or_all_as_printed(weights: str, expected: float) -> None:
    """An update of (1, 2, 2, 4), of which the last position turns personal; the others moved by (2, 1, 2, -4).

    The cosine over the first three is (2 + 2 + 4) / (3 * 3) = 8 / 9, over all four (8 - 16) / (5 * 5) = -0.32.
    """
    model = StackedModel(nn.Linear(4, 1, bias=False), torch.zeros(2, 4)).to(torch.device("cpu"), torch.float64)
    settings = COPFL(weights=weights, select_share=0.25, personal_bound=0.25)
    method = assembled(settings, Setup(model.info, worlds.training(), 2))
    zero, ids = {"weight": torch.zeros(1, 4, dtype=torch.float64)}, torch.arange(1)
    update, moved = (torch.tensor([v], dtype=torch.float64) for v in ((1, 2, 2, 4), (2, 1, 2, -4)))
    kept = method.init_clients(zero, ids) | {"cowa/round": torch.zeros(1, dtype=torch.int32)}  # received zeros then
    down = method.download(method.init_server({"weight": -moved}), method.init_known(zero, ids), rnd(2))
    local = method.start(kept, tree.received(down, 1), rnd(2))
    local.params["weight"] = local.params["weight"] - update
    sent = method.upload(local, rnd(2))
    assert tree.masks(sent)["weight"].tolist() == [[[True, True, True, False]]]
    assert float(tree.values(sent)["cowa/score"]) - 1 == pytest.approx(expected)  # P_n was not measured: it is 1


def test_alone_in_its_last_round_a_client_has_nobody_to_be_compared_with() -> None:
    method = tiny("cowa-gradient")
    server, kept, known = first_round(method)
    known = known | {"cowa/score": torch.tensor([4.0, 0.0], dtype=torch.float64)}  # all of the sum of 4
    _, sent = session(method, kept, method.download(server, known, rnd(1)), rnd(1), vector((1, 1), (1, 1)))
    assert float(sent["cowa/score"][0]) == 1.0


# P


def others(method: Algorithm, kept: Params, down: Download, rnd: Round) -> Params:
    """w_{-n} of each client, as it works it out when a session begins."""
    assert isinstance(method, Contribution)
    local = method.start(kept, tree.received(down, tree.rows(kept)), rnd)
    return tree.under(method.mine(local.fixed), "others")


def test_without_the_client_the_model_is_the_others() -> None:
    """((-0.25, -1.5) - 0.25 (-1, 0)) / 0.75 = (0, -2), and ((-0.25, -1.5) - 0.75 (0, -2)) / 0.25 = (-1, 0)."""
    method = tiny("cowa")
    server, kept, known = first_round(method)
    found = others(method, kept, method.download(server, known, rnd(1)), rnd(1))["weight"]
    torch.testing.assert_close(found, vector((0, -2), (-1, 0)))


def test_where_the_server_sent_nothing_the_others_model_has_the_clients_own_weight() -> None:
    """It counted 0.25 with (-1, -3); of (-0.25, 5) the server sent the first: (-0.25 + 0.25) / 0.75 = 0, and 5."""
    yes, mine = (
        torch.ones(1, 1, 2, dtype=torch.bool),
        {"received/weight": vector((0, 0)), "sent/weight": vector((-1, -3))},
    )
    kept = mine | {"had/weight": yes, "where/weight": yes}
    got, share = {"weight": torch.tensor([[[True, False]]])}, torch.tensor([0.25], dtype=torch.float64)
    found = tiny("cowa")._others(kept, {"weight": vector((-0.25, 5))}, got, share, {})
    torch.testing.assert_close(found["weight"], vector((0, 5)))


def second_round(method: Contribution, server: Params, kept: Params, known: Params) -> tuple[Params, Params, Params]:
    """The second client alone sends (3, 4), so the server then is there."""
    one = slice(1, 2)
    down = method.download(server, tree.take(known, one), rnd(1))
    mine, sent = session(method, tree.take(kept, one), down, rnd(1), vector((3, 4)))
    weights = torch.tensor([2.0], dtype=torch.float64)
    sums = {n: t.sum(0) for n, t in method.summands(dict(sent), weights, rnd(1)).items()}
    told = method.remember(tree.take(known, one), dict(sent), weights, rnd(1))
    kept, known = (tree.join([tree.take(a, slice(1)), b]) for a, b in ((kept, mine), (known, told)))
    server = method.aggregate(server, sums, rnd(1))
    assert server["weight"].tolist() == [[3, 4]]
    return server, kept, known


def test_who_missed_the_last_round_takes_the_received_model_for_the_others() -> None:
    """And who was alone in it the model before, for nobody else made the newest one: (-0.25, -1.5)."""
    method = tiny("cowa")
    server, kept, known = second_round(method, *first_round(method))
    found = others(method, kept, method.download(server, known, rnd(2)), rnd(2))["weight"]
    torch.testing.assert_close(found, vector((3, 4), (-0.25, -1.5)))


def test_after_a_pause_the_others_moved_from_where_the_client_last_began() -> None:
    """From (0, 0) to (3, 4), a move of (-3, -4); an update of (4, 3) has a cosine of -24 / 25 with it."""
    method = tiny("cowa-gradient")
    server, kept, known = second_round(method, *first_round(method))
    down = method.download(server, known, rnd(2))
    _, sent = session(method, kept, down, rnd(2), server["weight"] - vector((4, 3), (1, 1)))
    assert sent["cowa/score"].tolist() == pytest.approx([1.96, 1.0])  # alone in its last round: nobody moved


def test_rounds_in_which_nobody_uploads_take_no_upload_out_of_the_model() -> None:
    """The newest aggregation counts, not the newest round: two rounds later w_{-n} is what it was."""
    method = tiny("cowa")
    server, kept, known = first_round(method)
    found = others(method, kept, method.download(server, known, rnd(3)), rnd(3))["weight"]
    torch.testing.assert_close(found, vector((0, -2), (-1, 0)))


def test_a_server_rate_of_a_half_leaves_half_of_the_model_before() -> None:
    """From (2, 2) uploads (-1, 0) and (0, -2) that count 1 and 3 give the mean (-0.25, -1.5) and (0.875, 0.25).

    Without the first it is half way from (2, 2) to (0, -2), that is (1, 0); without the second (0.5, 1).
    """
    method = tiny("cowa", server_lr=0.5)
    server, kept, known = first_round(method, begin=2.0)
    assert server["weight"].tolist() == [[0.875, 0.25]]
    found = others(method, kept, method.download(server, known, rnd(1)), rnd(1))["weight"]
    torch.testing.assert_close(found, vector((1, 0), (0.5, 1)))


RECOMPUTED: dict[str, Algorithm] = {
    "fedavg": FedAvg(weights="cowa"),
    "fedrep": FedRep(weights="cowa"),
    "fedpac": FedPAC(weights="cowa"),
    "co-pfl": COPFL(select_share=0.2, lr=0.02),
    "co-pfl, literal": COPFL(select_share=0.05, lr=0.02, server_rule="literal"),
    "fedselect": FedSelect(select_interval=1, weights="cowa"),
    "feddst": FedDST(readjust_share=0.3, readjust_interval=1, readjust_until=1.0, weights="cowa"),
    "dm-pfl": DMPFL(readjust_share=0.3, readjust_interval=1, iterations=1, weights="cowa"),
}


def stepped(sim: Simulation) -> tuple[Tensor, list[Params]]:
    """Play a round; the clients of it, and what its aggregation gives without each of them."""
    number, ids, done = checks.rehearsed(sim)
    method, server, known = sim.algorithm, sim.server, sim.known.gather(ids)
    assert isinstance(method, Contribution)
    examples = sim.federation.sizes("train")[ids].double()
    weights = method.weigh(server, known, done.upload, examples, number)
    found = []
    for i in range(len(ids)):
        rest = torch.tensor([j for j in range(len(ids)) if j != i])
        sent = method.theirs(tree.rows_of(done.upload, rest))
        terms = method.base.summands(sent, weights[rest], number)
        sums = {n: t.sum(0, dtype=torch.float64) for n, t in terms.items()}
        found.append(method.base.aggregate(method.theirs(server), sums, number))
    sim.step()
    return ids, found


@pytest.mark.parametrize("rate", [1.0, 0.6])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_the_others_model_is_the_aggregation_without_the_client(name: str, rate: float) -> None:
    """Done again by the method's own server, from all uploads but one, after each of three rounds.

    Where a mask is elected its weights are compared, and with another rate than 1 where the client had the old ones.
    The bound is that of rounding: a share is below 0.7 here, or 1, so a rounding error grows threefold.
    """
    sim = worlds.simulation(RECOMPUTED[name], join_ratio=1.0, server_lr=rate, num_rounds=8)
    compared = different = 0
    for _ in range(3):
        ids, without = stepped(sim)
        number, kept = Round(sim.schedule[sim.played], 0.1), sim.store.gather(ids)
        mine, down = tree.under(kept, "cowa"), sim.download(ids, number)
        found = others(sim.algorithm, kept, down, number)
        got = tree.masks(tree.received(down, len(ids)))
        for n, w in found.items():
            for i, server in enumerate(without):
                at = mine[f"where/{n}"][i] & (got[n][i] if n in got else True)
                if f"mask/{n}" in server:
                    at = at & server[f"mask/{n}"]
                at = at & mine[f"had/{n}"][i] if rate != 1.0 else at
                torch.testing.assert_close(w[i][at], server[n][at], rtol=0, atol=1e-13)
                compared, different = compared + int(at.sum()), different + int((w[i] != sim.server[n])[at].sum())
    assert different > 0.5 * compared > 0 or name == "co-pfl, literal"  # which freezes most positions
    assert different > 0


@pytest.mark.parametrize("rule", ["renormalised", "literal"])
@pytest.mark.parametrize("share", [0.0, 0.1])
@pytest.mark.parametrize("weights", ["cowa", "cowa-all"])
def test_scores_are_those_of_the_slow_reference(weights: str, share: float, rule: str) -> None:
    """G_n and P_n with w_{-n} aggregated once more, client by client and position by position; `share` 0: plain means.

    Both sides train in float64; 1e-11 is some thousand roundings, in a hundred steps.
    """
    settings: dict[str, Any] = {"weights": weights, "select_share": share, "server_rule": rule}
    module, federation = world("mlp")
    training = dataclasses.replace(TRAINING, lr=0.02, join_ratio=0.8, num_rounds=4, server_lr=0.9)
    slow = reference.COPFL(module, federation, training, **settings)
    fast = Simulation(
        federation, StackedModel(module, federation.source.x[:2]), COPFL(**settings), training, worlds.QUIET
    )
    for stage in fast.schedule:
        slow.play(stage.number)
        fast.step()
        down = fast.download(fast.everybody, fast.now)
        found = others(fast.algorithm, checks.everyone(fast), down, fast.now)
        scores = fast.known.gather(fast.everybody)["cowa/score"]
        for n, member in enumerate(slow.members):
            mine = torch.cat([found[name][n].flatten() for name in slow.names])
            torch.testing.assert_close(mine, slow.others(n), rtol=0, atol=1e-11)
            wanted = 0.0 if member.last is None else member.last.score
            assert float(scores[n]) == pytest.approx(wanted, abs=1e-11)


def test_the_first_prediction_score_is_the_loss_of_the_initial_model() -> None:
    sim = worlds.simulation(FedAvg(weights="cowa-prediction"), **ALL)
    sim.step()
    found = sim.known.gather(sim.everybody)["cowa/score"]
    for c in range(6):
        loss = checks.cross_entropy(dict(sim.model.initial), *checks.rows_of(sim, c))
        assert float(found[c]) == pytest.approx(float(loss))


def test_the_prediction_score_is_a_mean_over_examples_not_over_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swept five at a time: 28, 6, 16, 10, 3 and 22 examples, of which the last batch has 3, 1, 1, 5, 3 and 2."""
    monkeypatch.setattr("personafl.data.batches.SWEEP", 5)
    sim = worlds.simulation(FedAvg(weights="cowa-prediction"), **ALL)
    sim.step()
    found = sim.known.gather(sim.everybody)["cowa/score"]
    uneven = 0
    for c in range(6):
        x, y = checks.rows_of(sim, c)
        each = torch.nn.functional.cross_entropy(checks.outputs(dict(sim.model.initial), x), y, reduction="none")
        assert float(found[c]) == pytest.approx(float(each.mean()), abs=1e-12)
        of_batches = torch.stack([part.mean() for part in each.split(5)]).mean()
        uneven += abs(float(of_batches - each.mean())) > 1e-4
    assert uneven == 4  # all but the two whose batches are of one size would be told otherwise


def test_the_second_prediction_score_is_the_loss_of_the_others_model() -> None:
    sim = worlds.simulation(FedAvg(weights="cowa-prediction"), **ALL)
    _, ids, done = checks.rehearsed(sim)
    sim.step()
    alpha = sim.download(ids, sim.now).own["cowa/share"]
    server = {n: sim.server[n].clone() for n in sim.model.info.shapes}
    sim.step()
    found = sim.known.gather(ids)["cowa/score"]
    for i, c in enumerate(ids.tolist()):
        a = float(alpha[i])  # type: ignore[index]
        others = {n: (w - a * done.local.params[n][i]) / (1 - a) for n, w in server.items()}
        assert float(found[i]) == pytest.approx(float(checks.cross_entropy(others, *checks.rows_of(sim, c))))


class Noisy(nn.Module):
    """An MLP whose outputs in training depend on the rest of the batch and on draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
        statistics = self.layers[1]
        assert isinstance(statistics, nn.BatchNorm1d)
        with torch.no_grad():
            statistics.get_buffer("running_mean").copy_(torch.linspace(-1, 1, 8))
            statistics.get_buffer("running_var").copy_(torch.linspace(0.5, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.parametrize("method", [FedAvg(weights="cowa-prediction"), COPFL(weights="cowa-prediction", lr=0.02)])
def test_the_prediction_score_is_measured_in_evaluation_mode(method: Algorithm) -> None:
    """Without dropout, by running statistics: the client's own where these stay with it. It changes none of them."""
    torch.manual_seed(0)
    module, fed = Noisy(), worlds.federation(sizes=(37, 12, 21, 14, 8, 30))
    sim = worlds.simulation(method, fed=fed, model=StackedModel(module, fed.source.x[:2]), local_epochs=1, **ALL)
    module = module.double().eval()
    for _ in range(2):
        begin = others(sim.algorithm, checks.everyone(sim), sim.download(sim.everybody, sim.now), sim.now)
        statistics = sim.deployed_models(sim.model, sim.everybody)
        sim.step()
        scores = sim.known.gather(sim.everybody)["cowa/score"]
        for c in range(6):
            x, y = checks.rows_of(sim, c)
            mine = {n: begin.get(n, statistics[n])[c] for n in sim.model.info.shapes}
            out = torch.func.functional_call(module, mine, (x.double(),))
            assert float(scores[c]) == pytest.approx(float(nn.functional.cross_entropy(out, y)), abs=1e-10)


def test_the_score_is_the_sum_of_both() -> None:
    scores = {}
    for weights in ("cowa", "cowa-gradient", "cowa-prediction"):
        sim = worlds.simulation(FedAvg(weights=weights), num_rounds=1, **ALL)
        sim.step()
        scores[weights] = sim.known.gather(sim.everybody)["cowa/score"]
    torch.testing.assert_close(scores["cowa"], scores["cowa-gradient"] + scores["cowa-prediction"])


# What they are for


def test_the_server_averages_by_score() -> None:
    sim = worlds.simulation(FedAvg(weights="cowa"), **ALL)
    sim.step()
    _, ids, done = checks.rehearsed(sim)
    sim.step()
    score = sim.known.gather(ids)["cowa/score"]
    assert torch.equal(score, tree.values(done.upload)["cowa/score"])
    w = tree.values(done.upload)["head.weight"]
    torch.testing.assert_close(sim.server["head.weight"], (score.view(-1, 1, 1) * w).sum(0) / score.sum())
    assert float(sim.server["cowa/totals"][1]) == pytest.approx(float(score.sum()))


def test_a_client_is_told_its_share_of_the_newest_model_and_none_when_it_was_away() -> None:
    sim = worlds.simulation(FedAvg(weights="cowa"), num_rounds=6)
    for _ in sim.schedule:
        _, ids, done = checks.rehearsed(sim)
        score = tree.values(done.upload)["cowa/score"]
        sim.step()
        newest = dict(zip(ids.tolist(), (score / score.sum()).tolist(), strict=True))
        told = sim.download(sim.everybody, sim.now).own["cowa/share"]
        assert told.tolist() == pytest.approx([newest.get(c, 0.0) for c in range(6)])  # type: ignore[union-attr]


def test_contribution_travels_as_one_number_each_way() -> None:
    sim = worlds.simulation(FedAvg(weights="cowa"))
    number, ids, done = checks.rehearsed(sim)
    down = sim.download(ids, number)
    assert set(down.own) == {"cowa/share"}
    assert set(down.shared) == set(sim.model.info.shapes)
    assert done.upload.keys() - set(sim.model.info.shapes) == {"cowa/score"}
    assert done.upload["cowa/score"].shape == (3,)


def test_the_weight_behind_a_position_travels_where_not_all_sent_it_to_those_who_sent_some() -> None:
    """A number of the model's type for each such position, its mask, and nothing of it to those who were away."""
    sim = worlds.simulation(COPFL(select_share=0.2, lr=0.02))
    assert not any("coverage" in n for n in sim.download(sim.everybody, sim.now).own)
    _, ids, done = checks.rehearsed(sim)
    sim.step()
    score, own = tree.values(done.upload)["cowa/score"], sim.download(sim.everybody, sim.now).own
    sharing = tree.masks(done.upload)
    for n, m in sharing.items():
        weight = (m * score.view(-1, *[1] * (m.dim() - 1))).sum(0) / score.sum()
        some = m.any(0) & ~m.all(0)
        assert some.any()
        sent = own[f"cowa/coverage/{n}"]
        assert isinstance(sent, Masked)
        for c in range(6):
            assert torch.equal(sent.mask[c], some if c in ids.tolist() else torch.zeros_like(some))
            torch.testing.assert_close(sent.values[c], torch.where(sent.mask[c], weight, 0))


def test_under_the_literal_rule_the_mask_of_what_nobody_keeps_travels() -> None:
    sim = worlds.simulation(COPFL(select_share=0.05, lr=0.02, server_rule="literal"))
    _, _, done = checks.rehearsed(sim)
    sim.step()
    down = sim.download(sim.everybody, sim.now)
    assert set(down.own) == {"cowa/share"}
    for n, m in tree.masks(done.upload).items():
        assert torch.equal(down.shared[f"cowa/coverage/{n}"], m.all(0))  # type: ignore[arg-type]


def test_scores_need_sums_only() -> None:
    assert not tiny("cowa").needs_uploads()


@pytest.mark.parametrize(
    "method",
    [FedAvg(), FedRep(), DMPFL(readjust_share=0.3, readjust_interval=1, iterations=1)],
    ids=["avg", "rep", "dm"],
)
def test_chunks_of_a_cohort_do_not_matter(method: Algorithm) -> None:
    algorithm = dataclasses.replace(method, weights="cowa")
    checks.assert_a_stack_equals_each_client_alone(algorithm, num_rounds=4, local_epochs=1, batch_size=8)


def test_other_weights_make_another_model() -> None:
    a, b = checks.played(FedAvg(weights="cowa"), num_rounds=3), checks.played(FedAvg(), num_rounds=3)
    assert not torch.allclose(a.server["head.weight"], b.server["head.weight"])


@pytest.mark.parametrize("weights", ["cowa", "cowa-gradient", "cowa-prediction", "cowa-all"])
def test_who_sends_nothing_cannot_be_weighed(weights: str) -> None:
    with pytest.raises(ValueError, match=f"weights='{weights}': LocalOnly sends nothing to be weighed"):
        worlds.simulation(LocalOnly(weights=weights))


@pytest.mark.parametrize("weights", ["cowa", "cowa-prediction"])
def test_the_rehearsal_of_a_sparse_method_keeps_its_mask(weights: str) -> None:
    """Without training nobody has a score; they then count alike, and what travels is what else would."""
    costs = [
        estimate_cost(FedDST(weights=w), worlds.model(), worlds.training(), num_clients=6, examples=14)
        for w in (weights, "uniform")
    ]
    assert costs[0].down_bytes == costs[1].down_bytes + 8 * 0.5 * number_and_name("cowa/share")
    assert costs[0].up_bytes == costs[1].up_bytes + 8 * 0.5 * number_and_name("cowa/score")


def number_and_name(name: str) -> int:
    """Bytes of a float64 without an axis: length and name, type, value; in half of eight rounds."""
    return 2 + len(name) + 3 + 8


def test_a_stage_without_uploads_keeps_what_the_method_keeps_and_nothing_of_the_part() -> None:
    """DM-PFL's personal refinement, the last of four rounds."""
    sim = worlds.simulation(
        DMPFL(readjust_share=0.3, readjust_interval=1, iterations=1, weights="cowa"), num_rounds=4, join_ratio=1.0
    )
    for _ in range(3):
        sim.step()
    before = checks.everyone(sim)
    sim.step()
    after = checks.everyone(sim)
    assert not sim.schedule[3].up
    refined = before["aux/refined"], after["aux/refined"]
    assert [t.tolist() for t in refined] == [[0] * 6, [1] * 6]
    assert not torch.equal(before["personal/layers.1.weight"], after["personal/layers.1.weight"])
    checks.assert_agree(tree.under(before, "cowa"), tree.under(after, "cowa"))
