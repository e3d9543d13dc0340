"""Barriers and values between the ranks of hivemind.

Rank 0 has a store of torch.distributed at the master's address and port; the others are its clients.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

from torch.distributed import TCPStore

from rivals.contract import Rank

ANSWER = datetime.timedelta(seconds=1800)


class Rendezvous:
    """A rank's place in its group; a context manager, which rank 0 leaves last."""

    def __init__(self, own: Rank) -> None:
        self._own, self._turn = own, 0

    def __enter__(self) -> Rendezvous:
        own = self._own
        address = own.master_host, own.master_port
        self._store = TCPStore(*address, own.world, own.rank == 0, ANSWER)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if exc_info[0] is None:
            self._store.set(f"left {self._own.rank}", "")
            if self._own.rank == 0:  # the store ends with its process
                self._store.wait([f"left {rank}" for rank in range(self._own.world)])

    def barrier(self) -> None:
        """Return when all ranks have called it, with one message to each."""
        self._exchanged("")

    def exchange(self, value: Any) -> list[Any]:
        """Return all ranks' values, by rank, when all have called it."""
        return [json.loads(text) for text in self._store.multi_get(self._exchanged(json.dumps(value)))]

    def _exchanged(self, text: str) -> list[str]:
        self._turn += 1
        keys = [f"{self._turn} {rank}" for rank in range(self._own.world)]
        self._store.set(keys[self._own.rank], text)
        self._store.wait(keys)
        return keys
