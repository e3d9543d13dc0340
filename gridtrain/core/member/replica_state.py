"""The state that a worker holds: after which step, of which blocks, and whether that is what its seat needs.

Decides what a commit, a verdict and a new generation make of it.  Never touches a tensor: it keeps book of
what the trainer has.  What lies on the disk is `protocol.checkpoints`.

    VIEW, at step a      held here                 and then
                         of step a, our blocks     synced
                         of step a, other blocks   `memory`: somebody puts a stage together from it, or
                                                   it is ours again when the cut of before comes back
                         of another step           not synced: it is sent, or loaded from the disk

Until it is there, `applied` and `history` name what will be held.
"""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.two_phase_commit import EMPTY_HISTORY, extend_history


class ReplicaState:
    """See the module's text.

    Attributes:
        applied: the last step applied here; -1: none.
        history: chained digest of all updates applied.
        ledger: of the data, after that step.
        synced: this worker holds the state that these name, of its seat's blocks.
        memory: of which blocks it has the state, where its seat is of others.
        touched: the model is not the one any more that the script made, or a checkpoint had.
    """

    def __init__(self) -> None:
        self.applied = -1
        self.history = EMPTY_HISTORY
        self.ledger = m.LedgerState()
        self.is_synced = False
        self.memory_layers: m.Span | None = None
        self.is_modified = False
        self._layers = m.Span(0, 1)  # that the state is of, where it is synced

    @property
    def position(self) -> tuple[int, bytes]:
        return self.applied, self.history

    # -- what the trainer does -------------------------------------------------------------------

    def load_checkpoint(self, held: m.CheckpointInfo) -> None:
        """Before it is in any generation, from its own checkpoint."""
        self.applied, self.history, self.ledger = held.applied, held.history, held.ledger
        self.is_synced = True

    def state_loaded(self, blocks: m.Span) -> None:
        """The generation's state is here."""
        self.is_synced, self._layers, self.memory_layers = True, blocks, None

    def state_loading(self) -> None:
        """All of another member's state has come: the trainer may have begun to load it."""
        self.memory_layers, self.is_modified = None, True

    def model_overwritten(self, by_a_member: bool) -> None:
        """By a state that this worker follows: it is not what the script made, nor what a checkpoint had."""
        self.is_modified = True
        if not by_a_member:
            self.is_synced, self.applied, self.history = False, -1, EMPTY_HISTORY
            self.ledger = m.LedgerState()

    # -- what the group does ---------------------------------------------------------------------

    def commit_step(self, step: int, digest: bytes, state: m.LedgerState) -> None:
        self.ledger = state
        self.applied, self.is_modified = step, True
        self.history = extend_history(self.history, digest)

    def apply_verdict(self, view: m.MembershipView | m.StandbyNotice, prepared: bytes | None) -> bool:
        """Come to what a verdict names, or lack it.  Whether that took the update of digest `prepared`."""
        if prepared is not None and view.applied == self.applied + 1:
            history = extend_history(self.history, prepared)
            if history == view.history:
                self.applied, self.history, self.is_modified = view.applied, history, True
                return True
        self.is_synced = self.is_synced and (view.applied, view.history) == self.position
        return False

    def begin_generation(self, blocks: m.Span, may_recall: bool) -> None:
        """A generation begins in which it needs these.  `may_recall`: what is in memory is of its step."""
        if self.memory_layers is not None and may_recall:
            self.is_synced, self._layers = True, self.memory_layers  # it was not put together from that
        self.memory_layers = self._layers if self.is_synced and self._layers != blocks else None
        self.is_synced = self.is_synced and self.memory_layers is None

    def await_state(self, view: m.MembershipView, blocks: m.Span, as_built: bool) -> None:
        """What it will hold once that is restored; `as_built`: that is what the script has made."""
        self.applied, self.history = view.applied, view.history
        self.is_synced, self._layers = as_built, blocks
        if as_built:
            self.memory_layers = None  # it is built anew: what it was is gone

    def is_finished(self, spec: m.LedgerSpec) -> bool:
        """The ledger has ended the run, as far as it was applied here."""
        return self.is_synced and data_ledger.is_finished(spec, self.ledger)

    def make_report(
        self, term: int, generation: int, voted: tuple[m.RoundId, bytes, bool] | None
    ) -> m.FreezeReport:
        """Commit rule 5.  `voted`: the round that is prepared, its digest and whether it is skipped."""
        prepared, digest, skip = voted if voted is not None else (None, b"", False)
        return m.FreezeReport(
            term=term,
            generation=generation,
            is_synced=self.is_synced or self.memory_layers is not None,
            applied=self.applied,
            history=self.history,
            ledger=self.ledger,
            prepared=prepared,
            digest=digest,
            skip=skip,
            layers=self.memory_layers or self._layers,
        )
