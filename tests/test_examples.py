"""Examples are run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_quickstart_gives_every_client_a_better_model_than_the_common_one() -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    out = subprocess.run(
        [sys.executable, ROOT / "examples" / "quickstart.py"], capture_output=True, text=True, env=env, check=True
    )
    own = {name: float(value) for name, value in re.findall(r"^(\w+) +own data +([\d.]+) %", out.stdout, re.M)}
    assert own.keys() == {"FedAvg", "Ditto", "DMPFL"}
    assert own["Ditto"] > own["FedAvg"] + 10
