"""Chooses smaller shares of a sparse exchange's k entries for members with slow uploads.

A member normally sends the k largest entries of its gradient; with a smaller share, it sends fewer.

    upload rates --> members with slow uploads --> shares to try --> simulated exchanges
                 --> the largest shares for which the exchange is nearly as fast as the fastest one

A member sends its own payload once.  A leaf of a tree or of a star, and a butterfly rank that is folded into
another rank, send nothing else, so a small share keeps such a member from delaying the others.  In the later
hops of a butterfly, a member sends merged payloads of up to k entries, regardless of its share.  The entries
that a member does not send stay in its residual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from gridtrain.core.messages import WHOLE_SHARE, PeerId
from gridtrain.core.planning.network_model import NetworkModel
from gridtrain.core.planning.rank_order import (
    MIN_EXCHANGE_SPEEDUP,
    LinkMeasurements,
    format_rate,
    with_entry_shares,
)
from gridtrain.core.planning.rank_order_search import best_order, simulated_exchange_s
from gridtrain.core.planning.workload import CpuCosts, Workload
from gridtrain.quantities import format_count, format_seconds, list_first

MIN_ENTRIES_SHARE = WHOLE_SHARE // 16
"""The smallest share; with a smaller share, a member's gradient would reach the model very late."""

THIN_RATIO, STILL_THIN_RATIO = 2.0, 1.5
"""An upload is slow if the median upload of the other members is at least this many times as fast; the second
value is for a member that already has a smaller share."""

KEPT_SPEEDUP = 1.1
"""Current shares are kept if they make the exchange at least this many times as fast as it is with whole
shares; new shares need `MIN_EXCHANGE_SPEEDUP`."""

MIN_CHANGE = 1.5
"""A share is not changed by less than this factor."""

RATIO_FACTORS = (8.0, 4.0, 2.0, 1.0)
"""The shares to try, as multiples of the ratio of a member's upload to the median upload of the others."""

ACCEPTED_SLOWDOWN = 1.1
"""With the chosen shares, the largest possible, an exchange takes at most this many times as long as with the
fastest shares that were tried."""


MAX_MEMBERS = 32  # in larger groups two more searches for a rank order would block the coordinator
MAX_LISTED = 8  # members named in `EntryShares.reason`


@dataclass(frozen=True, slots=True)
class EntryShares:
    """The shares chosen for one generation.

    Attributes:
        shares: `Member.entries_share` of the members that have a smaller share than `WHOLE_SHARE`.
        reason: the reason for the shares, as text; "" if no member has a smaller share.
    """

    shares: Mapping[PeerId, int] = field(default_factory=dict)
    reason: str = ""

    def share_of(self, peer: PeerId) -> int:
        return self.shares.get(peer, WHOLE_SHARE)


def choose_entry_shares(
    load: Workload | None,
    measured: LinkMeasurements,
    peers: Sequence[PeerId],
    firsts: Sequence[PeerId],
    current: Mapping[PeerId, int],
    names: Mapping[PeerId, str],
) -> EntryShares:
    """Choose the members' shares of the k entries of a sparse exchange.

    All members keep their full share if no upload is slow, or if smaller shares do not speed up the exchange
    enough (`MIN_EXCHANGE_SPEEDUP`, `KEPT_SPEEDUP`).

    Args:
        load: the workload; None if it is unknown.  A dense exchange has no shares.
        peers: the members in join order.
        firsts: the members that may be rank 0.
        current: the shares in the current generation that are smaller than `WHOLE_SHARE`.
        names: the members' names, for the text of the reason.
    """
    network = _rated_network(load, measured, peers)
    if load is None or network is None:
        return EntryShares()
    thin = _thin_ratios(network, peers, current)
    if not thin:
        return EntryShares()
    roots = [peers.index(peer) for peer in firsts]
    least = with_entry_shares(network, peers, dict.fromkeys(thin, MIN_ENTRIES_SHARE))
    order = best_order(load, least, CpuCosts(), roots).order

    def exchange_s(shares: Mapping[PeerId, int]) -> float:
        return simulated_exchange_s(load, with_entry_shares(network, peers, shares), CpuCosts(), order)

    tried: list[tuple[float, dict[PeerId, int]]] = []
    for factor in RATIO_FACTORS:
        shares = {peer: _bounded_share(factor * ratio) for peer, ratio in thin.items()}
        tried.append((exchange_s(shares), shares))
    fastest_s = min(took_s for took_s, _ in tried)
    wanted = next(shares for took_s, shares in tried if took_s <= ACCEPTED_SLOWDOWN * fastest_s)
    kept = {peer: _settled_share(share, current.get(peer, WHOLE_SHARE)) for peer, share in wanted.items()}
    chosen = {peer: share for peer, share in kept.items() if share < WHOLE_SHARE}
    with_s = exchange_s(chosen)
    without_s = best_order(load, network, CpuCosts(), roots).exchange_s
    if without_s < (KEPT_SPEEDUP if current.keys() & set(peers) else MIN_EXCHANGE_SPEEDUP) * with_s:
        return EntryShares()
    up_Bps = dict(zip(peers, network.up_Bps, strict=True))
    usual_Bps = median(rate for peer, rate in up_Bps.items() if peer not in thin)
    listed = [
        f"{names[peer]} {share / WHOLE_SHARE:.0%} of k (upload {format_rate(up_Bps[peer])})"
        for peer, share in chosen.items()
    ]
    reason = (
        f"fewer entries for slow uploads (usual upload {format_rate(usual_Bps)}): "
        f"{list_first(listed, MAX_LISTED)}; {format_seconds(with_s)} per exchange instead of "
        f"{format_seconds(without_s)}, predicted"
    )
    return EntryShares(chosen, reason)


def share_change_reason(
    load: Workload | None,
    measured: LinkMeasurements,
    peers: Sequence[PeerId],
    current: Mapping[PeerId, int],
    names: Mapping[PeerId, str],
) -> str:
    """Return the reason for a new generation with different shares; "" if the current shares are kept.

    No member alone can cause a change: even if the reports of any one member are ignored, the other reports
    must show that the upload of each member whose share changes is slow, or is no longer slow.
    """
    wanted = choose_entry_shares(load, measured, peers, peers, current, names)
    changed = [peer for peer in peers if wanted.share_of(peer) != current.get(peer, WHOLE_SHARE)]
    for reporter in peers if changed else ():
        network = measured.without_reporter(reporter).build_network(peers, bounded=False)
        if network is None:
            return ""
        thin = _thin_ratios(network, peers, current)
        if any((wanted.share_of(peer) < WHOLE_SHARE) != (peer in thin) for peer in changed):
            return ""
    if not changed:
        return ""
    less = ", ".join(names[peer] for peer in list(wanted.shares)[: MAX_LISTED // 2])
    return "links have changed: " + (
        f"slow uploads of {format_count(len(wanted.shares), 'member')} ({less}) delay the exchange"
        if less
        else "no upload delays the exchange any more"
    )


def _rated_network(
    load: Workload | None, measured: LinkMeasurements, peers: Sequence[PeerId]
) -> NetworkModel | None:
    """Return the members' network; None if the exchange is not sparse, no rate is measured, or the group has
    fewer than 3 or more than `MAX_MEMBERS` members."""
    if load is None or not load.kind.is_sparse or not measured.has_rates:
        return None
    return measured.build_network(peers) if 2 < len(peers) <= MAX_MEMBERS else None


def _thin_ratios(
    network: NetworkModel, peers: Sequence[PeerId], current: Mapping[PeerId, int]
) -> dict[PeerId, float]:
    """Map each member whose upload is slow to the ratio of its upload to the median upload of the others."""
    ratios = {}
    for at, peer in enumerate(peers):
        others_Bps = median(rate for i, rate in enumerate(network.up_Bps) if i != at)
        factor = STILL_THIN_RATIO if peer in current else THIN_RATIO
        if factor * network.up_Bps[at] <= others_Bps:
            ratios[peer] = network.up_Bps[at] / others_Bps
    return ratios


def _bounded_share(share: float) -> int:
    bounded = max(MIN_ENTRIES_SHARE, round(share * WHOLE_SHARE))
    return bounded if MIN_CHANGE * bounded <= WHOLE_SHARE else WHOLE_SHARE


def _settled_share(wanted: int, now: int) -> int:
    """Return `wanted` if it differs from `now` by at least the factor `MIN_CHANGE`, otherwise `now`."""
    return wanted if max(wanted, now) >= MIN_CHANGE * min(wanted, now) else now
