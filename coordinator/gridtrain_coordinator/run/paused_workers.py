"""Records the workers that their owners have paused, for the status; limits the number and age of records.

TemporaryLeave(reason) --> paused --Join--> joins like any other worker
                             +--after a week--> discarded
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gridtrain.core import messages as m
from gridtrain.quantities import format_age
from gridtrain_coordinator.run.recent_dict import RecentDict

MAX_PAUSED = 1000
RETENTION_S = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class _PausedWorker:
    name: str
    reason: str
    since_s: float


class PausedWorkers:
    """The paused workers, stored in memory only: a restart of the coordinator discards them."""

    def __init__(self) -> None:
        self._workers: RecentDict[m.PeerId, _PausedWorker] = RecentDict(MAX_PAUSED)

    def add(self, peer: m.PeerId, name: str, reason: str, now_s: float) -> None:
        self._workers[peer] = _PausedWorker(name, reason, now_s)

    def discard(self, peer: m.PeerId) -> None:
        self._workers.pop(peer, None)

    def reason_text(self, peer: m.PeerId) -> str:
        """Return the reason for the worker's pause as text."""
        return f"paused by its owner: {self._workers[peer].reason}"

    def reserved_names(self, besides: m.PeerId, now_s: float) -> set[str]:
        """Return the names of all paused workers except `besides`."""
        self._drop_old(now_s)
        return {paused.name for peer, paused in self._workers.items() if peer != besides}

    def status_rows(self, now_s: float) -> list[dict[str, Any]]:
        """Return the paused workers as JSON-serializable rows for `gridtrain status`."""
        self._drop_old(now_s)
        return [
            {
                "name": paused.name,
                "peer": peer.hex(),
                "state": "paused",
                "reason": self.reason_text(peer),
                "since_s": round(now_s - paused.since_s, 3),
            }
            for peer, paused in self._workers.items()
        ]

    def describe(self, required: int, now_s: float) -> str:
        """Describe the paused workers of a run in which no worker is training; "" if there are none.

        Args:
            required: the number of workers needed for training to continue.
        """
        self._drop_old(now_s)
        if not self._workers:
            return ""
        last = next(reversed(self._workers.values()))
        which = "the last one: " if len(self._workers) > 1 else ""
        hint = ": gridtrain worker resume" if m.ends_with_resume(last.reason) else ""
        why = f"({which}{last.reason}, for {format_age(now_s - last.since_s)}{hint})"
        needed = f"; training continues with {required} workers" if required > 1 else ""
        return f"no worker is training: {self._count_text} {why}{needed}"

    def describe_end(self) -> str:
        """Return what to append to a sentence about the end of a run."""
        if not self._workers:
            return ""
        ends = "exits when its pause ends" if len(self._workers) == 1 else "exit when their pauses end"
        return f"; {self._count_text} and {ends}"

    @property
    def _count_text(self) -> str:
        count = len(self._workers)
        return f"{count} {'is' if count == 1 else 'are'} paused"

    def _drop_old(self, now_s: float) -> None:
        """Drop pauses older than a week."""
        for peer in [p for p, paused in self._workers.items() if now_s - paused.since_s >= RETENTION_S]:
            del self._workers[peer]
