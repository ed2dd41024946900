"""Lists of row numbers, one per client, in the two tensors of PyTorch's jagged layout: values and offsets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import tree

Indices = NDArray[np.int64]


def spans(offsets: Tensor, ids: Tensor) -> tuple[Indices, Indices]:
    """Where the rows of these clients begin, and how many there are, in NumPy, which looks few up faster."""
    held, which = offsets.numpy(), ids.numpy()
    first = held[which]
    return first, held[which + 1] - first


@dataclass(frozen=True)
class SharedRows:
    """The same rows for every client, such as one test set that all clients are tested on."""

    values: Tensor  # [n] int64
    clients: int

    @property
    def offsets(self) -> Tensor:
        """As those of a `Ragged` in which the rows of every client stand behind one another."""
        return torch.arange(self.clients + 1) * len(self.values)

    def to(self, device: torch.device) -> SharedRows:
        return SharedRows(self.values.to(device), self.clients)

    def lengths(self, ids: Tensor) -> Tensor:
        return torch.full((len(ids),), len(self.values))

    def padded(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rows `[C, n]`, and how many there are `[C]` (on the host)."""
        return self.values.expand(len(ids), -1), self.lengths(ids)


@dataclass(frozen=True)
class Ragged(Sequence[Indices]):
    """The rows of many clients behind one another; as a sequence, each client's are a NumPy array."""

    values: Tensor  # [sum of lengths] int64
    offsets: Tensor  # [clients + 1] int64, on the host

    @classmethod
    def of(cls, parts: Sequence[Indices]) -> Ragged:
        if isinstance(parts, Ragged):
            return parts
        values = np.concatenate(parts).astype(np.int64) if len(parts) else np.zeros(0, np.int64)
        return cls.cut(values, np.array([len(p) for p in parts], np.int64))

    @classmethod
    def cut(cls, values: Indices, sizes: Indices) -> Ragged:
        """An array cut into runs of these sizes."""
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return cls(torch.from_numpy(values), torch.from_numpy(offsets))

    def numpy(self) -> tuple[Indices, Indices]:
        """Values and offsets as NumPy has them."""
        return self.values.cpu().numpy(), self.offsets.numpy()

    def to(self, device: torch.device) -> Ragged:
        return Ragged(self.values.to(device), self.offsets)

    @property
    def sizes(self) -> Indices:
        return np.diff(self.offsets.numpy())

    def lengths(self, ids: Tensor) -> Tensor:
        """How many rows these clients have."""
        return torch.from_numpy(spans(self.offsets, ids)[1])

    def padded(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of these clients `[C, M]`, padded with 0, and how many are real `[C]` (on the host)."""
        first, length = spans(self.offsets, ids)
        device, most, count = self.values.device, int(length.max()), torch.from_numpy(length)
        place = torch.arange(most, device=device)
        at = tree.sent(torch.from_numpy(first[:, None]), device) + place
        if int(length.min()) == most:  # nothing to pad
            return self.values[at], count
        rows = self.values[at.clamp(max=len(self.values) - 1)]
        return rows.masked_fill(place >= tree.sent(count, device).unsqueeze(1), 0), count

    def holders(self) -> Indices:
        """The client of each value."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def sorted(self) -> Ragged:
        """Each client's rows in rising order."""
        values, _ = self.numpy()
        span = int(values.max(initial=0)) + 1
        return Ragged(torch.from_numpy(np.sort(self.holders() * span + values) % span), self.offsets)

    def select(self, ids: Indices) -> Ragged:
        """The rows of these clients, in this order."""
        values, offsets = self.numpy()
        sizes = self.sizes[ids]
        starts = np.cumsum(sizes) - sizes
        return Ragged.cut(values[np.repeat(offsets[ids] - starts, sizes) + np.arange(sizes.sum())], sizes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, at: int) -> Indices: ...
    @overload
    def __getitem__(self, at: slice) -> Ragged: ...
    def __getitem__(self, at: int | slice) -> Indices | Ragged:
        if isinstance(at, slice):
            return self.select(np.arange(len(self))[at])
        place = range(len(self))[at]
        first, last = self.offsets[place : place + 2].tolist()
        return self.values[first:last].cpu().numpy()

    def __iter__(self) -> Iterator[Indices]:
        values, offsets = self.numpy()
        return (values[a:b] for a, b in itertools.pairwise(offsets))
