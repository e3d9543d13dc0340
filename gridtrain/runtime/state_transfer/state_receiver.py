"""Receives, while the group waits, the state that this worker lacks; passes it to the trainer and to peers.

The core decides from which worker the state is requested.

    StateRequest --> remaining_request --> state source
    StateBlock, StateDigest --> BlobReceiver --complete--> trainer: take_state
                                    |    \\-- wrong digest: start over, with the state source itself
                                    +--> StateForwarder --> the next member that needs the state
"""

from __future__ import annotations

from dataclasses import replace

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.state_transfer.blobs import BlobReceiver, Position
from gridtrain.runtime.state_transfer.state_forwarder import StateForwarder


class StateReceiver:
    """Receives one state at a time.

    Attributes:
        blobs: stores the received blocks; the mailbox's condition guards it.
        forwarder: forwards the blocks to other members; only the I/O thread uses it.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.blobs = BlobReceiver()
        self.forwarder = StateForwarder(self.blobs)

    # -- training thread -------------------------------------------------------------------------

    def take_state(self, generation: int) -> tuple[int, int, list[memoryview]] | None:
        """Take this generation's state: its term, its generation and its blobs.

        Submit `StateLoaded` after loading the state.  Returns None if the state is not complete, for example
        because the next generation's state has already begun to arrive.
        """
        with self._mailbox.condition:
            return self.blobs.take_blobs() if self.blobs.is_complete_for(generation) else None

    def reject_state(self, generation: int, reason: str) -> None:
        """Report that the state source has sent an invalid state for this generation, and why it is invalid.

        The call has no effect if the generation has ended.
        """
        snapshot = self._mailbox.read()
        if snapshot.generation == generation and snapshot.state_source is not None:
            self._mailbox.submit(ev.ProtocolViolation(snapshot.state_source, reason))

    # -- I/O thread ------------------------------------------------------------------------------

    def remaining_request(
        self, ask: m.StateRequest, position: Position | None, *, to_source: bool
    ) -> m.StateRequest | None:
        """Reduce a request to the blocks that are missing; return the request to send.

        Returns None if no blocks are missing, or if they cannot be requested yet.

        Args:
            ask: the core's request, which assumes that no blocks have arrived.
            position: the position of the state (see `BlobReceiver.begin`).
            to_source: whether the request goes to the state source rather than to a member that forwards the
                state.
        """
        with self._mailbox.condition:
            self.blobs.begin(ask.generation, position if ask.is_whole else None)
            if not ask.is_whole:
                return ask
            if self.blobs.lacks_first_blob:  # the rest is requested when the first blob has arrived
                return replace(ask, is_whole=False, digest_only=False) if to_source else None
            if ask.digest_only:
                return ask
            have = self.blobs.received_blocks(ask.generation)
            if not have or self.blobs.remaining_bytes(ask.generation):
                return replace(ask, blocks_received=have)
            return replace(ask, digest_only=True) if self.blobs.is_unverified(ask.generation) else None

    def receive_block(self, block: m.StateBlock, *, vouched: bool, is_forwarding: bool) -> bool:
        """Store a block; return whether the rest of the state must be requested now.

        After the loss of a state source, the rest is requested from the new source only when this block has
        completed the new source's first blob.

        Raises `RemoteProtocolError` if the block does not match the other blocks.

        Args:
            block: the received block.
            vouched: whether the block comes from the state source itself rather than from a member that
                forwards the state.
            is_forwarding: whether this worker forwards the state to another member.
        """
        with self._mailbox.condition:
            lacked, had = self.blobs.lacks_first_blob, self.blobs.received_blocks(block.generation)
            self.blobs.receive(block, vouched=vouched, keep_blocks=is_forwarding)
            if self.blobs.received_blocks(block.generation) != had:
                self._mailbox.count_progress()
            return lacked and not self.blobs.lacks_first_blob

    def set_expected_digest(self, generation: int, digest: bytes) -> None:
        """Set the digest that the state source has announced for its state."""
        with self._mailbox.condition:
            self.blobs.set_expected_digest(generation, digest)

    def drop_if_mismatched(self, generation: int) -> bool:
        """Drop the received state if it differs from the source's state; return whether it was dropped."""
        with self._mailbox.condition:
            if not self.blobs.is_digest_mismatch(generation):
                return False
            self.blobs.clear()
            self.forwarder.stop()
            return True
