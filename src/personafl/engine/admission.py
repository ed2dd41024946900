"""Which uploads a server takes: one rule for simulated and for deployed clients.

A client's session counts as a whole or not at all. An upload that is refused reaches neither `weigh` nor the sums, and
what the client keeps and what the server knows of it stay as they were, so that both sides still agree.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.torch_internals import data_version, foreach
from personafl.core.types import Download, Examples, Masked, Params, Payload, Round, TrainedTask
from personafl.engine.local import client_round


@dataclass(frozen=True)
class Entry:
    """What one tensor of a client's upload must be."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    masked: bool = False
    known: bool = False  # whether the server has its mask already

    @property
    def form(self) -> str:
        return "dense" if not self.masked else "under a known mask" if self.known else "with its mask"


Schema = Mapping[str, Entry]
"""What a client's upload must be, by name."""


@dataclass(frozen=True)
class Update:
    """An upload as a server receives it: decoded, without a client axis."""

    client: int
    stage: int  # its place in the schedule
    payload: Payload
    examples: int  # that the client trained on


def schema(upload: Payload) -> Schema:
    """What each client of a stack sent."""
    return {n: _entry(t, tree.values({n: t})[n].shape[1:]) for n, t in upload.items()}


def _entry(t: Tensor | Masked, shape: torch.Size) -> Entry:
    if isinstance(t, Masked):
        return Entry(tuple(shape), t.values.dtype, masked=True, known=t.known)
    return Entry(tuple(shape), t.dtype)


def expected(algorithm: Algorithm, task: TrainedTask, initial: Params, server: Params, rnd: Round) -> Schema:
    """What the method's hooks make a client send in a round: a session of one client, without training.

    `initial` is the model all clients began with.
    """
    device, ids = next(iter(initial.values())).device, torch.zeros(1, dtype=torch.int64)
    nothing, rows = torch.zeros(0, device=device), torch.zeros(1, 2, dtype=torch.int64, device=device)
    data = Examples(nothing, nothing, rows, torch.tensor([2]), ids)
    kept, known = algorithm.init_clients(initial, ids), algorithm.init_known(initial, ids)
    down = algorithm.download(server, known, rnd) if rnd.stage.down else Download()
    return schema(client_round(algorithm, task, data, kept, down, rnd, train=False).upload)


def refusal(
    update: Update,
    wanted: Schema,
    stage: int,
    examples: int,
    *,
    taken: Collection[int] = (),
    oldest: int | None = None,
) -> str:
    """Why an update is not taken in a stage, in words; empty where it is.

    `examples` is how many the client has, so that it cannot count for more. `taken` are the clients an update was taken
    from already; updates of stages from `oldest` on are in time, by default those of this stage alone.
    """
    if not (stage if oldest is None else oldest) <= update.stage <= stage:
        return f"an update of stage {update.stage} in stage {stage}"
    if update.examples != examples:
        return f"an update of {update.examples} examples from a client that has {examples}"
    if update.client in taken:
        return "a second update in the same round"
    sent = update.payload
    if wanted and not sent:
        return "an empty update"
    if missing := [n for n in wanted if n not in sent]:
        return f"{missing[0]} is missing"
    if more := [n for n in sent if n not in wanted]:
        return f"{more[0]!r} is not asked for"
    for n, t in sent.items():
        if why := _unlike(t, wanted[n]):
            return f"{n} is {why}"
    return ""


def _unlike(t: Tensor | Masked, wanted: Entry) -> str:
    values = t.values if isinstance(t, Masked) else t
    found = _entry(t, values.shape)
    if found.form != wanted.form:
        return f"{found.form}, not {wanted.form}"
    if found.dtype != wanted.dtype:
        return f"of type {found.dtype}, not {wanted.dtype}".replace("torch.", "")
    if found.shape != wanted.shape:
        return f"of shape {found.shape}, not {wanted.shape}"
    return "" if not values.is_floating_point() or bool(values.isfinite().all()) else "not finite"


def not_finite(loss: Tensor, upload: Payload, kept: Params) -> dict[int, str]:
    """The rows of a stack with a number that is not finite, and where it is."""
    sent = tree.values(upload)
    if all_finite([loss, *sent.values(), *kept.values()]):
        return {}
    held = {"its loss": loss} | sent | {f"its own {n}": t for n, t in kept.items()}
    named = {n: t for n, t in held.items() if t.is_floating_point()}
    found: dict[int, str] = {}
    for n, t in named.items():
        for row in (~tree.flat(t).isfinite().all(1)).nonzero().flatten().tolist():
            found.setdefault(row, f"{n} is not finite")
    return dict(sorted(found.items()))


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that may not be finite, each once: what is kept is often what was sent."""
    return list({id(t): t for t in tensors if t.is_floating_point()}.values())


def largest(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The largest absolute numbers, on the device, a tensor of them for each type: finite only if all numbers are."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for t in _distinct(tensors):
        if t.numel():
            alike.setdefault(t.dtype, []).append(t)
    return [torch.stack(foreach("norm", of_type, math.inf)) for of_type in alike.values()]


def _finite(numbers: Iterable[Tensor]) -> bool:
    """Whether these few numbers are finite."""
    return all(math.isfinite(number) for some in numbers for number in some.tolist())


class UncheckedNumbers:
    """Numbers whose finiteness is checked later, since to look at them is to wait for the device."""

    def __init__(self) -> None:
        self._unseen: list[Tensor] = []
        self._versions: list[int | None] = []
        self._largest: list[Tensor] = []

    def add(self, tensors: Iterable[Tensor]) -> None:
        more = list(tensors)
        self._unseen += more
        self._versions += [data_version(t) for t in more]

    def reduce(self) -> None:
        """Hold on to a number of each tensor so far; what was written to since may have been anything."""
        same = None not in self._versions and self._versions == [data_version(t) for t in self._unseen]
        self._largest += largest(self._unseen) if same else [torch.tensor([math.nan])]
        self._unseen, self._versions = [], []

    def are_finite(self) -> bool:
        """Whether all were finite."""
        if self._unseen:
            self.reduce()
        return _finite(self._largest)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all numbers of these tensors are finite: one pass over them, and one small copy from a GPU."""
    held = _distinct(tensors)
    if any(t.is_cuda for t in held):
        return _finite(largest(held))
    return all(math.isfinite(float(t.sum())) or bool(t.isfinite().all()) for t in held)
