"""Golden traces: four rounds of every method in a world of 17 parameters, by its slow reference.

`python -m tests.references.golden NAME` prints the block that the page of a method shows. All numbers below are
sums of powers of two, exact in any precision.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from personafl.core.types import Training
from personafl.data import Federation, Source
from personafl.models import MLP
from tests.references import REFERENCES
from tests.references.base import Reference
from tests.references.masking import DMPFL, DMPFLPlus

ALL: dict[str, Callable[..., Reference]] = {**REFERENCES, "dm-pfl": DMPFL, "dm-pfl-plus": DMPFLPlus}

TRAINING = Training(
    num_rounds=4, join_ratio=0.67, local_epochs=2, batch_size=2, lr=0.1, precision="float64", seed=1
)  # two of three clients a round

PARAMETERS = {
    "layers.0.weight": [[0.5, -0.75], [-0.25, 0.875], [0.625, 0.375]],
    "layers.0.bias": [0.125, 0.25, -0.125],
    "head.weight": [[0.75, -0.5, 0.25], [-0.375, 0.625, 0.875]],
    "head.bias": [0.0625, -0.0625],
}

CLIENTS = [  # x_0, x_1, class; Federation.build takes 2, 1 and 1 rows for testing, which leaves 6, 4 and 3
    [
        (1.0, -0.5, 0),
        (0.75, -1.25, 0),
        (1.5, 0.25, 0),
        (-0.5, 1.0, 1),
        (0.25, -0.75, 0),
        (1.25, -1.0, 0),
        (-1.0, 0.5, 1),
        (0.5, 0.125, 0),
    ],
    [(-0.75, 1.25, 1), (-1.25, 0.25, 1), (0.5, 1.5, 1), (1.0, 0.75, 0), (-0.25, 0.875, 1)],
    [(1.25, 1.0, 1), (-0.5, -1.0, 0), (0.75, 1.5, 1), (-1.0, -0.25, 0)],
]

AT = (0.5, -0.25)
"""The input whose margin is shown."""

Settings = Mapping[str, Any]

_MASKS = {"allocation": "erk", "readjust_share": 0.3, "readjust_interval": 1}  # the default rule would empty the head

SETTINGS: dict[str, Settings] = {
    "feddst": _MASKS,
    "dm-pfl": {**_MASKS, "sparsity": 0.3, "iterations": 1},
    "dm-pfl-plus": {**_MASKS, "sparsity": 0.3, "iterations": 1},
    "fedrep": {"final_head_epochs": 1},
    "fedselect": {"select_interval": 1},
    "fedpews": {"warmup_share": 0.5, "score_lr": 1.0},
    "fedpews-fixed": {"warmup_share": 0.5},
    "co-pfl": {"lr": 0.02},  # its steps are as long as the rate
}
"""Settings other than the defaults, where these would leave a method's own machinery idle or go too far here."""

Row = tuple[str, list[float | None]]


def world() -> tuple[nn.Module, Federation]:
    """The network and the federation."""
    module = MLP(2, 3, 2)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(torch.tensor(PARAMETERS[name]))
    rows = [row for client in CLIENTS for row in client]
    parts = np.split(np.arange(len(rows)), np.cumsum([len(client) for client in CLIENTS])[:-1])
    x, y = torch.tensor([row[:2] for row in rows]), torch.tensor([row[2] for row in rows])
    return module, Federation.build(Source("golden", x, y, 2), parts, seed=1)


def reference_of(name: str) -> Reference:
    """A method's reference in the world, before the first round."""
    settings = dict(SETTINGS.get(name, {}))
    training = dataclasses.replace(TRAINING, lr=settings.pop("lr", TRAINING.lr))
    return ALL[name](*world(), training, **settings)


def margin(logits: Tensor | None) -> float | None:
    """z_0 - z_1 of one input."""
    return None if logits is None else float(logits[0, 0] - logits[0, 1])


def row(slow: Reference, label: str) -> Row:
    """The margins of the global model and of the model each client is judged by."""
    x = torch.tensor([AT], dtype=torch.float64)
    return label, [margin(slow.common(x)), *(margin(slow.evaluated(c, x)) for c in slow.clients)]


def trace(name: str) -> list[Row]:
    """A row after every round, and one after what follows the last, where something does."""
    slow, rows = reference_of(name), []
    for number in range(slow.training.num_rounds):
        slow.play(number)
        rows.append(row(slow, str(number)))
    slow.finish()
    after = row(slow, "end")
    return rows if after[1] == rows[-1][1] else [*rows, after]


def block(rows: list[Row]) -> str:
    """A trace as the pages show it."""
    heads = ["round", "global", *(f"client {c}" for c in range(len(CLIENTS)))]
    lines = ["".join(f"{h:>11}" for h in heads)]
    for label, margins in rows:
        lines.append(f"{label:>11}" + "".join(f"{'-' if m is None else f'{m:.6f}':>11}" for m in margins))
    return "\n".join(["```golden", *lines, "```"])


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        print(block(trace(asked)))
