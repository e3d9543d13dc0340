"""Divides the parts of a state into blocks of a fixed size and stores blocks as they arrive.

    parts of 3 bytes and 2.5 MiB  ->  block 0 [3]   block 1 [1 MiB]   block 2 [1 MiB]   block 3 [0.5 MiB]

A block holds bytes of only one part.  States for a forming generation, snapshots and copies of checkpoints
are all divided in this way, but their blocks are requested and checked in different ways.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

BLOCK_BYTES = 1 << 20


def count_blocks(nbytes: int) -> int:
    """Return the number of blocks into which `nbytes` bytes are divided; the last block may be shorter."""
    return -(-nbytes // BLOCK_BYTES)


def allocate(nbytes: int) -> memoryview:
    """Return an uninitialized buffer, whose pages take up memory only when they are written to.

    The length is announced by another worker, which could otherwise make this worker fill a large buffer with
    zeros by sending only a few bytes.
    """
    return np.empty(nbytes, np.uint8).data if nbytes else memoryview(bytearray())


class BlockPlace(NamedTuple):
    """The position of a block: the `nbytes` bytes of part `part` that start at `offset`."""

    part: int
    offset: int
    nbytes: int


class BlockLayout:
    """Describes how parts of the given lengths are divided into blocks."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self._first_blocks = tuple(accumulate(map(count_blocks, self.lengths), initial=0))

    @property
    def block_count(self) -> int:
        return self._first_blocks[-1]

    def first_block(self, part: int) -> int:
        """Return the index of the part's first block; for an empty part, the index of the next block."""
        return self._first_blocks[part]

    def place(self, index: int) -> BlockPlace:
        """Return the position of the block with this index, which must be less than `block_count`."""
        part = bisect_right(self._first_blocks, index) - 1
        offset = (index - self._first_blocks[part]) * BLOCK_BYTES
        return BlockPlace(part, offset, min(BLOCK_BYTES, self.lengths[part] - offset))


class BlockBuffer:
    """One contiguous buffer for each part of a state; blocks are stored in arbitrary order.

    Attributes:
        received: the indices of the received blocks.
        received_bytes: the number of bytes in the received blocks.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.layout = BlockLayout(lengths)
        self.parts = [allocate(length) for length in lengths]
        self.received: set[int] = set()
        self.received_bytes = 0

    @classmethod
    def of_parts(cls, parts: Sequence[memoryview]) -> BlockBuffer:
        """Make a buffer from parts that may already hold blocks; record these with `mark_received`."""
        buffer = cls(())
        buffer.layout, buffer.parts = BlockLayout([len(part) for part in parts]), list(parts)
        return buffer

    @property
    def missing_bytes(self) -> int:
        return sum(self.layout.lengths) - self.received_bytes

    def mark_received(self, indices: Iterable[int]) -> None:
        new = set(indices) - self.received
        self.received |= new
        self.received_bytes += sum(self.layout.place(index).nbytes for index in new)

    def store(self, index: int, payload: bytes | memoryview) -> None:
        """Store a block that has not been received before.  `payload` must be as long as the block."""
        part, offset, nbytes = self.layout.place(index)
        self.parts[part][offset : offset + nbytes] = payload
        self.received.add(index)
        self.received_bytes += len(payload)

    def block(self, index: int) -> memoryview:
        """Return a read-only view of a received block."""
        part, offset, nbytes = self.layout.place(index)
        return self.parts[part].toreadonly()[offset : offset + nbytes]
