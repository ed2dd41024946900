"""Slots filled one by one and together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from personafl import COPFL, DMPFL, Algorithm, Ditto, FedAvg, FedPeWS, FedPeWSFixed, FedRep, Inherit, Robust
from personafl.core import tree
from personafl.core.local_work import ClientState
from personafl.core.types import Download, Params, Payload, Round, Setup
from personafl.plugins.assemble import assembled
from personafl.plugins.contribution import Contribution
from personafl.plugins.inherited import Inherited
from tests import checks, worlds

DM = {"readjust_share": 0.3, "readjust_interval": 1, "iterations": 1}
SHORT = {"num_rounds": 4, "local_epochs": 1, "batch_size": 12}
TOGETHER: dict[str, Algorithm] = {
    "fedavg, inherited, by contribution": FedAvg(inherit=Inherit(weight=0.2), weights="cowa"),
    "fedrep, inherited, by contribution": FedRep(inherit=Inherit(transfer="l2"), weights="cowa"),
    "co-pfl, inherited": COPFL(inherit=Inherit(weight=0.2, answers="both"), lr=0.02),
    "fedpews before dm-pfl, inherited, adaptive": FedPeWS(
        base=DMPFL(inherit=Inherit(weight=0.2), inference="per-sample", **DM), warmup_share=0.25
    ),
    "fedrep, inherited, robust": FedRep(inherit=Inherit(transfer="l2"), robust=Robust(rule="trimmed-mean", share=0.34)),
    "fedpews before dm-pfl by contribution": FedPeWS(base=DMPFL(weights="cowa", **DM), warmup_share=0.25),
    "fedpews-fixed before fedavg by contribution": FedPeWSFixed(base=FedAvg(weights="cowa"), warmup_share=0.3),
}


@pytest.fixture(params=TOGETHER)
def algorithm(request: pytest.FixtureRequest) -> Algorithm:
    return TOGETHER[request.param]


def bound(algorithm: Algorithm) -> Algorithm:
    return assembled(algorithm, Setup(worlds.model().info, worlds.training(), 6))


def test_empty_slots_leave_the_method_itself() -> None:
    assert type(bound(FedAvg())) is FedAvg
    assert type(bound(FedAvg(weights="uniform"))) is FedAvg


def test_the_inherited_model_stands_around_the_weights() -> None:
    method = bound(FedAvg(weights="cowa", inherit=Inherit()))
    assert isinstance(method, Inherited)
    assert isinstance(method.base, Contribution)
    assert type(method.base.base) is FedAvg


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ("cowa", (True, True, False)),
        ("cowa-gradient", (True, False, False)),
        ("cowa-prediction", (False, True, False)),
        ("cowa-all", (True, True, True)),
    ],
)
def test_the_forms_of_contribution(weights: str, parts: tuple[bool, bool, bool]) -> None:
    method = bound(FedAvg(weights=weights))
    assert isinstance(method, Contribution)
    assert (method.gradient, method.prediction, method.everywhere) == parts


def test_a_part_keeps_the_methods_own_learning_rate_and_inference() -> None:
    method = bound(DMPFL(lr=0.03, inference="per-sample", inherit=Inherit(), weights="cowa"))
    assert method.setup.training.lr == 0.03
    assert method.rate(method.schedule()[0]) == 0.03
    assert method.inference == "per-sample"
    said = method.evaluated("after_aggregation")
    assert said == "per sample the surer of the global model and the client's inherited private model"


def test_an_inference_around_a_method_is_said_and_one_within_it_is_said_once() -> None:
    own = Ditto().evaluated("after_aggregation")
    surer = f"per sample the surer of the global model and {own}"
    assert bound(FedPeWS(base=Ditto())).evaluated("after_aggregation") == own
    assert bound(FedPeWS(base=Ditto(), inference="per-sample")).evaluated("after_aggregation") == surer
    assert bound(FedPeWS(base=Ditto(inference="per-sample"))).evaluated("after_aggregation") == surer


@dataclass(frozen=True, kw_only=True)
class Watchful(FedAvg):
    """FedAvg that keeps a number at the server, of each client and at it, and looks at every name it is shown."""

    def _look(self, *states: Mapping[str, object]) -> None:
        parts = {n.partition("/")[0] for state in states for n in state if "/" in n}
        assert parts <= {"aux", "covered"}, parts

    def init_server(self, params: Params) -> Params:
        return super().init_server(params) | {"aux/at": torch.zeros(())}

    def init_known(self, params: Params, ids: Tensor) -> Params:
        return {"aux/of": torch.zeros(len(ids))}

    def init_clients(self, params: Params, ids: Tensor) -> Params:
        return {"aux/own": torch.zeros(len(ids))}

    def download(self, server: Params, known: Params, rnd: Round) -> Download:
        self._look(server, known)
        return super().download(tree.exclude(server, ["aux/at"]), known, rnd)

    def start(self, kept: Params, down: Payload, rnd: Round) -> ClientState:
        self._look(kept, down)
        return ClientState(tree.values(down))

    def upload(self, local: ClientState, rnd: Round) -> Payload:
        self._look(local.params)
        return super().upload(local, rnd)

    def keep(self, kept: Params, local: ClientState, rnd: Round) -> Params:
        self._look(kept)
        return {"aux/own": kept["aux/own"] + 1}

    def weigh(self, server: Params, known: Params, upload: Payload, examples: Tensor, rnd: Round) -> Tensor:
        self._look(server, known, upload)
        return super().weigh(server, known, upload, examples, rnd)

    def summands(self, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        self._look(upload)
        return super().summands(upload, weights, rnd)

    def remember(self, known: Params, upload: Payload, weights: Tensor, rnd: Round) -> Params:
        self._look(known, upload)
        return {"aux/of": known["aux/of"] + 1}

    def aggregate(self, server: Params, sums: Params, rnd: Round) -> Params:
        self._look(server, sums)
        mean = super().aggregate(tree.exclude(server, ["aux/at"]), sums, rnd)
        return mean | {"aux/at": server["aux/at"] + 1}

    def personal(self, kept: Params, down: Payload) -> Params:
        self._look(kept, down)
        return super().personal(kept, down)


@pytest.mark.parametrize(
    "slots",
    [
        {"weights": "cowa"},
        {"inherit": Inherit()},
        {"weights": "cowa", "inherit": Inherit()},
    ],
    ids=["cowa", "inherit", "both"],
)
@pytest.mark.parametrize("warm", [False, True])
def test_a_method_never_sees_what_the_parts_around_it_add_and_keeps_what_is_its_own(
    slots: dict[str, object], warm: bool
) -> None:
    algorithm: Algorithm = Watchful(**slots)  # type: ignore[arg-type]
    sim = checks.played(FedPeWS(base=algorithm, warmup_share=0.25) if warm else algorithm, **SHORT)
    rounds = 3 if warm else 4  # of its own
    joins = [sum(c in sim.cohort(s).tolist() for s in sim.schedule[-rounds:]) for c in range(6)]
    assert float(sim.server["aux/at"]) == rounds
    assert checks.everyone(sim)["aux/own"].tolist() == joins
    assert sim.known.gather(sim.everybody)["aux/of"].tolist() == joins


def test_together_a_stack_equals_each_client_alone(algorithm: Algorithm) -> None:
    checks.assert_a_stack_equals_each_client_alone(algorithm, tolerance=1e-9, **SHORT)


def test_together_the_bytes_counted_are_those_packed(algorithm: Algorithm) -> None:
    checks.assert_counted_bytes_are_packed_bytes(algorithm, **SHORT)


def test_together_nothing_hidden_crosses_the_network(algorithm: Algorithm) -> None:
    checks.assert_nothing_hidden_travels(algorithm, **SHORT)


def test_the_base_of_a_warm_up_has_its_slots_filled() -> None:
    sim = checks.played(TOGETHER["fedpews before dm-pfl, inherited, adaptive"], **SHORT)
    kept, ready = checks.everyone(sim), sim.deployed_models(sim.model, sim.everybody)
    assert torch.equal(kept["inherited/aux/sessions"] > 0, kept["aux/refined"] > 0)
    assert {"base_entropy/own", "base_entropy/global"} <= ready.keys()
    by_weight = checks.played(TOGETHER["fedpews-fixed before fedavg by contribution"], **SHORT)
    assert by_weight.server["cowa/totals"].tolist()[-2] > 0  # of the last of its own rounds
