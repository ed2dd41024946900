"""Columns of published tables and figures as numbers of a run's `summary.json`, in their units.

| column | what |
|---|---|
| `w/o shift`, `40% shift`, `average` | accuracy in %, mean over clients; the expectation over all donors where the run has the matrix of every model on every test set, else over the donors drawn |
| `100% shift, 8 inputs` | the same where answers go by so many inputs at once, or before (`evaluation.input_counts`) |
| `global model` | accuracy of the server's model on clients' own data, in % |
| `communication`, `computation` | MiB as papers count them (float32 up, masks as bits) and 1e12 FLOP, per client |
| the same `relative to FedAvg` | in % of the run labelled fedavg |
| `computation relative to dense` | in % of the same training without masks |
| `snow 3`, `own snow 3` | accuracy under a corruption and its severity, on the whole test set and on clients' own |
| `all corruptions 3`, `own all corruptions 3` | the mean of these over all corruptions of the run |
| `level, own`, `level, shifted`, `level, own again` | accuracy in % in the second half of each part of a stream that changes (`evaluation.change`) |
| `inputs to recover, shifted`, `inputs to recover, own again` | how many pass after each change until that level is reached |
| `similarity within groups`, `similarity across groups` | share of equal mask entries, mean over pairs of clients of one group or of two |
| `shared weights, client 3`, `shared weights, clients 0 to 14` | positions of linear layers that a client's mask and the server's have in common; of several clients the mean |
"""  # noqa: E501

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from personafl.core.errors import UserError
from personafl.core.types import Summary

REFERENCE = "fedavg"
RELATIVE = " relative to FedAvg"
LINEAR = ("fcs.", "head.")  # layers of the CIFAR CNN


def measure(
    column: str,
    of: Summary,
    reference: Summary | None = None,
    groups: Sequence[int] = (),
    degrees: Sequence[float] | None = None,
    *,
    expected: bool = True,
) -> float | None:
    """A column's number of a run; None where the run does not have it.

    `groups`: how many clients are of each. `degrees` are those averaged over, by default all that the run has. Without
    `expected` the expectation over all donors is not looked at, where a run has it for another table.
    """
    if column.endswith(RELATIVE):
        if reference is None:
            return None
        what = column.removesuffix(RELATIVE)
        own, theirs = measure(what, of), measure(what, reference)
        return None if own is None or theirs is None else 100 * own / theirs
    if column == "communication":
        return float(of["communication"]["paper_mib_per_client"])
    if column == "computation":
        return float(of["compute"]["flops_per_client"]) / 1e12
    if column == "computation relative to dense":
        return 100 * float(of["compute"]["flops_per_client"]) / float(of["compute"]["dense_flops_per_client"])
    if column == "global model":
        common = of["accuracy"].get("global")
        return None if common is None else 100 * float(common["mean"])
    if match := re.fullmatch(r"(level|inputs to recover), (.+)", column):
        told = of.get("robustness", {}).get("change", {}).get("levels" if match[1] == "level" else "recovery", {})
        value = told.get(match[2].replace(" ", "_"))
        return None if value is None else float(value) * (100 if match[1] == "level" else 1)
    if column.startswith(("similarity ", "shared weights")):
        return _of_masks(column, of.get("masks", {}), groups)
    if found := re.fullmatch(r"(.+), (\d+) inputs?", column):
        cells = of.get("robustness", {}).get("inputs", {}).get(found[2])
        return None if cells is None else measure(found[1], {**of, "robustness": {"expected": cells}}, degrees=degrees)
    if column == "average":
        cells = _degrees(of, expected=expected)
        wanted = list(cells) if degrees is None else [str(float(d)) for d in degrees]
        known = cells and all(d in cells for d in wanted)
        return 100 * statistics.fmean(cells[d]["mean"] for d in wanted) if known else None
    cell = _cell(column, of, expected=expected)
    return None if cell is None else 100 * float(cell["mean"])


def spread(column: str, of: Summary) -> float | None:
    """The deviation over clients behind an accuracy, of single draws of donors, in points."""
    if re.search(r", \d+ inputs?$|^level, |^inputs to recover, ", column):
        return None
    if (share := degree(column)) is not None and of["shift"]:
        cell = of["shift"]["degrees"].get(str(share))
    elif share is None and not column.startswith(("comm", "comp", "sim", "shared", "average", "global")):
        cell = _cell(column, of)
    else:
        cell = None
    return None if cell is None else 100 * float(cell["std"])


def degree(column: str) -> float | None:
    """Of shift, of which a column is the accuracy; None: of none."""
    if column == "w/o shift":
        return 0.0
    found = re.fullmatch(r"(\d+)% shift", column)
    return int(found[1]) / 100 if found else None


def _degrees(of: Summary, *, expected: bool) -> Mapping[str, Any]:
    found = of.get("robustness", {}).get("expected") if expected else None
    return found or (of["shift"]["degrees"] if of["shift"] else {})


def _cell(column: str, of: Summary, *, expected: bool = True) -> Mapping[str, Any] | None:
    if (share := degree(column)) is not None:
        return _degrees(of, expected=expected).get(str(share))
    found = re.fullmatch(r"(own )?(.+) ([1-5])", column)
    if found is None:
        raise UserError(f"column {column!r}: nothing is known to measure it by")
    told = of.get("robustness", {}).get("corruptions" if found[1] else "whole_corruptions", {})
    if found[2] == "all corruptions":
        each = [severities.get(found[3]) for severities in told.values()]
        known = [cell for cell in each if cell is not None]
        return {n: statistics.fmean(c[n] for c in known) for n in ("mean", "std")} if known else None
    cell: Mapping[str, Any] | None = told.get(found[2].replace(" ", "_"), {}).get(found[3])
    return cell


def _of_masks(column: str, masks: Mapping[str, Any], groups: Sequence[int]) -> float | None:
    if found := re.fullmatch(r"shared weights, clients? (\d+)(?: to (\d+))?", column):
        linear = [counts for name, counts in masks.get("by_client", {}).items() if name.startswith(LINEAR)]
        if not linear:
            return None
        each = [sum(counts) for counts in zip(*linear, strict=True)]
        return statistics.fmean(each[int(found[1]) : int(found[2] or found[1]) + 1])
    pairs = masks.get("pairs")
    if not pairs or sum(groups) != len(pairs):
        return None
    group = [g for g, size in enumerate(groups) for _ in range(size)]
    within = column == "similarity within groups"
    alike = [
        float(pairs[i][j]) for i in range(len(pairs)) for j in range(i) if (group[i] == group[j]) == within
    ]  # of each pair once
    return statistics.fmean(alike) if alike else None
