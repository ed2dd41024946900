"""Outputs of a model for inputs that everybody draws alike: they show whether two processes run the same model code.

Hashes of weights do not show that: a model with ReLU and one with Tanh have the same weights. So a run folder has some
outputs of its model, with which those of the model it is read with are compared, and the server of a deployment sends
some to every node.

They are computed in evaluation mode when the model is built, on the CPU in float32. Inputs and weights come
from numbers that are the same on every machine: `torch.rand` has no rounding. The weights are the first ones, each
changed a little, since a last layer of zeros would hide whatever comes before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from personafl.core import rng
from personafl.core.types import Params

MOST_OUTPUTS = 32  # that are compared, spread over all there are
TOLERANCE = 1e-4
"""By how much outputs may differ, as a share of the largest.

The instruction sets of one processor (SSE, AVX2, AVX-512) and numbers of threads made differences of up to 4e-6 in the
shipped models: rounding, in the weights as in the products.
"""


def sample_outputs(
    forward: Callable[[Params, Tensor], Tensor], module: nn.Module, initial: Params, example: Tensor
) -> tuple[float, ...]:
    """Compute some outputs of a model.

    Args:
        forward: Outputs for stacked parameters and inputs, as `StackedModel` gives them.
        module: The model.
        initial: Its first weights.
        example: An input that it was built with, as a batch.

    Returns:
        At most `MOST_OUTPUTS` numbers; none where the outputs for all weights and inputs that are tried are not finite,
        or come in half precision, which differs too much between processors.
    """
    with rng.torch_generator(), torch.no_grad():
        for params, x in _trials(module, initial, example):
            try:
                out = forward({n: t[None] for n, t in params.items()}, x[None]).flatten()
            except Exception:  # of a forward that does not take every input, such as numbers that stand for rows
                continue
            if out.dtype not in (torch.float32, torch.float64):
                return ()
            places = torch.linspace(0, len(out) - 1, min(len(out), MOST_OUTPUTS)).round().long()
            if (chosen := out[places]).isfinite().all():
                return tuple(float(f"{value:.7g}") for value in chosen.tolist())
    return ()


def outputs_difference(mine: Sequence[float], expected: Sequence[float]) -> str | None:
    """Describe how outputs of a model differ from those that are expected.

    Args:
        mine: What `sample_outputs` gives for a model.
        expected: What it gave elsewhere; nothing is compared where there are none.

    Returns:
        The largest difference and the tolerance, in words; None where they agree within the tolerance.
    """
    if not expected:
        return None
    if len(mine) != len(expected):
        return f"{len(mine)} outputs in place of {len(expected)}"
    largest = max(map(abs, expected))
    apart = max(abs(a - b) for a, b in zip(mine, expected, strict=True))
    if apart <= TOLERANCE * largest:
        return None
    return f"largest difference {apart:.2g}, largest output {largest:.2g}, tolerance {TOLERANCE:g} of it"


def _trials(module: nn.Module, initial: Params, example: Tensor) -> Iterator[tuple[Params, Tensor]]:
    """Weights and inputs, the most telling first."""
    draw = torch.Generator().manual_seed(0)
    inputs = _inputs(module, example, draw)
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    initial = {n: t.to(held[n]) for n, t in initial.items()}  # weights that were read may be of another type
    floats = [t for t in initial.values() if t.is_floating_point()]
    for params in (_changed(initial, draw), initial):
        for x in inputs:
            yield params, x.to(floats[0]) if floats and x.is_floating_point() else x


def _changed(weights: Params, draw: torch.Generator) -> Params:
    """Return weights of which each is another, also where all of a tensor are zero or one."""
    changed = {}
    for n in sorted(weights):
        t = weights[n]
        if t.is_floating_point():
            t = t + (0.1 * t.abs() + 0.01) * _uniform(t.shape, draw).to(t)
        changed[n] = t
    return changed


def _inputs(module: nn.Module, example: Tensor, draw: torch.Generator) -> list[Tensor]:
    """Return two drawn inputs of the model's form, and after them two of those that it was built with."""
    shape = torch.Size((2, *example.shape[1:]))
    if example.is_floating_point():
        drawn = 2 * _uniform(shape, draw).to(example.dtype)
    else:  # tokens: those that every table of the model has
        tables = [m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        drawn = torch.randint(min(tables, default=1), shape, generator=draw).to(example.dtype)
    return [drawn, example.expand(shape).clone()]


def _uniform(shape: torch.Size, draw: torch.Generator) -> Tensor:
    """Draw numbers between -1 and 1, which are the same to the bit everywhere."""
    return 2 * torch.rand(shape, generator=draw) - 1
