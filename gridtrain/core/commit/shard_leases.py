"""Assigns the shards of a sharded data set to members (leases), so that each member opens few files.

The positions of a pass are those of its shards, one shard after another, in an order that the data seed and
the pass determine.  A member that takes positions from a shard leases the rest of it: later steps give that
rest to this member, and to no other, so that it reads the shard alone and in ascending order.

    shards of 6, 4 and 5 samples   |0 1 2 3 4 5|6 7 8 9|10 11 12 13 14|
    step 0, shares a: 2, b: 2       a a . . . . b b . .                   leases  a: 2-5   b: 8-9
    step 1                              a a . .     b b                   leases  a: 4-5
    step 2                                  a a         b  b  .  .  .     leases  b: 12-14
    step 3: no shard is left, a takes over part of b's lease       b  a  a

A member whose lease ends takes the next free piece: first the positions of lost members
(`LedgerState.requeued`), then the next shard of the pass.  If no shard of the pass is left, it takes over the
second half of the longest lease.  The same rule covers groups with more members than shards, and members that
join late.  The next pass begins when no lease of the previous pass is left, so steps are as large as in a run
without shards.

Everything is computed from the replicated ledger and the members' sample counts, identically on every worker.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from gridtrain.core.messages import LedgerSpec, LedgerState, PeerId, Span

MAX_LEASES = 256
"""Maximum number of members with leases, so that a ledger fits into a message.  If more members have begun a
shard, the rest of each further member's shard is re-queued after each step."""


@lru_cache(maxsize=8)
def shard_order(shards: tuple[int, ...], seed: int, pass_number: int) -> tuple[int, ...]:
    """Return the shards' indices in the order of a pass: sorted by a digest of seed, pass and index."""

    def key(index: int) -> bytes:
        return hashlib.blake2b(f"{seed} {pass_number} {index}".encode(), digest_size=16).digest()

    return tuple(sorted(range(len(shards)), key=key))


@lru_cache(maxsize=8)
def shard_starts(shards: tuple[int, ...], seed: int, pass_number: int) -> tuple[int, ...]:
    """Return the offset from the beginning of the pass at which each shard begins, in the order of the pass.

    The last of the len(shards) + 1 items is the size of the pass.
    """
    order = shard_order(shards, seed, pass_number)
    return tuple(accumulate((shards[index] for index in order), initial=0))


def locate(spec: LedgerSpec, position: int) -> tuple[int, int, int]:
    """Return the shard of a position, the position within the shard, and the number of positions from there
    to the end of the shard."""
    pass_number, offset = divmod(position, spec.size)
    starts = shard_starts(spec.shards, spec.seed, pass_number)
    place = bisect_right(starts, offset) - 1
    shard = shard_order(spec.shards, spec.seed, pass_number)[place]
    return shard, offset - starts[place], starts[place + 1] - offset


def split_at_shards(spec: LedgerSpec, spans: Iterable[Span]) -> Iterator[Span]:
    """Divide the spans at the boundaries between shards, and yield the parts in order."""
    for span in spans:
        start = span.start
        while start < span.stop:
            stop = min(span.stop, start + locate(spec, start)[2])
            yield Span(start, stop)
            start = stop


class HandOut:
    """The positions that a step assigns to each member, and the ledger afterwards.

    Args:
        free: the positions of the pass that have not been assigned yet.
        counts: the members that take positions, in rank order, each with its number of samples.  The sum of
            these numbers must not exceed the number of positions that are leased, re-queued or free.

    Attributes:
        taken: the spans of each member.
        state: the ledger with the new leases and without the taken positions.
    """

    def __init__(
        self, spec: LedgerSpec, state: LedgerState, free: Sequence[Span], counts: Sequence[tuple[PeerId, int]]
    ) -> None:
        self._spec = spec
        self._leases = dict(state.leases)
        # Split lazily, because a hostile member could report spans of any length.
        self._requeued, self._free = deque(state.requeued), deque(free)
        self._cursor = state.cursor
        self._missing = dict(counts)
        self.taken: dict[PeerId, list[Span]] = {peer: [] for peer, _ in counts}
        for peer, _ in counts:
            if own := self._leases.pop(peer, None):
                self._take(peer, own)
        for peer, _ in counts:
            while self._missing[peer] and (piece := self._next_free()):
                self._take(peer, piece)
        for peer, _ in counts:
            while self._missing[peer] and (piece := self._split_longest(self._missing[peer])):
                self._take(peer, piece)
        leases = sorted(self._leases.items())
        self._requeued += (span for _, span in leases[MAX_LEASES:])
        self.state = replace(
            state,
            cursor=self._cursor,
            requeued=tuple(sorted(self._requeued, key=lambda span: span.start)),
            leases=tuple(leases[:MAX_LEASES]),
        )

    def _take(self, peer: PeerId, piece: Span) -> None:
        """Give a member the positions that it still needs from `piece`, and lease it the rest."""
        stop = min(piece.stop, piece.start + self._missing[peer])
        if piece.start < stop:
            self.taken[peer].append(Span(piece.start, stop))
            self._missing[peer] -= stop - piece.start
        if stop < piece.stop:
            self._leases[peer] = Span(stop, piece.stop)

    def _next_free(self) -> Span | None:
        """Remove and return the next piece that no member has leased; return None if there is none."""
        queue = self._requeued or self._free
        if not queue:
            return None
        span = queue.popleft()
        piece = next(split_at_shards(self._spec, [span]))
        if piece.stop < span.stop:
            queue.appendleft(Span(piece.stop, span.stop))
        if queue is self._free:
            self._cursor = piece.stop
        return piece

    def _split_longest(self, count: int) -> Span | None:
        """Remove and return the second half of the longest lease; return None if there are no leases.

        If the second half has fewer than `count` positions, the last `count` positions, or the whole lease if
        it is shorter, are taken instead.
        """
        if not self._leases:
            return None
        owner = max(self._leases, key=lambda peer: (_length(self._leases[peer]), peer))
        lease = self._leases.pop(owner)
        start = max(lease.start, lease.stop - max(count, _length(lease) // 2))
        if lease.start < start:
            self._leases[owner] = Span(lease.start, start)
        return Span(start, lease.stop)


def _length(span: Span) -> int:
    return span.stop - span.start
