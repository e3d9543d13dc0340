"""The plan of a generation, from all that is measured; and whether another plan would be worth a generation.

Decides the order of ranks, the exchange, its road and the shares of the generation that is made.  Never
decides who is a member, never makes a generation (`protocol.generations`), never measures.

    Links, Rates -----+                    +--plan--> order, shares, `reason`     as a generation is made
    Beats (figures) --+--> what is known --+
    Broken -----------+                    +--mind--> `Making.want`: "links have changed: .."   in between

Each of what it decides is decided elsewhere: by `topology`, `exchanging`, `roads`, `sharing`, `breaks`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from gridtrain.protocol import messages as m
from gridtrain.protocol import topology
from gridtrain.protocol.breaks import Breaks
from gridtrain.protocol.exchanging import FIRST_FIGURE, Exchanging, pace_of
from gridtrain.protocol.lines import Network
from gridtrain.protocol.making import Making
from gridtrain.protocol.membership_io import RunPhase
from gridtrain.protocol.planner import Plan
from gridtrain.protocol.roads import MOST_MEMBERS
from gridtrain.protocol.roll import AVOIDED_S, latencies, limits, shares
from gridtrain.protocol.run import Run
from gridtrain.protocol.seating import Cost, Seating, pair_cost, stage_shares
from gridtrain.protocol.seats import Seats
from gridtrain.protocol.sharing import Shares, Sharing
from gridtrain.protocol.tellers import Tellers
from gridtrain.protocol.whereabouts import Whereabouts


class Plans:
    """See the module's text.

    Attributes:
        reason: of the latest plan, in words.

    Args:
        by_links: False: ranks go by the order of joining, whatever the links are like.
    """

    def __init__(self, run: Run, making: Making, whereabouts: Whereabouts, *, by_links: bool) -> None:
        self._run, self._making, self._whereabouts = run, making, whereabouts
        self._by_links = by_links
        self.reason = ""
        self.links = topology.Measured()
        self.breaks = Breaks()
        self.exchanging = Exchanging(rates_s=run.limits.probe_s)
        self._sharing = Sharing()
        self._tellers = Tellers(run.limits.reshare_s)
        self._looked_s = -math.inf  # for another exchange
        self._weighed_s = -math.inf  # whether other shares are worth it

    # -- what is measured --------------------------------------------------------------------------

    def introduced(self, peer: m.PeerId) -> None:
        """It is told to measure its links."""
        self._tellers.introduced(peer)

    def rated(self, peer: m.PeerId, rates: m.Rates) -> None:
        known = [told for told in rates.rates_Bps if told[0] in self._run.workers]
        if self.links.told(peer, self._tellers.heeded(peer, known)):
            self._tellers.changed(peer)

    def computed(self, peer: m.PeerId, figures: Mapping[str, float]) -> None:
        """What a beat tells of a worker's computing."""
        self._sharing.observe(peer, figures)

    def forget(self, peer: m.PeerId) -> None:
        self.breaks.forget(peer)
        self._sharing.forget(peer)
        self.links.forget(peer)
        self._tellers.forget(peer)

    def slowest_Bps(self, givers: Collection[m.PeerId], takers: Collection[m.PeerId]) -> float | None:
        """Of the measured links from the ones to the others."""
        rates = [self.links.rate_Bps(a, b) for a in givers for b in takers]
        return min((rate for rate in rates if rate is not None), default=None)

    def cost_s(self, peers: Sequence[m.PeerId], now_s: float) -> Cost | None:
        """Of the links between these; None: too few to matter, or not to be minded."""
        if not self._by_links or len(peers) < 3:
            return None
        workers = [self._run.workers[peer] for peer in peers]
        self.links.rtt_s = latencies(workers, self.breaks.avoided(now_s))
        network = self.links.network(peers)
        at = {peer: place for place, peer in enumerate(peers)}
        return None if network is None else pair_cost(network, at)

    # -- the generation that is made ---------------------------------------------------------------

    def plan(
        self,
        peers: Sequence[m.PeerId],
        holders: Collection[m.PeerId],
        now_s: float,
        seated: Seating | None = None,
    ) -> tuple[tuple[m.PeerId, ...], tuple[int, ...]]:
        """The order of ranks, and the shares in it.

        Args:
            peers: the members, the longest-serving first.
            holders: they hold the state; the first of them has rank 0.
            seated: of a model in stages, who sits where.
        """
        avoided = self.breaks.avoid(now_s)
        self.links.rtt_s = latencies([self._run.workers[peer] for peer in peers], avoided)
        self._tellers.planned()
        self._choose_exchange(peers, now_s)
        network = self._rated(peers)
        self.exchanging.take_road(
            len(peers), network, lambda: not avoided and self._whereabouts.all_direct(peers)
        )
        if seated is not None:
            order, self.reason = seated.order, seated.reason
        else:
            found = self._ordered(peers, [peer for peer in peers if peer in holders])
            order, self.reason = found.order, found.reason
        if avoided:
            self.reason += f"; of {len(avoided)} pairs connections broke: each counts as {AVOIDED_S:g} s"
        if self.exchanging.road.reason:
            self.reason += f"; {self.exchanging.road.reason}"
        dealt = self._deal(order, in_stages=seated is not None)
        self.reason += "; " + dealt.reason
        return order, dealt.counts

    def _ordered(self, peers: Sequence[m.PeerId], firsts: Sequence[m.PeerId]) -> Plan:
        if not self._by_links:
            return topology.as_joined(peers, firsts)
        return topology.plan(self.exchanging.load, self.links, peers, firsts, self._run.order)

    def _deal(self, order: Sequence[m.PeerId], *, in_stages: bool) -> Shares:
        workers, total = [self._run.workers[peer] for peer in order], self._batch_size
        if in_stages:
            return stage_shares(limits(workers), Seats.of(self._run.stages, len(order)), total)
        return shares(workers, total, self._sharing)

    @property
    def _batch_size(self) -> int | None:
        reference = self._run.reference
        return reference.global_batch_size if reference is not None else None

    def _choose_exchange(self, peers: Sequence[m.PeerId], now_s: float) -> None:
        """A generation is made anyway; a worker that is alone needs no measurements."""
        if self.exchanging.open:
            if len(peers) == 1:
                self.exchanging.first(peers, {}, None, now_s)
        elif self._run.members != set(peers):
            self.exchanging.again(*self._now_with(peers))

    # -- a faster one ------------------------------------------------------------------------------

    def mind(self, now_s: float) -> None:
        """After a beat: want a generation where another exchange, order or other shares are worth it."""
        self._mind_exchange(now_s)
        self._mind_shares(now_s)
        self._mind_links(now_s)

    def _may_improve(self, now_s: float) -> bool:
        """Whether a generation may be wanted only because another one would be faster."""
        making, run = self._making, self._run
        training = making.resting and run.phase is RunPhase.TRAINING and not run.is_pipeline
        return training and not making.change and now_s >= making.made_s + self._run.limits.reshare_s

    def _mind_exchange(self, now_s: float) -> None:
        """The exchange that is chosen first, or one that is so much faster now."""
        making, roster = self._making, self._run.order
        training = making.resting and self._run.phase is RunPhase.TRAINING and not making.change
        absent = any(peer not in self._run.workers for peer in roster)
        if not (self.exchanging.is_auto and training) or absent:
            return
        chosen = ""
        if self.exchanging.open:
            chosen = self.exchanging.first(roster, *self._known_of(roster), now_s)
        elif self._may_improve(now_s) and now_s >= self._looked_s + self._run.limits.reshare_s:
            self._looked_s = now_s
            chosen = self.exchanging.again(*self._now_with(roster))
        if chosen:
            making.want(f"the exchange is chosen: {self.exchanging.chosen}")

    def _mind_shares(self, now_s: float) -> None:
        """Other shares where that gains noticeably, and not too often."""
        early = now_s < self._weighed_s + self._run.limits.beat_s
        if self._batch_size is None or not self._may_improve(now_s) or early:
            return
        self._weighed_s = now_s  # N workers bring 2 N beats a second, and each look is at all of them
        run = self._run
        if all(peer in run.workers for peer in run.order):
            most = limits([run.workers[peer] for peer in run.order])
            self._making.want(self._sharing.worth(run.order, [x.share for x in run.roster], most))

    def _mind_links(self, now_s: float) -> None:
        """Another order where links have changed so much that it gains noticeably."""
        if not self._by_links or not self._may_improve(now_s):
            return
        if tellers := self._tellers.due(now_s):
            run = self._run
            self.links.rtt_s = latencies(list(run.workers.values()), self.breaks.avoided(now_s))
            if len(present := run.eldest_first(run.present)) == len(run.order):
                gain = topology.worth(self.exchanging.load, self.links, run.order, present)
                self._making.want(gain or self._off_road(present))
            self._tellers.looked(tellers, now_s, found=bool(self._making.change))

    def _off_road(self, peers: Sequence[m.PeerId]) -> str:
        network = self._rated(peers)
        return self.exchanging.off_road(len(peers), network) if network is not None else ""

    # -- links and computing of a group ------------------------------------------------------------

    @property
    def _knows_rates(self) -> bool:
        return bool(self.links.sent_Bps or self.links.came_Bps)

    def _rated(self, peers: Sequence[m.PeerId]) -> Network | None:
        """Links of a group in which a road is to be chosen; None: no rate is known."""
        few = 2 < len(peers) <= MOST_MEMBERS
        return self.links.network(peers) if self._knows_rates and few else None

    def _known_of(self, peers: Sequence[m.PeerId]) -> tuple[dict[m.PeerId, float], Network | None]:
        """Seconds of their first batch, and their links if a rate is known."""
        workers = [self._run.workers[peer] for peer in peers]
        figures = {w.peer: w.figures[FIRST_FIGURE] for w in workers if FIRST_FIGURE in w.figures}
        told = {peer: seconds for peer, seconds in figures.items() if 0 < seconds < math.inf}
        if not self._knows_rates or len(peers) < 2:
            return told, None
        self.links.rtt_s = latencies(workers)
        return told, self.links.network(peers)

    def _now_with(self, peers: Sequence[m.PeerId]) -> tuple[int, Network | None, list[float]]:
        """For `Exchanging.again`: computing by what members have told of it, at the shares they have."""
        shares = {member.peer: member.share for member in self._run.roster}
        figures = {peer: self._run.workers[peer].figures for peer in peers if shares.get(peer)}
        known = ((shares[peer], figures[peer]) for peer in figures)
        seconds = [share * second_per_sample for share, told in known if (second_per_sample := pace_of(told))]
        return len(peers), self._known_of(peers)[1], seconds
