"""A joiner's state on its way: cut into blocks on one side, put together on the other.

Decides nothing about who gives to whom (`protocol.state_transfer` does) and opens no blob.

    blobs  [a][bb][c]   ->   lengths | a | b | b | c    blocks of at most 1 MiB, in order
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gridtrain.core.messages import PeerId, StateBlock, StateDigest
from gridtrain.errors import LocalProtocolError, RemoteProtocolError, TransportError
from gridtrain.network.transport.interface import Transport

BLOCK_BYTES = 1 << 20
BACKLOG_BYTES = 4 << 20  # how much is queued in the transport at a time
MAX_STATE_BYTES = 64 << 30
MAX_BLOBS = 4096
DIGEST_BYTES = 32
MAX_STATE_REQUESTS = 32
"""How often one joiner is served in one generation; an honest one asks again when a connection broke."""

_REMEDY = "drop the donor; the next View names another one"


def split_blocks(blobs: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Blocks of at most `BLOCK_BYTES`; the first holds the blobs' lengths."""
    views = [memoryview(blob).cast("B") for blob in blobs]
    blocks: list[bytes | memoryview] = [struct.pack(f"<{len(views)}Q", *(len(view) for view in views))]
    for view in views:
        blocks += [view[i : i + BLOCK_BYTES] for i in range(0, len(view), BLOCK_BYTES)]
    return blocks


def state_digest(blobs: Sequence[bytes | memoryview]) -> bytes:
    """32 bytes of blake2b over the payloads of all blocks: about a second for a gigabyte."""
    total = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for block in split_blocks(blobs):
        total.update(block)
    return total.digest()


@dataclass(frozen=True, slots=True)
class _Request:
    term: int
    generation: int
    is_whole: bool
    first_block: int
    digest: bool


class BlobSender:
    """The donor's side: sends the captured state to whoever asked, as the transport drains."""

    def __init__(self) -> None:
        self._waiting: dict[PeerId, _Request] = {}
        self._queues: dict[PeerId, deque[StateDigest | StateBlock]] = {}
        self._captured: tuple[int, Sequence[bytes | memoryview], bytes] = (0, [], b"")
        self._request_counts: dict[tuple[PeerId, int], int] = {}

    @property
    def requested(self) -> tuple[int, bool]:
        """Generation whose joiners wait for the trainer to capture, and whether the whole; 0: none."""
        return max(((ask.generation, ask.is_whole) for ask in self._waiting.values()), default=(0, False))

    def request(
        self,
        peer: PeerId,
        term: int,
        generation: int,
        *,
        whole: bool = True,
        have: int = 0,
        digest: bool = False,
    ) -> None:
        """A joiner wants the state as of `generation`, or its first part; what was captured serves all.

        Bounded: an answer is as long as the model, a request is short.

        Args:
            have: so many blocks are there already.
            digest: nothing but the digest is wanted.
        """
        asks = self._request_counts[peer, generation] = self._request_counts.get((peer, generation), 0) + 1
        if _exceeds_request_limit(asks):
            return
        self._waiting[peer] = _Request(term, generation, whole, have, digest)
        self._queues.pop(peer, None)
        self._queue_blocks()

    def store(self, generation: int, blobs: Sequence[bytes | memoryview], digest: bytes = b"") -> None:
        """The trainer captured its state for `generation`; `digest`: see `state_digest`; empty: none."""
        self._captured = (generation, blobs, digest)
        self._queue_blocks()

    def drop_other_generations(self, generation: int) -> None:
        """Whoever asked in another generation asks anew, if it still lacks the state; 0: this worker has no
        seat, and gives to nobody."""
        self._waiting = {peer: ask for peer, ask in self._waiting.items() if ask.generation == generation}
        self._request_counts = {at: asks for at, asks in self._request_counts.items() if at[1] == generation}
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
        for peer, ask in list(self._waiting.items()):
            if ask.generation == generation and (len(blobs) > 1 or not ask.is_whole):
                del self._waiting[peer]
                blocks = split_blocks(blobs if ask.is_whole else blobs[:1])
                queue = self._queues[peer] = deque()
                if ask.is_whole and digest:
                    queue.append(StateDigest(ask.term, generation, digest))
                for index, block in enumerate(blocks[ask.first_block :] if not ask.digest else ()):
                    queue.append(
                        StateBlock(ask.term, generation, ask.first_block + index, len(blocks), block)
                    )

    def has_data(self, transport: Transport) -> bool:
        return any(transport.backlog_bytes(peer) < BACKLOG_BYTES for peer in self._queues)

    def send_pending(self, transport: Transport) -> int:
        """Queue blocks up to the backlog's bound; returns how many."""
        sent = 0
        for peer, queue in list(self._queues.items()):
            try:
                while queue and transport.backlog_bytes(peer) < BACKLOG_BYTES:
                    transport.send(peer, queue[0])
                    queue.popleft()
                    sent += 1
            except TransportError:
                queue.clear()  # a joiner that comes back asks again
            if not queue:
                del self._queues[peer]
        return sent


class BlobReceiver:
    """The joiner's side.  Block 0 is the table of the blobs' lengths, from which the number and the size
    of all other blocks follow: a state that is too large, or that lies about itself, is refused before
    its bytes come.  What comes after a gap is dropped, because a connection that broke may have lost
    some; the joiner asks again, and block 0 begins anew.

    What another joiner has passed on counts once all of it is there and has the donor's digest.

    Args:
        max_bytes: the largest state that this worker's model can have; `allow` changes it.

    Attributes:
        keeps: the blocks stay after they were read, until `release`, as they are passed on.
    """

    def __init__(self, max_bytes: int = MAX_STATE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._id = (0, 0)
        self._lengths: tuple[int, ...] = ()
        self._sizes: list[int] = []  # of all blocks, the table's first; empty: no table has come
        self._blocks: list[bytes] = []
        self._forwarded: list[bytes] = []  # of the state that was read, for others
        self._read = 0  # so many blocks it had
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._is_verified = True  # the donor itself has given all blocks
        self._expected_digest: tuple[int, bytes] = (0, b"")  # generation, and the digest of its state
        self.keeps_blocks = False

    def set_limit(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def clear(self) -> None:
        """What came is of no use: another one is asked for."""
        self._id, self._blocks, self._sizes, self._forwarded, self._read = (0, 0), [], [], [], 0

    def stop_forwarding(self) -> None:
        """Nothing is passed on any more."""
        self._forwarded = []

    def set_expected_digest(self, generation: int, digest: bytes) -> None:
        """The donor says what its state's digest is."""
        self._expected_digest = (generation, digest)

    def received_blocks(self, generation: int) -> int:
        """So many blocks of this generation's state are here, or were."""
        return (len(self._blocks) or self._read) if generation == self._id[1] else 0

    def forwardable_block(self, generation: int, index: int) -> tuple[int, bytes] | None:
        """How many blocks there are, and this one, to be passed on; None: it has not come yet."""
        blocks = self._blocks or self._forwarded
        if generation != self._id[1] or index >= len(blocks):
            return None
        return len(self._sizes) or len(self._forwarded), blocks[index]

    def is_unverified(self, generation: int) -> bool:
        """All of it is there, and the donor has not said yet whether it is right."""
        return self._has_all(generation) and not self._is_verified and self._expected_digest[0] != generation

    def is_digest_mismatch(self, generation: int) -> bool:
        """All of it is there, and it is not what the donor has."""
        told = self._expected_digest[0] == generation and not self._is_verified
        return self._has_all(generation) and told and self._expected_digest[1] != self._hash.digest()

    def _has_all(self, generation: int) -> bool:
        return generation == self._id[1] and 0 < len(self._sizes) == len(self._blocks)

    @property
    def held_bytes(self) -> int:
        return sum(len(block) for block in self._blocks)

    def remaining_bytes(self, generation: int) -> int:
        """Of the state for this generation, so much has not come yet; 0: nothing of it has."""
        return sum(self._sizes[len(self._blocks) :]) if generation == self._id[1] else 0

    def receive(self, block: StateBlock, *, vouched: bool = True) -> None:
        """Raises `RemoteProtocolError` for a block that cannot belong to the others.

        `vouched`: it is the donor's, not passed on by another.
        """
        here = (block.term, block.generation)
        if here == self._id and (self._read or (self._sizes and len(self._blocks) == len(self._sizes))):
            return  # asked for twice, complete already
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
        """For the generation of which the latest blocks are."""
        return self.is_complete_for(self._id[1])

    def is_complete_for(self, generation: int) -> bool:
        return self._has_all(generation) and (
            self._is_verified or self._expected_digest == (generation, self._hash.digest())
        )

    def take_blobs(self) -> tuple[int, int, list[bytes]]:
        """Term, generation and the donor's blobs, of a complete state; the blocks are released."""
        if not self.is_complete:
            raise LocalProtocolError(f"a state of {len(self._sizes)} blocks is read before they are there")
        whole = b"".join(self._blocks[1:])
        self._forwarded, self._read = self._blocks if self.keeps_blocks else [], len(self._blocks)
        self._sizes = []  # first: the loop's thread may ask between the two what is lacking, and all is here
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
    """As `cut` makes them, after the table."""
    return [min(BLOCK_BYTES, length - i) for length in lengths for i in range(0, length, BLOCK_BYTES)]
