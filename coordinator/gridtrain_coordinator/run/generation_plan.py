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

from gridtrain.core import messages as m
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.planning import rank_order
from gridtrain.core.planning.batch_shares import BatchShares, WorkerSpeeds
from gridtrain.core.planning.exchange_choice import FIRST_STEP_FIGURE, ExchangeChoice, seconds_per_sample
from gridtrain.core.planning.exchange_comparison import MAX_DIRECT_MEMBERS
from gridtrain.core.planning.network_model import NetworkModel
from gridtrain.core.stages.rank_placement import PairCost, RankPlacement, pair_cost, stage_shares
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.events import RunPhase
from gridtrain_coordinator.run.link_failures import LinkFailures
from gridtrain_coordinator.run.link_reports import LinkReports
from gridtrain_coordinator.run.registry import (
    AVOIDED_PAIR_RTT_S,
    assign_shares,
    batch_limits,
    round_trip_times,
)
from gridtrain_coordinator.run.run_state import RunState
from gridtrain_coordinator.run.view_change import ViewChange


class GenerationPlanner:
    """See the module's text.

    Attributes:
        reason: of the latest plan, in words.

    Args:
        by_links: False: ranks go by the order of joining, whatever the links are like.
    """

    def __init__(
        self, run: RunState, making: ViewChange, whereabouts: AddressBook, *, by_links: bool
    ) -> None:
        self._run, self._view_change, self._addresses = run, making, whereabouts
        self._by_links = by_links
        self.plan_reason = ""
        self.measured_links = rank_order.LinkMeasurements()
        self.link_failures = LinkFailures()
        self.exchange_choice = ExchangeChoice(rate_timeout_s=run.limits.probe_s)
        self._batch_shares = WorkerSpeeds()
        self._link_reports = LinkReports(run.limits.reshare_s)
        self._exchange_checked_s = -math.inf  # for another exchange
        self._shares_checked_s = -math.inf  # whether other shares are worth it

    # -- what is measured --------------------------------------------------------------------------

    def record_introduction(self, peer: m.PeerId) -> None:
        """It is told to measure its links."""
        self._link_reports.record_introduction(peer)

    def record_rates(self, peer: m.PeerId, rates: m.LinkRates) -> None:
        known = [told for told in rates.rates_Bps if told[0] in self._run.workers]
        if self.measured_links.record(peer, self._link_reports.accept(peer, known)):
            self._link_reports.mark_changed(peer)

    def record_compute_metrics(self, peer: m.PeerId, figures: Mapping[str, float]) -> None:
        """What a beat tells of a worker's computing."""
        self._batch_shares.observe(peer, figures)

    def forget(self, peer: m.PeerId) -> None:
        self.link_failures.forget(peer)
        self._batch_shares.forget(peer)
        self.measured_links.forget(peer)
        self._link_reports.forget(peer)

    def min_rate_Bps(self, givers: Collection[m.PeerId], takers: Collection[m.PeerId]) -> float | None:
        """Of the measured links from the ones to the others."""
        rates = [self.measured_links.rate_Bps(a, b) for a in givers for b in takers]
        return min((rate for rate in rates if rate is not None), default=None)

    def link_cost(self, peers: Sequence[m.PeerId], now_s: float) -> PairCost | None:
        """Of the links between these; None: too few to matter, or not to be minded."""
        if not self._by_links or len(peers) < 3:
            return None
        workers = [self._run.workers[peer] for peer in peers]
        self.measured_links.rtt_s = round_trip_times(workers, self.link_failures.avoided_pairs(now_s))
        network = self.measured_links.build_network(peers)
        at = {peer: place for place, peer in enumerate(peers)}
        return None if network is None else pair_cost(network, at)

    # -- the generation that is made ---------------------------------------------------------------

    def plan(
        self,
        peers: Sequence[m.PeerId],
        holders: Collection[m.PeerId],
        now_s: float,
        seated: RankPlacement | None = None,
    ) -> tuple[tuple[m.PeerId, ...], tuple[int, ...]]:
        """The order of ranks, and the shares in it.

        Args:
            peers: the members, the longest-serving first.
            holders: they hold the state; the first of them has rank 0.
            seated: of a model in stages, who sits where.
        """
        avoided = self.link_failures.begin_avoiding(now_s)
        self.measured_links.rtt_s = round_trip_times([self._run.workers[peer] for peer in peers], avoided)
        self._link_reports.clear_changes()
        self._choose_exchange(peers, now_s)
        network = self._rated(peers)
        self.exchange_choice.choose_dense_topology(
            len(peers), network, lambda: not avoided and self._addresses.all_direct(peers)
        )
        if seated is not None:
            order, self.plan_reason = seated.order, seated.reason
        else:
            found = self._choose_order(peers, [peer for peer in peers if peer in holders])
            order, self.plan_reason = found.order, found.reason
        if avoided:
            self.plan_reason += (
                f"; of {len(avoided)} pairs connections broke: each counts as {AVOIDED_PAIR_RTT_S:g} s"
            )
        if self.exchange_choice.dense_topology.reason:
            self.plan_reason += f"; {self.exchange_choice.dense_topology.reason}"
        dealt = self._assign_shares(order, in_stages=seated is not None)
        self.plan_reason += "; " + dealt.reason
        return order, dealt.counts

    def _choose_order(self, peers: Sequence[m.PeerId], firsts: Sequence[m.PeerId]) -> rank_order.RankOrder:
        if not self._by_links:
            return rank_order.join_order(peers, firsts)
        return rank_order.plan_rank_order(
            self.exchange_choice.workload, self.measured_links, peers, firsts, self._run.member_order
        )

    def _assign_shares(self, order: Sequence[m.PeerId], *, in_stages: bool) -> BatchShares:
        workers, total = [self._run.workers[peer] for peer in order], self._global_batch_size
        if in_stages:
            return stage_shares(
                batch_limits(workers), RankLayout.for_world_size(self._run.stage_count, len(order)), total
            )
        return assign_shares(workers, total, self._batch_shares)

    @property
    def _global_batch_size(self) -> int | None:
        reference = self._run.definition
        return reference.global_batch_size if reference is not None else None

    def _choose_exchange(self, peers: Sequence[m.PeerId], now_s: float) -> None:
        """A generation is made anyway; a worker that is alone needs no measurements."""
        if self.exchange_choice.is_open:
            if len(peers) == 1:
                self.exchange_choice.choose_first(peers, {}, None, now_s)
        elif self._run.members != set(peers):
            self.exchange_choice.reconsider(*self._current_measurements(peers))

    # -- a faster one ------------------------------------------------------------------------------

    def request_if_faster(self, now_s: float) -> None:
        """After a beat: want a generation where another exchange, order or other shares are worth it."""
        self._check_exchange(now_s)
        self._check_shares(now_s)
        self._check_links(now_s)

    def _may_replan(self, now_s: float) -> bool:
        """Whether a generation may be wanted only because another one would be faster."""
        making, run = self._view_change, self._run
        training = making.is_idle and run.phase is RunPhase.TRAINING and not run.is_pipeline
        return (
            training and not making.reason and now_s >= making.last_installed_s + self._run.limits.reshare_s
        )

    def _check_exchange(self, now_s: float) -> None:
        """The exchange that is chosen first, or one that is so much faster now."""
        making, roster = self._view_change, self._run.member_order
        training = making.is_idle and self._run.phase is RunPhase.TRAINING and not making.reason
        absent = any(peer not in self._run.workers for peer in roster)
        if not (self.exchange_choice.is_auto and training) or absent:
            return
        chosen = ""
        if self.exchange_choice.is_open:
            chosen = self.exchange_choice.choose_first(roster, *self._first_batch_measurements(roster), now_s)
        elif self._may_replan(now_s) and now_s >= self._exchange_checked_s + self._run.limits.reshare_s:
            self._exchange_checked_s = now_s
            chosen = self.exchange_choice.reconsider(*self._current_measurements(roster))
        if chosen:
            making.request(f"the exchange is chosen: {self.exchange_choice.chosen_text}")

    def _check_shares(self, now_s: float) -> None:
        """Other shares where that gains noticeably, and not too often."""
        early = now_s < self._shares_checked_s + self._run.limits.beat_s
        if self._global_batch_size is None or not self._may_replan(now_s) or early:
            return
        self._shares_checked_s = now_s  # N workers bring 2 N beats a second, and each look is at all of them
        run = self._run
        if all(peer in run.workers for peer in run.member_order):
            most = batch_limits([run.workers[peer] for peer in run.member_order])
            self._view_change.request(
                self._batch_shares.rebalance_reason(
                    run.member_order, [x.share for x in run.member_list], most
                )
            )

    def _check_links(self, now_s: float) -> None:
        """Another order where links have changed so much that it gains noticeably."""
        if not self._by_links or not self._may_replan(now_s):
            return
        if tellers := self._link_reports.due_reporters(now_s):
            run = self._run
            self.measured_links.rtt_s = round_trip_times(
                list(run.workers.values()), self.link_failures.avoided_pairs(now_s)
            )
            if len(present := run.sort_by_seniority(run.present_members)) == len(run.member_order):
                gain = rank_order.reorder_reason(
                    self.exchange_choice.workload, self.measured_links, run.member_order, present
                )
                self._view_change.request(gain or self._topology_gain(present))
            self._link_reports.record_evaluation(tellers, now_s, found=bool(self._view_change.reason))

    def _topology_gain(self, peers: Sequence[m.PeerId]) -> str:
        network = self._rated(peers)
        return self.exchange_choice.ring_reason(len(peers), network) if network is not None else ""

    # -- links and computing of a group ------------------------------------------------------------

    @property
    def _has_rates(self) -> bool:
        return bool(self.measured_links.sent_Bps or self.measured_links.received_Bps)

    def _rated(self, peers: Sequence[m.PeerId]) -> NetworkModel | None:
        """Links of a group in which a road is to be chosen; None: no rate is known."""
        few = 2 < len(peers) <= MAX_DIRECT_MEMBERS
        return self.measured_links.build_network(peers) if self._has_rates and few else None

    def _first_batch_measurements(
        self, peers: Sequence[m.PeerId]
    ) -> tuple[dict[m.PeerId, float], NetworkModel | None]:
        """Seconds of their first batch, and their links if a rate is known."""
        workers = [self._run.workers[peer] for peer in peers]
        figures = {w.peer: w.figures[FIRST_STEP_FIGURE] for w in workers if FIRST_STEP_FIGURE in w.figures}
        told = {peer: seconds for peer, seconds in figures.items() if 0 < seconds < math.inf}
        if not self._has_rates or len(peers) < 2:
            return told, None
        self.measured_links.rtt_s = round_trip_times(workers)
        return told, self.measured_links.build_network(peers)

    def _current_measurements(
        self, peers: Sequence[m.PeerId]
    ) -> tuple[int, NetworkModel | None, list[float]]:
        """For `Exchanging.again`: computing by what members have told of it, at the shares they have."""
        shares = {member.peer: member.share for member in self._run.member_list}
        figures = {peer: self._run.workers[peer].figures for peer in peers if shares.get(peer)}
        known = ((shares[peer], figures[peer]) for peer in figures)
        seconds = [
            share * second_per_sample
            for share, told in known
            if (second_per_sample := seconds_per_sample(told))
        ]
        return len(peers), self._first_batch_measurements(peers)[1], seconds
