"""Messages between workers that carry state, checkpoints and residuals, measure links, and use relays."""

from __future__ import annotations

from typing import Annotated

from gridtrain.core.messages.declaration import (
    Address,
    AppliedStep,
    AtMost,
    Count,
    Digest,
    GenerationMessage,
    Message,
    Payload,
    PeerId,
    Positive,
    Proof,
    Reason,
    UInt,
    message,
)
from gridtrain.core.messages.types import (
    MAX_BLOCK_BYTES,
    CheckpointInfo,
    Span,
    find_problem_of_block,
    find_problem_of_size,
)


@message(2)
class Credit(Message):
    """Number of bytes of bulk messages that the sender has received on this connection and processed.

    Flow control permits at most `network.transport.flow_control.WINDOW_BYTES` unacknowledged bytes.
    """

    total_bytes: UInt


@message(25)
class CatchUpReport(Message):
    """Answer to CatchUpFrom: the sender holds the state after step `applied`.

    If catch-up has failed, `applied` is -1 and `history` is empty.
    """

    applied: AppliedStep
    history: Digest


@message(45)
class CatchUpFrom(Message):
    """The coordinator's order to copy these members' state while they train, and to apply their updates.

    The receiver reports the result with CatchUpReport.
    """

    term: UInt
    sources: Annotated[tuple[tuple[PeerId, Address], ...], AtMost(16)]


@message(46)
class ServeCatchUp(Message):
    """The coordinator's order to take a snapshot for `receivers` after step `step` or the first later step.

    `receivers` replaces the previous list; a worker that is no longer listed is sent nothing more.
    """

    term: UInt
    step: AppliedStep
    receivers: Annotated[tuple[PeerId, ...], AtMost(64)]


@message(54)
class Ping(Message):
    """Request for a Pong with the same nonce, to measure the round-trip time."""

    nonce: UInt


@message(55)
class Pong(Message):
    """Answer to Ping."""

    nonce: UInt


MAX_STATE_BLOCKS = 1 << 16
"""Maximum number of blocks in a state or checkpoint: 64 GiB in total.

A receiver accepts at most the size that its own model needs (`runtime.state_transfer`).
"""

MAX_RESIDUAL_BLOCKS = 16
"""Maximum number of blocks in a residual: 16 MiB in total, which fits into a flow control window."""

BURST_MESSAGES, BURST_MESSAGE_BYTES = 16, 16 * 1024
"""Number of messages in a burst, and bytes in each: 256 KiB in total."""


@message(65)
class Burst(Message):
    """Message `index` of a burst that measures a link; the last 8 bytes of the last message are random."""

    nonce: UInt
    index: Count
    payload: Payload

    def find_problem(self) -> str | None:
        if self.index >= BURST_MESSAGES:
            return f"index {self.index}; it must be below {BURST_MESSAGES}"
        return find_problem_of_size(self.payload, BURST_MESSAGE_BYTES)


@message(66)
class BurstReceived(Message):
    """Acknowledgement of a burst's last message; `proof` is the last 8 bytes of that message."""

    nonce: UInt
    proof: Proof


@message(86)
class BurstRequest(Message):
    """Request for a burst with this nonce, to measure the link from the receiver to the requester."""

    nonce: UInt


@message(56)
class StateRequest(GenerationMessage):
    """Request from a joining member for the state.

    Attributes:
        is_whole: True to request the whole state; False to request only the part that can differ between
            sources, which is sufficient after catch-up, or if another source resumes a transfer.
        blocks_received: number of blocks that the requester already has; the source sends only later blocks
            or, if the requester has all of them, the last block again.
        digest_only: whether only the digest is requested, because another member sends the blocks.
    """

    is_whole: bool = True
    blocks_received: Count = 0
    digest_only: bool = False


@message(68)
class StateDigest(GenerationMessage):
    """First answer of the state source to StateRequest: the BLAKE2b-256 digest of all blocks' payloads."""

    digest: Digest


@message(57)
class StateBlock(GenerationMessage):
    """Block `index` of `total` of the state, at most 1 MiB."""

    index: Count
    total: Positive
    payload: Payload

    def find_problem(self) -> str | None:
        return find_problem_of_block(self.index, self.total, self.payload, MAX_STATE_BLOCKS)


@message(89)
class CheckpointRequest(GenerationMessage):
    """Request for the receiver's checkpoint of these layers, taken after the MembershipView's step.

    The member list must say that the requester assembles its stage from the checkpoint.  The receiver answers
    with CheckpointBlocks.
    """

    layers: Span

    def find_problem(self) -> str | None:
        return self.layers.find_problem_of_layers()


@message(79)
class CheckpointBlock(GenerationMessage):
    """Block `index` of `total` of a checkpoint on the sender's disk, at most 1 MiB.

    The receiver, which stores the checkpoint on its own disk, is either a member that has sent a
    CheckpointRequest, or the member in the next stage that keeps copies of the sender's checkpoints (in the
    first stage, if the sender is in the last one).
    """

    checkpoint: CheckpointInfo
    index: Count
    total: Positive
    payload: Payload

    def find_problem(self) -> str | None:
        return find_problem_of_block(self.index, self.total, self.payload, MAX_STATE_BLOCKS)


@message(70)
class SnapshotRequest(Message):
    """Request for the block digests of the source's snapshot (catch-up)."""


@message(71)
class SnapshotDigests(Message):
    """Block digests of the source's snapshot, taken after step `applied`.

    `payload` contains the size in bytes of the part that all replicas share (u64), the size of the source's
    own part (u64), then 16 bytes of blake2b for each block of at most 1 MiB: first the blocks of the shared
    part, then those of the source's own part.
    """

    applied: AppliedStep
    history: Digest
    payload: Payload


@message(72)
class SnapshotBlocksRequest(Message):
    """Request for these blocks of the snapshot taken after step `applied` (catch-up)."""

    applied: AppliedStep
    blocks: Annotated[tuple[Count, ...], AtMost(64)]


@message(73)
class SnapshotBlock(Message):
    """Block `index` of the snapshot taken after step `applied`."""

    applied: AppliedStep
    index: Count
    payload: Payload

    def find_problem(self) -> str | None:
        return find_problem_of_size(self.payload, MAX_BLOCK_BYTES)


@message(74)
class UpdatesRequest(Message):
    """Request for the updates of all steps after `applied`, including future ones (catch-up)."""

    applied: AppliedStep


@message(75)
class UpdateLogEntry(Message):
    """The update for step `step`; `latest_step` is the source's last step.

    `runtime.state_transfer.update_log` defines the format of `payload`.
    """

    step: UInt
    latest_step: UInt
    payload: Payload


@message(76)
class SnapshotUnavailable(Message):
    """Answer from a source that does not hold the requested snapshot or updates, or no longer does."""

    reason: Reason


@message(63)
class ResidualBlock(GenerationMessage):
    """Block `index` of `total` of a leaving member's residual, as it was after step `applied`.

    The blocks together are one sparse payload of fp32 values; see `core.member.residual_recipients`.
    """

    applied: AppliedStep
    history: Digest
    index: Count
    total: Positive
    payload: Payload

    def find_problem(self) -> str | None:
        return find_problem_of_block(self.index, self.total, self.payload, MAX_RESIDUAL_BLOCKS)


@message(64)
class ResidualReply(GenerationMessage):
    """Answer to the last ResidualBlock: the recipient accepts the complete residual, or declines it."""

    is_accepted: bool
    reason: Reason


@message(60)
class RelayRequest(Message):
    """Request to a relay to forward `payload` to the peer `to`.

    The payload is encrypted for `to`, so the relay can neither read it nor alter it unnoticed.
    """

    to: PeerId
    payload: Payload


@message(61)
class RelayedMessage(Message):
    """A payload that the sender, a relay, forwards from `origin`."""

    origin: PeerId
    payload: Payload


@message(62)
class RelayFailed(Message):
    """Report from a relay that it could not forward a payload to the peer `to`."""

    to: PeerId
    reason: Reason
