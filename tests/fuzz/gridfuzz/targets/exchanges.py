"""One collective of one round at one rank: expected messages in any order, and unexpected ones.

input:  u8 kind, u8 ranks, u8 rank, u8 slices, then for each arrival one byte for its kind, and its arguments
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from gridfuzz.source import Source
from gridfuzz.targets.base import Target, must
from gridtrain.core.collectives import butterfly, tree
from gridtrain.core.collectives.allgather import AllGather
from gridtrain.core.collectives.butterfly import ButterflyExchange
from gridtrain.core.collectives.collective import (
    Collective,
    CollectiveComplete,
    CollectiveEffect,
    SendTo,
)
from gridtrain.core.collectives.direct import DirectAllReduce
from gridtrain.core.collectives.ring import RingAllReduce
from gridtrain.core.collectives.star import DenseStar, SparseStar
from gridtrain.core.collectives.tree import TreeExchange
from gridtrain.core.messages import CollectivePhase, PayloadSlot
from gridtrain.errors import RemoteProtocolError

Due = list[tuple[int, PayloadSlot]]
DENSE: dict[int, type[RingAllReduce] | type[DenseStar] | type[DirectAllReduce]] = {
    0: RingAllReduce,
    5: DenseStar,
    6: DirectAllReduce,
}
SCHEDULES = {2: butterfly.schedule, 3: tree.schedule}


def expected(kind: int, rank: int, world_size: int, slices: int) -> Due:
    """(sender, slot) of all messages that this rank receives, from the exchanges' definitions."""
    ranks = range(world_size)
    match kind:
        case 0:
            left, last = (rank - 1) % world_size, world_size - 2
            hops = range(last + 1)
            reduce = [
                PayloadSlot(CollectivePhase.REDUCE, hop, (left - hop) % world_size, s)
                for hop in hops
                for s in range(slices)
            ]
            gather = [
                PayloadSlot(CollectivePhase.GATHER, hop, (rank - hop) % world_size, s)
                for hop in hops
                for s in range(slices)
            ]
            return [(left, place) for place in [*reduce, *gather]] if world_size > 1 else []
        case 1:
            due = []
            for origin in ranks:
                distance = (origin - rank) % world_size
                if distance:
                    hop = distance.bit_length() - 1
                    due.append(
                        (
                            (rank + (1 << hop)) % world_size,
                            PayloadSlot(CollectivePhase.ALL_GATHER, hop, origin),
                        )
                    )
            return due
        case 2 | 3:
            hops = SCHEDULES[kind](rank, world_size)
            return [(hop.partner, hop.slot) for hop in hops if hop.is_receiver]
        case 6:
            others = [(r, s) for r in ranks if r != rank for s in range(slices)]
            parts = [(r, PayloadSlot(CollectivePhase.REDUCE, 0, rank, s)) for r, s in others]
            return parts + [(r, PayloadSlot(CollectivePhase.GATHER, 0, r, s)) for r, s in others]
        case _:
            count = slices if kind == 5 else 1
            if rank == 0:
                return [
                    (r, PayloadSlot(CollectivePhase.TO_ROOT, 0, r, s))
                    for s in range(count)
                    for r in ranks
                    if r
                ]
            return [(0, PayloadSlot(CollectivePhase.FROM_ROOT, 0, 0, s)) for s in range(count)]


def run(data: bytes) -> bool:
    source = Source(data)
    kind, world_size = source.below(7), 1 + source.below(9)
    rank, slices = source.below(world_size), 1 + source.below(3)
    if kind in DENSE:
        core: Collective = DENSE[kind](rank, world_size, slices, 0)
    else:
        core = (AllGather, ButterflyExchange, TreeExchange, SparseStar)[kind - 1](rank, world_size, 0)
    due, sent = expected(kind, rank, world_size, slices), 0
    awaited = len(due)
    sent += _check(core.start(), rank, world_size, completes=not due)
    for _ in range(256):
        if source.empty:
            break
        if due and not source.one_in(3):
            arrival = due[0] if kind == 0 else source.choice(due)
            must(
                arrival[0] in core.waiting_for() or kind in SCHEDULES,
                "a payload is due from a rank that is not in `waiting_for`",
            )
            due.remove(arrival)
            effects = core.handle(*arrival, source.byte(), b"x")
            sent += _check(effects, rank, world_size, completes=not due)
            continue
        from_rank, slot = _wrong(source, world_size, due)
        try:
            effects = core.handle(from_rank, slot, 0, b"wrong")
        except RemoteProtocolError:
            continue  # that it changed nothing is visible later
        must((from_rank, slot) in due, f"a payload that was not due is accepted: {slot} of {from_rank}")
        due.remove((from_rank, slot))
        sent += _check(effects, rank, world_size, completes=not due)
    must(core.complete == (not due), "complete with a missing payload, or incomplete with all")
    if not due:
        must(not core.waiting_for(), "waits for a rank although no payload is due")
        must(sent == _to_send(kind, rank, world_size, slices), f"another number of payloads is sent: {sent}")
    return awaited > 0 and not due


def _wrong(source: Source, world_size: int, due: Due) -> tuple[int, PayloadSlot]:
    if due and source.one_in(2):
        sender, place = source.choice(due)
        sender = source.choice((sender, (sender + 1) % world_size, world_size))
        if source.one_in(2):
            place = PayloadSlot(
                place.phase, place.hop, source.choice((place.segment, place.segment + 1)), 2**31 - 1
            )
    else:
        numbers = [source.choice((0, 1, 2, 3, world_size, 2**31 - 1)) for _ in range(3)]
        sender, place = (
            source.below(world_size + 1),
            PayloadSlot(source.choice(list(CollectivePhase)), *numbers),
        )
    return sender, place


def _check(effects: Sequence[CollectiveEffect], rank: int, world_size: int, completes: bool) -> int:
    """Check that payloads go to other ranks of the group, and that `Complete` is the last effect, once."""
    sends = [effect for effect in effects if isinstance(effect, SendTo)]
    must(all(0 <= s.to_rank < world_size and s.to_rank != rank for s in sends), "sent to no other rank")
    done = [isinstance(effect, CollectiveComplete) for effect in effects]
    must(sum(done) == completes and (not completes or done[-1]), "Complete at the wrong time")
    return len(sends)


def _to_send(kind: int, rank: int, world_size: int, slices: int) -> int:
    if kind in (0, 6):
        return 2 * (world_size - 1) * slices
    if kind in SCHEDULES:
        return sum(hop.is_sender for hop in SCHEDULES[kind](rank, world_size))
    if kind >= 4:
        return (world_size - 1 if rank == 0 else 1) * (slices if kind == 5 else 1)
    reached = range(world_size)  # each rank forwards payloads along the tree of each origin
    return sum(
        (1 << hop) + (origin - rank) % world_size < world_size
        for origin in reached
        for hop in range(((origin - rank) % world_size).bit_length(), (world_size - 1).bit_length())
    )


def valid(random: Random) -> bytes:
    head = bytes(random.randrange(9) for _ in range(4))
    return head + bytes(
        random.choice((0, 0, 1, random.randrange(256))) for _ in range(random.choice((6, 40, 200)))
    )


TARGETS = (
    Target(
        "collectives",
        "arrivals into ring, all-gather, butterfly, tree and stars",
        run,
        valid,
        tuple(
            f"gridtrain.core.collectives.{name}"
            for name in ("ring", "allgather", "butterfly", "hop_exchange", "tree", "star")
        ),
        max_bytes=600,
    ),
)
