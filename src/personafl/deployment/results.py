"""What a deployment leaves at the server: rows as rounds go by, a summary and a table of clients at the end."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

from personafl.core.types import Row
from personafl.deployment.roster import Roster
from personafl.storage import files

ROWS, SUMMARY, CLIENTS, ROSTER = "metrics.jsonl", "summary.json", "clients.csv", "roster.json"


def write_roster(folder: Path, experiment: str, roster: Roster, told: Row) -> None:
    """Who takes part, for people and `deploy status`."""
    files.write(folder / ROSTER, json.dumps({"experiment": experiment, "clients": roster.told(), **told}, indent=1))


class Results:
    """The results folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def cut(self, size: int) -> None:
        """Remove rows behind the checkpoint."""
        path = self.folder / ROWS
        if path.exists() and path.stat().st_size > size:
            os.truncate(path, size)

    def add(self, row: Row) -> int:
        """Append a row; how many bytes there are now."""
        path = self.folder / ROWS
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            files.write_all(number, (json.dumps(row) + "\n").encode())
            files.sync(number)
            return os.fstat(number).st_size
        finally:
            os.close(number)

    def rows(self) -> list[Row]:
        path = self.folder / ROWS
        return [json.loads(line) for line in files.read_text(path).splitlines()] if path.exists() else []

    def finish(self, summary: Row, roster: Roster) -> None:
        table = io.StringIO(newline="")
        names = ["client", "number", "newcomer", "train", "validation", "test", "own", "common", "has_model", "lost"]
        out = csv.DictWriter(table, names)
        out.writeheader()
        for m in roster.members:
            cells = {"client": m.name, "number": m.number, **m.sizes, "has_model": m.closed, "lost": m.lost}
            cells["newcomer"] = m.number >= roster.num_clients
            out.writerow(cells | {n: m.scores.get(n, "") for n in ("own", "common")})
        files.write(self.folder / CLIENTS, table.getvalue())
        files.write(self.folder / SUMMARY, json.dumps(summary, indent=1))
