"""In which order the members of a generation stand in the ring, and why.

Decides the order of ranks from measured round trips; never measures, never opens a connection.

    measured round trips, ms       join order a b c d          planned a b d c

        a b  1    b c  9              a --1-- b                  a --1-- b
        a c  2    b d  2              |       |                  |       |
        a d  9    c d  1              9       9                  2       2
                                      |       |                  |       |
                                      d --1-- c                  c --1-- d

A ring moves at the pace of its slowest edge, so that one is made as fast as can be (the bottleneck
travelling salesman), and then the sum of all: exactly by trying all rings up to 8 members, by 2-opt
(Croes, Operations Research 6, 1958) above, which finds a good ring but not always the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import median

from gridtrain.core.messages import PeerId
from gridtrain.errors import LocalProtocolError

MAX_EXACT_PEERS = 8  # 2,520 rings; with 9 it would be 20,160
MAX_TRIALS = 100_000  # 2-opt exchanges looked at, about 0.1 s: the coordinator has other things to do

RoundTrips = Mapping[tuple[PeerId, PeerId], float]
Ring = tuple[PeerId, ...]
PairCost = Callable[[PeerId, PeerId], float]  # round trip in seconds, the same in both directions


@dataclass(frozen=True, slots=True)
class RankOrder:
    """`order[rank]` is a member; `reason` says in words why this order."""

    order: Ring
    reason: str


def order_ring(rtt_s: RoundTrips, peers: Sequence[PeerId], first: PeerId) -> RankOrder:
    """The ring over `peers` with the fastest slowest edge, and of those the smallest sum.

    Equal rings are decided by peer ids, so that the same measurements give the same plan.

    Args:
        rtt_s: round trip of the link from one peer to another, in seconds; of a link measured from
            both ends the larger counts.  A missing one, or one that is no finite number >= 0, counts
            as the median of the others.
        peers: the members in join order, all different.
        first: the member that is to be rank 0.

    Raises:
        LocalProtocolError: `first` is not among `peers`, or a peer is there twice.
    """
    if first not in peers or len(set(peers)) != len(peers):
        names = [peer.hex()[:8] for peer in peers]
        raise LocalProtocolError(f"cannot order a ring of {names} that begins with {first.hex()[:8]}")
    start = peers.index(first)
    joined = (*peers[start:], *peers[:start])
    if len(peers) <= 2:
        return RankOrder(joined, f"ring of {len(peers)}: there is only one order")
    links = _both_ways(rtt_s, peers)
    if not links:
        return RankOrder(joined, f"ring of {len(peers)} in join order: no round trip is measured")

    usual_s = median(links.values())

    def cost_s(a: PeerId, b: PeerId) -> float:
        return links.get((min(a, b), max(a, b)), usual_s)

    find = _best_ring if len(peers) <= MAX_EXACT_PEERS else _two_opt_ring
    order = find(joined, cost_s)
    return RankOrder(order, _reason(order, joined, cost_s, len(links), usual_s))


def _edges_s(order: Sequence[PeerId], cost_s: PairCost) -> list[float]:
    """Cost of each edge rank -> rank + 1 of the closed ring, in seconds."""
    return [cost_s(peer, order[(rank + 1) % len(order)]) for rank, peer in enumerate(order)]


def _both_ways(rtt_s: RoundTrips, peers: Sequence[PeerId]) -> dict[tuple[PeerId, PeerId], float]:
    """Usable measurements between `peers`, by (smaller id, larger id)."""
    members = set(peers)
    links: dict[tuple[PeerId, PeerId], float] = {}
    for (a, b), seconds in rtt_s.items():
        if a != b and a in members and b in members and math.isfinite(seconds) and seconds >= 0:
            pair = (min(a, b), max(a, b))
            links[pair] = max(seconds, links.get(pair, 0.0))
    return links


def _best_ring(joined: Ring, cost_s: PairCost) -> Ring:
    """The best of all rings that begin with `joined[0]`; each is looked at in one direction only."""

    def key(order: Ring) -> tuple[float, float]:
        edges = _edges_s(order, cost_s)
        return max(edges), math.fsum(edges)

    rings = ((joined[0], *others) for others in permutations(sorted(joined[1:])) if others[0] < others[-1])
    return min(rings, key=key)  # of equal ones the first, which is the smallest by ids


def _two_opt_ring(joined: Ring, cost_s: PairCost) -> Ring:
    """A good ring: nearest neighbours first, then exchanges of two edges until none helps."""
    order = min(
        list(joined), _nearest_neighbours(joined, cost_s), key=lambda ring: max(_edges_s(ring, cost_s))
    )
    trials = _swap_edges(order, cost_s, _removes_slowest_edge, MAX_TRIALS)
    _swap_edges(order, cost_s, _lowers_sum, trials)
    if order[-1] < order[1]:
        order[1:] = reversed(order[1:])
    return tuple(order)


def _nearest_neighbours(joined: Ring, cost_s: PairCost) -> list[PeerId]:
    order, left = [joined[0]], sorted(joined[1:])
    while left:
        here = order[-1]
        nearest = min(left, key=lambda peer: (cost_s(here, peer), peer))
        left.remove(nearest)
        order.append(nearest)
    return order


EdgeCosts = tuple[float, float]  # costs in seconds of the two edges that an exchange replaces or makes


def _removes_slowest_edge(old: EdgeCosts, new: EdgeCosts, slowest_s: float) -> bool:
    return max(old) == slowest_s > max(new)


def _lowers_sum(old: EdgeCosts, new: EdgeCosts, slowest_s: float) -> bool:
    return sum(new) < sum(old) and max(new) <= slowest_s


def _swap_edges(
    order: list[PeerId], cost_s: PairCost, helps: Callable[[EdgeCosts, EdgeCosts, float], bool], trials: int
) -> int:
    """Improve `order` in place while an exchange helps; returns how many of the `trials` are left.

    Edges a-b and c-d become a-c and b-d: the stretch b .. c turns round.
    """
    size = len(order)
    improved = True
    while improved:
        improved = False
        slowest_s = max(_edges_s(order, cost_s))
        for i in range(size - 2):
            for j in range(i + 2, size if i else size - 1):
                if trials == 0:
                    return 0
                trials -= 1
                a, b, c, d = order[i], order[i + 1], order[j], order[(j + 1) % size]
                if helps((cost_s(a, b), cost_s(c, d)), (cost_s(a, c), cost_s(b, d)), slowest_s):
                    order[i + 1 : j + 1] = reversed(order[i + 1 : j + 1])
                    slowest_s = max(_edges_s(order, cost_s))
                    improved = True
    return trials


def _reason(order: Ring, joined: Ring, cost_s: PairCost, measured: int, usual_s: float) -> str:
    planned_s, joined_s = max(_edges_s(order, cost_s)), max(_edges_s(joined, cost_s))
    gain = (
        f" instead of {joined_s * 1e3:.2f} ms in join order" if planned_s < joined_s else ", as in join order"
    )
    text = f"ring of {len(order)} ordered by round trip: slowest edge {planned_s * 1e3:.2f} ms{gain}"
    if missing := len(order) * (len(order) - 1) // 2 - measured:
        text += f" ({missing} links are not measured and count as {usual_s * 1e3:.2f} ms, the median)"
    return text
