"""Messages that carry state between workers, measure links, and pass through relays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gridtrain.core.messages.types import CheckpointInfo, PeerId, Span


@dataclass(frozen=True, slots=True)
class Credit:
    """So many bytes of bulk messages from you are dealt with, counted since the connection came up.

    A sender never has more than `transport.credits.WINDOW_BYTES` of them under way.
    """

    total_bytes: int


@dataclass(frozen=True, slots=True)
class CatchUpReport:
    """This worker, which is no member, holds the state after step `applied` and follows the updates."""

    applied: int
    history: bytes


@dataclass(frozen=True, slots=True)
class CatchUpFrom:
    """Take over the state of these members while they train on, and follow; then say `Caught`."""

    term: int
    sources: tuple[tuple[PeerId, str], ...]


@dataclass(frozen=True, slots=True)
class ServeCatchUp:
    """Take an image of the state after step `step` or the first one later; `to`: who may have it, and the
    updates since.  The whole list: who is not in it gets no more."""

    term: int
    step: int
    receivers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Ping:
    nonce: int


@dataclass(frozen=True, slots=True)
class Pong:
    nonce: int


BURST_MESSAGES, BURST_MESSAGE_BYTES = 16, 16 * 1024
"""Messages of one burst, and bytes of each: 256 KiB."""


@dataclass(frozen=True, slots=True)
class Burst:
    """Message `index` of a burst that measures a link; only the last 8 bytes of the last one matter."""

    nonce: int
    index: int
    payload: Any


@dataclass(frozen=True, slots=True)
class BurstReceived:
    """The last message of this burst is here: `proof` is how it ends."""

    nonce: int
    proof: bytes


@dataclass(frozen=True, slots=True)
class BurstRequest:
    """Send me a burst with this nonce: `gridtrain doctor` measures the way back."""

    nonce: int


@dataclass(frozen=True, slots=True)
class StateRequest:
    """A joining member asks for the state; `whole` False: only what followers do not have.

    `have`: so many of its blocks are here.  `digest`: only that is wanted, as another member gives the rest.
    """

    term: int
    generation: int
    is_whole: bool = True
    blocks_received: int = 0
    digest_only: bool = False


@dataclass(frozen=True, slots=True)
class StateDigest:
    """A donor's answer to StateRequest before any block: blake2b-256 over the payloads of all blocks."""

    term: int
    generation: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StateBlock:
    """Block `index` of `total` of the donor's state, at most 1 MiB."""

    term: int
    generation: int
    index: int
    total: int
    payload: Any


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """Send me, with Copy, your checkpoint of these blocks after the View's step.

    By the Roster I put my stage together from it.
    """

    term: int
    generation: int
    layers: Span


@dataclass(frozen=True, slots=True)
class CheckpointBlock:
    """Part `index` of `total` of a checkpoint on the sender's disk, at most 1 MiB.

    The receiver, which holds the next stage (after the last one the first), or has asked for it with
    PieceAsk, keeps it on its disk as well.
    """

    term: int
    generation: int
    checkpoint: CheckpointInfo
    index: int
    total: int
    payload: Any


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """A follower asks a donor for the table of its image."""


@dataclass(frozen=True, slots=True)
class SnapshotDigests:
    """The donor's image is of the state after step `applied`.

    `payload`: u64 bytes of the common part, u64 bytes of the donor's own part, then for each block of at most
    1 MiB of the one and of the other 16 bytes of blake2b.
    """

    applied: int
    history: bytes
    payload: Any


@dataclass(frozen=True, slots=True)
class SnapshotBlocksRequest:
    """The follower wants these blocks of the image of `applied`."""

    applied: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SnapshotBlock:
    applied: int
    index: int
    payload: Any


@dataclass(frozen=True, slots=True)
class UpdatesRequest:
    """The follower wants the updates of all steps after `applied`, and each one to come."""

    applied: int


@dataclass(frozen=True, slots=True)
class UpdateLogEntry:
    """What step `step` did; `latest`: the donor's last one.  `payload`: see `runtime.updates`."""

    step: int
    latest_step: int
    payload: Any


@dataclass(frozen=True, slots=True)
class SnapshotUnavailable:
    """The donor cannot give what was asked for (any more)."""

    reason: str


@dataclass(frozen=True, slots=True)
class ResidualBlock:
    """Piece `index` of `total` of the residual of a member that leaves, as it stood after step `applied`.

    Together they are one sparse payload of fp32 values.  To a neighbour in the ring (`protocol.handover`).
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
    """Answer to HandOver, once: all of it is there and fits, or is not wanted."""

    term: int
    generation: int
    is_accepted: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """Pass `payload` on to `to`.  It is sealed for `to`: the relay can neither read nor alter it."""

    to: PeerId
    payload: Any


@dataclass(frozen=True, slots=True)
class RelayedMessage:
    """What `origin` gave to the relay that sends this."""

    origin: PeerId
    payload: Any


@dataclass(frozen=True, slots=True)
class RelayFailed:
    """The relay could not pass something on to `to`."""

    to: PeerId
    reason: str
