"""The step, history and layers of the state that a worker holds, and whether a generation can use this state.

If a MembershipView begins after step a, a worker whose memory contains

    its stage's layers after step a   is synced
    other layers after step a         is not synced, but keeps these layers (`memory_layers`): stages are
                                      assembled from them, or the previous partition is restored
    the state of another step         is not synced: it receives the state, or loads it from disk

While a member is not synced, `applied` and `history` identify the state that it will hold; if it leaves its
generation before it has this state, it forgets them.  The trainer owns the tensors, and `member_checkpoints`
manages the checkpoints on disk.
"""

from __future__ import annotations

from gridtrain.core import messages as m
from gridtrain.core.commit import data_ledger
from gridtrain.core.commit.attempts import PreparedVote
from gridtrain.core.commit.two_phase_commit import EMPTY_HISTORY, extend_history


class ReplicaState:
    """The state that this worker holds, or will hold.

    Attributes:
        applied: the last step applied; -1 if there is none.
        history: chained digest of all updates applied.
        ledger: the data ledger after the last step applied.
        is_synced: whether the worker holds this state for all layers of its stage.
        memory_layers: the layers whose state is in memory, if they differ from those of the worker's stage;
            otherwise None.
        is_modified: whether the model has changed since the script built it or loaded it from a checkpoint.
    """

    def __init__(self) -> None:
        self.applied = -1
        self.history = EMPTY_HISTORY
        self.ledger = m.LedgerState()
        self._learned_samples = self._learned_until = 0  # _until: the step at which _samples last changed
        self.is_synced = False
        self.memory_layers: m.Span | None = None
        self.is_modified = False
        self._layers = m.Span(0, 1)  # layers of the state if the worker is synced

    @property
    def position(self) -> tuple[int, bytes]:
        """The pair (applied, history), which identifies a state."""
        return self.applied, self.history

    @property
    def has_state(self) -> bool:
        """Whether this worker holds the state at its position, for its stage or for other layers."""
        return self.is_synced or self.memory_layers is not None

    @property
    def step(self) -> int:
        """The open step, or the next one if none is open."""
        return self.applied + 1

    @property
    def skip_metrics(self) -> dict[str, int]:
        """The numbers of skipped samples and steps, as heartbeat metrics; empty if no step was skipped.

        Of the steps before this worker joined, it knows only whether all of them were skipped.
        """
        if not self.ledger.skipped:
            return {}
        return {
            m.SKIPPED_SAMPLES: self.ledger.skipped,
            m.COMMITTED_SAMPLES: self.ledger.consumed,
            m.SKIPPED_IN_A_ROW: self.ledger.step - self._learned_until,
        }

    def _adopt_ledger(self, ledger: m.LedgerState) -> None:
        self.ledger = ledger
        learned_samples = ledger.consumed - ledger.skipped
        if learned_samples != self._learned_samples or ledger.step < self._learned_until:
            self._learned_samples, self._learned_until = learned_samples, ledger.step

    # -- the trainer -----------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint: m.CheckpointInfo) -> None:
        """Record that the trainer starts from its own checkpoint before any generation."""
        self.applied, self.history, self.is_synced = checkpoint.applied, checkpoint.history, True
        self._adopt_ledger(checkpoint.ledger)

    def state_loaded(self, layers: m.Span) -> None:
        """Record that the trainer has loaded the generation's state."""
        self.is_modified = True
        self.is_synced, self._layers, self.memory_layers = True, layers, None

    def state_received(self) -> None:
        """Record that another member's state has arrived; the trainer may have begun to load it."""
        self.memory_layers, self.is_modified = None, True

    def release_memory(self) -> None:
        """Record that the trainer may have begun to overwrite the state in memory with checkpoints."""
        self.memory_layers = None

    def model_overwritten(self, *, is_member: bool) -> None:
        """Record that catch-up overwrites the model; outside a generation, the worker loses its state."""
        self.is_modified = True
        if not is_member:
            self.forget_position()
            self._adopt_ledger(m.LedgerState())

    def mark_modified(self) -> None:
        self.is_modified = True

    # -- the group -------------------------------------------------------------------------------

    def commit_step(self, step: int, digest: bytes, ledger: m.LedgerState) -> None:
        self._adopt_ledger(ledger)
        self.applied, self.is_modified = step, True
        self.history = extend_history(self.history, digest)

    def apply_verdict(
        self,
        view: m.MembershipView | m.StandbyNotice,
        prepared: m.RoundId | None,
        digest: bytes = b"",
        *,
        must_know_round: bool = False,
    ) -> bool | None:
        """Execute the coordinator's verdict on the open step: apply the prepared update if `view` commits it.

        If this worker does not hold the state of `view` afterwards, it is no longer synced.

        Args:
            prepared: the round of the prepared update; None if there is none.
            digest: the digest of that update.
            must_know_round: whether to apply the update only if `view` says that its round is committed: this
                worker is listed as one that does not hold the state, or put on standby.

        Returns:
            Whether the prepared update was applied; None if it was not, although the others may have
            committed its round.
        """
        is_committed = prepared is not None and _is_committed(prepared, view)
        may_apply = is_committed or (is_committed is None and not must_know_round)
        if may_apply and view.applied == self.applied + 1:
            history = extend_history(self.history, digest)
            if history == view.history:
                self.applied, self.history, self.is_modified = view.applied, history, True
                return True
        self.is_synced = self.is_synced and (view.applied, view.history) == self.position
        return False if is_committed is False else None

    def begin_generation(self, layers: m.Span, *, may_recall: bool) -> None:
        """Begin a generation in which this worker's stage consists of `layers`.

        If this worker is synced but its state has other layers, those layers become `memory_layers`.

        Args:
            may_recall: whether the state of `memory_layers` is the one with which the generation begins, so
                that it can be used again.
        """
        if self.memory_layers is not None and may_recall:
            self.is_synced, self._layers = True, self.memory_layers  # no stage was assembled from it
        self.memory_layers = self._layers if self.is_synced and self._layers != layers else None
        self.is_synced = self.is_synced and self.memory_layers is None

    def accept_view(self, view: m.MembershipView, layers: m.Span, *, as_built: bool) -> None:
        """Adopt the ledger of `view` and, if this worker is not synced, the position that it must reach.

        Args:
            as_built: whether the script has already built that state or loaded it from a checkpoint.
        """
        self._adopt_ledger(view.ledger)
        if self.is_synced:
            return
        self.applied, self.history = view.applied, view.history
        self.is_synced, self._layers = as_built, layers
        if as_built:
            self.memory_layers = None  # rebuilding the stage overwrites it

    def enter_standby(self, ledger: m.LedgerState) -> None:
        self.memory_layers = None
        self._adopt_ledger(ledger)

    def mark_unsynced(self) -> None:
        """Record that this worker does not hold the state that it should hold."""
        self.is_synced = False

    def forget_position(self) -> None:
        """Record that this worker, outside a generation, holds no state and will not receive one."""
        self.is_synced, self.applied, self.history = False, -1, EMPTY_HISTORY

    def is_finished(self, spec: m.LedgerSpec) -> bool:
        """Return whether the run has ended according to the ledger of this worker's state."""
        return self.is_synced and data_ledger.is_finished(spec, self.ledger)

    def make_freeze_report(self, term: int, generation: int, vote: PreparedVote) -> m.FreezeReport:
        """Return the answer to a Freeze (commit rule 5)."""
        prepared, digest, flags = vote
        layers = self.memory_layers or self._layers
        return m.FreezeReport(
            term, generation, self.has_state, *self.position, self.ledger, prepared, digest, flags, layers
        )


def _is_committed(prepared: m.RoundId, view: m.MembershipView | m.StandbyNotice) -> bool | None:
    """Return whether the prepared round is committed; None if that is not known.

    Its step can also be committed in another generation, even with an equal update, for example if that
    contains none of this worker's values.  Then the new residual must not be kept, because its samples were
    assigned to other members.
    """
    if view.applied < prepared.step:
        return False
    if view.applied > prepared.step or view.decided_round is None:
        return None
    return view.decided_round.generation == prepared.generation
