"""Assertions and short cuts that tests of several methods share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from personafl import Algorithm, Simulation
from personafl.core import wire
from personafl.core.types import Download, Masked, Params, Payload, Round
from personafl.engine.local import Outcome, client_round
from tests import worlds


def assert_close(a: Params, b: Params, names: Iterable[str] | None = None, tolerance: float = 1e-11) -> None:
    """Trees agree in these names, or in all of the first one's."""
    for n in a if names is None else names:
        torch.testing.assert_close(a[n], b[n], rtol=tolerance, atol=tolerance, msg=lambda m, n=n: f"{n}: {m}")


def assert_agree(a: Params, b: Params, tolerance: float = 0.0) -> None:
    """Trees have the same names and agree in all of them, truth values and counts exactly."""
    assert a.keys() == b.keys()
    for n in a:
        exact = not a[n].is_floating_point()
        torch.testing.assert_close(
            a[n],
            b[n],
            rtol=0 if exact else tolerance,
            atol=0 if exact else tolerance,
            msg=lambda m, n=n: f"{n}: {m}",
        )


def assert_near(found: Tensor, wanted: Tensor, share: float) -> None:
    """All numbers are finite, and none is off by more than this share of the largest."""
    assert found.isfinite().all()
    assert (found.double() - wanted).abs().max() <= share * wanted.abs().max()


def two_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], *, graph: bool = False) -> list[Tensor]:
    """The gradient of a loss of the outputs, then that of a sum over this gradient: a second derivative.

    With `graph`, the second one can be differentiated as well.
    """

    def weighed(t: Tensor) -> Tensor:
        return (torch.arange(t.numel(), dtype=torch.float64, device=t.device).cos().view(t.shape).to(t.dtype) * t).sum()

    first = torch.autograd.grad(weighed(function(*inputs).square()), inputs, create_graph=True)
    total = torch.stack([weighed(g) for g in first]).sum()
    return [*(g.detach() for g in first), *torch.autograd.grad(total, inputs, create_graph=graph)]


def played(algorithm: Algorithm, kind: str = "mlp", **options: object) -> Simulation:
    sim = worlds.simulation(algorithm, kind, **options)
    sim.run()
    return sim


def everyone(sim: Simulation) -> Params:
    return sim.store.gather(sim.everybody)


def rehearsed(sim: Simulation, ids: Tensor | None = None) -> tuple[Round, Tensor, Outcome]:
    """What the clients of the next stage would do in it; the simulation stays as it is."""
    stage = sim.schedule[sim.played]
    rnd = Round(stage, sim.algorithm.rate(stage))
    ids = sim.cohort(stage) if ids is None else ids
    down = sim.download(ids, rnd) if stage.down else Download()
    data = sim.federation.examples("train", ids)
    return rnd, ids, client_round(sim.algorithm, sim.task, data, sim.store.gather(ids), down, rnd)


def rows_of(sim: Simulation, client: int, split: str = "train") -> tuple[Tensor, Tensor]:
    """A client's examples and labels."""
    rows = sim.federation.examples(split, torch.tensor([client])).rows[0]  # type: ignore[arg-type]
    return sim.federation.source.x[rows], sim.federation.source.y[rows]


def outputs(params: Params, x: Tensor) -> Tensor:
    """Outputs of the small MLP as a plain module."""
    return torch.func.functional_call(worlds.module().double(), params, (x,))


def hidden(params: Params, x: Tensor) -> Tensor:
    """What enters the head of the small MLP."""
    for i in range(2):
        x = (x @ params[f"layers.{i}.weight"].T + params[f"layers.{i}.bias"]).relu()
    return x


def cross_entropy(params: Params, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(outputs(params, x), y)


def gradient(params: Params, x: Tensor, y: Tensor) -> Params:
    """The gradient of the mean cross-entropy of the small MLP."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in params.items()}
    return dict(zip(leaves, torch.autograd.grad(cross_entropy(leaves, x, y), list(leaves.values())), strict=True))


def row(payload: Payload, c: int) -> Payload:
    return {n: Masked(t.values[c], t.mask[c], t.known) if isinstance(t, Masked) else t[c] for n, t in payload.items()}


def assert_a_stack_equals_each_client_alone(algorithm: Algorithm, tolerance: float = 1e-10, **options: object) -> None:
    together, alone = (played(algorithm, chunk=c, **options) for c in (100, 1))
    assert together.totals == alone.totals
    assert_agree(together.server, alone.server, tolerance)
    assert_agree(everyone(together), everyone(alone), tolerance)
    assert_agree(together.known.gather(together.everybody), alone.known.gather(alone.everybody), tolerance)
    one, other = (sim.deployed_models(sim.model, sim.everybody) for sim in (together, alone))
    assert_agree(one, other, tolerance)


def assert_counted_bytes_are_packed_bytes(algorithm: Algorithm, **options: object) -> None:
    sim = worlds.simulation(algorithm, **options)
    up = down = 0
    while sim.played < len(sim.schedule):
        rnd, ids, done = rehearsed(sim) if len(sim.cohort(sim.schedule[sim.played])) else (None, (), None)
        if rnd is not None and done is not None:
            sent = sim.download(ids, rnd) if rnd.stage.down else Download()
            if rnd.stage.down:
                down += sum(len(wire.pack(sent.shared | row(sent.own, c))) for c in range(len(ids)))
            if rnd.stage.up:
                up += sum(len(wire.pack(row(done.upload, c))) for c in range(len(ids)))
        sim.step()
    assert (sim.totals.up_bytes, sim.totals.down_bytes) == (up, down)


def assert_nothing_hidden_travels(algorithm: Algorithm, **options: object) -> None:
    plain, packed = played(algorithm, **options), played(algorithm, through_wire=True, **options)
    assert_agree(plain.server, packed.server)
    assert_agree(everyone(plain), everyone(packed))
