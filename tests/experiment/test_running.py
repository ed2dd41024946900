"""What a run is refused for before it begins."""

from __future__ import annotations

import pytest

from personafl import run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"store": "tape"}, r"--store tape: possible are auto, device, host, disk"),
        ({"memory": -1.0}, r"--memory -1: must be greater than 0"),
        ({"memory": 0.001}, r"memory=0.001: .* GiB are in use before the first round; allow more"),
    ],
)
def test_impossible_homes_and_limits_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(None, "training.num_rounds=1", "algorithms=fedavg", **options)  # type: ignore[arg-type]
