"""The switch that turns off what exists only for speed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from personafl import accel

CODE = """
import torch
from torch import nn
from personafl import StackedModel, accel
from personafl.core.criteria import CRITERION_GRADIENTS
from personafl.core.types import Batch
from personafl.data import batches
from personafl.evaluation.metrics import cross_entropy
from personafl.models import attention, layers, patterns, recurrent

model = StackedModel(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.rand(2, 4))
params = {n: t[None] for n, t in model.initial.items()}
keys = torch.zeros(1, dtype=torch.int64)
batch = Batch(torch.rand(1, 5, 4), torch.zeros(1, 5, dtype=torch.int64), None, torch.tensor([5]), keys)
by_hand = model.closed_form_gradients(params, list(params), batch, CRITERION_GRADIENTS[cross_entropy])
folded = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Dropout(0.5))
kernels = layers.kernels, layers.norm_kernels, recurrent.kernels, attention.attention_kernels, batches.image_kernels
print(accel.ENABLED, by_hand is not None, any(k is not None for k in kernels))
"""


@pytest.mark.parametrize(("value", "printed"), [("1", "True True"), ("0", "False False False")])
def test_everything_that_is_only_fast_can_be_switched_off(value: str, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=os.environ | {"PERSONAFL_ACCEL": value}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith(printed)


def test_kernels_that_cannot_be_imported_are_none() -> None:
    assert accel.load_kernels("no_such_kernels") is None


WITH_TRITON = """
import sys
from unittest import mock

sys.modules["triton"] = sys.modules["triton.language"] = mock.MagicMock()
from personafl.data import batches
from personafl.models import attention, layers, recurrent

kernels = layers.kernels, layers.norm_kernels, recurrent.kernels, attention.attention_kernels, batches.image_kernels
print(*(k.__name__.rpartition(".")[2] for k in kernels))
"""


def test_all_kernels_are_found_where_triton_is_there() -> None:
    done = subprocess.run([sys.executable, "-c", WITH_TRITON], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["kernels", "norm_kernels", "kernels", "attention_kernels", "image_kernels"]
