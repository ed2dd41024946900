"""How good the models of a federation's clients are: after a round, and in all that is asked for at the end of a run.

An evaluator is told which clients to score and with what they predict; it knows nothing of rounds or of the server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from personafl.core.algorithm import Algorithm
from personafl.core.torch_state import products
from personafl.core.types import Examples, Metric, Params, Row, TrainedTask
from personafl.data import batches
from personafl.data.federated import Federation, Split
from personafl.data.shift import Shift
from personafl.engine.sampling import largest_first
from personafl.evaluation import batch_inference, final, metrics, whole_set
from personafl.evaluation.evaluate import finite, on_host, scores
from personafl.evaluation.matrix import Score
from personafl.evaluation.settings import Evaluation
from personafl.models.stacked import StackedModel
from personafl.simulation.placement import Placement

T = TypeVar("T")
Models = Callable[[StackedModel, Tensor], Params]
"""What these clients predict with, for a stacked network and client ids."""


class Each(Protocol):
    """Apply `work` to stacks of these clients, in their order."""

    def __call__(self, ids: Tensor, work: Callable[[StackedModel, Tensor], list[T]]) -> Iterator[list[T]]: ...


class Evaluator:
    """Scores of clients' models on their data, spread over stacks and ranks."""

    def __init__(
        self,
        federation: Federation,
        task: TrainedTask,
        algorithm: Algorithm,
        evaluation: Evaluation,
        placement: Placement,
        each: Each,
        activations: float,
    ) -> None:
        """`each` runs work over stacks of clients; `activations` bounds, in bytes, what a pass leaves on a GPU."""
        self.federation, self.task, self.algorithm, self.evaluation = federation, task, algorithm, evaluation
        self.placement, self.each, self.activations = placement, each, activations
        assert isinstance(task.model, StackedModel)
        self.per_sample = not task.model.looks_at_batches and not batch_inference.asked(algorithm)
        self.training = algorithm.setup.training

    # After a round

    def after_round(self, ids: Tensor, models: Models, common: Params | None) -> tuple[Row, list[Tensor], Tensor]:
        """Accuracy of the personal models and of the global one, over clients.

        Also each client's scores, and whether its model is finite.
        """
        validated = int(self.federation.splits["validation"].offsets[-1])
        # A device gets all its work before the first answer is waited for.
        own, sound = self._own(ids, models)
        held = self._personal(ids, models, "validation") if validated else None
        loss = Metric(self.task.criterion)
        losses = self._personal(ids, models, "train", loss) if self.evaluation.train_loss else None
        of_all = None if common is None else self._global(common, ids)
        row: Row = {"personal": self._stats(own)}
        if held is not None:
            row["validation"] = self._stats(held)
        if losses is not None:
            row["train_loss"] = float(torch.cat(losses).double().mean())
        row["global"] = None if of_all is None else self._stats(of_all)
        return row, own, torch.stack(sound).cpu()

    def _stats(self, found: list[Tensor]) -> dict[str, float]:
        return stats(found, self.task.metric)

    def on_test(self, model: StackedModel, deployed: Params, ids: Tensor) -> list[Tensor]:
        """Scores of these clients' test sets, by what they predict with."""
        task = dataclasses.replace(self.task, model=model)
        return self._portable(self._scores(task, deployed, self.federation.examples("test", ids)))

    def _scores(
        self,
        task: TrainedTask,
        deployed: Params,
        data: Examples,
        *,
        in_order: bool = False,
        asked: Evaluation | None = None,
    ) -> list[Tensor]:
        return batch_inference.client_scores(
            self.algorithm, task, deployed, data, asked or self.evaluation, self.activations, in_order=in_order
        )

    def _own(self, ids: Tensor, models: Models) -> tuple[list[Tensor], list[Tensor]]:
        """Scores of each client's own model on its test set, and whether the model is finite."""

        def work(model: StackedModel, part: Tensor) -> list[tuple[Tensor, Tensor]]:
            deployed = models(model, part)
            sound = finite(deployed)
            sound = sound if self.placement.ranks.size == 1 else sound.cpu()
            return list(zip(self.on_test(model, deployed, part), sound.unbind(), strict=True))

        scored, sound = zip(*self._of_each(ids, work), strict=True)
        return list(scored), list(sound)

    def _personal(self, ids: Tensor, models: Models, split: Split, metric: Metric | None = None) -> list[Tensor]:
        """Scores of each client's own model on its own data."""

        def work(model: StackedModel, part: Tensor) -> list[Tensor]:
            task = dataclasses.replace(self.task, model=model, metric=metric or self.task.metric)
            data = self.federation.examples(split, part)
            data = data if metric is None else data.in_training_units()  # a loss is as in training
            return self._portable(self._scores(task, models(model, part), data))

        return self._of_each(ids, work)

    def _of_each(self, ids: Tensor, work: Callable[[StackedModel, Tensor], list[T]]) -> list[T]:
        """What is found of each of these clients, stack by stack and rank by rank, in their order."""
        mine = self.placement.mine(ids)
        return self.placement.together(ids, [found for part in self.each(mine, work) for found in part])

    def _portable(self, found: list[Tensor]) -> list[Tensor]:
        """Scores on the host, where other ranks are to see them; else where they are."""
        return found if self.placement.ranks.size == 1 else on_host(found)

    def _global(self, common: Params, ids: Tensor) -> list[Tensor]:
        """Scores of the server's model on these clients' test data, or on a test part that belongs to nobody."""
        flat = self.federation.official
        split = flat is None and self.placement.ranks.size > 1 and self.per_sample
        mine = self.placement.mine(ids) if split else ids
        if split and not len(mine):
            return self.placement.together(ids, [])
        if flat is None:
            rows, count = self.federation.splits["test"].padded(mine)
            flat, sizes = torch.cat([r[: int(n)] for r, n in zip(rows, count, strict=True)]), count.tolist()
        else:
            sizes = [len(flat)]
        if next(iter(common.values())).is_cuda:
            data = self.federation.examples_at(flat[None], torch.tensor([len(flat)]), ids[:1])
            with products(self.training.arithmetic, flat.device):
                row = scores(self.algorithm.common_answer, self.task, common, data, self.activations)[0]
        else:
            row = torch.cat(self._in_blocks(common, flat))
        found = list(torch.split(row, sizes))
        return self.placement.together(ids, self._portable(found)) if split else found

    def _in_blocks(self, common: Params, rows: Tensor) -> list[Tensor]:
        """Scores of the server's model on these rows, in blocks that are laid over the machine as clients are."""
        blocks = -(-len(rows) // batches.SWEEP)
        count = torch.full((blocks,), batches.SWEEP)
        count[-1] = len(rows) - (blocks - 1) * batches.SWEEP
        padded = torch.nn.functional.pad(rows, (0, blocks * batches.SWEEP - len(rows))).view(blocks, -1)

        def work(model: StackedModel, part: Tensor) -> list[Tensor]:
            task = dataclasses.replace(self.task, model=model)
            most = int(count[part].max())  # a last block by itself has no padding
            data = self.federation.examples_at(padded[part, :most], count[part], part)
            own = {n: t.expand(len(part), *t.shape[1:]) for n, t in common.items()}
            return scores(self.algorithm.common_answer, task, own, data, self.activations)

        return [found for part in self.each(torch.arange(blocks), work) for found in part]

    # At the end of a run

    def at_end(self, ids: Tensor, models: Models, shift: Shift | None, newcomers: Models) -> final.Arrays:
        """Scores of these clients, and of those held out, under all that was asked for.

        `evaluation/final.py` has the names.
        """
        found = self._measured(ids, models, shift, self.evaluation)
        held = self.of_newcomers(newcomers) if self.federation.unseen else {}
        return found | {f"{final.UNSEEN}{n}": a for n, a in held.items()}

    def of_newcomers(self, models: Models) -> final.Arrays:
        """The scores of the clients held out, under all that was asked for but shift."""
        ids = torch.arange(self.federation.num_clients, self.federation.everybody)
        asked = dataclasses.replace(self.evaluation, shift="none", matrix=False, change=0, corrupt_shifted=False)
        return self._measured(largest_first(self.federation, ids), models, None, asked)

    def _measured(self, ids: Tensor, models: Models, shift: Shift | None, asked: Evaluation) -> final.Arrays:
        def work(model: StackedModel, part: Tensor) -> list[final.Arrays]:
            task = dataclasses.replace(self.task, model=model)
            deployed, seed = models(model, part), self.training.seed

            def score(data: Examples) -> list[Tensor]:
                return on_host(self._scores(task, deployed, data))

            def in_order(data: Examples) -> list[Tensor]:
                return on_host(self._scores(task, deployed, data, in_order=True))

            def with_inputs(count: int) -> Score:
                other = dataclasses.replace(self.evaluation, batch=count, inputs_before=count)
                return lambda data: on_host(self._scores(task, deployed, data, asked=other))

            return final.measured(
                score,
                self.federation,
                part,
                shift,
                asked,
                seed,
                per_sample=self.per_sample,
                metric=self.task.metric,
                score_in_order=in_order,
                score_with=with_inputs,
            )

        with self.placement.clock("evaluation"):
            clients = self._of_each(ids, work)
        found = final.concatenated(clients, shift, asked, per_sample=self.per_sample, metric=self.task.metric)
        if whole_set.asked(asked):
            found |= self._on_whole_set(ids, models, asked)
        return found | final.who(self.federation, found["ids"])

    def _on_whole_set(self, ids: Tensor, models: Models, asked: Evaluation) -> final.Arrays:
        """Scores of these clients on the images that are the same for all, each corrupted once for all stacks."""
        rows = whole_set.chosen_rows(self.federation, asked)
        with self.placement.clock("evaluation"):
            cells = [self._of_cells(ids, models, part, rows) for part in whole_set.passes(self.federation, asked, rows)]
        return final.on_whole_set(rows, ids, torch.cat(cells, 1), asked)

    def _of_cells(self, ids: Tensor, models: Models, cells: list[whole_set.Cell], rows: Tensor) -> Tensor:
        """The numbers of these clients `[C, cells]`; images are made as stacks of clients are, block by block."""
        blocks, seed = whole_set.blocks(rows, per_sample=self.per_sample), self.training.seed
        wanted = [(block, cell) for cell in cells for block in blocks]

        def made(_: StackedModel, part: Tensor) -> list[Examples]:
            chosen = [wanted[i] for i in part.tolist()]
            return [whole_set.images(self.federation, block, cell, seed) for block, cell in chosen]

        shown = [data for part in self.each(torch.arange(len(wanted)), made) for data in part]
        by_cell = [shown[i : i + len(blocks)] for i in range(0, len(shown), len(blocks))]

        def work(model: StackedModel, part: Tensor) -> list[Tensor]:
            task = dataclasses.replace(self.task, model=model)
            deployed = models(model, part)

            def score(data: Examples) -> list[Tensor]:
                return on_host(self._scores(task, deployed, data))

            found = [whole_set.scored_by(score, cell, part, self.task.metric) for cell in by_cell]
            return list(torch.stack(found, 1).unbind())

        return torch.stack(self._of_each(ids, work))

    def newcomers(self, held: final.Arrays) -> Row:
        """Accuracy of the clients held out, from their scores."""
        parts = torch.split(torch.from_numpy(held["scores"]), np.diff(held["edges"]).tolist())
        order = largest_first(self.federation, torch.from_numpy(held["ids"])) - self.federation.num_clients
        return self._stats([parts[i] for i in order.tolist()])


def stats(found: list[Tensor], metric: Metric) -> dict[str, float]:
    """What the scores of many clients come to."""
    sizes = torch.tensor([len(s) for s in found])
    if metric.reduce is None:
        each = torch.segment_reduce(torch.cat(found).cpu().double(), "mean", lengths=sizes)
    else:
        each = torch.stack([metric.of_client(s) for s in on_host(found)])
    return metrics.over_clients(each, sizes, metric.better)


def since_left(
    ids: Tensor, before: list[Tensor], after: list[Tensor], left: Mapping[int, float], metric: Metric
) -> tuple[Row, dict[int, float]]:
    """How good the models are that clients downloaded, and by how much better than what they last trained.

    That is FedPHP's Eq. 4. `left` has the score of the model each client last trained; the second result is that of
    the models these have trained now.
    """
    came, leave = (
        {c: float(metric.of_client(s)) for c, s in zip(ids.tolist(), on_host(part), strict=True)}
        for part in (before, after)
    )
    sign = 1 if metric.better == "higher" else -1
    gained = [sign * (came[c] - left[c]) for c in came if c in left]
    return {"before": stats(before, metric), "delta": sum(gained) / len(gained) if gained else None}, leave
