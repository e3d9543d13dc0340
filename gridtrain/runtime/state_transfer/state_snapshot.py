"""Snapshots: the state after one step, sent in blocks by several members while they keep training.

    sources  anna   table T1 --+   the table that most sources have (of several, the later step's, then the
    first
             bert   table T1 --+-> received) is chosen; its sources share the blocks
             carl   table T2       not asked for blocks

    receiver  --SnapshotBlocksRequest [0 1 2 3]--> anna      WINDOW blocks under way from each
              --SnapshotBlocksRequest [4 5 6 7]--> bert      if a source leaves, the others send its blocks
              <--SnapshotBlock 4------------------ bert      checked against the table, then stored

A snapshot has two parts: a private one (buffers and the like, which may differ between members; one source's
is taken), and a shared one, whose blocks have the same digests on all sources.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gridtrain.core import messages as m
from gridtrain.errors import RemoteProtocolError
from gridtrain.runtime.state_transfer.blobs import BLOCK_BYTES, count_blocks

WINDOW = 4
"""Blocks that are under way from one source."""

SETTLE_S, LONGEST_SETTLE_S = 2.0, 20.0
"""How long to wait for more tables after the first one: if most sources have sent theirs, and if not."""

MAX_QUEUED = 64
_TABLE = struct.Struct("<2Q")
_DIGEST_BYTES = 16
_REMEDY = "drop this source; others have the state, too"


def block_digest(block: bytes | memoryview) -> bytes:
    """16 bytes of blake2b."""
    return hashlib.blake2b(block, digest_size=_DIGEST_BYTES).digest()


def matches_digest(block: memoryview, digest: bytes) -> bool:
    """Defence: the block is the one that the sources agree on."""
    return block_digest(block) == digest


def exceeds_request_limit(requested: int, blocks: int) -> bool:
    """Defence: an honest receiver repeats the request for a block only when a source has left."""
    return requested > 4 * blocks + WINDOW


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The state after step `applied`, in two parts, with the table of its blocks' digests."""

    applied: int
    history: bytes
    private_part: memoryview
    shared_part: memoryview
    table: bytes

    @classmethod
    def build(cls, applied: int, history: bytes, private: bytes, shared: bytes) -> StateSnapshot:
        """Takes about a second for a gigabyte."""
        parts = memoryview(shared), memoryview(private)
        digests = [
            block_digest(part[i : i + BLOCK_BYTES])
            for part in parts
            for i in range(0, len(part), BLOCK_BYTES)
        ]
        table = _TABLE.pack(len(shared), len(private)) + b"".join(digests)
        return cls(applied, history, parts[1], parts[0], table)

    @property
    def block_count(self) -> int:
        return count_blocks(len(self.private_part)) + count_blocks(len(self.shared_part))

    def block(self, index: int) -> memoryview | None:
        """None: there is no such block."""
        first_private = count_blocks(len(self.shared_part))
        part, at = self.shared_part, index
        if index >= first_private:
            part, at = self.private_part, index - first_private
        return part[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] if at < count_blocks(len(part)) else None


class SnapshotSender:
    """The source's side: answers requests, one block at a time."""

    def __init__(self) -> None:
        self.snapshot: StateSnapshot | None = None
        self._waiting: set[m.PeerId] = set()
        self._queues: dict[m.PeerId, deque[int]] = {}
        self._request_counts: Counter[m.PeerId] = Counter()

    def set_receivers(self, receivers: Sequence[m.PeerId]) -> None:
        """Nobody else gets anything any more; with no receivers the snapshot is dropped."""
        self._waiting &= set(receivers)
        self._queues = {peer: queue for peer, queue in self._queues.items() if peer in receivers}
        self._request_counts = Counter({peer: self._request_counts[peer] for peer in receivers})
        if not receivers:
            self.snapshot = None

    def store(self, snapshot: StateSnapshot) -> list[tuple[m.PeerId, m.Message]]:
        """Replace the snapshot; returns the tables for those who wait for it."""
        self.snapshot = snapshot
        self._queues.clear()
        waiting, self._waiting = self._waiting, set()
        return [(peer, self._table()) for peer in sorted(waiting)]

    def handle_request(
        self, peer: m.PeerId, request: m.SnapshotRequest | m.SnapshotBlocksRequest
    ) -> list[m.Message]:
        """Returns what is answered at once; blocks wait for `next_block`."""
        if isinstance(request, m.SnapshotRequest):
            if self.snapshot is not None:
                return [self._table()]
            self._waiting.add(peer)
            return []
        if self.snapshot is None or request.applied != self.snapshot.applied:
            return [m.SnapshotUnavailable(f"there is no snapshot of step {request.applied} here")]
        self._request_counts[peer] += len(request.blocks)
        if exceeds_request_limit(self._request_counts[peer], self.snapshot.block_count):
            return [m.SnapshotUnavailable(f"{self._request_counts[peer]} blocks were requested")]
        queue = self._queues.setdefault(peer, deque())
        queue.extend(request.blocks[: MAX_QUEUED - len(queue)])
        return []

    def peers_with_blocks_due(self) -> list[m.PeerId]:
        """The peers for which blocks are queued."""
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
    """What a source says of its snapshot."""

    applied: int
    history: bytes
    private_bytes: int
    shared_bytes: int
    private_digests: bytes
    shared_digests: bytes

    @property
    def block_count(self) -> int:
        return count_blocks(self.private_bytes) + count_blocks(self.shared_bytes)

    @property
    def shared_key(self) -> tuple[int, bytes, int, bytes]:
        """What sources can agree on."""
        return self.applied, self.history, self.shared_bytes, self.shared_digests


@dataclass(slots=True)
class _Source:
    table: SnapshotTable | None = None
    requested: set[int] = field(default_factory=set)


class SnapshotReceiver:
    """The receiver's side.  Methods with a list as result return the requests to be sent now.

    Args:
        max_bytes: the largest state that this worker's model can have.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sources: dict[m.PeerId, _Source] = {}
        self._first_s: float | None = None
        self._chosen: SnapshotTable | None = None
        self._private_source: m.PeerId = b""
        self._missing: deque[int] = deque()  # requested from nobody yet
        self._private_part = self._shared_part = bytearray()
        self._digests: list[bytes] = []
        self._received: set[int] = set()
        self.bytes_by_source: dict[m.PeerId, int] = {}

    @property
    def applied(self) -> int | None:
        return None if self._chosen is None else self._chosen.applied

    @property
    def history(self) -> bytes:
        return b"" if self._chosen is None else self._chosen.history

    @property
    def is_complete(self) -> bool:
        return self._chosen is not None and len(self._received) == self._chosen.block_count

    @property
    def progress(self) -> tuple[int, int]:
        """Number of blocks here, and of all."""
        return len(self._received), 0 if self._chosen is None else self._chosen.block_count

    def take_parts(self) -> tuple[bytearray, bytearray]:
        """The private and the shared part of a complete snapshot; they are released here."""
        parts = self._private_part, self._shared_part
        self._private_part = self._shared_part = bytearray()
        return parts

    def source_up(self, peer: m.PeerId) -> list[tuple[m.PeerId, m.Message]]:
        """A source is connected."""
        self._sources.setdefault(peer, _Source())
        return [] if self.is_complete else [(peer, m.SnapshotRequest())]

    def source_down(self, peer: m.PeerId) -> list[tuple[m.PeerId, m.Message]]:
        """It has left, or cannot send any more: the others are asked for its blocks."""
        source = self._sources.pop(peer, None)
        if source is None:
            return []
        self._missing.extendleft(sorted(source.requested, reverse=True))
        if peer == self._private_source and not self.is_complete:
            self._switch_private_source()
        if not self.is_complete and not any(self._matches_chosen(other) for other in self._sources.values()):
            self._chosen, self._first_s = None, None  # the next tables may be of another step
            for other in self._sources.values():
                other.table = None
            return [(other, m.SnapshotRequest()) for other in sorted(self._sources)]
        return self._request_blocks()

    def receive_table(
        self, peer: m.PeerId, message: m.SnapshotDigests, now_s: float
    ) -> list[tuple[m.PeerId, m.Message]]:
        """Raises `RemoteProtocolError` for what is not a table, or for one of too large a state."""
        table = _read_table(message, self._max_bytes)
        source = self._sources.get(peer)
        if source is None:
            return []
        source.table = table
        self._first_s = now_s if self._first_s is None else self._first_s
        if self._chosen is not None:
            return self._request_blocks()
        return self._choose_table() if all(each.table for each in self._sources.values()) else []

    def receive_block(self, peer: m.PeerId, block: m.SnapshotBlock) -> list[tuple[m.PeerId, m.Message]]:
        """Raises `RemoteProtocolError` for a block that does not match the table."""
        source, chosen = self._sources.get(peer), self._chosen
        if source is None or chosen is None or block.applied != chosen.applied:
            return []
        if block.index not in source.requested:
            return []  # requested from another source meanwhile
        source.requested.discard(block.index)
        data = memoryview(block.payload).cast("B")
        first_private = count_blocks(chosen.shared_bytes)
        part, at = self._shared_part, block.index
        if block.index >= first_private:
            part, at = self._private_part, block.index - first_private
        expected = min(BLOCK_BYTES, len(part) - at * BLOCK_BYTES)
        if len(data) != expected or not matches_digest(data, self._digests[block.index]):
            self._missing.appendleft(block.index)
            raise RemoteProtocolError(
                f"block {block.index} of the snapshot of step {chosen.applied} ({len(data)} bytes) does not "
                "match its table",
                remedy=_REMEDY,
            )
        part[at * BLOCK_BYTES : at * BLOCK_BYTES + expected] = data
        self._received.add(block.index)
        self.bytes_by_source[peer] = self.bytes_by_source.get(peer, 0) + expected
        return self._request_blocks()

    @property
    def due_s(self) -> float | None:
        """When `tick` chooses among the tables received so far; None: nothing is due."""
        return None if self._first_s is None or self._chosen is not None else self._first_s + SETTLE_S

    def tick(self, now_s: float) -> list[tuple[m.PeerId, m.Message]]:
        if self.due_s is None or now_s < self.due_s:
            return []
        assert self._first_s is not None
        received = sum(source.table is not None for source in self._sources.values())
        is_majority = 2 * received > len(self._sources)  # so that a fast liar is not chosen alone
        return self._choose_table() if is_majority or now_s >= self._first_s + LONGEST_SETTLE_S else []

    def _choose_table(self) -> list[tuple[m.PeerId, m.Message]]:
        tables = {peer: source.table for peer, source in self._sources.items() if source.table is not None}
        if not tables:
            return []
        keys = [table.shared_key for table in tables.values()]
        best = max(keys, key=lambda key: (keys.count(key), key[0]))
        self._private_source = next(peer for peer, table in tables.items() if table.shared_key == best)
        chosen = self._chosen = tables[self._private_source]
        self._private_part, self._shared_part = (
            bytearray(chosen.private_bytes),
            bytearray(chosen.shared_bytes),
        )
        self._digests = _split_digests(chosen.shared_digests) + _split_digests(chosen.private_digests)
        self._received, self._missing = set(), deque(range(chosen.block_count))
        for source in self._sources.values():
            source.requested.clear()
        return self._request_blocks()

    def _switch_private_source(self) -> None:
        """The source of the private part has left; the blocks of the shared part stay."""
        chosen = self._chosen
        other = next((peer for peer, source in self._sources.items() if self._matches_chosen(source)), None)
        if chosen is None or other is None:
            return
        table = self._sources[other].table
        assert table is not None
        self._private_source, self._chosen = other, table
        first_private = count_blocks(table.shared_bytes)
        self._private_part = bytearray(table.private_bytes)
        self._digests = _split_digests(table.shared_digests) + _split_digests(table.private_digests)
        self._received = {index for index in self._received if index < first_private}
        shared = [index for index in self._missing if index < first_private]
        self._missing = deque([*shared, *range(first_private, table.block_count)])

    def _matches_chosen(self, source: _Source) -> bool:
        return (
            self._chosen is not None
            and source.table is not None
            and source.table.shared_key == self._chosen.shared_key
        )

    def _request_blocks(self) -> list[tuple[m.PeerId, m.Message]]:
        requests: list[tuple[m.PeerId, m.Message]] = []
        if self._chosen is None:
            return requests
        first_private = count_blocks(self._chosen.shared_bytes)
        for peer, source in self._sources.items():
            if not self._matches_chosen(source):
                continue
            wanted: list[int] = []
            skipped: list[int] = []
            while self._missing and len(source.requested) < WINDOW:
                index = self._missing.popleft()
                if index >= first_private and peer != self._private_source:
                    skipped.append(index)  # only one source has it
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
        raise RemoteProtocolError(
            f"a snapshot's table of {len(payload)} bytes, must have at least {_TABLE.size}", remedy=_REMEDY
        )
    shared_bytes, private_bytes = _TABLE.unpack_from(payload)
    if private_bytes + shared_bytes > max_bytes:
        raise RemoteProtocolError(
            f"a snapshot of {private_bytes + shared_bytes} bytes; at most {max_bytes} are accepted here",
            remedy=_REMEDY,
        )
    end = _TABLE.size + count_blocks(shared_bytes) * _DIGEST_BYTES
    if len(payload) != end + count_blocks(private_bytes) * _DIGEST_BYTES:
        raise RemoteProtocolError(
            f"a snapshot's table of {len(payload)} bytes for parts of {private_bytes} and {shared_bytes}",
            remedy=_REMEDY,
        )
    shared_digests, private_digests = payload[_TABLE.size : end], payload[end:]
    return SnapshotTable(
        message.applied, message.history, private_bytes, shared_bytes, private_digests, shared_digests
    )


def _split_digests(digests: bytes) -> list[bytes]:
    return [digests[i : i + _DIGEST_BYTES] for i in range(0, len(digests), _DIGEST_BYTES)]
