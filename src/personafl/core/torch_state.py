"""Context managers that change settings of PyTorch for the whole process: precision and threads."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from personafl.core.types import Arithmetic

CPU = torch.device("cpu")


@contextmanager
def products(precision: Arithmetic, device: torch.device = CPU, *, recurrent: bool = True) -> Iterator[None]:
    """Round the factors of matrix products and convolutions on a GPU, or not, as the precision says.

    Kernels and recordings are made on the GPU at work, also where it is not the first one.
    Nothing else of PyTorch's state around a run changes its numbers: no autocast, no coarser products, no switched-off
    gradients.
    """
    conv = torch.backends.cudnn
    before = torch.get_float32_matmul_precision(), conv.allow_tf32
    coarse = precision in ("tf32", "bf16")
    high = coarse and (device.type == "cuda" or torch.cuda.is_available())  # which asks the driver
    torch.set_float32_matmul_precision("high" if high else "highest")
    conv.allow_tf32 = coarse
    try:
        changes = _changes(device, recurrent)
        if not changes:
            yield
            return
        with ExitStack() as entered:
            for change in changes:
                entered.enter_context(change)
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        conv.allow_tf32 = before[1]


def _changes(device: torch.device, recurrent: bool) -> list[AbstractContextManager[object]]:
    """What is to change of PyTorch's state around a run: to set what is set already would cost time in every round."""
    found: list[AbstractContextManager[object]] = []
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        found.append(torch.cuda.device(device))
    if device.type == "cuda" and recurrent:
        found.append(_without_cudnn_warning())
    if torch.is_inference_mode_enabled():
        found.append(torch.inference_mode(False))
    if not torch.is_grad_enabled():
        found.append(torch.enable_grad())
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            found.append(torch.autocast(kind, enabled=False))
    return found


@contextmanager
def _without_cudnn_warning() -> Iterator[None]:
    """Clients' weights are rows of a stack: cuDNN puts those of a recurrent layer together at every call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        yield


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with this many threads inside an operation, then as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
