"""On which road a dense vector travels, where the script leaves that open (`Dense()`), and why.

Decides between a ring and the direct exchange, once for all members: what is chosen travels in the View and
is journalled with it.  Never measures, never makes a generation (`generations`).  Both add in the same order
and end with the same bits, so it changes no training.

    "Dense()"  --->  few bytes, few members, an edge between any two, even links, predicted to be faster?
                          yes: View.exchange = "Dense(topology=direct)"      no: a ring
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from gridtrain.protocol.costs import cost
from gridtrain.protocol.lines import Network
from gridtrain.protocol.loads import Cpu, Kind, Load
from gridtrain.protocol.ordering import WALKED_MOVES, best_order

OPEN, DIRECT = "Dense()", "Dense(topology=direct)"
"""What a script says that leaves it open, and what the View says then."""

MOST_BYTES = 1 << 20
"""Of the vector.  With 4 MB a ring is faster: bytes count and not hops, and its retry goes on from what has
arrived."""

MOST_MEMBERS = 16
"""Each has an edge to each other one."""

EVEN = 0.25
"""A link that carries less than this part of what the lines at its ends do may be one that others share."""


@dataclass(frozen=True, slots=True)
class Road:
    """`direct`: not round a ring; `reason` in words, empty: there was nothing to choose.

    `gain`: how many times as fast a ring is, where one is predicted or known to be better.
    """

    direct: bool
    reason: str = ""
    gain: float = 1.0


RING = Road(False)


def road_of(load: Load | None, size: int, network: Network | None, edges: bool) -> Road:
    """How `size` members exchange a dense `load`.

    Args:
        load: None: not known.
        network: of the members, in any order; None: not measured yet, then bytes and members decide.
        edges: any two of them can connect without a third, as far as is known.
    """
    if load is None or load.kind not in (Kind.DENSE, Kind.DIRECT) or size < 3 or load.unit_bytes > MOST_BYTES:
        return RING
    if size > MOST_MEMBERS:
        return Road(False, f"round a ring, as {size} members are more than {MOST_MEMBERS}")
    if not edges:
        return Road(False, "round a ring, as not any two members have a connection of their own")
    if network is None:
        return Road(True, f"direct: {load.unit_bytes} bytes are few, and no link is measured")
    if (thin := _thin(network)) is not None:
        return Road(
            False, f"round a ring, as a link carries {thin:.0%} of what the lines at its ends do", inf
        )
    ring, direct = (replace(load, kind=kind) for kind in (Kind.DENSE, Kind.DIRECT))
    ring_s = best_order(ring, network, Cpu(), range(size)).exchange_s
    direct_s = cost(direct, network, Cpu(), most_moves=WALKED_MOVES).exchange_s
    if direct_s >= ring_s:
        return Road(
            False, f"round a ring: {ring_s * 1e3:.3g} ms, direct {direct_s * 1e3:.3g} ms", direct_s / ring_s
        )
    return Road(True, f"direct: {direct_s * 1e3:.3g} ms, round a ring {ring_s * 1e3:.3g} ms")


def _thin(network: Network) -> float | None:
    """What part of its ends' lines the thinnest link carries; None: all are even."""
    thinnest = 1.0
    for src in range(network.size):
        for dst in range(network.size):
            lines_Bps = min(network.up_Bps[src], network.down_Bps[dst])
            if src != dst:
                thinnest = min(thinnest, network.path_Bps(src, dst) / lines_Bps)
    return thinnest if thinnest < EVEN else None
