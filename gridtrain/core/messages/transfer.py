"""Messages that carry state between workers, measure links, and pass through relays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from gridtrain.core.messages.declaration import (
    Address,
    AppliedStep,
    AtMost,
    Count,
    Digest,
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
@dataclass(frozen=True, slots=True)
class Credit:
    """Bytes of the receiver's bulk messages that the sender has processed since the connection came up.

    Flow control: at most `network.transport.flow_control.WINDOW_BYTES` are unacknowledged.
    """

    total_bytes: UInt


@message(25)
@dataclass(frozen=True, slots=True)
class CatchUpReport:
    """To the coordinator: a worker that catches up holds the state after step `applied`."""

    applied: AppliedStep
    history: Digest


@message(45)
@dataclass(frozen=True, slots=True)
class CatchUpFrom:
    """From the coordinator: copy the state of these members while they train, apply their updates, and report
    with CatchUpReport."""

    term: UInt
    sources: Annotated[tuple[tuple[PeerId, Address], ...], AtMost(16)]


@message(46)
@dataclass(frozen=True, slots=True)
class ServeCatchUp:
    """From the coordinator: take a snapshot after step `step`, or the first later one, for `receivers`.

    `receivers` replaces the previous list: a worker that is not in it is sent no more.
    """

    term: UInt
    step: AppliedStep
    receivers: Annotated[tuple[PeerId, ...], AtMost(64)]


@message(54)
@dataclass(frozen=True, slots=True)
class Ping:
    """Answered by a Pong of the same nonce."""

    nonce: UInt


@message(55)
@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to Ping."""

    nonce: UInt


MAX_STATE_BLOCKS = 1 << 16
"""64 GiB.  A receiver takes less: what its own model needs (`runtime.state_transfer`)."""

MAX_RESIDUAL_BLOCKS = 16
"""16 MiB, which is within one window of flow control."""

BURST_MESSAGES, BURST_MESSAGE_BYTES = 16, 16 * 1024
"""Number of messages of a burst, and bytes of each: 256 KiB in all."""


@message(65)
@dataclass(frozen=True, slots=True)
class Burst:
    """Message `index` of a burst that measures a link; the last 8 bytes of the last message are random."""

    nonce: UInt
    index: Count
    payload: Payload

    def find_problem(self) -> str | None:
        if self.index >= BURST_MESSAGES:
            return f"index {self.index}, must be below {BURST_MESSAGES}"
        return find_problem_of_size(self.payload, BURST_MESSAGE_BYTES)


@message(66)
@dataclass(frozen=True, slots=True)
class BurstReceived:
    """The last message of this burst was received: `proof` is its last 8 bytes."""

    nonce: UInt
    proof: Proof


@message(86)
@dataclass(frozen=True, slots=True)
class BurstRequest:
    """Send a burst with this nonce: `gridtrain doctor` measures the reverse direction."""

    nonce: UInt


@message(56)
@dataclass(frozen=True, slots=True)
class StateRequest:
    """A joining member requests the state.

    Attributes:
        is_whole: False: only the part that catch-up does not transfer.
        blocks_received: number of blocks that the requester has; the source starts after them.
        digest_only: only the digest is requested, as another member sends the blocks.
    """

    term: UInt
    generation: UInt
    is_whole: bool = True
    blocks_received: Count = 0
    digest_only: bool = False


@message(68)
@dataclass(frozen=True, slots=True)
class StateDigest:
    """The state source's first answer to StateRequest: blake2b-256 over the payloads of all blocks."""

    term: UInt
    generation: UInt
    digest: Digest


@message(57)
@dataclass(frozen=True, slots=True)
class StateBlock:
    """Block `index` of `total` of the state, at most 1 MiB."""

    term: UInt
    generation: UInt
    index: Count
    total: Positive
    payload: Payload

    def find_problem(self) -> str | None:
        return find_problem_of_block(self.index, self.total, self.payload, MAX_STATE_BLOCKS)


@message(89)
@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """Request the receiver's checkpoint of these layers after the VIEW's step, from which the member list
    says that the requester assembles its stage; answered with CheckpointBlocks."""

    term: UInt
    generation: UInt
    layers: Span

    def find_problem(self) -> str | None:
        return self.layers.find_problem_of_layers()


@message(79)
@dataclass(frozen=True, slots=True)
class CheckpointBlock:
    """Block `index` of `total` of a checkpoint on the sender's disk, at most 1 MiB.

    The receiver stores it on its disk too.  It holds the next stage (the first stage after the last), or has
    sent a CheckpointRequest.
    """

    term: UInt
    generation: UInt
    checkpoint: CheckpointInfo
    index: Count
    total: Positive
    payload: Payload

    def find_problem(self) -> str | None:
        return find_problem_of_block(self.index, self.total, self.payload, MAX_STATE_BLOCKS)


@message(70)
@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Catch-up: request the block digests of the source's snapshot."""


@message(71)
@dataclass(frozen=True, slots=True)
class SnapshotDigests:
    """Block digests of the source's snapshot, taken after step `applied`.

    `payload`: u64 size in bytes of the part that all replicas share, u64 size of the source's own part, then
    16 bytes of blake2b for each block of at most 1 MiB, first of the shared part, then of the own part.
    """

    applied: AppliedStep
    history: Digest
    payload: Payload


@message(72)
@dataclass(frozen=True, slots=True)
class SnapshotBlocksRequest:
    """Catch-up: request these blocks of the snapshot taken after step `applied`."""

    applied: AppliedStep
    blocks: Annotated[tuple[Count, ...], AtMost(64)]


@message(73)
@dataclass(frozen=True, slots=True)
class SnapshotBlock:
    """Block `index` of the snapshot taken after step `applied`."""

    applied: AppliedStep
    index: Count
    payload: Payload

    def find_problem(self) -> str | None:
        return find_problem_of_size(self.payload, MAX_BLOCK_BYTES)


@message(74)
@dataclass(frozen=True, slots=True)
class UpdatesRequest:
    """Catch-up: request the updates of all steps after `applied`, and every future one."""

    applied: AppliedStep


@message(75)
@dataclass(frozen=True, slots=True)
class UpdateLogEntry:
    """The update of step `step`; `latest_step`: the source's last step.

    For `payload` see `runtime.state_transfer.update_log`.
    """

    step: UInt
    latest_step: UInt
    payload: Payload


@message(76)
@dataclass(frozen=True, slots=True)
class SnapshotUnavailable:
    """The source cannot send what was requested, or no longer can."""

    reason: Reason


@message(63)
@dataclass(frozen=True, slots=True)
class ResidualBlock:
    """Block `index` of `total` of the residual of a member that leaves, as it was after step `applied`.

    The blocks together are one sparse payload of fp32 values; see `core.member.residual_transfer`.
    """

    term: UInt
    generation: UInt
    applied: AppliedStep
    history: Digest
    index: Count
    total: Positive
    payload: Payload

    def find_problem(self) -> str | None:
        return find_problem_of_block(self.index, self.total, self.payload, MAX_RESIDUAL_BLOCKS)


@message(64)
@dataclass(frozen=True, slots=True)
class ResidualReply:
    """Answer to the last ResidualBlock: all of it was received and fits, or it is declined."""

    term: UInt
    generation: UInt
    is_accepted: bool
    reason: Reason


@message(60)
@dataclass(frozen=True, slots=True)
class RelayRequest:
    """Forward `payload` to `to`.  It is encrypted for `to`: the relay can neither read nor alter it."""

    to: PeerId
    payload: Payload


@message(61)
@dataclass(frozen=True, slots=True)
class RelayedMessage:
    """A payload that the sender, a relay, forwards from `origin`."""

    origin: PeerId
    payload: Payload


@message(62)
@dataclass(frozen=True, slots=True)
class RelayFailed:
    """The relay could not forward a payload to `to`."""

    to: PeerId
    reason: Reason


TransferMessage = (
    Credit
    | CatchUpReport
    | CatchUpFrom
    | ServeCatchUp
    | Ping
    | Pong
    | Burst
    | BurstReceived
    | BurstRequest
    | StateRequest
    | StateDigest
    | StateBlock
    | CheckpointRequest
    | CheckpointBlock
    | SnapshotRequest
    | SnapshotDigests
    | SnapshotBlocksRequest
    | SnapshotBlock
    | UpdatesRequest
    | UpdateLogEntry
    | SnapshotUnavailable
    | ResidualBlock
    | ResidualReply
    | RelayRequest
    | RelayedMessage
    | RelayFailed
)
