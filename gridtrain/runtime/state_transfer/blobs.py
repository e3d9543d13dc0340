"""A state on its way to a worker that lacks it: split into blocks by the sender, joined by the receiver.

    blobs  [a][bb][c]   ->   lengths | a | b | b | c    blocks of at most 1 MiB, in order

`gridtrain.core.member.incoming_state` decides who gives to whom; the content of a blob is never read here.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from gridtrain.core.messages import PeerId, StateBlock, StateDigest
from gridtrain.errors import LocalProtocolError, RemoteProtocolError, TransportError
from gridtrain.network.transport.interface import Transport

BLOCK_BYTES = 1 << 20
BACKLOG_BYTES = 4 << 20
"""How much is queued in the transport for one peer."""

MAX_STATE_BYTES = 64 << 30
MAX_BLOBS = 4096
DIGEST_BYTES = 32
MAX_STATE_REQUESTS = 32
"""Requests of one worker that are served in one generation; an honest one repeats its request only when a
connection broke."""

_REMEDY = "drop the state source; the next membership view names another one"


def count_blocks(nbytes: int) -> int:
    """Blocks of `BLOCK_BYTES` that so many bytes make, the last one shorter."""
    return -(-nbytes // BLOCK_BYTES)


def has_room(transport: Transport, peer: PeerId) -> bool:
    """Whether another block may be queued for the peer."""
    return transport.backlog_bytes(peer) < BACKLOG_BYTES


def split_blocks(blobs: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Blocks of at most `BLOCK_BYTES`; the first holds the blobs' lengths."""
    views = [memoryview(blob).cast("B") for blob in blobs]
    blocks: list[bytes | memoryview] = [struct.pack(f"<{len(views)}Q", *(len(view) for view in views))]
    for view in views:
        blocks += [view[i : i + BLOCK_BYTES] for i in range(0, len(view), BLOCK_BYTES)]
    return blocks


def state_digest(blobs: Sequence[bytes | memoryview]) -> bytes:
    """32 bytes of blake2b over the payloads of all blocks; takes about a second for a gigabyte."""
    total = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for block in split_blocks(blobs):
        total.update(block)
    return total.digest()


@dataclass(frozen=True, slots=True)
class _Request:
    term: int
    generation: int
    is_whole: bool
    blocks_received: int
    digest_only: bool


class BlobSender:
    """The sender's side: sends one captured state to all who asked for it, as the transport drains."""

    def __init__(self) -> None:
        self._waiting: dict[PeerId, _Request] = {}
        self._queues: dict[PeerId, deque[StateDigest | StateBlock]] = {}
        self._captured: tuple[int, Sequence[bytes | memoryview], bytes] = (0, [], b"")
        self._supplied = (0, False)  # the latest generation and extent for which the trainer was asked
        self._request_counts: Counter[tuple[PeerId, int]] = Counter()  # by peer and generation

    @property
    def requested(self) -> tuple[int, bool] | None:
        """What the trainer is to capture: for which generation, and whether the whole state."""
        wanted = max(((each.generation, each.is_whole) for each in self._waiting.values()), default=None)
        return wanted if wanted is not None and wanted > self._supplied else None

    def mark_supplied(self, generation: int, is_whole: bool) -> None:
        """The trainer was asked, and is not asked for this again, even where it has nothing to give."""
        self._supplied = max(self._supplied, (generation, is_whole))

    def request(
        self,
        peer: PeerId,
        term: int,
        generation: int,
        *,
        whole: bool = True,
        blocks_received: int = 0,
        digest_only: bool = False,
    ) -> None:
        """A peer asks for the state as of `generation`, or its first part; what was captured serves all.

        The number of requests is bounded: an answer is as long as the model, a request is short.

        Args:
            blocks_received: the blocks that the peer has already.
            digest_only: no blocks are wanted.
        """
        self._request_counts[peer, generation] += 1
        if _exceeds_request_limit(self._request_counts[peer, generation]):
            return
        self._waiting[peer] = _Request(term, generation, whole, blocks_received, digest_only)
        self._queues.pop(peer, None)
        self._queue_blocks()

    def store(self, generation: int, blobs: Sequence[bytes | memoryview], digest: bytes = b"") -> None:
        """The state for `generation`, or its first part.  `digest`: see `state_digest`; empty: none is
        sent."""
        self._captured = (generation, blobs, digest)
        self._queue_blocks()

    def drop_other_generations(self, generation: int) -> None:
        """Peers that asked in another generation ask again if they still lack the state.

        0: this worker has no rank, and gives its state to nobody.
        """
        self._waiting = {peer: each for peer, each in self._waiting.items() if each.generation == generation}
        for key in [key for key in self._request_counts if key[1] != generation]:
            del self._request_counts[key]
        if self._captured[0] != generation:
            self._captured = (0, [], b"")
        for peer, queue in list(self._queues.items()):
            if not queue or queue[0].generation != generation:
                del self._queues[peer]

    def clear(self) -> None:
        """The generation has started: its members hold the state, and it is about to change."""
        self._captured = (0, [], b"")
        self._waiting.clear()
        self._queues.clear()
        self._request_counts.clear()

    def _queue_blocks(self) -> None:
        generation, blobs, digest = self._captured
        for peer, asked in list(self._waiting.items()):
            if asked.generation != generation or (asked.is_whole and len(blobs) <= 1):
                continue
            del self._waiting[peer]
            queue = self._queues[peer] = deque()
            if asked.is_whole and digest:
                queue.append(StateDigest(asked.term, generation, digest))
            if asked.digest_only:
                continue
            blocks = split_blocks(blobs if asked.is_whole else blobs[:1])
            for index in range(asked.blocks_received, len(blocks)):
                queue.append(StateBlock(asked.term, generation, index, len(blocks), blocks[index]))

    def has_data(self, transport: Transport) -> bool:
        """Whether `send_pending` has something to send."""
        return any(has_room(transport, peer) for peer in self._queues)

    def send_pending(self, transport: Transport) -> int:
        """Queue blocks up to the bound of the backlog; returns how many."""
        sent = 0
        for peer, queue in list(self._queues.items()):
            try:
                while queue and has_room(transport, peer):
                    transport.send(peer, queue[0])
                    queue.popleft()
                    sent += 1
            except TransportError:
                queue.clear()  # a peer that connects again asks again
            if not queue:
                del self._queues[peer]
        return sent


class BlobReceiver:
    """The receiver's side.

    Block 0 is the table of the blobs' lengths, from which the number and the size of all other blocks follow:
    a state that is too large, or that does not match its table, is refused before its bytes arrive.  Blocks
    after a gap are dropped, because a connection that broke may have lost some; the receiver asks again, and
    block 0 starts over.

    Blocks that another receiver has forwarded count once all are there and have the state source's digest.

    Args:
        max_bytes: the largest state that this worker's model can have; `set_limit` changes it.
    """

    def __init__(self, max_bytes: int = MAX_STATE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._id = (0, 0)
        self._lengths: tuple[int, ...] = ()
        self._sizes: list[int] = []  # of all blocks, the table's first; empty: no table yet
        self._blocks: list[bytes] = []
        self._forwarded: list[bytes] = []  # blocks of the state that was taken, for others
        self._taken_blocks = 0  # number of blocks of the state that was taken
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._is_verified = True  # all blocks are from the state source itself
        self._expected_digest: tuple[int, bytes] = (0, b"")  # generation, digest of its state
        self._keep_blocks = False

    def set_limit(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def clear(self) -> None:
        """Drop what has arrived: another state is asked for."""
        self._id, self._blocks, self._sizes, self._forwarded, self._taken_blocks = (0, 0), [], [], [], 0

    def stop_forwarding(self) -> None:
        """Nothing is forwarded any more."""
        self._forwarded = []

    def set_expected_digest(self, generation: int, digest: bytes) -> None:
        """What the state source says of its state's digest."""
        self._expected_digest = (generation, digest)

    def received_blocks(self, generation: int) -> int:
        """Number of blocks of this generation's state that are here, or were taken."""
        return (len(self._blocks) or self._taken_blocks) if generation == self._id[1] else 0

    def forwardable_block(self, generation: int, index: int) -> tuple[int, bytes] | None:
        """The total number of blocks, and this one, to be forwarded; None: it is not here yet."""
        blocks = self._blocks or self._forwarded
        if generation != self._id[1] or index >= len(blocks):
            return None
        return len(self._sizes) or len(self._forwarded), blocks[index]

    def is_unverified(self, generation: int) -> bool:
        """All blocks are there, and the state source has not sent its digest yet."""
        return self._has_all(generation) and not self._is_verified and self._expected_digest[0] != generation

    def is_digest_mismatch(self, generation: int) -> bool:
        """All blocks are there, and their digest is not the state source's."""
        if self._is_verified or self._expected_digest[0] != generation:
            return False
        return self._has_all(generation) and self._expected_digest[1] != self._hash.digest()

    def _has_all(self, generation: int) -> bool:
        return generation == self._id[1] and 0 < len(self._sizes) == len(self._blocks)

    @property
    def held_bytes(self) -> int:
        return sum(len(block) for block in self._blocks)

    def remaining_bytes(self, generation: int) -> int:
        """Bytes of this generation's state that have not arrived yet; 0: none of it has."""
        return sum(self._sizes[len(self._blocks) :]) if generation == self._id[1] else 0

    def receive(self, block: StateBlock, *, vouched: bool = True, keep_blocks: bool = False) -> None:
        """Raises `RemoteProtocolError` for a block that cannot belong to the others.

        Args:
            vouched: it is from the state source itself, not forwarded.
            keep_blocks: blocks stay after `take_blobs`, until `stop_forwarding`, as they are forwarded.
        """
        self._keep_blocks = keep_blocks
        here = (block.term, block.generation)
        if here == self._id and (self._taken_blocks or 0 < len(self._sizes) == len(self._blocks)):
            return  # asked for twice; complete already
        payload = bytes(block.payload)
        if block.index == 0:
            self.clear()
            self._id = here
            self._lengths = _read_table(payload)
            _check_state(self._lengths, self._max_bytes)
            sizes = [len(payload), *_block_sizes(self._lengths)]
            _check_total(block.total, len(sizes))
            self._sizes, self._blocks, self._is_verified = sizes, [payload], vouched
            self._hash = hashlib.blake2b(payload, digest_size=DIGEST_BYTES)
            return
        if here != self._id or not self._sizes:
            return  # its table was lost with a connection
        _check_total(block.total, len(self._sizes))
        if block.index != len(self._blocks):
            return
        _check_block(block.index, len(payload), self._sizes[block.index])
        self._blocks.append(payload)
        self._is_verified = self._is_verified and vouched
        self._hash.update(payload)

    @property
    def is_complete(self) -> bool:
        """Of the generation of the latest blocks."""
        return self.is_complete_for(self._id[1])

    def is_complete_for(self, generation: int) -> bool:
        return self._has_all(generation) and (
            self._is_verified or self._expected_digest == (generation, self._hash.digest())
        )

    def take_blobs(self) -> tuple[int, int, list[bytes]]:
        """Term, generation and blobs of a complete state; the blocks are released.

        Raises `LocalProtocolError` if it is not complete."""
        if not self.is_complete:
            raise LocalProtocolError(f"a state of {len(self._sizes)} blocks was taken before they arrived")
        whole = b"".join(self._blocks[1:])
        self._forwarded, self._taken_blocks = self._blocks if self._keep_blocks else [], len(self._blocks)
        self._sizes = []  # first: the I/O thread may ask between the two what is lacking, and nothing is
        self._blocks = []
        blobs, offset = [], 0
        for length in self._lengths:
            blobs.append(whole[offset : offset + length])
            offset += length
        return *self._id, blobs


def _exceeds_request_limit(asks: int) -> bool:
    return asks > MAX_STATE_REQUESTS


def _read_table(payload: bytes) -> tuple[int, ...]:
    if len(payload) % 8 or len(payload) > 8 * MAX_BLOBS:
        raise RemoteProtocolError(
            f"the state's table of lengths has {len(payload)} bytes, must be a multiple of 8 and at most "
            f"{8 * MAX_BLOBS}",
            remedy=_REMEDY,
        )
    return struct.unpack(f"<{len(payload) // 8}Q", payload)


def _check_state(lengths: Sequence[int], max_bytes: int) -> None:
    if sum(lengths) > max_bytes:
        raise RemoteProtocolError(
            f"a state of {sum(lengths)} bytes; at most {max_bytes} are taken for this model", remedy=_REMEDY
        )


def _check_total(total: int, expected: int) -> None:
    if total != expected:
        raise RemoteProtocolError(
            f"a state of {total} blocks; its table of lengths makes {expected}", remedy=_REMEDY
        )


def _check_block(index: int, payload_bytes: int, expected_bytes: int) -> None:
    if payload_bytes != expected_bytes:
        raise RemoteProtocolError(
            f"block {index} of a state has {payload_bytes} bytes; its table of lengths makes "
            f"{expected_bytes}",
            remedy=_REMEDY,
        )


def _block_sizes(lengths: Sequence[int]) -> list[int]:
    """Of the blocks that `split_blocks` makes after the table."""
    return [min(BLOCK_BYTES, length - i) for length in lengths for i in range(0, length, BLOCK_BYTES)]
