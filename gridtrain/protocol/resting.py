"""Workers that their owners have paused: they are no members, and mean to come back.

Decides what is said of them, and for how long.  They hold nothing of the run's, and nobody waits for them.

    Pausing(reason) --> rests --Join--> forgotten here: it takes the joiner's road
                          +--for a week--> forgotten
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gridtrain.protocol import messages as m

MOST_RESTING = 1000
SHOWN_S = 7 * 86_400.0
"""Who was not seen for so long has another life now."""


@dataclass(frozen=True, slots=True)
class _Rest:
    name: str
    reason: str
    since_s: float


class Resting:
    """See the module's text.  Kept in memory only: after a restart of the coordinator nobody rests."""

    def __init__(self) -> None:
        self._rests: dict[m.PeerId, _Rest] = {}

    def rests(self, peer: m.PeerId, name: str, reason: str, now_s: float) -> None:
        self._rests.pop(peer, None)
        self._rests[peer] = _Rest(name, reason, now_s)
        if len(self._rests) > MOST_RESTING:
            del self._rests[next(iter(self._rests))]

    def forget(self, peer: m.PeerId) -> None:
        self._rests.pop(peer, None)

    def said(self, peer: m.PeerId) -> str:
        """For people, and for the group's log."""
        return f"paused by its owner: {self._rests[peer].reason}"

    def name_of(self, peer: m.PeerId) -> str:
        """Empty: it does not rest."""
        return self._rests[peer].name if peer in self._rests else ""

    def names(self, besides: m.PeerId) -> set[str]:
        """Names that are kept for others."""
        return {rest.name for peer, rest in self._rests.items() if peer != besides}

    def lines(self, now_s: float) -> list[dict[str, Any]]:
        """For `gridtrain status`; JSON-able."""
        self._rests = {peer: rest for peer, rest in self._rests.items() if now_s - rest.since_s < SHOWN_S}
        return [
            {
                "name": rest.name,
                "peer": peer.hex(),
                "state": "paused",
                "reason": self.said(peer),
                "since_s": round(now_s - rest.since_s, 3),
            }
            for peer, rest in self._rests.items()
        ]
