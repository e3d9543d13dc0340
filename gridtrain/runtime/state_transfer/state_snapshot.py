"""Images: the state after one step, given away in blocks by several members while they train on.

Decides which block is asked of whom, and whether a block is what the donors agree on.  Never opens a socket
and never opens a blob.

    donors   anna   table T1 --+   the table that most donors have (of equal ones the later step's, then the
             bert   table T1 --+-> first that came) is believed; its donors share the blocks
             carl   table T2       not asked for blocks; its followers will find another history

    follower  --BlocksAsk [0 1 2 3]--> anna      WINDOW blocks under way from each
              --BlocksAsk [4 5 6 7]--> bert      a donor that goes: its blocks are asked of the others
              <--ImageBlock 4--------- bert      checked against the table, put in its place

An image has two parts: the donor's own (buffers and the like, which may differ between members, so the first
donor's are taken) and the common one, whose blocks' digests have to be the same on all donors.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from gridtrain.core import messages as m
from gridtrain.errors import RemoteProtocolError

BLOCK_BYTES = 1 << 20
WINDOW = 4
"""Blocks that are under way from one donor."""

SETTLE_S, LONGEST_SETTLE_S = 2.0, 20.0
"""So long after the first table the others are waited for, if most are there; so long if not."""

MAX_QUEUED = 64
_TABLE = struct.Struct("<2Q")
_DIGEST_BYTES = 16
_REMEDY = "drop the donor; others have the state, too"


def block_digest(block: bytes | memoryview) -> bytes:
    """16 bytes of blake2b."""
    return hashlib.blake2b(block, digest_size=_DIGEST_BYTES).digest()


def matches_digest(block: memoryview, digest: bytes) -> bool:
    """The defence: the block is the one that the donors agree on."""
    return block_digest(block) == digest


def exceeds_request_limit(asked: int, blocks: int) -> bool:
    """The defence: an honest follower asks for a block again when a donor has gone, not for ever."""
    return asked > 4 * blocks + WINDOW


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """What a donor keeps: the state after step `applied`, in two parts."""

    applied: int
    history: bytes
    private_part: memoryview
    shared_part: memoryview
    table: bytes

    @classmethod
    def build(cls, applied: int, history: bytes, own: bytes, common: bytes) -> StateSnapshot:
        """Takes about a second for a gigabyte."""
        parts = memoryview(common), memoryview(own)
        digests = [
            block_digest(part[i : i + BLOCK_BYTES])
            for part in parts
            for i in range(0, len(part), BLOCK_BYTES)
        ]
        table = _TABLE.pack(len(common), len(own)) + b"".join(digests)
        return cls(applied, history, parts[1], parts[0], table)

    @property
    def block_count(self) -> int:
        return _block_count(len(self.private_part)) + _block_count(len(self.shared_part))

    def block(self, index: int) -> memoryview | None:
        common_blocks = _block_count(len(self.shared_part))
        part, at = (
            (self.shared_part, index) if index < common_blocks else (self.private_part, index - common_blocks)
        )
        return part[at * BLOCK_BYTES : (at + 1) * BLOCK_BYTES] if at < _block_count(len(part)) else None


class SnapshotSender:
    """The donor's side: answers what followers ask, a little at a time."""

    def __init__(self) -> None:
        self.snapshot: StateSnapshot | None = None
        self._waiting: set[m.PeerId] = set()
        self._queues: dict[m.PeerId, deque[int]] = {}
        self._request_counts: dict[m.PeerId, int] = {}

    def set_receivers(self, followers: Sequence[m.PeerId]) -> None:
        """Nobody else gets anything any more; with nobody left the image goes."""
        self._waiting &= set(followers)
        self._queues = {peer: queue for peer, queue in self._queues.items() if peer in followers}
        self._request_counts = {
            peer: count for peer, count in self._request_counts.items() if peer in followers
        }
        if not followers:
            self.snapshot = None

    def store(self, image: StateSnapshot) -> list[tuple[m.PeerId, m.Message]]:
        """The image is there; what those who wait for it are told."""
        self.snapshot = image
        self._queues.clear()
        waiting, self._waiting = self._waiting, set()
        return [(peer, self._table()) for peer in sorted(waiting)]

    def handle_request(
        self, peer: m.PeerId, ask: m.SnapshotRequest | m.SnapshotBlocksRequest
    ) -> list[m.Message]:
        """What is to be answered at once; blocks wait for `next_block`."""
        if isinstance(ask, m.SnapshotRequest):
            if self.snapshot is not None:
                return [self._table()]
            self._waiting.add(peer)
            return []
        if self.snapshot is None or ask.applied != self.snapshot.applied:
            return [m.SnapshotUnavailable(f"there is no image of step {ask.applied} here")]
        asked = self._request_counts[peer] = self._request_counts.get(peer, 0) + len(ask.blocks)
        if exceeds_request_limit(asked, self.snapshot.block_count):
            return [m.SnapshotUnavailable(f"{asked} blocks were asked for")]
        queue = self._queues.setdefault(peer, deque())
        queue.extend(ask.blocks[: MAX_QUEUED - len(queue)])
        return []

    def peers_with_blocks_due(self) -> list[m.PeerId]:
        """Who has blocks to come."""
        return [peer for peer, queue in self._queues.items() if queue]

    def next_block(self, peer: m.PeerId) -> m.Message | None:
        if self.snapshot is None or not self._queues.get(peer):
            return None
        index = self._queues[peer].popleft()
        block = self.snapshot.block(index)
        if block is None:
            return m.SnapshotUnavailable(f"the image has no block {index}")
        return m.SnapshotBlock(self.snapshot.applied, index, block)

    def _table(self) -> m.SnapshotDigests:
        assert self.snapshot is not None
        return m.SnapshotDigests(self.snapshot.applied, self.snapshot.history, self.snapshot.table)


@dataclass(frozen=True, slots=True)
class SnapshotTable:
    """What a donor says its image is."""

    applied: int
    history: bytes
    own_bytes: int
    common_bytes: int
    own_digests: bytes
    common_digests: bytes

    @property
    def block_count(self) -> int:
        return _block_count(self.own_bytes) + _block_count(self.common_bytes)

    @property
    def shared_key(self) -> tuple[int, bytes, int, bytes]:
        """What donors can agree on."""
        return self.applied, self.history, self.common_bytes, self.common_digests


@dataclass(slots=True)
class _Source:
    table: SnapshotTable | None = None
    requested: set[int] = field(default_factory=set)


class SnapshotReceiver:
    """The follower's side.  Every method returns what is to be asked now.

    Args:
        max_bytes: the largest state that this worker's model can have.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sources: dict[m.PeerId, _Source] = {}
        self._first_s: float | None = None
        self._chosen: SnapshotTable | None = None
        self._private_source: m.PeerId = b""
        self._missing: deque[int] = deque()  # asked of nobody yet
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
        """Blocks that are here, and all of them."""
        return len(self._received), 0 if self._chosen is None else self._chosen.block_count

    def take_parts(self) -> tuple[bytearray, bytearray]:
        """The donor's own part and the common one, of a complete image; they are released here."""
        parts = self._private_part, self._shared_part
        self._private_part = self._shared_part = bytearray()
        return parts

    def source_up(self, peer: m.PeerId) -> list[tuple[m.PeerId, m.Message]]:
        """A donor is connected."""
        self._sources.setdefault(peer, _Source())
        return [] if self.is_complete else [(peer, m.SnapshotRequest())]

    def source_down(self, peer: m.PeerId) -> list[tuple[m.PeerId, m.Message]]:
        """It has gone, or cannot give any more: the others are asked for what it owed."""
        donor = self._sources.pop(peer, None)
        if donor is None:
            return []
        self._missing.extendleft(sorted(donor.requested, reverse=True))
        if peer == self._private_source and not self.is_complete:
            self._switch_private_source()
        if not self.is_complete and not any(self._matches_chosen(other) for other in self._sources.values()):
            self._chosen, self._first_s = None, None  # what comes next may be of another step
            for other in self._sources.values():
                other.table = None
            return [(other, m.SnapshotRequest()) for other in sorted(self._sources)]
        return self._request_blocks()

    def receive_table(
        self, peer: m.PeerId, told: m.SnapshotDigests, now_s: float
    ) -> list[tuple[m.PeerId, m.Message]]:
        """Raises `RemoteProtocolError` for what is no table, or one of too large a state."""
        table = _read_table(told, self._max_bytes)
        donor = self._sources.get(peer)
        if donor is None:
            return []
        donor.table = table
        self._first_s = now_s if self._first_s is None else self._first_s
        if self._chosen is not None:
            return self._request_blocks()
        return self._choose_table() if all(d.table for d in self._sources.values()) else []

    def receive_block(self, peer: m.PeerId, block: m.SnapshotBlock) -> list[tuple[m.PeerId, m.Message]]:
        """Raises `RemoteProtocolError` for a block that is not what the table says."""
        donor, chosen = self._sources.get(peer), self._chosen
        if donor is None or chosen is None or block.applied != chosen.applied:
            return []
        if block.index not in donor.requested:
            return []  # asked of somebody else meanwhile
        donor.requested.discard(block.index)
        data = memoryview(block.payload).cast("B")
        first_own = _block_count(chosen.common_bytes)
        part, at = (
            (self._shared_part, block.index)
            if block.index < first_own
            else (self._private_part, block.index - first_own)
        )
        expected = min(BLOCK_BYTES, len(part) - at * BLOCK_BYTES)
        if len(data) != expected or not matches_digest(data, self._digests[block.index]):
            self._missing.appendleft(block.index)
            raise RemoteProtocolError(
                f"block {block.index} of the image of step {chosen.applied} ({len(data)} bytes) is not what "
                "its table says",
                remedy=_REMEDY,
            )
        part[at * BLOCK_BYTES : at * BLOCK_BYTES + expected] = data
        self._received.add(block.index)
        self.bytes_by_source[peer] = self.bytes_by_source.get(peer, 0) + expected
        return self._request_blocks()

    @property
    def due_s(self) -> float | None:
        """When `tick` chooses among the tables that have come; None: nothing is due."""
        return None if self._first_s is None or self._chosen is not None else self._first_s + SETTLE_S

    def tick(self, now_s: float) -> list[tuple[m.PeerId, m.Message]]:
        if self.due_s is None or now_s < self.due_s:
            return []
        assert self._first_s is not None
        told = sum(donor.table is not None for donor in self._sources.values())
        most = 2 * told > len(self._sources)  # one that is quick to lie is not alone with its tale
        return self._choose_table() if most or now_s >= self._first_s + LONGEST_SETTLE_S else []

    def _choose_table(self) -> list[tuple[m.PeerId, m.Message]]:
        tables = {peer: donor.table for peer, donor in self._sources.items() if donor.table is not None}
        if not tables:
            return []
        agree = [table.shared_key for table in tables.values()]
        best = max(agree, key=lambda common: (agree.count(common), common[0]))
        self._private_source = next(peer for peer, table in tables.items() if table.shared_key == best)
        chosen = self._chosen = tables[self._private_source]
        self._private_part, self._shared_part = bytearray(chosen.own_bytes), bytearray(chosen.common_bytes)
        self._digests = _split_digests(chosen.common_digests) + _split_digests(chosen.own_digests)
        self._received, self._missing = set(), deque(range(chosen.block_count))
        for donor in self._sources.values():
            donor.requested.clear()
        return self._request_blocks()

    def _switch_private_source(self) -> None:
        """Who gave its own part has gone; what is here of the common one stays."""
        chosen = self._chosen
        other = next((peer for peer, donor in self._sources.items() if self._matches_chosen(donor)), None)
        if chosen is None or other is None:
            return
        table = self._sources[other].table
        assert table is not None
        self._private_source, self._chosen = other, table
        first_own = _block_count(table.common_bytes)
        self._private_part = bytearray(table.own_bytes)
        self._digests = _split_digests(table.common_digests) + _split_digests(table.own_digests)
        self._received = {index for index in self._received if index < first_own}
        common = [index for index in self._missing if index < first_own]
        self._missing = deque([*common, *range(first_own, table.block_count)])

    def _matches_chosen(self, donor: _Source) -> bool:
        return (
            self._chosen is not None
            and donor.table is not None
            and donor.table.shared_key == self._chosen.shared_key
        )

    def _request_blocks(self) -> list[tuple[m.PeerId, m.Message]]:
        asks: list[tuple[m.PeerId, m.Message]] = []
        if self._chosen is None:
            return asks
        first_own = _block_count(self._chosen.common_bytes)
        for peer, donor in self._sources.items():
            if not self._matches_chosen(donor):
                continue
            wanted: list[int] = []
            passed: list[int] = []
            while self._missing and len(donor.requested) < WINDOW:
                index = self._missing.popleft()
                if index >= first_own and peer != self._private_source:
                    passed.append(index)  # only its own donor has it
                    continue
                wanted.append(index)
                donor.requested.add(index)
            self._missing.extendleft(reversed(passed))
            if wanted:
                asks.append((peer, m.SnapshotBlocksRequest(self._chosen.applied, tuple(wanted))))
        return asks


def _read_table(told: m.SnapshotDigests, max_bytes: int) -> SnapshotTable:
    payload = bytes(told.payload)
    if len(payload) < _TABLE.size:
        raise RemoteProtocolError(f"an image's table of {len(payload)} bytes", remedy=_REMEDY)
    common_bytes, own_bytes = _TABLE.unpack_from(payload)
    if own_bytes + common_bytes > max_bytes:
        raise RemoteProtocolError(
            f"an image of {own_bytes + common_bytes} bytes; at most {max_bytes} are taken for this model",
            remedy=_REMEDY,
        )
    end = _TABLE.size + _block_count(common_bytes) * _DIGEST_BYTES
    if len(payload) != end + _block_count(own_bytes) * _DIGEST_BYTES:
        raise RemoteProtocolError(
            f"an image's table of {len(payload)} bytes for parts of {own_bytes} and {common_bytes}",
            remedy=_REMEDY,
        )
    common_digests, own_digests = payload[_TABLE.size : end], payload[end:]
    return SnapshotTable(told.applied, told.history, own_bytes, common_bytes, own_digests, common_digests)


def _split_digests(digests: bytes) -> list[bytes]:
    return [digests[i : i + _DIGEST_BYTES] for i in range(0, len(digests), _DIGEST_BYTES)]


def _block_count(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES)
