"""Snapshots of the state for catch-up: a receiver requests their blocks from several members at once.

    sources  anna   table T1 --+   the table that most sources have is chosen; on a tie, the table of the
             bert   table T1 --+-> later step, then that of the source added first; anna and bert share the
             carl   table T2       blocks of T1, and no blocks are requested from carl

    receiver  --SnapshotBlocksRequest [0 1 2 3]--> anna      at most WINDOW blocks in flight from each source
              --SnapshotBlocksRequest [4 5 6 7]--> bert      if a source leaves, other sources send its blocks
              <--SnapshotBlock 4------------------ bert      checked against the table, then stored

No more blocks are requested from a source that is silent or far slower than the other sources, unless it is
the only source.  If all sources are lost, the received blocks are kept.  From the next snapshot, which may be
the state after another step, only the blocks that are missing or whose digests differ are requested.

A snapshot has two parts.  The private part (such as the model's buffers) may differ between members, so it is
requested from only one source.  The blocks of the shared part have the same digests on all sources.
"""

from __future__ import annotations

import hashlib
import logging
import math
import struct
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from gridtrain.core import messages as m
from gridtrain.errors import RemoteProtocolError
from gridtrain.runtime.state_transfer.block_buffer import (
    BLOCK_BYTES,
    BlockBuffer,
    BlockLayout,
    allocate,
    count_blocks,
)

log = logging.getLogger("gridtrain")

PeerMessages = list[tuple[m.PeerId, m.Message]]
"""Messages to be sent now, each with its recipient."""

WINDOW = 4
"""Maximum number of blocks that are requested from one source at a time."""

SETTLE_S, LONGEST_SETTLE_S = 2.0, 20.0
"""Time to wait for more tables after the first table has arrived.  The first value applies if most sources
have sent their tables, the second value otherwise."""

BLOCK_TIMEOUT_S, SLOWEST_FACTOR = 10.0, 8.0
"""A source is too slow if it has sent no block for at least `BLOCK_TIMEOUT_S`, and for at least
`SLOWEST_FACTOR` times the mean time that the fastest source needs for a block.  The blocks of a slow
source are then requested from the other sources."""

MAX_QUEUED = 64
SHARED = 0
"""Index of the shared part; the private part follows it."""

_TABLE = struct.Struct("<2Q")
_DIGEST_BYTES = 16
_invalid = partial(RemoteProtocolError, remedy="disconnect this source; request the state from other sources")


def block_digest(block: bytes | memoryview) -> bytes:
    """Return the 16-byte BLAKE2b digest of a block."""
    return hashlib.blake2b(block, digest_size=_DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The state after step `applied` in two parts, and the table of its blocks' digests."""

    applied: int
    history: bytes
    private_part: memoryview
    shared_part: memoryview
    table: bytes

    @classmethod
    def build(
        cls, applied: int, history: bytes, private: bytes | memoryview, shared: bytes | memoryview
    ) -> StateSnapshot:
        """Build a snapshot and its table.  This takes about one second per gigabyte."""
        parts = memoryview(shared), memoryview(private)
        digests = [
            block_digest(part[i : i + BLOCK_BYTES])
            for part in parts
            for i in range(0, len(part), BLOCK_BYTES)
        ]
        table = _TABLE.pack(len(shared), len(private)) + b"".join(digests)
        return cls(applied, history, parts[1], parts[0], table)

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout((len(self.shared_part), len(self.private_part)))

    def block(self, index: int) -> memoryview | None:
        """Return the block with this index, or None if the snapshot has no such block."""
        layout = self.layout
        if index >= layout.block_count:
            return None
        part, offset, nbytes = layout.place(index)
        return (self.shared_part, self.private_part)[part][offset : offset + nbytes]


class SnapshotSender:
    """The source's side: answers requests for tables and blocks."""

    def __init__(self) -> None:
        self.snapshot: StateSnapshot | None = None
        self._waiting: set[m.PeerId] = set()
        self._queues: dict[m.PeerId, deque[int]] = {}
        self._request_counts: Counter[m.PeerId] = Counter()

    def set_receivers(self, receivers: Sequence[m.PeerId]) -> None:
        """Serve only these receivers from now on.  If there are no receivers, drop the snapshot."""
        self._waiting &= set(receivers)
        self._queues = {peer: queue for peer, queue in self._queues.items() if peer in receivers}
        self._request_counts = Counter({peer: self._request_counts[peer] for peer in receivers})
        if not receivers:
            self.snapshot = None

    def store(self, snapshot: StateSnapshot) -> PeerMessages:
        """Replace the snapshot; return the messages that send its table to the receivers waiting for it."""
        self.snapshot = snapshot
        self._queues.clear()
        waiting, self._waiting = self._waiting, set()
        return [(peer, self._table()) for peer in sorted(waiting)]

    def handle_request(
        self, peer: m.PeerId, request: m.SnapshotRequest | m.SnapshotBlocksRequest
    ) -> list[m.Message]:
        """Handle a request; return the messages to send in reply immediately.

        Requested blocks are queued for `next_block`.
        """
        if isinstance(request, m.SnapshotRequest):
            if self.snapshot is not None:
                return [self._table()]
            self._waiting.add(peer)
            return []
        if self.snapshot is None or request.applied != self.snapshot.applied:
            return [m.SnapshotUnavailable(f"this source has no snapshot of step {request.applied + 1}")]
        self._request_counts[peer] = count = self._request_counts[peer] + len(request.blocks)
        # A correct receiver repeats the request for a block only when a source has left.
        if count > 4 * self.snapshot.layout.block_count + WINDOW:
            reason = f"{count} blocks were requested, which is more than any correct receiver requests"
            return [m.SnapshotUnavailable(reason)]
        queue = self._queues.setdefault(peer, deque())
        queue.extend(request.blocks[: MAX_QUEUED - len(queue)])
        return []

    def peers_with_blocks_due(self) -> list[m.PeerId]:
        """Return the peers for which blocks are queued."""
        return [peer for peer, queue in self._queues.items() if queue]

    def next_block(self, peer: m.PeerId) -> m.Message | None:
        if self.snapshot is None or not self._queues.get(peer):
            return None
        index = self._queues[peer].popleft()
        block = self.snapshot.block(index)
        if block is None:
            return m.SnapshotUnavailable(f"the snapshot has no block {index}")
        return m.SnapshotBlock(self.snapshot.applied, index, block)

    def _table(self) -> m.SnapshotDigests:
        assert self.snapshot is not None
        return m.SnapshotDigests(self.snapshot.applied, self.snapshot.history, self.snapshot.table)


@dataclass(frozen=True, slots=True)
class SnapshotTable:
    """The table in which a source describes its snapshot."""

    applied: int
    history: bytes
    private_bytes: int
    shared_bytes: int
    private_digests: bytes
    shared_digests: bytes

    @property
    def shared_key(self) -> tuple[int, bytes, int, bytes]:
        """The fields that are equal in the tables of all sources with the same shared part."""
        return self.applied, self.history, self.shared_bytes, self.shared_digests

    def block_digests(self) -> list[bytes]:
        both = self.shared_digests + self.private_digests
        return [both[i : i + _DIGEST_BYTES] for i in range(0, len(both), _DIGEST_BYTES)]


@dataclass(slots=True)
class _Source:
    """A source and the blocks that are requested from it.

    Attributes:
        table: the table that the source has sent, or None.
        requested: the indices of the blocks that are requested and have not arrived.
        blocks: the number of blocks that the source has sent.
        busy_s: the time that the source took to send these blocks.
        waiting_since_s: the time at which the latest block arrived or, if later, the time of the first
            request after all earlier requests had been answered.
        is_slow: whether the source is too slow; if so, the other sources send its blocks.
    """

    table: SnapshotTable | None = None
    requested: set[int] = field(default_factory=set)
    blocks: int = 0
    busy_s: float = 0.0
    waiting_since_s: float = 0.0
    is_slow: bool = False

    def record_block(self, now_s: float) -> None:
        self.blocks, self.busy_s = self.blocks + 1, self.busy_s + now_s - self.waiting_since_s
        self.waiting_since_s = now_s

    @property
    def block_s(self) -> float:
        """The mean time per block in seconds; infinity if no block has arrived."""
        return self.busy_s / self.blocks if self.blocks else math.inf


class SnapshotReceiver:
    """The receiver's side.  Its methods return the requests to be sent now.

    Args:
        max_bytes: the size in bytes of the largest state that this worker's model can have.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sources: dict[m.PeerId, _Source] = {}
        self._first_s: float | None = None
        self._chosen: SnapshotTable | None = None
        self._private_source: m.PeerId = b""
        self._missing: deque[int] = deque()  # blocks that are not requested from any source
        self._buffer = BlockBuffer((0, 0))  # the shared and the private part
        self._digests: list[bytes] = []
        self._now_s = 0.0

    @property
    def applied(self) -> int | None:
        return None if self._chosen is None else self._chosen.applied

    @property
    def history(self) -> bytes:
        return b"" if self._chosen is None else self._chosen.history

    @property
    def is_complete(self) -> bool:
        return self._chosen is not None and len(self._buffer.received) == self._buffer.layout.block_count

    @property
    def progress(self) -> tuple[int, int]:
        """The number of received blocks, and the total number of blocks."""
        total = 0 if self._chosen is None else self._buffer.layout.block_count
        return len(self._buffer.received), total

    def take_parts(self) -> tuple[memoryview, memoryview]:
        """Return the private and the shared part of a complete snapshot and drop them from this object."""
        shared, private = self._buffer.parts
        self._buffer.parts = [allocate(0), allocate(0)]
        return private, shared

    def source_up(self, peer: m.PeerId) -> PeerMessages:
        """Add a connected source."""
        self._sources.setdefault(peer, _Source())
        return [] if self.is_complete else [(peer, m.SnapshotRequest())]

    def source_down(self, peer: m.PeerId) -> PeerMessages:
        """Remove a source that has left or can no longer send; request its blocks from other sources."""
        source = self._sources.pop(peer, None)
        if source is None:
            return []
        self._missing.extendleft(sorted(source.requested, reverse=True))
        if peer == self._private_source and not self.is_complete:
            self._switch_private_source()
        if not self.is_complete and not any(self._matches_chosen(other) for other in self._sources.values()):
            self._chosen, self._first_s = None, None  # the next tables may belong to another step
            for other in self._sources.values():
                other.table = None
            return [(other, m.SnapshotRequest()) for other in sorted(self._sources)]
        return self._request_blocks()

    def receive_table(self, peer: m.PeerId, message: m.SnapshotDigests, now_s: float) -> PeerMessages:
        """Store a source's table.

        Raises `RemoteProtocolError` if the table is invalid or describes a state that is too large.
        """
        table = _read_table(message, self._max_bytes)
        source = self._sources.get(peer)
        if source is None:
            return []
        source.table, self._now_s = table, now_s
        self._first_s = now_s if self._first_s is None else self._first_s
        if self._chosen is not None:
            is_needed = source.requested or peer == self._private_source
            if not is_needed or self._matches_chosen(source):
                return self._request_blocks()
            requests = self.source_down(peer)  # the source no longer has the chosen snapshot
            self._sources[peer] = _Source(table)
            if self._chosen is None:
                self._first_s = now_s
            return requests
        return self._choose_table() if all(each.table for each in self._sources.values()) else []

    def receive_block(self, peer: m.PeerId, block: m.SnapshotBlock, now_s: float) -> PeerMessages:
        """Store a block.  Raises `RemoteProtocolError` if the block does not match the table."""
        source, chosen = self._sources.get(peer), self._chosen
        if source is None or chosen is None or block.applied != chosen.applied:
            return []
        if block.index not in source.requested:
            return []  # the block was requested from another source in the meantime
        source.requested.discard(block.index)
        source.record_block(now_s)
        self._now_s = now_s
        data = memoryview(block.payload).cast("B")
        expected = self._buffer.layout.place(block.index).nbytes
        if len(data) != expected or block_digest(data) != self._digests[block.index]:
            self._missing.appendleft(block.index)
            raise _invalid(
                f"block {block.index} of the snapshot of step {chosen.applied + 1} ({len(data)} bytes) does "
                f"not match its table: the {'length' if len(data) != expected else 'digest'} differs"
            )
        self._buffer.store(block.index, data)
        return self._request_blocks()

    @property
    def due_s(self) -> float | None:
        """The time from which `tick` can choose a table; None if there are no tables to choose from."""
        return None if self._first_s is None or self._chosen is not None else self._first_s + SETTLE_S

    def tick(self, now_s: float) -> PeerMessages:
        self._now_s = now_s
        if self._chosen is not None:
            return self._replace_slow_sources()
        if self.due_s is None or now_s < self.due_s:
            return []
        assert self._first_s is not None
        received = sum(source.table is not None for source in self._sources.values())
        is_majority = 2 * received > len(self._sources)  # a dishonest source must not win by being first
        return self._choose_table() if is_majority or now_s >= self._first_s + LONGEST_SETTLE_S else []

    def _choose_table(self) -> PeerMessages:
        tables = {peer: source.table for peer, source in self._sources.items() if source.table is not None}
        if not tables:
            return []
        keys = [table.shared_key for table in tables.values()]
        best = max(keys, key=lambda key: (keys.count(key), key[0]))
        for source in self._sources.values():
            source.requested.clear()
        self._begin(next(peer for peer, table in tables.items() if table.shared_key == best))
        return self._request_blocks()

    def _switch_private_source(self) -> None:
        """Choose another source for the private part when the current source has left or is too slow."""
        matching = [peer for peer, source in self._sources.items() if self._matches_chosen(source)]
        if matching:
            self._begin(min(matching, key=lambda peer: self._sources[peer].is_slow))

    def _begin(self, private_source: m.PeerId) -> None:
        """Begin receiving the snapshot that the table of `private_source` describes.

        Blocks that have already been received are kept if the new snapshot contains the same blocks.
        """
        chosen = self._sources[private_source].table
        assert chosen is not None
        before, digests = self._buffer, self._digests
        self._private_source, self._chosen, self._digests = private_source, chosen, chosen.block_digests()
        # The shared part may be large, so its memory is reused if possible.
        is_in_place = before.layout.lengths[SHARED] == chosen.shared_bytes
        shared = before.parts[SHARED] if is_in_place else allocate(chosen.shared_bytes)
        buffer = self._buffer = BlockBuffer.of_parts([shared, allocate(chosen.private_bytes)])
        for index in before.received:
            part, offset, nbytes = before.layout.place(index)
            ours = buffer.layout.first_block(part) + offset // BLOCK_BYTES
            fits = offset + nbytes <= buffer.layout.lengths[part]
            if fits and self._digests[ours] == digests[index]:
                if part == SHARED and is_in_place:
                    buffer.mark_received((ours,))
                else:
                    buffer.store(ours, before.block(index))
        requested = {index for source in self._sources.values() for index in source.requested}
        indices = range(buffer.layout.block_count)
        self._missing = deque(i for i in indices if i not in buffer.received and i not in requested)

    def _replace_slow_sources(self) -> PeerMessages:
        """Return requests to faster sources, if there are any, for the blocks that were requested from slow
        sources."""
        usable = {peer: source for peer, source in self._sources.items() if self._is_usable(source)}
        fastest_s = min((source.block_s for source in usable.values()), default=math.inf)
        timeout_s = max(BLOCK_TIMEOUT_S, SLOWEST_FACTOR * fastest_s if fastest_s < math.inf else 0.0)
        late = [
            peer
            for peer, source in usable.items()
            if source.requested and self._now_s - source.waiting_since_s >= timeout_s
        ]
        if not late or len(late) == len(usable):
            return []
        for peer in late:
            log.warning(
                "state source %s is too slow; its blocks are being requested from other sources",
                peer.hex()[:8],
            )
            source = usable[peer]
            source.is_slow = True
            self._missing.extendleft(sorted(source.requested, reverse=True))
            source.requested.clear()
        if self._private_source in late:
            self._switch_private_source()
        return self._request_blocks()

    def _is_usable(self, source: _Source) -> bool:
        return self._matches_chosen(source) and not source.is_slow

    def _matches_chosen(self, source: _Source) -> bool:
        return (
            self._chosen is not None
            and source.table is not None
            and source.table.shared_key == self._chosen.shared_key
        )

    def _request_blocks(self) -> PeerMessages:
        requests: PeerMessages = []
        if self._chosen is None:
            return requests
        first_private = count_blocks(self._chosen.shared_bytes)
        is_any_usable = any(self._is_usable(source) for source in self._sources.values())
        for peer, source in self._sources.items():
            if not self._matches_chosen(source) or (source.is_slow and is_any_usable):
                continue
            if not source.requested:
                source.waiting_since_s = self._now_s
            wanted: list[int] = []
            skipped: list[int] = []
            while self._missing and len(source.requested) < WINDOW:
                index = self._missing.popleft()
                if index >= first_private and peer != self._private_source:
                    skipped.append(index)  # private blocks are requested from one source only
                    continue
                wanted.append(index)
                source.requested.add(index)
            self._missing.extendleft(reversed(skipped))
            if wanted:
                requests.append((peer, m.SnapshotBlocksRequest(self._chosen.applied, tuple(wanted))))
        return requests


def _read_table(message: m.SnapshotDigests, max_bytes: int) -> SnapshotTable:
    payload = bytes(message.payload)
    if len(payload) < _TABLE.size:
        raise _invalid(f"a snapshot's table is {len(payload)} bytes long; the minimum is {_TABLE.size} bytes")
    shared_bytes, private_bytes = _TABLE.unpack_from(payload)
    if private_bytes + shared_bytes > max_bytes:
        raise _invalid(
            f"a snapshot has {private_bytes + shared_bytes} bytes; this worker accepts at most {max_bytes} "
            "bytes"
        )
    end = _TABLE.size + count_blocks(shared_bytes) * _DIGEST_BYTES
    if len(payload) != end + count_blocks(private_bytes) * _DIGEST_BYTES:
        raise _invalid(
            f"a snapshot's table of {len(payload)} bytes does not match its parts of {private_bytes} and "
            f"{shared_bytes} bytes"
        )
    shared_digests, private_digests = payload[_TABLE.size : end], payload[end:]
    return SnapshotTable(
        message.applied, message.history, private_bytes, shared_bytes, private_digests, shared_digests
    )
