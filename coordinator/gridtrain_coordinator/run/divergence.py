"""Whether all members still hold the same model: compared now and then, beside the training (promise 1).

Decides whose state is another one.  Never looks at a state, and never repairs one: who has drifted is told,
reports in the next generation that it does not hold the state, and gets it anew.

    every N steps   member --Fingerprint(step, digest of parameters, optimizer, settings)--> coordinator
    coordinator     all are here, or the next comparison has begun and most were here:
                    the largest party is right, of equal ones that with the lowest rank
                    --Drifted(step)--> the others, and another generation

Equal updates do not prove equal models: a memory may flip a bit, another kind of processor may round
otherwise, a script may change what it holds by itself.  Members go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gridtrain.core import messages as m
from gridtrain.core.commit.two_phase_commit import largest_agreeing_group
from gridtrain.core.messages import PeerId
from gridtrain_coordinator.run.events import Effect, Send

MAX_OPEN_COMPARISONS = 4
"""Comparisons that may be under way; an older one is given up."""


class DigestComparison:
    """The comparisons of one generation.

    Args:
        members: in rank order.
    """

    def __init__(self, members: Sequence[PeerId] = ()) -> None:
        self._ranks = {peer: rank for rank, peer in enumerate(members)}
        self._digests: dict[int, dict[int, bytes]] = {}  # by step and rank

    def add(self, peer: PeerId, step: int, digest: bytes) -> list[PeerId]:
        """One member's; who has drifted, once it is known."""
        if peer not in self._ranks:
            return []
        wrong: list[PeerId] = []
        if step not in self._digests:
            wrong += self._decide([old for old in self._digests if old < step])
            if len(self._digests) >= MAX_OPEN_COMPARISONS:
                del self._digests[min(self._digests)]
        self._digests.setdefault(step, {})[self._ranks[peer]] = digest
        if len(self._digests[step]) == len(self._ranks):
            wrong += self._decide([step])
        return wrong

    def _decide(self, steps: Sequence[int]) -> list[PeerId]:
        """By those who are here, if they are most."""
        wrong: list[PeerId] = []
        for step in steps:
            told = self._digests[step]
            if 2 * len(told) > len(self._ranks):
                del self._digests[step]
                ranks = minority_ranks(told)
                wrong += [peer for peer, rank in self._ranks.items() if rank in ranks]
        return wrong


class DivergenceDetector:
    """Those of the latest generation, within each of its groups: replicas of a stage hold the same."""

    def __init__(self) -> None:
        self._comparisons: dict[PeerId, DigestComparison] = {}

    def begin_generation(self, groups: Sequence[Sequence[PeerId]]) -> None:
        """A generation is made; of each group the members in rank order."""
        self._comparisons = {
            peer: drift for group in groups for drift in [DigestComparison(group)] for peer in group
        }

    def add(self, peer: PeerId, step: int, digest: bytes) -> list[PeerId]:
        """As `Drift.tell`, of the member's group."""
        return self._comparisons[peer].add(peer, step, digest) if peer in self._comparisons else []


class DivergedMembers:
    """Who was told that it has drifted, for as long as it may not have heard that.

    Its history is that of the others, and by itself it would take its state for the run's: so it is told once
    more whenever its connection comes back, and before another generation.
    """

    def __init__(self) -> None:
        self._notices: dict[PeerId, m.ReplicaDiverged] = {}

    def notify(self, peer: PeerId, drifted: m.ReplicaDiverged) -> Send:
        self._notices[peer] = drifted
        return Send(peer, drifted)

    def resend(self, peer: PeerId) -> list[Effect]:
        """To one whose connection is back; it ignores what it knows."""
        return [Send(peer, self._notices[peer])] if peer in self._notices else []

    def without_diverged_state(self, peer: PeerId, report: m.FreezeReport) -> m.FreezeReport:
        """What a member reports of the generation in which it has drifted is no state of the run."""
        told = self._notices.get(peer)
        return replace(report, is_synced=False) if told and told.generation == report.generation else report

    def clear_if_recovered(self, peer: PeerId, generation: int) -> None:
        """It holds the state of this generation."""
        if (told := self._notices.get(peer)) is not None and told.generation < generation:
            del self._notices[peer]

    def forget(self, peer: PeerId) -> None:
        """It is another process now, or has left."""
        self._notices.pop(peer, None)


def minority_ranks(digests: dict[int, bytes]) -> list[int]:
    """Ranks that hold something else than the largest party; of equal ones the one with the lowest rank."""
    return sorted(set(digests) - set(largest_agreeing_group(digests)))
