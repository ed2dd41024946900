"""What a simulation runs on: none of it is part of the method, nor changes results but by rounding."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from personafl.core.errors import UserError
from personafl.core.types import Training
from personafl.data.federated import Place
from personafl.simulation.execution_plan import ExecutionPlan
from personafl.simulation.profile import NoClock
from personafl.simulation.ranks import SingleProcess


def chosen_device(name: str | torch.device) -> str:
    """`auto` is a GPU where there is one."""
    name = str(name)
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise UserError(f"device {name}: possible are auto, cpu, cuda, cuda:N")
    number = int(name.partition(":")[2] or 0)
    if name != "cpu" and number >= torch.cuda.device_count():
        raise UserError(f"device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return name


def with_precision(training: Training, device: str | torch.device) -> Training:
    """The same with `auto` replaced by the precision it means on a device."""
    if training.precision != "auto":
        return training
    return replace(training, precision="tf32" if torch.device(device).type == "cuda" else "float32")


@dataclass(frozen=True)
class Machine:
    """A device, the memory a run may use, the processes that share it, and how closely it is watched."""

    device: str | torch.device = "auto"  # a GPU where there is one
    threads_per_client: int = 1  # of a client's operations on a CPU; with more than one, its last bits go by them
    chunk: int = 0  # most clients in one stack; 0: as many as fit
    plan: ExecutionPlan | None = None  # how clients lie over the machine; None: by measurement
    data_on: Place = "auto"  # the device, the host, or the host only if the examples are too large
    store: str | Path = "auto"  # what clients keep: device, host, a folder, or the first of them with room for all
    spill: Path | None = None  # the folder `auto` may take; None: a temporary one
    memory: float | None = None  # GiB the process may hold on the device, or in main memory where it trains there
    capture: bool = True  # capture training steps as CUDA graphs
    through_wire: bool = False  # pack and unpack every payload
    ranks: SingleProcess = field(default_factory=SingleProcess)  # the processes that share the work
    clock: NoClock = field(default_factory=NoClock)  # told what the work consists of

    def __post_init__(self) -> None:
        for name, least in (("threads_per_client", 1), ("chunk", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UserError(f"{name} {value}: must be a whole number, at least {least}")
