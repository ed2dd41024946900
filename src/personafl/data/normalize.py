"""`data.normalize` and `data.normalize_targets`: what inputs and targets are normalised by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core.errors import UserError
from personafl.core.normalization import Normalization
from personafl.core.settings import shortened, typed, unknown
from personafl.core.types import TaskName
from personafl.data.dataset import Source
from personafl.data.federated import Federation

Numbers = tuple[float, ...]
Setting = str | tuple[Numbers, Numbers]
"""`auto`, a name of `NAMES`, or mean and deviation of scaled inputs."""

NAMES = ("standardize", "half", "none")
"""By the statistics of the training data; from [0, 1] to [-1, 1]; not at all, but that bytes are divided by 255."""

HALF: tuple[Numbers, Numbers] = (0.5,), (0.5,)
_CIFAR10 = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
SHIPPED: dict[str, Setting] = {
    "digits": "none",
    "synthetic-32k": "none",
    "synthetic-3.2k": "none",
    "synthetic-1m": "none",
    "synthetic-10m": "none",
    "mnist": ((0.1307,), (0.3081,)),
    "fmnist": ((0.2860,), (0.3530,)),
    "femnist": "standardize",
    "cifar10": _CIFAR10,
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "cinic10": ((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)),
    "mini-imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "har": "none",
    "har-features": "none",
    "wisdm": "none",
    "shakespeare": "none",
    "cifar-mnist": "half",
    "pot-mnist": "half",
    "pneumoniamnist": "half",
    "cifar10-c": _CIFAR10,
}
"""What `auto` means for data sets by name; `docs/data.md` has the sources."""

CONSTANT = 1e-12  # of the mean: a deviation of less is rounding
BLOCK = 2**22  # numbers looked at together


def checked(value: Any) -> Setting:
    """The setting as it is used, whatever kind of list it came in."""
    if isinstance(value, str):
        if value not in (possible := ("auto", *NAMES)):
            raise UserError(
                f"data.normalize={value!r}: {unknown('normalisation', value, possible)}, or [mean, std] as numbers"
            )
        return value
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise UserError(
            f"data.normalize={shortened(value)}: must be auto, {', '.join(NAMES)}, or [mean, std], each a number or "
            "one for each channel or column"
        )
    mean, std = (typed("data.normalize", part, tuple[float, ...]) for part in value)
    try:
        Normalization(mean, std)
    except UserError as e:
        raise UserError(f"data.normalize={shortened(value)}: {e}") from None
    return mean, std


def settled(dataset: Any, source: Source) -> Setting:
    """What `auto` means: what the data came with, the choice for a shipped set, or the training data's statistics."""
    if source.normalization is not None:
        return source.normalization.mean, source.normalization.std
    if isinstance(dataset, str) and dataset in SHIPPED:
        return SHIPPED[dataset]
    return "standardize" if _numeric(source.x) else "none"


def normalizes_targets(setting: bool | Literal["auto"], task: TaskName, name: str = "the data") -> bool:
    """Whether targets of a task are normalised: those of regression are, unless the recipe says otherwise."""
    if setting is True and task != "regression":
        raise UserError(
            f"data.normalize_targets=true: the targets of {name} are of {task}, and only those of regression can be "
            "normalised; use auto or false"
        )
    return task == "regression" and setting is not False


def normalized(federation: Federation, setting: Setting, targets: bool = False) -> Federation:
    """The federation with its inputs normalised as a recipe says, `auto` being settled, and its targets where asked."""
    source = federation.source
    found = _normalization(federation, setting)
    if found != source.normalization:
        federation = federation.with_normalization(found)
    if targets != (source.target_normalization is not None):
        federation = federation.with_target_normalization(_of_targets(federation) if targets else None)
    return federation


def _of_targets(federation: Federation) -> Normalization:
    clients = range(federation.num_clients)
    return standardization((client_target_moments(federation, c) for c in clients), federation.source.y)


def _normalization(federation: Federation, setting: Setting) -> Normalization | None:
    if setting == "none":
        return None
    source = federation.source
    shown = setting if isinstance(setting, str) else [list(part) for part in setting]
    if not _numeric(source.x):
        raise UserError(f"data.normalize={shown!r}: examples of {source.name} are whole numbers; use none")
    if setting == "standardize":
        return standardization((client_moments(federation, c) for c in range(federation.num_clients)), source.x)
    mean, std = HALF if isinstance(setting, str) else setting
    made = Normalization(mean, std, source.x.dim() - 1)
    if not made.fits(source.x):
        raise UserError(
            f"data.normalize={shortened(shown)}: {made.size} entries for examples of {source.name}, of shape "
            f"{tuple(source.x.shape[1:])}; give one, or one for each of the first axis"
        )
    return made


def _numeric(x: Tensor) -> bool:
    """Whether examples are pixels or measurements; other whole numbers are tokens."""
    return x.dtype == torch.uint8 or x.is_floating_point()


# Statistics


@dataclass(frozen=True)
class Moments:
    """What a client tells of its training inputs or targets: a count, and sums about its own mean.

    The sums are by channel or column of inputs, and by number of a target.
    """

    count: int  # numbers of each channel or column
    mean: NDArray[np.float64]  # [k]
    squares: NDArray[np.float64]  # [k] sum of squared differences from the mean

    def __add__(self, other: Moments) -> Moments:
        """Those of both (Chan, Golub and LeVeque, 1979): nothing is lost where means are large."""
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        return Moments(count, mean, self.squares + other.squares + apart**2 * (self.count / count * other.count))


def moments(x: Tensor) -> Moments:
    """Of examples `[n, ...]`: by channel of images, by column of float vectors, else over all numbers.

    NumPy sums in one order on every machine, so a hash of what comes of it is the same everywhere.
    """
    by = x.shape[1] if x.dim() >= 4 or (x.dim() == 2 and x.is_floating_point()) else 1
    step = max(1, BLOCK // max(1, x[0].numel()))
    return reduce(Moments.__add__, (_of_block(part, by) for part in torch.split(x.cpu(), step)))


def _of_block(x: Tensor, by: int) -> Moments:
    wide = x.numpy().reshape(len(x), by, -1).astype(np.float64)
    if x.dtype == torch.uint8:
        wide /= 255
    mean = wide.mean((0, 2))
    return Moments(wide.size // by, mean, ((wide - mean[:, None]) ** 2).sum((0, 2)))


def client_moments(federation: Federation, client: int) -> Moments:
    """Those of a client's training data."""
    return moments(federation.source.x[federation.rows("train", client)])


def client_target_moments(federation: Federation, client: int) -> Moments:
    """Those of the targets of a client's training data."""
    return moments(federation.source.y[federation.rows("train", client)])


def standardization(clients: Iterable[Moments], x: Tensor) -> Normalization:
    """Mean 0 and deviation 1 over the training data of all clients; what is constant only loses its mean.

    `x` are any examples or targets of theirs.
    """
    total = reduce(Moments.__add__, clients)
    std = np.sqrt(total.squares / total.count)
    std = np.where(std > CONSTANT * np.abs(total.mean), std, 1.0)
    return Normalization(tuple(total.mean.tolist()), tuple(std.tolist()), x.dim() - 1)
