"""Detects members whose model differs from the others' (guarantee 1), while they train.

    every N steps   member --ReplicaDigest(step, digest of parameters, optimizer, settings)--> coordinator
    coordinator     once all digests of a step are here, or the next comparison has begun with most of them:
                    the largest group of equal digests is right, of equal groups that with the lowest rank
                    --ReplicaDiverged(step)--> the other members, which get the state again

Equal updates do not prove equal models: memory may flip a bit, another kind of processor may round
differently, a script may change what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gridtrain.core import messages as m
from gridtrain.core.commit.two_phase_commit import largest_agreeing_group
from gridtrain.core.messages import PeerId
from gridtrain_coordinator.run.events import Effect, Send

MAX_OPEN_COMPARISONS = 4
"""Comparisons in progress; with more of them the oldest is abandoned."""


class DigestComparison:
    """The comparisons of one group of replicas in one generation.

    Args:
        members: in rank order.
    """

    def __init__(self, members: Sequence[PeerId] = ()) -> None:
        self._ranks = {peer: rank for rank, peer in enumerate(members)}
        self._digests: dict[int, dict[int, bytes]] = {}  # by step and rank

    def add(self, peer: PeerId, step: int, digest: bytes) -> list[PeerId]:
        """Record a member's digest; returns the members that are now known to differ."""
        if peer not in self._ranks:
            return []
        diverged: list[PeerId] = []
        if step not in self._digests:
            diverged += self._decide([old for old in self._digests if old < step])
            if len(self._digests) >= MAX_OPEN_COMPARISONS:
                del self._digests[min(self._digests)]
        self._digests.setdefault(step, {})[self._ranks[peer]] = digest
        if len(self._digests[step]) == len(self._ranks):
            diverged += self._decide([step])
        return diverged

    def _decide(self, steps: Sequence[int]) -> list[PeerId]:
        """Close the comparisons of these steps for which most members have reported."""
        diverged: list[PeerId] = []
        for step in steps:
            digests = self._digests[step]
            if 2 * len(digests) > len(self._ranks):
                del self._digests[step]
                ranks = minority_ranks(digests)
                diverged += [peer for peer, rank in self._ranks.items() if rank in ranks]
        return diverged


class DivergenceDetector:
    """Compares the replicas of each stage of the latest generation, and notifies members that differ.

    The history of a diverged member equals the others', so it would take its state for the run's.  It is
    therefore notified again whenever its connection is restored, and before another generation.

    Attributes:
        divergence_count: how often a member's state was found to differ.
    """

    def __init__(self) -> None:
        self.divergence_count = 0
        self._comparisons: dict[PeerId, DigestComparison] = {}
        self._notices: dict[PeerId, m.ReplicaDiverged] = {}  # to members that may not have received them

    def begin_generation(self, groups: Sequence[Sequence[PeerId]]) -> None:
        """Start over; `groups` are the replicas of each stage, in rank order."""
        self._comparisons = {
            peer: comparison for group in groups for comparison in [DigestComparison(group)] for peer in group
        }

    def add(self, peer: PeerId, step: int, digest: bytes) -> list[PeerId]:
        """Record a member's digest; returns the members that are now known to differ."""
        return self._comparisons[peer].add(peer, step, digest) if peer in self._comparisons else []

    def notify(self, peer: PeerId, notice: m.ReplicaDiverged) -> Send:
        self.divergence_count += 1
        self._notices[peer] = notice
        return Send(peer, notice)

    def resend(self, peer: PeerId) -> list[Effect]:
        """The notice once more, as it may have been lost; the member ignores what it knows."""
        return [Send(peer, self._notices[peer])] if peer in self._notices else []

    def without_diverged_state(self, peer: PeerId, report: m.FreezeReport) -> m.FreezeReport:
        """The report of a member; one that diverged in this generation does not hold the run's state."""
        notice = self._notices.get(peer)
        if notice is not None and notice.generation == report.generation:
            return replace(report, is_synced=False)
        return report

    def clear_if_recovered(self, peer: PeerId, generation: int) -> None:
        """The member holds the state of this generation."""
        if (notice := self._notices.get(peer)) is not None and notice.generation < generation:
            del self._notices[peer]

    def forget(self, peer: PeerId) -> None:
        """The worker left, or its process was replaced."""
        self._notices.pop(peer, None)


def minority_ranks(digests: dict[int, bytes]) -> list[int]:
    """Ranks outside the largest group of equal digests; of groups of one size, that with the lowest rank."""
    return sorted(set(digests) - set(largest_agreeing_group(digests)))
