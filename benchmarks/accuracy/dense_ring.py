"""`Dense(topology="ring", values=...)` among four workers in one process, without a network.

It uses the product's exchangers, buffers and collectives, and delivers messages in the order of sending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from accuracy.butterfly import WORKERS
from gridtrain.config import Dense
from gridtrain.core.collectives.collective import (
    CollectiveComplete,
    CollectiveEffect,
    PayloadReceived,
    SendTo,
)
from gridtrain.runtime.buffers.collective_buffers import DenseRingBuffer
from gridtrain.runtime.step_plan import StepPlan
from gridtrain.training.exchangers import make_exchanger


class DenseRing:
    """The exchangers of all workers, with their residuals.

    Attributes:
        sent_bytes: bytes of payloads that each worker sent in the latest exchange.
    """

    def __init__(self, n: int, values: str) -> None:
        exchange, cpu = Dense(topology="ring", values=values), torch.device("cpu")
        self._exchangers = [make_exchanger(exchange, (0, n), cpu) for _ in range(WORKERS)]
        self.sent_bytes = [0] * WORKERS

    def exchange(self, contributions: list[Tensor]) -> Tensor:
        """Return the update (n,) for the contributions (n,) of all workers."""
        attempts = [
            each.prepare_bucket(0, contribution, StepPlan(0, 0, rank, WORKERS, 1, 1), usable=True)
            for rank, (each, contribution) in enumerate(zip(self._exchangers, contributions, strict=True))
        ]
        buffers = [attempt.buffer for attempt in attempts]
        assert all(isinstance(buffer, DenseRingBuffer) for buffer in buffers)
        self._run(buffers)
        updates = [each.commit(attempt) for each, attempt in zip(self._exchangers, attempts, strict=True)]
        return torch.from_numpy(updates[0])

    def _run(self, buffers: Sequence[DenseRingBuffer]) -> None:
        rings = [buffer.make_collective(rank, WORKERS, 0) for rank, buffer in enumerate(buffers)]
        in_flight: deque[tuple[int, PayloadReceived]] = deque()
        self.sent_bytes = [0] * WORKERS

        def execute(rank: int, effects: Sequence[CollectiveEffect]) -> None:
            for effect in effects:
                match effect:
                    case SendTo(to_rank, slot, flags):
                        payload = buffers[rank].payload(slot)
                        self.sent_bytes[rank] += len(payload)
                        in_flight.append((to_rank, PayloadReceived(rank, slot, flags, bytes(payload))))
                    case CollectiveComplete():
                        pass
                    case _:
                        buffers[rank].apply(effect)

        for rank, ring in enumerate(rings):
            execute(rank, ring.start(0.0))
        while in_flight:
            rank, message = in_flight.popleft()
            execute(rank, rings[rank].handle(message, 0.0))
