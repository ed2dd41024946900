"""The partition without skew."""

from __future__ import annotations

import numpy as np

from personafl.data.partition.partitioner import PartitionRequest, PartitionResult, partitioner
from personafl.data.ragged import Ragged


@partitioner(deals_test_part=True, needs_classes=False)
def iid(request: PartitionRequest) -> PartitionResult:
    """Shuffle and deal equally."""
    order = request.rng.permutation(len(request.labels))
    each, more = divmod(len(order), request.num_clients)
    return PartitionResult(Ragged.cut(order, each + (np.arange(request.num_clients) < more)).sorted())
