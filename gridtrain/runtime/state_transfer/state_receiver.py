"""The state that this worker lacks: it comes in blocks, is taken by the trainer, and is passed on meanwhile.

Decides what is still asked for, and whether what came is what the donor has.  Never decides whom to ask (the
core does), and never loads a state: the trainer's thread does.

    StateRequest --> still_lacked --> donor
    StateBlock, StateDigest --> StateIntake --complete--> trainer: take
                                    |    \\-- refuted: begin anew, with the donor itself
                                    +--> PassingOutlet --> the next member that lacks it
"""

from __future__ import annotations

from dataclasses import replace

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io
from gridtrain.runtime.mailbox.mailbox import Mailbox
from gridtrain.runtime.state_transfer.blobs import BlobReceiver
from gridtrain.runtime.state_transfer.state_forwarder import StateForwarder


class StateReceiver:
    """See the module's text.

    Attributes:
        intake: what has come; guarded by `Meeting.changed` where it is changed.
        passing: its way to others; the loop's alone.
    """

    def __init__(self, meeting: Mailbox) -> None:
        self._mailbox = meeting
        self.blobs = BlobReceiver()
        self.forwarder = StateForwarder(self.blobs)

    # -- the trainer's thread --------------------------------------------------------------------

    def set_limit(self, max_bytes: int) -> None:
        """The largest state that a donor may send."""
        with self._mailbox.condition:
            self.blobs.set_limit(max_bytes)

    def take_state(self) -> tuple[int, int, list[bytes]] | None:
        """Term, generation and blobs of the donor's state, complete; `Restored` is to follow.

        None: the one that was offered is gone, as that of the next generation has begun to come.
        """
        with self._mailbox.condition:
            return self.blobs.take_blobs() if self.blobs.is_complete else None

    def reject_state(self, generation: int, reason: str) -> None:
        """What was given as this worker's state is not that."""
        picture = self._mailbox.read()
        if picture.generation == generation and picture.state_source is not None:
            self._mailbox.submit(io.ProtocolViolation(picture.state_source, reason))

    # -- the loop's thread -----------------------------------------------------------------------

    def remaining_request(self, ask: m.StateRequest) -> m.StateRequest | None:
        """For what is not here yet; None: that is nothing."""
        have = self.blobs.received_blocks(ask.generation) if ask.is_whole and not ask.digest_only else 0
        if not have or self.blobs.remaining_bytes(ask.generation):
            return replace(ask, blocks_received=have)
        if self.blobs.is_unverified(ask.generation):
            return replace(ask, digest_only=True)
        return None

    def receive_block(self, block: m.StateBlock, *, vouched: bool, passes_on: bool) -> None:
        """`vouched`: it is the donor's.  Raises `RemoteProtocolError` for one that cannot belong here."""
        with self._mailbox.condition:
            self._mailbox.progress += 1
            self.blobs.keeps_blocks = passes_on
            self.blobs.receive(block, vouched=vouched)

    def set_expected_digest(self, generation: int, digest: bytes) -> None:
        """The donor says what its state's digest is."""
        with self._mailbox.condition:
            self.blobs.set_expected_digest(generation, digest)

    def drop_if_mismatched(self, generation: int) -> bool:
        """All of a state has come, and the donor's has another digest: it is forgotten."""
        with self._mailbox.condition:
            if not self.blobs.is_digest_mismatch(generation):
                return False
            self.blobs.clear()
            self.forwarder.stop()
            return True
