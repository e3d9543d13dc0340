"""Bookkeeping of the state that a worker holds: after which step, of which layers, and whether it is synced.

    VIEW, at step a      the worker holds             result
                         step a, its stage's layers   synced
                         step a, other layers         `memory_layers`: a stage is assembled from it, or it is
                                                      used again when the previous partition comes back
                         another step                 not synced: received, or loaded from disk

While a worker is not synced, `applied` and `history` name the state that it will hold.  The tensors are the
trainer's; checkpoints on disk are in `member_checkpoints`.
"""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.two_phase_commit import EMPTY_HISTORY, extend_history


class ReplicaState:
    """The state that this worker holds, or will hold.

    Attributes:
        applied: the last step applied; -1: none.
        history: chained digest of all updates applied.
        ledger: the data ledger after that step.
        is_synced: the worker holds the state that these name, of its stage's layers.
        memory_layers: the layers whose state is in memory, where the worker's stage has others.
        is_modified: the model is no longer the one that the script built or that a checkpoint had.
    """

    def __init__(self) -> None:
        self.applied = -1
        self.history = EMPTY_HISTORY
        self.ledger = m.LedgerState()
        self.is_synced = False
        self.memory_layers: m.Span | None = None
        self.is_modified = False
        self._layers = m.Span(0, 1)  # layers of the state, where it is synced

    @property
    def position(self) -> tuple[int, bytes]:
        """(applied, history), which identify a state."""
        return self.applied, self.history

    @property
    def step(self) -> int:
        """The step that is open or comes next."""
        return self.applied + 1

    # -- the trainer -----------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint: m.CheckpointInfo) -> None:
        """The trainer starts from its own checkpoint, before any generation."""
        self.applied, self.history, self.ledger = checkpoint.applied, checkpoint.history, checkpoint.ledger
        self.is_synced = True

    def state_loaded(self, layers: m.Span) -> None:
        """The trainer has loaded the generation's state."""
        self.is_modified = True
        self.is_synced, self._layers, self.memory_layers = True, layers, None

    def state_received(self) -> None:
        """All of another member's state has arrived: the trainer may have begun to load it."""
        self.memory_layers, self.is_modified = None, True

    def release_memory(self) -> None:
        """The trainer may have begun to load checkpoints over what is in memory."""
        self.memory_layers = None

    def model_overwritten(self, *, is_member: bool) -> None:
        """Catch-up replaces the model.  Outside of a generation the worker then holds no known state."""
        self.is_modified = True
        if not is_member:
            self.is_synced, self.applied, self.history = False, -1, EMPTY_HISTORY
            self.ledger = m.LedgerState()

    def mark_modified(self) -> None:
        self.is_modified = True

    # -- the group -------------------------------------------------------------------------------

    def commit_step(self, step: int, digest: bytes, ledger: m.LedgerState) -> None:
        self.ledger = ledger
        self.applied, self.is_modified = step, True
        self.history = extend_history(self.history, digest)

    def apply_verdict(self, view: m.MembershipView | m.StandbyNotice, prepared: bytes | None) -> bool:
        """Reach the state that a verdict names, or become unsynced.

        Returns whether that applied the update of digest `prepared`.
        """
        if prepared is not None and view.applied == self.applied + 1:
            history = extend_history(self.history, prepared)
            if history == view.history:
                self.applied, self.history, self.is_modified = view.applied, history, True
                return True
        self.is_synced = self.is_synced and (view.applied, view.history) == self.position
        return False

    def begin_generation(self, layers: m.Span, *, may_recall: bool) -> None:
        """A generation begins in which this worker holds `layers`.

        `may_recall`: the state in memory is of the generation's first step.
        """
        if self.memory_layers is not None and may_recall:
            self.is_synced, self._layers = True, self.memory_layers  # no stage was assembled from it
        self.memory_layers = self._layers if self.is_synced and self._layers != layers else None
        self.is_synced = self.is_synced and self.memory_layers is None

    def accept_view(self, view: m.MembershipView, layers: m.Span, *, as_built: bool) -> None:
        """Take over the ledger and, if not synced, the state to reach.

        `as_built`: the state to reach is the one that the script built.
        """
        self.ledger = view.ledger
        if self.is_synced:
            return
        self.applied, self.history = view.applied, view.history
        self.is_synced, self._layers = as_built, layers
        if as_built:
            self.memory_layers = None  # the stage is built again, over what was in memory

    def enter_standby(self, ledger: m.LedgerState) -> None:
        self.memory_layers, self.ledger = None, ledger

    def mark_unsynced(self) -> None:
        """What this worker holds is not, or no longer, the state that it should hold."""
        self.is_synced = False

    def is_finished(self, spec: m.LedgerSpec) -> bool:
        """Whether the ledger has ended the run, as far as it was applied here."""
        return self.is_synced and data_ledger.is_finished(spec, self.ledger)

    def make_report(
        self, term: int, generation: int, vote: tuple[m.RoundId, bytes, bool] | None
    ) -> m.FreezeReport:
        """Answer to FREEZE (commit rule 5).  `vote`: the prepared round, its digest, and whether it is
        skipped."""
        prepared, digest, skip = vote if vote is not None else (None, b"", False)
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
