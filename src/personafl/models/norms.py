"""Which parameters of a module belong to its normalisation layers."""

from __future__ import annotations

import re

from torch import nn

_NAME = re.compile(r"norm(\dd)?$", re.IGNORECASE)  # LayerNorm, BatchNorm2d, LlamaRMSNorm; not NormedLinear


def norm_parameters(module: nn.Module) -> frozenset[str]:
    """Name the parameters of normalisation layers.

    A layer is one if the name of its class, or of a class it is derived from, ends in "Norm", as those of PyTorch do.
    Only its own parameters count, not those of layers inside it.
    """
    return frozenset(
        f"{path}.{name}".lstrip(".")
        for path, m in module.named_modules()
        if any(_NAME.search(kind.__name__) for kind in type(m).__mro__)
        for name, _ in m.named_parameters(recurse=False)
    )
