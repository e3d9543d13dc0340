"""Requests of the core to this worker's disk, where stage checkpoints lie.

    io.SaveCheckpoint, io.LoadCheckpoints, io.DiscardCheckpoints --> task --> trainer --> finish
    io.SendCheckpoint, io.StoreCheckpointBlock --> CheckpointCopier --> the next stage's disk, this disk

The training thread reads and writes checkpoints; copies go from file to file.
"""

from __future__ import annotations

import math

from gridtrain.core.group import member_events as io
from gridtrain.network.transport.interface import Transport
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.state_transfer.checkpoint_copy import CheckpointCopier, CheckpointDisk

DiskTask = io.SaveCheckpoint | io.LoadCheckpoints | io.DiscardCheckpoints


class CheckpointRequests:
    """The latest request of each kind, until it is done; and the copier.

    Args:
        rate_Bps: see `CheckpointCopier`.
    """

    def __init__(self, mailbox: Mailbox, rate_Bps: float | None) -> None:
        self._mailbox, self._rate_Bps = mailbox, rate_Bps
        self._copier: CheckpointCopier | None = None
        self._pending: dict[type[DiskTask], DiskTask] = {}

    # -- training thread -------------------------------------------------------------------------

    def attach(self, disk: CheckpointDisk, max_bytes: int) -> None:
        """Where checkpoints lie; before this worker joins the group."""
        if self._copier is None:
            self._copier = CheckpointCopier(disk, self._rate_Bps, max_bytes)

    def finish(self, task: DiskTask) -> None:
        """The trainer has done it, or cannot; a newer request of its kind stands."""

        def drop() -> None:
            if self._pending.get(type(task)) == task:
                del self._pending[type(task)]

        self._mailbox.submit(drop)

    # -- I/O thread ------------------------------------------------------------------------------

    def execute(self, effect: DiskTask | io.SendCheckpoint | io.StoreCheckpointBlock) -> None:
        """Raises `RemoteProtocolError` for a block of a copy that does not fit the others."""
        match effect:
            case io.SendCheckpoint() if self._copier is not None:
                self._copier.send(effect)
            case io.StoreCheckpointBlock(_, block) if self._copier is not None:
                with self._mailbox.condition:
                    self._mailbox.count_progress()
                self._copier.receive(block)
            case io.SaveCheckpoint() | io.LoadCheckpoints() | io.DiscardCheckpoints():
                self._pending[type(effect)] = effect

    def task(self, kind: type[DiskTask]) -> DiskTask | None:
        """The pending request of this kind."""
        return self._pending.get(kind)

    def load_task(self, term: int, generation: int, *, synced: bool) -> DiskTask | None:
        """Checkpoints to load now; the request lapses in another generation, or once the state is there."""
        task = self._pending.get(io.LoadCheckpoints)
        if isinstance(task, io.LoadCheckpoints) and (
            synced or (task.term, task.generation) != (term, generation)
        ):
            del self._pending[io.LoadCheckpoints]
            return None
        return task

    @property
    def due_s(self) -> float:
        """When there is something to send."""
        return self._copier.due_s if self._copier is not None else math.inf

    def send_pending(self, transport: Transport, now_s: float, generation: int) -> int:
        """Send a block of a copy if it is time; returns the number of blocks."""
        return self._copier.send_next(transport, now_s, generation) if self._copier is not None else 0
