"""Decides which reported stage checkpoints are used: those of a state that a majority of members reports.

    while all train      anna, bert and clara, who are most of the generation's members, report step 500 with
                         history h and ledger l: the state (500, h, l) is confirmed and journalled
    bert has left        dora reports all stages of step 700: no member confirms this state, so it is not used

The digest of each stage, as reported by the members that trained it, is also recorded.  A checkpoint whose
digest does not match is not used, and a worker that receives a checkpoint checks it (`Member.digest`).

A member counts once for a state, regardless of how many stages of it the member reports, and only while it is
a member: workers that join later cannot confirm the state.  If nothing is known about the run (for example,
after the loss of the journal), most of the workers that report checkpoints must agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain_coordinator.run.journal_recovery import StateId as StateId

MAX_CONFIRMED = 64
"""The maximum number of confirmed states to keep; a worker reports fewer checkpoints.  The oldest are dropped
first."""


def state_id(spec: m.LedgerSpec, checkpoint: m.CheckpointInfo) -> StateId:
    """Return the state to which a stage checkpoint belongs."""
    ledger = data_ledger.release_holders(spec, checkpoint.ledger)
    return checkpoint.applied, checkpoint.history, ledger


ReportedCheckpoints = Mapping[m.PeerId, Sequence[m.CheckpointInfo]]
"""The checkpoints that each worker reports."""


def count_reports(spec: m.LedgerSpec, reported: ReportedCheckpoints) -> Counter[StateId]:
    """Return how many workers report each state."""
    states = ({state_id(spec, x) for x in checkpoints} for checkpoints in reported.values())
    return Counter(state for theirs in states for state in theirs)


@dataclass(slots=True)
class ConfirmedState:
    """A confirmed state, with the digests of its stages.

    Attributes:
        generation: the generation that confirmed the state; 0 if the state comes from the journal.
        digests: the digests that the members of each stage reported for it, by the stage's layers.
    """

    generation: int
    digests: dict[m.Span, set[bytes]] = field(default_factory=dict)


class CheckpointQuorum:
    """The confirmed states of one run.

    Args:
        known: the confirmed states in the journal, with the digests of their stages.
    """

    def __init__(
        self, known: Mapping[StateId, Mapping[m.Span, Iterable[bytes]]] = MappingProxyType({})
    ) -> None:
        self._confirmed = {
            state: ConfirmedState(0, {layers: set(theirs) for layers, theirs in digests.items()})
            for state, digests in known.items()
        }
        self._evict_oldest()

    def update(
        self,
        spec: m.LedgerSpec,
        generation: int,
        stages: Mapping[m.PeerId, m.Span],
        reported: ReportedCheckpoints,
    ) -> list[tuple[StateId, Mapping[m.Span, Collection[bytes]]]]:
        """Confirm the states that most members report, and record each member's digest of its own stage.

        Args:
            generation: the current generation.
            stages: the members of this generation, each with the layers of its stage.

        Returns:
            The newly confirmed states and those with new digests, which the caller writes to the journal.
        """
        theirs = {peer: reported.get(peer, ()) for peer in stages}
        count = count_reports(spec, theirs)
        changed = [s for s in count if 2 * count[s] > len(stages) and s not in self._confirmed]
        self._confirmed |= {state: ConfirmedState(generation) for state in changed}
        for peer, checkpoints in theirs.items():
            for checkpoint in checkpoints:
                state = state_id(spec, checkpoint)
                known = self._confirmed.get(state)
                if known is None or known.generation != generation or checkpoint.layers != stages[peer]:
                    continue  # members of later generations did not train this state
                digests = known.digests.setdefault(checkpoint.layers, set())
                if checkpoint.digest and checkpoint.digest not in digests:
                    digests.add(checkpoint.digest)
                    changed += [state] if state not in changed else []
        self._evict_oldest()
        kept = sorted((s for s in changed if s in self._confirmed), key=lambda s: s[:2])
        return [(state, self._confirmed[state].digests) for state in kept]

    def _evict_oldest(self) -> None:
        for state in sorted(self._confirmed, key=lambda state: state[0])[:-MAX_CONFIRMED]:
            del self._confirmed[state]

    @property
    def has_confirmed(self) -> bool:
        """Whether any state is confirmed."""
        return bool(self._confirmed)

    def roll_back(self, applied: int) -> None:
        """Discard states after step `applied`, which belong to an abandoned history."""
        self._confirmed = {state: known for state, known in self._confirmed.items() if state[0] <= applied}

    def is_trusted(self, checkpoint: m.CheckpointInfo) -> bool:
        """Return whether the checkpoint's digest is one of those recorded for its state and layers.

        If none is recorded, every digest is trusted.
        """
        for state, known in self._confirmed.items():
            digests = known.digests.get(checkpoint.layers)
            if state[:2] == (checkpoint.applied, checkpoint.history) and digests:
                return checkpoint.digest in digests
        return True

    def confirmed_states(self, spec: m.LedgerSpec, reported: ReportedCheckpoints) -> frozenset[StateId]:
        """Return the reported states that are confirmed or are reported by most of these workers."""
        counts = count_reports(spec, reported).items()
        return frozenset(s for s, count in counts if s in self._confirmed or 2 * count > len(reported))


def majority_states(spec: m.LedgerSpec, reported: ReportedCheckpoints) -> frozenset[StateId]:
    """Return the states that most of the workers with checkpoints report.

    Used until a step is known to be committed, because until then there is no training that false reports
    could undo.  Workers without checkpoints are not counted, because new workers know nothing of an old run.
    """
    reporters = sum(bool(checkpoints) for checkpoints in reported.values())
    return frozenset(s for s, count in count_reports(spec, reported).items() if 2 * count > reporters)
