"""Sends this worker's state, or a checkpoint from its disk, to newcomers for which the group waits.

The core decides which worker sends to which worker; the training thread captures the state and reads the
checkpoint.

    ev.SendState --> request --> CaptureState, ReadCheckpoint (tasks) --> trainer --> supply_...
                                                                                          |
    BlobSender: sends blocks to members while the transport's queue for them has room <---+
"""

from __future__ import annotations

from collections.abc import Sequence

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.network.transport.interface import Transport
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.mailbox.worker_task import CaptureState, ReadCheckpoint
from gridtrain.runtime.state_transfer.blobs import BlobSender, state_digest

Blobs = Sequence[bytes | memoryview]


class StateSender:
    """Sends the state and checkpoints, with one `BlobSender` for the state and one for each checkpoint."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._state_sender = BlobSender()
        self._checkpoint_senders: dict[m.CheckpointInfo, BlobSender] = {}  # for members of other stages
        self._generation = 0  # the generation of all pending requests

    # -- training thread -------------------------------------------------------------------------

    def supply_state(self, task: CaptureState, blobs: Blobs | None) -> None:
        """Supply the captured state.  If the state is not in memory, `blobs` is None, and nothing is sent."""
        digest = state_digest(blobs) if blobs is not None and len(blobs) > 1 else b""
        self._mailbox.submit(lambda: self._store(self._state_sender, task, task.is_whole, blobs, digest))

    def supply_checkpoint(self, task: ReadCheckpoint, blobs: Blobs | None) -> None:
        """Supply a checkpoint from this worker's disk.

        If the checkpoint cannot be read, `blobs` is None, and nothing is sent.
        """

        def store() -> None:
            sender = self._checkpoint_senders.get(task.checkpoint)
            if sender is not None:
                self._store(sender, task, True, blobs, b"")

        self._mailbox.submit(store)

    # -- I/O thread ------------------------------------------------------------------------------

    def request(self, effect: ev.SendState) -> None:
        """Queue the state or the checkpoint for a member that needs it."""
        if effect.checkpoint is None:
            sender = self._state_sender
        else:
            sender = self._checkpoint_senders.setdefault(effect.checkpoint, BlobSender())
        sender.request(effect)

    @property
    def state_task(self) -> CaptureState | None:
        wanted = self._state_sender.requested
        return None if wanted is None else CaptureState(*wanted)

    @property
    def checkpoint_task(self) -> ReadCheckpoint | None:
        for checkpoint, sender in self._checkpoint_senders.items():
            if (wanted := sender.requested) is not None:
                return ReadCheckpoint(wanted[0], checkpoint)
        return None

    def drop_other_generations(self, generation: int) -> None:
        """Drop requests from other generations, in which this worker may have held another stage."""
        if generation == self._generation:
            return
        self._generation = generation
        self._state_sender.drop_other_generations(generation)
        for checkpoint, sender in list(self._checkpoint_senders.items()):
            sender.drop_other_generations(generation)
            if sender.requested is None:
                del self._checkpoint_senders[checkpoint]

    def clear(self) -> None:
        """Drop all requests and states.

        Call this method when the generation has started: its members then hold the state.
        """
        self._state_sender.clear()
        self._checkpoint_senders.clear()

    def has_data(self, transport: Transport) -> bool:
        """Return whether `send_pending` can send a block now."""
        return any(sender.has_data(transport) for sender in self._senders)

    def send_pending(self, transport: Transport) -> int:
        """Send as many blocks as the transport accepts; return the number of blocks sent."""
        return sum(sender.send_pending(transport) for sender in self._senders)

    @property
    def _senders(self) -> list[BlobSender]:
        return [self._state_sender, *self._checkpoint_senders.values()]

    def _store(
        self,
        sender: BlobSender,
        task: CaptureState | ReadCheckpoint,
        is_whole: bool,
        blobs: Blobs | None,
        digest: bytes,
    ) -> None:
        if task.generation != self._generation:
            return  # the blobs were captured for a generation other than the current one
        sender.mark_supplied(task.generation, is_whole)
        if blobs is not None:
            sender.store(task.generation, blobs, digest)
