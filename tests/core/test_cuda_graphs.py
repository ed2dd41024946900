"""What of recordings can be seen without a GPU; the rest is in tests/test_gpu.py."""

from __future__ import annotations

import torch

from personafl.core import cuda_graphs, local
from personafl.core.batches import Plan
from personafl.core.cuda_graphs import Step


def test_one_clients_convolutions_lie_channels_last() -> None:
    """Of a stack they lie as they are, and so does what is no weight of an image's convolution."""
    one, two = torch.zeros(1, 4, 3, 5, 5), torch.zeros(2, 4, 3, 5, 5)
    found = cuda_graphs._blank({"one": one, "two": two, "linear": torch.zeros(1, 4, 3).transpose(1, 2)})
    assert found["one"].shape == one.shape
    assert found["one"].squeeze(0).is_contiguous(memory_format=torch.channels_last)
    assert found["two"].is_contiguous() and found["linear"].is_contiguous()
    assert torch.empty_like(found["one"]).stride() == found["one"].stride()


def test_gradients_lie_as_their_weights() -> None:
    weight = cuda_graphs._blank({"w": torch.zeros(1, 4, 3, 5, 5)})["w"]
    grad = torch.randn(1, 4, 3, 5, 5)
    laid = local._laid_as(grad, weight)
    assert laid.stride() == weight.stride() and torch.equal(laid, grad)
    assert local._laid_as(laid, weight) is laid


def plan(sizes: list[list[int]], width: int) -> Plan:
    real = torch.tensor(sizes)
    rows = torch.zeros(*real.shape, width, dtype=torch.int64)
    active = (real > 0).sum(0).tolist()
    return Plan(rows, rows, real, real, (real > 0).sum(1), active, [False] * len(active), real.sum(1).double())


def test_steps_are_told_apart_by_clients_or_by_sizes() -> None:
    stack = plan([[5, 5, 2], [5, 3, 0]], width=5)
    assert local._of_stack(stack) == [Step(2, 5, False), Step(2, 5, False), Step(1, 5, False)]
    client = stack.client(1)
    assert local._of_client(client, exact=True) == [Step(1, 5, True), Step(1, 3, True)]
    assert local._of_client(client, exact=False) == [Step(1, 5, True), Step(1, 5, False)]
