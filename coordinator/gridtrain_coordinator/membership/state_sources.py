"""Chooses state sources for newcomers while the group waits, and decides who is at fault if a source fails.

    dora receives nothing from anna      bert becomes the source
    dora receives nothing from bert      dora is dismissed if both have served others; else clara is tried
    dora receives nothing from clara     dora is dismissed

A source that does not send the state still reports `Ready`.  Only the receivers notice the failure, and their
reports may be false, so the decision depends on which other members the source has served.  This applies only
to unpartitioned models; in a pipeline, the ranks determine which member sends which part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gridtrain.core.messages import PeerId
from gridtrain_coordinator.run.recent_dict import RecentDict

MAX_PROVEN_FAILURES, MAX_FAILURES = 2, 3
"""How many sources must have failed to serve a member before the member itself is considered at fault.  The
first limit counts only sources that have served other members; the second counts all sources."""

MAX_RECORDS = 1024
"""The maximum number of members with a record; the oldest record is dropped first."""


class StateSources:
    """Records the outcomes of state transfers across generations, and chooses sources accordingly."""

    def __init__(self) -> None:
        # By joining member, the sources that failed it.
        self._failed: RecentDict[PeerId, list[PeerId]] = RecentDict(MAX_RECORDS)
        # By source: members that it served, at most two, and the number of its failures since then.
        self._served: RecentDict[PeerId, set[PeerId]] = RecentDict(MAX_RECORDS)
        self._unreliable: RecentDict[PeerId, int] = RecentDict(MAX_RECORDS)

    def record_success(self, source: PeerId, receivers: Collection[PeerId]) -> None:
        """Record that these members have received the state from the source."""
        for receiver in receivers:
            self._failed.pop(receiver, None)
        if receivers:
            self._unreliable.pop(source, None)
            self._served[source] = set([*self._served.get(source, ()), *receivers][:2])

    def record_failure(self, source: PeerId, receivers: Collection[PeerId]) -> None:
        """Record that these members have received nothing, or too little, from the source."""
        for receiver in receivers:
            failed = self._failed.get(receiver, [])
            self._failed[receiver] = [*(peer for peer in failed if peer != source), source]
        self._unreliable[source] = self._unreliable.get(source, 0) + 1

    def is_at_fault(self, receiver: PeerId) -> bool:
        """Return whether so many sources have failed to serve this member that it is itself at fault."""
        failed = self._failed.get(receiver, [])
        proven = [source for source in failed if self._served.get(source, set()) - {receiver}]
        return len(proven) >= MAX_PROVEN_FAILURES or len(failed) >= MAX_FAILURES

    def untried(self, receiver: PeerId, holders: Iterable[PeerId]) -> list[PeerId]:
        """Return those holders of the state that have not yet failed to serve this member."""
        return [holder for holder in holders if holder not in self._failed.get(receiver, ())]

    def choose(
        self, holders: Iterable[PeerId], receivers: Collection[PeerId], stalled: Collection[PeerId] = ()
    ) -> PeerId | None:
        """Return the only source for these members; None if all holders may serve them.

        Args:
            holders: members that hold the state, in order of preference.
            receivers: members that do not have the state.
            stalled: members whose trainers have stalled; they cannot serve any member until they
                recover.
        """
        ranked = {}
        for holder in holders:
            failures = sum(holder in self._failed.get(receiver, ()) for receiver in receivers)
            ranked[holder] = failures, holder in stalled, self._unreliable.get(holder, 0)
        return min(ranked, key=lambda holder: ranked[holder]) if any(map(any, ranked.values())) else None
