"""A model inherited over sessions, around methods other than FedAvg."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from personafl import DMPFL, Algorithm, Ditto, FedAvg, FedPeWS, FedProx, FedRep, Inherit
from personafl.core import tree
from personafl.core.local_work import ClientState, LocalWork, Pull, whole
from personafl.core.types import Batch, Masked, Params, Round, Task
from tests import checks, worlds


@dataclass(frozen=True, kw_only=True)
class Twice(FedAvg):
    """FedAvg with a loss of its own."""

    def turns(self, local: ClientState, rnd: Round) -> list[LocalWork]:
        def loss(task: Task, local: ClientState, batch: Batch) -> Tensor:
            return 2 * task.loss(local.params, batch)

        return [self.usual_turn(whole(self.info.parameters), loss=loss)]


BASES = {
    "fedrep": FedRep,
    "ditto": Ditto,
    "dm-pfl": lambda **settings: DMPFL(readjust_share=0.3, readjust_interval=1, iterations=1, **settings),
}
PREFIX = "inherited"
SHORT = {"num_rounds": 4, "local_epochs": 1, "batch_size": 12}


@pytest.fixture(params=BASES)
def base(request: pytest.FixtureRequest):
    return BASES[request.param]


def test_what_does_not_teach_leaves_the_method_as_it_is(base) -> None:
    around, plain = (checks.played(base(**s), **SHORT) for s in ({"inherit": Inherit(weight=0.0)}, {}))
    checks.assert_agree(around.server, plain.server)
    checks.assert_agree(tree.without(checks.everyone(around), PREFIX), checks.everyone(plain))
    assert around.totals == plain.totals


@pytest.mark.parametrize("transfer", ["mmd", "kd", "l2", "prox"])
def test_what_teaches_changes_it(base, transfer: str) -> None:
    taught = {"inherit": Inherit(transfer=transfer, weight=0.2)}
    around, plain = (worlds.simulation(base(**s), **SHORT) for s in (taught, {}))
    for sim in (around, plain):
        sim.step()
    n = "layers.1.weight"
    assert not torch.allclose(around.server[n], plain.server[n])


def test_the_inherited_model_is_complete_and_mixes_trained_ones(base) -> None:
    """mu = 0 at first, then 0.9 / (Q T) = 0.1125 of the old one; private parts and masked weights as trained."""
    sim = worlds.simulation(base(inherit=Inherit(weight=0.2)), join_ratio=1.0)
    for mu in (0.0, 0.9 / 8):
        _, ids, done = checks.rehearsed(sim)
        before = tree.under(sim.store.gather(ids), PREFIX)
        sim.step()
        now = tree.under(sim.store.gather(ids), PREFIX)
        for n in sim.model.info.shapes:
            torch.testing.assert_close(now[n], (1 - mu) * done.local.params[n] + mu * before[n])
    ready = sim.deployed_models(sim.model, ids)
    checks.assert_agree(ready, tree.select(now, sim.model.info.shapes))


def test_it_does_not_travel(base) -> None:
    sim = worlds.simulation(base(inherit=Inherit(answers="both")))
    rnd, ids, done = checks.rehearsed(sim)
    plain = worlds.simulation(base())
    _, _, without = checks.rehearsed(plain)
    assert done.upload.keys() == without.upload.keys()
    assert sim.download(ids, rnd).shared.keys() == plain.download(ids, rnd).shared.keys()
    for n, t in done.upload.items():
        assert isinstance(t, Masked) == isinstance(without.upload[n], Masked)


def test_a_stack_equals_each_client_alone(base) -> None:
    checks.assert_a_stack_equals_each_client_alone(base(inherit=Inherit(weight=0.2, answers="both")), **SHORT)


def test_the_bytes_counted_are_those_packed(base) -> None:
    checks.assert_counted_bytes_are_packed_bytes(base(inherit=Inherit(weight=0.2)), **SHORT)


def test_nothing_hidden_crosses_the_network(base) -> None:
    checks.assert_nothing_hidden_travels(base(inherit=Inherit(weight=0.2, transfer="kd")), **SHORT)


def test_a_method_with_two_models_has_the_travelling_one_inherited() -> None:
    """Ditto's HPM follows the global solver, its personal model stays Ditto's own."""
    sim = worlds.simulation(Ditto(inherit=Inherit(weight=0.0), proximal_weight=0.0), join_ratio=1.0)
    _, _, done = checks.rehearsed(sim)
    assert torch.equal(done.kept[f"{PREFIX}/head.weight"], done.upload["head.weight"])


def test_fedrep_learns_of_its_own_head_by_the_inherited_one() -> None:
    """In a first session both heads begin alike, so a pull of weights alone moves nothing in the first step."""
    algorithm: Algorithm = FedRep(inherit=Inherit(transfer="prox", weight=1.0))
    sim = worlds.simulation(algorithm, num_rounds=1)
    sim.run()
    checks.assert_close({n: sim.model.initial[n] for n in sim.server}, sim.server)


BESIDES = 4 * 407 - 2 * 51  # the head takes 2 * 8 * 3 + 3 = 51, and features are compared before it


@pytest.mark.parametrize(
    ("transfer", "each"), [("mmd", (407, BESIDES)), ("kd", (407, 4 * 407)), ("l2", (407, BESIDES)), ("prox", (0, 0))]
)
def test_teaching_costs_the_teachers_forward_pass(transfer: str, each: tuple[int, int]) -> None:
    """Of 407 FLOP; beside a loss that is not the usual one the student is trained once more. Two epochs of 85 rows."""
    for method, more in zip((FedAvg, Twice), each, strict=True):
        taught, plain = (
            checks.played(method(inherit=inherit), num_rounds=1, join_ratio=1.0)
            for inherit in (Inherit(transfer=transfer), None)
        )
        assert taught.totals.flops - plain.totals.flops == 2 * 85 * more


def test_what_teaches_takes_its_share_of_a_pull() -> None:
    """FedProx's loss, its pull included, has the weight 1 - 0.2 beside the teacher."""
    method = worlds.simulation(FedProx(proximal_weight=0.5, inherit=Inherit(transfer="kd", weight=0.2)), num_rounds=1)
    method.step()
    rnd, ids = Round(method.schedule[0], 0.1), torch.arange(2)
    kept = method.store.gather(ids)
    local = method.algorithm.start(kept, tree.received(method.algorithm.download(method.server, {}, rnd), 2), rnd)
    (turn,) = method.algorithm.turns(local, rnd)
    assert turn.pulls == (Pull("anchor", 0.4),)


def test_a_hand_over_is_no_session() -> None:
    """Two rounds of warm-up, the hand-over to all clients, then a round: its cohort has one session behind it."""
    sim = worlds.simulation(FedPeWS(base=FedAvg(inherit=Inherit(transfer="kd")), warmup_share=0.5), num_rounds=4)
    sessions = []
    for stage in sim.schedule[:4]:
        sim.step()
        sessions.append((stage.phase, sim.store.gather(sim.everybody)["inherited/aux/sessions"].tolist()))
    assert sessions[:3] == [("warm-up", [0] * 6), ("warm-up", [0] * 6), ("hand-over", [0] * 6)]
    cohort = sim.cohort(sim.schedule[3]).tolist()
    assert sessions[3] == ("train", [int(c in cohort) for c in range(6)])


def test_a_hand_over_is_no_session_of_a_model_that_is_inherited_from_the_warm_up_on() -> None:
    """Everybody in all of four rounds, with the hand-over after two: mu = 0.9 z / 4 counts the rounds, and no more."""
    settings = {"num_rounds": 4, "join_ratio": 1.0, "local_epochs": 1}
    sim = worlds.simulation(FedPeWS(base=Ditto(), inherit=Inherit(weight=0.0), warmup_share=0.5), **settings)
    sessions: list[tuple[str, list[int]]] = []
    before: Params = {}
    for stage in sim.schedule:
        sim.step()
        held = tree.under(checks.everyone(sim), PREFIX)
        sessions.append((stage.phase, held["aux/sessions"].tolist()))
        if stage.phase == "hand-over":
            checks.assert_agree(held, before)
        before = held
    phases = ["warm-up", "warm-up", "hand-over", "train", "train"]
    assert sessions == [(phase, [z] * 6) for phase, z in zip(phases, (1, 2, 2, 3, 4), strict=True)]
    trained = checks.played(FedPeWS(base=Ditto(), warmup_share=0.5), **settings)
    checks.assert_agree(tree.select(sim.server, trained.server), trained.server)
