"""Finds the order of ranks from workers' reports of links; decides if another is worth a new generation.

    round trips -----------+
    rates (both ends) -----+--> NetworkModel --> rank_order_search.best_order --> RankOrder(order, reason)
    exchange, parameters --+

Workers' reports are not trusted.  If both ends of a link report its rate, the smaller value is used, and if
both report a round trip, the larger value is used; a rate that only one end reports is limited to the median
of the other rates.  Therefore, no worker can make a link look better than the other end measured it to be.  A
worker that makes its own links look worse merely gets the rank of a worker with slow links, and cannot cause
a new order that is not also justified by the reports of the other workers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median

from gridtrain.core.messages import WHOLE_SHARE, PeerId
from gridtrain.core.planning.network_model import LinkModel, NetworkModel
from gridtrain.core.planning.rank_order_search import (
    MAX_SEARCHED_PEERS,
    ROOT_ONLY_TOPOLOGIES,
    Pieces,
    RankOrderEstimate,
    search_order,
    simulated_exchange_s,
)
from gridtrain.core.planning.workload import CpuCosts, ExchangeKind, Workload, messages_by_pair
from gridtrain.quantities import format_count, format_seconds

MIN_EXCHANGE_SPEEDUP = 1.2
"""Another order of ranks justifies a new generation only if it is predicted to make the exchange at least
this many times as fast; other topologies, exchanges and new entry shares need the same gain."""

MAX_REPLANNED_MEMBERS = 64  # in larger groups the order changes only when a worker joins or leaves
MAX_LISTED_MEMBERS = 32  # number of members whose links the status shows
DEFAULT_LINK_Bps = 12.5e6  # 100 Mbit/s, assumed where nothing has been measured
MAX_Bps, MIN_Bps = 1e11, 1e3
"""Bounds on a reported rate."""

MAX_UNCONFIRMED_Bps = 125e6
"""The bound on a rate that only one end has reported while no other worker has reported any rate: 1 Gbit/s.
A rate that only one end has reported may be far too high, because a worker whose I/O loop was busy reads the
whole burst from a buffer at once."""

PeerPair = tuple[PeerId, PeerId]
_LATENCY_ONLY = Workload(ExchangeKind.DENSE, 1)
"""A ring exchange of one element, whose time depends only on the round trips."""


@dataclass(frozen=True, slots=True)
class RankOrder:
    """An order of ranks.

    Attributes:
        order: `order[rank]` is the member with that rank.
        reason: the reason for this order, as text.
    """

    order: tuple[PeerId, ...]
    reason: str


@dataclass(slots=True)
class LinkMeasurements:
    """The workers' reports about the links between them.

    Attributes:
        rtt_s: round trips in seconds, by (peer that measured, other peer).
        sent_Bps: bytes per second by (sender, receiver), as the sender reports them.
        received_Bps: bytes per second by (sender, receiver), as the receiver reports them.
        relayed: the pairs, in both orders, whose messages a relay forwards.
    """

    rtt_s: Mapping[PeerPair, float] = field(default_factory=dict)
    sent_Bps: dict[PeerPair, float] = field(default_factory=dict)
    received_Bps: dict[PeerPair, float] = field(default_factory=dict)
    relayed: Collection[PeerPair] = ()

    @property
    def has_rates(self) -> bool:
        return bool(self.sent_Bps or self.received_Bps)

    def record(self, peer: PeerId, rates: Sequence[tuple[PeerId, float, float]]) -> bool:
        """Record a report from `peer`; return whether the report has changed any rate.

        Args:
            rates: (other end, bytes per second to the other end, bytes per second from it) for each link; 0
                means that the rate is not measured.
        """
        new = False
        for other, there_Bps, back_Bps in rates:
            reports = (
                (self.sent_Bps, (peer, other), there_Bps),
                (self.received_Bps, (other, peer), back_Bps),
            )
            for known, pair, rate_Bps in reports if other != peer else ():
                bounded_Bps = min(max(rate_Bps, MIN_Bps), MAX_Bps)
                if rate_Bps > 0 and known.get(pair) != bounded_Bps:
                    known[pair], new = bounded_Bps, True
        return new

    def without_reporter(self, peer: PeerId) -> LinkMeasurements:
        """Return these measurements, excluding the reports of `peer`."""
        return LinkMeasurements(
            {pair: rtt_s for pair, rtt_s in self.rtt_s.items() if pair[0] != peer},
            {pair: rate_Bps for pair, rate_Bps in self.sent_Bps.items() if pair[0] != peer},
            {pair: rate_Bps for pair, rate_Bps in self.received_Bps.items() if pair[1] != peer},
        )

    def between(self, peers: Collection[PeerId]) -> LinkMeasurements:
        """Return a copy of the measurements and routes of these members' links."""
        rtt_s, sent_Bps, received_Bps = (
            {(a, b): value for (a, b), value in known.items() if a in peers and b in peers}
            for known in (self.rtt_s, self.sent_Bps, self.received_Bps)
        )
        relayed = frozenset((a, b) for a, b in self.relayed if a in peers and b in peers)
        return LinkMeasurements(rtt_s, sent_Bps, received_Bps, relayed)

    def forget(self, peer: PeerId) -> None:
        for known in (self.sent_Bps, self.received_Bps):
            for pair in [pair for pair in known if peer in pair]:
                del known[pair]

    def rate_Bps(self, a: PeerId, b: PeerId) -> float | None:
        """Return the rate from a to b, the smaller of the two ends' reports; None if it has not been
        measured."""
        reported = [known[a, b] for known in (self.sent_Bps, self.received_Bps) if (a, b) in known]
        return min(reported, default=None)

    def min_rate_Bps(self, senders: Collection[PeerId], receivers: Collection[PeerId]) -> float | None:
        """Return the lowest measured rate from `senders` to `receivers`; None if none has been measured."""
        return min(
            (
                rate_Bps
                for known in (self.sent_Bps, self.received_Bps)
                for (a, b), rate_Bps in known.items()
                if a in senders and b in receivers
            ),
            default=None,
        )

    def build_network(self, peers: Sequence[PeerId], *, bounded: bool = True) -> NetworkModel | None:
        """Build the network of these members, in this order; return None if no link has been measured.

        A link without a measurement gets the median of the measured links, and a member's upload or download
        gets the rate of its fastest link.  If no rate has been measured, uploads and downloads get
        `DEFAULT_LINK_Bps`.

        Args:
            bounded: whether to limit a rate that only one end reports to the median of the other rates.
        """
        at = {peer: index for index, peer in enumerate(peers)}
        trips = self._round_trips(at)
        rates = self._rates(at, bounded)
        if not trips and not rates:
            return None
        usual_s = median(trips.values()) if trips else 0.0
        usual_Bps = median(rates.values()) if rates else DEFAULT_LINK_Bps
        up_Bps, down_Bps = [0.0] * len(at), [0.0] * len(at)
        for (a, b), rate_Bps in rates.items():
            if rate_Bps > up_Bps[a]:
                up_Bps[a] = rate_Bps
            if rate_Bps > down_Bps[b]:
                down_Bps[b] = rate_Bps

        @cache  # a search looks up the same links repeatedly
        def link(a: int, b: int) -> LinkModel:  # made on demand, because 1000 members have a million links
            trip_s = trips.get((min(a, b), max(a, b)), usual_s)
            return LinkModel(trip_s / 2, rates.get((a, b), usual_Bps if rates else math.inf))

        return NetworkModel(
            link,
            [rate or usual_Bps for rate in up_Bps],
            [rate or usual_Bps for rate in down_Bps],
            relayed_pairs={(at[a], at[b]) for a, b in self.relayed if a in at and b in at},
        )

    def _round_trips(self, at: Mapping[PeerId, int]) -> dict[tuple[int, int], float]:
        """Return the round trips in seconds, by (smaller index, larger index) of the two members.

        If both members of a pair report the round trip, the larger value is used.
        """
        trips: dict[tuple[int, int], float] = {}
        for (a, b), seconds in self.rtt_s.items():
            if a in at and b in at and a != b and 0 <= seconds < math.inf:
                i, j = at[a], at[b]
                pair = (i, j) if i < j else (j, i)
                if seconds >= trips.get(pair, 0.0):
                    trips[pair] = seconds
        return trips

    def _rates(self, at: Mapping[PeerId, int], bounded: bool) -> dict[tuple[int, int], float]:
        """Return the rates in bytes per second, by (sender's index, receiver's index).

        If both ends report a rate, the smaller value is used; `bounded` is explained in `build_network`.
        """
        rates: dict[tuple[int, int], float] = {}
        unconfirmed: dict[tuple[int, int], int] = {}  # the only reporter
        for known, others, end in (
            (self.sent_Bps, self.received_Bps, 0),
            (self.received_Bps, self.sent_Bps, 1),
        ):
            for (a, b), rate_Bps in known.items():
                if a in at and b in at:
                    pair, other_Bps = (at[a], at[b]), others.get((a, b))
                    if other_Bps is None:
                        rates[pair], unconfirmed[pair] = rate_Bps, pair[end]
                    elif end == 0:
                        rates[pair] = rate_Bps if rate_Bps < other_Bps else other_Bps
        if not bounded:
            return rates
        ordered = sorted(rates, key=lambda pair: rates[pair])
        ordered_Bps = [rates[pair] for pair in ordered]
        places: dict[int, list[int]] = {}  # in `ordered`, of the rates that only this member reports
        for place, pair in enumerate(ordered):
            if pair in unconfirmed:
                places.setdefault(unconfirmed[pair], []).append(place)
        bounds = {who: _median_without(ordered_Bps, own) for who, own in places.items()}
        return {
            pair: min(r, bounds[unconfirmed[pair]]) if pair in unconfirmed else r for pair, r in rates.items()
        }

    def link_rows(self, members: Sequence[PeerId]) -> list[list[float | int | None]]:
        """Return [rank, other rank, round trip in s, bytes per second] for each measured link.

        Only links between the first `MAX_LISTED_MEMBERS` members are included.  The rows can be encoded as
        JSON; a value that has not been measured is None.
        """
        shown = list(enumerate(members[:MAX_LISTED_MEMBERS]))
        every = [
            [i, j, self._round_trip_s(a, b), self.rate_Bps(a, b)]
            for i, a in shown
            for j, b in shown
            if i != j
        ]
        return [link for link in every if link[2] is not None or link[3] is not None]

    def _round_trip_s(self, a: PeerId, b: PeerId) -> float | None:
        """Return the larger of the two members' reports of the round trip; None if neither has reported
        it."""
        reported = [self.rtt_s[pair] for pair in ((a, b), (b, a)) if pair in self.rtt_s]
        return max((s for s in reported if math.isfinite(s) and s >= 0), default=None)


def _median_without(ordered_Bps: Sequence[float], places: Sequence[int]) -> float:
    """Return the median of the ascending rates, ignoring those at the indices `places`; if no rate is left,
    `MAX_UNCONFIRMED_Bps`."""
    count = len(ordered_Bps) - len(places)
    middle = [(count - 1) // 2, count // 2]
    for place in places:
        middle = [at + (place <= at) for at in middle]
    return (ordered_Bps[middle[0]] + ordered_Bps[middle[1]]) / 2 if count else MAX_UNCONFIRMED_Bps


def search_rank_order(
    load: Workload | None,
    measured: LinkMeasurements,
    peers: Sequence[PeerId],
    firsts: Sequence[PeerId],
    current: Sequence[PeerId] = (),
    entry_shares: Mapping[PeerId, int] | None = None,
    *,
    is_urgent: bool = False,
) -> Pieces[RankOrder]:
    """Plan the order of ranks for the exchange of a run, in pieces (see `Pieces`).

    Args:
        load: the workload, or None if it is unknown.  If it is unknown, or if the exchange uses a ring and no
            rate is measured, only round trips are considered.
        peers: the members in join order, without duplicates.
        firsts: the members that may be rank 0; the first of them gets rank 0 if the choice makes no
            difference.
        current: the current order, or empty; the search also starts from this order, with new members at its
            end.
        entry_shares: `Member.entries_share` of the members that have a smaller share than `WHOLE_SHARE`.
        is_urgent: see `best_order`.
    """
    count, start = len(peers), peers.index(firsts[0])
    joined = (*peers[start:], *peers[:start])
    if count <= 2:
        return RankOrder(joined, f"{format_count(count, 'worker')}: the order makes no difference")
    by_latency = load is None or (load.kind.topology == "ring" and not measured.has_rates)
    yield
    network = measured.build_network(peers)
    if network is None or (by_latency and not measured.rtt_s):
        return RankOrder(joined, f"{count} workers in join order: no round trip has been measured")
    network = with_entry_shares(network, peers, entry_shares or {})
    yield
    searched = _LATENCY_ONLY if load is None or by_latency else load
    found = yield from _search_best_order(searched, network, peers, firsts, current, is_urgent=is_urgent)
    order = tuple(peers[member] for member in found.order)
    reason = _latency_reason(found) if by_latency else _reason(searched, measured, order, found)
    return RankOrder(order, reason)


def join_order(peers: Sequence[PeerId], firsts: Sequence[PeerId]) -> RankOrder:
    """Return the join order, which the operator has configured, but with the first of `firsts` as rank 0."""
    order = (firsts[0], *(peer for peer in peers if peer != firsts[0]))
    return RankOrder(order, "ranks in the order of joining, as configured")


def compare_rank_orders(
    load: Workload | None,
    measured: LinkMeasurements,
    current: Sequence[PeerId],
    peers: Sequence[PeerId] = (),
    entry_shares: Mapping[PeerId, int] | None = None,
) -> Pieces[str]:
    """Return the reason for a new generation with another order, in pieces (see `Pieces`).

    Returns "" if no other order justifies a new generation, if the workload is unknown, if no rate has been
    measured, or if there are fewer than 3 or more than `MAX_REPLANNED_MEMBERS` members.

    Args:
        peers: the members of `current` in join order, by default `current`; each of them may be rank 0,
            because all hold the state.
        entry_shares: see `search_rank_order`.
    """
    if load is None or not 2 < len(current) <= MAX_REPLANNED_MEMBERS or not measured.has_rates:
        return ""
    peers = peers or current
    measured = measured.between(frozenset(peers))  # reports may arrive between two pieces
    network = measured.build_network(peers)
    if network is None:
        return ""
    shares = entry_shares or {}
    network = with_entry_shares(network, peers, shares)
    now = [peers.index(peer) for peer in current]
    now_s = simulated_exchange_s(load, network, CpuCosts(), now)
    yield
    found = yield from _search_best_order(load, network, peers, peers, current)  # as in `search_rank_order`
    if now_s < MIN_EXCHANGE_SPEEDUP * found.exchange_s:
        return ""
    is_corroborated = yield from _corroborate(load, measured, peers, now, found.order, shares)
    if not is_corroborated:
        return ""
    return (
        f"links have changed: another order makes an exchange {now_s / found.exchange_s:.2f} times as fast "
        f"({format_seconds(found.exchange_s)} instead of {format_seconds(now_s)}, predicted)"
    )


def _corroborate(
    load: Workload,
    measured: LinkMeasurements,
    peers: Sequence[PeerId],
    now: Sequence[int],
    then: Sequence[int],
    entry_shares: Mapping[PeerId, int],
) -> Pieces[bool]:
    """Return whether `then` justifies a new generation regardless of which member's reports are ignored.

    This ensures that no member alone can cause a new order.
    """
    for peer in peers:
        network = measured.without_reporter(peer).build_network(peers, bounded=False)
        if network is None:
            return False
        network = with_entry_shares(network, peers, entry_shares)
        now_s, then_s = (simulated_exchange_s(load, network, CpuCosts(), order) for order in (now, then))
        if now_s < MIN_EXCHANGE_SPEEDUP * then_s:
            return False
        yield
    return True


def with_entry_shares(
    network: NetworkModel, peers: Sequence[PeerId], shares: Mapping[PeerId, int]
) -> NetworkModel:
    """Return the network of `peers` with these values of `Member.entries_share`, by default `WHOLE_SHARE`."""
    fractions = [shares.get(peer, WHOLE_SHARE) / WHOLE_SHARE for peer in peers]
    return replace(network, entry_shares=fractions if shares else ())


def _search_best_order(
    load: Workload,
    network: NetworkModel,
    peers: Sequence[PeerId],
    firsts: Sequence[PeerId],
    current: Sequence[PeerId],
    *,
    is_urgent: bool = False,
) -> Pieces[RankOrderEstimate]:
    """Search for the best order of ranks.

    `search_rank_order` and `compare_rank_orders` both use this search, so that the former finds the order
    that the latter has predicted.
    """
    at = {peer: index for index, peer in enumerate(peers)}
    now = [at[peer] for peer in current if peer in at]
    now += sorted(set(range(len(peers))) - set(now)) if now else []
    roots = [at[peer] for peer in firsts]
    return search_order(load, network, CpuCosts(), roots, now, is_urgent=is_urgent)


# -- text ------------------------------------------------------------------------------------------


_NOT_SEARCHED = "the order is not optimized"


def _gain(found: RankOrderEstimate) -> str:
    if found.is_join_order:
        return ", as in join order"
    is_for_relays = found.saves_relays and found.exchange_s >= found.join_order_s
    why = ", because fewer messages are relayed" if is_for_relays else ""
    return f" instead of {format_seconds(found.join_order_s)} in join order{why}"


def _latency_reason(found: RankOrderEstimate) -> str:
    size = len(found.order)
    if size > MAX_SEARCHED_PEERS:
        return f"ring of {size} in join order: above {MAX_SEARCHED_PEERS} members the order is not optimized"
    took = f"an exchange of one element takes {format_seconds(found.exchange_s)}"
    return f"ring of {size} ordered by round trip: {took}{_gain(found)}"


def _reason(
    load: Workload, measured: LinkMeasurements, order: Sequence[PeerId], found: RankOrderEstimate
) -> str:
    exchange = " exchange" if load.kind.topology == "direct" else ""
    shape = f"{load.kind.topology}{exchange} of {len(order)}"
    text = f"{shape} ordered by predicted time: {format_seconds(found.exchange_s)} per exchange{_gain(found)}"
    if len(order) > MAX_SEARCHED_PEERS and load.kind.topology not in ROOT_ONLY_TOPOLOGIES:
        text = (
            f"{shape} in join order: above {MAX_SEARCHED_PEERS} members {_NOT_SEARCHED}; "
            f"{format_seconds(found.exchange_s)} per exchange"
        )
    if not measured.has_rates:
        return f"{text} (no rate has been measured; {DEFAULT_LINK_Bps * 8 / 1e6:.0f} Mbit/s are assumed)"
    # Only measured rates, in both directions, as in the status; others are assumed in the prediction.
    rates = [
        (rate_Bps, min(src, dst), max(src, dst))
        for pair in messages_by_pair(load, len(order))
        for src, dst in (pair, pair[::-1])
        if (rate_Bps := measured.rate_Bps(order[src], order[dst])) is not None
    ]
    if not rates:
        return text
    slowest_Bps, low, high = min(rates)
    return f"{text}; its slowest link is {format_rate(slowest_Bps)}, between ranks {low} and {high}"


def format_rate(rate_Bps: float) -> str:
    return f"{rate_Bps * 8 / 1e6:.3g} Mbit/s"
