"""FedPeWS-Fixed: shares of the hidden units that never change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from personafl import FedPeWSFixed, Simulation
from personafl.core import tree
from personafl.core.errors import UserError
from personafl.core.types import Masked, Round
from tests import checks, worlds

HIDDEN = {"layers.0.weight": 12, "layers.1.weight": 8}  # the small MLP's units, 6 - 12 - 8 - 3
FOUR = (16,) * 4  # clients of 12 training rows; with fixed shares 3 and 2 units each


def warmed(sim: Simulation) -> dict[str, Tensor]:
    return tree.under(sim.server, "warm/x")


def fixed(sim: Simulation) -> dict[str, Tensor]:
    return tree.under(checks.everyone(sim), "warm/unit")


@pytest.mark.parametrize("clients", [2, 3, 4, 6])
def test_fixed_units_are_disjoint_and_cover_every_hidden_layer(clients: int) -> None:
    fed = worlds.federation(sizes=(12,) * clients)
    units = fixed(worlds.simulation(FedPeWSFixed(), fed=fed))
    assert units.keys() == HIDDEN.keys()
    for n, u in units.items():
        assert u.shape == (clients, HIDDEN[n])
        assert (u.sum(0) == 1).all()


def test_four_clients_have_a_quarter_each_in_order() -> None:
    units = fixed(worlds.simulation(FedPeWSFixed(), fed=worlds.federation(sizes=(12,) * 4)))
    for n, each in (("layers.0.weight", 3), ("layers.1.weight", 2)):
        assert [row.nonzero().flatten().tolist() for row in units[n]] == [
            list(range(i * each, (i + 1) * each)) for i in range(4)
        ]


def test_shares_can_be_a_quarter_and_three_quarters() -> None:
    fed = worlds.federation(sizes=(12, 12))
    units = fixed(worlds.simulation(FedPeWSFixed(shares=(0.25, 0.75)), fed=fed))
    assert [int(u.sum()) for u in units["layers.0.weight"]] == [3, 9]
    assert [int(u.sum()) for u in units["layers.1.weight"]] == [2, 6]
    assert units["layers.0.weight"][0].nonzero().flatten().tolist() == [0, 1, 2]


def test_two_participants_overlap_in_the_output_bias_only_and_weights_between_groups_rest() -> None:
    sim = worlds.simulation(FedPeWSFixed(warmup_share=0.5), fed=worlds.federation(sizes=(12, 12)), join_ratio=1.0)
    _, _, done = checks.rehearsed(sim)
    for _ in range(4):
        sim.step()
    for n in sim.model.info.parameters:
        sent = done.upload[n]
        if n == "head.bias":
            assert not isinstance(sent, Masked)
            continue
        assert isinstance(sent, Masked)
        assert int(sent.mask.sum(0).max()) == 1
        nobody = ~sent.mask.any(0)
        assert torch.equal(warmed(sim)[n][nobody], sim.model.initial[n][nobody])
    assert not done.upload["layers.1.weight"].mask[:, :4, 6:].any()  # type: ignore[union-attr]


def test_a_fixed_subnetwork_costs_what_a_network_of_its_size_does() -> None:
    """6 - 3 - 2 - 3: three forward passes of 2 * (18 + 6 + 6) + 3 + 2 + 3 FLOP for each of 12 rows in two epochs."""
    sim = worlds.simulation(FedPeWSFixed(warmup_share=0.5), fed=worlds.federation(sizes=FOUR), join_ratio=1.0)
    sim.step()
    assert sim.totals.flops == 4 * 24 * 3 * (2 * (18 + 6 + 6) + 8)
    assert sim.totals.dense_flops == 4 * 24 * 3 * (2 * 192 + 23)


def test_a_fixed_subnetwork_is_all_that_travels_in_the_warm_up() -> None:
    sim = worlds.simulation(FedPeWSFixed(warmup_share=0.5), fed=worlds.federation(sizes=FOUR), join_ratio=1.0)
    rnd, ids, done = checks.rehearsed(sim)
    down = sim.download(ids, rnd)
    assert set(down.shared) == {"head.bias", "warm/on"}
    assert set(down.own) == set(sim.model.info.parameters) - {"head.bias"}
    for n, sent in down.own.items():
        back = done.upload[n]
        assert isinstance(sent, Masked)
        assert isinstance(back, Masked)
        assert torch.equal(sent.mask, back.mask)
        assert (sent.known, back.known) == (False, True)  # the client learns the mask, the server knows it then
        assert torch.equal(sent.values, torch.where(sent.mask, warmed(sim)[n], 0))
    numbers = 18 + 3 + 6 + 2 + 6  # of a network 6 - 3 - 2 - 3, but for the output's biases
    assert [int(sum(m.mask[c].sum() for m in down.own.values())) for c in range(4)] == [numbers] * 4  # type: ignore[union-attr]
    while sim.schedule[sim.played].phase == "warm-up":
        sim.step()
    rnd = Round(sim.schedule[sim.played], 0.1)
    assert not sim.download(ids, rnd).own  # afterwards the model does


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.filterwarnings("ignore:.*units for")
def test_counted_bytes_of_fixed_subnetworks_are_packed_bytes(kind: str) -> None:
    options = {"kind": kind, "num_rounds": 4, "local_epochs": 1}
    checks.assert_counted_bytes_are_packed_bytes(FedPeWSFixed(warmup_share=0.5), **options)
    checks.assert_nothing_hidden_travels(FedPeWSFixed(warmup_share=0.5), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedPeWSFixed(shares=(0.5, 0.6)), r"shares=\[0.5, 0.6\]: must be positive and sum to 1"),
        (lambda: worlds.simulation(FedPeWSFixed(shares=(0.5, 0.5))), "shares: 2 given for 6 clients"),
    ],
)
def test_impossible_shares_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
