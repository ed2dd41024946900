"""The engine against the slow reference of every method, after every round."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from personafl import ALGORITHMS, Evaluation, FedAvg, FedProx, Inherit, Simulation, StackedModel, Training
from personafl.core import tree
from personafl.core.types import BufferPolicy
from tests import reference
from tests.references import REFERENCES
from tests.references.base import Reference
from tests.references.golden import ALL
from tests.references.world import SIZES, TRAINING, world

Settings = Mapping[str, Any]

ELSEWHERE = {"dm-pfl", "dm-pfl-plus"}  # compared, mask by mask, in test_reference_states.py


@dataclass(frozen=True)
class Case:
    """A method with its settings, in a run that differs from the usual one by some training settings."""

    name: str
    settings: Settings = field(default_factory=dict)
    kind: str = "mlp"
    training: Settings = field(default_factory=dict)
    sizes: tuple[int, ...] = SIZES
    policy: BufferPolicy = "average"
    instead: Settings = field(default_factory=dict)  # training settings of the reference, where a method has its own

    def __str__(self) -> str:
        changes = {**self.settings, **self.training} | ({"policy": self.policy} if self.kind == "norm" else {})
        shown = [self.kind] * (self.kind != "mlp") + [f"{k}={v}" for k, v in changes.items()]
        shown += ["sizes"] * (self.sizes != SIZES)
        return f"{self.name}[{','.join(shown)}]"


def on_a_base(settings: Settings) -> Settings:
    """A proximal weight belongs to the base method, and how clients are weighed to both."""
    weights = settings.get("weights", "uniform")
    rest = {k: v for k, v in settings.items() if k != "proximal_weight"}
    if "proximal_weight" in settings:
        return {**rest, "base": FedProx(proximal_weight=settings["proximal_weight"], weights=weights)}
    return {**rest, "base": FedAvg(weights=weights)} if "weights" in settings else rest


ENGINE: dict[str, Callable[[Settings], Settings]] = {
    "fedphp": lambda settings: {"inherit": Inherit(**settings)},
    "fedpews": on_a_base,
    "fedpews-fixed": on_a_base,
}
"""How the engine wants the settings of a method where it takes them otherwise than the reference."""

FOUR, FIVE = {"num_rounds": 4}, {"num_rounds": 5}
POLICIES: tuple[BufferPolicy, ...] = ("average", "local", "drop")
PAIRS = (17, 12, 9, 6, 5)  # no client of one training row
USUAL: dict[str, Settings] = {
    "fedselect": FIVE,  # three rounds are too few for the default interval
    "co-pfl": {"lr": 0.02},  # its steps are as long as the rate
}

CASES = [
    *(Case(name, training=USUAL.get(name, {})) for name in REFERENCES),
    Case("fedavg", kind="cnn"),
    Case("fedavg", {"weights": "uniform"}, training={"server_lr": 0.6}),
    Case("fedavg-ft", {"finetune_epochs": 1}),
    Case("fedavg-adaptive", kind="cnn", training={"server_lr": 0.6}),
    Case("fedavg-adaptive", {"inference": "own"}),
    Case("fedavg-adaptive", {"prior_free": False}),
    Case("fedprox", {"proximal_weight": 0.7}, kind="cnn"),
    Case("lg-fedavg", {"shared_layers": 2}),
    Case("lg-fedavg", kind="cnn", training={"server_lr": 0.6}),
    Case("lg-fedavg", {"warm_start": 0.5}, training={"num_rounds": 6}),
    Case("lg-fedavg", {"warm_start": 0.4, "shared_layers": 2}, "cnn", {"server_lr": 0.6, "num_rounds": 5}),
    Case("fedper", kind="cnn", training={"server_lr": 0.6}),
    Case("fedrep", {"head_epochs": 3, "body_epochs": 1}),
    Case("fedrep", {"head_epochs": 1, "final_head_epochs": 2}),
    Case("ditto", {"proximal_weight": 1.5}, kind="cnn"),
    Case("apfl", {"alpha": 0.2}, kind="cnn"),
    Case("apfl", {"learn_alpha": False}),
    Case("apfl", {"alpha": 0.98}, training={"lr": 0.8}),  # alpha meets 1
    Case("apfl", {"alpha": 0.02}, training={"lr": 0.8}),  # alpha meets 0
    Case("scaffold", training={"server_lr": 0.6, "num_rounds": 5}),
    Case("scaffold", {"weights": "examples"}, training={"num_rounds": 4}),
    Case("fednova", kind="cnn", training={"server_lr": 0.6}),
    Case("fednova", training={"momentum": 0.6}),
    Case("fednova", {"proximal_weight": 0.7}),
    Case("fednova", {"proximal_weight": 0.5}, training={"momentum": 0.6}),
    Case("fednova", {"server_momentum": 0.5}, training={"server_lr": 0.6, "num_rounds": 4}),
    Case("moon", {"contrast_weight": 0.5, "temperature": 1.3}, kind="cnn"),
    Case("moon", training=FIVE),
    Case("moon", {"projection": True}, training=FIVE),
    Case("moon", {"projection": True, "contrast_weight": 0.5}, "cnn", {"server_lr": 0.6, "num_rounds": 4}),
    Case("fedmmd", {"discrepancy_weight": 0.05}, sizes=PAIRS),
    Case("fedmmd", {"discrepancy_weight": 0.03}, kind="cnn"),
    Case("fml", {"alpha": 0.8, "beta": 0.3}, kind="cnn"),
    Case("fedlc", {"margin": 0.4}, "cnn", {"server_lr": 0.6}),
    Case("fed-rod", kind="cnn", training={"server_lr": 0.6, "num_rounds": 5}),
    Case("feddst", {"readjust_share": 0.3, "readjust_interval": 1}, training={"num_rounds": 6}),
    Case("feddst", {"readjust_share": 0.4, "readjust_interval": 2, "sparsity": 0.7}, "cnn", {"num_rounds": 5}),
    Case("feddst", {"readjust_share": 0.9, "readjust_interval": 1, "sparsity": 0.3, "allocation": "erk"}),
    Case("feddst", {"readjust_share": 0.6, "readjust_interval": 1, "allocation": "feddst"}, "idle", {"num_rounds": 6}),
    Case("fedselect", {"select_interval": 1}, training=FIVE),
    Case("fedselect", {"select_interval": 1, "select_share": 0.5, "personal_bound": 0.4}, "cnn", {"num_rounds": 6}),
    Case("fedselect", {"select_interval": 2, "select_share": 0.1}, training=FIVE),
    Case("fedselect", {"select_interval": 1, "select_share": 0.6}, "idle", FIVE),
    Case("fedpac", sizes=PAIRS, training=FIVE),
    Case("fedpac", {"alignment_weight": 0.2, "head_epochs": 2, "head_lr": 0.05}, "cnn", sizes=PAIRS),
    Case("fedpac", {"head_lr": None}, sizes=PAIRS),
    Case("fedpac", training={"join_ratio": 1.0}, sizes=PAIRS),
    Case("fedpac", {"alignment_weight": 3.0}, "idle", {"join_ratio": 1.0}, (9, 14, 5, 11, 8, 16, 2)),
    Case("fedphp", {"weight": 0.3}, "cnn", {"num_rounds": 4}),
    Case("fedphp", {"weight": 0.3}, sizes=PAIRS),
    Case("fedphp", {"transfer": "kd", "weight": 0.3, "temperature": 2.0, "answers": "both"}, training=FIVE),
    Case("fedphp", {"transfer": "kd", "weight": 0.2, "momentum": "mu-c", "answers": "personalised"}, "cnn"),
    Case("fedphp", {"transfer": "l2", "weight": 0.2, "momentum": "mu-b", "rate": 0.4}, training={"server_lr": 0.6}),
    Case("fedphp", {"transfer": "l2", "weight": 0.4, "rate": 0.5}, "cnn", FIVE),
    Case("fedphp", {"transfer": "prox", "weight": 0.1, "momentum": "mu-c"}, training={"num_rounds": 12}),  # to 11 / 12
    Case("co-pfl", kind="cnn", training={"lr": 0.01, "num_rounds": 4}),
    Case("co-pfl", {"select_share": 0.1, "phases": "sequential"}, training={"lr": 0.01, "num_rounds": 5}),
    Case("co-pfl", {"select_share": 0.4, "selection": "tensor"}, training={"lr": 0.01, "num_rounds": 5}),
    Case("co-pfl", {"selection": "tensor", "phases": "sequential"}, "cnn", {"lr": 0.01, "join_ratio": 1.0}),
    Case("co-pfl", {"select_share": 0.1, "server_rule": "literal"}, training={"lr": 0.01, "num_rounds": 5}),
    Case("co-pfl", {"moments": False}, training={"num_rounds": 5, "server_lr": 0.6}),
    Case("co-pfl", {"server_rule": "literal", "select_share": 0.1}, training={"lr": 0.01, "server_lr": 0.6}),
    Case("co-pfl", {"moments": False, "weights": "cowa-gradient", "select_share": 0.05}, training={"num_rounds": 6}),
    Case("co-pfl", {"weights": "cowa-prediction"}, training={"lr": 0.01, "join_ratio": 1.0}),
    Case("co-pfl", {"weights": "cowa-all"}, training={"lr": 0.01, "num_rounds": 5}),
    Case("co-pfl", {"weights": "uniform"}, training={"lr": 0.01}),
    # Once all that moves is personal, what is shared moves by rounding alone, and so would the gradient score.
    Case("co-pfl", {"budget": "all", "select_share": 0.4, "weights": "cowa-prediction"}, "idle", {"lr": 0.01, **FIVE}),
    Case("co-pfl", {"select_share": 0.4}, "idle", {"lr": 0.01, "num_rounds": 5}),
    Case("co-pfl", {"select_share": 0.4, "moments": False}, "idle", {"weight_decay": 0.1, "num_rounds": 5}),
    Case("co-pfl", {"answers": "server"}, training={"lr": 0.01, "num_rounds": 5}),
    Case("co-pfl", {"ranking": "all"}, training={"lr": 0.01, "num_rounds": 5}),
    Case("co-pfl", {"ranking": "all", "selection": "tensor", "personal_bound": 0.3}, "cnn", {"lr": 0.01}),
    Case("co-pfl", {"moments": False, "select_share": 0.6, "personal_bound": 1.0}, training=FIVE),
    Case("co-pfl", training={"lr": 0.01, "join_ratio": 0.2, "num_rounds": 6}),  # one client at a time
    Case("fedpews", {"warmup_share": 0.7, "score_lr": 3.0}),
    Case("fedpews", {"warmup_share": 0.7, "score_lr": 3.0, "ste": "activation"}),
    Case("fedpews", {"warmup_share": 0.6, "score_lr": 20.0, "diversity_weight": 0.3}, "cnn", FIVE),
    Case("fedpews", {"warmup_share": 0.6, "score_lr": 3.0, "ste": "activation"}, "cnn", FIVE),
    Case(
        "fedpews",
        {"warmup_share": 0.7, "score_init": 1.0, "score_lr": 1.0},
        training={"server_lr": 0.5, "num_rounds": 4},
    ),
    Case("fedpews", {"warmup_share": 0.7, "proximal_weight": 0.5, "score_lr": 2.0}),
    Case("fedpews", {"warmup_share": 0.7, "score_lr": 2.0, "weights": "examples"}),
    Case("fedpews-fixed", {"warmup_share": 0.7}, "cnn", {"server_lr": 0.5}),
    Case("fedpews-fixed", {"warmup_share": 0.7, "shares": (0.1, 0.3, 0.2, 0.25, 0.15)}, training={"join_ratio": 1.0}),
    Case("fedpews-fixed", {"warmup_share": 0.7, "proximal_weight": 0.5, "weights": "examples"}),
    Case("fedfu", kind="cnn"),
    Case("fedfu", {"fusion": "multi", "smoothing": 0.2}),
    Case("fedfu", {"fusion": "multi"}, kind="cnn", training={"server_lr": 0.6}),
    Case("fedfu", {"fusion": "single", "smoothing": 0.3}, training=FIVE),
    Case("flda", kind="cnn", training={"server_lr": 0.6}),
    Case("flda", training={"num_rounds": 6, "lr": 0.4}),
]

OPTIMISER = {"lr": 0.05, "momentum": 0.7, "weight_decay": 0.1, "grad_clip": 0.8, "local_steps": 5}
ADAM = {**OPTIMISER, "optimizer": "adam", "lr": 0.02, "momentum": 0.0}
NO_SINGLES = (16, 15, 10, 9, 4)  # training parts of 12, 11, 8, 7 and 3 rows: no minibatch of one

MAMO = Case("co-pfl", {"select_share": 0.1}, training={**OPTIMISER, "lr": 0.02})

# All methods under the optimiser settings of a recipe. This is the place for what a method makes of them: where it has
# settings of its own, `instead` names those that its reference plays with.
OPTIMISED = [
    Case("local", training=OPTIMISER),
    Case("fedavg", training=OPTIMISER),
    Case("fedavg", kind="cnn", training=OPTIMISER),
    Case("fedavg-ft", training=OPTIMISER),
    Case("fedavg-adaptive", training=OPTIMISER),
    Case("fedprox", {"proximal_weight": 0.7}, training=OPTIMISER),
    Case("lg-fedavg", training=OPTIMISER),
    Case("fedper", training=OPTIMISER),
    Case("fedrep", {"final_head_epochs": 1}, training=OPTIMISER),
    Case("ditto", {"proximal_weight": 1.5}, training=OPTIMISER),
    Case("apfl", training=OPTIMISER),
    Case("scaffold", training=OPTIMISER, instead={"momentum": 0.0, "grad_clip": 0.0}),  # plain SGD, decayed
    Case("fednova", training={**OPTIMISER, "local_steps": 0}),  # with K steps each it would be FedAvg
    Case("fednova", training=OPTIMISER),
    Case("moon", training=OPTIMISER),
    Case("fedmmd", {"discrepancy_weight": 0.05}, training=OPTIMISER, sizes=PAIRS),
    Case("fml", training=OPTIMISER),
    Case("feddst", {"readjust_share": 0.3, "readjust_interval": 1}, training=OPTIMISER),
    Case("fedselect", {"select_interval": 1}, training={**OPTIMISER, "num_rounds": 4}),
    Case("fedselect", {"select_interval": 1}, training={**OPTIMISER, "num_rounds": 4, "local_steps": 0}),
    Case("fedpac", training=OPTIMISER, sizes=PAIRS),
    Case("fedphp", {"weight": 0.3}, training=OPTIMISER, sizes=PAIRS),
    Case("co-pfl", {"select_share": 0.1, "moments": False}, training=OPTIMISER),
    MAMO,  # an optimiser of its own, which takes none of them
    Case("fedpews", {"warmup_share": 0.7, "score_lr": 3.0}, training=OPTIMISER),
    Case("fedpews-fixed", {"warmup_share": 0.7}, training=OPTIMISER),
    Case("fedlc", training=OPTIMISER),
    Case("fed-rod", training=OPTIMISER),
    Case("fedfu", training=OPTIMISER),
    Case("flda", training=OPTIMISER),
    Case("dm-pfl", {"readjust_share": 0.3, "readjust_interval": 1}, training={**OPTIMISER, "num_rounds": 8}),
    Case(
        "dm-pfl-plus", {"readjust_share": 0.3, "readjust_interval": 1, "iterations": 1}, training={**OPTIMISER, **FOUR}
    ),
    Case("fedavg", training=ADAM),
    Case("ditto", training=ADAM),
    Case("fedrep", training=ADAM),
    Case("flda", training=ADAM),
    Case("fedselect", {"select_interval": 1}, training={**ADAM, **FOUR}),
    Case("fedselect", {"select_interval": 1}, training={**ADAM, **FOUR, "local_steps": 0}),
    Case("co-pfl", {"select_share": 0.1, "moments": False}, training=ADAM),
    Case("feddst", {"readjust_share": 0.3, "readjust_interval": 1}, training=ADAM),
]

NORMED = [
    Case(name, settings, "norm", training, NO_SINGLES, policy)
    for name, settings, training in (
        ("fedavg", {}, {"server_lr": 0.6}),
        ("ditto", {}, {}),
        ("fedrep", {}, {}),
        ("fedphp", {"transfer": "l2", "weight": 0.3}, FOUR),
        ("fedphp", {"transfer": "kd", "weight": 0.3, "momentum": "mu-b", "rate": 0.4, "answers": "both"}, {}),
        ("dm-pfl", {"iterations": 1, "readjust_share": 0.3, "readjust_interval": 1, "allocation": "erk"}, FOUR),
        ("co-pfl", {"select_share": 0.3}, {"lr": 0.02, **FOUR}),
        ("co-pfl", {"select_share": 0.3, "phases": "sequential"}, {"lr": 0.02, **FOUR}),
    )
    for policy in POLICIES
]
"""Models with running statistics, under each policy for them."""

READJUSTING = {"readjust_share": 0.3, "readjust_interval": 1}
SEQUENCES = [
    Case(name, settings, kind, {"join_ratio": 0.67, "local_epochs": 1, **training}, sizes=(9, 6, 5))
    for name, settings, training, kinds in (
        ("dm-pfl", {"iterations": 1, **READJUSTING}, FOUR, ("recurrent", "attention")),
        ("dm-pfl-plus", {"iterations": 1, "allocation": "erk", **READJUSTING}, FOUR, ("recurrent", "attention")),
        ("feddst", READJUSTING, {}, ("recurrent", "attention")),
        ("fedselect", {"select_interval": 1}, {}, ("recurrent", "attention")),
        ("co-pfl", {"select_share": 0.1}, {"lr": 0.01}, ("recurrent", "attention")),
        ("lg-fedavg", {"shared_layers": 2}, {}, ("recurrent",)),
    )
    for kind in kinds
]
"""Models whose weights are those of recurrent layers and of attention."""

WITHOUT: dict[str, tuple[str, Settings]] = {
    "local": ("fedavg", {}),
    "fedavg": ("local", {}),
    "fedavg-ft": ("fedavg", {}),
    "fedavg-adaptive": ("fedavg", {}),
    "fedprox": ("fedavg", {}),
    "lg-fedavg": ("local", {}),
    "fedper": ("fedavg", {}),
    "fedrep": ("fedper", {}),
    "ditto": ("ditto", {"proximal_weight": 0.0}),
    "apfl": ("apfl", {"learn_alpha": False}),
    "scaffold": ("fedavg", {"weights": "uniform"}),
    "fednova": ("fedavg", {}),
    "moon": ("fedavg", {}),
    "fedmmd": ("fedavg", {}),
    "fml": ("fml", {"alpha": 1.0, "beta": 1.0}),
    "fedlc": ("fedavg", {}),
    "fed-rod": ("fedavg", {}),
    "feddst": ("feddst", {"readjust_share": 0.0}),
    "fedselect": ("fedselect", {"select_share": 0.0}),
    "fedpac": ("fedpac", {"alignment_weight": 0.0}),
    "fedphp": ("fedphp", {"weight": 0.0}),
    "co-pfl": ("co-pfl", {"select_share": 0.0}),
    "fedpews": ("fedavg", {"weights": "uniform"}),
    "fedpews-fixed": ("fedavg", {"weights": "uniform"}),
    "fedfu": ("fedavg", {"weights": "uniform"}),
    "flda": ("fedavg", {}),
}
"""What a method would be if its own machinery did nothing: another one, or itself with these settings."""

EQUAL_TO: list[tuple[Case, Case]] = [
    (Case("fedprox", {"proximal_weight": 0.0}), Case("fedavg")),
    (Case("fedavg-adaptive", {"prior_free": False, "inference": "own"}), Case("fedavg")),
    (Case("fedlc", {"margin": 0.0}), Case("fedavg")),
    (Case("ditto", {"proximal_weight": 0.0}), Case("local")),
    (Case("apfl", {"alpha": 0.0, "learn_alpha": False}), Case("fedavg")),
    (Case("apfl", {"alpha": 1.0, "learn_alpha": False}), Case("local")),
    (Case("scaffold", training={"num_rounds": 1}), Case("fedavg", {"weights": "uniform"}, training={"num_rounds": 1})),
    (Case("fednova", sizes=(12, 12, 12, 12, 12)), Case("fedavg", sizes=(12, 12, 12, 12, 12))),
    (Case("moon", {"contrast_weight": 0.0}), Case("fedavg")),
    (Case("fedmmd", {"discrepancy_weight": 0.0}), Case("fedavg")),
    (Case("fml", {"alpha": 1.0}), Case("local")),
    (Case("feddst", {"sparsity": 0.0}), Case("fedavg")),
    (
        Case(
            "fedphp", {"transfer": "l2", "weight": 0.0, "momentum": "mu-b", "rate": 0.0}, training={"join_ratio": 1.0}
        ),
        Case("fedphp", {"transfer": "l2", "weight": 0.0, "answers": "personalised"}, training={"join_ratio": 1.0}),
    ),
    (
        Case("co-pfl", {"select_share": 0.0, "moments": False, "weights": "uniform", "answers": "server"}),
        Case("fedavg", {"weights": "uniform"}),
    ),
    (
        Case("co-pfl", {"select_share": 0.0, "server_rule": "literal"}, training={"lr": 0.02}),
        Case("co-pfl", {"select_share": 0.0}, training={"lr": 0.02}),
    ),
    (Case("fedpews", {"warmup_share": 0.0}), Case("fedavg", {"weights": "uniform"})),
    (Case("fedpews", {"warmup_share": 0.0, "weights": "examples"}), Case("fedavg")),
    (
        Case("fedpews", {"warmup_share": 0.9, "score_init": 60.0, "score_lr": 0.0}),
        Case("fedavg", {"weights": "uniform"}),
    ),
    (
        Case("fedpews", {"warmup_share": 0.9, "score_lr": 0.0}, "cnn"),
        Case("fedpews", {"warmup_share": 0.9, "score_lr": 0.0, "ste": "activation"}, "cnn"),
    ),
    (Case("fedpews", {"warmup_share": 0.0, "proximal_weight": 0.05, "weights": "examples"}), Case("fedprox")),
    (Case("fedpews-fixed", {"warmup_share": 0.0}), Case("fedavg", {"weights": "uniform"})),
]
"""Settings under which a method is another one."""

EVENTS: dict[str, tuple[str, ...]] = {
    "feddst": ("grown", "voted but pruned", "mask moved", "ties in pruning", "ties in growing", "ties in m"),
    "fedselect": ("joined", "ties in joining", "at the bound", "shared by some", "shared by none"),
    "fedpac": ("heads combined", "heads left out", "no global prototype"),
    "co-pfl": (
        "joined",
        "never reached",
        "at the bound",
        "in the top p and personal before",
        "shared by some",
        "shared by none",
        "shared with all others",
        "shared with some others",
        "shared with no other",
        "others after a pause",
    ),
    "fedpews": ("draws that the scores decided", "covered by none", "rounds after the warm-up"),
    "fedpews-fixed": ("covered by none", "rounds after the warm-up"),
}
"""Cases that the runs of a method must have met, or the comparison says nothing about them."""


def training_of(case: Case) -> Training:
    return dataclasses.replace(TRAINING, **case.training)


def slow_of(case: Case) -> Reference:
    """The reference of a case, before the first round."""
    module, federation = world(case.kind, case.sizes)
    if case.policy == "drop":
        torch.func.replace_all_batch_norm_modules_(module)
    slow = ALL[case.name](module, federation, dataclasses.replace(training_of(case), **case.instead), **case.settings)
    if case.policy == "local":
        slow.keep_statistics()
    return slow


PLAYED: dict[str, Reference] = {}
"""References that have been played to the end; several tests look at the same one."""


def played(case: Case) -> Reference:
    """The reference of a case, after its last round and what follows it."""
    if repr(case) not in PLAYED:
        slow = slow_of(case)
        for number in range(slow.training.num_rounds):
            slow.play(number)
        slow.finish()
        PLAYED[repr(case)] = slow
    return PLAYED[repr(case)]


def simulation(case: Case) -> Simulation:
    """The engine of a case, before the first round."""
    module, federation = world(case.kind, case.sizes)
    settings = ENGINE.get(case.name, dict)(case.settings)
    return Simulation(
        federation,
        StackedModel(module, federation.source.x[:2], policy=case.policy),
        ALGORITHMS[case.name](**settings),
        training_of(case),
        Evaluation(shift="none", eval_every=1000),
    )


def inputs(slow: Reference) -> Tensor:
    """Some rows of the data, and some inputs far from them."""
    g = torch.Generator().manual_seed(0)
    return torch.cat([slow.x[::5], 3 * torch.randn(3, *slow.x.shape[1:], generator=g, dtype=torch.float64)])


def assert_close(found: Tensor, wanted: Tensor, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9, msg=lambda text: f"{what}: {text}")


def assert_same_answers(sim: Simulation, slow: Reference, when: str) -> None:
    """The logits of every client's model and of the server's."""
    x = inputs(slow)
    with torch.no_grad():
        for c in slow.clients:
            found = sim.algorithm.predict(sim.model, sim.deployed_models(sim.model, torch.tensor([c])), x[None])[0]
            assert_close(found, slow.evaluated(c, x), f"{when}: model of client {c}")
        common, wanted = sim.common(), slow.common(x)
        assert (common is None) == (wanted is None), f"{when}: the engine has {'no' if common is None else 'a'} common"
        if common is not None and wanted is not None:
            assert_close(sim.algorithm.common_answer(sim.model, common, x[None])[0], wanted, f"{when}: common model")


def gap(some: Reference, other: Reference) -> float:
    """The largest difference between what two methods answer to some client."""
    x = inputs(some)
    return max(float((some.evaluated(c, x) - other.evaluated(c, x)).abs().max()) for c in some.clients)


def without(case: Case) -> Case:
    """The same run without the method's own machinery, where it is known what that is."""
    name, settings = WITHOUT.get(case.name, (case.name, {}))
    return dataclasses.replace(
        case, name=name, settings={**case.settings, **settings} if name == case.name else settings
    )


def playable(cases: list[Case]) -> list[Case]:
    """Those of methods that the engine has."""
    return [case for case in cases if case.name in ALGORITHMS]


def test_every_method_has_a_reference() -> None:
    assert set(ALGORITHMS) - ELSEWHERE <= set(REFERENCES)


def test_the_usual_run_has_clients_of_every_kind() -> None:
    """Sampled never, always, in a row, after a pause, and not of late; one client has a single training row."""
    _, federation = world("mlp")
    rounds = [reference.sampled(federation, TRAINING, number) for number in range(TRAINING.num_rounds)]
    patterns = {tuple(c in cohort for cohort in rounds) for c in range(federation.num_clients)}
    assert patterns == {
        (False, False, False),
        (True, True, True),
        (False, True, True),
        (True, False, True),
        (True, True, False),
    }
    single = federation.sizes("train").tolist().index(1)
    assert all(single in cohort for cohort in rounds)


def assert_played_alike(case: Case) -> Simulation:
    """Play every stage in both, comparing after each, and what follows the last; the engine's is given back."""
    sim, slow = simulation(case), slow_of(case)
    assert_same_answers(sim, slow, "at the start")
    rounds = slow.training.num_rounds
    played = [stage for stage in sim.schedule if stage.phase != "hand-over"]
    assert [stage.number for stage in played][:rounds] == list(range(rounds))
    for stage in sim.schedule:
        if stage.phase == "hand-over":
            pass  # changes no answer; for the reference it is part of the next round
        elif stage.number < rounds:
            slow.play(stage.number)
        else:
            slow.finish()
        sim.step()
        assert_same_answers(sim, slow, f"round {stage.number}, {stage.phase}")
    if len(played) == rounds:
        slow.finish()  # nothing follows, for the reference either
        assert_same_answers(sim, slow, "at the end")
    PLAYED[repr(case)] = slow
    return sim


@pytest.mark.filterwarnings("ignore:.*units for", "ignore:(CO-PFL|FedSelect). at . of this round's clients")
@pytest.mark.parametrize("case", playable(CASES), ids=str)
def test_engine_answers_as_the_reference_after_every_round(case: Case) -> None:
    """Three rounds or more with ragged clients, and what follows the last."""
    assert_played_alike(case)


def test_every_method_is_played_with_the_optimiser_settings_of_a_recipe() -> None:
    assert {case.name for case in OPTIMISED} == set(ALGORITHMS)


@pytest.mark.filterwarnings("ignore:.*units for")
@pytest.mark.parametrize("case", OPTIMISED, ids=lambda case: f"{case.name}-{OPTIMISED.index(case)}")
def test_engine_answers_as_the_reference_under_the_optimiser_settings_of_a_recipe(case: Case) -> None:
    """Momentum, weight decay, clipped gradients, and steps in place of epochs, each of which changed something."""
    assert_played_alike(case)
    training, acted = PLAYED[repr(case)].training, PLAYED[repr(case)].acted
    wanted = {"momentum": training.momentum, "weight decay": training.weight_decay, "clip": training.grad_clip}
    if case is MAMO:
        assert not acted  # the recipe's took no step
    else:
        assert {what: acted[what] > 0 for what in wanted} == {what: value > 0 for what, value in wanted.items()}
        assert acted["no clip"] > 0 or not training.grad_clip  # the bound lies among the norms
    sizes = world(case.kind, case.sizes)[1].sizes("train")
    assert training.local_steps not in (training.local_epochs * -(-sizes // training.batch_size)).tolist()


@pytest.mark.filterwarnings("ignore:allocation=")
@pytest.mark.parametrize("case", SEQUENCES, ids=str)
def test_recurrent_layers_and_attention_are_masked_as_in_the_reference(case: Case) -> None:
    """All matrices are, and but for the first, which the default rule leaves dense, none of them whole."""
    sim = assert_played_alike(case)
    matrices = [n for n, t in sim.model.initial.items() if t.dim() > 1]
    assert len(matrices) == (7 if case.kind == "recurrent" else 9)
    if case.name == "lg-fedavg":
        assert {n.partition(".")[0] for n in sim.server} == {"gru", "head"}
        return
    held = tree.under(sim.server | sim.store.gather(sim.everybody), "mask")
    dense = matrices[:1] if case.settings.get("allocation") != "erk" and case.name in ("dm-pfl", "feddst") else []
    assert [n for n in matrices if held[n].all()] == dense
    assert all(held[n].any() for n in matrices)


@pytest.mark.parametrize("case", NORMED, ids=str)
def test_running_statistics_are_those_of_the_reference_under_every_policy(case: Case) -> None:
    """Clients have several batches, none of a single row, which PyTorch refuses to normalise."""
    _, federation = world(case.kind, case.sizes)
    assert 1 not in federation.sizes("train") % training_of(case).batch_size
    assert_played_alike(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedrep", "fedphp", "dm-pfl"])
def test_policies_for_running_statistics_differ(name: str) -> None:
    average, local, drop = [played(case) for case in NORMED if case.name == name][:3]
    if name != "ditto":  # whose personal statistics never travel
        assert gap(average, local) > 1e-3
    assert gap(average, drop) > 1e-3


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.2},
        {"grad_clip": 1.0},
        {"momentum": 0.9, "weight_decay": 0.2, "grad_clip": 1.0},
        {"optimizer": "adam"},
        {"optimizer": "adam", "weight_decay": 0.2, "grad_clip": 1.0},
    ],
    ids=lambda settings: "+".join(settings) or "plain",
)
def test_optimiser_of_the_references_is_that_of_torch(settings: dict[str, Any], masked: bool) -> None:
    """With gradients on both sides of the clip; a masked tensor moves as a shorter one of the positions in the mask."""
    g = torch.Generator().manual_seed(3)
    start = {n: torch.randn(shape, generator=g, dtype=torch.float64) for n, shape in (("w", (3, 4)), ("b", (3,)))}
    mask = torch.rand(3, 4, generator=g) < 0.5 if masked else torch.ones(3, 4, dtype=torch.bool)
    moves = {"w": mask if masked else None, "b": None}
    leaves = {"w": nn.Parameter(start["w"][mask]), "b": nn.Parameter(start["b"].clone())}
    rule = {n: value for n, value in settings.items() if n not in ("grad_clip", "optimizer")}
    theirs = (torch.optim.Adam if "optimizer" in settings else torch.optim.SGD)(leaves.values(), lr=0.1, **rule)
    ours, params = reference.Optimiser(dataclasses.replace(TRAINING, **settings)), start
    for scale in (0.01, 3.0, 0.1, 10.0):
        gradient = {n: scale * torch.randn(t.shape, generator=g, dtype=torch.float64) for n, t in start.items()}
        leaves["w"].grad, leaves["b"].grad = gradient["w"][mask], gradient["b"].clone()
        if "grad_clip" in settings:
            nn.utils.clip_grad_norm_(leaves.values(), settings["grad_clip"])
        theirs.step()
        params = ours.step(params, gradient, 0.1, moves)
    # sums of a dozen numbers of about 10 in another order: a few units in the last place
    torch.testing.assert_close(params["w"][mask], leaves["w"].detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(params["b"], leaves["b"].detach(), rtol=0, atol=1e-12)
    assert torch.equal(params["w"][~mask], start["w"][~mask])


@pytest.mark.slow  # these look at the references alone
@pytest.mark.parametrize("case", [case for case in CASES if without(case) != case], ids=str)
def test_own_machinery_of_a_method_acts(case: Case) -> None:
    """The references answer otherwise than they would without what is particular to the method."""
    assert gap(played(case), played(without(case))) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("some", "other"), EQUAL_TO, ids=str)
def test_reference_becomes_another_method_where_it_must(some: Case, other: Case) -> None:
    assert gap(played(some), played(other)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", EVENTS)
def test_runs_of_a_method_meet_its_cases(name: str) -> None:
    events = Counter[str]()
    for case in CASES:
        if case.name == name:
            events += played(case).events  # type: ignore[attr-defined]
    assert {event: events[event] > 0 for event in EVENTS[name]} == dict.fromkeys(EVENTS[name], True)
