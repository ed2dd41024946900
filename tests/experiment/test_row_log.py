"""The rows of a run as they are written."""

from __future__ import annotations

import json
from pathlib import Path

from personafl.experiment.row_log import RowLog
from personafl.storage import files


def test_rows_are_kept_to_the_byte(tmp_path: Path) -> None:
    log = RowLog(tmp_path / "rows")
    log.add({"round": 0})
    first = log.saved()
    log.add({"round": 1})
    log.close()
    again = RowLog(tmp_path / "rows", first)
    assert (tmp_path / "rows").read_text() == '{"round": 0}\n'
    again.add({"round": 1, "x": 0.1})
    assert again.saved() == files.stamp(tmp_path / "rows")
    assert json.loads((tmp_path / "rows").read_text().splitlines()[1]) == {"round": 1, "x": 0.1}
