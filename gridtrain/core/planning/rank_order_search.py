"""Search for the order of ranks with which an exchange over uneven links is fastest.

    ring        a slow link is in it once, or not at all; each link carries all segments
    butterfly   pairs rank with rank XOR 1, 2, 4: two sites with a slow link between meet in one hop only, and
                members beyond a power of two, which have the most hops, are the well connected ones
    star, tree  rank 0, where everything meets, has the fastest link of those that may be it
    direct      all members exchange with each other; rank 0, the root of the vote, is chosen as for a star

Up to 7 members every order is tried; above, good starts are improved by swapping two members or reversing a
stretch, for a limited number of trials; above 128 only the root of a star is chosen.  Orders are compared by
`order_estimator`, which adds up hops without queues; the best few are then simulated message by message.
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

EXACT_MAX_PEERS = 7  # 720 orders for each member that may be rank 0
MAX_ROOTS = 3  # members tried as rank 0 in larger groups
MAX_EDGES = 150_000  # estimated in one search, about 0.2 s, as it blocks the coordinator
MAX_SEARCHED_PEERS = 128
"""Members; larger groups keep the order of joining, as a search would block the coordinator."""

MIN_SIMULATED_ORDERS, SIMULATION_BUDGET = 24, 20_000
"""At least so many orders are simulated; more while their messages are within the budget."""

SIMULATED_MESSAGES = 400  # of one exchange: a ring is compared with few slices

MemberOrder = tuple[int, ...]  # order[rank] is a member's index
OrderEstimator = Callable[[Sequence[int]], float]


@dataclass(frozen=True, slots=True)
class RankOrderEstimate:
    """The fastest order found, and the predicted seconds of an exchange in it and in the order of joining."""

    order: MemberOrder
    exchange_s: float
    join_order_s: float


ROOT_ONLY_KINDS = (ExchangeKind.STAR, ExchangeKind.STAR_GTOPK, ExchangeKind.DIRECT)
"""Only rank 0 matters; of a direct exchange, as the root of the vote."""

RING_KINDS = (ExchangeKind.DENSE, ExchangeKind.TOPK)
"""A ring may begin anywhere, and in an all-gather all ranks do the same."""


def best_order(
    load: Workload, network: NetworkModel, cpu: CpuCosts, firsts: Sequence[int], now: Sequence[int] = ()
) -> RankOrderEstimate:
    """The order of `network`'s members in which `load` is exchanged soonest.

    Args:
        network: members in the order of joining.
        firsts: who may be rank 0; the first of them is where it makes no difference (`RING_KINDS`).
        now: the current order, if there is one: the search starts from it as well.
    """
    members = range(network.size)
    simulated = SIMULATION_BUDGET // max(1, count_messages(load, network.size, SIMULATED_MESSAGES))
    if load.kind in ROOT_ONLY_KINDS:
        roots = _fastest_peers(network, firsts, max(1, simulated))
    elif load.kind in RING_KINDS or network.size > MAX_SEARCHED_PEERS:
        roots = list(firsts[:1])
    else:
        exact = network.size <= EXACT_MAX_PEERS
        roots = _fastest_peers(network, firsts, network.size if exact else MAX_ROOTS)
    starts = [(first, *(member for member in members if member != first)) for first in roots]
    estimate: OrderEstimator | None = None
    finalists = starts
    if 2 < network.size <= MAX_SEARCHED_PEERS and load.kind not in ROOT_ONLY_KINDS:
        estimate = order_estimator(load, network, cpu)
        current = [tuple(now)] if sorted(now) == list(members) and now[0] in roots else []
        search = _all_orders if network.size <= EXACT_MAX_PEERS else _improved_orders
        found = search([*starts, *current], estimate, network, load, max(MIN_SIMULATED_ORDERS, simulated))
        finalists = [starts[0], *current, *found]
    timed = {order: simulated_exchange_s(load, network, cpu, order) for order in dict.fromkeys(finalists)}
    # Of equal ones that with the faster links in all; if these are equal too the first, that of joining.
    best = min(timed, key=lambda order: timed[order] + (1e-3 * estimate(order) if estimate else 0.0))
    return RankOrderEstimate(best, timed[best], timed[starts[0]])


def _fastest_peers(network: NetworkModel, firsts: Sequence[int], most: int) -> list[int]:
    """The first of `firsts`, and those of the others whose own links are fastest."""
    fast = sorted(firsts[1:], key=lambda member: -min(network.up_Bps[member], network.down_Bps[member]))
    return [firsts[0], *fast[: most - 1]]


def simulated_exchange_s(load: Workload, network: NetworkModel, cpu: CpuCosts, order: Sequence[int]) -> float:
    """Predicted seconds of one exchange in this order, the vote included."""
    ordered = network.reordered(order)
    return cost_model.exchange_cost(load, ordered, cpu, max_messages=SIMULATED_MESSAGES).exchange_s


# -- a quick estimate of an order ------------------------------------------------------------------


def order_estimator(load: Workload, network: NetworkModel, cpu: CpuCosts) -> OrderEstimator:
    """A function that estimates the seconds of an order from its edges alone, without queues.

    Links that several pairs share count as one bound: no exchange is faster than the busiest of them.
    """
    size = network.size
    members, handling_s = range(size), 2 * cpu.message_s + cpu.wake_s
    alpha_s = [[network.link(a, b).alpha_s + handling_s if a != b else 0.0 for b in members] for a in members]
    byte_s = [[1 / network.path_Bps(a, b) if a != b else 0.0 for b in members] for a in members]
    make = {ExchangeKind.DENSE: _ring_estimator, ExchangeKind.TOPK: _gather_estimator}
    edges_s = make.get(load.kind, _hops_estimator)(load, alpha_s, byte_s)
    if not network.shared_Bps:
        return edges_s
    crossed = messages_by_pair(load, size)
    segmented = load.kind in (ExchangeKind.DENSE, ExchangeKind.DIRECT)
    nbytes = load.unit_bytes / (size if segmented else 1)  # of one message of one slice
    shared = [[network.link(a, b).shared_links if a != b else () for b in members] for a in members]

    def seconds(order: Sequence[int]) -> float:
        busy_s = dict.fromkeys(network.shared_Bps, 0.0)
        for (src, dst), count in crossed.items():
            for name in shared[order[src]][order[dst]]:
                busy_s[name] += count * nbytes / network.shared_Bps[name]
        alone_s = edges_s(order)
        return max(alone_s, *busy_s.values()) + 1e-3 * alone_s

    return seconds


PairTable = Sequence[Sequence[float]]  # [src][dst]


def _ring_estimator(load: Workload, alpha_s: PairTable, byte_s: PairTable) -> OrderEstimator:
    """A ring is as slow as its slowest link, or as one slice that passes all members."""
    size = len(alpha_s)
    rounds, slices = 2 * (size - 1), slice_count(load, size)
    segment_bytes = load.unit_bytes / size

    def seconds(order: Sequence[int]) -> float:
        edges = [(a, order[rank + 1 - size]) for rank, a in enumerate(order)]
        slowest_s = max(byte_s[a][b] for a, b in edges) * segment_bytes
        hop_s = sum(alpha_s[a][b] + byte_s[a][b] * segment_bytes / slices for a, b in edges) / size
        total_s = sum(byte_s[a][b] for a, b in edges) * segment_bytes
        return rounds * max(slowest_s, hop_s) + (slices - 1) / slices * slowest_s + 1e-3 * total_s

    return seconds


def _gather_estimator(load: Workload, alpha_s: PairTable, byte_s: PairTable) -> OrderEstimator:
    """The all-gather: its hops one after the other, each as slow as its slowest pair."""
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


def _hops_estimator(load: Workload, alpha_s: PairTable, byte_s: PairTable) -> OrderEstimator:
    """The butterfly: a rank sends when its previous hop has arrived.  A tree crosses the same edges."""
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
                arrived_s = before_s[src] + alpha_s[a][b] + load.unit_bytes * byte_s[a][b]
                ready_s[dst] = max(ready_s[dst], arrived_s)
        return max(ready_s) + 1e-3 * sum(ready_s)

    return seconds


# -- which orders are tried ------------------------------------------------------------------------


def _all_orders(
    starts: Sequence[MemberOrder], estimate: OrderEstimator, network: NetworkModel, load: Workload, most: int
) -> list[MemberOrder]:
    """The best of all orders that begin like one of `starts`."""
    beginnings = {start[0]: start[1:] for start in reversed(starts)}
    orders = (
        (first, *others) for first, joined in reversed(beginnings.items()) for others in permutations(joined)
    )
    return heapq.nsmallest(most, orders, key=estimate)


def _improved_orders(
    given: Sequence[MemberOrder], estimate: OrderEstimator, network: NetworkModel, load: Workload, most: int
) -> list[MemberOrder]:
    """Good orders: from each start, swap two members or reverse a stretch while that helps."""
    edges_each = network.size * max(1, (network.size - 1).bit_length())
    trials = max(1, MAX_EDGES // edges_each)
    joined = given[0]
    starts = [
        *given,
        _clustered_order(joined, network, load),
        _nearest_order(joined, network, load),
    ]
    found: list[MemberOrder] = []
    for start in starts:
        order, best_s, since = list(start), estimate(start), 0
        for i, j, reverses in islice(_order_changes(network.size), trials // len(starts)):
            tried = list(order)
            if reverses:
                tried[i : j + 1] = reversed(tried[i : j + 1])
            else:
                tried[i], tried[j] = tried[j], tried[i]
            tried_s = estimate(tried)
            since += 1
            if tried_s < best_s * (1 - 1e-9):
                order, best_s, since = tried, tried_s, 0
            if since > network.size * network.size:
                break
        found.append(tuple(order))
    return sorted(found, key=estimate)[:most]


def _order_changes(size: int) -> Iterator[tuple[int, int, bool]]:
    """All pairs of ranks but rank 0, to be swapped and to be reversed between, again and again."""
    while True:
        for i, j in combinations(range(1, size), 2):
            yield i, j, False
            yield i, j, True


def _pair_exchange_s(network: NetworkModel, load: Workload) -> Callable[[int, int], float]:
    """Seconds in which two members swap a payload."""

    def seconds(a: int, b: int) -> float:
        alpha_s = max(network.link(a, b).alpha_s, network.link(b, a).alpha_s)
        return alpha_s + load.unit_bytes / min(network.path_Bps(a, b), network.path_Bps(b, a))

    return seconds


def _clustered_order(joined: MemberOrder, network: NetworkModel, load: Workload) -> MemberOrder:
    """Near members form groups of 2, near groups form groups of 4, and so on: distant ones meet last."""
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
    return _with_first(joined[0], groups[0])


def _nearest_order(joined: MemberOrder, network: NetworkModel, load: Workload) -> MemberOrder:
    apart_s = _pair_exchange_s(network, load)
    order, left = [joined[0]], list(joined[1:])
    while left:
        here = order[-1]
        nearest = min(left, key=lambda member: apart_s(here, member))
        left.remove(nearest)
        order.append(nearest)
    return tuple(order)


def _with_first(first: int, order: Sequence[int]) -> MemberOrder:
    """The same groups with `first` as rank 0: each rank XOR its rank if the size is a power of two, else a
    swap."""
    size, at = len(order), order.index(first)
    if size & (size - 1) == 0:
        return tuple(order[rank ^ at] for rank in range(size))
    swapped = list(order)
    swapped[0], swapped[at] = swapped[at], swapped[0]
    return tuple(swapped)
