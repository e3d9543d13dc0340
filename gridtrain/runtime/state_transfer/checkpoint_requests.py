"""What is asked of this worker's disk, on which checkpoints of stages lie.

Decides what of that still stands.  Never reads or writes a checkpoint: the trainer's thread does, and copies
go from file to file (`runtime.copies`).

    io.PutAside, io.Reload, io.Discard --> the picture --> trainer: put_aside, cannot_reload, discarded
    io.SendCopy, io.TakeCopy           --> Copies      --> the next stage's disk, and ours
"""

from __future__ import annotations

import math

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.network.transport.interface import Transport
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.state_transfer.checkpoint_copy import CheckpointCopier, CheckpointDisk


class CheckpointRequests:
    """See the module's text.

    Args:
        rate_Bps: see `Copies`.

    Attributes:
        aside, discard_after: see `Picture`.
    """

    def __init__(self, meeting: Mailbox, rate_Bps: float | None) -> None:
        self._mailbox, self._rate_Bps = meeting, rate_Bps
        self._copier: CheckpointCopier | None = None
        self._reload: io.LoadCheckpoints | None = None
        self.save_requested: m.CheckpointInfo | None = None
        self.discard_after: int | None = None

    # -- the trainer's thread --------------------------------------------------------------------

    def attach(self, disk: CheckpointDisk, max_bytes: int) -> None:
        """Where copies of other stages' checkpoints go, and ours are; before this worker enters the group."""
        if self._copier is None:
            self._copier = CheckpointCopier(disk, self._rate_Bps, max_bytes)

    def fail_reload(self, states: tuple[m.CheckpointInfo, ...]) -> None:
        """What was to be loaded cannot be; these are on the disk."""
        with self._mailbox.condition:
            self._reload = None
        self._mailbox.submit(io.StageCheckpointsChanged(states))

    def finish_save(self, held: m.CheckpointInfo) -> None:
        """It is on the disk, or cannot be."""
        with self._mailbox.condition:
            if self.save_requested == held:
                self.save_requested = None
        self._mailbox.mark_stale()

    def finish_discard(self, after: int) -> None:
        """No checkpoint after this step is on the disk any more."""
        with self._mailbox.condition:
            if self.discard_after == after:
                self.discard_after = None
        self._mailbox.mark_stale()

    # -- the loop's thread -----------------------------------------------------------------------

    def execute(
        self,
        effect: io.SaveCheckpoint
        | io.LoadCheckpoints
        | io.DiscardCheckpoints
        | io.SendCheckpoint
        | io.StoreCheckpointBlock,
    ) -> None:
        """Raises `RemoteProtocolError` for a block of a copy that does not fit the others."""
        match effect:
            case io.SaveCheckpoint(held):
                self.save_requested = held
            case io.LoadCheckpoints():
                self._reload = effect
            case io.DiscardCheckpoints(after):
                self.discard_after = after
            case io.SendCheckpoint() if self._copier is not None:
                self._copier.send(effect)
            case io.StoreCheckpointBlock(_, copied) if self._copier is not None:
                with self._mailbox.condition:
                    self._mailbox.progress += 1
                self._copier.receive(copied)

    def pending_reload(self, term: int, generation: int, *, synced: bool) -> io.LoadCheckpoints | None:
        """What is to be loaded now: of another generation, or where the state is there, it is forgotten."""
        reload = self._reload
        if reload is None or synced or (reload.term, reload.generation) != (term, generation):
            reload = self._reload = None
        return reload

    @property
    def due_s(self) -> float:
        """When there is something to send."""
        return self._copier.due_s if self._copier is not None else math.inf

    def pump(self, transport: Transport, now_s: float, generation: int) -> int:
        """Send a block of a copy if it is time; returns how many."""
        return self._copier.send_next(transport, now_s, generation) if self._copier is not None else 0
