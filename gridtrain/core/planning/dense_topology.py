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

from gridtrain.core.planning.cost_model import exchange_cost
from gridtrain.core.planning.network_model import NetworkModel
from gridtrain.core.planning.rank_order_search import SIMULATED_MESSAGES, best_order
from gridtrain.core.planning.workload import CpuCosts, ExchangeKind, Workload

OPEN_DENSE, DIRECT_DENSE = "Dense()", "Dense(topology=direct)"
"""What a script says that leaves it open, and what the View says then."""

MAX_DIRECT_BYTES = 1 << 20
"""Of the vector.  With 4 MB a ring is faster: bytes count and not hops, and its retry goes on from what has
arrived."""

MAX_DIRECT_MEMBERS = 16
"""Each has an edge to each other one."""

MIN_LINK_SHARE = 0.25
"""A link that carries less than this part of what the lines at its ends do may be one that others share."""


@dataclass(frozen=True, slots=True)
class DenseTopology:
    """`direct`: not round a ring; `reason` in words, empty: there was nothing to choose.

    `gain`: how many times as fast a ring is, where one is predicted or known to be better.
    """

    is_direct: bool
    reason: str = ""
    ring_speedup: float = 1.0


RING_TOPOLOGY = DenseTopology(False)


def choose_dense_topology(
    load: Workload | None, size: int, network: NetworkModel | None, edges: bool
) -> DenseTopology:
    """How `size` members exchange a dense `load`.

    Args:
        load: None: not known.
        network: of the members, in any order; None: not measured yet, then bytes and members decide.
        edges: any two of them can connect without a third, as far as is known.
    """
    if (
        load is None
        or load.kind not in (ExchangeKind.DENSE, ExchangeKind.DIRECT)
        or size < 3
        or load.unit_bytes > MAX_DIRECT_BYTES
    ):
        return RING_TOPOLOGY
    if size > MAX_DIRECT_MEMBERS:
        return DenseTopology(False, f"round a ring, as {size} members are more than {MAX_DIRECT_MEMBERS}")
    if not edges:
        return DenseTopology(False, "round a ring, as not any two members have a connection of their own")
    if network is None:
        return DenseTopology(True, f"direct: {load.unit_bytes} bytes are few, and no link is measured")
    if (thin := _thinnest_link_share(network)) is not None:
        return DenseTopology(
            False, f"round a ring, as a link carries {thin:.0%} of what the lines at its ends do", inf
        )
    ring, direct = (replace(load, kind=kind) for kind in (ExchangeKind.DENSE, ExchangeKind.DIRECT))
    ring_s = best_order(ring, network, CpuCosts(), range(size)).exchange_s
    direct_s = exchange_cost(direct, network, CpuCosts(), most_moves=SIMULATED_MESSAGES).exchange_s
    if direct_s >= ring_s:
        return DenseTopology(
            False, f"round a ring: {ring_s * 1e3:.3g} ms, direct {direct_s * 1e3:.3g} ms", direct_s / ring_s
        )
    return DenseTopology(True, f"direct: {direct_s * 1e3:.3g} ms, round a ring {ring_s * 1e3:.3g} ms")


def _thinnest_link_share(network: NetworkModel) -> float | None:
    """What part of its ends' lines the thinnest link carries; None: all are even."""
    thinnest = 1.0
    for src in range(network.size):
        for dst in range(network.size):
            lines_Bps = min(network.up_Bps[src], network.down_Bps[dst])
            if src != dst:
                thinnest = min(thinnest, network.path_Bps(src, dst) / lines_Bps)
    return thinnest if thinnest < MIN_LINK_SHARE else None
