"""How alike the masks of clients are, and how much of the server's they have: DM-PFL's Fig. 6 as numbers.

Per masked tensor, and for all of them as one:

    similarity   the fraction of positions at which two clients' masks agree, on average over all pairs of clients
    overlap      the fraction of a client's mask that is in the server's, |m_c and m_g| / |m_c|, on average over clients
    shared       that number of positions itself, |m_c and m_g|, on average over clients (Fig. 6b)
    density      the fraction of positions in a client's mask, on average over clients

Sums over clients suffice. A position that k of n masks have is agreed upon by k (k - 1) + (n - k) (n - k - 1) of the
n (n - 1) ordered pairs, so no two masks are ever compared.

Of at most `LIMIT` clients, for whom the masks themselves are brought together, one by one too:

    ids          who they are, in order
    pairs        the fraction of positions at which two clients' masks agree, over all tensors, for each two (Fig. 6a)
    by_client    |m_c and m_g| of each client, per tensor (Fig. 6b)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from personafl.core import tree
from personafl.core.types import Params

COMMON = "global"  # the prefix of the server's masks among those of clients
LIMIT = 50  # clients that are compared one by one
_BLOCK = 2**13  # bytes of each client that are compared at a time: float32 counts their bits exactly


@dataclass(frozen=True)
class ClientMasks:
    """What the masks of one client are compared by, on the host."""

    bits: NDArray[np.uint8]  # all masks, one behind the other
    shared: dict[str, int]  # positions in the server's too, by tensor


def each_client(held: Params) -> list[ClientMasks]:
    """The masks of every client of a stack, from the same as `sums`."""
    own, common = tree.without(held, COMMON), tree.under(held, COMMON)
    if not own:
        return []
    bits = np.packbits(torch.cat([tree.flat(m) for m in own.values()], 1).cpu().numpy(), axis=1)
    shared = {n: tree.flat(m & common[n]).sum(1).tolist() for n, m in own.items() if n in common}
    return [ClientMasks(row, {n: counts[c] for n, counts in shared.items()}) for c, row in enumerate(bits)]


def sums(held: Params) -> Params:
    """What a stack of clients adds, from their masks `[C, ...]` and the server's beside them, under `global/`."""
    own, common = tree.without(held, COMMON), tree.under(held, COMMON)
    out: Params = {}
    active, shared = [], []
    for n, m in own.items():
        out[f"have/{n}"] = m.sum(0, dtype=torch.float64)
        active.append(tree.flat(m).sum(1).double())
        if n in common:
            shared.append(tree.flat(m & common[n]).sum(1).double())
            out |= {f"shared/{n}": shared[-1].sum(), f"overlap/{n}": _share(shared[-1], active[-1])}
    if own:
        out["aux/clients"] = torch.tensor(float(len(active[0])), dtype=torch.float64, device=active[0].device)
    if shared and len(shared) == len(active):
        out["aux/overlap"] = _share(torch.stack(shared).sum(0), torch.stack(active).sum(0))
    return out


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """The sum over clients of a share; an empty mask is all in the server's."""
    return torch.where(whole > 0, part / whole.clamp(min=1), 1).sum()


def summary(total: Params, ids: Sequence[int] = (), clients: Sequence[ClientMasks] = ()) -> dict[str, Any] | None:
    """The measures of all clients, from their sums; None where no client has a mask.

    With the clients' ids and masks, also what is told of each.
    """
    if not total:
        return None
    n = float(total["aux/clients"])
    have = tree.under(total, "have")
    agreeing = {name: float((k * (k - 1) + (n - k) * (n - k - 1)).sum()) for name, k in have.items()}
    sizes = {name: k.numel() for name, k in have.items()}
    pairs = n * (n - 1)

    def means(what: str) -> dict[str, float]:
        return {name: float(t) / n for name, t in tree.under(total, what).items()}

    out: dict[str, Any] = {"clients": int(n)}
    if pairs:
        out["similarity"] = {name: a / (pairs * sizes[name]) for name, a in agreeing.items()}
    out["density"] = {name: float(k.sum()) / (n * sizes[name]) for name, k in have.items()}
    if shared := means("shared"):
        out |= {"overlap": means("overlap"), "shared": shared}
    whole = {"density": sum(float(k.sum()) for k in have.values()) / (n * sum(sizes.values()))}
    if pairs:
        whole["similarity"] = sum(agreeing.values()) / (pairs * sum(sizes.values()))
    if "aux/overlap" in total:
        whole |= {"overlap": float(total["aux/overlap"]) / n, "shared": sum(shared.values())}
    out["whole"] = whole
    return out | _one_by_one(ids, clients, sum(sizes.values())) if clients else out


def _one_by_one(ids: Sequence[int], clients: Sequence[ClientMasks], size: int) -> dict[str, Any]:
    """What is told of each client, from masks of `size` positions."""
    order = sorted(range(len(ids)), key=ids.__getitem__)
    clients = [clients[i] for i in order]
    pairs = _agreement(np.stack([c.bits for c in clients]), size)
    out: dict[str, Any] = {"ids": [ids[i] for i in order], "pairs": pairs.tolist()}
    if shared := clients[0].shared:
        out["by_client"] = {n: [c.shared[n] for c in clients] for n in shared}
    return out


def _agreement(bits: NDArray[np.uint8], size: int) -> Tensor:
    """The fraction of positions at which each two rows of bits agree."""
    both = torch.zeros(len(bits), len(bits), dtype=torch.float64)
    for at in range(0, bits.shape[1], _BLOCK):
        block = torch.from_numpy(np.unpackbits(bits[:, at : at + _BLOCK], axis=1)).float()
        both += block @ block.T
    active = both.diagonal()
    return (size - active[:, None] - active + 2 * both) / size
