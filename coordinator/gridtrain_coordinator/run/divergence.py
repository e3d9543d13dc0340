"""Detects members whose models differ from the others', by digests every N steps (guarantee 1, README).

    every N steps   member --ReplicaDigest(step, digest of parameters, optimizer, settings)--> coordinator
    coordinator     once it has all digests of a step, or when the next comparison begins and most agree:
                    the largest group of equal digests is right (ties go to the group with the lowest rank);
                    a digest that arrives later, because a trainer had stalled, is compared with it
                    --ReplicaDiverged(step)--> the members that differ, which receive the state again

Equal updates do not prove equal models: a bit may flip in memory, another kind of processor may round
differently, and a script may change its model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gridtrain.core import messages as m
from gridtrain.core.commit.two_phase_commit import largest_agreeing_group
from gridtrain.core.messages import PeerId
from gridtrain_coordinator.run.events import Effect, Send

MAX_OPEN_COMPARISONS = 4
"""The maximum number of comparisons in progress.  To make room for another, the oldest comparison with
only the reporting member's digest is abandoned or, if there is none, the oldest of all."""


class DigestComparison:
    """The comparisons of one group of replicas in one generation.

    Args:
        members: the replicas, in rank order.
    """

    def __init__(self, members: Sequence[PeerId] = ()) -> None:
        self._ranks = {peer: rank for rank, peer in enumerate(members)}
        self._digests: dict[int, dict[int, bytes]] = {}  # of open comparisons, by step and rank
        self._agreed: dict[int, bytes] = {}  # the digest of the largest group, by step

    def add(self, peer: PeerId, step: int, digest: bytes) -> list[PeerId]:
        """Record a member's digest; return the members that are now known to differ."""
        if peer not in self._ranks:
            return []
        if step in self._agreed:  # the digest comes from a member whose trainer had stalled
            return [peer] if digest != self._agreed[step] else []
        diverged: list[PeerId] = []
        if step not in self._digests:
            diverged += self._decide([old for old in self._digests if old < step])
            if len(self._digests) >= MAX_OPEN_COMPARISONS:
                # A member that invents steps displaces only its own comparisons.
                alone = [old for old, known in self._digests.items() if known.keys() == {self._ranks[peer]}]
                del self._digests[min(alone or self._digests)]
        self._digests.setdefault(step, {})[self._ranks[peer]] = digest
        if len(self._digests[step]) == len(self._ranks):
            diverged += self._decide([step])
        return diverged

    def _decide(self, steps: Sequence[int]) -> list[PeerId]:
        """Close those comparisons of these steps for which all members have reported or most members agree.

        Returns the members that differ.
        """
        diverged: list[PeerId] = []
        for step in steps:
            digests = self._digests[step]
            differing = minority_ranks(digests)
            agreeing = digests.keys() - set(differing)
            if len(digests) == len(self._ranks) or 2 * len(agreeing) > len(self._ranks):
                del self._digests[step]
                self._agreed[step] = digests[min(agreeing)]
                diverged += [peer for peer, rank in self._ranks.items() if rank in differing]
        for old in sorted(self._agreed)[:-MAX_OPEN_COMPARISONS]:
            del self._agreed[old]
        return diverged


class DivergenceDetector:
    """Compares the replicas of each stage of the latest generation, and notifies members that differ.

    A diverged member has the same history as the other members, so it would report its state as the run's
    state.  It is therefore notified again when its connection is restored and before the next generation.

    Attributes:
        divergence_count: how many times a member's state has differed.
    """

    def __init__(self) -> None:
        self.divergence_count = 0
        self._comparisons: dict[PeerId, DigestComparison] = {}
        self._notices: dict[PeerId, m.ReplicaDiverged] = {}  # for members that may not have received them

    def begin_generation(self, groups: Sequence[Sequence[PeerId]]) -> None:
        """Start over; each group contains the replicas of one stage, in rank order."""
        comparisons = [(group, DigestComparison(group)) for group in groups]
        self._comparisons = {peer: comparison for group, comparison in comparisons for peer in group}

    def add(self, peer: PeerId, step: int, digest: bytes) -> list[PeerId]:
        """Record a member's digest; return the members that are now known to differ."""
        return self._comparisons[peer].add(peer, step, digest) if peer in self._comparisons else []

    def notify(self, peer: PeerId, notice: m.ReplicaDiverged) -> Send:
        self.divergence_count += 1
        self._notices[peer] = notice
        return Send(peer, notice)

    def has_notified(self, peer: PeerId, generation: int) -> bool:
        """Whether the member has diverged before in this generation, and so awaits the next one."""
        return peer in self._notices and self._notices[peer].generation == generation

    def resend(self, peer: PeerId) -> list[Effect]:
        """Return the member's notice again, because it may have been lost.

        A member ignores a notice that it has already received.
        """
        return [Send(peer, self._notices[peer])] if peer in self._notices else []

    def without_diverged_state(self, peer: PeerId, report: m.FreezeReport) -> m.FreezeReport:
        """Return the member's report, marked as not synced if the member diverged in this generation."""
        notice = self._notices.get(peer)
        if notice is not None and notice.generation == report.generation:
            return replace(report, is_synced=False)
        return report

    def clear_if_recovered(self, peer: PeerId, generation: int) -> None:
        """Discard the member's notice if the member holds the state of a later generation."""
        if (notice := self._notices.get(peer)) is not None and notice.generation < generation:
            del self._notices[peer]

    def forget(self, peer: PeerId) -> None:
        """Discard the notice for a worker that has left or whose process was replaced."""
        self._notices.pop(peer, None)


def minority_ranks(digests: dict[int, bytes]) -> list[int]:
    """Return the ranks outside the largest group of equal digests.

    If several groups tie, the group with the lowest rank counts as the largest.
    """
    return sorted(set(digests) - set(largest_agreeing_group(digests)))
