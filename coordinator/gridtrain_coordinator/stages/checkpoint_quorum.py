"""Which checkpoints of a model in stages the run has really come by.

Decides what a worker's word about its disk is worth.  Never decides where the run goes on
(`protocol.copies`), never reads a checkpoint.

    while all train      anna, bert, clara tell of step 500, history h, ledger l: most of the generation's
                         members, so (500, h, l) is borne out, and journalled
    later, bert is dead  dora tells of step 700, all stages: nobody bears it out, it counts for nothing

With it goes the digest of each stage, as told by whoever has trained it: of a checkpoint with another digest
nothing is taken, and whoever is given one compares what comes (`Member.digest`).

A member's words count once, however many stages it tells of, and only while it is a member: who joins later
can tell of what the run has come by, not make it up.  Where nothing is known (a new coordinator, a journal
that was lost) the words of most of those who are here have to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain_coordinator.run.journal_recovery import StateId as StateId

MAX_CONFIRMED = 64
"""More than any disk holds; of more the oldest are forgotten."""


def state_id(spec: m.LedgerSpec, held: m.CheckpointInfo) -> StateId:
    """What a checkpoint is of, whichever stage it holds."""
    return held.applied, held.history, data_ledger.release_holders(spec, held.ledger)


ReportedCheckpoints = Mapping[m.PeerId, Sequence[m.CheckpointInfo]]


def count_reports(spec: m.LedgerSpec, disks: ReportedCheckpoints) -> Counter[StateId]:
    """How many tell of each state."""
    return Counter(state for states in disks.values() for state in {state_id(spec, h) for h in states})


class ConfirmedState:
    """What is known of one state: by a stage's blocks, the digests that those told who had trained it."""

    def __init__(
        self, generation: int, digests: Mapping[m.Span, Iterable[bytes]] = MappingProxyType({})
    ) -> None:
        self.generation = generation
        self.digests = {blocks: set(them) for blocks, them in digests.items()}


class CheckpointQuorum:
    """What is borne out, of one run.

    Args:
        known: of a journal.
    """

    def __init__(
        self, known: Mapping[StateId, Mapping[m.Span, Iterable[bytes]]] = MappingProxyType({})
    ) -> None:
        self._confirmed = {state: ConfirmedState(0, digests) for state, digests in known.items()}
        self._evict_oldest()

    def update(
        self,
        spec: m.LedgerSpec,
        generation: int,
        seated: Mapping[m.PeerId, m.Span],
        disks: ReportedCheckpoints,
    ) -> list[tuple[StateId, Mapping[m.Span, Collection[bytes]]]]:
        """What is known anew, to be journalled: what more than half of the members tell of by now, with the
        digest that whoever sits in a stage tells of its own.

        Args:
            seated: the members of this generation and the blocks of their stages.
        """
        theirs = {peer: disks.get(peer, ()) for peer in seated}
        count = count_reports(spec, theirs)
        changed = [s for s in count if 2 * count[s] > len(seated) and s not in self._confirmed]
        self._confirmed |= {state: ConfirmedState(generation) for state in changed}
        for peer, states in theirs.items():
            for held in states:
                state = state_id(spec, held)
                known = self._confirmed.get(state)
                if known is None or known.generation != generation or held.layers != seated[peer]:
                    continue  # who sits there later may have been given anything
                digests = known.digests.setdefault(held.layers, set())
                if held.digest and held.digest not in digests:
                    digests.add(held.digest)
                    changed += [state] if state not in changed else []
        self._evict_oldest()
        return [
            (s, self._confirmed[s].digests)
            for s in sorted(changed, key=lambda s: s[:2])
            if s in self._confirmed
        ]

    def _evict_oldest(self) -> None:
        for state in sorted(self._confirmed, key=lambda state: state[0])[:-MAX_CONFIRMED]:
            del self._confirmed[state]

    def roll_back(self, applied: int) -> None:
        """The run goes back: what came after is of a history that was given up."""
        self._confirmed = {state: known for state, known in self._confirmed.items() if state[0] <= applied}

    def is_trusted(self, held: m.CheckpointInfo) -> bool:
        """It may be what it is said to be: no other bits of this stage are known."""
        for state, known in self._confirmed.items():
            digests = known.digests.get(held.layers)
            if state[:2] == (held.applied, held.history) and digests:
                return held.digest in digests
        return True

    def confirmed_states(self, spec: m.LedgerSpec, disks: ReportedCheckpoints) -> frozenset[StateId]:
        """Of what those with `disks` tell: what the run has come by, or most of them say."""
        theirs = count_reports(spec, disks)
        return frozenset(s for s, count in theirs.items() if s in self._confirmed or 2 * count > len(disks))


class ReporterMajority:
    """Of a coordinator that knows of no step at all: there is nothing that a tale could undo.

    Who has nothing on its disk has no say then, as somebody who is new tells nothing about an old run.
    """

    def confirmed_states(self, spec: m.LedgerSpec, disks: ReportedCheckpoints) -> frozenset[StateId]:
        """As `Witnesses`: what most of those say who tell of anything."""
        tellers = sum(bool(states) for states in disks.values())
        return frozenset(s for s, count in count_reports(spec, disks).items() if 2 * count > tellers)
