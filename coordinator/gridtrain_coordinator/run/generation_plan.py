"""Plans a generation's rank order, exchange and shares; decides when a faster plan is worth a new generation.

LinkLatencies, LinkRates --+                  +--search_ahead, plan--> rank order, shares, `plan_reason`
Heartbeat (metrics) -------+--> measurements -+
ConnectionLost ------------+                  +--request_if_faster--> `ViewChange.request`

    members train --search_ahead: whole search--> Freeze, reports --plan: as found--> MembershipView
    a member is lost, or the links have changed --------------------plan: few orders--> MembershipView

In a group of more than `WHOLE_SEARCH_MEMBERS` members, each call to `search_ahead` or `request_if_faster`
performs one piece of a search, so that the coordinator can handle messages in between.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gridtrain.core import messages as m
from gridtrain.core.group.rank_layout import RankLayout
from gridtrain.core.planning import rank_order
from gridtrain.core.planning.batch_shares import BatchShares, WorkerSpeeds, seconds_per_sample
from gridtrain.core.planning.entry_shares import EntryShares, choose_entry_shares, share_change_reason
from gridtrain.core.planning.exchange_choice import FIRST_STEP_FIGURE, ExchangeChoice
from gridtrain.core.planning.network_model import NetworkModel
from gridtrain.core.planning.rank_order_search import Pieces, advance, finish, simulated_exchange_s
from gridtrain.core.planning.topology_choice import is_direct_size
from gridtrain.core.planning.workload import CpuCosts
from gridtrain.core.stages.rank_placement import PairCost, RankPlacement, pair_cost, stage_shares
from gridtrain.quantities import format_count
from gridtrain_coordinator.run.addressing import AddressBook
from gridtrain_coordinator.run.events import RunPhase
from gridtrain_coordinator.run.link_failures import LinkFailures
from gridtrain_coordinator.run.registry import (
    AVOIDED_PAIR_RTT_S,
    assign_shares,
    batch_limits,
    round_trip_times,
)
from gridtrain_coordinator.run.reorder_limits import ReorderLimits
from gridtrain_coordinator.run.run_state import RunState

T = TypeVar("T")
WHOLE_SEARCH_MEMBERS = 32
MAX_ROUTED_MEMBERS = 32
"""The largest group whose relays are considered; looking up the routes of its pairs takes a millisecond."""


@dataclass(frozen=True, slots=True)
class PlanBasis:
    """The inputs of a search: an order found for the same inputs is still the best one.

    Attributes:
        peers: the members, longest-serving first.
        links: the round trips, rates and relays between `peers`.
        is_direct: whether all `peers` may exchange directly: they are few enough, any two of them can connect
            without a relay, and no broken link is avoided.
        setup: the run's definition.
        exchange: the exchange that the coordinator has chosen.
        current: the members of the current generation.
    """

    peers: tuple[m.PeerId, ...]
    links: rank_order.LinkMeasurements
    is_direct: bool
    setup: m.Setup | None
    exchange: str
    current: tuple[m.Member, ...]


class GenerationPlanner:
    """Chooses the rank order, exchange, topology and shares.

    Args:
        by_links: whether ranks are ordered by the measured links; otherwise they are in joining order.

    Attributes:
        plan_reason: the reason for the latest plan, as the status shows it.
        entry_shares: the latest plan's shares of the members that select fewer gradient entries than others.
        measured_links, link_failures, worker_speeds: the measurements on which the plans are based.
        reorder_limits: decides which reports about links count.
    """

    def __init__(self, run: RunState, addresses: AddressBook, *, by_links: bool) -> None:
        self._run, self._addresses, self._by_links = run, addresses, by_links
        self.plan_reason = ""
        self.entry_shares = EntryShares()
        self.measured_links = rank_order.LinkMeasurements()
        self.link_failures = LinkFailures()
        self.exchange_choice = ExchangeChoice(rate_timeout_s=run.limits.probe_s)
        self.worker_speeds = WorkerSpeeds()
        self.reorder_limits = ReorderLimits(run.limits.reshare_s)
        self._exchange_checked_s = -math.inf  # when another exchange was last considered
        self._is_search_due = False  # the latest plan was made without a full search
        self._found: tuple[PlanBasis, rank_order.RankOrder] | None = None
        self._unfinished: tuple[PlanBasis, Pieces[rank_order.RankOrder]] | None = None
        self._comparison: tuple[frozenset[m.PeerId], Sequence[m.PeerId], Pieces[str]] | None = None
        self._shares_checked_s = -math.inf

    # -- measurements ------------------------------------------------------------------------------

    def record_rates(self, peer: m.PeerId, rates: m.LinkRates) -> None:
        """Record those rates of a worker's links that count (`ReorderLimits.accept`).

        A rate from another worker replaces what that worker reported before the latest measurement: if it
        only sent a burst on request (`bandwidth_probe`), its old report would hide that its line is faster.
        """
        known = [rate for rate in rates.rates_Bps if rate[0] in self._run.workers]
        accepted = self.reorder_limits.accept(peer, known)
        if self.measured_links.record(peer, accepted):
            self.reorder_limits.mark_changed(peer)
        for other, _, back_Bps in accepted:
            pair, sent_Bps = (other, peer), self.measured_links.sent_Bps
            if back_Bps and pair in sent_Bps and self.reorder_limits.is_outdated(*pair):
                del sent_Bps[pair]
                self.reorder_limits.mark_changed(peer)

    def predicted_exchange_s(self) -> float | None:
        """Predict the duration of the current generation's exchange from the measured links, in seconds.

        Returns None if ranks are not ordered by links, or if the workload or all rates are unknown.
        """
        load, members = self.exchange_choice.workload, self._run.member_order
        network = self.measured_links.build_network(members) if self.measured_links.has_rates else None
        if not self._by_links or load is None or network is None:
            return None
        network = rank_order.with_entry_shares(network, members, self._current_entry_shares)
        return simulated_exchange_s(load, network, CpuCosts(), range(len(members)))

    def forget(self, peer: m.PeerId) -> None:
        self.link_failures.forget(peer)
        self.worker_speeds.forget(peer)
        self.measured_links.forget(peer)
        self.reorder_limits.forget(peer)

    def link_cost(self, peers: Sequence[m.PeerId], now_s: float) -> PairCost | None:
        """Return the cost of the links between these workers.

        Returns None if ranks are not ordered by links, if there are fewer than three workers, or if the links
        have not been measured.
        """
        if not self._by_links or len(peers) < 3:
            return None
        self._refresh_links(peers, self.link_failures.avoided_pairs(now_s))
        network = self.measured_links.build_network(peers)
        at = {peer: place for place, peer in enumerate(peers)}
        return None if network is None else pair_cost(network, at)

    # -- the next generation -----------------------------------------------------------------------

    def search_ahead(self, now_s: float) -> bool:
        """Search for the next generation's plan before the members are frozen, unless the change cannot wait.

        `plan` uses the result if its basis is still the same and the member with rank 0 holds the state.

        Returns False if another call must continue the search before the members are frozen.
        """
        run, self._found = self._run, None
        peers, unfinished, self._unfinished = run.eligible_workers(), self._unfinished, None
        is_complete = bool(run.members) and run.members <= set(peers) and not run.departed_members
        if not run.view_change.can_wait or not is_complete:
            return True
        is_continued = unfinished is not None and (
            (unfinished[0].peers, unfinished[0].current) == (tuple(peers), run.member_list)
        )
        if unfinished is None or not is_continued:
            self._choose_exchange(peers, now_s, is_urgent=False)
            avoided = self._begin_avoiding(peers, now_s)
            if run.partition.is_pipeline:
                return True
            firsts = [peer for peer in peers if peer in run.members]
            basis = self._basis(peers, avoided)
            unfinished = basis, self._search(basis, firsts, is_urgent=False)
        basis, pieces = unfinished
        if (ranks := _continue(pieces, len(peers))) is None:
            self._unfinished = unfinished
            return False
        if is_continued:  # reports that arrived in the meantime do not invalidate the result
            self._begin_avoiding(peers, now_s)
            basis = replace(basis, links=self.measured_links.between(frozenset(peers)))
        self._found = basis, ranks
        return True

    @property
    def is_searching_ahead(self) -> bool:
        """Whether `search_ahead` has to be called again."""
        return self._unfinished is not None

    def plan(
        self,
        peers: Sequence[m.PeerId],
        holders: Collection[m.PeerId],
        now_s: float,
        placement: RankPlacement | None = None,
    ) -> tuple[tuple[m.PeerId, ...], tuple[int, ...]]:
        """Plan the next generation; return its members in rank order, and their shares.

        Members wait for the plan, so the one that `search_ahead` has found is used.  If none was found for
        this basis, only a few rank orders are tried, and the exchange and the shares of entries are kept
        until they are reconsidered in the next plan, or after `reshare_s` (`request_if_faster`).

        Args:
            peers: the members, longest-serving first.
            holders: the members that hold the state; the first of them has rank 0.
            placement: the ranks of a pipeline; None for an unpartitioned model.
        """
        self.reorder_limits.clear_changes()
        self._comparison = None
        is_urgent = bool(self._run.members)
        self._choose_exchange(peers, now_s, is_urgent=is_urgent)
        avoided = self._begin_avoiding(peers, now_s)
        ranks: rank_order.RankOrder | RankPlacement
        if placement is None:
            ranks = self._found_or_searched(self._basis(peers, avoided), holders, is_urgent=is_urgent)
        else:
            self.entry_shares, ranks = EntryShares(), placement
        self._found = None
        shares = self._assign_shares(ranks.order, is_pipeline=placement is not None)
        broken = (
            f"a round trip of {AVOIDED_PAIR_RTT_S:g} s is assumed for {format_count(len(avoided), 'pair')} "
            "with broken links"
        )
        topology = self.exchange_choice.topology.reason
        reasons = [ranks.reason, broken if avoided else "", topology, self.entry_shares.reason, shares.reason]
        self.plan_reason = "; ".join(reason for reason in reasons if reason)
        return ranks.order, shares.counts

    def _begin_avoiding(self, peers: Sequence[m.PeerId], now_s: float) -> frozenset[rank_order.PeerPair]:
        """Refresh the links between `peers`, and return the pairs with broken links.

        Called after `_choose_exchange`, which resets the round trips of these pairs to the measured ones.
        """
        avoided = self.link_failures.begin_avoiding(now_s)
        self._refresh_links(peers, avoided)
        return avoided

    def _refresh_links(self, peers: Sequence[m.PeerId], avoided: Collection[rank_order.PeerPair]) -> None:
        """Adopt the latest round trips and routes between `peers`; `avoided` pairs get a long round trip."""
        self.measured_links.rtt_s = round_trip_times([self._run.workers[peer] for peer in peers], avoided)
        is_routed = len(peers) <= MAX_ROUTED_MEMBERS
        routes = self._addresses.relayed_pairs(peers, MAX_ROUTED_MEMBERS) if is_routed else ()
        pairs = [(peers[a], peers[b]) for a, b, _ in routes]
        self.measured_links.relayed = frozenset([*pairs, *((b, a) for a, b in pairs)])

    def _basis(self, peers: Sequence[m.PeerId], avoided: Collection[rank_order.PeerPair]) -> PlanBasis:
        run, choice = self._run, self.exchange_choice
        return PlanBasis(
            tuple(peers), self.measured_links.between(frozenset(peers)),
            not avoided and self._may_be_direct(peers), run.definition, choice.chosen_text,
            run.member_list,
        )  # fmt: skip

    def _may_be_direct(self, peers: Sequence[m.PeerId]) -> bool:
        return is_direct_size(len(peers)) and self._addresses.all_direct(peers)

    def _found_or_searched(
        self, basis: PlanBasis, holders: Collection[m.PeerId], *, is_urgent: bool
    ) -> rank_order.RankOrder:
        self._is_search_due = False
        if self._found is not None:
            found_for, ranks = self._found
            if found_for == basis and ranks.order[0] in holders:
                return ranks
        self._is_search_due = is_urgent
        firsts = [peer for peer in basis.peers if peer in holders]
        return finish(self._search(basis, firsts, is_urgent=is_urgent))

    def _search(
        self, basis: PlanBasis, firsts: Sequence[m.PeerId], *, is_urgent: bool
    ) -> Pieces[rank_order.RankOrder]:
        """Choose topology, shares of entries and rank order for an unpartitioned model.

        Args:
            firsts: the members that may have rank 0.
        """
        peers = basis.peers
        self.exchange_choice.choose_topology(
            len(peers), self._rated(peers), basis.is_direct, is_urgent=is_urgent
        )
        if is_urgent:
            self.entry_shares = self._same_entry_shares(peers)
        else:
            self.entry_shares = self._choose_entry_shares(peers, firsts)
        if not self._by_links:
            return rank_order.join_order(peers, firsts)
        ranks = yield from rank_order.search_rank_order(
            self.exchange_choice.workload, self.measured_links, peers, firsts, self._run.member_order,
            self.entry_shares.shares, is_urgent=is_urgent,
        )  # fmt: skip
        return ranks

    def _choose_entry_shares(self, peers: Sequence[m.PeerId], holders: Sequence[m.PeerId]) -> EntryShares:
        if not self._by_links:
            return EntryShares()
        load, current = self.exchange_choice.workload, self._current_entry_shares
        return choose_entry_shares(load, self.measured_links, peers, holders, current, self._names)

    def _same_entry_shares(self, peers: Sequence[m.PeerId]) -> EntryShares:
        """Return the current shares of entries, excluding members that have left."""
        shares = {peer: share for peer, share in self._current_entry_shares.items() if peer in peers}
        return EntryShares(shares, self.entry_shares.reason if shares else "")

    @property
    def _current_entry_shares(self) -> dict[m.PeerId, int]:
        shares = {member.peer: member.entries_share for member in self._run.member_list}
        return {peer: share for peer, share in shares.items() if share < m.WHOLE_SHARE}

    @property
    def _names(self) -> dict[m.PeerId, str]:
        return {worker.peer: worker.name for worker in self._run.workers.values()}

    def _assign_shares(self, order: Sequence[m.PeerId], *, is_pipeline: bool) -> BatchShares:
        workers, total = [self._run.workers[peer] for peer in order], self._global_batch_size
        if not is_pipeline:
            return assign_shares(workers, total, self.worker_speeds)
        layout = RankLayout.for_world_size(self._run.partition.stage_count, len(order))
        names = [worker.name for worker in workers]
        return stage_shares(names, batch_limits(workers), layout, total)

    @property
    def _global_batch_size(self) -> int | None:
        reference = self._run.definition
        return reference.global_batch_size if reference is not None else None

    def _choose_exchange(self, peers: Sequence[m.PeerId], now_s: float, *, is_urgent: bool) -> None:
        """Reconsider the exchange for the next generation, in which a change costs nothing extra."""
        if self.exchange_choice.is_open:
            if len(peers) == 1:  # a single worker needs no measurements
                self.exchange_choice.choose_first(peers, {}, None, now_s)
        elif self.exchange_choice.is_auto and self._run.members != set(peers) and not is_urgent:
            edges = self._may_be_direct(peers)
            self.exchange_choice.reconsider(*self._current_measurements(peers), edges=edges)

    # -- a faster plan -----------------------------------------------------------------------------

    def request_if_faster(self, now_s: float) -> None:
        """Request a generation if another exchange, rank order or set of shares is worthwhile.

        Called after each heartbeat.
        """
        self._check_exchange(now_s)
        self._check_shares(now_s)
        self._check_links(now_s)

    def _may_replan(self, now_s: float) -> bool:
        """Return whether a generation may be requested solely because it would be faster."""
        run, installed_s = self._run, self._run.view_change.last_installed_s
        is_due = now_s >= installed_s + run.limits.reshare_s
        return self._is_training_undisturbed and not run.partition.is_pipeline and is_due

    @property
    def _is_training_undisturbed(self) -> bool:
        """Whether the run is training, and no other generation is forming or requested."""
        run = self._run
        return run.view_change.is_idle and run.phase is RunPhase.TRAINING and not run.view_change.reason

    def _check_exchange(self, now_s: float) -> None:
        """Choose the first exchange, or a faster one, and request a generation that uses it."""
        run, choice = self._run, self.exchange_choice
        if not (choice.is_auto and self._is_training_undisturbed):
            return
        if len(run.present_members) < len(run.member_order):
            return
        reason = ""
        if choice.is_open:
            measurements = self._first_batch_measurements(run.member_order)
            edges = self._may_be_direct(run.member_order)
            reason = choice.choose_first(run.member_order, *measurements, now_s, edges=edges)
        elif self._may_replan(now_s) and now_s >= self._exchange_checked_s + run.limits.reshare_s:
            self._exchange_checked_s = now_s
            edges = self._may_be_direct(run.member_order)
            reason = choice.reconsider(*self._current_measurements(run.member_order), edges=edges)
        if reason:
            run.view_change.request(f"the exchange is chosen: {choice.chosen_text}", can_wait=True)

    def _check_shares(self, now_s: float) -> None:
        """Request a generation if different shares would make the steps noticeably faster."""
        run = self._run
        is_early = now_s < self._shares_checked_s + run.limits.beat_s
        if self._global_batch_size is None or not self._may_replan(now_s) or is_early:
            return
        self._shares_checked_s = now_s  # N workers send 2 N heartbeats a second, and each check covers all
        if len(run.present_members) == len(run.member_order):
            most = batch_limits([run.workers[peer] for peer in run.member_order])
            shares = [member.share for member in run.member_list]
            reason = self.worker_speeds.rebalance_reason(run.member_order, shares, most)
            run.view_change.request(reason, can_wait=True)

    def _check_links(self, now_s: float) -> None:
        """Request a generation if changed links make another rank order or topology noticeably faster."""
        if not self._by_links or not self._may_replan(now_s):
            self._comparison = None
            return
        run, links = self._run, self.measured_links
        reporters = self.reorder_limits.due_reporters(now_s)
        if self._comparison is None and not (reporters or self._is_search_due):
            return
        load, shares = self.exchange_choice.workload, self._current_entry_shares
        if self._comparison is None:
            known = [peer for peer in run.member_order if peer in run.workers]
            self._refresh_links(known, self.link_failures.avoided_pairs(now_s))
            present = run.workers.sort_by_seniority(run.present_members)
            order = run.member_order if len(present) == len(run.member_order) else ()
            compared = rank_order.compare_rank_orders(load, links, order, present, shares)
            self._comparison = reporters, present if order else (), compared
        reporters, members, pieces = self._comparison
        if (reason := _continue(pieces, len(members))) is None:
            return
        self._comparison, self._is_search_due = None, False
        if members:
            reason = reason or share_change_reason(load, links, members, shares, self._names)
            run.view_change.request(reason or self._topology_reason(members), can_wait=True)
        self.reorder_limits.record_evaluation(reporters, now_s, found=bool(run.view_change.reason))

    def _topology_reason(self, peers: Sequence[m.PeerId]) -> str:
        network = self._rated(peers)
        return self.exchange_choice.usual_topology_reason(len(peers), network) if network is not None else ""

    # -- links and compute times of a group ------------------------------------------------------------

    def _rated(self, peers: Sequence[m.PeerId]) -> NetworkModel | None:
        """Return the links between these workers.

        Returns None if there is no choice of topology, or if no rate has been measured.
        """
        is_examined = self.measured_links.has_rates and is_direct_size(len(peers))
        return self.measured_links.build_network(peers) if is_examined else None

    def _first_batch_measurements(
        self, peers: Sequence[m.PeerId]
    ) -> tuple[dict[m.PeerId, float], NetworkModel | None]:
        """Return the duration of each worker's first batch, in seconds, and the links between the workers.

        The links are None if no rate is known, or if there is only one worker.
        """
        workers = [self._run.workers[peer] for peer in peers]
        figures = {w.peer: w.figures[FIRST_STEP_FIGURE] for w in workers if FIRST_STEP_FIGURE in w.figures}
        valid = {peer: seconds for peer, seconds in figures.items() if 0 < seconds < math.inf}
        if not self.measured_links.has_rates or len(peers) < 2:
            return valid, None
        self.measured_links.rtt_s = round_trip_times(workers)
        return valid, self.measured_links.build_network(peers)

    def _current_measurements(
        self, peers: Sequence[m.PeerId]
    ) -> tuple[int, NetworkModel | None, list[float]]:
        """Return the arguments for `ExchangeChoice.reconsider`.

        These are the number of workers, the links between them, and the times in seconds that the members
        take to compute their current shares.
        """
        shares = {member.peer: member.share for member in self._run.member_list}
        members = [peer for peer in peers if shares.get(peer)]
        times_s = [shares[peer] * seconds_per_sample(self._run.workers[peer].figures) for peer in members]
        return len(peers), self._first_batch_measurements(peers)[1], [time_s for time_s in times_s if time_s]


def _continue(pieces: Pieces[T], members: int) -> T | None:
    """Compute the next piece of a search, or all pieces for a small group; return None if pieces remain."""
    return advance(pieces) if members > WHOLE_SEARCH_MEMBERS else finish(pieces)
