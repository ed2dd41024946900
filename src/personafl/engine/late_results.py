"""Results that come after the end of their round, for `faults.late = "stale"`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.types import Masked, Params, Payload


@dataclass(frozen=True)
class LateResults:
    """Results of a stage that come a stage late: whose, what they sent, and what they will keep once it is taken."""

    stage: int  # its place in the schedule
    phase: str
    ids: Tensor
    upload: Payload  # [C, ...]
    kept: Params  # [C, ...]

    def packed(self) -> tuple[dict[str, Any], Params]:
        """As what JSON takes and as named tensors."""
        known = {n: t.known for n, t in self.upload.items() if isinstance(t, Masked)}
        tensors = {"ids": self.ids} | tree.prefixed(tree.values(self.upload), "values")
        tensors |= tree.prefixed(tree.masks(self.upload), "mask") | tree.prefixed(self.kept, "kept")
        return {"stage": self.stage, "phase": self.phase, "known": known}, tensors

    @classmethod
    def unpacked(cls, numbers: dict[str, Any], tensors: Params, device: torch.device) -> Self:
        """The results that `packed` gave."""
        held = {n: t.to(device) for n, t in tree.copied(tensors).items()}
        values, masks, kept = (tree.under(held, p) for p in ("values", "mask", "kept"))
        upload: Payload = {n: Masked(t, masks[n], numbers["known"][n]) if n in masks else t for n, t in values.items()}
        return cls(numbers["stage"], numbers["phase"], tensors["ids"], upload, kept)

    def rows(self, which: Tensor) -> Self:
        """Those of some of the clients; `which` are rows, on the host."""
        at = which.to(next(iter(tree.values(self.upload).values())).device)
        return type(self)(
            self.stage, self.phase, self.ids[which], tree.rows_of(self.upload, at), tree.take(self.kept, at)
        )

    def moved(self, device: torch.device) -> Self:
        kept = {n: t.to(device) for n, t in self.kept.items()}
        return type(self)(self.stage, self.phase, self.ids, tree.moved(self.upload, device), kept)


def joined_results(parts: Sequence[LateResults]) -> LateResults | None:
    """Those of several stacks or ranks of one stage as one; None where there are none."""
    if not parts:
        return None
    first, ids = parts[0], torch.cat([p.ids for p in parts])
    kept = tree.join(p.kept for p in parts) if first.kept else {}
    return LateResults(first.stage, first.phase, ids, tree.gathered(p.upload for p in parts), kept)
