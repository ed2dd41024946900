"""The engine against the slow reference implementations."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from personafl import Evaluation, Training
from personafl.data.federated import Federation
from personafl.methods import DMPFL, DMPFLPlus, FedAvg
from personafl.models import CNN, MLP, StackedModel
from personafl.simulation.simulator import Simulation
from personafl.sparse.allocation import RULES
from tests import reference
from tests.references.world import CLASSES, federation_of

SIZES = (40, 33, 25, 18, 12, 29, 8, 21, 5)  # rows per client; the training part of the last fills no batch of 8
TRAINING = Training(
    num_rounds=16, join_ratio=0.45, local_epochs=3, batch_size=8, lr=0.2, lr_decay=0.93, precision="float64", seed=3
)
SETTINGS = reference.Settings(readjust_share=0.3, readjust_interval=2)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small lose time to threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mlp() -> tuple[nn.Module, Federation]:
    torch.manual_seed(7)
    return MLP(8, 14, 12, CLASSES), federation_of((8,), SIZES)


def cnn() -> tuple[nn.Module, Federation]:
    torch.manual_seed(7)
    return CNN((1, 8, 8), (3, 4), (10,), CLASSES, kernel=3, padding=1), federation_of((1, 8, 8), SIZES)


def simulation(module: nn.Module, federation: Federation, algorithm: FedAvg | DMPFL, training: Training) -> Simulation:
    model = StackedModel(module, federation.source.x[:2])
    return Simulation(federation, model, algorithm, training, Evaluation(shift="none", eval_every=1000))


def dm_pfl_pair(
    module: nn.Module,
    federation: Federation,
    training: Training,
    settings: reference.Settings,
    kind: type[DMPFL] = DMPFL,
) -> tuple[Simulation, reference.DMPFL]:
    """The engine and the reference, both before the first round."""
    sim = simulation(module, federation, kind(**dataclasses.asdict(settings)), training)
    budget = RULES["feddst_first_dense"](sim.model.info.layers, settings.sparsity)
    return sim, reference.DMPFL(module, federation, training, settings, budget)


def assert_close(found: Tensor, wanted: Tensor, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10, msg=lambda text: f"{what}: {text}")


def assert_same_state(sim: Simulation, slow: reference.DMPFL, when: str) -> None:
    """Everything server and clients hold, and what the clients would predict with."""
    for name, w in slow.w_g.items():
        assert_close(sim.server[name], w, f"{when}: w_g {name}")
    everybody = torch.arange(len(slow.clients))
    held = sim.store.gather(everybody)
    for name, mask in slow.m_g.items():
        assert torch.equal(sim.server["mask/" + name], mask), f"{when}: m_g {name}"
        for c, client in enumerate(slow.clients):
            m_c = client.masks[name]
            assert torch.equal(held["mask/" + name][c], m_c), f"{when}: m_c {name} of client {c}"
            # w_c has a meaning inside m_c only
            w_c = reference.only(held["personal/" + name][c], m_c)
            assert_close(w_c, client.weights[name], f"{when}: w_c {name} of client {c}")
    x = sim.federation.source.x[:6]
    for c in everybody.tolist():
        with torch.no_grad():
            out = sim.algorithm.predict(sim.model, sim.deployed_models(sim.model, torch.tensor([c])), x[None])[0]
        assert_close(out, slow.network.logits(slow.theta_c(c), x), f"{when}: theta_c of client {c}")


def assert_played_alike(sim: Simulation, slow: reference.DMPFL) -> None:
    """Play every stage in both, comparing after each; the masks must really have moved in Phase 1."""
    first_m_g = dict(slow.m_g)
    assert_same_state(sim, slow, "at the start")
    assert [s.number for s in sim.schedule] == list(range(slow.training.num_rounds))
    for stage in sim.schedule:
        before = dict(slow.m_g), [dict(client.masks) for client in slow.clients]
        sim.step()
        slow.play(stage.number)
        assert_same_state(sim, slow, f"round {stage.number}, {slow.phase_of(stage.number).kind}")
        after = dict(slow.m_g), [client.masks for client in slow.clients]
        if slow.phase_of(stage.number).kind != "masks":
            assert not differing(before[0], after[0])
            assert not any(differing(b, a) for b, a in zip(before[1], after[1], strict=True))
        elif stage.number % slow.settings.readjust_interval == 0:
            assert any(differing(b, a) for b, a in zip(before[1], after[1], strict=True))
    assert differing(first_m_g, slow.m_g)
    assert all(differing(client.masks, slow.m_g) for client in slow.clients)


def differing(some: dict[str, Tensor], other: dict[str, Tensor]) -> int:
    """Positions at which two sets of masks differ."""
    return sum(int((some[n] != other[n]).sum()) for n in some)


def assert_met(events: Counter[str], *names: str) -> None:
    """The run must have met these cases, or the comparison says nothing about them."""
    assert {n: events[n] > 0 for n in names} == dict.fromkeys(names, True)


@pytest.mark.parametrize("build", [mlp, cnn])
def test_fedavg_server_weights_equal_the_reference_after_every_round(
    build: Callable[[], tuple[nn.Module, Federation]],
) -> None:
    """Three rounds with ragged clients, one of them smaller than a batch."""
    module, federation = build()
    training = dataclasses.replace(TRAINING, num_rounds=3, join_ratio=0.8)
    cohort = reference.sampled(federation, training, 0)
    assert int(federation.sizes("train")[cohort].min()) < training.batch_size
    sim = simulation(module, federation, FedAvg(), training)
    for number, wanted in enumerate(reference.fedavg(module, federation, training)):
        sim.step()
        assert set(sim.server) == set(wanted)
        for name, w in wanted.items():
            assert_close(sim.server[name], w, f"round {number}: {name}")


def test_dm_pfl_equals_the_reference_after_every_stage_of_two_iterations() -> None:
    """All three phases, twice, on an MLP; the run meets every case of readjusting and voting."""
    sim, slow = dm_pfl_pair(*mlp(), TRAINING, SETTINGS)
    assert_played_alike(sim, slow)
    assert_met(slow.events, "pruned and regrown at once", "newly grown", "too few votes", "uncovered in m_g")
    assert_met(slow.events, "more than the budget", "fractional epochs")


def test_dm_pfl_on_a_cnn_equals_the_reference_after_every_stage() -> None:
    """Convolutions are masked as linear layers are."""
    sim, slow = dm_pfl_pair(*cnn(), dataclasses.replace(TRAINING, num_rounds=8), SETTINGS)
    assert_played_alike(sim, slow)


@pytest.mark.parametrize(
    "change",
    [
        {"reset_personal": False},
        {"readjust_when": "after_training"},
        {"uncovered": "drop", "votes": "weighted"},
        {"uncovered": "drop", "vote_threshold": 0.6},
        {"readjust_head": False},
        {"personal_epochs": 2.5, "personal_lr": 0.05},
        {"averaged": "voted"},
    ],
    ids=lambda change: ",".join(f"{k}={v}" for k, v in change.items()),
)
def test_dm_pfl_variants_equal_the_reference_after_every_stage(change: dict[str, str | bool | float]) -> None:
    """Settings other than the defaults, in shorter runs."""
    training = dataclasses.replace(TRAINING, num_rounds=10)
    sim, slow = dm_pfl_pair(*mlp(), training, dataclasses.replace(SETTINGS, **change))
    assert_played_alike(sim, slow)
    if "uncovered" in change:
        assert_met(slow.events, "uncovered in m_g", "too few votes")
    if "vote_threshold" in change:
        assert_met(slow.events, "fewer than the budget")


def test_dm_pfl_drops_positions_that_exactly_three_of_ten_clients_hold() -> None:
    """Votes must exceed the threshold of 0.3: with ten clients at least four."""
    torch.manual_seed(7)
    module, federation = MLP(8, 14, 12, CLASSES), federation_of((8,), (*SIZES, 16))
    training = dataclasses.replace(TRAINING, num_rounds=4, join_ratio=1.0)
    sim, slow = dm_pfl_pair(
        module, federation, training, dataclasses.replace(SETTINGS, readjust_interval=1, iterations=1)
    )
    assert_played_alike(sim, slow)
    assert_met(slow.events, "votes at the threshold")


def test_dm_pfl_breaks_ties_between_equal_weights_and_gradients_by_position() -> None:
    """Units that never fire give zero gradients, and weights that stay as equal as they began."""
    module, federation = mlp()
    with torch.no_grad():
        module.get_parameter("layers.0.bias")[4:] = -50
        module.get_parameter("layers.1.weight")[:, 4:] = 1 / 8  # a power of two: its means are exact
    training = dataclasses.replace(TRAINING, num_rounds=8)
    settings = reference.Settings(
        0.3, readjust_share=0.5, readjust_interval=1, readjust_when="after_training", iterations=1
    )
    sim, slow = dm_pfl_pair(module, federation, training, settings)
    assert_played_alike(sim, slow)
    assert_met(slow.events, "ties in pruning", "ties in growing", "ties in m_g")


def test_dm_pfl_plus_chooses_between_both_models_as_algorithm_4_does() -> None:
    """Sample by sample, on every client's own test data and on all other clients'."""
    training = dataclasses.replace(TRAINING, num_rounds=12)
    settings = dataclasses.replace(SETTINGS, readjust_share=0.7, iterations=1)  # so that the two models differ
    sim, slow = dm_pfl_pair(*mlp(), training, settings, DMPFLPlus)
    for stage in sim.schedule:
        sim.step()
        slow.play(stage.number)
    federation, x = slow.federation, slow.federation.source.x
    ids = federation.sizes("train").argsort(descending=True, stable=True)
    deployed = sim.deployed_models(sim.model, ids)
    tests = [reference.rows_of(federation, "test", d) for d in range(federation.num_clients)]
    rows = torch.cat(tests)
    owner = torch.cat([torch.full((len(r),), d) for d, r in enumerate(tests)]).tolist()
    everything = sim.federation.source.x[rows].expand(len(ids), -1, -1)
    with torch.no_grad():
        found = sim.algorithm.predict(sim.model, deployed, everything).argmax(-1)

    seen, corrected = Counter[tuple[bool, bool]](), 0
    for place, c in enumerate(ids.tolist()):
        theta_c, theta_g = slow.theta_c(c), slow.theta_g()
        train = x[reference.rows_of(federation, "train", c)]
        be_c = reference.base_entropy(slow.network, theta_c, train)
        be_g = reference.base_entropy(slow.network, theta_g, train)
        assert float(deployed["base_entropy/own"][place]) == pytest.approx(be_c, abs=1e-10)
        assert float(deployed["base_entropy/global"][place]) == pytest.approx(be_g, abs=1e-10)
        z_c, z_g = slow.network.logits(theta_c, x[rows]).tolist(), slow.network.logits(theta_g, x[rows]).tolist()
        for i, (own, common) in enumerate(zip(z_c, z_g, strict=True)):
            mine = reference.chooses_own(own, common, be_c, be_g)
            class_c, class_g = own.index(max(own)), common.index(max(common))
            assert int(found[place, i]) == (class_c if mine else class_g), f"client {c}, data of {owner[i]}"
            if class_c != class_g:  # only here does the choice show
                seen[owner[i] == c, mine] += 1
                corrected += mine != (reference.entropy(own) < reference.entropy(common))
    assert all(seen[at_home, mine] for at_home in (True, False) for mine in (True, False)), seen
    assert corrected, "the base entropies decided nothing"
