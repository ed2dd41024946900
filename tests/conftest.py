"""One thread per test process: small tensors gain nothing from more, and processes run side by side."""

import os

import pytest
import torch

torch.set_num_threads(1)
os.environ["PERSONAFL_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def options_of_this_run_alone() -> None:
    """What PYTEST_ADDOPTS asks for, such as coverage, is not for a pytest that a test starts."""
    os.environ.pop("PYTEST_ADDOPTS", None)
