"""The server's side of a round: sums that do not depend on how clients are stacked."""

from __future__ import annotations

import pytest
import torch

from personafl import FedAvg, StackedModel, Training
from personafl.core.types import Round, Setup, Stage
from personafl.engine.aggregation import add, next_server, summed, total
from personafl.models import MLP

RND = Round(Stage(number=0), 0.1)


def bound() -> FedAvg:
    model = StackedModel(MLP(2, 3, 3, 2), torch.zeros(2, 2))
    return FedAvg().bind(Setup(model.info, Training(), 3, 6))


@pytest.mark.parametrize("size", [4, 2**15])
def test_a_total_is_in_float64_however_large(size: int) -> None:
    """Beyond 2^24 float32 loses a one; in float64 it does not."""
    t = torch.ones(3, size)
    t[0] = 2.0**24
    found = total(t)
    assert found.dtype == torch.float64 and torch.equal(found, torch.full((size,), 2.0**24 + 2, dtype=torch.float64))


def test_a_lone_client_s_term_stays_as_it_is() -> None:
    assert total(torch.ones(1, 2)).dtype == torch.float32


def test_stacks_add_up() -> None:
    sums: dict[str, torch.Tensor] = {}
    first = torch.ones(2)
    add(sums, {"a": first})
    add(sums, {"a": first, "b": first})
    assert sums["a"].tolist() == [2, 2] and sums["b"].tolist() == [1, 1] and first.tolist() == [1, 1]
    assert sums["a"].dtype == torch.float64


def test_clients_count_by_their_examples() -> None:
    """(1 * 1 + 4 * 3) / 4 = 3.25."""
    method = bound()
    server = method.init_server({n: torch.zeros(s) for n, s in method.info.shapes.items()})
    upload = {n: torch.stack([torch.full(t.shape, 1.0), torch.full(t.shape, 4.0)]) for n, t in server.items()}
    known, found = summed(method, server, {}, upload, torch.tensor([1.0, 3.0], dtype=torch.float64), RND)
    new, why = next_server(method, server, found, RND)
    assert known == {} and why == ""
    assert all(torch.equal(t, torch.full_like(t, 3.25)) for t in new.values())


def test_a_model_that_is_not_finite_is_not_taken() -> None:
    method = bound()
    server = method.init_server({n: torch.zeros(s) for n, s in method.info.shapes.items()})
    sums = {n: torch.full(t.shape, torch.inf) for n, t in server.items()} | {"aux/weight": torch.ones(())}
    assert next_server(method, server, sums, RND) == (server, "the new one was not finite")
    assert next_server(method, server, {}, RND) == (server, "no update was left")
