"""The state that this worker lacks: received in blocks, forwarded meanwhile, and taken by the trainer.

The core decides whom to ask.

    StateRequest --> remaining_request --> state source
    StateBlock, StateDigest --> BlobReceiver --complete--> trainer: take_state
                                    |    \\-- wrong digest: start over, with the state source itself
                                    +--> StateForwarder --> the next member that lacks it
"""

from __future__ import annotations

from dataclasses import replace

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.state_transfer.blobs import BlobReceiver
from gridtrain.runtime.state_transfer.state_forwarder import StateForwarder


class StateReceiver:
    """One state at a time.

    Attributes:
        blobs: what has arrived; changed only while the mailbox's condition is held.
        forwarder: sends it on; used by the I/O thread alone.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.blobs = BlobReceiver()
        self.forwarder = StateForwarder(self.blobs)

    # -- training thread -------------------------------------------------------------------------

    def set_limit(self, max_bytes: int) -> None:
        """The largest state that a state source may send."""
        with self._mailbox.condition:
            self.blobs.set_limit(max_bytes)

    def take_state(self, generation: int) -> tuple[int, int, list[bytes]] | None:
        """Term, generation and blobs of the state for this generation; `StateLoaded` is to follow.

        None: it is gone, as the state of the next generation has begun to arrive.
        """
        with self._mailbox.condition:
            return self.blobs.take_blobs() if self.blobs.is_complete_for(generation) else None

    def reject_state(self, generation: int, reason: str) -> None:
        """What the state source sent is not this worker's state."""
        snapshot = self._mailbox.read()
        if snapshot.generation == generation and snapshot.state_source is not None:
            self._mailbox.submit(io.ProtocolViolation(snapshot.state_source, reason))

    # -- I/O thread ------------------------------------------------------------------------------

    def remaining_request(self, ask: m.StateRequest) -> m.StateRequest | None:
        """The request for what is not here yet; None: nothing is missing."""
        have = self.blobs.received_blocks(ask.generation) if ask.is_whole and not ask.digest_only else 0
        if not have or self.blobs.remaining_bytes(ask.generation):
            return replace(ask, blocks_received=have)
        if self.blobs.is_unverified(ask.generation):
            return replace(ask, digest_only=True)
        return None

    def receive_block(self, block: m.StateBlock, *, vouched: bool, is_forwarding: bool) -> None:
        """`vouched`: it is from the state source.  Raises `RemoteProtocolError` for one that does not fit."""
        with self._mailbox.condition:
            self._mailbox.count_progress()
            self.blobs.receive(block, vouched=vouched, keep_blocks=is_forwarding)

    def set_expected_digest(self, generation: int, digest: bytes) -> None:
        """What the state source says of its state's digest."""
        with self._mailbox.condition:
            self.blobs.set_expected_digest(generation, digest)

    def drop_if_mismatched(self, generation: int) -> bool:
        """Drop a complete state that has another digest than the state source's; returns whether it had."""
        with self._mailbox.condition:
            if not self.blobs.is_digest_mismatch(generation):
                return False
            self.blobs.clear()
            self.forwarder.stop()
            return True
