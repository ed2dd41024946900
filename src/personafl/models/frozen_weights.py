"""Weights of a module that no client trains: frozen parameters and constant buffers.

Clients share them, so they are neither stacked, kept nor sent. Outputs depend on them like on other weights, so a run
saves the smaller ones and a hash of each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor, nn

from personafl.core.types import Params
from personafl.models.layers import Stacked

SAVED_FROZEN = 2**26  # bytes of frozen weights that are saved at most, the smallest tensors first; all are hashed
SAVED_TYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)


def frozen_weights(module: nn.Module, trained: Collection[str]) -> Params:
    """Return a module's parameters and buffers but for those named, and for counters of batches, which change nothing.

    Buffers that a module does not save itself (`persistent=False`) are among them.
    """
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {
        n: t.detach() for n, t in tensors.items() if n not in trained and n.rpartition(".")[2] != "num_batches_tracked"
    }


def small_weights(frozen: Params) -> Params:
    """Return copies of the frozen weights that a run saves, in main memory and of the type they have now."""
    room, copies = SAVED_FROZEN, {}
    for n, t in sorted(frozen.items(), key=lambda item: size_in_bytes(item[1])):
        room -= size_in_bytes(t)
        if room >= 0 and t.layout == torch.strided and t.dtype in SAVED_TYPES:
            copies[n] = t.detach().resolve_conj().resolve_neg().to("cpu", copy=True)
    return copies


def size_in_bytes(t: Tensor) -> int:
    """Return how many bytes a tensor has, or would have if it were not sparse."""
    return t.numel() * t.element_size()


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
    rotations = [
        (m, n, b)
        for m in module.modules()
        for n, b in m.named_buffers(recurse=False, remove_duplicate=False)
        if b.is_complex()
    ]
    for m, n, _ in rotations:
        setattr(m, n, None)
    module.to(device, dtype)
    for m, n, b in rotations:
        setattr(m, n, b.to(device, dtype.to_complex()))
    return module


def complex_as_pairs(weights: Mapping[str, Tensor]) -> Params:
    """Return tensors with pairs of real numbers in place of complex ones, which files do not hold."""
    return {n: torch.view_as_real(t) if t.is_complex() else t for n, t in weights.items()}


def pairs_as_complex(values: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Params:
    """Return tensors with complex numbers in place of pairs where those of the same name in `like` are complex."""

    def is_pairs(n: str, t: Tensor) -> bool:
        there = like.get(n)
        return there is not None and there.is_complex() and t.is_floating_point() and t.shape == (*there.shape, 2)

    # A view may not be aligned, so the numbers are copied.
    return {n: torch.complex(*t.unbind(-1)) if is_pairs(n, t) else t for n, t in values.items()}


def restore_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write these values into the tensors of a module that have their names, or had them before it was folded."""
    with torch.no_grad():
        for n, t in unfolded_tensors(module):
            if n in weights and not torch.equal(t, weights[n].to(t)):  # which may be a view that cannot be written to
                t.copy_(weights[n])


def unfolded_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters and buffers by the names they had before layers of a stack took its layers' places.

    A tensor with several names comes once for each.
    """
    bare = module.original if isinstance(module, Stacked) else module
    for tensors in (bare.named_parameters, bare.named_buffers):
        for n, t in tensors(recurse=False, remove_duplicate=False):
            yield f"{prefix}{n}", t
    for n, child in bare.named_children():
        yield from unfolded_tensors(child, f"{prefix}{n}.")
