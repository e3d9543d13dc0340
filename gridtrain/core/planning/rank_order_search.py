"""Searches, within limits, for the order of ranks with which an exchange is fastest over unequal links.

    ring        avoids slow links, because each link of the ring carries all segments
    butterfly   pairs rank r with rank r XOR 1, 2, 4: two sites with a slow link between them exchange in only
                one hop; the ranks beyond a power of two, whose payloads take two more hops, get fast links
    star, tree  rank 0, through which all data pass, has the fastest link of the members that may be rank 0
    direct      all members exchange data; rank 0, the root of the vote, is chosen as for a star

For up to 7 members, or 6 if members are waiting for the plan, all orders are tried with each candidate for
rank 0.  Otherwise, good starting orders are improved in a limited number of trials, by swapping two members
or reversing a range of ranks; above 128 members, only the root of a star is chosen.  Orders are compared by
`order_estimator`, which adds up hops and ignores queues; the best are then simulated message by message.
`SearchLimits` limits counts, not time, so that the same measurements always lead to the same order.
`search_order` is a generator that yields after each piece of its work, so that a coordinator of many members
can handle messages in between.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from itertools import accumulate, combinations, islice, permutations
from math import factorial
from typing import ParamSpec, TypeVar, assert_never

from gridtrain.core.collectives import butterfly, tree
from gridtrain.core.planning import cost_model
from gridtrain.core.planning.message_schedule import send_levels
from gridtrain.core.planning.network_model import NetworkModel
from gridtrain.core.planning.workload import (
    CpuCosts,
    Workload,
    count_messages,
    messages_by_pair,
    slice_count,
)

EXACT_MAX_PEERS = 7  # 720 orders for each member that may be rank 0
MAX_ROOTS = 3  # members tried as rank 0 when not every order is tried
MAX_SEARCHED_PEERS = 128
"""The largest group for which an order is searched; larger groups keep the join order, because a search
would take the coordinator too long."""


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Limits on the work of one search.

    Attributes:
        edges: the maximum number of edges in all estimated orders together.  An edge is one send from a rank
            to another, and takes 0.2 to 0.7 us to estimate.
        messages: the maximum number of messages in all simulated orders together; a message takes 10 to
            25 us to simulate.
        simulated_orders: the number of orders that may be simulated even if they exceed `messages`.
        searched_peers: the largest group for which an order is searched.
    """

    edges: int
    messages: int
    simulated_orders: int
    searched_peers: int = MAX_SEARCHED_PEERS


FULL_SEARCH = SearchLimits(150_000, 2_500, 6)
"""Takes up to 0.1 s for 64 members and 0.25 s for 128; the longest piece takes a fifth of that."""

URGENT_SEARCH = SearchLimits(10_000, 300, 1, searched_peers=16)
"""Takes up to 15 ms for 16 members and 50 ms for 128, all of which wait for the result; above 16 members, no
new order is searched."""

RELAY_WEIGHT = 0.2
"""An order counts as slower by this factor times the fraction of its messages that are relayed.  An order
that relieves the relay (often the coordinator) and its link is preferred even if it is slightly slower."""

SIMULATED_MESSAGES = 400  # the maximum for one exchange, so a ring is simulated with few slices

P = ParamSpec("P")
T = TypeVar("T")
Pieces = Generator[None, None, T]
"""A computation that yields after each piece of its work, and returns its result."""


def advance(pieces: Pieces[T]) -> T | None:
    """Compute the next piece; return the result, or None if there are more pieces."""
    try:
        next(pieces)
    except StopIteration as end:
        result: T = end.value
        return result
    return None


def in_one_piece(begin: Callable[P, Pieces[T]]) -> Callable[P, T]:
    """Return a function that computes all pieces of `begin` at once and returns the result."""

    @wraps(begin)
    def compute(*args: P.args, **kwargs: P.kwargs) -> T:
        return finish(begin(*args, **kwargs))

    return compute


def finish(pieces: Pieces[T]) -> T:
    """Compute the remaining pieces; return the result."""
    while (result := advance(pieces)) is None:
        pass
    return result


MemberOrder = tuple[int, ...]  # order[rank] is a member's index
OrderEstimator = Callable[[Sequence[int]], float]


@dataclass(frozen=True, slots=True)
class RankOrderEstimate:
    """The best order found, and the predicted exchange times with it and with the join order.

    Attributes:
        is_join_order: whether the order found is the join order.
        saves_relays: whether fewer messages are relayed than in join order.
    """

    order: MemberOrder
    exchange_s: float
    join_order_s: float
    is_join_order: bool
    saves_relays: bool


ROOT_ONLY_TOPOLOGIES = ("star", "direct")
"""Topologies for which only the choice of rank 0 matters, in a direct exchange as the root of the vote."""

ROOTLESS_TOPOLOGIES = ("ring", "all-gather")
"""Topologies for which it makes no difference which member is rank 0: a ring has no first rank, and in an
all-gather all ranks do the same work."""


def search_order(
    load: Workload,
    network: NetworkModel,
    cpu: CpuCosts,
    firsts: Sequence[int],
    now: Sequence[int] = (),
    *,
    is_urgent: bool = False,
) -> Pieces[RankOrderEstimate]:
    """Find the order of `network`'s members that makes the exchange of `load` fastest.

    Args:
        network: the network of the members, in join order.
        firsts: the members that may be rank 0; the first of them gets rank 0 if the choice makes no
            difference (`ROOTLESS_TOPOLOGIES`).
        now: the current order, or empty; the search also starts from this order.
        is_urgent: whether members are waiting for the result; if so, only a few orders are tried.
    """
    limits = URGENT_SEARCH if is_urgent else FULL_SEARCH
    members, is_ring = range(network.size), load.kind.topology in ROOTLESS_TOPOLOGIES
    fitting = limits.messages // max(1, count_messages(load, network.size, SIMULATED_MESSAGES))
    simulated = max(limits.simulated_orders, fitting)
    is_searched = 2 < network.size <= limits.searched_peers and load.kind.topology not in ROOT_ONLY_TOPOLOGIES
    exact_roots = _affordable_roots(network.size, limits)
    roots = list(firsts[:1])
    if load.kind.topology in ROOT_ONLY_TOPOLOGIES:
        roots = _fastest_peers(network, firsts, max(1, fitting))
    elif is_searched and not is_ring:
        roots = _fastest_peers(network, firsts, max(MAX_ROOTS, exact_roots))
    current: list[MemberOrder] = []
    if sorted(now) == list(members) and (is_ring or now[0] in firsts):
        current = [_rotated(now, roots[0]) if is_ring else tuple(now)]
    roots = list(dict.fromkeys([*roots, *(order[0] for order in current)]))
    starts = [(first, *(member for member in members if member != first)) for first in roots]
    estimate: OrderEstimator | None = None
    weight = _relay_weight(load, network)
    finalists = [*starts, *current]
    if is_searched:
        estimate = _weighted(order_estimator(load, network, cpu), weight)
        yield
        if exact_roots >= min(MAX_ROOTS, len(roots)):
            found = _all_orders([*starts, *current], estimate, simulated)
        else:
            found = yield from _improved_orders(
                [*starts, *current], estimate, network, load, simulated, limits
            )
        finalists = [starts[0], *current, *found]
    timed: dict[MemberOrder, float] = {}
    for order in dict.fromkeys(finalists):
        timed[order] = simulated_exchange_s(load, network, cpu, order)
        yield
    # Ties go to the order with the smaller estimate, then to the first order.
    best = min(
        timed, key=lambda order: timed[order] * weight(order) + (1e-3 * estimate(order) if estimate else 0.0)
    )
    joined = starts[0]
    return RankOrderEstimate(best, timed[best], timed[joined], best == joined, weight(best) < weight(joined))


best_order = in_one_piece(search_order)


def _fastest_peers(network: NetworkModel, firsts: Sequence[int], most: int) -> list[int]:
    """Return at most `most` members of `firsts`: the first one, and those with the fastest links."""
    fast = sorted(firsts[1:], key=lambda member: -min(network.up_Bps[member], network.down_Bps[member]))
    return [firsts[0], *fast[: most - 1]]


def simulated_exchange_s(load: Workload, network: NetworkModel, cpu: CpuCosts, order: Sequence[int]) -> float:
    """Predict the exchange time with this order of ranks, including the vote, by simulation."""
    ordered = network.reordered(order)
    return cost_model.exchange_cost(load, ordered, cpu, max_messages=SIMULATED_MESSAGES).exchange_s


# -- a quick estimate of an order ------------------------------------------------------------------


def _relay_weight(load: Workload, network: NetworkModel) -> OrderEstimator:
    """Return a function that returns the factor by which an order counts as slower; see `RELAY_WEIGHT`."""
    if not network.relayed_pairs:
        return lambda order: 1.0
    counts, relayed_pairs = messages_by_pair(load, network.size), network.relayed_pairs
    each = RELAY_WEIGHT / max(1, sum(counts.values()))

    def weight(order: Sequence[int]) -> float:
        members = ((order[src], order[dst], count) for (src, dst), count in counts.items())
        return 1 + each * sum(count for a, b, count in members if (a, b) in relayed_pairs)

    return weight


def _weighted(estimate: OrderEstimator, weight: OrderEstimator) -> OrderEstimator:
    return lambda order: estimate(order) * weight(order)


def order_estimator(load: Workload, network: NetworkModel, cpu: CpuCosts) -> OrderEstimator:
    """Return a function that estimates an exchange's time with an order of ranks, without simulating queues.

    Links that several pairs share add only a lower bound: an exchange takes at least as long as the busiest
    shared link.
    """
    size = network.size
    members, handling_s = range(size), 2 * cpu.message_s + cpu.wake_s
    alpha_s = [[network.link(a, b).alpha_s + handling_s if a != b else 0.0 for b in members] for a in members]
    byte_s = [[1 / network.path_Bps(a, b) if a != b else 0.0 for b in members] for a in members]
    own_bytes = [load.payload_bytes(share) for share in network.entry_shares or [1.0] * size]
    match load.kind.topology:
        case "ring":
            edges_s = _ring_estimator(load, alpha_s, byte_s)
        case "all-gather":
            edges_s = _gather_estimator(load, alpha_s, byte_s, own_bytes)
        case "butterfly" | "tree" | "star" | "direct":  # of the last two only rank 0 is chosen
            edges_s = _hops_estimator(load, alpha_s, byte_s, own_bytes)
        case never:
            assert_never(never)
    if not network.shared_Bps:
        return edges_s
    crossed = messages_by_pair(load, size)
    segmented = load.kind.topology in ("ring", "direct")
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
    """Return an estimator for a ring, which is limited by its slowest link or by the hops of a slice."""
    size = len(alpha_s)
    rounds, slices = 2 * (size - 1), slice_count(load, size)
    segment_bytes = load.unit_bytes / size

    def seconds(order: Sequence[int]) -> float:
        edges = [(a, order[rank + 1 - size]) for rank, a in enumerate(order)]
        slowest_s = max(byte_s[a][b] for a, b in edges) * segment_bytes
        hop_s = math.fsum(alpha_s[a][b] + byte_s[a][b] * segment_bytes / slices for a, b in edges) / size
        total_s = math.fsum(byte_s[a][b] for a, b in edges) * segment_bytes
        return rounds * max(slowest_s, hop_s) + (slices - 1) / slices * slowest_s + 1e-3 * total_s

    return seconds


def _gather_estimator(
    load: Workload, alpha_s: PairTable, byte_s: PairTable, own_bytes: Sequence[float]
) -> OrderEstimator:
    """Return an estimator for the all-gather, which adds up the times of the slowest pair in each hop.

    The longest hop counts twice.

    Args:
        own_bytes: (P,) the size of each member's own payload.
    """
    size = len(alpha_s)
    hops = [1 << hop for hop in range((size - 1).bit_length())]

    def seconds(order: Sequence[int]) -> float:
        longest_s = total_s = 0.0
        until = list(accumulate((own_bytes[member] for member in (*order, *order)), initial=0.0))
        for d in hops:
            count = min(d, size - d)
            sent_bytes = [until[rank + count] - until[rank] for rank in range(size)]
            ends = ((order[rank], order[rank - d], sent_bytes[rank]) for rank in range(size))
            hop_s = max(alpha_s[a][b] + nbytes * byte_s[a][b] for a, b, nbytes in ends)
            longest_s, total_s = max(longest_s, hop_s), total_s + hop_s
        return longest_s + total_s

    return seconds


def _hops_estimator(
    load: Workload, alpha_s: PairTable, byte_s: PairTable, own_bytes: Sequence[float]
) -> OrderEstimator:
    """Return an estimator for the butterfly or the tree, in which a rank sends when the payload of its
    previous hop has arrived.

    Args:
        own_bytes: (P,) the size of each member's own payload; after a merge, a member sends a whole payload.
    """
    size, whole_bytes = len(alpha_s), load.unit_bytes
    exchange = tree if load.kind.topology == "tree" else butterfly
    levels = send_levels([exchange.schedule(rank, size) for rank in range(size)])
    sends = [[(rank, hop.partner) for rank, hop in level] for level in levels]

    def seconds(order: Sequence[int]) -> float:
        ready_s = [0.0] * size
        for level in sends:
            before_s = list(ready_s)
            for src, dst in level:
                a, b = order[src], order[dst]
                sent_bytes = whole_bytes if before_s[src] else own_bytes[a]
                arrived_s = before_s[src] + alpha_s[a][b] + sent_bytes * byte_s[a][b]
                ready_s[dst] = max(ready_s[dst], arrived_s)
        return max(ready_s) + 1e-3 * math.fsum(ready_s)

    return seconds


# -- orders to try ---------------------------------------------------------------------------------


def _edge_count(size: int) -> int:
    """Return the approximate number of edges of one order of `size` members."""
    return size * max(1, (size - 1).bit_length())


def _affordable_roots(size: int, limits: SearchLimits) -> int:
    """Return the number of candidates for rank 0 for which all orders of the remaining members can be
    estimated within the search limits; 0 if the group is too large."""
    return limits.edges // (factorial(size - 1) * _edge_count(size)) if size <= EXACT_MAX_PEERS else 0


def _rotated(order: Sequence[int], first: int) -> MemberOrder:
    """Return the same ring, beginning with `first`."""
    at = order.index(first)
    return (*order[at:], *order[:at])


def _all_orders(starts: Sequence[MemberOrder], estimate: OrderEstimator, most: int) -> list[MemberOrder]:
    """Return the orders with the smallest estimates, at most `most`.

    This considers all orders whose rank 0 is also rank 0 in an order of `starts`.
    """
    beginnings = {start[0]: start[1:] for start in reversed(starts)}
    orders = (
        (first, *others) for first, joined in reversed(beginnings.items()) for others in permutations(joined)
    )
    return heapq.nsmallest(most, orders, key=estimate)


def _improved_orders(
    given: Sequence[MemberOrder],
    estimate: OrderEstimator,
    network: NetworkModel,
    load: Workload,
    most: int,
    limits: SearchLimits,
) -> Pieces[list[MemberOrder]]:
    """Improve orders by swapping two members or reversing a range of ranks; return the best, at most `most`.

    The orders that are improved are those in `given`, a clustered order and a nearest-neighbour order.
    """
    trials = max(1, limits.edges // _edge_count(network.size))
    joined, apart_s = given[0], _pair_exchange_s(network, load)
    clustered = _clustered_order(joined, apart_s)
    yield
    starts = [*given, clustered, _nearest_order(joined, apart_s)]
    yield
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
        yield
    return sorted(found, key=estimate)[:most]


def _order_changes(size: int) -> Iterator[tuple[int, int, bool]]:
    """Yield (i, j, whether to reverse i..j instead of swapping) for all pairs of ranks > 0, repeatedly."""
    while True:
        for i, j in combinations(range(1, size), 2):
            yield i, j, False
            yield i, j, True


def _pair_exchange_s(network: NetworkModel, load: Workload) -> Callable[[int, int], float]:
    """Return a function that estimates how long two members take to exchange a payload, in seconds."""
    payload_bytes = load.unit_bytes

    @cache
    def ordered_s(a: int, b: int) -> float:
        alpha_s = max(network.link(a, b).alpha_s, network.link(b, a).alpha_s)
        return alpha_s + payload_bytes / min(network.path_Bps(a, b), network.path_Bps(b, a))

    return lambda a, b: ordered_s(a, b) if a < b else ordered_s(b, a)


def _clustered_order(joined: MemberOrder, apart_s: Callable[[int, int], float]) -> MemberOrder:
    """Return an order in which nearby members form groups of 2, nearby groups form groups of 4, and so on.

    In a butterfly, members that are far apart then exchange last.
    """
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


def _nearest_order(joined: MemberOrder, apart_s: Callable[[int, int], float]) -> MemberOrder:
    order, left = [joined[0]], list(joined[1:])
    while left:
        here = order[-1]
        nearest = min(left, key=lambda member: apart_s(here, member))
        left.remove(nearest)
        order.append(nearest)
    return tuple(order)


def _with_first(first: int, order: Sequence[int]) -> MemberOrder:
    """Return an order with `first` as rank 0 that keeps the groups of `order`.

    If the size is a power of two, all ranks are XORed with the rank of `first`; otherwise `first` and rank 0
    are swapped.
    """
    size, at = len(order), order.index(first)
    if size & (size - 1) == 0:
        return tuple(order[rank ^ at] for rank in range(size))
    swapped = list(order)
    swapped[0], swapped[at] = swapped[at], swapped[0]
    return tuple(swapped)
