"""What a deployed server knows of each client."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from personafl.core import tree
from personafl.core.algorithm import Algorithm
from personafl.core.types import Params

KNOWN, LASTING = "known", "lasting"


class ClientRecords:
    """Rows of what the server knows of clients, and what each added for good to sums that last.

    Args:
        algorithm: The method, which says what is known of a client at first.
        initial: The model all clients began with.
        rows: The tensors of each client by number, as a checkpoint has them.
    """

    def __init__(self, algorithm: Algorithm, initial: Params, rows: Mapping[int, Params]) -> None:
        self.algorithm, self.initial, self.rows = algorithm, initial, dict(rows)
        self.changed: set[int] = set()  # since the last checkpoint

    def __contains__(self, number: int) -> bool:
        return number in self.rows

    def gather(self, ids: Tensor) -> Params:
        """Return what is known of these clients, `[C, ...]`."""
        fresh = self.algorithm.init_known(self.initial, ids)
        if not fresh:
            return {}
        each = [
            tree.under(self.rows.get(n, {}), KNOWN) or tree.take(fresh, slice(i, i + 1))
            for i, n in enumerate(ids.tolist())
        ]
        return tree.join(each)

    def scatter(self, ids: Tensor, rows: Params) -> None:
        """Record what is known of these clients now."""
        for i, n in enumerate(ids.tolist()):
            self._put(n, tree.prefixed({k: t[i : i + 1].clone() for k, t in rows.items()}, KNOWN))

    def add_lasting(self, ids: Tensor, terms: Params) -> None:
        """Add what these clients contributed to sums that outlive a round, so that it can be taken back."""
        for i, n in enumerate(ids.tolist()):
            held = tree.under(self.rows.get(n, {}), LASTING)
            self._put(n, tree.prefixed({k: held.get(k, 0) + t[i].double() for k, t in terms.items()}, LASTING))

    def _put(self, number: int, tensors: Params) -> None:
        if tensors or number in self.rows:
            self.rows[number] = self.rows.get(number, {}) | tensors
            self.changed.add(number)

    def remove(self, number: int) -> Params:
        """Forget a client; return what it had added for good."""
        return tree.under(self.rows.pop(number, {}), LASTING)
