"""Lists the messages of an exchange with dependencies, sizes and receivers' work, for the simulation.

    gTop-k, P = 3         message  from  to   needs        work at the receiver
                          0        2     0    -            merge
                          1        1     0    -            merge
                          2        0     1    0            merge
                          3        0     2    1            adopt

The schedules are the same as in `gridtrain.core.collectives`: `tests/simulation/virtual_exchange.py` runs the
real collectives and compares each of their messages with these schedules.  `exchange_simulation` computes the
times of the messages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from gridtrain.core.collectives import butterfly as butterfly_exchange
from gridtrain.core.collectives import tree as tree_exchange
from gridtrain.core.collectives.hop_exchange import Hop
from gridtrain.core.messages import CollectivePhase


class ReceiveWork(StrEnum):
    """The receiver's work on a message before it can send the messages that depend on it."""

    ADD = "add"  # adds a dense slice to its own slice
    STORE = "store"  # copies a dense slice
    MERGE = "merge"  # merges two sparse payloads into one
    KEEP = "keep"  # decodes one more sparse payload of an all-gather
    POOL = "pool"  # decodes one of the sparse payloads that this rank sums for all
    ADOPT = "adopt"  # decodes the result


@dataclass(frozen=True, slots=True)
class PlannedMessage:
    """One message of an exchange.

    Attributes:
        src, dst: the ranks of the sender and the receiver.
        fraction: the size of each payload as a fraction of the exchange's unit, which is the whole dense
            vector or one sparse payload.
        work: the receiver's work.
        needs: indices of the messages that the sender must have received and handled before it sends this
            message.  A message that needs no other message is sent at the start.
        after_messages: indices of the messages that the receiver handles before this message, even if they
            arrive later.
        count: the number of payloads in the message.
    """

    src: int
    dst: int
    fraction: float
    work: ReceiveWork
    needs: tuple[int, ...] = ()
    after_messages: tuple[int, ...] = ()
    count: int = 1


def ring(world_size: int, slices: int) -> list[PlannedMessage]:
    """Return the messages of `collectives.ring`, a reduce-scatter and an all-gather.

    In each hop, each of the `world_size` segments is sent in `slices` messages.
    """
    messages: list[PlannedMessage] = []
    part, last = 1 / (world_size * slices), world_size - 1
    for hop in range(2 * last):
        work = ReceiveWork.ADD if hop < last else ReceiveWork.STORE
        for _slice in range(slices):
            for segment in range(world_size):
                needs = (len(messages) - world_size * slices,) if hop else ()
                src = (segment + hop) % world_size
                messages.append(PlannedMessage(src, (src + 1) % world_size, part, work, needs))
    return messages


def direct(
    world_size: int,
    slices: int,
    arrives: ReceiveWork = ReceiveWork.ADD,
    result: ReceiveWork = ReceiveWork.STORE,
) -> list[PlannedMessage]:
    """Return the messages of `collectives.direct`.

    Each member sends to every other member the segment that the other member sums, and then sends the sum of
    its own segment to all other members.

    Args:
        arrives, result: the receiver's work on a part of a segment, and on a sum.
    """
    part, others = 1 / (world_size * slices), range(1, world_size)
    messages: list[PlannedMessage] = []
    carriers: dict[tuple[int, int], list[int]] = {}  # (owner, slice) -> messages that carry its addends
    for slice_ in range(slices):
        for distance in others:
            for src in range(world_size):
                dst = (src + distance) % world_size
                carriers.setdefault((dst, slice_), []).append(len(messages))
                messages.append(PlannedMessage(src, dst, part, arrives))
    for slice_ in range(slices):
        for distance in others:
            for src in range(world_size):
                dst = (src + distance) % world_size
                messages.append(PlannedMessage(src, dst, part, result, tuple(carriers[src, slice_])))
    return messages


BUNDLING_MIN_RANKS = 32
"""In an all-gather with more ranks than this, all payloads that a rank sends in a hop are counted as one
message, so that there are P log P messages instead of P * P."""


def all_gather(world_size: int) -> list[PlannedMessage]:
    """Return the messages of `collectives.allgather`, in which each payload is sent along a binomial tree."""
    if world_size > BUNDLING_MIN_RANKS:
        return _bundled_all_gather(world_size)
    messages: list[PlannedMessage] = []
    carriers: dict[tuple[int, int], int] = {}  # (origin, distance below it) -> the message that carried it
    for hop in range((world_size - 1).bit_length()):
        for origin in range(world_size):
            for far in range(min(1 << hop, world_size - (1 << hop))):
                needs = (carriers[origin, far],) if far else ()
                src, dst = (origin - far) % world_size, (origin - far - (1 << hop)) % world_size
                carriers[origin, far + (1 << hop)] = len(messages)
                messages.append(PlannedMessage(src, dst, 1.0, ReceiveWork.KEEP, needs))
    return messages


def _bundled_all_gather(world_size: int) -> list[PlannedMessage]:
    messages: list[PlannedMessage] = []
    for hop in range((world_size - 1).bit_length()):
        count = min(1 << hop, world_size - (1 << hop))
        for rank in range(world_size):
            # all earlier hops that ended at this rank: one from the rank 2 ** h above, for each h < hop
            needs = tuple(h * world_size + (rank + (1 << h)) % world_size for h in range(hop))
            dst = (rank - (1 << hop)) % world_size
            messages.append(PlannedMessage(rank, dst, 1.0, ReceiveWork.KEEP, needs, count=count))
    return messages


def butterfly(world_size: int) -> list[PlannedMessage]:
    """Return the messages of gTop-k in a butterfly, according to `collectives.butterfly.schedule`."""
    return _messages_of_hops([butterfly_exchange.schedule(rank, world_size) for rank in range(world_size)])


def tree(world_size: int) -> list[PlannedMessage]:
    """Return the messages of gTop-k on a tree (arXiv 1901.04359), according to `collectives.tree.schedule`.

    Payloads are merged up a binomial tree to rank 0, and the result is sent down the same tree.
    """
    return _messages_of_hops([tree_exchange.schedule(rank, world_size) for rank in range(world_size)])


def _messages_of_hops(hops: Sequence[Sequence[Hop]]) -> list[PlannedMessage]:
    messages: list[PlannedMessage] = []
    carriers: dict[int, int] = {}  # rank -> the last message that it has handled
    for level in send_levels(hops):
        before = dict(carriers)
        for rank, hop in level:
            needs = (before[rank],) if rank in before else ()
            merges = any(other.slot == hop.slot and other.owner_modulus for other in hops[hop.partner])
            after = (before[hop.partner],) if merges and hop.partner in before else ()
            carriers[hop.partner] = len(messages)
            work = ReceiveWork.MERGE if merges else ReceiveWork.ADOPT
            messages.append(PlannedMessage(rank, hop.partner, 1.0, work, needs, after))
    return messages


def send_levels(hops: Sequence[Sequence[Hop]]) -> list[list[tuple[int, Hop]]]:
    """Group the sends of all ranks, as pairs (rank, hop), by phase and hop; return the groups in order.

    Sends in one group do not depend on each other.

    Args:
        hops: for each rank, its hops.
    """
    levels: dict[tuple[int, int], list[tuple[int, Hop]]] = {}
    for rank, own_hops in enumerate(hops):
        for hop in own_hops:
            if hop.is_sender:
                downwards = hop.slot.phase is CollectivePhase.FROM_ROOT  # the longest hop is the first
                key = (int(hop.slot.phase), -hop.slot.hop if downwards else hop.slot.hop)
                levels.setdefault(key, []).append((rank, hop))
    return [levels[key] for key in sorted(levels)]


def star(world_size: int, slices: int, arrives: ReceiveWork, result: ReceiveWork) -> list[PlannedMessage]:
    """Return the messages of a star, in which all ranks send to rank 0 and rank 0 sends back the result.

    Rank 0 sends a slice of the result as soon as it has received that slice from all ranks.

    Args:
        arrives: the work of rank 0 on each payload that it receives.
        result: the work of the other ranks on each payload of the result.
    """
    messages: list[PlannedMessage] = []
    part = 1 / slices
    for _slice in range(slices):
        messages += [PlannedMessage(rank, 0, part, arrives) for rank in range(1, world_size)]
    for slice_ in range(slices):
        first = slice_ * (world_size - 1)
        needs = tuple(range(first, first + world_size - 1))
        messages += [PlannedMessage(0, rank, part, result, needs) for rank in range(1, world_size)]
    return messages


def scale_to_shares(messages: Sequence[PlannedMessage], shares: Sequence[float]) -> list[PlannedMessage]:
    """Return the messages of a sparse exchange in which rank r contributes `shares[r]` of the k entries.

    A member's own payload has its share of the k entries.  A merged payload is assumed to have as many
    entries as its two payloads together, but at most k.

    Args:
        messages: the messages of one sparse exchange, each after the messages that it needs.
    """
    scaled: list[PlannedMessage] = []
    held: list[float] = []  # for each message: the share that its receiver holds afterwards, or forwards
    for message in messages:
        if message.work is ReceiveWork.KEEP and (message.count > 1 or len(message.needs) != 1):
            origins = [(message.src + distance) % len(shares) for distance in range(message.count)]
            fraction = math.fsum(shares[rank] for rank in origins) / message.count
        elif message.needs and messages[message.needs[0]].work is ReceiveWork.POOL:  # a sum of all
            fraction = message.fraction * min(1.0, math.fsum(shares))
        else:
            fraction = held[message.needs[0]] if message.needs else message.fraction * shares[message.src]
        before = held[message.after_messages[0]] if message.after_messages else shares[message.dst]
        merged = min(1.0, before + fraction)
        held.append(merged if message.work is ReceiveWork.MERGE else fraction)
        scaled.append(replace(message, fraction=fraction))
    return scaled
