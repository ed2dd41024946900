"""FedPeWS, and what it has in common with FedPeWS-Fixed: subnetworks first, then the base method."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from personafl import (
    DMPFL,
    FLDA,
    Algorithm,
    Ditto,
    FedAvg,
    FedFu,
    FedPeWS,
    FedPeWSFixed,
    FedProx,
    Inherit,
    Simulation,
    StackedModel,
    config,
)
from personafl.core import tree
from personafl.core.local_work import ClientState, LocalWork, whole
from personafl.core.types import Batch, Masked, Round, Task
from personafl.data import batches
from personafl.engine.dry_run import estimate_cost
from personafl.methods.warmup import Gated
from personafl.sparse import masks
from tests import checks, worlds

HIDDEN = {"layers.0.weight": 12, "layers.1.weight": 8}  # the small MLP's units, 6 - 12 - 8 - 3
DM = DMPFL(readjust_share=0.3, readjust_interval=1, iterations=1)
ALL_ON = {"score_init": 50.0, "score_lr": 0.0}  # sigma(50) is 1 in float64


def warmed(sim: Simulation, what: str = "x") -> dict[str, Tensor]:
    return tree.under(sim.server, f"warm/{what}")


def at_work(sim: Simulation) -> tuple[ClientState, Batch]:
    """The cohort of the next round before its first step, with scores that differ, and a minibatch of it."""
    stage = sim.schedule[sim.played]
    rnd, ids = Round(stage, 0.1), sim.cohort(stage)
    local = sim.algorithm.start(sim.store.gather(ids), tree.received(sim.download(ids, rnd), len(ids)), rnd)
    draw = torch.Generator().manual_seed(1)
    scores = {
        n: torch.randn(t.shape, generator=draw, dtype=torch.float64)
        for n, t in local.params.items()
        if n.startswith("score/")
    }
    (batch, _), *_ = batches.in_order(sim.federation.examples("train", ids), 5, torch.float64)
    return dataclasses.replace(local, params=local.params | scores), batch


def slopes(sim: Simulation, local: ClientState, batch: Batch, names: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of Procedure I and its gradient."""
    leaves = {n: local.params[n].detach().clone().requires_grad_() for n in names}
    seen = dataclasses.replace(local, params=local.params | leaves)
    loss = sim.algorithm._scored(sim.task, seen, batch)  # type: ignore[attr-defined]
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss.sum(), list(leaves.values())), strict=True))


# Straight through


def both_forms() -> dict[str, tuple[Simulation, ClientState, Batch]]:
    sims = {
        f: worlds.simulation(FedPeWS(ste=f, diversity_weight=0.0), join_ratio=1.0) for f in ("activation", "parameter")
    }
    return {f: (sim, *at_work(sim)) for f, sim in sims.items()}


def test_both_forms_have_the_same_loss_and_the_same_gradient_of_weights() -> None:
    found = {f: slopes(*given, list(worlds.model().info.shapes)) for f, given in both_forms().items()}
    (a, of_a), (b, of_b) = found["activation"], found["parameter"]
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    checks.assert_close(of_a, of_b)
    assert of_a["layers.0.weight"].abs().max() > 0


def test_the_forms_differ_in_the_gradient_of_scores() -> None:
    """By parameters an active unit has it twice, by what comes in and what goes out, and an inactive one not at all."""
    names = [f"score/{n}" for n in HIDDEN]
    given = both_forms()
    (_, by_activation), (_, by_parameter) = (slopes(*given[f], names) for f in ("activation", "parameter"))
    sim, local, batch = given["activation"]
    on = sim.algorithm._units(local, batch.keys)  # type: ignore[attr-defined]
    for n in HIDDEN:
        a, b = by_activation[f"score/{n}"], by_parameter[f"score/{n}"]
        torch.testing.assert_close(b[on[n]], 2 * a[on[n]], rtol=1e-10, atol=1e-12)
        assert not b[~on[n]].any()
        assert a[~on[n]].any()


def test_a_units_gradient_of_scores_by_hand() -> None:
    """sigma'(s) times the derivative of the loss in what multiplies the unit's activation, whatever was drawn."""
    sim, local, batch = both_forms()["activation"]
    _, found = slopes(sim, local, batch, ["score/layers.1.weight"])
    c = 0
    x, y = batch.x[c], batch.y[c]
    w = {n: local.params[n][c] for n in sim.model.info.shapes}
    on = {n: u[c].double() for n, u in sim.algorithm._units(local, batch.keys).items()}  # type: ignore[attr-defined]
    gate = on["layers.1.weight"].requires_grad_()
    h = (x @ w["layers.0.weight"].T + w["layers.0.bias"]).relu() * on["layers.0.weight"]
    h = (h @ w["layers.1.weight"].T + w["layers.1.bias"]).relu() * gate
    loss = nn.functional.cross_entropy(h @ w["head.weight"].T + w["head.bias"], y)
    odds = local.params["score/layers.1.weight"][c].sigmoid()
    expected = torch.autograd.grad(loss, gate)[0] * odds * (1 - odds)
    torch.testing.assert_close(found["score/layers.1.weight"][c], expected, rtol=1e-10, atol=1e-12)


def test_the_push_for_diversity_by_hand() -> None:
    """The gradient of -lambda |sigma(s) - theta|^2 is -2 lambda (sigma(s) - theta) sigma(s) (1 - sigma(s))."""
    names = [f"score/{n}" for n in HIDDEN]
    with_push, without = (worlds.simulation(FedPeWS(diversity_weight=w), join_ratio=1.0) for w in (3.0, 0.0))
    local, batch = at_work(with_push)
    loss, a = slopes(with_push, local, batch, names)
    plain, b = slopes(without, local, batch, names)
    apart = torch.zeros(6, dtype=torch.float64)
    for n in HIDDEN:
        p, theta = local.params[f"score/{n}"].sigmoid(), local.fixed[f"warm/others/{n}"]
        assert torch.equal(theta, torch.full_like(theta, 0.5))  # round one: sigma(0)
        torch.testing.assert_close(a[f"score/{n}"] - b[f"score/{n}"], -6.0 * (p - theta) * p * (1 - p))
        apart += (p - theta).square().sum(1)
    torch.testing.assert_close(loss, plain - 3.0 * apart)


def test_theta_is_the_mean_of_the_others_probabilities() -> None:
    sim = worlds.simulation(FedPeWS(warmup_share=0.5, score_lr=20.0), join_ratio=1.0)
    sim.step()
    sim.step()
    kept, ids = checks.everyone(sim), sim.everybody
    rnd = Round(sim.schedule[2], 0.1)
    local = sim.algorithm.start(kept, tree.received(sim.download(ids, rnd), 6), rnd)
    for n in HIDDEN:
        odds = kept[f"warm/score/{n}"].sigmoid()
        torch.testing.assert_close(warmed(sim, "theta")[n], odds.mean(0))
        for c in range(6):
            others = odds[[i for i in range(6) if i != c]].mean(0)
            torch.testing.assert_close(local.fixed[f"warm/others/{n}"][c], others)
        assert odds.std(0).max() > 0.01  # clients did part


def test_scores_outlive_rounds_and_do_not_travel_but_their_probabilities_do() -> None:
    sim = worlds.simulation(FedPeWS(warmup_share=0.5))
    _, _, done = checks.rehearsed(sim)
    beside = done.upload.keys() - set(sim.model.info.shapes)
    assert beside == {f"warm/change/{n}" for n in HIDDEN}
    sim.step()
    _, ids, done = checks.rehearsed(sim)
    for n, units in HIDDEN.items():
        odds = done.kept[f"warm/score/{n}"].sigmoid()
        before = sim.store.gather(ids)[f"warm/score/{n}"].sigmoid()
        assert odds.shape == (3, units)
        torch.testing.assert_close(tree.values(done.upload)[f"warm/change/{n}"], odds - before)


# Limits


@pytest.mark.parametrize("base", [FedAvg(), FedProx(proximal_weight=0.3), DM], ids=["fedavg", "fedprox", "dm-pfl"])
@pytest.mark.parametrize("warm_up", [FedPeWS, FedPeWSFixed])
def test_without_warm_up_it_is_its_base(warm_up: type[FedPeWS], base: Algorithm) -> None:
    options = {"num_rounds": 4, "local_epochs": 1, "lr_decay": 0.9}
    a, b = checks.played(warm_up(base=base, warmup_share=0.0), **options), checks.played(base, **options)
    checks.assert_agree(tree.without(a.server, "warm"), b.server)
    checks.assert_agree(tree.without(checks.everyone(a), "warm"), checks.everyone(b))
    checks.assert_agree(a.deployed_models(a.model, a.everybody), b.deployed_models(b.model, b.everybody))
    assert a.totals == b.totals


def test_with_all_units_on_the_warm_up_is_fedavg() -> None:
    a, b = worlds.simulation(FedPeWS(warmup_share=0.5, **ALL_ON)), worlds.simulation(FedAvg(weights="uniform"))
    for t in range(8):
        a.step()
        b.step()
        checks.assert_close(b.server, warmed(a) if t < 4 else a.server)


def test_with_all_units_on_the_warm_up_of_fedprox_is_fedprox() -> None:
    prox = FedProx(proximal_weight=0.7, weights="uniform")
    a, b = (
        checks.played(FedPeWS(base=prox, warmup_share=0.7, **ALL_ON), num_rounds=4),
        checks.played(prox, num_rounds=4),
    )
    checks.assert_close(b.server, a.server)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenOut(FedProx):
    """FedProx whose pull is part of its loss."""

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        def near(task: Task, local: ClientState, batch: Batch) -> Tensor:
            anchor = tree.under(local.fixed, "anchor")
            far = tree.squared_distance(tree.select(local.params, anchor), anchor)
            return task.loss(local.params, batch) + self.proximal_weight / 2 * far

        return [self.usual_turn(whole(self.info.parameters), loss=near)]


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.9, "weight_decay": 0.05}, {"grad_clip": 0.3}], ids=str)
def test_a_pull_moves_the_subnetwork_that_is_on_and_nothing_else(changes: dict[str, float]) -> None:
    """Units are on with probability a half, so most of the model stands still in a step, and is not pulled."""
    options = {"num_rounds": 4, "join_ratio": 1.0, **changes}
    made = [
        checks.played(FedPeWS(base=kind(proximal_weight=0.7), warmup_share=0.7, score_init=0.0), **options)
        for kind in (FedProx, WrittenOut)
    ]
    checks.assert_close(made[1].server, made[0].server)


def test_a_server_rate_of_a_half_goes_half_way() -> None:
    a, b = (worlds.simulation(FedPeWS(warmup_share=0.5), server_lr=r, num_rounds=2) for r in (1.0, 0.5))
    a.step()
    b.step()
    checks.assert_close({n: (t + a.model.initial[n]) / 2 for n, t in warmed(a).items()}, warmed(b))


def test_a_unit_off_everywhere_keeps_all_its_weights() -> None:
    sim = worlds.simulation(FedPeWS(warmup_share=0.5, score_lr=0.0), join_ratio=1.0)
    kept = {n: t.clone() for n, t in checks.everyone(sim).items()}
    kept["warm/score/layers.0.weight"][:, 3] = -100.0
    sim.store.scatter(sim.everybody, kept)
    for _ in range(4):
        sim.step()
    x, first = warmed(sim), sim.model.initial
    for n, at in (("layers.0.weight", (3,)), ("layers.0.bias", (3,)), ("layers.1.weight", (slice(None), 3))):
        assert torch.equal(x[n][at], first[n][at])
    rest = [i for i in range(12) if i != 3]
    assert (x["layers.0.weight"][rest] != first["layers.0.weight"][rest]).all()


def test_defaults_are_the_papers() -> None:
    """Eqs. 2 to 4 divide by N and by the number of masks, in the warm-up and after it."""
    assert FedPeWS().ste == "parameter"  # x G(s), as printed
    for method in (FedPeWS(), FedPeWSFixed()):
        assert (method.weights, method.base.weights) == ("uniform", "uniform")
    opened = config.load({"algorithms": [{"name": "fedpews"}]}, ("fedpews.base.lr=0.3",)).algorithms[0].algorithm
    assert opened.base == FedAvg(weights="uniform", lr=0.3)  # type: ignore[attr-defined]


@pytest.mark.parametrize("weights", ["uniform", "examples"])
def test_a_mean_is_over_those_who_had_the_unit(weights: str) -> None:
    sim = worlds.simulation(FedPeWS(warmup_share=0.5, weights=weights), join_ratio=1.0)
    _, ids, done = checks.rehearsed(sim)
    size = sim.federation.sizes("train")[ids].double()
    size = torch.ones_like(size) if weights == "uniform" else size
    sim.step()
    for n in sim.model.info.parameters:
        sent = done.upload[n]
        mask = sent.mask if isinstance(sent, Masked) else torch.ones_like(sent, dtype=torch.bool)
        weight = mask * size.view(-1, *[1] * (mask.dim() - 1))
        total = weight.sum(0)
        mean = (weight * tree.values(done.upload)[n]).sum(0) / total.clamp(min=1)
        torch.testing.assert_close(warmed(sim)[n], torch.where(total > 0, mean, sim.model.initial[n]))
    assert not isinstance(done.upload["head.bias"], Masked)  # all have the output bias


def test_what_is_sent_is_drawn_once_more() -> None:
    """The mask of the upload is not that of the last step; its units are those of the client's own stream."""
    sim = worlds.simulation(FedPeWS(warmup_share=0.5))
    _, _, done = checks.rehearsed(sim)
    assert done.local.keys is not None
    on = sim.algorithm._units(done.local, done.local.keys)  # type: ignore[attr-defined]
    assert torch.equal(done.upload["layers.0.bias"].mask, on["layers.0.weight"])  # type: ignore[union-attr]
    assert 0.2 < torch.cat([u.flatten() for u in on.values()]).double().mean() < 0.8


# What it costs: the small MLP's layers have 72, 96 and 24 weights, and 12, 8 and 3 biases


FOUR = (16,) * 4  # clients of 12 training rows; with fixed shares 3 and 2 units each


def test_a_learnt_warm_up_costs_its_expected_subnetworks_twice() -> None:
    """Half of all units are on at s = 0: half of the outer layers' weights, a quarter of those between."""
    sim = worlds.simulation(FedPeWS(warmup_share=0.5), fed=worlds.federation(sizes=FOUR), join_ratio=1.0)
    sim.step()
    below, between, last = 2 * 72 / 2 + 12 / 2, 2 * 96 / 4 + 8 / 2, 2 * 24 / 2 + 3
    weights, scores = 3 * (below + between + last), 3 * (below + between) + 2 * last  # no score moves the last layer
    assert sim.totals.flops == 4 * 24 * (weights + scores)
    plain = checks.played(FedAvg(), fed=worlds.federation(sizes=FOUR), join_ratio=1.0, num_rounds=1)
    assert sim.totals.flops / plain.totals.flops == pytest.approx(0.75, abs=0.01)  # Appendix A: about once, or less


def test_units_that_are_rarely_on_cost_little() -> None:
    low, even = (
        checks.played(FedPeWS(warmup_share=0.5, score_init=s, score_lr=0.0), num_rounds=2).totals.flops
        for s in (-3.0, 0.0)
    )
    assert low < even


@pytest.mark.parametrize("method", [FedPeWSFixed(warmup_share=0.5), FedPeWS(warmup_share=0.5, score_lr=0.0)])
def test_a_rehearsal_of_the_warm_up_costs_what_the_run_costs(method: Algorithm) -> None:
    """Equal clients, all of them in every round; where units are drawn, the bytes of an upload are not told exactly."""
    sim = checks.played(method, fed=worlds.federation(sizes=FOUR), join_ratio=1.0)
    told = estimate_cost(method, worlds.model(), worlds.training(join_ratio=1.0), num_clients=4, examples=12)
    assert told.flops == sim.totals.flops / 4
    assert told.dense_flops == sim.totals.dense_flops / 4
    assert told.down_bytes == sim.totals.down_bytes / 4
    if isinstance(method, FedPeWSFixed):
        assert told.up_bytes == sim.totals.up_bytes / 4
        assert told.paper_mib * 2**20 == sim.totals.paper_bytes / 4


# Handing over


def test_rounds_of_warm_up_hand_over_then_base() -> None:
    """0.3 * 8 = 2.4: two rounds; the base has six of its own, in its own phases."""
    sim = worlds.simulation(FedPeWS(base=DM, warmup_share=0.3))
    plan = [(s.number, s.phase, s.who, s.up) for s in sim.schedule]
    assert plan[:4] == [
        (0, "warm-up", "sampled", True),
        (1, "warm-up", "sampled", True),
        (2, "hand-over", "all", False),
        (2, "masks", "sampled", True),
    ]
    assert [s.number for s in sim.schedule[3:]] == list(range(2, 8))
    assert all(s.phase != "hand-over" for s in worlds.simulation(FedPeWS(warmup_share=0.3)).schedule)  # nothing to give


def test_the_base_begins_with_the_warmed_up_model() -> None:
    sim = worlds.simulation(FedPeWS(warmup_share=0.3))
    sim.step()
    sim.step()
    checks.assert_agree(warmed(sim), tree.without(sim.server, "warm"))
    assert not torch.equal(sim.server["head.weight"], sim.model.initial["head.weight"])


def test_the_base_counts_its_own_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of eight rounds are warm-up: every hook of the base hears of its rounds 0 to 5."""
    heard: dict[str, list[int]] = {}
    hooks = ("download", "start", "turns", "upload", "keep", "weigh", "summands", "remember", "aggregate")

    def noting(hook: str) -> Callable[..., object]:
        real = getattr(Ditto, hook)

        def noted(self: Ditto, *args: Any) -> object:
            if not args[-1].predicting:
                heard.setdefault(hook, []).append(args[-1].number)
            return real(self, *args)

        return noted

    for hook in hooks:
        monkeypatch.setattr(Ditto, hook, noting(hook))
    checks.played(FedPeWS(base=Ditto(), warmup_share=0.3), local_epochs=1)
    assert heard == {hook: list(range(6)) for hook in hooks}


def test_the_servers_state_has_the_same_names_in_and_after_the_warm_up() -> None:
    sim = worlds.simulation(FedPeWS(base=DM, warmup_share=0.3), local_epochs=1)
    names = sim.server.keys()
    assert any(n.startswith("mask/") for n in names)
    for stage in sim.schedule:
        sim.step()
        assert sim.server.keys() == names, stage


def test_every_client_of_dm_pfl_begins_with_the_masks_of_the_warmed_up_model() -> None:
    sim = worlds.simulation(FedPeWS(base=DM, warmup_share=0.3))
    while sim.schedule[sim.played].phase != "hand-over":
        sim.step()
    x = warmed(sim)
    sim.step()
    kept, budget = checks.everyone(sim), DM.bind(sim.algorithm.setup).budget()
    changed = 0
    for n, k in budget.items():
        expected = masks.top_k(x[n].abs()[None], k)[0]
        assert torch.equal(sim.server[f"mask/{n}"], expected)
        assert torch.equal(kept[f"mask/{n}"], expected.expand(6, *expected.shape))
        assert torch.equal(kept[f"personal/{n}"], torch.where(expected, x[n], 0).expand(6, *expected.shape))
        changed += int((expected != masks.top_k(sim.model.initial[n].abs()[None], k)[0]).sum())
    assert changed > 0
    checks.assert_agree(tree.select(sim.server, x), x)


def test_the_base_never_hears_of_the_warm_up() -> None:
    """From the warmed-up model on, at the same rounds, it is the base run by itself."""
    sim = worlds.simulation(FedPeWS(warmup_share=0.5), lr_decay=0.9)
    plain = worlds.simulation(FedAvg(weights="uniform"), lr_decay=0.9)
    for _ in range(4):
        sim.step()
    plain.state.server, plain.state.played = dict(warmed(sim)), 4
    sim.run()
    plain.run()
    checks.assert_agree(tree.without(sim.server, "warm"), plain.server, 1e-12)


def test_the_learning_rate_goes_on_decaying() -> None:
    options = {"lr": 1.0, "lr_decay": 0.9, "lr_milestones": (1, 2, 5)}
    sim = worlds.simulation(FedPeWS(base=DM, warmup_share=0.3), **options)
    expected = worlds.training(**options)
    rates = [sim.algorithm.rate(s) for s in sim.schedule]
    assert rates == pytest.approx([expected.rate(s.number) for s in sim.schedule])
    assert rates[-1] == pytest.approx(0.9**7 * 0.001)


@pytest.mark.parametrize("warm_up", [FedPeWS, FedPeWSFixed])
def test_while_it_warms_up_clients_answer_by_the_servers_model(warm_up: type[FedPeWS]) -> None:
    """By all of it, also where only subnetworks travel for training."""
    sim = worlds.simulation(warm_up(base=DM, warmup_share=0.5))
    sim.step()
    common = sim.common()
    assert common is not None
    checks.assert_agree(tree.select(common, sim.model.info.shapes), tree.stack(warmed(sim), 1))
    ready = sim.deployed_models(sim.model, sim.everybody)
    checks.assert_agree(tree.select(ready, sim.model.info.shapes), tree.stack(warmed(sim), 6))


@pytest.mark.parametrize(
    "base",
    [FedFu(), FLDA(), FedAvg(inherit=Inherit(answers="both")), FedAvg(inference="per-sample")],
    ids=["fedfu", "flda", "inherited", "adaptive"],
)
def test_while_it_warms_up_any_bases_clients_answer_by_the_servers_model(base: Algorithm) -> None:
    """Also those of a base whose clients later answer by several models."""
    sim = worlds.simulation(FedPeWS(base=base, warmup_share=0.5), num_rounds=4)
    x = sim.federation.source.x[:4]
    sim.step()
    ready = sim.deployed_models(sim.model, sim.everybody)
    found = sim.algorithm.predict(sim.model, ready, x.expand(6, *x.shape))
    torch.testing.assert_close(found[0], checks.outputs(warmed(sim), x).detach())
    sim.run()  # and then by its own
    assert (
        sim.algorithm.predict(sim.model, sim.deployed_models(sim.model, sim.everybody), x.expand(6, *x.shape))
        .isfinite()
        .all()
    )


def test_after_the_warm_up_traffic_is_the_bases() -> None:
    sim = worlds.simulation(FedPeWS(warmup_share=0.5))
    for _ in range(4):
        sim.step()
    rnd, ids, done = checks.rehearsed(sim)
    assert set(done.upload) == set(sim.download(ids, rnd).shared) == set(sim.model.info.shapes)


def test_a_base_whose_loss_needs_more_than_the_model_lends_none() -> None:
    """FedFu's loss looks at a fusion that only its own rounds have."""
    with_fusion, plain = (
        worlds.simulation(FedPeWS(base=b, warmup_share=0.5), num_rounds=4) for b in (FedFu(), FedAvg())
    )
    for sim in (with_fusion, plain):
        sim.step()
        sim.step()
    checks.assert_agree(warmed(with_fusion), warmed(plain))
    with_fusion.run()
    assert {"fusion/weight", "fusion/bias"} <= with_fusion.server.keys()


# Refusals


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())  # type: ignore[no-any-return]


class TwoModels(nn.Module):
    """Two layers on the same input: no chain."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(6, 4), nn.Linear(6, 5), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.left(x), self.right(x)], 1).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            Normed,
            "masks the units of a chain of linear and convolution layers; this model has parameters elsewhere: norm",
        ),
        (TwoModels, "the 6 inputs of right.weight are not those of left.weight's 4 units; this model is no chain"),
        (lambda: nn.Linear(6, 3), "this model has 1 layer"),
    ],
)
@pytest.mark.parametrize("warm_up", [FedPeWS, FedPeWSFixed])
def test_models_that_are_no_chain_are_refused(warm_up: type[FedPeWS], module, message: str) -> None:
    model = StackedModel(module(), worlds.federation().source.x[:2])
    with pytest.raises(ValueError, match=message):
        worlds.simulation(warm_up(), model=model)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedPeWS(warmup_share=1.0), r"warmup_share=1.0: must be in \[0, 1\)"),
        (lambda: FedPeWS(diversity_weight=-1.0), "must not be negative"),
        (lambda: FedPeWS(ste="unit"), "possible are activation, parameter"),
    ],
)
def test_impossible_settings_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_gated_model_multiplies_hidden_units_only() -> None:
    model = worlds.model().to(torch.device("cpu"), torch.float64)
    params = tree.stack(model.initial, 1)
    x = worlds.federation().source.x[:4].double()[None]
    on = {n: torch.ones(1, k, dtype=torch.float64) for n, k in HIDDEN.items()}
    torch.testing.assert_close(Gated(model, model.info.layers, on)(params, x), model(params, x))
    off = on | {"layers.1.weight": torch.zeros(1, 8, dtype=torch.float64)}
    for inputs_only in (True, False):
        out = Gated(model, model.info.layers, off, inputs_only=inputs_only)(params, x)
        torch.testing.assert_close(out, params["head.bias"].unsqueeze(1).expand(1, 4, 3))


@pytest.mark.parametrize(
    ("own", "recipe"),
    [
        ({}, {"momentum": 0.9}),
        ({}, {"weight_decay": 0.5}),
        ({}, {"grad_clip": 0.001}),
        ({}, {"optimizer": "adam"}),
        ({"momentum": 0.9, "weight_decay": 0.5, "grad_clip": 0.001}, {}),
        ({"optimizer": "adam"}, {}),
    ],
    ids=str,
)
def test_scores_take_plain_steps_whatever_optimiser_trains_the_weights(
    own: dict[str, object], recipe: dict[str, object]
) -> None:
    """Procedure I is s - eta_s grad. Weights stand still here (1e-300 is less than any of them can see)."""

    def scores(own: dict[str, object], recipe: dict[str, object]) -> dict[str, Tensor]:
        method = FedPeWS(warmup_share=0.5, score_lr=0.5, **own)
        sim = worlds.simulation(method, **({"num_rounds": 2, "lr": 1e-300, "batch_size": 10} | recipe))
        sim.step()
        for n, t in warmed(sim).items():
            torch.testing.assert_close(t, sim.model.initial[n], rtol=1e-13, atol=0)  # but for the rounding of the mean
        return {n: t for n, t in sim.store.gather(sim.everybody).items() if n.startswith("warm/score/")}

    plain, found = scores({}, {}), scores(own, recipe)
    assert any(bool(t.any()) for t in plain.values())  # they begin at 0
    assert all(torch.equal(found[n], t) for n, t in plain.items())
