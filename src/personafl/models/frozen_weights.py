"""Weights of a module that no client trains: frozen parameters and constant buffers.

Clients share them, so they are neither stacked, kept nor sent. Outputs depend on them like on other weights, so a run
saves the smaller ones and a hash of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from personafl.core.types import Params


def frozen_weights(module: nn.Module, trained: Collection[str]) -> Params:
    """Return a module's parameters and buffers but for those named, and for counters of batches, which change nothing.

    Buffers that a module does not save itself (`persistent=False`) are among them.
    """
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {
        n: t.detach() for n, t in tensors.items() if n not in trained and n.rpartition(".")[2] != "num_batches_tracked"
    }


def not_persistent(module: nn.Module) -> frozenset[str]:
    """Return the names of buffers that a module computes anew wherever it is built, such as rotary tables."""
    return frozenset(n for n, _ in module.named_buffers()) - module.state_dict(keep_vars=True).keys()


def hash_weights(weights: Mapping[str, Tensor], skip: Collection[str] = ()) -> dict[str, str]:
    """Return a hash of each tensor, its type and shape included, but for the names to skip."""
    return {n: _hash(t) for n, t in weights.items() if n not in skip}


def _hash(t: Tensor) -> str:
    digest = hashlib.sha256(f"{t.dtype} {tuple(t.shape)}".encode())
    values = t.detach().cpu() if t.layout == torch.strided else t.detach().cpu().to_dense()
    values = values.resolve_conj().resolve_neg().contiguous()
    digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def convert_module(module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> nn.Module:
    """Convert a module in place as `module.to` does, but keep complex buffers complex.

    PyTorch would drop their imaginary parts, as of rotary embeddings.
    """
    rotations = [(m, n, b) for m in module.modules() for n, b in m._buffers.items() if b is not None and b.is_complex()]
    for m, n, _ in rotations:
        m._buffers[n] = None
    module.to(device, dtype)
    for m, n, b in rotations:
        m._buffers[n] = b.to(device, dtype.to_complex())
    return module


def restore_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write these values into the tensors of a module that have their names, or had them before it was folded.

    A folded module has its layers inside others, as `original`.
    """
    values = {_without_originals(n): t for n, t in weights.items()}
    with torch.no_grad():
        for n, t in (*module.named_parameters(), *module.named_buffers()):
            value = values.get(_without_originals(n))
            if value is not None and not torch.equal(t, value.to(t)):  # which may be a view that cannot be written to
                t.copy_(value)


def _without_originals(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "original")
