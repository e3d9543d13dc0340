"""Messages that carry state between workers, measure links, and pass through relays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gridtrain.core.messages.types import CheckpointInfo, PeerId, Span


@dataclass(frozen=True, slots=True)
class Credit:
    """Bytes of the receiver's bulk messages that the sender has processed since the connection came up.

    Flow control: at most `network.transport.flow_control.WINDOW_BYTES` are unacknowledged.
    """

    total_bytes: int


@dataclass(frozen=True, slots=True)
class CatchUpReport:
    """To the coordinator: a worker that catches up holds the state after step `applied`."""

    applied: int
    history: bytes


@dataclass(frozen=True, slots=True)
class CatchUpFrom:
    """From the coordinator: copy the state of these members while they train, apply their updates, and report
    with CatchUpReport."""

    term: int
    sources: tuple[tuple[PeerId, str], ...]


@dataclass(frozen=True, slots=True)
class ServeCatchUp:
    """From the coordinator: take a snapshot after step `step`, or the first later one, for `receivers`.

    `receivers` replaces the previous list: a worker that is not in it is sent no more.
    """

    term: int
    step: int
    receivers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    """Answered by a Pong of the same nonce."""

    nonce: int


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to Ping."""

    nonce: int


BURST_MESSAGES, BURST_MESSAGE_BYTES = 16, 16 * 1024
"""Number of messages of a burst, and bytes of each: 256 KiB in all."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Message `index` of a burst that measures a link; the last 8 bytes of the last message are random."""

    nonce: int
    index: int
    payload: Any


@dataclass(frozen=True, slots=True)
class BurstReceived:
    """The last message of this burst was received: `proof` is its last 8 bytes."""

    nonce: int
    proof: bytes


@dataclass(frozen=True, slots=True)
class BurstRequest:
    """Send a burst with this nonce: `gridtrain doctor` measures the reverse direction."""

    nonce: int


@dataclass(frozen=True, slots=True)
class StateRequest:
    """A joining member requests the state.

    Attributes:
        is_whole: False: only the part that catch-up does not transfer.
        blocks_received: number of blocks that the requester has; the source starts after them.
        digest_only: only the digest is requested, as another member sends the blocks.
    """

    term: int
    generation: int
    is_whole: bool = True
    blocks_received: int = 0
    digest_only: bool = False


@dataclass(frozen=True, slots=True)
class StateDigest:
    """The state source's first answer to StateRequest: blake2b-256 over the payloads of all blocks."""

    term: int
    generation: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StateBlock:
    """Block `index` of `total` of the state, at most 1 MiB."""

    term: int
    generation: int
    index: int
    total: int
    payload: Any


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """Request the receiver's checkpoint of these layers after the VIEW's step, from which the member list
    says that the requester assembles its stage; answered with CheckpointBlocks."""

    term: int
    generation: int
    layers: Span


@dataclass(frozen=True, slots=True)
class CheckpointBlock:
    """Block `index` of `total` of a checkpoint on the sender's disk, at most 1 MiB.

    The receiver stores it on its disk too.  It holds the next stage (the first stage after the last), or has
    sent a CheckpointRequest.
    """

    term: int
    generation: int
    checkpoint: CheckpointInfo
    index: int
    total: int
    payload: Any


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Catch-up: request the block digests of the source's snapshot."""


@dataclass(frozen=True, slots=True)
class SnapshotDigests:
    """Block digests of the source's snapshot, taken after step `applied`.

    `payload`: u64 size in bytes of the part that all replicas share, u64 size of the source's own part, then
    16 bytes of blake2b for each block of at most 1 MiB, first of the shared part, then of the own part.
    """

    applied: int
    history: bytes
    payload: Any


@dataclass(frozen=True, slots=True)
class SnapshotBlocksRequest:
    """Catch-up: request these blocks of the snapshot taken after step `applied`."""

    applied: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SnapshotBlock:
    """Block `index` of the snapshot taken after step `applied`."""

    applied: int
    index: int
    payload: Any


@dataclass(frozen=True, slots=True)
class UpdatesRequest:
    """Catch-up: request the updates of all steps after `applied`, and every future one."""

    applied: int


@dataclass(frozen=True, slots=True)
class UpdateLogEntry:
    """The update of step `step`; `latest_step`: the source's last step.

    For `payload` see `runtime.state_transfer.update_log`.
    """

    step: int
    latest_step: int
    payload: Any


@dataclass(frozen=True, slots=True)
class SnapshotUnavailable:
    """The source cannot send what was requested, or no longer can."""

    reason: str


@dataclass(frozen=True, slots=True)
class ResidualBlock:
    """Block `index` of `total` of the residual of a member that leaves, as it was after step `applied`.

    The blocks together are one sparse payload of fp32 values; see `core.member.residual_transfer`.
    """

    term: int
    generation: int
    applied: int
    history: bytes
    index: int
    total: int
    payload: Any


@dataclass(frozen=True, slots=True)
class ResidualReply:
    """Answer to the last ResidualBlock: all of it was received and fits, or it is declined."""

    term: int
    generation: int
    is_accepted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """Forward `payload` to `to`.  It is encrypted for `to`: the relay can neither read nor alter it."""

    to: PeerId
    payload: Any


@dataclass(frozen=True, slots=True)
class RelayedMessage:
    """A payload that the sender, a relay, forwards from `origin`."""

    origin: PeerId
    payload: Any


@dataclass(frozen=True, slots=True)
class RelayFailed:
    """The relay could not forward a payload to `to`."""

    to: PeerId
    reason: str


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
