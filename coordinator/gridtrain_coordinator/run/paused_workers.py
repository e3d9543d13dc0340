"""Workers that their owners have paused: they are no members, and mean to come back.

Decides what is said of them, and for how long.  They hold nothing of the run's, and nobody waits for them.

    Pausing(reason) --> rests --Join--> forgotten here: it takes the joiner's road
                          +--for a week--> forgotten
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gridtrain.core import messages as m

MAX_RESTING = 1000
RETENTION_S = 7 * 86_400.0
"""Who was not seen for so long has another life now."""


@dataclass(frozen=True, slots=True)
class _PausedWorker:
    name: str
    reason: str
    since_s: float


class PausedWorkers:
    """See the module's text.  Kept in memory only: after a restart of the coordinator nobody rests."""

    def __init__(self) -> None:
        self._workers: dict[m.PeerId, _PausedWorker] = {}

    def add(self, peer: m.PeerId, name: str, reason: str, now_s: float) -> None:
        self._workers.pop(peer, None)
        self._workers[peer] = _PausedWorker(name, reason, now_s)
        if len(self._workers) > MAX_RESTING:
            del self._workers[next(iter(self._workers))]

    def discard(self, peer: m.PeerId) -> None:
        self._workers.pop(peer, None)

    def reason_text(self, peer: m.PeerId) -> str:
        """For people, and for the group's log."""
        return f"paused by its owner: {self._workers[peer].reason}"

    def worker_name(self, peer: m.PeerId) -> str:
        """Empty: it does not rest."""
        return self._workers[peer].name if peer in self._workers else ""

    def reserved_names(self, besides: m.PeerId) -> set[str]:
        """Names that are kept for others."""
        return {rest.name for peer, rest in self._workers.items() if peer != besides}

    def status_rows(self, now_s: float) -> list[dict[str, Any]]:
        """For `gridtrain status`; JSON-able."""
        self._workers = {
            peer: rest for peer, rest in self._workers.items() if now_s - rest.since_s < RETENTION_S
        }
        return [
            {
                "name": rest.name,
                "peer": peer.hex(),
                "state": "paused",
                "reason": self.reason_text(peer),
                "since_s": round(now_s - rest.since_s, 3),
            }
            for peer, rest in self._workers.items()
        ]
