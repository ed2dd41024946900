"""Which examples make up each minibatch of a stack of clients.

Clients are ragged: at step t only those with more than t steps are active. A stack is sorted by
local size, largest first, so the active clients are always a prefix `[:k]` and nobody computes for
those who have finished. The last, short batch of a client's epoch is padded; `valid` says where.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl import accel
from personafl.core import rng, tree
from personafl.core.normalization import Normalization, as_inputs
from personafl.core.types import Batch, Examples, Params

image_kernels: Any = accel.load_kernels("image_kernels")

SWEEP = 256  # examples of a client at a time in passes without training
BLOCK = 2**20  # bytes of minibatches fetched at a time on a CPU
PADDING = 4  # pixels on each side, of augmented images
KEPT = 2**14  # steps of all clients of a layout that is worth keeping
FEW = 2**12  # numbers that a GPU does not order faster than the host


@dataclass(frozen=True)
class Plan:
    """The minibatches of one turn."""

    rows: Tensor  # [C, S, B] int64 into the data
    there: Tensor  # the same where the data are, on the host or on the device
    real: Tensor  # [C, S] int64: examples in each minibatch
    sizes: Tensor  # the same on the host
    steps: Tensor  # [C] int64 on the host, never rising
    active: list[int]  # clients still at work, per step
    full: list[bool]  # whether all their places are filled, per step
    examples: Tensor  # [C] float64 on the host: examples each client processes
    noise: Tensor  # [C, S] random streams of the steps; [C, 0] where there are none
    others: tuple[Plan, ...] = ()  # the same steps with further minibatches, of as many examples

    def client(self, place: int) -> Plan:
        """The minibatches of one of the clients."""
        own, steps = slice(place, place + 1), int(self.steps[place])
        sizes, width = self.sizes[own, :steps], self.rows.shape[2]
        rows, there, real, noise = (t[own, :steps] for t in (self.rows, self.there, self.real, self.noise))
        full = [n == width for n in sizes[0].tolist()]
        others = tuple(other.client(place) for other in self.others)
        return Plan(rows, there, real, sizes, self.steps[own], [1] * steps, full, self.examples[own], noise, others)


def steps_per_epoch(count: Tensor, batch_size: int) -> Tensor:
    return -(-count // batch_size)


def plan(
    data: Examples,
    batch_size: int,
    keys: Tensor,
    *,
    epochs: float = 0.0,
    steps: int = 0,
    least: int = 0,
    first: int | Tensor = 0,
    noise: Tensor | None = None,
    passed: int | Tensor = 0,
) -> Plan:
    """Shuffled minibatches for this many epochs (a fraction is rounded to whole steps, `least` or more) or steps.

    `keys` are the clients' streams of batch orders, `first` the number of each client's first epoch in them; `noise`
    the streams of their steps' noise, if any, of which so many steps have passed.
    """
    counts, (width, home) = data.count.numpy(), (data.rows.shape[1], data.rows.device)
    longest = steps or max(math.ceil(epochs * -(-width // batch_size)), least)
    found = _layout if len(counts) * longest > KEPT else _kept_layout
    layout = found(counts.tobytes(), width, batch_size, epochs, steps, least)
    streams = rng.numbered(keys, layout.epochs, first)
    noises = np.empty((len(counts), 0), np.int64) if noise is None else rng.numbered(noise, layout.numbers, passed)
    sizes = layout.sizes.numpy()
    if streams.size * width <= FEW:  # the host has ordered a handful before a GPU has begun
        order = rng.order_on_host(streams, layout.held, width)
        filled, noise, chosen = _sent_together((sizes, noises, order.ravel().take(layout.places)), home)
    else:
        table = (sizes, noises, layout.begin, layout.end, streams, counts[:, None])
        filled, noise, begin, end, keys, count = _sent_together(table, home)
        chosen = rng.order(keys, None if layout.held is None else count, width).flatten(1)
        chosen = chosen.gather(1, _at(begin, end, layout.size))
    rows = data.rows.gather(1, chosen).view(len(counts), len(layout.active), layout.size)
    there = rows if data.x.device == home else rows.to(data.x.device)
    return Plan(rows, there, filled, layout.sizes, layout.steps, layout.active, layout.full, layout.examples, noise)


@dataclass(frozen=True)
class _Layout:
    """What a plan is by the sizes of its clients alone, before anything is drawn; not to be written to."""

    held: rng.Words | None  # [C, 1] examples of each client, None where all have as many as there are places
    size: int  # of a minibatch
    epochs: rng.Words  # [E] the numbers of those that are drawn
    numbers: rng.Words  # [S] of the steps
    begin: rng.Words  # [C, S] where each step begins in its client's orders, one epoch behind the other
    end: rng.Words  # [C, S] the last place of its epoch
    width: int  # of an epoch's order
    sizes: Tensor
    steps: Tensor
    active: list[int]
    full: list[bool]
    examples: Tensor

    @functools.cached_property
    def places(self) -> rng.Words:
        """The places of all steps in the orders of all clients, one behind the other: `[C, S B]`."""
        own = _at(torch.from_numpy(self.begin), torch.from_numpy(self.end), self.size).numpy()
        return own + np.arange(len(own))[:, None] * (len(self.epochs) * self.width)


def _at(begin: Tensor, end: Tensor, size: int) -> Tensor:
    """The places of minibatches that begin at these; what is behind the end of an epoch is padding."""
    return torch.minimum(begin.unsqueeze(2) + torch.arange(size, device=begin.device), end.unsqueeze(2)).flatten(1)


def _layout(counts: bytes, width: int, batch_size: int, epochs: float, steps: int, least: int) -> _Layout:
    """The layout of clients with so many examples each, at most `width`."""
    count = np.frombuffer(counts, np.int64)  # [C]: NumPy takes a fraction of PyTorch's time over a few numbers
    per_epoch = -(-count // batch_size)
    total = np.full_like(per_epoch, steps) if steps else _steps_of(epochs, per_epoch, least)
    size, longest = min(batch_size, int(count[0])), int(total[0])  # the largest is first
    drawn = int((-(-total // per_epoch)).max()) if longest else 0

    step = np.arange(longest)
    epoch, place = np.divmod(step, per_epoch[:, None])  # [C, S]: of all epochs, and within its own
    passed = place * batch_size
    real = np.minimum(count[:, None] - passed, size)
    going = step < total[:, None]
    active = going.sum(0).tolist()
    full = ((real == size) | ~going).all(0).tolist()
    examples = torch.from_numpy((real * going).sum(1, dtype=np.float64))
    first = np.minimum(epoch, max(drawn - 1, 0)) * width  # the place where the epoch's order begins
    return _Layout(
        None if count[-1] == width else count[:, None],
        size,
        np.arange(drawn),
        step,
        first + passed,
        first + (width - 1),
        width,
        torch.from_numpy(real),
        torch.from_numpy(total),
        active,
        full,
        examples,
    )


_kept_layout = functools.lru_cache(maxsize=16)(_layout)


def _sent_together(parts: Sequence[rng.Words], device: torch.device) -> Sequence[Tensor]:
    """Copies of arrays of as many rows on the device: to send one is to send all."""
    joined = torch.from_numpy(np.concatenate(parts, 1))
    return tree.sent(joined, device).split_with_sizes([part.shape[1] for part in parts], 1)


def _steps_of(epochs: float, per_epoch: NDArray[np.int64], least: int) -> NDArray[np.int64]:
    """How many steps so many epochs are for each client; half a step, found in float32, is a whole one."""
    if float(epochs).is_integer():
        return np.maximum(int(epochs) * per_epoch, least)
    exact = np.float32(epochs) * per_epoch.astype(np.float32) + np.float32(0.5)
    rounded: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    return np.maximum(rounded, least)


def minibatch(data: Examples, plan: Plan, step: int, keys: Tensor, dtype: torch.dtype) -> Batch:
    """A step of a plan, for the clients active in it; `keys` `[k]` are their streams for this step."""
    k = plan.active[step]
    real, full, there = plan.real[:k, step], plan.full[step], plan.there[:k, step]
    batch = gather(data, plan.rows[:k, step], real, full, keys, dtype, there)
    others = tuple(minibatch(data, other, step, other.noise[:k, step], dtype) for other in plan.others)
    return replace(batch, others=others) if others else batch


def minibatches(data: Examples, plan: Plan, dtype: torch.dtype) -> Iterator[Batch]:
    """The steps of a plan, with noise, one after the other; with each its further minibatches, if there are any."""
    if not plan.others:
        yield from _single(data, plan, dtype)
        return
    first = replace(plan, others=())
    for batch, *others in zip(*(_single(data, each, dtype) for each in (first, *plan.others)), strict=True):
        yield replace(batch, others=tuple(others))


def _single(data: Examples, plan: Plan, dtype: torch.dtype) -> Iterator[Batch]:
    """The steps of a plan without further minibatches. Small ones on a CPU are fetched many at a time."""
    (stack, steps, size), keys = plan.rows.shape, plan.noise
    each = stack * size * data.x.shape[1:].numel() * data.x.element_size()
    many = BLOCK // max(each, 1)
    if many < 2 or data.x.device.type != "cpu" or plan.rows.device.type != "cpu":
        for s, k in enumerate(plan.active):
            yield minibatch(data, plan, s, keys[:k, s], dtype)
        return
    for first in range(0, steps, many):
        now = slice(first, first + many)
        most = plan.active[first]
        rows, real, streams = (t[:most, now].transpose(0, 1).contiguous() for t in (plan.rows, plan.real, keys))
        x, y = _rows_of(data.x, rows), _rows_of(data.y, rows)
        x = x if data.augment else as_inputs(x, dtype, data.normalization)
        y = _trained(y, data)
        short = not all(plan.full[now])  # else nobody looks at what is valid
        valid = (torch.arange(size) < real.unsqueeze(2) if short else real).unbind()
        fetched = zip(*(t.unbind() for t in (x, y, real, streams)), valid, strict=True)
        for held, k, full in zip(fetched, plan.active[now], plan.full[now], strict=True):
            xs, ys, count, stream, there = held if k == most else (t[:k] for t in held)
            batch = Batch(xs, ys, None if full else there, count, stream)
            yield _ready(augmented(batch), data, dtype) if data.augment else batch


def gather(
    data: Examples,
    rows: Tensor,
    real: Tensor,
    full: bool,
    keys: Tensor,
    dtype: torch.dtype,
    there: Tensor | None = None,
) -> Batch:
    """The minibatch at these rows `[k, B]`, of which each client has `real` `[k]` examples; augmented where asked.

    `there` are the same rows where the data are.
    """
    if data.augment and image_kernels is not None and _lies_on(data.x, rows.device) and _are_bytes(data.x):
        table = _byte_table(data.normalization, data.x.shape[1], dtype, data.x.device)
        x = image_kernels.augmented(data.x, rows, keys, table, PADDING)
        y = _trained(data.y[rows], data)
        return Batch(x, y, _places(rows, real, full), tree.sent(real, rows.device), keys)
    batch = _picked(data, rows, real, full, keys, there)
    return _ready(augmented(batch) if data.augment else batch, data, dtype)


def _ready(batch: Batch, data: Examples, dtype: torch.dtype) -> Batch:
    """A minibatch of examples as the data have them, for a model: what augmentation pads is black before this."""
    return replace(batch, x=as_inputs(batch.x, dtype, data.normalization))


def _picked(data: Examples, rows: Tensor, real: Tensor, full: bool, keys: Tensor, there: Tensor | None) -> Batch:
    """Examples as the data have them."""
    x = _taken(data.x, rows, there)
    y = _trained(data.y[rows], data)
    return Batch(x, y, _places(rows, real, full), tree.sent(real, rows.device), keys)


def _trained(y: Tensor, data: Examples) -> Tensor:
    """Targets as losses see them."""
    return y if data.target_normalization is None else data.target_normalization(y, y.dtype)


def _places(rows: Tensor, real: Tensor, full: bool) -> Tensor | None:
    """Which places of minibatches are filled; None: all."""
    if full:
        return None
    return torch.arange(rows.shape[1], device=rows.device) < tree.sent(real, rows.device).unsqueeze(1)


def _are_bytes(x: Tensor) -> bool:
    """Whether these are images in bytes on a GPU, which a kernel fetches, augments and normalises at once."""
    return x.is_cuda and x.dtype == torch.uint8 and x.dim() == 4 and x.is_contiguous()


_tables: dict[tuple[Normalization | None, int, torch.dtype, torch.device], Tensor] = {}


def _byte_table(normalization: Normalization | None, channels: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What each byte of each channel is for a model: `[c, 256]`."""
    key = normalization, channels, dtype, device
    if key not in _tables:  # kept: a CUDA graph must find it where it was
        every = torch.arange(256, dtype=torch.uint8, device=device).view(256, 1, 1, 1).expand(256, channels, 1, 1)
        _tables[key] = as_inputs(every, dtype, normalization).view(256, channels).T.contiguous()
    return _tables[key]


def _taken(x: Tensor, rows: Tensor, there: Tensor | None) -> Tensor:
    """Rows of the data on the device; those that stay on the host go there while it works on what came before."""
    device = rows.device
    if _lies_on(x, device):
        return x[rows] if x.is_cuda else _rows_of(x, rows)
    flat = (rows if there is None else there).flatten().to(x.device)
    picked = torch.empty(len(flat), *x.shape[1:], dtype=x.dtype, pin_memory=device.type == "cuda")
    torch.index_select(x, 0, flat, out=picked)
    return tree.sent(picked.view(*rows.shape, *x.shape[1:]), device)


def _rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """`x[rows]`, which on a CPU takes three times as long."""
    return x.index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:])


def _lies_on(x: Tensor, device: torch.device) -> bool:
    return x.device == device


def augmented(batch: Batch) -> Batch:
    """Images cut out anew after padding by four pixels, and turned left to right half of the time.

    Three words of the client's stream decide about each place of its minibatch.
    """
    x = batch.x
    stack, size, channels, height, width = x.shape
    drawn = rng.uniform(rng.extend(batch.keys, "augment"), 3 * size).view(stack, size, 3)
    down, right = (drawn[..., i : i + 1].mul(2 * PADDING + 1).long() for i in (0, 1))
    flip = drawn[..., 2:] < 0.5
    row = torch.arange(height, device=x.device) + down  # [k, B, H], in the padded image
    column = torch.arange(width, device=x.device).expand(stack, size, width)
    column = torch.where(flip, width - 1 - column, column) + right
    padded = torch.nn.functional.pad(x, (PADDING,) * 4).flatten(3)  # [k, B, c, (H + 8) * (W + 8)]
    at = (row.unsqueeze(3) * (width + 2 * PADDING) + column.unsqueeze(2)).flatten(2)  # [k, B, H * W]
    cut = padded.gather(3, at.unsqueeze(2).expand(-1, -1, channels, -1))
    return replace(batch, x=cut.view_as(x))


def in_order(data: Examples, batch_size: int, dtype: torch.dtype) -> Iterator[tuple[Batch, int]]:
    """Every client's examples once, unshuffled; with each minibatch the place its first example stands at."""
    held = data.rows.to(data.x.device)  # to the host once, where the data are there
    for first in range(0, int(data.count.max()), batch_size):
        k = int((data.count > first).nonzero().max()) + 1  # test sets need not be sorted as training sets are
        rows, there = (r[:k, first : first + batch_size] for r in (data.rows, held))
        real = (data.count[:k] - first).clamp(0, rows.shape[1])
        full = bool((real == rows.shape[1]).all())
        batch = _picked(data, rows, real, full, tree.sent(data.ids[:k], rows.device), there)
        yield _ready(batch, data, dtype), first


def sums(data: Examples, batch_size: int, dtype: torch.dtype, measure: Callable[[Batch], Params]) -> Params:
    """Per-client sums, in float64, of what is measured on each minibatch of one pass over the data."""
    total: Params = {}
    for batch, _ in in_order(data, batch_size, dtype):
        for name, value in measure(batch).items():
            if name not in total:
                total[name] = value.new_zeros(len(data.ids), *value.shape[1:], dtype=torch.float64)
            total[name][: value.shape[0]] += value.double()
    return total
