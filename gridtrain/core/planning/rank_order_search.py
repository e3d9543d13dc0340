"""In which order members take their ranks, so that an exchange over uneven links is fast.

Decides orders by predicted seconds (`costs`), not by rules of thumb; never measures and never speaks.

    ring        a thin link is in it once, or not at all; each line passes all segments
    butterfly   pairs rank with rank XOR 1, 2, 4: two sites with a thin line between meet in one hop only,
                and members beyond a power of two, whose way is longest, are the well connected ones
    star, tree  rank 0, where all meet, has the best line of those that may be it
    direct      everybody meets everybody; rank 0, where the vote is, as for a star

Up to 7 members every order is looked at; above, a good start is improved by swapping two members, for as
many trials as are allowed; above 128 only a star's root is chosen.  An order is looked at with `quick_s`,
which adds up hops without queues; the best few of them are then walked (`costs.cost`), message by message.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, permutations

from gridtrain.core.collectives import butterfly
from gridtrain.core.planning import cost_model
from gridtrain.core.planning.network_model import NetworkModel
from gridtrain.core.planning.workload import (
    CpuCosts,
    ExchangeKind,
    Workload,
    count_messages,
    messages_by_pair,
    slice_count,
)

EXACT_MAX_PEERS = 7  # 720 orders for each that may be rank 0
MOST_ROOTS = 3  # above that
MAX_EDGES = 150_000  # looked at in one search, about 0.2 s: the coordinator has other things to do
MAX_SEARCHED_PEERS = 128  # members; above, they stay as they joined: a search would hold up the coordinator
MIN_SIMULATED_ORDERS, SIMULATION_BUDGET = (
    24,
    20_000,
)  # so many orders are walked at least; more while they have fewer moves in all
SIMULATED_MESSAGES = 400  # a ring is compared with few slices

MemberOrder = tuple[int, ...]  # order[rank] is a member's index
OrderEstimator = Callable[[Sequence[int]], float]


@dataclass(frozen=True, slots=True)
class RankOrderEstimate:
    """The best order found, what an exchange takes with it, and what it takes in the order of joining."""

    order: MemberOrder
    exchange_s: float
    join_order_s: float


ROOT_ONLY_KINDS = (ExchangeKind.STAR, ExchangeKind.STAR_GTOPK, ExchangeKind.DIRECT)
"""All that matters is who is rank 0: of a direct exchange, where the vote is."""

RING_KINDS = (ExchangeKind.DENSE, ExchangeKind.TOPK)
"""A ring may begin anywhere, and in a gather all ranks do the same."""


def best_order(
    load: Workload, network: NetworkModel, cpu: CpuCosts, firsts: Sequence[int], now: Sequence[int] = ()
) -> RankOrderEstimate:
    """The order of `network`'s members with which `load` is exchanged soonest.

    Args:
        network: members in the order of joining.
        firsts: who may be rank 0; the first of them is where it makes no difference (`ROUND`).
        now: the order in which they stand, if they do: where the search begins as well.
    """
    members = range(network.size)
    walks = SIMULATION_BUDGET // max(1, count_messages(load, network.size, SIMULATED_MESSAGES))
    if load.kind in ROOT_ONLY_KINDS:
        roots = _fastest_peers(network, firsts, max(1, walks))
    elif load.kind in RING_KINDS or network.size > MAX_SEARCHED_PEERS:
        roots = list(firsts[:1])
    else:
        exact = network.size <= EXACT_MAX_PEERS
        roots = _fastest_peers(network, firsts, network.size if exact else MOST_ROOTS)
    starts = [(first, *(m for m in members if m != first)) for first in roots]
    quick: OrderEstimator | None = None
    finalists = starts
    if 2 < network.size <= MAX_SEARCHED_PEERS and load.kind not in ROOT_ONLY_KINDS:
        quick = order_estimator(load, network, cpu)
        stand = [tuple(now)] if sorted(now) == list(members) and now[0] in roots else []
        search = _all_orders if network.size <= EXACT_MAX_PEERS else _improved_orders
        found = search([*starts, *stand], quick, network, load, max(MIN_SIMULATED_ORDERS, walks))
        finalists = [starts[0], *stand, *found]
    timed = {order: simulated_exchange_s(load, network, cpu, order) for order in dict.fromkeys(finalists)}
    # Of equal ones that with the faster links in all; if these are equal too the first, that of joining.
    best = min(timed, key=lambda order: timed[order] + (1e-3 * quick(order) if quick else 0.0))
    return RankOrderEstimate(best, timed[best], timed[starts[0]])


def _fastest_peers(network: NetworkModel, firsts: Sequence[int], most: int) -> list[int]:
    """The first of them, and of the others those whose own lines are the fastest."""
    fast = sorted(firsts[1:], key=lambda member: -min(network.up_Bps[member], network.down_Bps[member]))
    return [firsts[0], *fast[: most - 1]]


def simulated_exchange_s(load: Workload, network: NetworkModel, cpu: CpuCosts, order: Sequence[int]) -> float:
    """Seconds of one exchange in this order, the vote included."""
    return cost_model.exchange_cost(
        load, network.reordered(order), cpu, most_moves=SIMULATED_MESSAGES
    ).exchange_s


def order_estimator(load: Workload, network: NetworkModel, cpu: CpuCosts) -> OrderEstimator:
    """Seconds of an order by its edges alone: lines that several messages share are not queued for."""
    size = network.size
    members, handling_s = range(size), 2 * cpu.message_s + cpu.wake_s
    alpha_s = [[network.link(a, b).alpha_s + handling_s if a != b else 0.0 for b in members] for a in members]
    byte_s = [[1 / network.path_Bps(a, b) if a != b else 0.0 for b in members] for a in members]
    make = {ExchangeKind.DENSE: _quick_ring, ExchangeKind.TOPK: _quick_gather}.get(load.kind, _quick_hops)
    alone_s = make(load, alpha_s, byte_s)
    if not network.shared_Bps:
        return alone_s
    crossed = messages_by_pair(load, size)
    part = load.unit_bytes / (
        size if load.kind in (ExchangeKind.DENSE, ExchangeKind.DIRECT) else 1
    )  # of one message of one slice
    shared = [[network.link(a, b).shared_links if a != b else () for b in members] for a in members]

    def together_s(order: Sequence[int]) -> float:
        """No less than the busiest line that several share."""
        busy_s = dict.fromkeys(network.shared_Bps, 0.0)
        for (src, dst), times in crossed.items():
            for name in shared[order[src]][order[dst]]:
                busy_s[name] += times * part / network.shared_Bps[name]
        return max(alone_s(order), *busy_s.values()) + 1e-3 * alone_s(order)

    return together_s


PairTable = Sequence[Sequence[float]]  # [src][dst]


def _quick_ring(load: Workload, alpha_s: PairTable, byte_s: PairTable) -> OrderEstimator:
    size = len(alpha_s)
    rounds, slices = 2 * (size - 1), slice_count(load, size)
    segment_bytes = load.unit_bytes / size

    def seconds(order: Sequence[int]) -> float:
        edges = [(a, order[rank + 1 - size]) for rank, a in enumerate(order)]
        slowest_s = max(byte_s[a][b] for a, b in edges) * segment_bytes
        way_s = sum(alpha_s[a][b] + byte_s[a][b] * segment_bytes / slices for a, b in edges) / size
        total_s = sum(byte_s[a][b] for a, b in edges) * segment_bytes
        return rounds * max(slowest_s, way_s) + (slices - 1) / slices * slowest_s + 1e-3 * total_s

    return seconds


def _quick_gather(load: Workload, alpha_s: PairTable, byte_s: PairTable) -> OrderEstimator:
    size = len(alpha_s)
    hops = [1 << hop for hop in range((size - 1).bit_length())]

    def seconds(order: Sequence[int]) -> float:
        longest_s = total_s = 0.0
        for d in hops:
            count = min(d, size - d)
            ends = ((order[rank], order[rank - d]) for rank in range(size))
            hop_s = max(alpha_s[a][b] + count * load.unit_bytes * byte_s[a][b] for a, b in ends)
            longest_s, total_s = max(longest_s, hop_s), total_s + hop_s
        return longest_s + total_s

    return seconds


def _quick_hops(load: Workload, alpha_s: PairTable, byte_s: PairTable) -> OrderEstimator:
    """The butterfly; a tree crosses the same edges."""
    size = len(alpha_s)
    levels: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank in range(size):
        for hop in butterfly.schedule(rank, size):
            if hop.is_sender:
                levels.setdefault((hop.slot.phase, hop.slot.hop), []).append((rank, hop.partner))
    sends = [levels[key] for key in sorted(levels)]

    def seconds(order: Sequence[int]) -> float:
        ready_s = [0.0] * size
        for level in sends:
            before_s = list(ready_s)
            for src, dst in level:
                a, b = order[src], order[dst]
                there_s = before_s[src] + alpha_s[a][b] + load.unit_bytes * byte_s[a][b]
                ready_s[dst] = max(ready_s[dst], there_s)
        return max(ready_s) + 1e-3 * sum(ready_s)

    return seconds


def _all_orders(
    starts: Sequence[MemberOrder], quick: OrderEstimator, network: NetworkModel, load: Workload, most: int
) -> list[MemberOrder]:
    beginnings = {start[0]: start[1:] for start in reversed(starts)}
    orders = (
        (first, *others) for first, joined in reversed(beginnings.items()) for others in permutations(joined)
    )
    return heapq.nsmallest(most, orders, key=quick)


def _improved_orders(
    given: Sequence[MemberOrder], quick: OrderEstimator, network: NetworkModel, load: Workload, most: int
) -> list[MemberOrder]:
    """Good orders: from each start, two members swap places, or a stretch turns round, while that helps."""
    edges_each = network.size * max(1, (network.size - 1).bit_length())
    trials = max(1, MAX_EDGES // edges_each)
    joined = given[0]
    starts = [*given, _clustered_order(joined, network, load), _nearest_next(joined, network, load)]
    found: list[MemberOrder] = []
    for start in starts:
        share = trials // len(starts)
        order, best_s = list(start), quick(start)
        changes = _rank_swaps(network.size)
        since = 0
        for i, j, turn in islice(changes, share):
            tried = list(order)
            if turn:
                tried[i : j + 1] = reversed(tried[i : j + 1])
            else:
                tried[i], tried[j] = tried[j], tried[i]
            tried_s = quick(tried)
            since += 1
            if tried_s < best_s * (1 - 1e-9):
                order, best_s, since = tried, tried_s, 0
            if since > network.size * network.size:
                break
        found.append(tuple(order))
    return sorted(found, key=quick)[:most]


def _rank_swaps(size: int) -> Iterator[tuple[int, int, bool]]:
    """All pairs of ranks, rank 0 left alone, again and again."""
    while True:
        for i, j in combinations(range(1, size), 2):
            yield i, j, False
            yield i, j, True


def _pair_exchange_s(network: NetworkModel, load: Workload) -> Callable[[int, int], float]:
    """How long two members take to swap a payload."""

    def seconds(a: int, b: int) -> float:
        there, back = network.link(a, b).alpha_s, network.link(b, a).alpha_s
        rate_Bps = min(network.path_Bps(a, b), network.path_Bps(b, a))
        return max(there, back) + load.unit_bytes / rate_Bps

    return seconds


def _clustered_order(joined: MemberOrder, network: NetworkModel, load: Workload) -> MemberOrder:
    """Near members become groups of 2, near groups of 4, and so on: what is far apart meets last."""
    apart_s = _pair_exchange_s(network, load)
    groups: list[list[int]] = [[member] for member in joined]
    while len(groups) > 1:
        distances = sorted(
            (max(apart_s(a, b) for a, b in zip(groups[i], groups[j], strict=False)), i, j)
            for i, j in combinations(range(len(groups)), 2)
        )
        taken: set[int] = set()
        merged: list[list[int]] = []
        for _, i, j in distances:
            if i not in taken and j not in taken:
                taken |= {i, j}
                merged.append([*groups[i], *groups[j]])
        merged += [group for i, group in enumerate(groups) if i not in taken]
        groups = sorted(merged, key=lambda group: (-len(group), joined.index(group[0])))
    return _rotated_to(joined[0], groups[0])


def _nearest_next(joined: MemberOrder, network: NetworkModel, load: Workload) -> MemberOrder:
    apart_s = _pair_exchange_s(network, load)
    order, left = [joined[0]], list(joined[1:])
    while left:
        here = order[-1]
        nearest = min(left, key=lambda member: apart_s(here, member))
        left.remove(nearest)
        order.append(nearest)
    return tuple(order)


def _rotated_to(first: int, order: Sequence[int]) -> MemberOrder:
    """The same groups: where it is a power of two long, each rank XOR where `first` was."""
    size, at = len(order), order.index(first)
    if size & (size - 1) == 0:
        return tuple(order[rank ^ at] for rank in range(size))
    swapped = list(order)
    swapped[0], swapped[at] = swapped[at], swapped[0]
    return tuple(swapped)
