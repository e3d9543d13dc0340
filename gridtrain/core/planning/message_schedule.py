"""Exchanges as data: which message follows which, with its size and the work that it makes.

Decides the moves of each exchange from the schedules of the cores (`ring`, `gtopk`, `allgather`).  Never
times anything: `costs` walks them over a network.

    gTop-k, P = 3         move  from  to   needs        work at the receiver
                          0     2     0    -            merge
                          1     1     0    -            merge
                          2     0     1    0            merge
                          3     0     2    1            adopt

`needs` are moves that must have been dealt with at this move's sender; with none it leaves at the start.
`after` are those that its receiver deals with first, even where they come later.
The tests hold each against the real cores, message by message, in `sim.exchange`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gridtrain.core.collectives import butterfly as butterfly_exchange
from gridtrain.core.collectives.hop_exchange import Hop


class ReceiveWork(StrEnum):
    """What a receiver does with a message before anything that needs it can go on."""

    ADD = "add"  # a dense slice to its own
    STORE = "store"  # a dense slice
    MERGE = "merge"  # two sparse payloads into one
    KEEP = "keep"  # one more sparse payload of an all-gather
    POOL = "pool"  # one more sparse payload that a star's centre reads, and adds
    ADOPT = "adopt"  # the result


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """One message; `count` payloads of the same kind in it (or so many messages on end)."""

    src: int
    dst: int
    fraction: float  # of the exchange's unit: the whole dense vector, or one sparse payload
    work: ReceiveWork
    needs: tuple[int, ...] = ()
    after_messages: tuple[int, ...] = ()
    count: int = 1


def ring(world_size: int, slices: int) -> list[PlannedMessage]:
    """Reduce-scatter and all-gather, see `protocol.ring`; a segment travels in `slices`."""
    moves: list[PlannedMessage] = []
    part, last = 1 / (world_size * slices), world_size - 1
    for hop in range(2 * last):
        work = ReceiveWork.ADD if hop < last else ReceiveWork.STORE
        for _slice in range(slices):
            for segment in range(world_size):
                needs = (len(moves) - world_size * slices,) if hop else ()
                src = (segment + hop) % world_size
                moves.append(PlannedMessage(src, (src + 1) % world_size, part, work, needs))
    return moves


def direct(world_size: int, slices: int) -> list[PlannedMessage]:
    """Each to each its chunk, then each sum to all, see `protocol.direct`; a segment travels in `slices`."""
    part, others = 1 / (world_size * slices), range(1, world_size)
    moves: list[PlannedMessage] = []
    came: dict[tuple[int, int], list[int]] = {}  # (owner, slice) -> the moves that bring its parts
    for slice_ in range(slices):
        for distance in others:
            for src in range(world_size):
                dst = (src + distance) % world_size
                came.setdefault((dst, slice_), []).append(len(moves))
                moves.append(PlannedMessage(src, dst, part, ReceiveWork.ADD))
    for slice_ in range(slices):
        for distance in others:
            for src in range(world_size):
                dst = (src + distance) % world_size
                moves.append(PlannedMessage(src, dst, part, ReceiveWork.STORE, tuple(came[src, slice_])))
    return moves


BUNDLING_MIN_RANKS = 32
"""An all-gather of more ranks moves what goes over an edge in one hop as one: P log P moves, not P * P."""


def all_gather(world_size: int) -> list[PlannedMessage]:
    """Everybody's payload to everybody, along a binomial tree from each origin; see `protocol.allgather`."""
    if world_size > BUNDLING_MIN_RANKS:
        return _bundled_all_gather(world_size)
    moves: list[PlannedMessage] = []
    came: dict[tuple[int, int], int] = {}  # (origin, distance below it) -> the move that brought it there
    for hop in range((world_size - 1).bit_length()):
        for origin in range(world_size):
            for far in range(min(1 << hop, world_size - (1 << hop))):
                needs = (came[origin, far],) if far else ()
                src, dst = (origin - far) % world_size, (origin - far - (1 << hop)) % world_size
                came[origin, far + (1 << hop)] = len(moves)
                moves.append(PlannedMessage(src, dst, 1.0, ReceiveWork.KEEP, needs))
    return moves


def _bundled_all_gather(world_size: int) -> list[PlannedMessage]:
    moves: list[PlannedMessage] = []
    for hop in range((world_size - 1).bit_length()):
        count = min(1 << hop, world_size - (1 << hop))
        for rank in range(world_size):
            # all earlier hops that ended here: one from the rank 2 ** h above, for each h < hop
            needs = tuple(h * world_size + (rank + (1 << h)) % world_size for h in range(hop))
            dst = (rank - (1 << hop)) % world_size
            moves.append(PlannedMessage(rank, dst, 1.0, ReceiveWork.KEEP, needs, count=count))
    return moves


def butterfly(world_size: int) -> list[PlannedMessage]:
    """gTop-k among all ranks, from `protocol.gtopk.schedule`."""
    moves: list[PlannedMessage] = []
    hops = [butterfly_exchange.schedule(rank, world_size) for rank in range(world_size)]
    came: list[int | None] = [None] * world_size  # the last move that each rank has dealt with
    for level in _levels(hops):
        before = list(came)
        for rank, hop in level:
            needs = (since,) if (since := before[rank]) is not None else ()
            after = (since,) if (since := before[hop.partner]) is not None else ()
            merges = any(other.slot == hop.slot and other.owner_modulus for other in hops[hop.partner])
            came[hop.partner] = len(moves)
            work = ReceiveWork.MERGE if merges else ReceiveWork.ADOPT
            moves.append(PlannedMessage(rank, hop.partner, 1.0, work, needs, after))
    return moves


def _levels(hops: Sequence[Sequence[Hop]]) -> list[list[tuple[int, Hop]]]:
    """The sends of all ranks by phase and hop: within a level nothing waits for anything."""
    levels: dict[tuple[int, int], list[tuple[int, Hop]]] = {}
    for rank, line in enumerate(hops):
        for hop in line:
            if hop.is_sender:
                levels.setdefault((int(hop.slot.phase), hop.slot.hop), []).append((rank, hop))
    return [levels[key] for key in sorted(levels)]


def tree(world_size: int) -> list[PlannedMessage]:
    """gTop-k as published (arXiv 1901.04359): merges up a binomial tree to rank 0, the result down again."""
    moves: list[PlannedMessage] = []
    came: dict[int, int] = {}
    distances = [1 << hop for hop in range((world_size - 1).bit_length())]
    for d in distances:
        for rank in range(d, world_size, 2 * d):
            needs = (came[rank],) if rank in came else ()
            after = (came[rank - d],) if rank - d in came else ()
            came[rank - d] = len(moves)
            moves.append(PlannedMessage(rank, rank - d, 1.0, ReceiveWork.MERGE, needs, after))
    for d in reversed(distances):
        for rank in range(d, world_size, 2 * d):
            needs = (came[rank - d],)
            came[rank] = len(moves)
            moves.append(PlannedMessage(rank - d, rank, 1.0, ReceiveWork.ADOPT, needs))
    return moves


def star(world_size: int, slices: int, arrives: ReceiveWork, result: ReceiveWork) -> list[PlannedMessage]:
    """All to rank 0, and the result back from it; a slice goes back when all of it are there."""
    moves: list[PlannedMessage] = []
    part = 1 / slices
    for _slice in range(slices):
        moves += [PlannedMessage(rank, 0, part, arrives) for rank in range(1, world_size)]
    for slice_ in range(slices):
        first = slice_ * (world_size - 1)
        needs = tuple(range(first, first + world_size - 1))
        moves += [PlannedMessage(0, rank, part, result, needs) for rank in range(1, world_size)]
    return moves
