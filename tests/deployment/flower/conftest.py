"""As for tests of a deployment: data and models that are made once."""

import pytest

from tests.deployment import worlds


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds.quicken(monkeypatch)
