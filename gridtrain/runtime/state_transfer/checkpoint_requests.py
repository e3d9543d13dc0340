"""Keeps the core's requests to save, load and discard stage checkpoints until the trainer carries them out.

    io.SaveCheckpoint, io.LoadCheckpoints, io.DiscardCheckpoints --> task --> trainer --> finish
    io.SendCheckpoint, io.StoreCheckpointBlock --> CheckpointCopier --> the next stage's disk, this disk

The training thread saves and loads checkpoints; the I/O thread copies them to and from other workers.
"""

from __future__ import annotations

import math

from gridtrain.core.group import member_events as io
from gridtrain.network.transport.interface import Transport
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.state_transfer.checkpoint_copy import CheckpointCopier, CheckpointDisk

DiskTask = io.SaveCheckpoint | io.LoadCheckpoints | io.DiscardCheckpoints


class CheckpointRequests:
    """Keeps the latest request of each kind until it is carried out, and passes copies to the copier.

    Args:
        mailbox: the mailbox between the two threads.
        rate_Bps: the initial value of the attribute.

    Attributes:
        rate_Bps: the rate cap of the `CheckpointCopier`.  Any thread may change it.
    """

    def __init__(self, mailbox: Mailbox, rate_Bps: float | None) -> None:
        self._mailbox, self.rate_Bps = mailbox, rate_Bps
        self._copier: CheckpointCopier | None = None
        self._pending: dict[type[DiskTask], DiskTask] = {}

    # -- training thread -------------------------------------------------------------------------

    def attach(self, disk: CheckpointDisk, max_bytes: int) -> None:
        """Set the `CheckpointDisk` to copy checkpoints from and to.

        Call this method before this worker joins the group.
        """
        if self._copier is None:
            self._copier = CheckpointCopier(disk, self.rate_Bps, max_bytes)

    def finish(self, task: DiskTask) -> None:
        """Remove a request that the trainer has carried out or cannot carry out.

        If a newer request of the same kind has replaced it, the newer request is kept.
        """

        def drop() -> None:
            if self._pending.get(type(task)) == task:
                del self._pending[type(task)]

        self._mailbox.submit(drop)

    # -- I/O thread ------------------------------------------------------------------------------

    def execute(self, effect: DiskTask | io.SendCheckpoint | io.StoreCheckpointBlock) -> None:
        """Execute an effect.  Raises `RemoteProtocolError` if a block does not match the other blocks."""
        match effect:
            case io.SendCheckpoint() if self._copier is not None:
                self._copier.send(effect)
            case io.StoreCheckpointBlock(_, block) if self._copier is not None:
                self._mailbox.count_progress()
                self._copier.receive(block)
            case io.SaveCheckpoint() | io.LoadCheckpoints() | io.DiscardCheckpoints():
                self._pending[type(effect)] = effect

    def task(self, kind: type[DiskTask]) -> DiskTask | None:
        """Return the pending request of this kind, or None."""
        return self._pending.get(kind)

    def load_task(self, term: int, generation: int, *, synced: bool) -> DiskTask | None:
        """Return the pending request to load checkpoints, or None.

        The request is dropped if it belongs to another generation, or if this worker already holds the state.
        """
        task = self._pending.get(io.LoadCheckpoints)
        if isinstance(task, io.LoadCheckpoints) and (
            synced or (task.term, task.generation) != (term, generation)
        ):
            del self._pending[io.LoadCheckpoints]
            return None
        return task

    @property
    def due_s(self) -> float:
        """The time from which `send_pending` must be called; infinity if there is nothing to send."""
        return self._copier.due_s if self._copier is not None else math.inf

    def send_pending(self, transport: Transport, now_s: float, generation: int) -> int:
        """Send the next block of a copy if it is due; return the number of blocks sent."""
        if self._copier is None:
            return 0
        self._copier.rate_Bps = self.rate_Bps
        return self._copier.send_next(transport, now_s, generation)

    def close(self) -> None:
        """Close the copier; call this method when no more blocks will arrive."""
        if self._copier is not None:
            self._copier.close()
