"""Outputs of a model for inputs that everybody draws alike: they tell whether server and clients run the same code.

The hash of the first weights does not: a model with ReLU and one with Tanh have the same weights. So the server sends
some outputs of its own with what is agreed on, and every node compares them with those of its model, in each process
that trains or scores.

They are computed on the CPU in float32 and in evaluation mode, whatever the run computes on. Inputs and weights come
from numbers that are the same on every machine: `torch.rand` has no rounding. The weights are the first ones, each
changed a little, since a last layer of zeros would hide whatever comes before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from personafl.core import rng
from personafl.core.errors import UserError
from personafl.core.types import Params
from personafl.models import StackedModel

MOST_OUTPUTS = 32  # that are compared, spread over all there are
TOLERANCE = 1e-4
"""By how much outputs may differ, as a share of the largest.

The instruction sets of one processor (SSE, AVX2, AVX-512) and numbers of threads made differences of up to 4e-6 in the
shipped models: rounding, in the weights as in the products.
"""


class OtherModelError(UserError):
    """A model is not the one agreed on."""


def first_outputs(model: StackedModel) -> tuple[float, ...]:
    """Compute some outputs of a model that has been built and is still where it was built, on the CPU in float32.

    Returns:
        At most `MOST_OUTPUTS` numbers; none where the outputs for all weights and inputs that are tried are not finite.
    """
    with rng.torch_generator(), torch.no_grad():
        for params, x in _trials(model):
            try:
                out = model({n: t[None] for n, t in params.items()}, x[None]).flatten().double()
            except Exception:  # of a forward that does not take every input, such as numbers that stand for rows
                continue
            places = torch.linspace(0, len(out) - 1, min(len(out), MOST_OUTPUTS)).round().long()
            if (chosen := out[places]).isfinite().all():
                return tuple(float(f"{value:.7g}") for value in chosen.tolist())
    return ()


def check_outputs(
    mine: Sequence[float],
    agreed: Sequence[float],
    what: str = "it runs model code that gives other outputs than the server's for the same weights",
) -> None:
    """Refuse a model whose outputs are not those agreed on.

    Args:
        mine: What `first_outputs` gives for it.
        agreed: The same of the server that began the experiment; nothing is compared where there are none.
        what: The message of the error, to which the difference is added.

    Raises:
        OtherModelError: They differ by more than the tolerance.
    """
    if not agreed:
        return
    largest = max(map(abs, agreed))
    if len(mine) == len(agreed):
        apart = max(abs(a - b) for a, b in zip(mine, agreed, strict=True))
        if apart <= TOLERANCE * largest:
            return
        difference = f"largest difference {apart:.2g}, largest output {largest:.2g}, tolerance {TOLERANCE:g} of it"
    else:
        difference = f"{len(mine)} outputs where the server has {len(agreed)}"
    raise OtherModelError(f"{what} ({difference}); the module of the model must be the same everywhere")


def _trials(model: StackedModel) -> Iterator[tuple[Params, Tensor]]:
    """Weights and inputs, the most telling first."""
    draw = torch.Generator().manual_seed(0)
    inputs = _inputs(model, draw)
    for params in (_changed(model.initial, draw), model.initial):
        for x in inputs:
            yield params, x


def _changed(weights: Params, draw: torch.Generator) -> Params:
    """Return weights of which each is another, also where all of a tensor are zero or one."""
    changed = {}
    for n in sorted(weights):
        t = weights[n]
        if t.is_floating_point():
            t = t + (0.1 * t.abs() + 0.01) * _uniform(t.shape, draw).to(t.dtype)
        changed[n] = t
    return changed


def _inputs(model: StackedModel, draw: torch.Generator) -> list[Tensor]:
    """Return two drawn inputs of the model's form, and after them two of those that it was built with."""
    example = model.example
    shape = torch.Size((2, *example.shape[1:]))
    if example.is_floating_point():
        drawn = 2 * _uniform(shape, draw).to(example.dtype)
    else:  # tokens: those that every table of the model has
        tables = [m.num_embeddings for m in model.module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
        drawn = torch.randint(min(tables, default=1), shape, generator=draw).to(example.dtype)
    return [drawn, example.expand(shape).clone()]


def _uniform(shape: torch.Size, draw: torch.Generator) -> Tensor:
    """Draw numbers between -1 and 1, which are the same to the bit everywhere."""
    return 2 * torch.rand(shape, generator=draw) - 1
