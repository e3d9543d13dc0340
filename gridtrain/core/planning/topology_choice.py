"""Chooses between a direct exchange and the usual ring (`Dense()`) or butterfly (`GTopK()`).

In a small group whose members can all connect directly, over similar links, the exchange is direct, in two
hops, if that is predicted to be faster.  `exchange_choice` holds a run's choice.

By reporting a slow link, one worker can make all members use the ring or butterfly.  This costs the group
less than a worker that really is slow.  Requiring the reports of both ends would not prevent this: the
receiver's answer determines what the sender measures, and a busy receiver measures too high a rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from gridtrain.core.planning.cost_model import exchange_cost
from gridtrain.core.planning.network_model import NetworkModel
from gridtrain.core.planning.rank_order_search import SIMULATED_MESSAGES, best_order
from gridtrain.core.planning.workload import DIRECT_KIND_OF, CpuCosts, ExchangeKind, Workload
from gridtrain.quantities import format_seconds

MAX_DIRECT_BYTES = 1 << 20
"""The largest vector for a direct dense exchange, in bytes.  For 4 MB, a ring is faster, because bytes then
matter more than hops, and a retry in a ring resumes from the data that have arrived."""

MAX_DIRECT_MEMBERS = 16
"""The largest group for a direct exchange, in which each member needs a connection to every other member."""

MIN_LINK_SHARE = 0.25
"""A link that is slower than this fraction of the sender's upload and of the receiver's download is probably
shared by several pairs."""

_USUAL_NAME: dict[str, str] = {"ring": "around a ring", "butterfly": "in a butterfly"}


@dataclass(frozen=True, slots=True)
class Topology:
    """The topology of an exchange whose topology the script leaves open.

    Attributes:
        is_direct: whether members exchange data directly instead of around a ring or in a butterfly.
        reason: the reason for the choice, as text; empty if there was nothing to choose.
        usual_speedup: if the ring or butterfly is chosen because it is faster, its speed as a multiple of a
            direct exchange's; infinity if it is chosen because of a slow link; otherwise 1.
    """

    is_direct: bool
    reason: str = ""
    usual_speedup: float = 1.0


USUAL_TOPOLOGY = Topology(False)
"""A ring for a dense exchange, a butterfly for gTop-k."""


def choose_topology(
    load: Workload | None, size: int, network: NetworkModel | None, edges: bool, *, is_urgent: bool = False
) -> Topology:
    """Choose how `size` members exchange `load` if the script does not specify the topology.

    The exchange is direct if the group is small, all pairs can connect, the rates of the links are similar
    and a direct exchange is faster; a dense vector must also be small (`MAX_DIRECT_BYTES`).  Otherwise, dense
    data pass around a ring, and sparse data through a butterfly.

    Args:
        load: the workload, or None if it is unknown.
        network: the members' network, in any order; None before it has been measured.  Without a
            network, the choice depends only on the size of `load`, the number of members and `edges`.
        edges: whether each pair of members can connect without a relay, as far as is known.
        is_urgent: see `best_order`.
    """
    if (decided := _without_times(load, size, network, edges)) is not None:
        return decided
    assert load is not None and network is not None
    kind = _usual_kind(load)
    usual, direct = replace(load, kind=kind), replace(load, kind=DIRECT_KIND_OF[kind])
    usual_s = best_order(usual, network, CpuCosts(), range(size), is_urgent=is_urgent).exchange_s
    direct_s = exchange_cost(direct, network, CpuCosts(), max_messages=SIMULATED_MESSAGES).exchange_s
    name = _USUAL_NAME[kind.topology]
    if direct_s < usual_s:
        return Topology(True, f"direct: {format_seconds(direct_s)}, {name} {format_seconds(usual_s)}")
    reason = f"{name}: {format_seconds(usual_s)}, direct {format_seconds(direct_s)}"
    return Topology(False, reason, direct_s / usual_s)


def is_direct_size(size: int) -> bool:
    """Return whether a group of this size may exchange data directly."""
    return 2 < size <= MAX_DIRECT_MEMBERS


def may_be_direct(load: Workload, size: int, network: NetworkModel | None, edges: bool) -> bool:
    """Return whether `choose_topology` may choose the direct topology for this exchange."""
    decided = _without_times(load, size, network, edges)
    return decided is None or decided.is_direct


def _without_times(
    load: Workload | None, size: int, network: NetworkModel | None, edges: bool
) -> Topology | None:
    """Return the topology, or None if it depends on predicted times."""
    if load is None or size < 3:
        return USUAL_TOPOLOGY
    kind = _usual_kind(load)
    if kind not in DIRECT_KIND_OF or (not kind.is_sparse and load.unit_bytes > MAX_DIRECT_BYTES):
        return USUAL_TOPOLOGY
    name = _USUAL_NAME[kind.topology]
    if size > MAX_DIRECT_MEMBERS:
        return Topology(False, f"{name}, because direct exchanges have at most {MAX_DIRECT_MEMBERS} members")
    if not edges:
        return Topology(False, f"{name}, because some members cannot connect directly")
    if network is None:
        small = "" if kind.is_sparse else f"{load.unit_bytes} bytes is small, and "
        return Topology(True, f"direct: {small}no link has been measured")
    if (share := _slowest_link_share(network)) < MIN_LINK_SHARE:
        return Topology(
            False,
            f"{name}, because a link has only {share:.0%} of the rate that its ends reach otherwise",
            inf,
        )
    return None


def _usual_kind(load: Workload) -> ExchangeKind:
    """Return the kind of the load; for a direct exchange, the kind of the ring or butterfly it replaces."""
    return next((usual for usual, direct in DIRECT_KIND_OF.items() if load.kind is direct), load.kind)


def _slowest_link_share(network: NetworkModel) -> float:
    """Return the smallest ratio (<= 1) of a path's rate to the slower of its sender's upload and its
    receiver's download."""
    ranks = range(network.size)
    pairs = [(src, dst) for src in ranks for dst in ranks if src != dst]
    shares = (network.path_Bps(a, b) / min(network.up_Bps[a], network.down_Bps[b]) for a, b in pairs)
    return min(shares, default=1.0)
