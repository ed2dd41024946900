"""Robust means against slow references: position by position, client by client, masks included."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

import pytest
import torch
from torch import nn

from personafl import (
    ALGORITHMS,
    DMPFL,
    Algorithm,
    Ditto,
    DMPFLPlus,
    Faults,
    FedAvg,
    FedPeWS,
    FedPHP,
    FedProx,
    FedRep,
    Inherit,
    LGFedAvg,
    Robust,
    StackedModel,
    UserError,
)
from personafl.core import tree
from personafl.core.types import Masked, Params, Payload
from personafl.plugins.robust import clipped, middle, nearest
from tests import checks, worlds

RULES = ("clip", "median", "trimmed-mean", "krum")
SHARE = 0.3


# The references: a client is a dict of position -> value, over all tensors


Client = dict[tuple[str, int], float]


def positions(upload: Payload, client: int) -> Client:
    """What one client sent of these tensors."""
    out: Client = {}
    for n, entry in upload.items():
        values = tree.values({n: entry})[n][client].flatten().tolist()
        held = entry.mask[client].flatten().tolist() if isinstance(entry, Masked) else [True] * len(values)
        out |= {(n, i): v for i, (v, there) in enumerate(zip(values, held, strict=True)) if there}
    return out


def slow_clip(clients: list[Client], server: Client, bound: float) -> list[Client]:
    lengths = [sum((v - server[p]) ** 2 for p, v in c.items()) ** 0.5 for c in clients]
    limit = bound or median(lengths)
    out = []
    for c, length in zip(clients, lengths, strict=True):
        scale = min(1.0, limit / length)
        out.append({p: server[p] + scale * (v - server[p]) for p, v in c.items()})
    return out


def slow_middle(clients: list[Client], share: float | None) -> list[Client]:
    middles = {}
    for p in {p for c in clients for p in c}:
        held = sorted(c[p] for c in clients if p in c)
        cut = 0 if share is None else int(share * len(held) + 1e-9)
        middles[p] = median(held) if share is None else sum(held[cut : len(held) - cut]) / (len(held) - 2 * cut)
    return [{p: middles[p] for p in c} for c in clients]


def slow_krum(clients: list[Client], share: float) -> list[int]:
    def apart(a: Client, b: Client) -> float:
        both = a.keys() & b.keys()
        return sum((a[p] - b[p]) ** 2 for p in both) / len(both) if both else float("inf")

    count = len(clients)
    faulty = int(share * count + 1e-9)
    scores = []
    for i, c in enumerate(clients):
        near = sorted(apart(c, other) for j, other in enumerate(clients) if j != i)
        scores.append(sum(near[: max(count - faulty - 2, 1)]))
    return sorted(sorted(range(count), key=lambda i: scores[i])[: count - faulty])


def some_uploads(clients: int, seed: int) -> tuple[Payload, Params]:
    """A dense and a masked tensor of clients around a server's; the last two are far off."""
    draw = torch.Generator().manual_seed(seed)
    server = {"a": torch.randn(3, 2, generator=draw).double(), "b": torch.randn(5, generator=draw).double()}
    sent = {n: t + torch.randn(clients, *t.shape, generator=draw).double() for n, t in server.items()}
    for t in sent.values():
        t[-2:] *= 20
    mask = torch.rand(clients, 5, generator=draw) < 0.6
    mask[:, 0] = False  # a position nobody holds
    return {"a": sent["a"], "b": Masked(sent["b"], mask)}, server


def as_clients(upload: Payload) -> list[Client]:
    return [positions(upload, c) for c in range(len(tree.values(upload)["a"]))]


def assert_sent(found: Payload, wanted: list[Client], given: Payload) -> None:
    assert found.keys() == given.keys()
    for c, mine in enumerate(wanted):
        assert positions(found, c) == pytest.approx(mine, rel=1e-13, abs=1e-13)
    held, before = tree.masks(found), tree.masks(given)
    assert all(torch.equal(held[n], m) for n, m in before.items())
    assert all((tree.values(found)[n][~m] == 0).all() for n, m in held.items())  # what does not travel is not used


@pytest.mark.parametrize("clients", [1, 2, 7, 10])
def test_rules_are_those_of_a_loop_over_positions(clients: int) -> None:
    upload, server = some_uploads(clients, clients)
    them, flat = as_clients(upload), {(n, i): v for n, t in server.items() for i, v in enumerate(t.flatten().tolist())}
    assert_sent(clipped(upload, server), slow_clip(them, flat, 0.0), upload)
    assert_sent(clipped(upload, server, 1.5), slow_clip(them, flat, 1.5), upload)
    assert_sent(middle(upload, None), slow_middle(them, None), upload)
    assert_sent(middle(upload, SHARE), slow_middle(them, SHARE), upload)
    kept = nearest(upload, server, SHARE)
    assert (list(range(clients)) if kept is None else kept.tolist()) == slow_krum(them, SHARE)


@pytest.mark.parametrize("clients", [5, 7, 10])
def test_krum_keeps_those_of_the_loop_where_nobody_stands_out(clients: int) -> None:
    """Whom it leaves out is then a matter of how many neighbours count, and that one is not one's own."""
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        a, b, held = (torch.randn(clients, n, generator=draw).double() for n in (6, 5, 5))
        upload: Payload = {"a": a, "b": Masked(b, held > -0.8)}
        kept = nearest(upload, {"a": torch.zeros(6), "b": torch.zeros(5)}, SHARE)
        assert kept is not None
        assert kept.tolist() == slow_krum(as_clients(upload), SHARE)


def test_by_hand() -> None:
    upload: Payload = {"w": torch.tensor([[1.0], [2.0], [3.0], [100.0]])}
    assert tree.values(middle(upload, None))["w"].flatten().tolist() == [2.5] * 4
    assert tree.values(middle(upload, 0.25))["w"].flatten().tolist() == [2.5] * 4  # 1 and 100 cut
    server = {"w": torch.tensor([1.0])}  # distances 0, 1, 2, 99 with median 1.5
    assert tree.values(clipped(upload, server))["w"].flatten().tolist() == [1.0, 2.0, 2.5, 2.5]
    kept = nearest(upload, server, 0.25)  # each to its one nearest: 1, 1, 1, 97
    assert kept is not None and kept.tolist() == [0, 1, 2]


# In the rounds of methods

METHODS: dict[str, Callable[[Robust], Algorithm]] = {
    "fedavg": lambda r: FedAvg(robust=r),
    "fedprox": lambda r: FedProx(robust=r),
    "ditto": lambda r: Ditto(robust=r),
    "fedrep": lambda r: FedRep(robust=r),
    "fedphp": lambda r: FedPHP(robust=r),
    "dm-pfl": lambda r: DMPFL(robust=r),
    "dm-pfl-plus": lambda r: DMPFLPlus(robust=r),
    "feddst": lambda r: ALGORITHMS["feddst"](robust=r),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore:.*leave room")
def test_the_servers_model_is_the_mean_of_what_the_rule_leaves(
    name: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With attackers: after each round, the server's weights from the cohort's uploads by the slow references."""
    faults = Faults(faulty_ratio=0.34, fault="sign-flip", strength=5.0)
    method, rounds = METHODS[name](Robust(rule=rule, share=SHARE)), 4 if name.startswith("dm-pfl") else 2
    sim = worlds.simulation(method, join_ratio=1.0, num_rounds=rounds, local_epochs=1, faults=faults)
    seen = worlds.watch_uploads(sim, monkeypatch)
    for _ in sim.schedule:
        before, count = sim.server, len(seen)
        sim.step()
        for ids, upload, rnd in seen[count:]:
            names = [n for n in sim.model.info.parameters if n in upload]
            assert len(names) > 1
            server = {(n, i): v for n in names for i, v in enumerate(before[n].flatten().tolist())}
            clients = [positions(tree.select(upload, names), c) for c in range(len(ids))]
            kept = slow_krum(clients, SHARE) if rule == "krum" else list(range(len(ids)))
            if rule == "clip":
                clients = slow_clip(clients, server, 0.0)
            elif rule != "krum":
                clients = slow_middle(clients, None if rule == "median" else SHARE)
            sizes = [1.0 if name == "fedphp" else float(sim.federation.sizes("train")[c]) for c in ids.tolist()]
            for n in names:
                m_g = sim.server.get(f"mask/{n}") if name == "feddst" else None  # it prunes what it averaged
                for i, found in enumerate(sim.server[n].flatten().tolist()):
                    terms = [(sizes[c], clients[c][n, i]) for c in kept if (n, i) in clients[c]]
                    wanted = sum(w * v for w, v in terms) / sum(w for w, _ in terms) if terms else server[n, i]
                    if m_g is not None and not bool(m_g.flatten()[i]):
                        wanted = 0.0
                    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-12), (rnd, n, i)
    assert seen


@pytest.mark.parametrize("rule", ["clip", "median", "trimmed-mean"])
def test_running_statistics_are_the_methods_own(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are averaged as without a rule, the parameters are not."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, 3))
    network = StackedModel(module, worlds.federation().source.x[:2])
    sim = worlds.simulation(FedAvg(robust=Robust(rule=rule, share=SHARE)), model=network, join_ratio=1.0, num_rounds=1)
    seen = worlds.watch_uploads(sim, monkeypatch)
    sim.run()
    ((ids, upload, _),) = seen
    weights = sim.federation.sizes("train")[ids].double()
    for n, t in tree.values(upload).items():
        if t.is_floating_point():
            plain = (weights.view(-1, *[1] * (t.dim() - 1)) * t).sum(0) / weights.sum()
            same = torch.allclose(sim.server[n], plain, rtol=1e-12, atol=1e-12)
            assert same == (n in sim.model.info.buffers), n
    assert {n for n in upload if n in sim.model.info.buffers} >= {"1.running_mean", "1.running_var"}


@pytest.mark.parametrize("rule", RULES)
def test_without_anything_to_hold_back_a_rule_is_the_plain_mean(rule: str) -> None:
    """Nothing to clip, cut or leave out; of two clients the median is their mean."""
    loose = Robust(rule=rule, share=0.0, bound=1e9)
    fed = worlds.federation(sizes=(20, 20))
    sims = [worlds.simulation(FedAvg(robust=r), fed=fed, join_ratio=1.0, num_rounds=2) for r in (loose, None)]
    for sim in sims:
        sim.run()
    checks.assert_agree(sims[0].server, sims[1].server, 1e-14)


REFUSED = {
    "local": "LocalOnly",
    "fedpac": "FedPAC",
    "fedselect": "FedSelect",
    "scaffold": "Scaffold",
    "fednova": "FedNova",
    "co-pfl": "weights of COPFL",
}
"""Methods without a weighted mean, and the part of them that is responsible."""


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.filterwarnings("ignore:.*leave room", "ignore:.*units for")
def test_a_method_has_a_robust_mean_or_says_why_not(name: str) -> None:
    robust = Robust(rule="trimmed-mean")
    if name.startswith("fedpews"):
        with pytest.raises(UserError, match="robust: a warm-up has no robust mean; set it on the base"):
            ALGORITHMS[name](robust=robust)
        return
    if name in REFUSED:
        with pytest.raises(UserError, match=f"{REFUSED[name]} cannot be combined with robust='trimmed-mean'"):
            worlds.simulation(ALGORITHMS[name](robust=robust))
        return
    sim = worlds.simulation(ALGORITHMS[name](robust=robust), num_rounds=1, local_epochs=1)
    sim.run()
    assert sim.algorithm.needs_uploads()


def test_other_slots_stand_beside_it_or_are_refused() -> None:
    with pytest.raises(UserError, match="The plug-in weights of FedAvg cannot be combined with robust='median'"):
        worlds.simulation(FedAvg(weights="cowa", robust=Robust()))
    with pytest.raises(UserError, match="LGFedAvg cannot be combined with robust='median', because with its settings"):
        worlds.simulation(LGFedAvg(warm_start=0.5, robust=Robust()))
    robust = Robust(rule="krum", share=0.34)
    sim = worlds.simulation(FedAvg(robust=robust, inherit=Inherit(), inference="per-sample"), num_rounds=2)
    warm = worlds.simulation(FedPeWS(base=FedAvg(robust=robust), warmup_share=0.5), num_rounds=4)
    for s in (sim, warm):
        s.run()
        assert s.algorithm.needs_uploads()


def test_impossible_settings_are_refused() -> None:
    for settings, message in (
        ({"rule": "mean"}, "rule='mean': possible are clip, median, trimmed-mean, krum"),
        ({"share": 0.5}, r"share=0.5: must be in \[0, 0.5\)"),
        ({"share": math.nan}, "share=nan: must be in"),
        *(({"bound": b}, f"bound={b}: must be finite and not negative") for b in (-1.0, math.inf, math.nan)),
    ):
        with pytest.raises(UserError, match=message):
            Robust(**settings)  # type: ignore[arg-type]
