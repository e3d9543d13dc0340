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

from gridtrain.protocol import ledger
from gridtrain.protocol import messages as m
from gridtrain.protocol.round import HISTORY_START, extend_history


class Holding:
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
        self.history = HISTORY_START
        self.ledger = m.LedgerState()
        self.synced = False
        self.memory: m.Span | None = None
        self.touched = False
        self._blocks = m.Span(0, 1)  # that the state is of, where it is synced

    @property
    def at(self) -> tuple[int, bytes]:
        return self.applied, self.history

    # -- what the trainer does -------------------------------------------------------------------

    def loaded(self, held: m.Held) -> None:
        """Before it is in any generation, from its own checkpoint."""
        self.applied, self.history, self.ledger = held.applied, held.history, held.ledger
        self.synced = True

    def restored(self, blocks: m.Span) -> None:
        """The generation's state is here."""
        self.synced, self._blocks, self.memory = True, blocks, None

    def loading(self) -> None:
        """All of another member's state has come: the trainer may have begun to load it."""
        self.memory, self.touched = None, True

    def overwritten(self, by_a_member: bool) -> None:
        """By a state that this worker follows: it is not what the script made, nor what a checkpoint had."""
        self.touched = True
        if not by_a_member:
            self.synced, self.applied, self.history = False, -1, HISTORY_START
            self.ledger = m.LedgerState()

    # -- what the group does ---------------------------------------------------------------------

    def committed(self, step: int, digest: bytes, state: m.LedgerState) -> None:
        self.ledger = state
        self.applied, self.touched = step, True
        self.history = extend_history(self.history, digest)

    def execute(self, view: m.View | m.Spared, prepared: bytes | None) -> bool:
        """Come to what a verdict names, or lack it.  Whether that took the update of digest `prepared`."""
        if prepared is not None and view.applied == self.applied + 1:
            history = extend_history(self.history, prepared)
            if history == view.history:
                self.applied, self.history, self.touched = view.applied, history, True
                return True
        self.synced = self.synced and (view.applied, view.history) == self.at
        return False

    def seated(self, blocks: m.Span, may_recall: bool) -> None:
        """A generation begins in which it needs these.  `may_recall`: what is in memory is of its step."""
        if self.memory is not None and may_recall:
            self.synced, self._blocks = True, self.memory  # it was not put together from that
        self.memory = self._blocks if self.synced and self._blocks != blocks else None
        self.synced = self.synced and self.memory is None

    def lacks(self, view: m.View, blocks: m.Span, as_built: bool) -> None:
        """What it will hold once that is restored; `as_built`: that is what the script has made."""
        self.applied, self.history = view.applied, view.history
        self.synced, self._blocks = as_built, blocks
        if as_built:
            self.memory = None  # it is built anew: what it was is gone

    def finished(self, spec: m.LedgerSpec) -> bool:
        """The ledger has ended the run, as far as it was applied here."""
        return self.synced and ledger.finished(spec, self.ledger)

    def report(self, freeze: m.Freeze, voted: tuple[m.RoundId, bytes, bool] | None) -> m.Report:
        """Commit rule 5.  `voted`: the round that is prepared, its digest and whether it is skipped."""
        prepared, digest, skip = voted if voted is not None else (None, b"", False)
        return m.Report(
            term=freeze.term,
            generation=freeze.generation,
            synced=self.synced or self.memory is not None,
            applied=self.applied,
            history=self.history,
            ledger=self.ledger,
            prepared=prepared,
            digest=digest,
            skip=skip,
            blocks=self.memory or self._blocks,
        )
