"""One thread per test process: small tensors gain nothing from more, and processes run side by side.

PERSONAFL_TEST_MISALIGNED=56 lets all that tests read from safetensors files begin 56 bytes behind a multiple of 64.
"""

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Threads of tests that ask for some sleep while they wait: on a busy machine they would take each other's turns.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["PERSONAFL_OFFLINE"] = "1"

import pytest
import torch

from tests.memory import misalign_files

torch.set_num_threads(1)

TESTS = Path(__file__).parent
FOR_FLOWER = [TESTS / "deployment" / "flower", TESTS / "cli" / "test_deploy.py"]
"""Where tests need the extra `flower`."""


class _Skipped(pytest.Module):
    def collect(self) -> list[pytest.Item]:
        pytest.skip("the extra `flower` is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip what needs an extra that is not installed, before it is imported."""
    needed = module_path in FOR_FLOWER or module_path.parent in FOR_FLOWER
    if needed and importlib.util.find_spec("flwr") is None:
        return _Skipped.from_parent(parent, path=module_path)  # type: ignore[no-any-return]
    return None


def pytest_configure(config: pytest.Config) -> None:
    """Tests are about the CPU unless those marked `gpu` are asked for; so are the processes they start."""
    if config.getoption("markexpr") in ("", "not slow and not gpu", "slow"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # In the background of a shell, or under nohup, these are ignored, and what runs rightly does not hear them then.
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
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
