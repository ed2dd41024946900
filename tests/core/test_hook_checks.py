"""What authors' hooks return is compared with the model, at the first door it comes to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from personafl import Evaluation, FedAvg, Simulation, UserError
from personafl.core.local_work import ClientState, GradientPass, LocalWork, whole
from personafl.core.types import Download, Params, Payload, Round, Stage
from personafl.deployment.federation_spec import build_parts
from personafl.engine import admission, dry_run
from personafl.engine.aggregation import next_server, summed
from tests import worlds
from tests.deployment.test_federation_spec import world
from tests.deployment.worlds import recipe

HAS = r"The model has layers.0.weight, layers.0.bias, .*, head.weight, head.bias"


def changed(**hooks: Callable[..., Any]) -> FedAvg:
    """FedAvg with other hooks, each given what FedAvg returns and the hook's arguments."""
    return type("Mine", (FedAvg,), {name: _around(name, hook) for name, hook in hooks.items()})()


def _around(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: FedAvg, *arguments: Any) -> Any:
        return hook(getattr(super(type(self), self), name)(*arguments), *arguments)

    return method


def played(method: FedAvg, rounds: int = 1) -> Simulation:
    sim = worlds.simulation(method, num_rounds=rounds)
    sim.run()
    return sim


def moving(name: str) -> Callable[..., list[LocalWork]]:
    def turns(usual: list[LocalWork], *_: object) -> list[LocalWork]:
        return [type(usual[0])(moves=whole([name]), steps=1)]  # type: ignore[call-arg]

    return turns


def probing(usual: list[LocalWork], *_: object) -> list[LocalWork]:
    return [GradientPass(["head.wieght"], lambda local, grads: local), *usual]


def without(params: Params, name: str) -> Params:
    return {n: t for n, t in params.items() if n != name}


WRONG = [
    ({"private": lambda names: {"head.wieght"}}, rf"Mine.private: head.wieght matches no tensor of the model. {HAS}"),
    ({"private": lambda names: "head.weight"}, r"Mine.private must return a set of names; it returned 'head.weight'"),
    (
        {"private": lambda names: ["head.weight"]},
        r"Mine.private must return a set of names; it returned \['head.weight'",
    ),
    ({"stays_on_client": lambda names: {"fc"}}, rf"Mine.stays_on_client: fc matches no tensor of the model. {HAS}"),
    ({"travels": lambda names: names | {"fc"}}, rf"Mine.travels: fc matches no tensor of the model. {HAS}"),
    ({"turns": moving("fc")}, r"Mine.turns moves fc, which clients do not have. They have layers.0.weight, "),
    ({"turns": probing}, r"Mine.turns moves head.wieght, which clients do not have"),
    (
        {"upload": lambda sent, *_: sent | {"head.wieght": sent["head.weight"]}},
        rf"Mine.upload: head.wieght matches no tensor of the model. {HAS}",
    ),
    (
        {"private": lambda names: {"head.weight"}, "upload": lambda sent, local, rnd: dict(local.params)},
        r"Mine.upload sends head.weight, which Mine.private says never leaves? the client",
    ),
    (
        {"init_server": lambda server, *_: without(server, "head.bias")},
        r"Mine.start gave clients a model without head.bias. Everything must be in what the client keeps",
    ),
    (
        {"init_server": lambda server, *_: server | {"fc": server["head.bias"]}},
        rf"Mine.init_server: fc matches no tensor of the model. {HAS}",
    ),
    (
        {"init_server": lambda server, *_: server | {"head.bias": server["head.weight"]}},
        r"Mine.init_server: head.bias has shape \(3, 8\), in the model \(3,\)",
    ),
    (
        {"init_clients": lambda kept, *_: kept | {"head.wieght": torch.zeros(6, 3, 8)}},
        rf"Mine.init_clients: head.wieght matches no tensor of the model. {HAS}",
    ),
    (
        {"init_clients": lambda kept, params, ids: kept | {"head.bias": torch.zeros(len(ids), 4)}},
        r"Mine.init_clients: head.bias has shape \(4,\), in the model \(3,\)",
    ),
    (
        {"start": lambda local, *_: replace(local, params=local.params | {"head.wieght": local.params["head.weight"]})},
        rf"Mine.start: head.wieght matches no tensor of the model. {HAS}",
    ),
    (
        {"keep": lambda kept, *_: kept | {"head.wieght": torch.zeros(6, 3, 8)}},
        rf"Mine.keep: head.wieght matches no tensor of the model. {HAS}",
    ),
    (
        {"upload": lambda sent, *_: without(sent, "head.bias")},
        r"Mine.upload lacks head.bias, which Mine.travels says are sent",
    ),
    (
        {"personal": lambda own, *_: own | {"head.wieght": own["head.weight"]}},
        rf"Mine.personal.*: head.wieght matches no tensor of the model. {HAS}",
    ),
    (
        {"personal": lambda own, *_: without(own, "head.bias")},
        r"Mine.personal.* gave clients a model without head.bias",
    ),
    (
        {"deploy": lambda ready, *_: ready | {"head.wieght": ready["head.weight"]}},
        rf"Mine.deploy: head.wieght matches no tensor of the model. {HAS}",
    ),
    ({"deploy": lambda ready, *_: without(ready, "head.bias")}, r"Mine.deploy gave clients a model without head.bias"),
    ({"aggregate": lambda new, *_: None}, r"Mine.aggregate must return the server's new state; it returned None"),
    (
        {"aggregate": lambda new, *_: without(new, "head.bias")},
        r"Mine.aggregate returned a state without head.bias",
    ),
    (
        {"aggregate": lambda new, *_: new | {"fc": new["head.bias"]}},
        rf"Mine.aggregate: fc matches no tensor of the model. {HAS}",
    ),
    (
        {"aggregate": lambda new, *_: new | {"head.bias": new["head.bias"][:1]}},
        r"Mine.aggregate returned head.bias as float64 of shape \(1,\); the server holds it as float64 of shape \(3,\)",
    ),
    (
        {"aggregate": lambda new, *_: {n: t.float() for n, t in new.items()}},
        r"Mine.aggregate returned layers.0.weight as float32 of shape .*; the server holds it as float64",
    ),
]


@pytest.mark.parametrize(("hooks", "message"), WRONG)
def test_names_and_forms_that_are_not_the_model_s_are_refused(hooks: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        played(changed(**hooks))
    with pytest.raises(UserError, match=message):  # as `personafl.run` asks before anything is trained
        dry_run.check(changed(**hooks), worlds.model(), worlds.training(precision="float64"), 6)


AFTER_LOCAL = Evaluation(shift="none", eval_every=1, when="after_local", clients="selected")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own, *_: own | {"head.wieght": own["head.weight"]}, rf"after_training: head.wieght matches no .*{HAS}"),
        (lambda own, *_: without(own, "head.bias"), r"after_training gave clients a model without head.bias"),
    ],
)
def test_models_right_after_training_are_the_model_s(change: Callable[..., Params], message: str) -> None:
    sim = worlds.simulation(changed(after_training=change), num_rounds=1, evaluation=AFTER_LOCAL)
    with pytest.raises(UserError, match=message):
        sim.run()


def test_what_newcomers_begin_with_is_the_model_s() -> None:
    misspelt = changed(newcomer=lambda kept, *_: kept | {"head.wieght": torch.zeros(1, 3, 8)})
    everybody = worlds.federation("mlp")
    fed = dataclasses.replace(everybody, num_clients=everybody.num_clients - 1, unseen=1)
    sim = worlds.simulation(misspelt, fed=fed, num_rounds=1)
    sim.run()
    with pytest.raises(UserError, match=rf"Mine.newcomer: head.wieght matches no tensor of the model. {HAS}"):
        sim.newcomers()


def nan_for_half(new: Params, server: Params, sums: Params, rnd: Round) -> Params:
    return {n: t * torch.nan if n.endswith("bias") and rnd.number else t for n, t in new.items()}


def nan_sums(terms: Params, upload: Payload, weights: Tensor, rnd: Round) -> Params:
    return terms | {"head.bias": terms["head.bias"] / 0}


BROKEN = [
    (
        {"aggregate": nan_for_half},
        r"Mine.aggregate gave numbers that are not finite in round 2, for layers.0.bias, layers.1.bias, head.bias, "
        "although all sums of that round are finite",
    ),
    (
        {"summands": nan_sums},
        r"Mine.weigh or summands gave numbers that are not finite in round 1, for head.bias, although all uploads",
    ),
    ({"weigh": lambda weights, *_: weights * torch.nan}, r"Mine.weigh or summands gave numbers that are not finite"),
]


@pytest.mark.parametrize("optimistic", [False, True])
@pytest.mark.parametrize(("hooks", "message"), BROKEN)
def test_numbers_that_are_not_finite_are_the_method_s_error_where_uploads_are_finite(
    hooks: dict[str, Any], message: str, optimistic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if optimistic:  # as on a GPU, where nobody waits for the device in the middle of a round
        monkeypatch.setattr(Simulation, "_plays_optimistically", lambda self: True)
    with pytest.raises(UserError, match=message):
        played(changed(**hooks), rounds=2)


def test_a_deployment_asks_the_same_questions() -> None:
    parts = build_parts(world(recipe("fedavg")))
    rnd = Round(Stage(number=1), 0.1)
    mine = changed(aggregate=nan_for_half).bind(parts.algorithm.setup)
    server = mine.init_server(parts.initial)
    upload: Payload = {n: torch.stack([t, t]) for n, t in server.items()}
    _, sums = summed(mine, server, {}, upload, torch.ones(2, dtype=torch.float64), rnd)
    with pytest.raises(UserError, match=r"Mine.aggregate gave numbers that are not finite"):
        next_server(mine, server, sums, rnd)
    sending = changed(upload=lambda sent, *_: sent | {"fc": sent["head.weight"]}).bind(parts.algorithm.setup)
    with pytest.raises(UserError, match=r"Mine.upload: fc matches no tensor"):
        admission.expected(sending, parts.task, parts.initial, server, rnd)


def test_what_a_method_adds_behind_a_prefix_may_come_and_go() -> None:
    """A counter that the server has in odd rounds only."""

    def aggregate(new: Params, server: Params, sums: Params, rnd: Round) -> Params:
        new = without(new, "aux/odd")
        return new | {"aux/odd": torch.ones(())} if rnd.number % 2 else new

    class Counts(FedAvg):
        def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
            model = super().aggregate({n: t for n, t in server.items() if n != "aux/odd"}, sums, rnd)
            return aggregate(model, server, sums, rnd)

        def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
            return super().start(kept, {n: t for n, t in down.items() if n != "aux/odd"}, rnd)

    assert "aux/odd" in played(Counts(), rounds=2).server
    assert "aux/odd" not in played(Counts(), rounds=3).server


class Best(FedAvg):
    """FedAvg whose server keeps numbers of its own: one by this rule, from what it was and the round."""

    begin: float = math.nan
    step: Callable[[Tensor, Round], Tensor] = staticmethod(lambda best, rnd: best)

    def init_server(self, params: Params) -> Params:
        best = torch.full((2,), self.begin, dtype=torch.float64)
        return {**super().init_server(params), "aux/best": best}

    def download(self, server: Params, known: Params, rnd: Round) -> Download:
        return super().download(without(server, "aux/best"), known, rnd)

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        new = super().aggregate(without(server, "aux/best"), sums, rnd)
        return {**new, "aux/best": type(self).step(server["aux/best"], rnd)}


@pytest.mark.parametrize("optimistic", [False, True])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_of_the_server_s_own_may_stay_infinite_or_nan(
    number: float, optimistic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a best score so far, a placeholder or the logarithm of zero; on a GPU, stages are looked at behind them."""
    monkeypatch.setattr(Simulation, "_plays_optimistically", lambda self: optimistic)
    stages = []
    stage = Simulation._stage
    monkeypatch.setattr(Simulation, "_stage", lambda self, now: stages.append(self.played) or stage(self, now))
    sim, plain = played(type("Mine", (Best,), {"begin": number})(), 3), played(FedAvg(), 3)
    assert not any("kept_model" in row for row in sim.rows)
    assert all(torch.equal(sim.server[n], t) for n, t in plain.server.items())
    assert torch.equal(sim.server["aux/best"].nan_to_num(7), torch.full((2,), number).double().nan_to_num(7))
    assert len(stages) == 6  # of three rounds twice: none was played again


@pytest.mark.parametrize("optimistic", [False, True])
def test_numbers_of_the_server_s_own_that_were_finite_stay_so(
    optimistic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A score that is infinite before round 1, then 1, then infinite again: the third is an error."""
    monkeypatch.setattr(Simulation, "_plays_optimistically", lambda self: optimistic)
    step = staticmethod(lambda best, rnd: torch.full_like(best, math.inf if rnd.number == 1 else 1.0))
    method = type("Mine", (Best,), {"begin": math.inf, "step": step})()
    with pytest.raises(UserError, match=r"Mine.aggregate gave numbers that are not finite in round 2, for aux/best, "):
        played(method, 3)
