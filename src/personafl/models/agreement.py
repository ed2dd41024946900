"""Whether a stack of clients comes out as each client's module alone: what decides how a module is run.

Two clients with random weights and three examples each, in float64; in float32 where a forward insists on it, and
first where a forward takes long: what agrees there is not looked at again.
Compared are outputs in evaluation and in training, the gradients of all parameters, outputs with padding, and, where
something is random, that a client's draws are its own. Dropout is switched off where draws would differ.

What depends on the number of rows through the data alone does not show there. So stacks that come up in training and
evaluation are compared with stacks of one, on the minibatch at hand (`difference_from_alone`).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from personafl.core.errors import UserError
from personafl.core.types import Params
from personafl.models.frozen_weights import convert_module
from personafl.models.layers import frozen
from personafl.models.patterns import DROPPING

SIZE = 3
KEYS = torch.arange(2)
Near = Callable[[Tensor, Tensor], bool]
NEAR = {torch.float64: 1e-6, torch.float32: 1e-4}  # of the largest number: norms over few examples magnify rounding
Run = Callable[[Params, Tensor, Tensor | None, Tensor | None], Tensor]
"""Outputs `[C, B, ...]` of a stack, from parameters, inputs, what is no padding, and streams in training."""


class WithoutDropout(TorchFunctionMode):
    """Functional dropout that drops nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DROPPING:
            return args[0] if args else kwargs["input"]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Sample:
    """The weights and inputs of two clients, and what the module alone makes of them."""

    params: Params  # [2, ...]
    learnt: Collection[str]
    x: Tensor  # [2, 3, ...]
    evaluations: list[tuple[Tensor, Tensor]]  # inputs, these and others, and outputs
    trained: Tensor | None  # None where the module draws random numbers of its own
    grads: Params  # of the parameters that have one
    padded: Tensor | None  # of the first client without its last example, in training
    slope: Tensor  # of the sum that gradients are taken of


def sample(module: nn.Module, initial: Params, learnt: Collection[str], example: Tensor, dtype: torch.dtype) -> Sample:
    """What stacks are compared with; the module's own errors are raised."""
    draw = torch.Generator().manual_seed(0)
    params = {  # positive noise, so that a running variance stays one
        n: torch.rand(2, *t.shape, generator=draw, dtype=dtype).mul_(0.1).add_(t.to(dtype)) for n, t in initial.items()
    }
    quiet = convert_module(copy.deepcopy(module), dtype)
    for m, name, _ in dropping(quiet):
        setattr(m, name, 0.0)
    evaluations = _answered(quiet, params, example, dtype)
    x, evaluated = evaluations[0]
    slope = torch.rand(evaluated.shape, generator=draw, dtype=dtype) + 0.5
    before = _states()
    both = [_trained(quiet, params, x, slope, learnt, c) for c in range(2)]
    padded = _trained(quiet, params, x[:, : SIZE - 1], None, learnt, 0)[0]
    if _states() != before:
        return Sample(params, learnt, x, evaluations, None, {}, None, slope)
    trained = torch.stack([out for out, _ in both])
    if padded.shape[1:] != trained.shape[2:]:
        raise UserError(f"{type(module).__name__} gives another shape for another number of examples")
    grads = {  # of one client alone, a parameter may have none: zero in a stack
        n: torch.stack([own.get(n, torch.zeros_like(params[n][c])) for c, (_, own) in enumerate(both)])
        for n in learnt
        if any(n in own for _, own in both)
    }
    return Sample(params, learnt, x, evaluations, trained, grads, padded, slope)


def dropping(module: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """The layers within a module that drop numbers, with the attribute that says how many."""
    found: list[tuple[nn.Module, str, float]] = []
    for m in module.modules():
        if isinstance(m, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            found.append((m, "p", m.p))
        elif isinstance(m, nn.RNNBase | nn.MultiheadAttention):
            found.append((m, "dropout", m.dropout))
    return found


def _answered(module: nn.Module, params: Params, example: Tensor, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Inputs of two clients, and the module's outputs in evaluation; like the example where noise will not do."""
    noisy, before = _noisy(example, dtype), _states()
    found: list[tuple[Tensor, Tensor]] = []
    for x in (*noisy, _like(example, dtype)):
        if found and len(found) == len(noisy):
            break
        try:
            found.append((x, _evaluated(module, params, x)))
        except UserError:
            raise
        except Exception as e:
            failed = e
    if not found:
        raise failed
    if _states() != before and not all(torch.equal(_evaluated(module, params, x), out) for x, out in found):
        raise UserError(f"{type(module).__name__} draws random numbers in evaluation; a model must answer alike")
    return found


@torch.no_grad()
def _evaluated(module: nn.Module, params: Params, x: Tensor) -> Tensor:
    found = []
    for c in range(2):
        own = _loaded(module, params, c).eval()
        found.append(_checked(module, own(x[c].clone())))
        _refuse_changed(own, params, c)
    return torch.stack(found)


def _noisy(example: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Examples of two clients that have nothing in common, where numbers may be drawn."""
    drawn = torch.rand(2, SIZE, *example.shape[1:], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if example.is_floating_point():
        spread = float(example.double().std())
        rows = example[torch.tensor([[0, 1, 0], [1, 0, 1]])].to(dtype)
        one_larger, in_turn = [[2.0] * 3, [0.0] * 3], [[0.0, 2.0, 2.0], [2.0, 0.0, 0.0]]
        apart = [torch.tensor(t, dtype=dtype).view(2, SIZE, *[1] * (rows.dim() - 2)) for t in (one_larger, in_turn)]
        return [rows + (2 * drawn.to(dtype) - t) * (spread if spread > 0 else 1.0) for t in apart]
    if example.dtype == torch.bool or int(example.min()) < 0:
        return []
    return [(drawn * (int(example.max()) + 1)).to(example.dtype)]


def _like(example: Tensor, dtype: torch.dtype) -> Tensor:
    rows = example[torch.tensor([[0, 1, 1], [1, 1, 0]])]
    if not rows.is_floating_point():
        return rows
    return rows.to(dtype) * torch.tensor([1.0, 0.5], dtype=dtype).view(2, *[1] * (rows.dim() - 1))


def _checked(module: nn.Module, out: object) -> Tensor:
    name = type(module).__name__
    if not isinstance(out, Tensor):
        raise UserError(f"{name} gives a {type(out).__name__}; a model must give one tensor, [examples, ...]")
    if out.is_complex():
        raise UserError(
            f"{name} returns complex numbers ({out.dtype}); losses and metrics need real ones. Return the real part, "
            "the magnitude (out.abs()), or both parts side by side (torch.view_as_real(out).flatten(1))"
        )
    if out.dim() == 0 or len(out) != SIZE:
        raise UserError(f"{name} gives shape {tuple(out.shape)} for {SIZE} examples; a model gives one row for each")
    return out


def _loaded(module: nn.Module, params: Params, c: int) -> nn.Module:
    """An ordinary module with one client's numbers."""
    own = copy.deepcopy(module)
    own.load_state_dict({n: t[c] for n, t in params.items()}, strict=False)
    return own


def _refuse_changed(own: nn.Module, params: Params, c: int) -> None:
    """Weights are what an optimiser makes of them: a forward that changes them would change them where it likes."""
    for n, p in own.named_parameters():
        if n in params and not torch.equal(p, params[n][c]):
            raise UserError(
                f"{type(own).__name__}: parameter {n!r} is changed by the forward pass; compute with a changed copy of "
                "it instead (an Embedding's max_norm changes it too)"
            )


def _trained(
    module: nn.Module, params: Params, x: Tensor, slope: Tensor | None, learnt: Collection[str], c: int
) -> tuple[Tensor, Params]:
    """One client's outputs in training, and gradients."""
    own = _loaded(module, params, c).train()
    for m in own.modules():
        if frozen(m):
            m.eval()
    with torch.enable_grad(), WithoutDropout():
        out: Tensor = own(x[c].clone())
        total = None if slope is None else (out * slope[c]).sum()
    _refuse_changed(own, params, c)
    if total is None:
        return out.detach(), {}
    named = dict(own.named_parameters())
    found = torch.autograd.grad(total, [named[n] for n in learnt], allow_unused=True)
    return out.detach(), {n: g for n, g in zip(learnt, found, strict=True) if g is not None}


def disagreement(
    run: Run, truth: Sample, switch: Callable[[bool], None], draws: Callable[[], bool], *, whole: bool
) -> str | None:
    """Say what differs between a stack and each of its clients alone; None if nothing does.

    `switch` turns the stack's dropout off and on; `draws` says whether it drew from clients' streams in the last run.
    A stack that calls the module `whole` for each client may draw from PyTorch's generator, seeded each time.
    """
    near = _near(truth.slope.dtype)
    with torch.no_grad():
        if not all(near(run(truth.params, x.clone(), None, None), out) for x, out in truth.evaluations):
            return "outputs in evaluation differ from those of each client alone"
    if truth.trained is None and not whole:
        return "it draws random numbers of its own in training"
    if truth.trained is not None:
        switch(False)
        try:
            with WithoutDropout():
                same = _same_in_training(run, truth, near)
        finally:
            switch(True)
        if not same:
            return "outputs or gradients in training differ from those of each client alone"
    if not _draws_by_client(run, truth, near, draws, whole=whole):
        return "random numbers in training are not each client's own"
    return None


def _same_in_training(run: Run, truth: Sample, near: Near) -> bool:
    assert truth.trained is not None and truth.padded is not None
    own = {n: t.clone().requires_grad_(n in truth.learnt) for n, t in truth.params.items()}
    with torch.enable_grad():
        out = run(own, truth.x.clone(), None, KEYS)
        total = (out * truth.slope).sum()
    found = torch.autograd.grad(total, [own[n] for n in truth.learnt], allow_unused=True)
    grads = {n: g for n, g in zip(truth.learnt, found, strict=True) if g is not None}
    if grads.keys() != truth.grads.keys() or not near(out.detach(), truth.trained):
        return False
    if not all(near(g, truth.grads[n]) for n, g in grads.items()):
        return False
    valid = torch.ones(2, SIZE, dtype=torch.bool)
    valid[0, -1] = False
    with torch.no_grad():
        out = run({n: t.clone() for n, t in truth.params.items()}, truth.x.clone(), valid, KEYS)
    return near(out[0, :-1], truth.padded) and near(out[1], truth.trained[1])


def _draws_by_client(run: Run, truth: Sample, near: Near, draws: Callable[[], bool], *, whole: bool) -> bool:
    """Whether nothing is drawn but from the clients' streams, and those give a client the same whoever is beside it."""

    @torch.no_grad()
    def in_training(rows: slice) -> Tensor:
        own = {n: t[rows].clone() for n, t in truth.params.items()}
        return run(own, truth.x[rows].clone(), None, KEYS[rows])

    before = _states()
    together = in_training(slice(0, 2))
    if _states() != before:
        return False
    if not whole and not draws():
        return True
    alone = torch.cat([in_training(slice(c, c + 1)) for c in range(2)])
    return near(together, in_training(slice(0, 2))) and near(together, alone)


def difference_from_alone(
    run: Run, params: Params, learnt: Collection[str], x: Tensor, valid: Tensor | None, keys: Tensor | None
) -> str | None:
    """Say what differs between a stack and each of its clients as a stack of one; None if nothing does.

    The outputs for a minibatch are compared and, in training, the gradients of a sum of the outputs with random
    weights. Parameters and running statistics stay as they are. A stack of one draws what the client draws in a larger
    one, so dropout stays on. A client whose own numbers are not finite is left out.

    Args:
        run: Outputs of a stack.
        params: What the clients have, `[C, ...]`.
        learnt: The names of the parameters that gradients are compared for.
        x: Inputs, `[C, B, ...]`.
        valid: What is no padding, `[C, B]`; None if there is none.
        keys: The clients' random streams in training; None in evaluation.
    """
    weights: list[Tensor] = []

    def compute(rows: slice) -> list[Tensor]:
        """Outputs `[C, B, ...]`, zero at padded rows, and gradients `[C, ...]`."""
        leaves = {n: params[n][rows].detach().requires_grad_(keys is not None) for n in learnt}
        own = {n: t[rows].detach().clone() for n, t in params.items() if n not in leaves} | leaves
        real = None if valid is None else valid[rows]
        with torch.set_grad_enabled(keys is not None):
            out = run(own, x[rows].detach(), real, None if keys is None else keys[rows])
            if real is not None:
                out = torch.where(real.view(*real.shape, *[1] * (out.dim() - 2)), out, 0)
            if keys is None or not out.requires_grad:
                return [out.detach()]
            if not weights:  # the whole stack comes first
                drawn = torch.rand(out.shape, generator=torch.Generator().manual_seed(0))
                weights.append((drawn + 0.5).to(out.device, out.dtype))
            total = (out * weights[0][rows]).sum()
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        found = zip(leaves.values(), grads, strict=True)
        return [out.detach(), *(torch.zeros_like(t) if g is None else g for t, g in found)]

    together, worst = compute(slice(None)), list[Tensor]()
    for c in range(len(x)):
        try:
            alone = compute(slice(c, c + 1))
        except Exception:  # a forward pass may fail for the rows of one client, with `squeeze` for instance
            continue
        if alone[0].shape[1:] != together[0].shape[1:]:
            return "outputs have other shapes than those of each client alone"
        worst.append(torch.stack([_excess(t[c], a[0]) for t, a in zip(together, alone, strict=True)]))
    if not worst:
        return None
    differs = (torch.stack(worst) > 1).any(0).tolist()  # the one wait for the device
    what = "outputs" if differs[0] else "gradients"
    return f"{what} differ from those of each client alone" if any(differs) else None


def _excess(found: Tensor, wanted: Tensor) -> Tensor:
    """How many times the difference that rounding may make; 0 where what is wanted is not finite."""
    if not wanted.numel():
        return wanted.new_zeros((), dtype=torch.float64)
    bound = NEAR[torch.float32] * (1.0 + wanted.double().abs().amax())
    ratio = ((found.double() - wanted.double()).abs().amax() / bound).nan_to_num(nan=torch.inf)
    return torch.where(wanted.isfinite().all(), ratio, 0.0)


def _states() -> tuple[object, ...]:
    """Where the generators stand that a forward may draw from."""
    return torch.random.get_rng_state().numpy().tobytes(), random.getstate()


def _near(dtype: torch.dtype) -> Near:
    """Whether numbers are equal but for rounding."""
    bound = NEAR.get(dtype, 1e-2)

    def near(a: Tensor, b: Tensor) -> bool:
        if a.shape != b.shape:
            return False
        b = b.to(a.dtype)
        scale = bound * (1.0 + float(b.abs().max()))
        if float((a - b).abs().max()) <= scale:
            return True
        return torch.allclose(a, b, rtol=bound, atol=bound, equal_nan=True)  # what is no number, or is infinite

    return near
