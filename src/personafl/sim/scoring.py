"""How good the clients of a simulation are: after a round, and in all that is asked for at the end of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from personafl.core import tree
from personafl.core.types import Criterion, Evaluation, Examples, Params
from personafl.data.federated import Split
from personafl.data.shift import Shift
from personafl.evaluation import final, metrics
from personafl.evaluation import masks as evaluation_masks
from personafl.evaluation.evaluate import on_host, scores
from personafl.models.stacked import StackedModel
from personafl.sim.layout import products

if TYPE_CHECKING:
    from personafl.sim.simulator import Simulation

T = TypeVar("T")
Row = dict[str, Any]
Ready = Callable[[StackedModel, Tensor], Params]
"""What these clients predict with."""


def after_round(sim: Simulation, before: list[Tensor]) -> Row:
    """Accuracy of the personal models and of the global one, over clients; with `before`, scores on arrival."""
    ids = sim.scored(sim.now.stage)
    common, validated = sim.common(), int(sim.federation.splits["validation"].first[-1])
    # A device gets all its work before the first answer is waited for.
    own = _personal(sim, ids, "test")
    held = _personal(sim, ids, "validation") if validated else None
    losses = _personal(sim, ids, "train", sim.task.criterion) if sim.evaluation.train_loss else None
    of_all = None if common is None else _global(sim, common, ids)
    row: Row = {"personal": stats(own)}
    if before:
        row |= _since(sim, ids, on_host(before), on_host(own))
    if held is not None:
        row["validation"] = stats(held)
    if losses is not None:
        row["train_loss"] = float(torch.cat(losses).double().mean())
    row["global"] = None if of_all is None else stats(of_all)
    return row


def _since(sim: Simulation, ids: Tensor, before: list[Tensor], after: list[Tensor]) -> Row:
    """How good clients were on arrival, and by how much better than when they last left (FedPHP's Eq. 4)."""
    came, left = (
        {c: float(s.double().mean()) for c, s in zip(ids.tolist(), part, strict=True)} for part in (before, after)
    )
    gained = [came[c] - sim.left[c] for c in came if c in sim.left]
    sim.left |= left
    return {"before": stats(before), "delta": sum(gained) / len(gained) if gained else None}


def _personal(sim: Simulation, ids: Tensor, split: Split, metric: Criterion | None = None) -> list[Tensor]:
    """Scores of each client's own model on its own data."""

    def work(model: StackedModel, part: Tensor) -> list[Tensor]:
        task = dataclasses.replace(sim.task, model=model, metric=metric or sim.task.metric)
        data = sim.federation.examples(split, part)
        return portable(sim, scores(sim.algorithm.predict, task, sim.judged(model, part), data, sim.layout.activations))

    return _of_each(sim, ids, work)


def _of_each(sim: Simulation, ids: Tensor, work: Callable[[StackedModel, Tensor], list[T]]) -> list[T]:
    """What is found of each of these clients, stack by stack and rank by rank, in their order."""
    mine = sim.placement.mine(ids)
    return sim.placement.together(ids, [found for part in sim.each(mine, work) for found in part])


def portable(sim: Simulation, found: list[Tensor]) -> list[Tensor]:
    """Scores on the host, where other ranks are to see them; else where they are."""
    return found if sim.ranks.size == 1 else on_host(found)


def _global(sim: Simulation, common: Params, ids: Tensor) -> list[Tensor]:
    """Scores of the server's model on these clients' test data, or on a test part that belongs to nobody."""
    source, flat = sim.federation.source, sim.federation.official
    split = flat is None and sim.ranks.size > 1 and not sim.model.looks_at_batches
    mine = sim.placement.mine(ids) if split else ids
    if split and not len(mine):
        return sim.placement.together(ids, [])
    if flat is None:
        rows, count = sim.federation.splits["test"].padded(mine)
        flat, sizes = torch.cat([r[: int(n)] for r, n in zip(rows, count, strict=True)]), count.tolist()
    else:
        sizes = [len(flat)]
    data = Examples(source.x, source.y, flat[None], torch.tensor([len(flat)]), ids[:1])
    with products(sim.training.precision):
        (row,) = scores(sim.algorithm.common_answer, sim.task, common, data, sim.layout.activations)
    found = list(torch.split(row, sizes))
    return sim.placement.together(ids, portable(sim, found)) if split else found


def of_run(sim: Simulation) -> final.Arrays:
    """The scores of all scored clients under all that was asked for; `evaluation/final.py` has the names."""
    found = _measured(sim, sim.scored(sim.now.stage), sim.judged, sim.shift, sim.evaluation)
    held = _of_newcomers(sim) if sim.federation.unseen else {}
    return found | {f"{final.UNSEEN}{n}": a for n, a in held.items()}


def _of_newcomers(sim: Simulation) -> final.Arrays:
    """The scores of the clients held out, under all that was asked for but shift."""
    ids = sim.sorted(torch.arange(sim.federation.num_clients, sim.federation.everybody))
    asked = dataclasses.replace(sim.evaluation, shift="none", matrix=False)
    return _measured(sim, ids, sim.joined, None, asked)


def _measured(sim: Simulation, ids: Tensor, ready: Ready, shift: Shift | None, asked: Evaluation) -> final.Arrays:
    per_sample = not sim.model.looks_at_batches

    def work(model: StackedModel, part: Tensor) -> list[final.Arrays]:
        task = dataclasses.replace(sim.task, model=model)
        own, seed = ready(model, part), sim.training.seed

        def score(data: Examples) -> list[Tensor]:
            return on_host(scores(sim.algorithm.predict, task, own, data, sim.layout.activations))

        return final.measured(score, sim.federation, part, shift, asked, seed, per_sample=per_sample)

    with sim.clock("evaluation"):
        clients = _of_each(sim, ids, work)
    found = final.joined(clients, shift, asked, per_sample=per_sample)
    return found | final.who(sim.federation, found["ids"])


def newcomers(sim: Simulation, found: final.Arrays | None) -> Row | None:
    """Accuracy of the clients held out, as newcomers; None where there are none."""
    if not sim.federation.unseen:
        return None
    held = _of_newcomers(sim) if found is None else final.newcomers(found)
    parts = torch.split(torch.from_numpy(held["scores"]), np.diff(held["edges"]).tolist())
    order = sim.sorted(torch.from_numpy(held["ids"])) - sim.federation.num_clients
    return stats([parts[i] for i in order.tolist()])


def masks(sim: Simulation) -> Row | None:
    """How alike the evaluated clients' masks are (`evaluation/masks.py`); None where the method gives them none."""

    method, one = sim.algorithm, torch.zeros(1, dtype=torch.int64)
    fresh, known = (begin(sim.model.initial, one) for begin in (method.init_clients, method.init_known))
    if not method.client_masks(fresh, tree.received(method.download(sim.server, known, sim.now), 1)):
        return None  # without a look at anybody's rows

    def work(model: StackedModel, part: Tensor) -> Params:
        down = tree.received(sim.download(part, sim.now), len(part))
        return evaluation_masks.sums(method.client_masks(sim.store.gather(part), down))

    total: Params = {}
    with sim.clock("evaluation"):
        for found in sim.each(sim.placement.mine(sim.scored(sim.now.stage)), work):
            for n, t in found.items():
                total[n] = total[n] + t if n in total else t
        return evaluation_masks.summary(sim.ranks.sum(total))


def stats(found: list[Tensor]) -> dict[str, float]:
    """What the scores of many clients come to."""
    sizes = torch.tensor([s.numel() for s in found])
    flat = torch.cat(found).cpu().double()
    return metrics.over_clients(torch.segment_reduce(flat, "mean", lengths=sizes), sizes)
