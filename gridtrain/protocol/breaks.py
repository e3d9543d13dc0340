"""Whose line is it, when connections break again and again?

Decides which member the broken connections have in common.  Never removes anybody (`protocol.membership`),
and never looks at the reason that was given.

             anna   bert   carl           breaks of each pair within `WINDOW_S`, as either end tells them
    mallory   5      4      5             two pairs with `MOST_BREAKS` each: mallory's line
    anna      -      0      0             her second pair has none: not hers

A report is only about a connection of the reporter's own, so a liar can blame nobody but itself with it: each
member that it names still needs a second one that says so.
"""

from __future__ import annotations

from collections import deque

from gridtrain.protocol.messages import PeerId

MOST_BREAKS, WINDOW_S = 4, 30.0
PARTNERS = 2


class Breaks:
    """What was reported lately.  Bounded: `MOST_BREAKS` times for each end of a pair."""

    def __init__(self) -> None:
        self._times_s: dict[tuple[PeerId, PeerId], deque[float]] = {}  # (who said so, about whom)

    def note(self, reporter: PeerId, peer: PeerId, now_s: float) -> None:
        self._times_s.setdefault((reporter, peer), deque(maxlen=MOST_BREAKS)).append(now_s)

    def common_end(self, now_s: float) -> PeerId | None:
        """The member to which too many connections broke; None: nobody, or nobody can tell who."""
        broken: dict[PeerId, set[PeerId]] = {}
        for (reporter, peer), times_s in list(self._times_s.items()):
            while times_s and times_s[0] < now_s - WINDOW_S:
                times_s.popleft()
            if not times_s:
                del self._times_s[reporter, peer]
            elif len(times_s) >= MOST_BREAKS:
                broken.setdefault(reporter, set()).add(peer)
                broken.setdefault(peer, set()).add(reporter)
        ends = [member for member, others in broken.items() if len(others) >= PARTNERS]
        return max(ends, key=lambda member: (len(broken[member]), member), default=None)

    def forget(self, peer: PeerId) -> None:
        """It is no member any more."""
        self._times_s = {pair: times for pair, times in self._times_s.items() if peer not in pair}
