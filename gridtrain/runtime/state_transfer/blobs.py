"""Splits a state into blocks for a waiting group and joins them; checks digests, sizes and request counts.

    blobs  [a][bb][c]   ->   lengths | a | b | b | c    blocks of at most 1 MiB, in order

`gridtrain.core.member.incoming_state` decides which worker sends the state to which worker.  A blob is one
part of a state; this module does not interpret it.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, deque
from collections.abc import Sequence

from gridtrain.core.group.member_events import SendState
from gridtrain.core.messages import PeerId, StateBlock, StateDigest
from gridtrain.errors import LocalProtocolError, RemoteProtocolError, TransportError
from gridtrain.network.transport.interface import Transport
from gridtrain.runtime.state_transfer.block_buffer import BLOCK_BYTES, BlockBuffer, BlockLayout

BACKLOG_BYTES = 4 << 20
"""While at least this many bytes are queued in the transport for a peer, no more blocks are queued for it."""

MAX_STATE_BYTES = 64 << 30
MAX_BLOBS = 4096
DIGEST_BYTES = 32
MAX_HASHED_PER_BLOCK = 4
"""Maximum number of blocks that are hashed when a block arrives.  More than one block is hashed only after a
transfer has been resumed."""

MAX_STATE_REQUESTS = 32
"""Maximum number of requests that are served for one worker in one generation.  A correct worker repeats its
request only after a connection has broken."""

Position = tuple[int, bytes]
"""The last applied step and the history, which together identify the state that members share."""

_REMEDY = "disconnect the state source and wait for the next membership view, which names another source"


def has_room(transport: Transport, peer: PeerId) -> bool:
    """Return whether the peer's queue in the transport has room for another block."""
    return transport.backlog_bytes(peer) < BACKLOG_BYTES


def split_blocks(blobs: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Split blobs into blocks of at most `BLOCK_BYTES`; the first block holds the blobs' lengths."""
    views = [memoryview(blob).cast("B") for blob in blobs]
    blocks: list[bytes | memoryview] = [struct.pack(f"<{len(views)}Q", *(len(view) for view in views))]
    for view in views:
        blocks += [view[i : i + BLOCK_BYTES] for i in range(0, len(view), BLOCK_BYTES)]
    return blocks


def state_digest(blobs: Sequence[bytes | memoryview]) -> bytes:
    """Return the 32-byte BLAKE2b digest of the payloads of all blocks.

    This takes about one second per gigabyte.
    """
    total = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for block in split_blocks(blobs):
        total.update(block)
    return total.digest()


class BlobSender:
    """The sender's side: sends a captured state to all peers that have requested it."""

    def __init__(self) -> None:
        self._waiting: dict[PeerId, SendState] = {}
        self._queues: dict[PeerId, deque[StateDigest | StateBlock]] = {}
        self._captured: tuple[int, Sequence[bytes | memoryview], bytes] = (0, [], b"")
        self._supplied = (0, False)  # generation and extent (is_whole) of the trainer's latest answer
        self._request_counts: Counter[tuple[PeerId, int]] = Counter()  # by peer and generation

    @property
    def requested(self) -> tuple[int, bool] | None:
        """The generation whose state the trainer has to capture, and whether the whole state is needed.

        None if no state has to be captured.
        """
        wanted = max(((each.generation, each.is_whole) for each in self._waiting.values()), default=None)
        return wanted if wanted is not None and wanted > self._supplied else None

    def mark_supplied(self, generation: int, is_whole: bool) -> None:
        """Record that the trainer has answered, even if it has no state, so that it is not asked again."""
        self._supplied = max(self._supplied, (generation, is_whole))

    def request(self, asked: SendState) -> None:
        """Queue the state of a generation for a peer that has requested it.

        All requests are answered from one captured state.  The number of requests is bounded, because a
        request is short but its answer may be as large as the model.
        """
        self._request_counts[asked.peer, asked.generation] += 1
        if self._request_counts[asked.peer, asked.generation] > MAX_STATE_REQUESTS:
            return
        self._waiting[asked.peer] = asked
        self._queues.pop(asked.peer, None)
        self._queue_blocks()

    def store(self, generation: int, blobs: Sequence[bytes | memoryview], digest: bytes = b"") -> None:
        """Store the captured state of `generation`, or its first blob, and queue its blocks.

        `digest` is the `state_digest` of the blobs; if it is empty, no digest is sent.
        """
        self._captured = (generation, blobs, digest)
        self._queue_blocks()

    def drop_other_generations(self, generation: int) -> None:
        """Drop the requests and the captured states of all generations except `generation`.

        A peer that still needs the state requests it again.  Everything is dropped for generation 0, which
        means that this worker has no rank.
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
        """Drop all requests and states.

        Call this method when the generation has started: its members then hold the state.
        """
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
            # At least one block is sent, because its `total` may reveal that earlier blocks are wrong.
            for index in range(min(asked.blocks_received, len(blocks) - 1), len(blocks)):
                queue.append(StateBlock(asked.term, generation, index, len(blocks), blocks[index]))

    def has_data(self, transport: Transport) -> bool:
        """Return whether `send_pending` can send a block now."""
        return any(has_room(transport, peer) for peer in self._queues)

    def send_pending(self, transport: Transport) -> int:
        """Send blocks until each peer's queue in the transport is full; return the number of blocks sent."""
        sent = 0
        for peer, queue in list(self._queues.items()):
            try:
                while queue and has_room(transport, peer):
                    transport.send(peer, queue[0])
                    queue.popleft()
                    sent += 1
            except TransportError:
                queue.clear()  # a peer that reconnects repeats its request
            if not queue:
                del self._queues[peer]
        return sent


class BlobReceiver:
    """The receiver's side: joins the blocks of a state.

    Block 0 is the table of the blobs' lengths, which determine the number and the size of all other blocks.
    A state that is too large, or whose number of blocks does not match its table, is therefore rejected
    before its content arrives.  Blocks after a gap are dropped, because a broken connection may have lost
    blocks, and the receiver requests the missing blocks again.  If the state source itself sends block 0, the
    transfer starts over.

    Blocks that another receiver has forwarded are accepted when all blocks have arrived and their digest is
    the digest that the state source has announced.

    If the source is lost, the next generation begins with the same state, and another member sends the state.
    `begin` keeps the received blocks of the shared blobs.  The first blob may differ between members, so it
    is requested from the new source, followed by the first missing block and all later blocks.  The digest
    decides whether the result is accepted, as for forwarded blocks:

        from anna     [lengths][first][shared 1][shared 2]     anna is lost
        from bert     [length ][first]                         `lacks_first_blob`
        combined      [lengths][first][shared 1][shared 2]
        from bert                                         [shared 3][shared 4]

    Attributes:
        max_bytes: the size in bytes of the largest state that this worker's model can have.
    """

    def __init__(self, max_bytes: int = MAX_STATE_BYTES) -> None:
        self.max_bytes = max_bytes
        self._requested: tuple[int, Position | None] = (0, None)  # generation, position of its state
        self._expected_digest: tuple[int, bytes] = (0, b"")  # generation, digest of the source's state
        self._keep_blocks = False
        self.clear()

    def clear(self) -> None:
        """Drop all received blocks.  Call this method before another state is requested."""
        self._id = (0, 0)
        self._table = b""
        self._buffer: BlockBuffer | None = None
        # Numbers of blocks, including the table: in the state (0 until the table arrives), and received.
        self._total = self._count = 0
        self._is_taken = False
        self._is_verified = True  # all blocks come from the state source itself
        self._salvaged: BlockBuffer | None = None  # a lost source's blocks, until the first blob arrives
        self._is_resumed = False  # the received blocks include blocks of a lost source
        self._is_contradicted = False  # the lost source's blocks do not match the current source's state
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._hashed_count = 0

    def begin(self, generation: int, position: Position | None) -> None:
        """Prepare for the state of this generation, which is about to be requested.

        Args:
            generation: the generation.
            position: the position of the state.  Received blocks of a state at the same position are kept.
                If it is None, no blocks are kept.
        """
        if generation == self._requested[0]:
            return
        before = self._buffer if position is not None and position == self._requested[1] else None
        self.clear()
        self._requested = generation, position
        if before is not None and len(before.layout.lengths) > 1:
            first_shared = before.layout.first_block(1)
            self._salvaged = before if any(index >= first_shared for index in before.received) else None

    @property
    def lacks_first_blob(self) -> bool:
        """Whether blocks of a lost source were kept, and the current source's first blob is still missing."""
        return self._salvaged is not None

    def stop_forwarding(self) -> None:
        """Release the blocks that were kept only to be forwarded."""
        self._keep_blocks = False
        if self._is_taken:
            self._buffer, self._table = None, b""

    def set_expected_digest(self, generation: int, digest: bytes) -> None:
        """Set the digest that the state source has announced for its state."""
        self._expected_digest = (generation, digest)

    def received_blocks(self, generation: int) -> int:
        """Return the number of received blocks of this generation's state, including blocks already taken."""
        return self._count if generation == self._id[1] else 0

    def forwardable_block(self, generation: int, index: int) -> tuple[int, bytes | memoryview] | None:
        """Return the total number of blocks, and block `index`; None if the block cannot be forwarded yet."""
        is_here = self._buffer is not None and self._salvaged is None and index < self._count
        return (self._total, self._block(index)) if generation == self._id[1] and is_here else None

    def is_unverified(self, generation: int) -> bool:
        """Return whether all blocks have arrived, but not the digest that verifies them."""
        return self._has_all(generation) and not self._is_verified and self._expected_digest[0] != generation

    def is_digest_mismatch(self, generation: int) -> bool:
        """Return whether the received state differs from the state source's state."""
        if generation == self._id[1] and self._is_contradicted:
            return True
        if self._is_verified or self._expected_digest[0] != generation:
            return False
        return self._has_all(generation) and self._expected_digest[1] != self._digest()

    def _has_all(self, generation: int) -> bool:
        is_whole = 0 < self._total == self._count and self._salvaged is None
        return generation == self._id[1] and is_whole and not self._is_taken

    @property
    def held_bytes(self) -> int:
        """The number of bytes in the received blocks."""
        buffers = (buffer for buffer in (self._buffer, self._salvaged) if buffer is not None)
        return len(self._table) + sum(buffer.received_bytes for buffer in buffers)

    def remaining_bytes(self, generation: int) -> int:
        """Return the number of missing bytes of this generation's state; 0 if no block has arrived."""
        buffers = (buffer for buffer in (self._buffer, self._salvaged) if buffer is not None)
        return sum(buffer.missing_bytes for buffer in buffers) if generation == self._id[1] else 0

    def receive(self, block: StateBlock, *, vouched: bool = True, keep_blocks: bool = False) -> None:
        """Store a received block.

        Args:
            block: the received block.
            vouched: whether the block comes from the state source itself rather than from a member that
                forwards the state.
            keep_blocks: whether to keep the blocks after `take_blobs` until `stop_forwarding`, so that they
                can be forwarded.

        Raises:
            RemoteProtocolError: the block does not match the other blocks.
        """
        self._keep_blocks = keep_blocks
        here = (block.term, block.generation)
        is_done = self._is_taken or self._is_contradicted or self._has_all(block.generation)
        if here == self._id and is_done:
            return  # the state is complete, but was requested twice
        if here == self._id and block.index == 0 and not vouched:
            return  # only the state source itself may start the transfer over
        if block.index == 0:
            self._begin_state(here, bytes(block.payload), block.total, vouched=vouched)
        elif here == self._id and self._buffer is not None:  # without a buffer, the table has been lost
            self._add_block(self._buffer, block, vouched=vouched)
        if self._salvaged is not None and 0 < self._total == self._count:
            self._resume()

    def _begin_state(self, here: tuple[int, int], table: bytes, total: int, *, vouched: bool) -> None:
        salvaged = self._salvaged
        self.clear()
        lengths = _read_table(table)
        if sum(lengths) > self.max_bytes:
            raise RemoteProtocolError(
                f"the state has {sum(lengths)} bytes; this worker accepts at most {self.max_bytes} bytes",
                remedy=_REMEDY,
            )
        _check_total(total, 1 + BlockLayout(lengths).block_count)
        self._id, self._table, self._total, self._count = here, table, total, 1
        self._buffer, self._is_verified = BlockBuffer(lengths), vouched
        self._salvaged = salvaged if len(lengths) == 1 else None  # otherwise the whole state arrives
        self._advance_hash(1)

    def _add_block(self, buffer: BlockBuffer, block: StateBlock, *, vouched: bool) -> None:
        if self._is_resumed and block.total != self._total:
            self._is_contradicted = True  # it is unknown which of the two sources is wrong
            return
        _check_total(block.total, self._total)
        if block.index != self._count:
            return
        nbytes = buffer.layout.place(block.index - 1).nbytes
        if len(block.payload) != nbytes:
            if self._is_resumed:
                self._is_contradicted = True
                return
            raise RemoteProtocolError(
                f"block {block.index} of a state is {len(block.payload)} bytes long; according to the "
                f"state's table of lengths, it must be {nbytes} bytes long",
                remedy=_REMEDY,
            )
        buffer.store(block.index - 1, block.payload)
        self._count += 1
        self._is_verified = self._is_verified and vouched
        self._advance_hash(MAX_HASHED_PER_BLOCK)

    def _resume(self) -> None:
        """Combine the current source's first blob with the lost source's shared blobs."""
        first, salvaged, here = self._buffer, self._salvaged, self._id
        assert first is not None and salvaged is not None
        lengths = (len(first.parts[0]), *salvaged.layout.lengths[1:])
        self.clear()
        buffer = self._buffer = BlockBuffer.of_parts([*first.parts, *salvaged.parts[1:]])
        buffer.mark_received(range(first.layout.block_count))
        skipped = salvaged.layout.first_block(1) - first.layout.block_count
        buffer.mark_received(i - skipped for i in salvaged.received if i >= salvaged.layout.first_block(1))
        self._id, self._table = here, struct.pack(f"<{len(lengths)}Q", *lengths)
        self._total, self._count = 1 + buffer.layout.block_count, 1 + len(buffer.received)
        self._is_verified, self._is_resumed = False, True

    def _block(self, index: int) -> bytes | memoryview:
        assert self._buffer is not None
        return self._buffer.block(index - 1) if index else self._table

    def _advance_hash(self, most: int) -> None:
        """Hash at most `most` received blocks.

        The number is limited, because many blocks have not been hashed yet when a transfer is resumed.
        """
        for index in range(self._hashed_count, min(self._count, self._hashed_count + most)):
            self._hash.update(self._block(index))
            self._hashed_count += 1

    def _digest(self) -> bytes:
        self._advance_hash(self._count)
        return self._hash.digest()

    def is_complete_for(self, generation: int) -> bool:
        """Return whether the state of this generation is complete and verified."""
        if not self._has_all(generation):
            return False
        is_expected = self._expected_digest[0] == generation
        return self._is_verified or (is_expected and self._expected_digest[1] == self._digest())

    def take_blobs(self) -> tuple[int, int, list[memoryview]]:
        """Return the term, the generation and the read-only blobs of a complete state.

        The receiver then releases the blobs, unless blocks are still forwarded from the same memory.  Raises
        `LocalProtocolError` if the state is not complete.
        """
        buffer = self._buffer
        if buffer is None or not self.is_complete_for(self._id[1]):
            raise LocalProtocolError(
                f"a state of {self._total} blocks was taken before all blocks had arrived and were verified"
            )
        self._is_taken = True
        self._buffer, self._table = (buffer, self._table) if self._keep_blocks else (None, b"")
        return *self._id, [part.toreadonly() for part in buffer.parts]


def _read_table(payload: bytes) -> tuple[int, ...]:
    if len(payload) % 8 or len(payload) > 8 * MAX_BLOBS:
        raise RemoteProtocolError(
            f"the state's table of lengths is {len(payload)} bytes long; its size must be a multiple of 8, "
            f"at most {8 * MAX_BLOBS} bytes",
            remedy=_REMEDY,
        )
    return struct.unpack(f"<{len(payload) // 8}Q", payload)


def _check_total(total: int, expected: int) -> None:
    if total != expected:
        raise RemoteProtocolError(
            f"the state has {total} blocks; according to its table of lengths, it must have {expected}",
            remedy=_REMEDY,
        )
