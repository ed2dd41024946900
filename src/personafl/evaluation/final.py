"""What a run is judged by in the end: scores of its clients' models as named arrays, and what those come to.

Clients come first, in the order of `ids`; a sample's place in `scores` is the same in `shift_scores`. Scores are by the
run's metric, and what is called accuracy is a client's number by it. Where that is no mean of its samples' scores, but
made of several numbers of each (`Metric.reduce`), scores have one more axis, the last.

| name | shape | what |
|---|---|---|
| `ids` | `[C]` | the clients that were scored, ascending |
| `edges` | `[C + 1]` | the samples of the i-th of them are `edges[i]` to `edges[i + 1]` |
| `rows` | `[N]` | which example of the data set each sample is |
| `scores` | `[N]` | of the clients' own test sets |
| `degrees` | `[D]` | of shift; none first |
| `shift_scores` | `[N, draws, D]` | of the shifted test sets, place by place |
| `shift_accuracy` | `[C, draws, D]` | their means |
| `donors` | `[C, draws]` | who gave the samples; -1 where nobody in particular |
| `kinds`, `severities` | `[K]`, `[S]` | of corruption |
| `corruption_scores` | `[N, K, S]` | of the clients' own test sets, corrupted; bytes where all are 0 or 1 |
| `corruption_accuracy` | `[C, K, S]` | their means |
| `shift_corruption_accuracy` | `[C, K, S]` | of the test sets at full shift, corrupted; mean over draws |
| `change_scores` | `[C, draws, 3 I]` | of a stream that changes abruptly (`evaluation/stream_change.py`) |
| `input_counts` | `[M]` | of inputs at once or before, of rules that go by several |
| `count_accuracy` | `[C, M, D]` | with each of these, at each degree of shift; mean over draws |
| `whole_rows` | `[W]` | the examples of the set that is the same for all clients (`evaluation/whole_set.py`) |
| `whole_accuracy` | `[C]` | on this set, as it is |
| `whole_corruption_accuracy` | `[C, K, S]` | on this set, corrupted |
| `angles` | `[A]` | of rotation, in degrees |
| `rotation_scores` | `[N, A]` | of the clients' own test sets, turned; bytes where all are 0 or 1 |
| `rotation_accuracy` | `[C, A]` | their means |
| `client_accuracy` | `[C, clients]` | on every client's test set |
| `expected_accuracy` | `[C, D]` | under `donor` shift, from the row before, where answers depend on the sample alone |
| `names` | `[C]` | what the clients are called, where the data say so |
| `client_corruption` | `[C]` | of the client's own data, where each client has a kind |

What a run was not asked for is not there. Clients held out have the same arrays, their names behind `unseen_`, but none
of shift or of others' test sets.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core.errors import UserError
from personafl.core.types import Metric, Row
from personafl.data import client_corruption
from personafl.data.federated import Federation
from personafl.data.shift import Shift
from personafl.evaluation import image_transforms, matrix, stream_change
from personafl.evaluation.evaluate import at_degree, shifted, with_shift
from personafl.evaluation.matrix import Score
from personafl.evaluation.settings import Evaluation
from personafl.storage.npz import npz_shapes, read_npz

Arrays = dict[str, NDArray[Any]]
UNSEEN = "unseen_"
AXES = {
    **dict.fromkeys(("ids", "names", "client_corruption", "donors", "shift_accuracy", "corruption_accuracy"), "C"),
    **dict.fromkeys(("shift_corruption_accuracy", "change_scores", "count_accuracy", "whole_accuracy"), "C"),
    **dict.fromkeys(("whole_corruption_accuracy", "rotation_accuracy", "client_accuracy", "expected_accuracy"), "C"),
    **dict.fromkeys(("rows", "scores", "shift_scores", "corruption_scores", "rotation_scores"), "N"),
    **dict.fromkeys(("degrees", "kinds", "severities", "input_counts", "angles", "edges", "whole_rows"), ""),
}
"""All arrays that a file may have, by their first axis: clients, samples, or neither."""
MOST_OF_ROW = 2**16  # bytes of an array for each client or sample, besides 64 for every client
MOST_OF_LIST = 2**27  # bytes of an array that goes by neither
TOLD = {"name": "names", "corruption": "client_corruption"}  # columns of text, and the arrays they come from


def degrees(evaluation: Evaluation) -> tuple[float, ...]:
    """Degrees of shift that are scored: none, and those asked for."""
    return tuple(dict.fromkeys((0.0, *evaluation.degrees)))


def measured(
    score: Score,
    federation: Federation,
    ids: Tensor,
    shift: Shift | None,
    evaluation: Evaluation,
    seed: int,
    *,
    per_sample: bool,
    metric: Metric,
    score_in_order: Score,
    score_with: Callable[[int], Score],
) -> list[Arrays]:
    """Everything asked for, of each client of a stack; `per_sample` where an answer does not depend on its batch."""
    data = federation.examples("test", ids)
    if shift is None:
        found = [s[:, None, None] for s in score(data)]
    elif per_sample:  # each example is scored once, whatever stands beside it
        found = shifted(score(with_shift(federation, shift, ids)), shift, ids, degrees(evaluation))
    else:
        mixes = [
            [score(at_degree(federation, shift, ids, d, p)) for p in degrees(evaluation)] for d in range(shift.draws)
        ]
        found = [torch.stack([torch.stack([p[i] for p in d]) for d in mixes]).movedim(2, 0) for i in range(len(ids))]
    more: dict[str, Tensor] = {}  # [C, ...]
    single: list[dict[str, Tensor]] = [{} for _ in ids]  # [n, ...]
    names = image_transforms.kinds(evaluation)
    if names and evaluation.corrupted != "whole":
        shape = (len(names), len(evaluation.severities))
        cells = [score(image_transforms.corrupted(data, k, s, seed)) for k in names for s in evaluation.severities]
        more["corruption_accuracy"] = _kept(cells, shape, single, "corruption_scores", metric)
    if names and evaluation.corrupt_shifted and shift is not None:
        foreign = [at_degree(federation, shift, ids, d, 1.0) for d in range(shift.draws)]
        both = [
            [_means(score(image_transforms.corrupted(f, k, s, seed)), metric) for f in foreign]
            for k in names
            for s in evaluation.severities
        ]
        means = torch.stack([torch.stack(of).mean(0) for of in both], 1)
        more["shift_corruption_accuracy"] = means.view(-1, len(names), len(evaluation.severities))
    if evaluation.change and shift is not None:
        more["change_scores"] = stream_change.stream_scores(score_in_order, federation, shift, ids, evaluation, seed)
    if evaluation.input_counts and not per_sample:
        by_count = [_curve(score_with(n), federation, shift, ids, evaluation, metric) for n in evaluation.input_counts]
        more["count_accuracy"] = torch.stack(by_count, 1)
    if evaluation.rotations:
        turned = [score(image_transforms.rotated(data, a)) for a in evaluation.rotations]
        more["rotation_accuracy"] = _kept(turned, (len(turned),), single, "rotation_scores", metric)
    if evaluation.matrix:
        more["client_accuracy"] = matrix.against_all(score, federation, ids, per_sample=per_sample, metric=metric)
    return [
        {
            "ids": ids[i : i + 1].numpy(),
            "rows": data.rows[i, : int(data.count[i])].cpu().numpy(),
            "shift_scores": found[i].numpy(),
            **{n: t[i : i + 1].numpy() for n, t in more.items()},
            **{n: t.numpy() for n, t in single[i].items()},
        }
        for i in range(len(ids))
    ]


def _curve(
    score: Score, federation: Federation, shift: Shift | None, ids: Tensor, evaluation: Evaluation, metric: Metric
) -> Tensor:
    """Clients' numbers at each degree of shift, mean over draws: `[C, D]`."""
    if shift is None:
        return _means(score(federation.examples("test", ids)), metric).unsqueeze(1)
    at = [
        [_means(score(at_degree(federation, shift, ids, d, p)), metric) for d in range(shift.draws)]
        for p in degrees(evaluation)
    ]
    return torch.stack([torch.stack(of).mean(0) for of in at], 1)


def _kept(
    cells: list[list[Tensor]], shape: tuple[int, ...], single: list[dict[str, Tensor]], name: str, metric: Metric
) -> Tensor:
    """Clients' numbers `[C, *shape]` from each cell's and client's scores; those `[n, *shape, ...]` are left."""
    for i, mine in enumerate(single):
        scores = torch.stack([c[i] for c in cells], 1)
        mine[name] = _small(scores.view(-1, *shape, *scores.shape[2:]))
    return torch.stack([_means(c, metric) for c in cells], 1).view(-1, *shape)


def _means(found: list[Tensor], metric: Metric) -> Tensor:
    """Clients' numbers `[C]` from their scores."""
    return torch.stack([metric.of_client(s) for s in found])


def _small(scores: Tensor) -> Tensor:
    """As bytes, where they are 0 and 1."""
    return scores.to(torch.uint8) if bool(((scores == 0) | (scores == 1)).all()) else scores


def concatenated(
    clients: Sequence[Arrays], shift: Shift | None, evaluation: Evaluation, *, per_sample: bool, metric: Metric
) -> Arrays:
    """The arrays of a run from those of its clients, in any order."""
    clients = sorted(clients, key=lambda c: int(c["ids"][0]))
    out = {n: np.concatenate([c[n] for c in clients]) for n in clients[0]}
    sizes = np.array([len(c["rows"]) for c in clients])
    scores = out.pop("shift_scores")
    out |= {"edges": np.concatenate([[0], sizes.cumsum()]), "scores": scores[:, 0, 0].copy()}
    if shift is not None:
        means = [metric.of_client(torch.from_numpy(c["shift_scores"])).numpy()[None] for c in clients]
        out |= {"degrees": np.array(degrees(evaluation)), "shift_scores": scores}
        out |= {
            "shift_accuracy": np.concatenate(means),
            "donors": shift.donors_of(torch.from_numpy(out["ids"])).T.numpy(),
        }
    if names := image_transforms.kinds(evaluation):
        out |= {"kinds": np.array(names), "severities": np.array(evaluation.severities)}
    if "count_accuracy" in out:
        out["input_counts"] = np.array(evaluation.input_counts)
    if "rotation_accuracy" in out:
        out["angles"] = np.array(evaluation.rotations)
    linear = per_sample and metric.reduce is None
    if linear and "client_accuracy" in out and out["client_accuracy"].shape[1] > 1:
        wanted = degrees(evaluation)
        out |= {"degrees": np.array(wanted)}
        out["expected_accuracy"] = matrix.expected(out["client_accuracy"], out["ids"], sizes, wanted)
    return out


def on_whole_set(rows: Tensor, ids: Tensor, found: Tensor, evaluation: Evaluation) -> Arrays:
    """The arrays of the set that is the same for all, from numbers `[C, 1 + K * S]` of clients in any order."""
    cells = found[ids.argsort()].numpy()
    shape = (len(image_transforms.kinds(evaluation)), len(evaluation.severities))
    return {
        "whole_rows": rows.numpy(),
        "whole_accuracy": cells[:, 0].copy(),
        "whole_corruption_accuracy": cells[:, 1:].reshape(-1, *shape),
    }


def who(federation: Federation, ids: NDArray[np.int64]) -> Arrays:
    """What is known of these clients besides their numbers."""
    told = {"names": federation.names, "client_corruption": client_corruption.client_kinds(federation)}
    return {n: np.array([values[c] for c in ids]) for n, values in told.items() if values}


def newcomers(found: Arrays) -> Arrays:
    """The arrays of clients held out."""
    return {n.removeprefix(UNSEEN): a for n, a in found.items() if n.startswith(UNSEEN)}


# What they come to


def own_accuracy(found: Arrays, metric: Metric | None) -> NDArray[np.float64]:
    """Of each client on its own test set: `[C]`; without a metric the mean over samples."""
    parts = np.split(found["scores"], found["edges"][1:-1])
    if metric is None:
        return np.array([float(np.mean(p, dtype=np.float64)) for p in parts])
    return np.array([float(metric.of_client(torch.from_numpy(p))) for p in parts])


def table(found: Arrays, train: NDArray[np.int64], metric: Metric) -> list[Row]:
    """A row for each scored client: its sizes (`train` `[C]`), its score, and that at each degree of shift.

    The column of the score has the name of the metric, or is `score` where another column has that name.
    """
    own, sizes = own_accuracy(found, metric), np.diff(found["edges"])
    curve = found["shift_accuracy"].mean(1) if "shift_accuracy" in found else np.zeros((len(own), 0))
    name = "score" if metric.name in ("client", "train", "test", *TOLD) or metric.name[:6] == "shift_" else metric.name
    return [
        {"client": int(c)}
        | {column: str(found[n][i]) for column, n in TOLD.items() if n in found}
        | {"train": int(train[i]), "test": int(sizes[i]), name: float(own[i])}
        | {f"shift_{d:g}": float(a) for d, a in zip(found.get("degrees", ()), curve[i], strict=False)}
        for i, c in enumerate(found["ids"])
    ]


def shift_summary(found: Arrays, evaluation: Evaluation) -> Row | None:
    """Mean accuracy at each degree asked for, and the deviation over clients within a draw; None without shift."""
    if "shift_accuracy" not in found:
        return None
    curve, known = found["shift_accuracy"], found["degrees"].tolist()  # [C, draws, D]
    cells = {}
    for degree in evaluation.degrees:
        at = curve[:, :, known.index(degree)]
        cells[str(float(degree))] = {"mean": float(at.mean()), "std": float(at.std(0).mean())}
    average = sum(c["mean"] for c in cells.values()) / len(cells)
    return {"protocol": evaluation.shift, "degrees": cells, "average": average}


def robustness(found: Arrays, evaluation: Evaluation, metric: Metric) -> Row:
    """Mean and deviation over clients of accuracy under corruption and rotation, and on others' test sets."""
    out: Row = {}
    for which in ("", "whole_", "shift_"):
        if (cells := found.get(f"{which}corruption_accuracy")) is not None:
            out[f"{which}corruptions"] = {
                str(kind): {str(s): _cell(cells[:, k, j]) for j, s in enumerate(found["severities"])}
                for k, kind in enumerate(found["kinds"])
            }
            out[f"{which}corruption_average"] = _cell(cells.mean((1, 2)))
    if "count_accuracy" in found:
        known = found["degrees"].tolist() if "degrees" in found else [0.0]
        asked = [d for d in evaluation.degrees if d in known]
        out["inputs"] = {
            str(n): {str(float(d)): _cell(found["count_accuracy"][:, j, known.index(d)]) for d in asked}
            for j, n in enumerate(found["input_counts"].tolist())
        }
    if "change_scores" in found:
        out["change"] = stream_change.summary(found["change_scores"], metric.better)
    if "whole_accuracy" in found:
        out["whole_clean"] = _cell(found["whole_accuracy"])
    if "rotation_accuracy" in found:
        out["rotations"] = {
            str(float(a)): _cell(found["rotation_accuracy"][:, j]) for j, a in enumerate(found["angles"])
        }
    if "expected_accuracy" in found:
        known = found["degrees"].tolist()
        out["expected"] = {
            str(float(d)): _cell(found["expected_accuracy"][:, known.index(d)]) for d in evaluation.degrees
        }
    return out


def _cell(values: NDArray[np.float64]) -> dict[str, float]:
    return {"mean": float(values.mean()), "std": float(values.std())}


# To disk and back


def packed(found: Arrays) -> bytes:
    """The bytes of a .npz file of these."""
    out = io.BytesIO()
    np.savez_compressed(out, **cast(dict[str, Any], found))
    return out.getvalue()


def load(path: Path, names: Sequence[str] = ()) -> Arrays:
    """The arrays of a file, or those of these names it has; `ids`, `edges` and `scores` are among them.

    Others than those of the table above are not read, and none before its shape was compared with those of `ids` and
    `rows`: a small file may claim to hold gigabytes.
    """
    shapes = {n: s for n, s in npz_shapes(path).items() if n.removeprefix(UNSEEN) in AXES}
    if gone := {"ids", "edges", "scores"} - shapes.keys():
        raise UserError(f"{path}: not a file of evaluations: it has no {', '.join(sorted(gone))}")
    for part in ("", UNSEEN):
        if f"{part}ids" not in shapes:
            continue
        axes = {"C": shapes[f"{part}ids"][0], "N": shapes.get(f"{part}rows", shapes["scores"])[0]}
        for n, axis in AXES.items():
            shape, size = shapes.get(f"{part}{n}", ((), 0))
            expected = axes.get(axis, shape)[:1]
            counts = [math.prod(a) for a in axes.values()]
            most = MOST_OF_LIST if axis not in axes else (MOST_OF_ROW + 64 * counts[0]) * max(1, *counts)
            if size and (shape[:1] != expected or size > most):
                raise UserError(f"{path}: not a file of evaluations: {part}{n} has shape {str(shape)[:60]}")
    return read_npz(path, [n for n in shapes if not names or n in names])
