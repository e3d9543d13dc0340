"""Decides which member is at fault when connections break repeatedly, and which pairs the next ring avoids.

             anna   bert   carl   dora    failures of each pair within `WINDOW_S`
    mallory   5      4      0      5      at least `FAILURES_BEFORE_AVOIDING` in three pairs: at fault
    anna      -      0      0      0      so many in only one pair: not at fault

A report concerns only the reporter's own connections, and several pairs must fail, so a single dishonest
member cannot make another one appear at fault.  Two dishonest members could.  In a group of three they are
the majority; in a larger group, a member is at fault only when `MIN_REPORTS` of its pairs have failed:

    in 30 s    mallory - anna, mallory - bert      only two pairs: the next ring avoids them, and they are
                                                   remembered for `REMEMBERED_S`
    then       mallory - dora                      a third pair has failed: mallory is at fault
    or         no other pair fails                 mallory is not at fault

A member whose own link is bad reports each of its connections; its reports count like any others.

A step that stalls because of a broken connection is a different question: one failure is enough, but the two
ends of the connection are equally suspect until another connection of one of them fails (`suspected_ends`).
Two members that lie in concert can therefore have any third member dismissed, as they can with reports of
other stalls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from gridtrain.core.messages import PeerId

FAILURES_BEFORE_AVOIDING, WINDOW_S = 4, 30.0
SMALL_GROUP, SMALL_GROUP_MIN_REPORTS, MIN_REPORTS = 3, 2, 3
REMEMBERED_S = 600.0

Pair = tuple[PeerId, PeerId]
"""Two members; the one with the smaller key comes first."""


class LinkFailures:
    """The recent connection failures between members.

    For each reporter and peer, stores the times of at most `FAILURES_BEFORE_AVOIDING` failures.
    """

    def __init__(self) -> None:
        self._times_s: dict[tuple[PeerId, PeerId], deque[float]] = {}  # (reporter, peer)
        self._broken_s: dict[Pair, float] = {}  # when the pair last failed too often
        self._avoided: set[Pair] = set()  # pairs that the current ring avoids

    def record(self, reporter: PeerId, peer: PeerId, now_s: float) -> None:
        times_s = self._times_s.setdefault((reporter, peer), deque(maxlen=FAILURES_BEFORE_AVOIDING))
        times_s.append(now_s)
        if len(times_s) == FAILURES_BEFORE_AVOIDING and times_s[0] >= now_s - WINDOW_S:
            self._broken_s[_pair(reporter, peer)] = now_s

    def has_broken(self, one: PeerId, other: PeerId, now_s: float) -> bool:
        """Return whether one of the two has reported a broken connection to the other within `WINDOW_S`."""
        times_s = self._times_s.get((one, other), ()), self._times_s.get((other, one), ())
        return any(each and each[-1] >= now_s - WINDOW_S for each in times_s)

    def failure_count(self, peer: PeerId, now_s: float) -> int:
        """Return how often this member's connections broke within `WINDOW_S`, as it or the others report."""
        recent = {pair: sum(at_s >= now_s - WINDOW_S for at_s in at) for pair, at in self._times_s.items()}
        return max(sum(n for pair, n in recent.items() if pair[end] == peer) for end in (0, 1))

    def suspected_ends(self, peer: PeerId, root: PeerId, members: int, now_s: float) -> frozenset[PeerId]:
        """Return the members that may be at fault for failures of `peer` within `WINDOW_S`; empty if none.

        anna - mallory                    anna and mallory: either may be at fault
        anna - mallory, bert - mallory    mallory, even if `peer` is anna or bert

        Every member is connected to the root, so the root's failures count as only one unless it has lost
        more than half of its connections.
        """
        others = _peers_by_end(pair for pair, at in self._times_s.items() if at[-1] >= now_s - WINDOW_S)
        counts = {end: len(others[end]) for end in (peer, *others.get(peer, ())) if end in others}
        if counts.get(root, 0) <= (members - 1) // 2 and root in counts:
            counts[root] = 1
        return frozenset(end for end, count in counts.items() if count == max(counts.values()))

    def common_endpoint(self, now_s: float, members: int, centre: PeerId | None = None) -> PeerId | None:
        """Return the member that is at fault because too many of its connections broke; None if none is.

        Args:
            members: the number of members.
            centre: the centre of a star; None for other topologies.  Every bad link leads to the centre, so
                it is at fault only if more than half of its links have failed.
        """
        small = members <= SMALL_GROUP
        others = self._failed_peers(now_s, WINDOW_S if small else REMEMBERED_S)
        enough = SMALL_GROUP_MIN_REPORTS if small else MIN_REPORTS
        needed = {centre: max(enough, (members - 1) // 2 + 1)}
        ends = [member for member, theirs in others.items() if len(theirs) >= needed.get(member, enough)]
        return max(ends, key=lambda member: (len(others[member]), member), default=None)

    def next_to_avoid(self, now_s: float, members: int) -> PeerId | None:
        """Return a member with two or more failed pairs, not all of which the ring avoids yet.

        Returns None if there is no such member, or if the group has at most `SMALL_GROUP` members.
        The plan of the next generation avoids these pairs (`begin_avoiding`).
        """
        if members <= SMALL_GROUP:
            return None
        for member, theirs in sorted(self._failed_peers(now_s, WINDOW_S).items()):
            pairs = {_pair(member, other) for other in theirs}
            if len(pairs) >= SMALL_GROUP_MIN_REPORTS and not pairs <= self._avoided:
                return member
        return None

    def begin_avoiding(self, now_s: float) -> frozenset[Pair]:
        """Start avoiding all pairs whose connections recently failed too often, and return them."""
        self._failed_peers(now_s, REMEMBERED_S)
        self._avoided = set(self._broken_s)
        return frozenset(self._avoided)

    def avoided_pairs(self, now_s: float) -> frozenset[Pair]:
        """Return the pairs that the current ring avoids and whose failures are still recorded."""
        self._failed_peers(now_s, REMEMBERED_S)
        return frozenset(self._avoided)

    def forget(self, peer: PeerId) -> None:
        """Discard the failures of a worker that is no longer a member."""
        self._times_s = {pair: times for pair, times in self._times_s.items() if peer not in pair}
        self._broken_s = {pair: at_s for pair, at_s in self._broken_s.items() if peer not in pair}
        self._avoided &= self._broken_s.keys()

    def _failed_peers(self, now_s: float, within_s: float) -> dict[PeerId, set[PeerId]]:
        """Map members to their peers in pairs that failed too often in the last `within_s` seconds.

        Discards the records of pairs that last failed more than `REMEMBERED_S` ago.
        """
        for pair in [pair for pair, at_s in self._broken_s.items() if at_s < now_s - REMEMBERED_S]:
            del self._broken_s[pair]
        self._avoided &= self._broken_s.keys()
        return _peers_by_end(pair for pair, at_s in self._broken_s.items() if at_s >= now_s - within_s)


def _peers_by_end(pairs: Iterable[tuple[PeerId, PeerId]]) -> dict[PeerId, set[PeerId]]:
    """Map each end of the pairs to the other ends."""
    others: dict[PeerId, set[PeerId]] = {}
    for one, other in pairs:
        others.setdefault(one, set()).add(other)
        others.setdefault(other, set()).add(one)
    return others


def _pair(one: PeerId, other: PeerId) -> Pair:
    return min(one, other), max(one, other)
