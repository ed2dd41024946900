"""How a cohort is laid over the machine: clients per stack, stacks at a time, threads per stack.

Found by measurement (`benchmarks/cpu.py`), and the same for every method:

- GPU: one stack, or several of a few GiB: larger ones are no faster. Models whose clients run one at a time have
  eight of them side by side, or as many as fit: with four a GPU is busy with larger ones, smaller ones gain a little.
- CPU, convolutions, recurrent layers, and minibatches with many activations: they gain nothing from stacking, so
  clients run one by one, one thread each, as many at a time as there are threads. The smallest convolutions and
  recurrent layers are an exception: there Python takes longer than the numbers do.
- CPU, everything else: one stack, or several whose weights are 8 MiB, side by side: a larger one takes up to twice as
  long. Small passes run on one thread: a second one gains nothing when the machine is quiet, and costs many times the
  pass when it is not.

On a CPU every operation runs on one thread but for the batched products of a stack, which give each thread whole
matrices (`models/layers.py`). So the number of threads decides who computes a number, not in which order it is summed,
and results do not depend on it. There are two exceptions: a user may give each client several threads, for rounds of
few clients on many cores; and modules that draw random numbers of their own run one client at a time, on all threads.

And where what clients keep has its home: on the device, in main memory, or in a folder.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from personafl import accel
from personafl.core import torch_state
from personafl.core.errors import UserError
from personafl.core.types import Training
from personafl.data import batches
from personafl.models.stacked import StackedModel
from personafl.storage.store import HOST
from personafl.storage.store_files import RESIDENT

P = TypeVar("P")
T = TypeVar("T")
LARGE = 1e6  # numbers a client's minibatch leaves: stacked, they are in no cache, and new pages for every operation
STACKED = 2**23  # bytes of the weights of a CPU's stack: beyond, every operation waits for new pages of memory
LIGHT = 4e7  # FLOP of a client's step below which convolutions and recurrent layers gain from a stack
SMALL = 5e6  # FLOP of a stacked training step, or of a pass without training
ENOUGH = 6 * 2.0**30  # bytes of a stack that keeps a GPU busy
PLENTY = 16 * 2.0**30  # of one whose clients run one at a time
FEW = 5  # clients a CPU's stack has at least, if there is memory for them
LANES = 8  # clients side by side on a GPU, of models that run one at a time
PASS = 2.0**30  # bytes of activations of a pass without training that do, if all were kept


@dataclass(frozen=True)
class ExecutionPlan:
    """How clients lie over the machine. A sweep is a pass over data without training."""

    chunk: int  # clients per stack
    workers: int  # stacks at a time
    threads: int  # of batched products, in training
    sweep_threads: int = 1
    operations: int = 1  # threads of any other operation
    activations: float = PASS  # bytes a sweep may leave on a GPU, if all were kept
    lanes: int = 0  # clients side by side on a GPU, where they run one at a time


def choose(
    model: StackedModel,
    training: Training,
    device: torch.device,
    sizes: Tensor,
    chunk: int = 0,
    *,
    kept: int = 0,
    room: float = 0.0,
    threads: int = 1,
    threads_per_client: int = 1,
) -> ExecutionPlan:
    """The layout for clients with these numbers of examples; `chunk` fixes the clients per stack.

    `kept` are the bytes a client comes with, `room` those that all stacks together may take up (0: a share of what
    is free). `threads` are there to be used on a CPU, so many of them by each client's operations.
    """
    if device.type == "cuda":
        threads = 1
    everything = threads if model.random else min(threads, threads_per_client)
    info, batch = model.info, min(training.batch_size, int(sizes.max()))
    forward = info.other_flops + sum(2 * layer.macs for layer in info.layers)
    alone = (not model.stacks and 3 * forward * batch > LIGHT) or batch * info.activations > LARGE
    if device.type == "cpu" and not chunk and alone:
        fit = _fitting(model, training, device, sizes, kept, room)[0] if room else threads
        return ExecutionPlan(1, max(1, min(threads // everything, fit)), 1, operations=everything)
    fits, lanes = _fitting(model, training, device, sizes, kept, room)
    workers = 1
    if device.type == "cpu" and not chunk:
        chunk = min(fits, max(FEW, STACKED // max(1, _weight_bytes(model, training))))
        stacks = min(fits // chunk, -(-training.cohort(len(sizes)) // chunk))
        workers = max(1, min(threads // everything, stacks))
    chunk = chunk or fits
    step = 3 * forward * batch * min(chunk, training.cohort(len(sizes)))
    sweep = forward * min(batches.SWEEP, int(sizes.max())) * min(chunk, len(sizes))
    in_training, in_sweeps = (1 if flops < SMALL else threads for flops in (step, sweep))
    activations = min(PASS, room / 4) if room else PASS
    return ExecutionPlan(chunk, workers, in_training, in_sweeps, everything, activations, lanes)


def _fitting(
    model: StackedModel, training: Training, device: torch.device, sizes: Tensor, kept: int, room: float
) -> tuple[int, int]:
    """How many clients fit into a stack, and how many run side by side where they do so one at a time.

    By the peaks measured: weights, gradients, momenta, anchors, uploads and their terms come to nine models and four
    times what is kept; then what a minibatch leaves for its backward pass, or a sweep on a CPU.
    """
    batch, sweep = min(training.batch_size, int(sizes.max())), min(batches.SWEEP, int(sizes.max()))
    examples = max(6 * batch, 0 if device.type == "cuda" else 2 * sweep)
    held = 9 * _weight_bytes(model, training) + 4 * kept
    passing = _width(training) * examples * max(model.info.activations, 1)
    if device.type != "cuda" or not model.one_by_one or not accel.ENABLED:
        room = room or (min(_free(device) / 2, ENOUGH) if device.type == "cuda" else _free(device) / 4)
        return max(1, int(room / (held + passing))), 0
    room, cohort = room or min(_free(device) / 2, PLENTY), training.cohort(len(sizes))
    passing //= 3  # PyTorch's own layers keep less, and a lane's memory is used again from client to client
    lanes = max(1, min(LANES, cohort, int(room / 2 / passing)))
    fits = max(1, int((room - lanes * passing) / held))
    return fits if fits >= cohort else max(fits // lanes * lanes, 1), lanes


def _width(training: Training) -> int:
    return 8 if training.precision == "float64" else 4


def _weight_bytes(model: StackedModel, training: Training) -> int:
    return _width(training) * sum(torch.Size(s).numel() for s in model.info.shapes.values())


# Memory


def _free(device: torch.device) -> float:
    """Bytes of a device's memory that are free; 4 GiB where the system does not say."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError):
        return 2.0**32


def _used(device: torch.device) -> float:
    """Bytes of it that this process holds; 0 where the system does not say."""
    if device.type == "cuda":
        return float(torch.cuda.memory_allocated(device))
    try:
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0.0


def store_location(
    store: str | Path, rows: int, each: int, device: torch.device, memory: float | None, spill: Path | None
) -> tuple[torch.device | Path, float]:
    """Where so many rows of so many bytes are kept, and what is left of a limit in GiB for stacks (0: no limit).

    `auto` takes the device while they need less than a quarter of what is free there, then main memory by the same
    rule, then a folder: `spill`, or a temporary one.
    """
    total = float(rows) * each
    left = _free(device) if memory is None else memory * 2**30 - _used(device)
    if left <= 0:
        raise UserError(
            f"memory={memory}: {_used(device) / 2**30:.2f} GiB are in use before the first round; allow more"
        )
    host = left if device.type == "cpu" else _free(HOST) if memory is None else min(_free(HOST), memory * 2**30)
    if isinstance(store, Path) or store not in ("auto", "device", "host"):
        home: torch.device | Path = Path(store)
    elif store == "auto":
        home = device if total <= left / 4 else HOST if total <= host / 4 else spill or temporary()
    else:
        home = device if store == "device" else HOST
        if total > (there := left if home == device else host):
            raise UserError(
                f"store={store!r}: up to {rows} clients of {each} bytes, and {there / 2**30:.2f} GiB are free; "
                "use auto or a folder"
            )
    if memory is None:
        return home, 0.0
    taken = total if home == device else 2 * RESIDENT if device.type == "cpu" else 0.0  # mapped files are resident too
    return home, max((left - taken) * (0.5 if device.type == "cpu" else 0.8), 1.0)  # allocators leave holes


def temporary() -> Path:
    """A folder that is there until the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="personafl-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def each(
    plan: ExecutionPlan,
    model: StackedModel,
    ids: Tensor,
    work: Callable[[StackedModel, P], T],
    prepare: Callable[[Tensor], P],
) -> Iterator[T]:
    """Apply `work` to what `prepare` makes of every chunk of a cohort; results come in order.

    `prepare` runs in the calling thread, `work` perhaps in others.
    """
    count = ids.shape[0]
    chunks = (prepare(ids[i : i + plan.chunk]) for i in range(0, count, plan.chunk))
    for_products = plan.threads if plan.operations == 1 else 0
    with torch_state.threads(plan.operations):
        if plan.workers == 1 or count <= plan.chunk:
            for part in chunks:
                with model.threaded(for_products):
                    done = work(model, part)
                yield done
            return

        def job(part: P) -> T:
            with model.borrowed() as mine, mine.threaded(min(for_products, 1)):
                return work(mine, part)

        own = (plan.operations,)  # PyTorch's setting is partly per thread
        with ThreadPoolExecutor(plan.workers, initializer=torch.set_num_threads, initargs=own) as pool:
            ahead: deque[Future[T]] = deque()
            for part in chunks:
                ahead.append(pool.submit(job, part))
                if len(ahead) > 4 * plan.workers:  # results wait in memory
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
