"""Strangers cannot fill a server's memory or its logs, nor keep clients from a round. Slow: minutes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from personafl.deployment.flower import proxy
from tests.deployment.flower.strangers import ATTACKS, LOG_BYTES, MEMORY_MB, attacked

# What strangers are answered; on a busy machine a connection may also be cut off.
STATUSES = {
    "held-back-bodies": {"413"},
    "garbage": {"401"},
    "refused-requests": {"404", "414"},
    "unsigned-calls": {"401", "503"},
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(proxy.find() is None, reason="nginx is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="memory is measured, and strangers come, as on Linux"),
]


def test_memory_and_logs_stay_small_and_a_round_is_played_under_attack(tmp_path: Path) -> None:
    names = [name for name in ATTACKS if "public-key" not in name]
    rows = attacked(tmp_path, names, 0.2, print)
    assert len(rows) == 2 + len(names)
    assert max(row.both for row in rows) < MEMORY_MB
    assert sum(row.log_bytes for row in rows) < LOG_BYTES
    assert rows[-1].answers == "the run ended well, 2 of 2 clients have a model"
    answers = {row.name: row.answers for row in rows}
    for name, expected in STATUSES.items():
        statuses = set(re.findall(r"× (\w+)", answers[name]))
        assert statuses & expected and statuses <= expected | {"cut"}, (name, answers[name])
    for name in ("slow-headers", "idle"):
        opened, closed = map(int, re.findall(r"\d+", answers[name]))
        assert opened > 0 and closed > opened / 2, (name, answers[name])
