"""How a cohort is laid over the machine: clients per stack, stacks at a time, threads per stack.

Found by measurement (`benchmarks/cpu.py`), and the same for every method:

- GPU: one stack, as large as memory allows.
- CPU, convolutions: they gain nothing from stacking, so clients run one by one, one thread each, as many at a
  time as there are threads.
- CPU, everything else: one stack. Small steps run on one thread: a second one gains little when the machine
  is quiet, and costs many times the step when it is not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from personafl.core.types import Arithmetic, Training
from personafl.models.stacked import StackedModel

T = TypeVar("T")
SMALL = 5e7  # FLOP of a stacked training step


@dataclass(frozen=True)
class Layout:
    """Clients per stack, stacks at a time, threads inside each."""

    chunk: int
    workers: int
    threads: int


def choose(model: StackedModel, training: Training, device: torch.device, sizes: Tensor, chunk: int = 0) -> Layout:
    """The layout for clients with these numbers of examples; `chunk` fixes the clients per stack."""
    threads = torch.get_num_threads()
    if device.type == "cpu" and model.convolutional and not chunk:
        return Layout(1, threads, 1) if model.parallel else Layout(1, 1, threads)
    info = model.info
    batch = min(training.batch_size, int(sizes.max()))
    chunk = chunk or _fitting(model, training, device, batch)
    forward = info.other_flops + sum(2 * layer.macs for layer in info.layers)
    step = 3 * forward * batch * min(chunk, training.cohort(len(sizes)))
    return Layout(chunk, 1, 1 if step < SMALL else threads)


def _fitting(model: StackedModel, training: Training, device: torch.device, batch: int) -> int:
    """How many clients fit: weights, gradients, momenta, anchors, and what a minibatch leaves for its backward pass."""
    numbers = 6 * sum(torch.Size(s).numel() for s in model.info.shapes.values())
    numbers += 4 * batch * max(model.info.activations, 1)
    room = torch.cuda.mem_get_info(device)[0] / 2 if device.type == "cuda" else _free_memory() / 4
    width = 8 if training.precision == "float64" else 4
    return max(1, int(room / (numbers * width)))


def _free_memory() -> float:
    """Bytes of main memory that are free; 4 GiB where the system does not say."""
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):
        return 2.0**32


def each(layout: Layout, model: StackedModel, ids: Tensor, work: Callable[[StackedModel, Tensor], T]) -> Iterator[T]:
    """Apply `work` to every chunk of a cohort; results come in order."""
    if not len(ids):
        return
    chunks = torch.split(ids, layout.chunk)
    if layout.workers == 1 or len(chunks) == 1:
        with _threads(layout.threads * layout.workers if len(chunks) == 1 else layout.threads):
            for part in chunks:
                yield work(model, part)
        return
    spare = [model.copy() for _ in range(layout.workers)]

    def job(part: Tensor) -> T:
        mine = spare.pop()
        try:
            return work(mine, part)
        finally:
            spare.append(mine)

    with _threads(layout.threads):
        threads = (layout.threads,)  # PyTorch's setting is partly per thread
        with ThreadPoolExecutor(layout.workers, initializer=torch.set_num_threads, initargs=threads) as pool:
            yield from pool.map(job, chunks)


@contextmanager
def products(precision: Arithmetic) -> Iterator[None]:
    """Let a GPU round the factors of matrix products and convolutions, or not, as the precision says."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, conv.allow_tf32
    matmul.allow_tf32 = conv.allow_tf32 = precision in ("tf32", "bf16")
    try:
        yield
    finally:
        matmul.allow_tf32, conv.allow_tf32 = before


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Run with this many threads inside an operation, then as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
