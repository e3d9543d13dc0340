"""From what workers have measured to the order of ranks of the exchange that they run, and the reason.

Decides which measurements count and when a better order is worth a new generation.  Never measures.

    Links (round trips) ---+
    Rates (both ends) -----+--> Network of the members --> ordering.best_order --> Plan(order, reason)
    Setup (exchange, n) ---+

A worker can say what it likes, so of a link's rate the smaller of what its two ends say counts, and of a
round trip the larger.  Nobody can make a link look better than the other end has seen it; who makes its own
look worse only gets the place that such a link would get.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from gridtrain.protocol.lines import Link, Network
from gridtrain.protocol.loads import VALUE_BYTES, Cpu, Kind, Load, moves_of
from gridtrain.protocol.messages import PeerId, Setup
from gridtrain.protocol.ordering import best_order, walked_s
from gridtrain.protocol.planner import Plan, order_ring

WORTH = 1.2
"""Another order is worth a generation if the exchange is predicted to take so many times less."""

MOST_REPLANNED = 64  # members; above the order stays until somebody comes or goes
MOST_LISTED = 32  # members whose links the status shows
USUAL_Bps = 12.5e6  # 100 Mbit/s: what a line counts as where nothing has been measured
MOST_Bps, LEAST_Bps = 1e11, 1e3
"""What a rate counts as at most and at least: it is a worker's word."""

Pair = tuple[PeerId, PeerId]
_KINDS = {
    ("dense", ""): Kind.DENSE,
    ("dense", "ring"): Kind.DENSE,
    ("dense", "star"): Kind.STAR,
    ("topk", ""): Kind.TOPK,
    ("gtopk", ""): Kind.GTOPK,
    ("gtopk", "butterfly"): Kind.GTOPK,
    ("gtopk", "tree"): Kind.TREE,
    ("gtopk", "star"): Kind.STAR_GTOPK,
}
_EXCHANGE = re.compile(r"(Dense|TopK|GTopK)\(([^()]*)")
_PARAMETERS = re.compile(r"(\d{1,18}) parameters")
_SHAPES = {Kind.DENSE: "ring", Kind.TOPK: "all-gather", Kind.GTOPK: "butterfly", Kind.TREE: "tree"}


def load_of(setup: Setup | None) -> Load | None:
    """What a run exchanges, from the facts on which all its workers agree; None: it does not say."""
    facts = dict(setup.facts) if setup is not None else {}
    exchange = _EXCHANGE.search(facts.get("exchange", ""))
    parameters = _PARAMETERS.match(facts.get("model", ""))
    if exchange is None or parameters is None or int(parameters[1]) < 1:
        return None
    return named(exchange[1], exchange[2], int(parameters[1]))


def is_star(setup: Setup | None) -> bool:
    """Whether everything goes over rank 0."""
    load = load_of(setup)
    return load is not None and load.kind in (Kind.STAR, Kind.STAR_GTOPK)


def named(exchange: str, options: str, parameters: int, encrypted: bool = True) -> Load | None:
    """ "GTopK" and "density=0.01, values=fp16, topology=tree" as a load; None: there is no such exchange."""
    said = dict(option.strip().partition("=")[::2] for option in options.split(",") if "=" in option)
    kind = _KINDS.get((exchange.lower(), said.get("topology", "")))
    if kind is None or not kind.sparse:
        return Load(kind, parameters, encrypted=encrypted) if kind is not None else None
    try:
        density = float(said.get("density", "nan"))
    except ValueError:
        return None
    values = said.get("values", "fp16")
    if not 0 < density <= 1 or values not in VALUE_BYTES:
        return None
    return Load(kind, parameters, density, values, encrypted)


@dataclass(slots=True)
class Measured:
    """Links between workers, as they have told of them.

    Attributes:
        rtt_s: round trips in seconds, by (who measured, to whom).
        sent_Bps, came_Bps: bytes per second from one peer to another, by the sender's and the receiver's
            word.
    """

    rtt_s: Mapping[Pair, float] = field(default_factory=dict)
    sent_Bps: dict[Pair, float] = field(default_factory=dict)
    came_Bps: dict[Pair, float] = field(default_factory=dict)

    def told(self, peer: PeerId, rates: Sequence[tuple[PeerId, float, float]]) -> None:
        """`rates`: to whom, bytes per second there, bytes per second from there; 0: not measured."""
        for other, there_Bps, back_Bps in rates:
            if other == peer:
                continue
            if there_Bps > 0:
                self.sent_Bps[peer, other] = min(max(there_Bps, LEAST_Bps), MOST_Bps)
            if back_Bps > 0:
                self.came_Bps[other, peer] = min(max(back_Bps, LEAST_Bps), MOST_Bps)

    def forget(self, peer: PeerId) -> None:
        for known in (self.sent_Bps, self.came_Bps):
            for pair in [pair for pair in known if peer in pair]:
                del known[pair]

    def rate_Bps(self, a: PeerId, b: PeerId) -> float | None:
        """From a to b, by the more modest of both ends; None: neither has said."""
        words = [known[a, b] for known in (self.sent_Bps, self.came_Bps) if (a, b) in known]
        return min(words, default=None)

    def network(self, peers: Sequence[PeerId]) -> Network | None:
        """Of these members, in their order; None: nothing is measured between them.

        A link that is not measured counts as the median of the others.  A line is as fast as the fastest that
        went over it.
        """
        size = len(peers)
        pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
        trips = {(a, b): s for a, b in pairs if (s := self._trip_s(peers[a], peers[b])) is not None}
        rates = {(a, b): r for a, b in pairs if (r := self.rate_Bps(peers[a], peers[b])) is not None}
        if not trips and not rates:
            return None
        usual_s = median(trips.values()) if trips else 0.0
        usual_Bps = median(rates.values()) if rates else USUAL_Bps
        links = {
            pair: Link(trips.get(pair, usual_s) / 2, rates.get(pair, usual_Bps if rates else math.inf))
            for pair in pairs
        }
        up_Bps = [max((r for (a, _), r in rates.items() if a == i), default=usual_Bps) for i in range(size)]
        down_Bps = [max((r for (_, b), r in rates.items() if b == i), default=usual_Bps) for i in range(size)]
        return Network(lambda a, b: links[a, b], up_Bps, down_Bps)

    def listed(self, roster: Sequence[PeerId]) -> list[list[float | int | None]]:
        """[rank, other rank, round trip in s, bytes per second] of the first members; JSON-able."""
        shown = list(enumerate(roster[:MOST_LISTED]))
        every = [
            [i, j, self._trip_s(a, b), self.rate_Bps(a, b)] for i, a in shown for j, b in shown if i != j
        ]
        return [link for link in every if link[2] is not None or link[3] is not None]

    def _trip_s(self, a: PeerId, b: PeerId) -> float | None:
        """The larger of what both say."""
        words = [self.rtt_s[pair] for pair in ((a, b), (b, a)) if pair in self.rtt_s]
        return max((s for s in words if math.isfinite(s) and s >= 0), default=None)


def plan(load: Load | None, measured: Measured, peers: Sequence[PeerId], first: PeerId) -> Plan:
    """The order of ranks for what the run exchanges.

    Args:
        load: None: not known; then, and where only a ring's round trips are known, the ring goes by these.
        peers: the members in the order of joining, all different.
        first: is to be rank 0.
    """
    rates = bool(measured.sent_Bps or measured.came_Bps)
    network = measured.network(peers) if len(peers) > 2 else None
    if load is None or network is None or (load.kind is Kind.DENSE and not rates):
        return order_ring(measured.rtt_s, peers, first)
    found = best_order(load, network, Cpu(), [peers.index(first)])
    order = tuple(peers[member] for member in found.order)
    return Plan(order, _reason(load, network, found.order, found.exchange_s, found.joined_s, rates))


def worth(load: Load | None, measured: Measured, roster: Sequence[PeerId]) -> str:
    """Why another order than `roster`'s is wanted; empty: it is not, or it cannot be known."""
    if load is None or not 2 < len(roster) <= MOST_REPLANNED or not (measured.sent_Bps or measured.came_Bps):
        return ""
    network = measured.network(roster)
    if network is None:
        return ""
    now_s = walked_s(load, network, Cpu(), range(len(roster)))
    found = best_order(load, network, Cpu(), [0])
    if now_s < WORTH * found.exchange_s:
        return ""
    return (
        f"links have changed: another order makes an exchange {now_s / found.exchange_s:.2f} times as fast "
        f"({_ms(found.exchange_s)} instead of {_ms(now_s)}, predicted)"
    )


def _reason(
    load: Load, network: Network, order: Sequence[int], exchange_s: float, joined_s: float, rates: bool
) -> str:
    shape = f"{_SHAPES.get(load.kind, 'star')} of {len(order)}"
    gain = f" instead of {_ms(joined_s)} in join order" if exchange_s < joined_s else ", as in join order"
    text = f"{shape} ordered by predicted time: {_ms(exchange_s)} an exchange{gain}"
    if not rates:
        return f"{text} (no rate is measured; lines count as {USUAL_Bps * 8 / 1e6:.0f} Mbit/s)"
    ordered = network.ordered(order)
    crossed = _crossed(load.kind, len(order))
    thin_Bps, src, dst = min((ordered.path_Bps(a, b), a, b) for a, b in crossed)
    return f"{text}; its thinnest link is {_rate(thin_Bps)}, rank {src} to {dst}"


def _crossed(kind: Kind, size: int) -> set[tuple[int, int]]:
    """Directed pairs of ranks between which anything goes."""
    return {(move.src, move.dst) for move in moves_of(Load(kind, size), size, most_moves=1)}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _rate(rate_Bps: float) -> str:
    return f"{rate_Bps * 8 / 1e6:.3g} Mbit/s"
