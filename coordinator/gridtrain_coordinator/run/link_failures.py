"""Whose line is it, when connections break again and again?

Decides which member the broken connections have in common, and when the ring is to be planned round broken
pairs.  Never removes anybody (`protocol.complaints`), and never looks at the reason that was given.

             anna   bert   carl   dora    breaks of each pair within `WINDOW_S`, as either end tells them
    mallory   5      4      0      5      three pairs with `MOST_BREAKS` each: mallory's line
    anna      -      0      0      0      her second pair has none: not hers

A report is only about a connection of the reporter's own, so a liar can blame nobody but itself with it: each
member that it names still needs others that say so.  Two liars could name a third.  In a group of three they
are most of it, and decide what they like; in a larger one a member goes when `VOICES` pairs of it broke:

    in 30 s    mallory - anna, mallory - bert      two only: the next ring is planned round these pairs,
                                                   once, and they are remembered for `REMEMBERED_S`
    then       mallory - dora                      her new neighbour says so too: mallory goes
               (nobody)                            the line of an honest one does not break: she stays

A member whose line is bad says so itself, of each of its connections: that counts as the other end's word.
"""

from __future__ import annotations

from collections import deque

from gridtrain.core.messages import PeerId

FAILURES_BEFORE_AVOIDING, WINDOW_S = 4, 30.0
SMALL_GROUP, SMALL_GROUP_MIN_REPORTS, MIN_REPORTS = 3, 2, 3
REMEMBERED_S = 600.0

Pair = tuple[PeerId, PeerId]
"""The smaller key first."""


class LinkFailures:
    """What was reported lately.  Bounded: `MOST_BREAKS` times for each end of a pair."""

    def __init__(self) -> None:
        self._times_s: dict[tuple[PeerId, PeerId], deque[float]] = {}  # (who said so, about whom)
        self._broken_s: dict[Pair, float] = {}  # when it broke once too often, the last time
        self._avoided: set[Pair] = set()  # a ring was planned round these

    def record(self, reporter: PeerId, peer: PeerId, now_s: float) -> None:
        times_s = self._times_s.setdefault((reporter, peer), deque(maxlen=FAILURES_BEFORE_AVOIDING))
        times_s.append(now_s)
        if len(times_s) == FAILURES_BEFORE_AVOIDING and times_s[0] >= now_s - WINDOW_S:
            self._broken_s[_pair(reporter, peer)] = now_s

    def common_endpoint(self, now_s: float, members: int, centre: PeerId | None = None) -> PeerId | None:
        """The member to which too many connections broke; None: nobody, or nobody can tell who.

        `centre`: of a star, to which every bad line leads: it takes more than half of them.
        """
        small = members <= SMALL_GROUP
        others = self._failed_peers(now_s, WINDOW_S if small else REMEMBERED_S)
        enough = SMALL_GROUP_MIN_REPORTS if small else MIN_REPORTS
        needed = {centre: max(enough, (members - 1) // 2 + 1)}
        ends = [member for member, theirs in others.items() if len(theirs) >= needed.get(member, enough)]
        return max(ends, key=lambda member: (len(others[member]), member), default=None)

    def next_to_avoid(self, now_s: float, members: int) -> PeerId | None:
        """The member whose broken pairs no ring was planned round yet; `avoid` is to follow."""
        if members <= SMALL_GROUP:
            return None
        for member, theirs in sorted(self._failed_peers(now_s, WINDOW_S).items()):
            pairs = {_pair(member, other) for other in theirs}
            if len(pairs) >= SMALL_GROUP_MIN_REPORTS and not pairs <= self._avoided:
                return member
        return None

    def begin_avoiding(self, now_s: float) -> frozenset[Pair]:
        """Pairs that are not to be neighbours in the ring, where there is another one."""
        self._failed_peers(now_s, REMEMBERED_S)
        self._avoided = set(self._broken_s)
        return frozenset(self._avoided)

    def avoided_pairs(self, now_s: float) -> frozenset[Pair]:
        """Pairs that the ring was planned round, as far as they are still remembered."""
        self._failed_peers(now_s, REMEMBERED_S)
        return frozenset(self._avoided)

    def forget(self, peer: PeerId) -> None:
        """It is no member any more."""
        self._times_s = {pair: times for pair, times in self._times_s.items() if peer not in pair}
        self._broken_s = {pair: at_s for pair, at_s in self._broken_s.items() if peer not in pair}
        self._avoided &= self._broken_s.keys()

    def _failed_peers(self, now_s: float, within_s: float) -> dict[PeerId, set[PeerId]]:
        """Members with the other ends of their broken pairs; what is too old is forgotten."""
        for pair in [pair for pair, at_s in self._broken_s.items() if at_s < now_s - REMEMBERED_S]:
            del self._broken_s[pair]
        self._avoided &= self._broken_s.keys()
        others: dict[PeerId, set[PeerId]] = {}
        for (one, other), at_s in self._broken_s.items():
            if at_s >= now_s - within_s:
                others.setdefault(one, set()).add(other)
                others.setdefault(other, set()).add(one)
        return others


def _pair(one: PeerId, other: PeerId) -> Pair:
    return min(one, other), max(one, other)
