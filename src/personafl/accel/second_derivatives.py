"""Second derivatives through the fused operations of this package.

A fused operation computes its gradient by hand, so autograd cannot differentiate that gradient again. When a loss asks
for a graph (`torch.autograd.grad(..., create_graph=True)`), the backward pass runs with gradients enabled; the
operation is then computed once more with PyTorch's own functions, and autograd differentiates those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def graph_requested() -> bool:
    """Return whether the backward pass that is running must itself be differentiable."""
    return torch.is_grad_enabled()


def differentiable_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    grads: Sequence[Tensor],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Compute the gradients of a function of plain PyTorch operations, as part of the graph.

    Args:
        function: What the fused operation computes, as a function of `inputs`.
        inputs: The tensors the fused operation was given. They must be saved inputs, which carry their own graph.
        grads: The gradients of the outputs.
        wanted: For each input, whether its gradient is needed.

    Returns:
        One gradient for each input, None where none is wanted or the output does not depend on it.
    """
    with torch.enable_grad():
        views = [None if t is None else t.view_as(t) for t in inputs]
        needed = [v for v, want in zip(views, wanted, strict=True) if want and v is not None]
        found = torch.autograd.grad(function(*views), needed, list(grads), create_graph=True, allow_unused=True)
    rest = iter(found)
    return [next(rest) if want and v is not None else None for v, want in zip(views, wanted, strict=True)]
