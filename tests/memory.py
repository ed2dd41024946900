"""Tensors that begin where PyTorch would not let them begin, as those of files and views do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

ALIGNED = 64  # bytes: what PyTorch's own memory on a CPU begins at a multiple of


def misaligned(t: Tensor, by: int) -> Tensor:
    """The same numbers in memory that begins `by` bytes behind a multiple of 64."""
    held = torch.empty(t.numel() * t.element_size() + 2 * ALIGNED, dtype=torch.uint8)
    start = -held.data_ptr() % ALIGNED + by
    out = held[start : start + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
    return out.copy_(t)


class _Slice:
    """A tensor of an open file, whose parts begin elsewhere."""

    def __init__(self, held: Any, move: Callable[[Tensor], Tensor]) -> None:
        self.held, self.move = held, move

    def get_shape(self) -> list[int]:
        return self.held.get_shape()  # type: ignore[no-any-return]

    def __getitem__(self, rows: slice) -> Tensor:
        return self.move(self.held[rows])


class _File:
    """An open file, all of whose tensors begin elsewhere."""

    def __init__(self, file: Any, move: Callable[[Tensor], Tensor]) -> None:
        self.file, self.move = file, move

    def __enter__(self) -> _File:
        self.file.__enter__()
        return self

    def __exit__(self, *why: object) -> None:
        self.file.__exit__(*why)

    def keys(self) -> Iterator[str]:
        return self.file.keys()  # type: ignore[no-any-return]

    def metadata(self) -> dict[str, str] | None:
        return self.file.metadata()  # type: ignore[no-any-return]

    def get_tensor(self, name: str) -> Tensor:
        return self.move(self.file.get_tensor(name))

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self.file.get_slice(name), self.move)


def misalign_files(patch: pytest.MonkeyPatch, by: int) -> None:
    """Let all that is read from safetensors files begin `by` bytes behind a multiple of 64."""

    def move(t: Tensor) -> Tensor:
        return misaligned(t, by)

    def loaded(path: Any, device: str = "cpu") -> dict[str, Tensor]:
        return {n: move(t) if t.device.type == "cpu" else t for n, t in load_file(path, device=device).items()}

    for module in ("personafl.experiment.results", "personafl.data.custom"):
        patch.setattr(f"{module}.load_file", loaded)
    patch.setattr("personafl.storage.store.safe_open", lambda *given: _File(safe_open(*given), move))
