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
    """So many bytes of bulk messages from you are dealt with, counted since the connection came up.

    A sender never has more than `transport.credits.WINDOW_BYTES` of them under way.
    """

    total_bytes: UInt


@message(25)
@dataclass(frozen=True, slots=True)
class CatchUpReport:
    """This worker, which is no member, holds the state after step `applied` and follows the updates."""

    applied: AppliedStep
    history: Digest


@message(45)
@dataclass(frozen=True, slots=True)
class CatchUpFrom:
    """Take over the state of these members while they train on, and follow; then say `Caught`."""

    term: UInt
    sources: Annotated[tuple[tuple[PeerId, Address], ...], AtMost(16)]


@message(46)
@dataclass(frozen=True, slots=True)
class ServeCatchUp:
    """Take an image of the state after step `step` or the first one later; `to`: who may have it, and the
    updates since.  The whole list: who is not in it gets no more."""

    term: UInt
    step: AppliedStep
    receivers: Annotated[tuple[PeerId, ...], AtMost(64)]


@message(54)
@dataclass(frozen=True, slots=True)
class Ping:
    nonce: UInt


@message(55)
@dataclass(frozen=True, slots=True)
class Pong:
    nonce: UInt


MAX_STATE_BLOCKS = 1 << 16
"""64 GiB.  A receiver takes less: what its own model needs (`runtime.state_transfer`)."""

MAX_RESIDUAL_BLOCKS = 16
"""16 MiB, which is within one window of flow control."""

BURST_MESSAGES, BURST_MESSAGE_BYTES = 16, 16 * 1024
"""Messages of one burst, and bytes of each: 256 KiB."""


@message(65)
@dataclass(frozen=True, slots=True)
class Burst:
    """Message `index` of a burst that measures a link; only the last 8 bytes of the last one matter."""

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
    """The last message of this burst is here: `proof` is how it ends."""

    nonce: UInt
    proof: Proof


@message(86)
@dataclass(frozen=True, slots=True)
class BurstRequest:
    """Send me a burst with this nonce: `gridtrain doctor` measures the way back."""

    nonce: UInt


@message(56)
@dataclass(frozen=True, slots=True)
class StateRequest:
    """A joining member asks for the state; `whole` False: only what followers do not have.

    `have`: so many of its blocks are here.  `digest`: only that is wanted, as another member gives the rest.
    """

    term: UInt
    generation: UInt
    is_whole: bool = True
    blocks_received: Count = 0
    digest_only: bool = False


@message(68)
@dataclass(frozen=True, slots=True)
class StateDigest:
    """A donor's answer to StateRequest before any block: blake2b-256 over the payloads of all blocks."""

    term: UInt
    generation: UInt
    digest: Digest


@message(57)
@dataclass(frozen=True, slots=True)
class StateBlock:
    """Block `index` of `total` of the donor's state, at most 1 MiB."""

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
    """Send me, with Copy, your checkpoint of these blocks after the View's step.

    By the Roster I put my stage together from it.
    """

    term: UInt
    generation: UInt
    layers: Span

    def find_problem(self) -> str | None:
        return self.layers.find_problem_of_layers()


@message(79)
@dataclass(frozen=True, slots=True)
class CheckpointBlock:
    """Part `index` of `total` of a checkpoint on the sender's disk, at most 1 MiB.

    The receiver, which holds the next stage (after the last one the first), or has asked for it with
    PieceAsk, keeps it on its disk as well.
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
    """A follower asks a donor for the table of its image."""


@message(71)
@dataclass(frozen=True, slots=True)
class SnapshotDigests:
    """The donor's image is of the state after step `applied`.

    `payload`: u64 bytes of the common part, u64 bytes of the donor's own part, then for each block of at most
    1 MiB of the one and of the other 16 bytes of blake2b.
    """

    applied: AppliedStep
    history: Digest
    payload: Payload


@message(72)
@dataclass(frozen=True, slots=True)
class SnapshotBlocksRequest:
    """The follower wants these blocks of the image of `applied`."""

    applied: AppliedStep
    blocks: Annotated[tuple[Count, ...], AtMost(64)]


@message(73)
@dataclass(frozen=True, slots=True)
class SnapshotBlock:
    applied: AppliedStep
    index: Count
    payload: Payload

    def find_problem(self) -> str | None:
        return find_problem_of_size(self.payload, MAX_BLOCK_BYTES)


@message(74)
@dataclass(frozen=True, slots=True)
class UpdatesRequest:
    """The follower wants the updates of all steps after `applied`, and each one to come."""

    applied: AppliedStep


@message(75)
@dataclass(frozen=True, slots=True)
class UpdateLogEntry:
    """What step `step` did; `latest`: the donor's last one.  `payload`: see `runtime.updates`."""

    step: UInt
    latest_step: UInt
    payload: Payload


@message(76)
@dataclass(frozen=True, slots=True)
class SnapshotUnavailable:
    """The donor cannot give what was asked for (any more)."""

    reason: Reason


@message(63)
@dataclass(frozen=True, slots=True)
class ResidualBlock:
    """Piece `index` of `total` of the residual of a member that leaves, as it stood after step `applied`.

    Together they are one sparse payload of fp32 values.  To a neighbour in the ring (`protocol.handover`).
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
    """Answer to HandOver, once: all of it is there and fits, or is not wanted."""

    term: UInt
    generation: UInt
    is_accepted: bool
    reason: Reason


@message(60)
@dataclass(frozen=True, slots=True)
class RelayRequest:
    """Pass `payload` on to `to`.  It is sealed for `to`: the relay can neither read nor alter it."""

    to: PeerId
    payload: Payload


@message(61)
@dataclass(frozen=True, slots=True)
class RelayedMessage:
    """What `origin` gave to the relay that sends this."""

    origin: PeerId
    payload: Payload


@message(62)
@dataclass(frozen=True, slots=True)
class RelayFailed:
    """The relay could not pass something on to `to`."""

    to: PeerId
    reason: Reason
