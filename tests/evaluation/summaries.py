"""Summaries of runs, as reports read them."""

from __future__ import annotations

from typing import Any


def summary(label: str, seed: int, own: float, full: float, **changes: Any) -> dict[str, Any]:
    return {
        "algorithm": label,
        "label": label,
        "seed": seed,
        "rounds": 10,
        "evaluated_model": "theirs & <ours>",
        "lr": 0.1,
        "accuracy": {"personal": {"mean": own, "std": 0.05, "worst": own - 0.1}, "global": None},
        "shift": {"degrees": {"0.0": {"mean": own}, "1.0": {"mean": full, "std": 0.2}}, "average": (own + full) / 2},
        "communication": {"mib_per_client": 1234.5},
        "compute": {"flops_per_client": 2.5e9},
        "time": {"seconds": 3.0},
        "hashes": {"split": "a", "cohorts": "b", "init": "c", "shift": "d"},
    } | changes


def corrupted(*means: float) -> dict[str, Any]:
    cells = {str(s): {"mean": m, "std": 0.1} for s, m in enumerate(means, 1)}
    return {"corruptions": {"fog": cells}, "corruption_average": {"mean": sum(means) / len(means), "std": 0.1}}


CURVES = {("ditto", 0): [{"round": 0, "personal": {"mean": 0.5}}]}
