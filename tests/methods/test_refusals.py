"""Settings that cannot mean anything are refused in a sentence, and what could mislead is said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import personafl
from personafl import (
    ALGORITHMS,
    APFL,
    COPFL,
    DMPFL,
    FML,
    MOON,
    Algorithm,
    FedAvg,
    FedDST,
    FedFu,
    FedMMD,
    FedNova,
    FedPeWS,
    FedPeWSFixed,
    FedPHP,
    FedProx,
    Inherit,
    LGFedAvg,
    Scaffold,
    StackedModel,
    UserError,
)
from personafl.core.types import Setup, Stage
from personafl.engine import cost
from personafl.plugins import EstimatedPrior
from tests import worlds
from tests.references.world import world


class Joined(nn.Module):
    """A model whose parameters are all in one place: it has no head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 6), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def headless() -> StackedModel:
    return StackedModel(Joined(), worlds.federation().source.x[:2])


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        (ALGORITHMS["moon"](), "MOON needs the features that enter"),
        (ALGORITHMS["fedmmd"](), "FedMMD needs the features that enter"),
        (ALGORITHMS["fedphp"](), "FedPHP needs the features that enter"),
        (ALGORITHMS["fedfu"](), "FedFu needs the features that enter"),
        (ALGORITHMS["lg-fedavg"](), "LGFedAvg needs a head and a body"),
        (ALGORITHMS["fedpews"](), "FedPeWS masks the units of a chain"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_anything_runs(algorithm: Algorithm, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        worlds.simulation(algorithm, model=headless())


class Scaled(nn.Module):
    """A model that multiplies by no matrix: a table of 3 x 6, position by position."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 6), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(1) * self.weight).sum(2)


@pytest.mark.parametrize(("name", "called"), [("dm-pfl", "DMPFL"), ("feddst", "FedDST")])
def test_masks_need_a_matrix(name: str, called: str) -> None:
    model = StackedModel(Scaled(), worlds.federation().source.x[:2])
    with pytest.raises(ValueError, match=f"{called} masks weight matrices; this model multiplies by none"):
        worlds.simulation(ALGORITHMS[name](), model=model)


@pytest.mark.parametrize("name", ["fedpews", "fedpews-fixed"])
@pytest.mark.parametrize("kind", ["recurrent", "attention"])
def test_units_are_those_of_a_chain_of_layers_not_of_recurrent_ones_or_attention(name: str, kind: str) -> None:
    module, federation = world(kind)
    first = "lstm.weight_ih_l0" if kind == "recurrent" else "encoder.layers.0.self_attn.in_proj_weight"
    why = f"masks the units of a chain of linear and convolution layers; this model has parameters elsewhere: {first}"
    with pytest.raises(ValueError, match=why):
        worlds.simulation(ALGORITHMS[name](), fed=federation, model=StackedModel(module, federation.source.x[:2]))


def test_square_recurrent_weights_are_no_chain_though_their_shapes_would_fit() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.RNN(6, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.rnn(x.unsqueeze(1))[0][:, -1])
            return out

    model = StackedModel(Square(), worlds.federation().source.x[:2])
    assert [layer.shape for layer in model.info.layers] == [(6, 6), (6, 6), (3, 6)]
    with pytest.raises(ValueError, match=r"FedPeWS masks the units of a chain .* elsewhere: rnn.weight_ih_l0"):
        worlds.simulation(FedPeWS(), model=model)


def test_outputs_can_be_inherited_from_any_model() -> None:
    sim = worlds.simulation(FedAvg(inherit=Inherit(transfer="kd")), model=headless(), num_rounds=2)
    sim.run()
    assert int(sim.store.gather(sim.everybody)["inherited/aux/sessions"].sum()) == 2 * 3  # three of six a round


@pytest.mark.parametrize("name", ["local", "lg-fedavg", "fedper", "fedrep", "fedpac"])
def test_adaptive_inference_needs_a_global_model_also_behind_a_warm_up(name: str) -> None:
    base = ALGORITHMS[name]()
    why = f"inference='per-sample' needs a global model, which {type(base).__name__} has not"
    with pytest.raises(ValueError, match=why):
        worlds.simulation(ALGORITHMS[name](inference="per-sample"))
    with pytest.raises(ValueError, match=why):
        worlds.simulation(FedPeWS(base=base, inference="per-sample"))
    with pytest.raises(ValueError, match=why):
        worlds.simulation(ALGORITHMS[name](inference="per-sample", inherit=Inherit()))
    why = f"inference='batch' needs a global model, which {type(base).__name__} has not; with share=1 a client's own"
    with pytest.raises(ValueError, match=why):
        worlds.simulation(ALGORITHMS[name](inference=EstimatedPrior(share=0.25)))


def test_parts_that_would_collide_are_refused() -> None:
    with pytest.raises(ValueError, match="a warm-up cannot warm up another"):
        FedPeWS(base=FedPeWSFixed())
    with pytest.raises(ValueError, match="inherit: set it here or on the base"):
        FedPeWS(base=ALGORITHMS["fedphp"](), inherit=Inherit())


@pytest.mark.parametrize("warm_up", [FedPeWS, FedPeWSFixed])
@pytest.mark.parametrize(("base", "settings"), [(FedFu, {}), (MOON, {"projection": True})], ids=["fedfu", "moon"])
def test_what_a_method_refuses_around_it_is_refused_around_its_warm_up(
    warm_up: type[FedPeWS], base: type[Algorithm], settings: dict[str, bool]
) -> None:
    with pytest.raises(ValueError, match="which run the model alone") as alone:
        base(**settings, inherit=Inherit())
    with pytest.raises(ValueError, match="which run the model alone") as warmed:
        warm_up(base=base(**settings), inherit=Inherit())
    assert str(warmed.value) == str(alone.value)
    table = {"name": next(n for n, cls in ALGORITHMS.items() if cls is base), **settings, "weights": "cowa"}
    with pytest.raises(ValueError, match="which run the model alone"):
        personafl.config.load({"algorithms": [{"name": "fedpews", "base": table}]})


def test_too_few_units_for_fixed_shares_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"convs.0.weight has 4 units for 6 clients: some get none"):
        worlds.simulation(FedPeWSFixed(), "cnn")


def test_lg_fedavg_shares_the_head_the_model_names_and_never_all_of_it() -> None:
    named = worlds.simulation(LGFedAvg(), model=worlds.model(head="layers.1*"))
    assert named.server.keys() == {"layers.1.weight", "layers.1.bias"}
    with pytest.raises(ValueError, match="shared_layers=9: that is all of the model"):
        worlds.simulation(LGFedAvg(shared_layers=9))


def test_plus_without_its_inference_says_so() -> None:
    plain = ALGORITHMS["dm-pfl-plus"](inference="own")
    assert plain.evaluated("after_aggregation") == ALGORITHMS["dm-pfl"].evaluates


def test_scaffold_by_examples_must_know_how_many_there_are() -> None:
    setup = Setup(worlds.model().info, worlds.training(), 6)
    with pytest.raises(ValueError, match="weights='examples': Scaffold must know how many examples all clients have"):
        Scaffold(weights="examples").bind(setup)
    assert Scaffold().bind(setup).setup.num_examples == 0


def test_a_hand_over_is_neither_a_session_of_the_inherited_model_nor_judged() -> None:
    algorithm = FedPeWS(base=ALGORITHMS["ditto"](), warmup_share=0.25, inherit=Inherit())
    sim = worlds.simulation(algorithm, evaluation=personafl.Evaluation(shift="none", eval_every=1))
    sim.run()
    phases = [r["phase"] for r in sim.rows]
    assert phases.count("hand-over") == 1
    assert ["personal" in r for r in sim.rows] == [p != "hand-over" for p in phases]
    sampled = torch.zeros(6, dtype=torch.int64)
    for t in range(8):
        sampled[sim.cohort(Stage(number=t))] += 1
    assert sim.store.gather(sim.everybody)["inherited/aux/sessions"].tolist() == sampled.tolist()


def test_clients_that_diverge_are_counted() -> None:
    calm, wild = (worlds.simulation(FedAvg(), lr=lr, num_rounds=6) for lr in (0.1, 1e30))
    calm.run()
    wild.run()
    assert not any("diverged" in r for r in calm.rows)
    assert all(r["diverged"] == len(r["quarantined"]) > 0 for r in wild.rows)
    assert "nonfinite_models" not in wild.rows[-1]  # none of it reached the server
    found = {q["client"] for r in wild.rows for q in r["quarantined"]}
    assert (calm.state.diverged, wild.state.diverged) == (set(), found)


STOPS = [
    (ALGORITHMS["dm-pfl"](), "DMPFL"),
    (ALGORITHMS["dm-pfl-plus"](), "DMPFLPlus"),
    (ALGORITHMS["feddst"](), "FedDST"),
    (ALGORITHMS["fedphp"](), "The plug-in inherit of FedPHP"),
    (FedAvg(inherit=Inherit(momentum="mu-c")), "The plug-in inherit of FedAvg"),
    (DMPFL(inherit=Inherit(momentum="mu-a")), "DMPFL"),
    (FedPeWS(), "FedPeWS"),
    (FedPeWSFixed(), "FedPeWSFixed"),
    (FedPeWS(warmup_share=0.0, base=DMPFL()), "DMPFL"),
    (LGFedAvg(warm_start=0.5), "LGFedAvg"),
]


@pytest.mark.parametrize(("algorithm", "name"), STOPS, ids=[str(i) for i in range(len(STOPS))])
def test_a_method_that_depends_on_the_number_of_rounds_does_not_stop_early(algorithm: Algorithm, name: str) -> None:
    message = (
        rf"{name} cannot be combined with training\.target=0\.9, because it depends on the number of rounds "
        r"\(training\.num_rounds\)\. Remove training\.target\."
    )
    with pytest.raises(UserError, match=f"^{message}$"):
        worlds.simulation(algorithm, target=0.9)


GOES_ON = [name for name in ALGORITHMS if not any(type(a) is ALGORITHMS[name] for a, _ in STOPS)]
MORE = {
    "fedavg": FedAvg(),
    "lg-fedavg": LGFedAvg(),
    "mu-b": FedPHP(inherit=Inherit(momentum="mu-b")),
    "fedpews": FedPeWS(warmup_share=0.0),
    "feddst": FedDST(readjust_share=0.0),
}


@pytest.mark.parametrize("name", [*GOES_ON, *MORE])
def test_what_may_stop_early_does_the_same_whatever_the_number_of_rounds(name: str) -> None:
    """Three rounds of four and of nine: the server's state and the clients' are the same bits."""
    method = MORE[name] if name in MORE else ALGORITHMS[name]()
    one, two = (worlds.simulation(method, num_rounds=n, target=1.0) for n in (4, 9))
    for _ in range(3):
        one.step()
        two.step()
    states = [(sim.server, sim.store.gather(sim.everybody), sim.known.gather(sim.everybody)) for sim in (one, two)]
    for a, b in zip(*states, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[n], b[n][: len(a[n])] if n.endswith("/totals") else b[n]) for n in a)


def test_the_papers_way_of_counting_sees_masks_that_travel_by_themselves() -> None:
    mask = torch.zeros(2, 40, dtype=torch.bool)
    stage = Stage(number=0, down=False)
    found = cost.traffic(stage, personafl.core.types.Download(), {"mask/w": mask}, 2)
    assert found.paper == 2 * 40 / 8 / 2  # a bit each, the mean of both directions


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedProx(proximal_weight=-1.0), "proximal_weight"),
        (lambda: FedNova(proximal_weight=-1.0), "proximal_weight"),
        (lambda: FedNova(server_momentum=1.0), r"server_momentum=1.0: must be in \[0, 1\)"),
        (lambda: LGFedAvg(shared_layers=0), "shared_layers"),
        (lambda: APFL(alpha=2.0), "alpha"),
        (lambda: FML(beta=-0.1), "beta"),
        (lambda: MOON(temperature=0.0), "temperature"),
        (lambda: MOON(contrast_weight=-1.0), "contrast_weight=-1.0"),
        (lambda: DMPFL(vote_threshold=1.5), r"vote_threshold=1.5: must be in \[0, 1\]"),
        (lambda: COPFL(beta1=1.0), r"beta1=1.0: must be in \[0, 1\)"),
        (lambda: FedAvg(optimizer="adagrad"), "optimizer='adagrad': possible are sgd, adam"),
        (lambda: LGFedAvg(warm_start=1.0), r"warm_start=1.0: must be in \[0, 1\)"),
        (lambda: MOON(projection=True, inherit=Inherit()), "projection=True: not with inherit"),
        (lambda: MOON(projection=True, weights="cowa"), "projection=True: not with inherit or weights by contribution"),
        (lambda: FedFu(inherit=Inherit()), "FedFu: not with inherit or weights by contribution"),
        (lambda: FedFu(weights="cowa"), "FedFu: not with inherit or weights by contribution"),
        (lambda: FedMMD(discrepancy_weight=-1.0), "discrepancy_weight"),
        (lambda: FedAvg(weights="many"), "possible are examples, uniform"),
    ],
)
def test_impossible_settings_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "settings",
    [
        ("co-pfl", {"beta1": 0.0, "beta2": 0.0}),
        ("dm-pfl", {"vote_threshold": 0.0}),
        ("dm-pfl", {"vote_threshold": 1.0}),
        ("moon", {"contrast_weight": 0.0}),
        ("fedavg", {"optimizer": None}),
    ],
    ids=str,
)
def test_the_ends_of_a_range_are_possible(settings: tuple[str, dict[str, float | None]]) -> None:
    name, values = settings
    made = ALGORITHMS[name](**values)
    assert {n: getattr(made, n) for n in values} == values
