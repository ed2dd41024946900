"""One thread per test process: small tensors gain nothing from more, and processes run side by side.

PERSONAFL_TEST_MISALIGNED=56 lets all that tests read from safetensors files begin 56 bytes behind a multiple of 64.
"""

import os
from collections.abc import Iterator

# Threads of tests that ask for some sleep while they wait: on a busy machine they would take each other's turns.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["PERSONAFL_OFFLINE"] = "1"

import pytest
import torch

from tests.memory import misalign_files

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Tests are about the CPU unless those marked `gpu` are asked for; so are the processes they start."""
    if config.getoption("markexpr") in ("", "not slow and not gpu", "slow"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Here and not in pyproject.toml, which would import the package before coverage looks at it.
    config.addinivalue_line("filterwarnings", "ignore::personafl.core.errors.Note")


@pytest.fixture(autouse=True, scope="session")
def _options_of_this_run_alone() -> None:
    """What PYTEST_ADDOPTS asks for, such as coverage, is not for a pytest that a test starts."""
    os.environ.pop("PYTEST_ADDOPTS", None)


@pytest.fixture(autouse=True, scope="session")
def _misaligned_files() -> Iterator[None]:
    by = int(os.environ.get("PERSONAFL_TEST_MISALIGNED", "0"))
    with pytest.MonkeyPatch.context() as patch:
        if by:
            misalign_files(patch, by)
        yield
