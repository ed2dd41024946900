"""The server's side of a round: one for the simulator and for a deployed server."""

from __future__ import annotations

import torch
from torch import Tensor

from personafl.core import hook_checks, tree
from personafl.core.algorithm import Algorithm
from personafl.core.types import Params, Payload, Round
from personafl.engine.admission import all_finite


def summed(
    algorithm: Algorithm,
    server: Params,
    known: Params,
    upload: Payload,
    examples: Tensor,
    rnd: Round,
    *,
    optimistic: bool = False,
) -> tuple[Params, Params]:
    """What the server will know of a stack of clients, and the sums over them it works with.

    `known` is what it knows of them so far, `examples` `[C]` how many each trained on, float64. Whether the sums are
    finite is left to the caller where this is `optimistic`.
    """
    weights = algorithm.weigh(server, known, upload, examples, rnd)
    now = algorithm.remember(known, upload, weights, rnd)
    sums = {n: total(t) for n, t in algorithm.summands(upload, weights, rnd).items()}
    if not optimistic and not all_finite(sums.values()):
        hook_checks.check_finite_sums(algorithm, upload, sums, rnd)
    return now, sums


BLOCK = 2**16  # numbers that stay in a core's cache while clients are added to them


def total(t: Tensor) -> Tensor:
    """The sum over a stack of clients for `add`: in float64, but for a lone client's term, which stays as it is."""
    if t.shape[0] == 1:
        return t.squeeze(0)
    if t.is_cuda or t[0].numel() < 2**15:
        return t.sum(0, dtype=torch.float64)
    rows = t.flatten(1)
    out = torch.empty(rows.shape[1], dtype=torch.float64)
    for part, *others in zip(torch.split(out, BLOCK), *(torch.split(row, BLOCK) for row in rows), strict=True):
        part.copy_(others[0])
        for row in others[1:]:
            part.add_(row)
    return out.view(t.shape[1:])


def add(sums: Params, more: Params) -> None:
    """Add those of one more stack, in float64."""
    if not sums:
        sums |= tree.converted(more, torch.float64)
        return
    for n, t in more.items():
        sums[n] = sums[n].add_(t) if n in sums else t.to(torch.float64, copy=True)


def next_server(algorithm: Algorithm, server: Params, sums: Params, rnd: Round) -> tuple[Params, str]:
    """The server's state after a round, and why it stayed as it was; nothing where it did not."""
    if not sums:
        return algorithm.without_uploads(server, rnd), "no update was left"
    new = aggregated(algorithm, server, sums, rnd)
    if not all_finite(new.values()) and not hook_checks.check_finite_server(algorithm, server, sums, new, rnd):
        return algorithm.without_uploads(server, rnd), "the new one was not finite"
    return new, ""


def aggregated(algorithm: Algorithm, server: Params, sums: Params, rnd: Round) -> Params:
    """The server's state that a method makes of these sums, whose numbers nobody has looked at."""
    new = algorithm.aggregate(server, sums, rnd)
    hook_checks.check_aggregate(algorithm, server, new)
    return new
