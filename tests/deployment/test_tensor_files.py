"""Files of named tensors: in their order, and only what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from personafl.core.errors import UserError
from personafl.deployment.tensor_files import read_tensors, write_tensors


def test_order_and_shared_memory(tmp_path: Path) -> None:
    one = torch.arange(6.0)
    given = {"z": one[:3], "a": one[:3], "m": one.view(2, 3).T, "none": torch.zeros(0, 2), "flag": torch.tensor(True)}
    told = write_tensors(tmp_path / "x.safetensors", given)
    found = read_tensors(tmp_path / "x.safetensors", told)
    assert list(found) == list(given) and all(torch.equal(found[n], given[n]) for n in given)
    found["z"].add_(1)
    assert found["a"][0] == 0


def test_what_is_not_what_was_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    told = write_tensors(path, {"a": torch.ones(2)})
    wrongs: tuple[Any, ...] = (None, {}, [], {"stamp": told["stamp"]}, told | {"names": ["b"]}, told | {"stamp": [1]})
    for wrong in wrongs:
        with pytest.raises(UserError):
            read_tensors(path, wrong)
    write_tensors(path, {"a": torch.zeros(2)})
    with pytest.raises(UserError, match="is damaged"):
        read_tensors(path, told)
    path.unlink()
    with pytest.raises(UserError, match="is missing"):
        read_tensors(path, told)
