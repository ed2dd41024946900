"""Masks over the matrices of recurrent layers and of attention: sparsity, bytes and FLOP, by hand."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from personafl import DMPFL, Evaluation, FedDST, Federation, Simulation, Source, StackedModel, Training
from personafl.core import tree, wire
from personafl.models import MODELS
from personafl.sparse.allocation import RULES

K, T = 11, 5  # characters, and how many of them an example has
SIZES = (8, 6, 5)  # rows of a client: 6, 4 and 4 of them for training
SPARSITY = 0.6


class Encoder(nn.Module):
    """Two layers of a transformer over an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(K, 8)
        self.places = nn.Parameter(torch.randn(T, 8))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
        self.head = nn.Linear(8, K)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.table(x) + self.places).mean(1))
        return out


# Every matrix: its shape, and how often an example is multiplied by it. All have a bias for each row.
GATES = 4 * 256
LSTM = {
    "lstm.weight_ih_l0": ((GATES, 8), T),
    "lstm.weight_hh_l0": ((GATES, 256), T),
    "lstm.weight_ih_l1": ((GATES, 256), T),
    "lstm.weight_hh_l1": ((GATES, 256), T),
    "head.weight": ((K, 256), 1),
}
ENCODER = {
    f"encoder.layers.{i}.{name}": (shape, T)
    for i in (0, 1)
    for name, shape in (
        ("self_attn.in_proj_weight", (24, 8)),
        ("self_attn.out_proj.weight", (8, 8)),
        ("linear1.weight", (16, 8)),
        ("linear2.weight", (8, 16)),
    )
} | {"head.weight": ((K, 8), 1)}
MATRICES = {"lstm": LSTM, "encoder": ENCODER}
PRODUCTS = {"lstm": 0, "encoder": 2 * 2 * (2 * T * T * 8)}  # two layers: queries by keys, weights by values
BIASES = {name: sum(shape[0] * times for shape, times in m.values()) for name, m in MATRICES.items()}  # added


def federation() -> Federation:
    draw = torch.Generator().manual_seed(0)
    rows = sum(SIZES)
    x = torch.randint(K, (rows, T), generator=draw)
    parts = np.split(np.arange(rows), np.cumsum(SIZES)[:-1])
    return Federation.build(Source("text", x, x[:, -1], K), parts, 0)


def simulation(kind: str, algorithm: DMPFL | FedDST) -> Simulation:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = MODELS["char-lstm"].build((T,), K) if kind == "lstm" else Encoder()
    training = Training(num_rounds=4, join_ratio=1.0, local_epochs=2, batch_size=4, lr=0.1)
    fed = federation()
    return Simulation(
        fed,
        StackedModel(module, fed.source.x[:2]),
        algorithm,
        training,
        Evaluation(shift="none", eval_every=10_000),
    )


def step(sim: Simulation) -> tuple[int, int, float, float]:
    """Bytes up and down, FLOP with and without masks of the next round."""
    names = ("up_bytes", "down_bytes", "flops", "dense_flops")
    before = [getattr(sim.totals, n) for n in names]
    sim.step()
    up, down, flops, dense = (getattr(sim.totals, n) - b for n, b in zip(names, before, strict=True))
    return up, down, flops, dense


@functools.cache
def played(kind: str) -> tuple[Simulation, dict[str, tuple[int, int, float, float]]]:
    """DM-PFL, two rounds of masks, one of each refinement, and what each phase's last round cost."""
    rule = "feddst_first_dense" if kind == "lstm" else "erk"
    sim = simulation(kind, DMPFL(sparsity=SPARSITY, allocation=rule, iterations=1, readjust_share=0.3))
    return sim, {stage.phase: step(sim) for stage in sim.schedule}


def header(sim: Simulation) -> int:
    """An empty message, and of each parameter the length of its name, the name, three bytes and its shape."""
    return wire.size({}) + sum(2 + len(n) + 3 + 4 * len(shape) for n, shape in sim.model.info.shapes.items())


def flops(kind: str, density: dict[str, float]) -> float:
    """A training step of one example in which everything moves: three forward passes."""
    products = sum(2 * times * math.prod(shape) * density[n] for n, (shape, times) in MATRICES[kind].items())
    return 3 * (products + BIASES[kind] + PRODUCTS[kind])


@pytest.mark.parametrize("kind", ["lstm", "encoder"])
def test_all_matrices_but_the_embedding_are_masked(kind: str) -> None:
    sim, _ = played(kind)
    assert {n: layer.shape for layer in sim.model.info.layers for n in [layer.weight]} == {
        n: shape for n, (shape, _) in MATRICES[kind].items()
    }
    held = tree.under(sim.store.gather(sim.everybody), "mask")
    assert held.keys() == MATRICES[kind].keys()


@pytest.mark.parametrize("kind", ["lstm", "encoder"])
def test_the_sparsity_holds_over_all_matrices(kind: str) -> None:
    """Of every client's mask, to a weight per matrix, which are rounded down; its model is as sparse or more."""
    sim, _ = played(kind)
    held = tree.under(sim.store.gather(sim.everybody), "mask")
    weights = sum(math.prod(shape) for shape, _ in MATRICES[kind].values())
    wanted = (1 - SPARSITY) * weights
    if kind == "lstm":
        # FedDST's rule drops S of weights and biases, and counts those of masked matrices as if they could be
        biases = 4 * GATES + K
        wanted = weights + (biases - GATES) - SPARSITY * (weights + biases)
        assert abs(wanted - (1 - SPARSITY) * weights) < 0.002 * weights
    deployed = sim.deployed_models(sim.model, sim.everybody)
    for c in range(len(SIZES)):
        active = sum(int(m[c].sum()) for m in held.values())
        assert 0 <= wanted - active < len(held)
        left = sum(int(deployed[n][c].count_nonzero()) for n in held)
        assert 0.9 * active < left <= active  # a position that was reset or never trained may be zero


@pytest.mark.parametrize("kind", ["lstm", "encoder"])
def test_masked_positions_are_zero_in_the_deployed_models(kind: str) -> None:
    sim, _ = played(kind)
    held = tree.under(sim.store.gather(sim.everybody), "mask")
    deployed = sim.deployed_models(sim.model, sim.everybody)
    for n, mask in held.items():
        assert not deployed[n][~mask].any(), n
    wide = held["lstm.weight_hh_l1" if kind == "lstm" else "encoder.layers.1.self_attn.in_proj_weight"]
    assert 0 < int(wide[0].sum()) < 0.5 * wide[0].numel()
    assert (wide[0] != wide[1]).any()  # each client has its own


@pytest.mark.parametrize("kind", ["lstm", "encoder"])
def test_the_stacked_model_multiplies_by_the_masked_weights(kind: str) -> None:
    """Every client's answers are those of an ordinary module with zeros where its masks are, in float64."""
    sim, _ = played(kind)
    model = sim.model.copy().to(torch.device("cpu"), torch.float64)
    params = {n: t.double() for n, t in sim.deployed_models(sim.model, sim.everybody).items()}
    x = sim.federation.source.x[:4].expand(len(SIZES), -1, -1)
    out = model(params, x)
    held = tree.under(sim.store.gather(sim.everybody), "mask")
    for c in range(len(SIZES)):
        own = {n: t[c].masked_fill(~held[n][c], 0) if n in held else t[c] for n, t in params.items()}
        torch.testing.assert_close(out[c], model.client(own)(x[c]), rtol=0, atol=1e-9)  # the bound of the self-check


@pytest.mark.parametrize("kind", ["lstm", "encoder"])
def test_bytes_fall_with_the_masks(kind: str) -> None:
    """The global refinement: the server's masks and the values there one way, values alone the other."""
    sim, spent = played(kind)
    up, down, _, _ = spent["global"]
    m_g = tree.under(sim.server, "mask")
    values = 4 * sum(int(m.sum()) for m in m_g.values())
    values += 4 * sum(math.prod(s) for n, s in sim.model.info.shapes.items() if n not in m_g)
    message = header(sim) + 4 * len(m_g) + values  # of masked tensors also how many values there are
    assert up == len(SIZES) * message
    bits = 0
    for m in m_g.values():  # where all is active, it suffices to say so of rows and columns
        bits += sum(-(-side // 8) for side in m.shape) if m.all() else -(-m.numel() // 8)
    counter = 2 + len("aux/refined") + 3 + 4  # how often personal positions have been refined
    assert down == len(SIZES) * (message + bits + counter)
    dense = header(sim) + 4 * sum(math.prod(s) for s in sim.model.info.shapes.values())
    if kind == "lstm":  # the encoder is so small that names and what is not masked are most of it
        assert up / len(SIZES) < 0.42 * dense


@pytest.mark.parametrize("kind", ["lstm", "encoder"])
def test_flop_are_those_of_the_matrices(kind: str) -> None:
    sim, spent = played(kind)
    _, _, masked, dense = spent["global"]
    seen = 2 * int(sim.federation.sizes("train").sum())  # examples, in two epochs
    m_g = tree.under(sim.server, "mask")
    assert dense == seen * flops(kind, dict.fromkeys(m_g, 1.0))
    # Each client's count of an example is a whole number
    assert masked == seen * round(flops(kind, {n: float(m.double().mean()) for n, m in m_g.items()}))
    if kind == "lstm":
        macs = T * (GATES * 8 + 3 * GATES * 256) + K * 256
        assert dense == seen * 3 * (2 * macs + T * 4 * GATES + K)


def test_personal_refinement_carries_gradients_through_attention() -> None:
    """Only masked matrices move, the first one among them, so every product has both its gradients."""
    sim, spent = played("encoder")
    dense = spent["personal"][3]
    seen = 2 * int(sim.federation.sizes("train").sum())  # a round that all take part in is everybody's own
    assert dense == seen * flops("encoder", dict.fromkeys(ENCODER, 1.0))


def test_erk_spreads_by_the_inputs_and_outputs_of_a_matrix() -> None:
    """Density eps (n_in + n_out) / (n_in n_out); gates and projections in one tensor are one layer of all outputs."""
    sums = {n: sum(shape) for n, (shape, _) in ENCODER.items()}
    eps = (1 - SPARSITY) * (2 * (24 * 8 + 8 * 8 + 2 * 16 * 8) + K * 8) / (2 * (32 + 16 + 2 * 24) + K + 8)
    assert eps * 16 / (8 * 8) < 1  # the densest, an output projection: nothing is dense
    assert RULES["erk"](played("encoder")[0].model.info.layers, SPARSITY) == {n: int(eps * k) for n, k in sums.items()}
    # The narrow matrices of the LSTM would be more than dense; the wide ones share what is left.
    narrow = {"lstm.weight_ih_l0": GATES * 8, "head.weight": K * 256}
    rest = (1 - SPARSITY) * (sum(narrow.values()) + 3 * GATES * 256) - sum(narrow.values())
    wide = dict.fromkeys(("lstm.weight_hh_l0", "lstm.weight_ih_l1", "lstm.weight_hh_l1"), int(rest / 3))
    assert RULES["erk"](played("lstm")[0].model.info.layers, SPARSITY) == narrow | wide


def test_uniform_density_leaves_the_matrix_that_reads_the_input_dense() -> None:
    for kind, matrices in MATRICES.items():
        sizes = [math.prod(shape) for shape, _ in matrices.values()]
        wanted = [sizes[0], *(int((1 - SPARSITY) * size + 1e-9) for size in sizes[1:])]
        found = RULES["uniform_first_dense"](played(kind)[0].model.info.layers, SPARSITY)
        assert found == dict(zip(matrices, wanted, strict=True))


@pytest.mark.parametrize("kind", ["lstm", "encoder"])
def test_feddst_sends_one_sparse_model_with_all_matrices(kind: str) -> None:
    sim = simulation(kind, FedDST(sparsity=SPARSITY, allocation="uniform_first_dense"))
    step(sim)
    first, *others = MATRICES[kind]
    assert sim.server[f"mask/{first}"].all()
    for n in others:
        mask = sim.server[f"mask/{n}"]
        assert int(mask.sum()) == int((1 - SPARSITY) * mask.numel() + 1e-9)
        assert not sim.server[n][~mask].any()
