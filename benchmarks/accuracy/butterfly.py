"""gTop-k among four workers in one process, without a network, with the product's selection and merges.

each worker:   gradient / P -> ErrorFeedback.prepare -> payload
butterfly:     merge with rank XOR 1, XOR 2; truncated entries go to their owners' residuals
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gridtrain.network.wire.sparse_payload import ValueKind, decode
from gridtrain.sparsify.error_feedback import ErrorFeedback
from gridtrain.sparsify.merge import TruncatedEntries, merge

WORKERS = 4
MOMENTUM = 0.9


class Butterfly:
    """The residuals of all workers."""

    def __init__(self, n: int, density: float, kind: ValueKind = ValueKind.FP16) -> None:
        self.n, self.k, self.kind = n, max(1, round(density * n)), kind
        self.feedback = [ErrorFeedback(n, "cpu", MOMENTUM) for _ in range(WORKERS)]

    def exchange(self, contributions: list[Tensor]) -> Tensor:
        """Return the update (n,) for the contributions (n,) of all workers."""
        prepared = [
            feedback.prepare(contribution, self.k, self.kind)
            for feedback, contribution in zip(self.feedback, contributions, strict=True)
        ]
        entries = [decode(p.payload, n=self.n, max_entries=self.k, kind=self.kind) for p in prepared]
        truncated: list[list[TruncatedEntries]] = [[] for _ in range(WORKERS)]
        distance = 1
        while distance < WORKERS:
            merged = [
                merge(entries[r], entries[r ^ distance], n=self.n, k=self.k, kind=self.kind)
                for r in range(WORKERS)
            ]
            for rank, result in enumerate(merged):
                truncated[rank].append(result.truncated_of_owner(2 * distance, rank % (2 * distance)))
            entries = [result.sparse for result in merged]
            distance *= 2
        for feedback, ready, back in zip(self.feedback, prepared, truncated, strict=True):
            feedback.commit(ready, back)
        update_N = np.zeros(self.n, np.float32)
        update_N[entries[0].indices] = entries[0].values
        return torch.from_numpy(update_N)
