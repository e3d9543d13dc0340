"""From what workers have measured to the order of ranks of the exchange that they run, and the reason.

Decides which measurements count and when a better order is worth a new generation.  Never measures.

    Links (round trips) ---+
    Rates (both ends) -----+--> Network of the members --> ordering.best_order --> Plan(order, reason)
    Setup (exchange, n) ---+

A worker can say what it likes, so of a link's rate the smaller of what its two ends say counts, and of a
round trip the larger; what one end alone says of a rate counts as no more than the median of what the others
say.  Nobody can make a link look better than the other end has seen it; who makes its own look worse only
gets the place that such a link would get, and no new order while all others' words speak against it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from gridtrain.core.messages import PeerId, Setup
from gridtrain.core.planning.network_model import LinkModel, NetworkModel
from gridtrain.core.planning.rank_order_search import (
    MAX_SEARCHED_PEERS,
    ROOT_ONLY_KINDS,
    RankOrderEstimate,
    best_order,
    simulated_exchange_s,
)
from gridtrain.core.planning.ring_order import RankOrder, order_ring
from gridtrain.core.planning.workload import VALUE_BYTES, CpuCosts, ExchangeKind, Workload, messages_by_pair

MIN_SPEEDUP = 1.2
"""Another order is worth a generation if the exchange is predicted to take so many times less."""

MAX_REPLANNED_MEMBERS = 64  # members; above the order stays until somebody comes or goes
MAX_LISTED_MEMBERS = 32  # members whose links the status shows
DEFAULT_LINK_Bps = 12.5e6  # 100 Mbit/s: what a line counts as where nothing has been measured
MOST_Bps, LEAST_Bps = 1e11, 1e3
MAX_UNCONFIRMED_Bps = 125e6
"""1 Gbit/s: what one end alone has told counts as no more where nobody else has told anything.  A loop that
was too busy to answer in time is just the one that reads a burst from a buffer, in no time."""

"""What a rate counts as at most and at least: it is a worker's word."""

PeerPair = tuple[PeerId, PeerId]
_KINDS = {
    ("dense", ""): ExchangeKind.DENSE,
    ("dense", "ring"): ExchangeKind.DENSE,
    ("dense", "direct"): ExchangeKind.DIRECT,
    ("dense", "star"): ExchangeKind.STAR,
    ("topk", ""): ExchangeKind.TOPK,
    ("gtopk", ""): ExchangeKind.GTOPK,
    ("gtopk", "butterfly"): ExchangeKind.GTOPK,
    ("gtopk", "tree"): ExchangeKind.TREE,
    ("gtopk", "star"): ExchangeKind.STAR_GTOPK,
}
_EXCHANGE = re.compile(r"(Dense|TopK|GTopK)\(([^()]*)")
_PARAMETERS = re.compile(r"(\d{1,18}) parameters")
_TOPOLOGY_NAMES = {
    ExchangeKind.DENSE: "ring",
    ExchangeKind.DIRECT: "direct exchange",
    ExchangeKind.TOPK: "all-gather",
    ExchangeKind.GTOPK: "butterfly",
    ExchangeKind.TREE: "tree",
}


def workload_of(setup: Setup | None) -> Workload | None:
    """What a run exchanges, from the facts on which all its workers agree; None: it does not say."""
    facts = dict(setup.facts) if setup is not None else {}
    exchange = _EXCHANGE.search(facts.get("exchange", ""))
    parameters = _PARAMETERS.match(facts.get("model", ""))
    if exchange is None or parameters is None or int(parameters[1]) < 1:
        return None
    return parse_workload(exchange[1], exchange[2], int(parameters[1]))


def is_star(setup: Setup | None) -> bool:
    """Whether everything goes over rank 0."""
    load = workload_of(setup)
    return load is not None and load.kind in (ExchangeKind.STAR, ExchangeKind.STAR_GTOPK)


def parse_workload(exchange: str, options: str, parameters: int, encrypted: bool = True) -> Workload | None:
    """ "GTopK" and "density=0.01, values=fp16, topology=tree" as a load; None: there is no such exchange."""
    said = dict(option.strip().partition("=")[::2] for option in options.split(",") if "=" in option)
    kind = _KINDS.get((exchange.lower(), said.get("topology", "")))
    if kind is None or not kind.is_sparse:
        return Workload(kind, parameters, encrypted=encrypted) if kind is not None else None
    try:
        density = float(said.get("density", "nan"))
    except ValueError:
        return None
    values = said.get("values", "fp16")
    if not 0 < density <= 1 or values not in VALUE_BYTES:
        return None
    return Workload(kind, parameters, density, values, encrypted)


@dataclass(slots=True)
class LinkMeasurements:
    """Links between workers, as they have told of them.

    Attributes:
        rtt_s: round trips in seconds, by (who measured, to whom).
        sent_Bps, came_Bps: bytes per second from one peer to another, by the sender's and the receiver's
            word.
    """

    rtt_s: Mapping[PeerPair, float] = field(default_factory=dict)
    sent_Bps: dict[PeerPair, float] = field(default_factory=dict)
    received_Bps: dict[PeerPair, float] = field(default_factory=dict)

    def record(self, peer: PeerId, rates: Sequence[tuple[PeerId, float, float]]) -> bool:
        """`rates`: to whom, bytes per second there, bytes per second from there; 0: not measured.

        Returns whether anything is new.
        """
        new = False
        for other, there_Bps, back_Bps in rates:
            words = ((self.sent_Bps, (peer, other), there_Bps), (self.received_Bps, (other, peer), back_Bps))
            for known, pair, rate_Bps in words if other != peer else ():
                bounded_Bps = min(max(rate_Bps, LEAST_Bps), MOST_Bps)
                if rate_Bps > 0 and known.get(pair) != bounded_Bps:
                    known[pair], new = bounded_Bps, True
        return new

    def without_reporter(self, peer: PeerId) -> LinkMeasurements:
        """The same without what this worker has told, of whichever links."""
        return LinkMeasurements(
            {pair: rtt_s for pair, rtt_s in self.rtt_s.items() if pair[0] != peer},
            {pair: rate_Bps for pair, rate_Bps in self.sent_Bps.items() if pair[0] != peer},
            {pair: rate_Bps for pair, rate_Bps in self.received_Bps.items() if pair[1] != peer},
        )

    def forget(self, peer: PeerId) -> None:
        for known in (self.sent_Bps, self.received_Bps):
            for pair in [pair for pair in known if peer in pair]:
                del known[pair]

    def rate_Bps(self, a: PeerId, b: PeerId) -> float | None:
        """From a to b, by the more modest of both ends; None: neither has said."""
        words = [known[a, b] for known in (self.sent_Bps, self.received_Bps) if (a, b) in known]
        return min(words, default=None)

    def build_network(self, peers: Sequence[PeerId], *, bounded: bool = True) -> NetworkModel | None:
        """Of these members, in their order; None: nothing is measured between them.

        A link that is not measured counts as the median of the others.  A line is as fast as the fastest that
        went over it.  `bounded`: what one end alone has told counts as no more than the others' median.
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
            up_Bps[a], down_Bps[b] = max(up_Bps[a], rate_Bps), max(down_Bps[b], rate_Bps)

        def link(a: int, b: int) -> LinkModel:  # made when asked for: 1000 members have a million
            trip_s = trips.get((min(a, b), max(a, b)), usual_s)
            return LinkModel(trip_s / 2, rates.get((a, b), usual_Bps if rates else math.inf))

        return NetworkModel(
            link, [rate or usual_Bps for rate in up_Bps], [rate or usual_Bps for rate in down_Bps]
        )

    def _round_trips(self, at: Mapping[PeerId, int]) -> dict[tuple[int, int], float]:
        """By (smaller index, larger index) of members: the larger of what both say."""
        trips: dict[tuple[int, int], float] = {}
        for (a, b), seconds in self.rtt_s.items():
            if a in at and b in at and a != b and math.isfinite(seconds) and seconds >= 0:
                pair = (min(at[a], at[b]), max(at[a], at[b]))
                trips[pair] = max(seconds, trips.get(pair, 0.0))
        return trips

    def _rates(self, at: Mapping[PeerId, int], bounded: bool) -> dict[tuple[int, int], float]:
        """By directed pair of members' indices."""
        words: dict[tuple[int, int], dict[int, float]] = {}  # by who said so
        for known, end in ((self.sent_Bps, 0), (self.received_Bps, 1)):
            for (a, b), rate_Bps in known.items():
                if a in at and b in at:
                    pair = at[a], at[b]
                    words.setdefault(pair, {})[pair[end]] = rate_Bps
        rates = {pair: min(said.values()) for pair, said in words.items()}
        if not bounded:
            return rates
        lone = {pair: next(iter(said)) for pair, said in words.items() if len(said) == 1}
        bounds = {
            who: median([r for pair, r in rates.items() if lone.get(pair) != who] or [MAX_UNCONFIRMED_Bps])
            for who in set(lone.values())
        }
        return {pair: min(r, bounds[lone[pair]]) if pair in lone else r for pair, r in rates.items()}

    def link_rows(self, roster: Sequence[PeerId]) -> list[list[float | int | None]]:
        """[rank, other rank, round trip in s, bytes per second] of the first members; JSON-able."""
        shown = list(enumerate(roster[:MAX_LISTED_MEMBERS]))
        every = [
            [i, j, self._round_trip_s(a, b), self.rate_Bps(a, b)]
            for i, a in shown
            for j, b in shown
            if i != j
        ]
        return [link for link in every if link[2] is not None or link[3] is not None]

    def _round_trip_s(self, a: PeerId, b: PeerId) -> float | None:
        """The larger of what both say."""
        words = [self.rtt_s[pair] for pair in ((a, b), (b, a)) if pair in self.rtt_s]
        return max((s for s in words if math.isfinite(s) and s >= 0), default=None)


def plan_rank_order(
    load: Workload | None,
    measured: LinkMeasurements,
    peers: Sequence[PeerId],
    firsts: Sequence[PeerId],
    roster: Sequence[PeerId] = (),
) -> RankOrder:
    """The order of ranks for what the run exchanges.

    Args:
        load: None: not known; then, and where only a ring's round trips are known, the ring goes by these.
        peers: the members in the order of joining, all different.
        firsts: who may be rank 0, the one that is if it makes no difference first.
        roster: the order in which members stand; those who are new come last in it.
    """
    rates = bool(measured.sent_Bps or measured.received_Bps)
    network = measured.build_network(peers) if len(peers) > 2 else None
    if load is None or network is None or (load.kind is ExchangeKind.DENSE and not rates):
        return order_ring(measured.rtt_s, peers, firsts[0])
    found = _search_best_order(load, network, peers, firsts, roster)
    order = tuple(peers[member] for member in found.order)
    return RankOrder(order, _reason(load, network, found.order, found.exchange_s, found.join_order_s, rates))


def join_order(peers: Sequence[PeerId], firsts: Sequence[PeerId]) -> RankOrder:
    """The order of joining, as the owner wants it; rank 0 is the first of `firsts`, who may be it."""
    order = (firsts[0], *(peer for peer in peers if peer != firsts[0]))
    return RankOrder(order, "ranks by the order of joining, as ordered")


def reorder_reason(
    load: Workload | None,
    measured: LinkMeasurements,
    roster: Sequence[PeerId],
    peers: Sequence[PeerId] = (),
) -> str:
    """Why another order than `roster`'s is wanted; empty: it is not, or it cannot be known.

    Args:
        peers: the same members in the order of joining, by default as they stand; all hold the state.
    """
    if (
        load is None
        or not 2 < len(roster) <= MAX_REPLANNED_MEMBERS
        or not (measured.sent_Bps or measured.received_Bps)
    ):
        return ""
    peers = peers or roster
    network = measured.build_network(peers)
    if network is None:
        return ""
    stand = [peers.index(peer) for peer in roster]
    now_s = simulated_exchange_s(load, network, CpuCosts(), stand)
    found = _search_best_order(load, network, peers, peers, roster)  # as `plan` will look for it
    if now_s < MIN_SPEEDUP * found.exchange_s or not _is_corroborated(
        load, measured, peers, stand, found.order
    ):
        return ""
    return (
        f"links have changed: another order makes an exchange {now_s / found.exchange_s:.2f} times as fast "
        f"({_ms(found.exchange_s)} instead of {_ms(now_s)}, predicted)"
    )


def _is_corroborated(
    load: Workload,
    measured: LinkMeasurements,
    peers: Sequence[PeerId],
    now: Sequence[int],
    then: Sequence[int],
) -> bool:
    """Whether it is worth it without the words of any one member as well, so that none can bring it about."""
    for peer in peers:
        network = measured.without_reporter(peer).build_network(peers, bounded=False)
        if network is None:
            return False
        if simulated_exchange_s(load, network, CpuCosts(), now) < MIN_SPEEDUP * simulated_exchange_s(
            load, network, CpuCosts(), then
        ):
            return False
    return True


def _search_best_order(
    load: Workload,
    network: NetworkModel,
    peers: Sequence[PeerId],
    firsts: Sequence[PeerId],
    roster: Sequence[PeerId],
) -> RankOrderEstimate:
    """For `plan` and `worth` the same search, so that the one finds what the other has promised."""
    at = {peer: index for index, peer in enumerate(peers)}
    stand = [at[peer] for peer in roster if peer in at]
    stand += sorted(set(range(len(peers))) - set(stand)) if stand else []
    return best_order(load, network, CpuCosts(), [at[peer] for peer in firsts], stand)


def _reason(
    load: Workload,
    network: NetworkModel,
    order: Sequence[int],
    exchange_s: float,
    joined_s: float,
    rates: bool,
) -> str:
    shape = f"{_TOPOLOGY_NAMES.get(load.kind, 'star')} of {len(order)}"
    gain = f" instead of {_ms(joined_s)} in join order" if exchange_s < joined_s else ", as in join order"
    text = f"{shape} ordered by predicted time: {_ms(exchange_s)} an exchange{gain}"
    if len(order) > MAX_SEARCHED_PEERS and load.kind not in ROOT_ONLY_KINDS:
        text = (
            f"{shape} in join order, as above {MAX_SEARCHED_PEERS} members no better one is looked for: "
            f"{_ms(exchange_s)} an exchange"
        )
    if not rates:
        return f"{text} (no rate is measured; lines count as {DEFAULT_LINK_Bps * 8 / 1e6:.0f} Mbit/s)"
    ordered = network.reordered(order)
    thin_Bps, src, dst = min((ordered.path_Bps(a, b), a, b) for a, b in messages_by_pair(load, len(order)))
    return f"{text}; its thinnest link is {_rate(thin_Bps)}, rank {src} to {dst}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _rate(rate_Bps: float) -> str:
    return f"{rate_Bps * 8 / 1e6:.3g} Mbit/s"
