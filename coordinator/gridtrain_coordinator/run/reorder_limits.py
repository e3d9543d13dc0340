"""Decides which reports about links count, and how soon one worker's reports may cause another rank order.

    introduced anna          anna: to bert 10 MB/s     counted
                             anna: to bert  1 MB/s     not counted: already reported since then
    introduced bert          anna: to bert  1 MB/s     counted: bert's link may have changed
    new order due to anna                              no further order due to her for 30 s, then 60, 120 ..

Honest workers measure when they are introduced to their peers, so a report is counted once per introduction
of either end of the link.  A worker that rejoins repeatedly causes generations only at increasing intervals;
the first interval applies again if it has caused none for twice the latest one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from gridtrain.core.messages import PeerId

MAX_BACKOFF_S = 86_400.0
MAX_REMEMBERED = 4096  # workers that caused a new rank order; kept even after they have left

LinkRate = tuple[PeerId, float, float]  # as in `LinkRates`: peer, rate to it, rate from it


class ReorderLimits:
    """Limits how often reports about links change the rank order.

    Memory is bounded by the number of links, and by `MAX_REMEMBERED`.

    Args:
        pause_s: the shortest time, in seconds, between the first two rank orders caused by one worker.
    """

    def __init__(self, pause_s: float) -> None:
        self._initial_backoff_s = pause_s
        self._introduction_of: dict[PeerId, int] = {}  # number of the latest introduction
        self._introduced_s: dict[PeerId, float] = {}  # the time of the latest introduction
        self._introduction_count = 0
        self._last_accepted: dict[
            tuple[PeerId, PeerId, bool], tuple[int, int]
        ] = {}  # by direction, the latest introductions of both ends when a rate was accepted
        self._changed_reporters: set[PeerId] = set()
        self._backoff: dict[PeerId, tuple[float, float]] = {}  # the end and length of the wait

    def record_introduction(self, peer: PeerId, now_s: float) -> None:
        """Record that a worker was asked to measure its links."""
        self._introduction_count += 1
        self._introduction_of[peer], self._introduced_s[peer] = self._introduction_count, now_s

    def introduced_s(self, peer: PeerId) -> float:
        """Return the time at which a worker was last asked to measure its links; -infinity if never."""
        return self._introduced_s.get(peer, -math.inf)

    def accept(self, peer: PeerId, rates: Sequence[LinkRate]) -> list[LinkRate]:
        """Return the links for which a rate counts, with 0 for a direction whose rate does not count."""
        accepted = []
        for other, there_Bps, back_Bps in rates:
            there = there_Bps if there_Bps > 0 and self._is_new(peer, other, True) else 0.0
            back = back_Bps if back_Bps > 0 and self._is_new(peer, other, False) else 0.0
            if there or back:
                accepted.append((other, there, back))
        return accepted

    def is_outdated(self, peer: PeerId, other: PeerId) -> bool:
        """Whether a rate from `peer` to `other` that counted, as reported by `peer`, was reported before the
        latest introduction of one of them."""
        return self._last_accepted.get((peer, other, True)) != self._introductions(peer, other)

    def mark_changed(self, peer: PeerId) -> None:
        """Record that a report by this worker changed a measurement."""
        self._changed_reporters.add(peer)

    def due_reporters(self, now_s: float) -> frozenset[PeerId]:
        """Return the workers whose reports changed a measurement and whose waiting time has elapsed."""
        return frozenset(
            peer for peer in self._changed_reporters if now_s >= self._backoff.get(peer, (now_s, 0.0))[0]
        )

    def record_evaluation(self, reporters: frozenset[PeerId], now_s: float, *, found: bool) -> None:
        """Record that a rank order was computed because of reports from these workers.

        Args:
            found: whether the new order will be used; if so, the workers have to wait before they can cause
                another order.
        """
        self._changed_reporters -= reporters
        for peer in reporters if found else ():
            until_s, before_s = self._backoff.pop(peer, (0.0, 0.0))
            is_repeated = now_s < until_s + before_s
            wait_s = min(MAX_BACKOFF_S, 2 * before_s if is_repeated else self._initial_backoff_s)
            self._backoff[peer] = now_s + wait_s, wait_s
        while len(self._backoff) > MAX_REMEMBERED:
            del self._backoff[min(self._backoff, key=lambda peer: self._backoff[peer])]

    def clear_changes(self) -> None:
        """Discard the record of the workers that changed measurements.  Call when a plan reflects all
        measurements."""
        self._changed_reporters.clear()

    def forget(self, peer: PeerId) -> None:
        """Discard the data about a worker that has left, except for its waiting time."""
        self._introduction_of.pop(peer, None)
        self._introduced_s.pop(peer, None)
        self._last_accepted = {
            direction: at for direction, at in self._last_accepted.items() if peer not in direction
        }
        self._changed_reporters.discard(peer)

    def _is_new(self, peer: PeerId, other: PeerId, there: bool) -> bool:
        at, direction = self._introductions(peer, other), (peer, other, there)
        if self._last_accepted.get(direction) == at:
            return False
        self._last_accepted[direction] = at
        return True

    def _introductions(self, peer: PeerId, other: PeerId) -> tuple[int, int]:
        return self._introduction_of.get(peer, 0), self._introduction_of.get(other, 0)
