"""Several processes for one simulation: who plays which client, and how they put their parts together.

Every rank draws the same cohorts, plays its own clients and ends a round with the same server. One process alone
is `SingleProcess`: it has no process group and sends nothing.
"""

from __future__ import annotations

import datetime
import heapq
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from personafl.core import tree
from personafl.core.errors import UserError
from personafl.core.plain_text import list_names
from personafl.core.types import Params
from personafl.models.stacked import StackedModel
from personafl.simulation import heartbeat

T = TypeVar("T")
PATIENCE = datetime.timedelta(minutes=30)  # how long a rank waits for the work of others that give signs of life


class LostError(ConnectionError):
    """Another rank is gone, or silent for too long."""


class SingleProcess:
    """One process."""

    rank = 0
    size = 1

    def gather(self, mine: T) -> list[T]:
        """What every rank has, in the order of ranks; tensors must be on the host."""
        return [mine]

    def first(self, mine: T) -> list[T]:
        """The same on the first rank, nothing on the others."""
        return [mine]

    def in_turn(self, work: Callable[[], T]) -> T:
        """The same work everywhere, on each machine by one process before the others."""
        return work()

    def sum(self, mine: Params) -> Params:
        """The sums over ranks, in float64; a rank may have nothing to add."""
        return mine


class Ranks(SingleProcess):
    """The processes of a group, as one of them sees it."""

    def __reduce__(self) -> tuple[type[SingleProcess], tuple[()]]:
        """A copy of what ranks shared, which the first of them has at the end, is one process's."""
        return SingleProcess, ()

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device

    def gather(self, mine: T) -> list[T]:
        out: list[T | None] = [None] * self.size
        with self._watched():
            dist.all_gather_object(out, mine)
        return out  # type: ignore[return-value]

    def first(self, mine: T) -> list[T]:
        out: list[T | None] | None = None if self.rank else [None] * self.size
        with self._watched():
            dist.gather_object(mine, out, dst=0)
        return out or []  # type: ignore[return-value]

    def in_turn(self, work: Callable[[], T]) -> T:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            self.gather(None)
            return work()
        done = work()
        self.gather(None)
        return done

    def sum(self, mine: Params) -> Params:
        shapes = next(filter(None, self.gather({n: t.shape for n, t in mine.items()})), {})
        if not shapes:
            return {}
        terms = [mine[n] if n in mine else torch.zeros(s, device=self.device) for n, s in shapes.items()]
        flat = torch.cat([t.double().flatten() for t in terms])
        with self._watched():
            dist.all_reduce(flat)
        parts = torch.split(flat, [s.numel() for s in shapes.values()])
        return tree.copied({n: t.view(s) for (n, s), t in zip(shapes.items(), parts, strict=True)})

    def store(self) -> heartbeat.Store:
        """A store that rank 0 holds; the one the group was joined by may be the launcher's."""
        host, made = os.environ["MASTER_ADDR"], dist.TCPStore  # type: ignore[attr-defined]
        with self._watched():
            mine = None if self.rank else made(host, 0, is_master=True, wait_for_workers=False)
            (port, *_) = self.gather(0 if mine is None else mine.port)
            return mine or made(host, port, is_master=False)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:
            reason = re.sub(r"^\[[^]]*] ?", "", str(e).strip().splitlines()[0]).split(". ")[0]  # without gloo's file
            raise LostError(f"rank {self.rank} of {self.size}: another rank is gone or silent: {reason}") from e


def balanced(work: Tensor, size: int) -> Tensor:
    """Which rank takes each of these pieces of work: the largest first, each to the one with least so far."""
    out = torch.zeros(len(work), dtype=torch.int64)
    loads = [(0.0, r) for r in range(size)]
    held = []
    order = work.argsort(descending=True, stable=True)
    for amount in work[order].tolist():
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + amount, rank))
        held.append(rank)
    out[order] = torch.tensor(held, dtype=torch.int64)
    return out


def launched() -> int:
    """How many processes `torchrun` started, here and on other machines; 1 without it."""
    there = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
    return int(os.environ["WORLD_SIZE"]) if there else 1


def device_of(name: str) -> str:
    """The device of this process, where all were told the same: each takes a GPU of its machine."""
    if launched() == 1 or name == "cpu":
        return name
    if ":" in name:
        raise UserError(f"device {name}: {launched()} processes take a GPU each; use cuda")
    return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"


def _find_launcher(seconds: float) -> None:
    """Connect to the store by which ranks find each other, if the launcher holds it: it is there before any rank is.

    PyTorch itself waits for as long as for the slowest rank. A store that rank 0 holds may come late.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        dist.TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=seconds))  # type: ignore[attr-defined]
    except RuntimeError as e:
        rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        about = f"no answer at {host}:{port} for {seconds:g} seconds ({heartbeat.VARIABLE})"
        raise LostError(f"rank {rank} of {size}: the launcher is gone: {about}") from e


@contextmanager
def process_group(device: str, patience: datetime.timedelta = PATIENCE) -> Iterator[SingleProcess]:
    """The ranks `torchrun` started, joined while this lasts; one alone without it.

    They speak over gloo, and over NCCL where each has a GPU of its own. They end with their launcher, and when one of
    them gives no sign of life (`simulation/heartbeat.py`).
    """
    if launched() == 1 or not dist.is_available():
        yield SingleProcess()
        return
    silence = heartbeat.timeout()
    heartbeat.die_with_launcher()
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    shared = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
    backend = "gloo" if place.type == "cpu" or shared else "cpu:gloo,cuda:nccl"
    _find_launcher(silence)
    dist.init_process_group(backend, timeout=patience)
    try:
        world = Ranks(place)
        signs = heartbeat.Heartbeat(world.store(), world.rank, world.size, silence)
        signs.start()
        try:
            yield world
        finally:
            signs.stop()
    finally:
        dist.destroy_process_group()


def check_same_weights(model: StackedModel, world: SingleProcess) -> None:
    """Refuse processes whose models begin with other weights than the first one's: every one of them would train its
    own model, and averaging them would be meaningless."""
    if world.size == 1:
        return
    first, *others = world.gather(model.weight_hashes())
    for rank, hashes in enumerate(others, 1):
        if differ := [n for n in first | hashes if first.get(n) != hashes.get(n)]:
            raise UserError(
                f"rank {rank} has built the model with other weights than rank 0: {list_names(differ)} differ. Every "
                "process must give the same model; call torch.manual_seed before building it, or load its weights"
            )
