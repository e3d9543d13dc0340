"""A joiner's state on its way: cut into blocks on one side, put together on the other.

Decides nothing about who gives to whom (`protocol.member` does) and opens no blob.

    blobs  [a][bb][c]   ->   lengths | a | b | b | c    blocks of at most 1 MiB, in order
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence

from gridtrain.errors import RemoteProtocolError, TransportError
from gridtrain.protocol.messages import PeerId, StateBlock
from gridtrain.transport.base import Transport

BLOCK_BYTES = 1 << 20
BACKLOG_BYTES = 4 << 20  # how much is queued in the transport at a time
MAX_STATE_BYTES = 64 << 30


def cut(blobs: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Blocks of at most `BLOCK_BYTES`; the first holds the blobs' lengths."""
    views = [memoryview(blob).cast("B") for blob in blobs]
    blocks: list[bytes | memoryview] = [struct.pack(f"<{len(views)}Q", *(len(view) for view in views))]
    for view in views:
        blocks += [view[i : i + BLOCK_BYTES] for i in range(0, len(view), BLOCK_BYTES)]
    return blocks


class StateOutlet:
    """The donor's side: sends the captured state to whoever asked, as the transport drains."""

    def __init__(self) -> None:
        self._waiting: dict[PeerId, tuple[int, int]] = {}
        self._queues: dict[PeerId, deque[StateBlock]] = {}
        self._captured: tuple[int, list[bytes | memoryview]] = (0, [])

    @property
    def wanted(self) -> int:
        """Generation whose joiners wait for the trainer to capture; 0: none."""
        return max((generation for _, generation in self._waiting.values()), default=0)

    def ask(self, peer: PeerId, term: int, generation: int) -> None:
        """A joiner wants the state as of `generation`; what was captured for it serves all who ask."""
        self._waiting[peer] = (term, generation)
        self._queues.pop(peer, None)
        self._serve()

    def fill(self, generation: int, blobs: Sequence[bytes | memoryview]) -> None:
        """The trainer captured its state for `generation`."""
        self._captured = (generation, cut(blobs))
        self._serve()

    def forget(self) -> None:
        """The generation has started: its members hold the state, and it is about to change."""
        self._captured = (0, [])
        self._waiting.clear()
        self._queues.clear()

    def _serve(self) -> None:
        generation, blocks = self._captured
        for peer, (term, asked) in list(self._waiting.items()):
            if asked == generation:
                del self._waiting[peer]
                self._queues[peer] = deque(
                    StateBlock(term, generation, index, len(blocks), block)
                    for index, block in enumerate(blocks)
                )

    def ready(self, transport: Transport) -> bool:
        return any(transport.backlog_bytes(peer) < BACKLOG_BYTES for peer in self._queues)

    def pump(self, transport: Transport) -> int:
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


class StateIntake:
    """The joiner's side.  A block of a newer generation starts anew."""

    def __init__(self) -> None:
        self._id = (0, 0)
        self._total = 0
        self._blocks: dict[int, bytes] = {}

    def take(self, block: StateBlock) -> None:
        """Raises `RemoteProtocolError` for a block that cannot belong to the others."""
        if (block.term, block.generation) != self._id:
            self._id, self._total, self._blocks = (block.term, block.generation), block.total, {}
        if block.total != self._total or not 0 <= block.index < block.total:
            raise RemoteProtocolError(
                f"block {block.index} of {block.total} in a state of {self._total} blocks"
            )
        if block.total * BLOCK_BYTES > MAX_STATE_BYTES:
            raise RemoteProtocolError(
                f"a state of {block.total} blocks; at most {MAX_STATE_BYTES // BLOCK_BYTES}"
            )
        payload = bytes(block.payload)
        if len(payload) > BLOCK_BYTES:
            raise RemoteProtocolError(f"a block of {len(payload)} bytes; at most {BLOCK_BYTES}")
        self._blocks[block.index] = payload

    def complete_for(self, generation: int) -> bool:
        return generation == self._id[1] and 0 < self._total == len(self._blocks)

    def blobs(self) -> tuple[int, int, list[bytes]]:
        """Term, generation and the donor's blobs; the blocks are released.

        Raises `RemoteProtocolError` if the table of lengths lies.
        """
        blocks, self._blocks = self._blocks, {}
        head = blocks.pop(0)
        if len(head) % 8:
            raise RemoteProtocolError(
                f"the state's table of lengths has {len(head)} bytes, not a multiple of 8"
            )
        lengths = struct.unpack(f"<{len(head) // 8}Q", head)
        whole = b"".join(blocks[index] for index in sorted(blocks))
        if sum(lengths) != len(whole):
            raise RemoteProtocolError(f"the state has {len(whole)} bytes, its table says {sum(lengths)}")
        blobs, offset = [], 0
        for length in lengths:
            blobs.append(whole[offset : offset + length])
            offset += length
        return *self._id, blobs
