"""The coordinator's choice, during a run, of what a script leaves open: `exchange="auto"`, or the topology.

The coordinator chooses for all members, from measured links, measured compute times and the model's size.
The choice is part of the MembershipView and is journalled with it.

    first view, no exchange chosen     members compute a batch, and wait before the exchange
        |  all have computed, and links have been measured (`choose_first`)
        v
    second view, with the choice       members exchange the same gradient
        |  links, speeds or members have changed (`reconsider`)
        v
    later view, with another choice    only if this is worth a new generation

A worker's first batch takes longest because kernels are compiled.  Compared with that compute time, a dense
exchange costs little, so the first choice may be a dense exchange, and a later choice a sparse exchange.  The
exchange may change at any generation without loss: `Dense()` leaves no residual, all sparse exchanges
use the same residual, and a dense step adds the residual to its contribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from gridtrain.config import Auto, Deadlines, Exchange
from gridtrain.core.messages import PeerId, Setup
from gridtrain.core.planning.exchange_facts import (
    DIRECT_DENSE,
    DIRECT_GTOPK,
    LocalStepsFacts,
    as_direct,
    direct_marker,
    exchange_of,
    local_steps_of,
    name_direct,
    parameter_count,
    replace_exchange,
)
from gridtrain.core.planning.exchange_recommendation import (
    DENSE_PREFERENCE_MARGIN,
    ExchangeEstimate,
    estimate_exchange,
    fastest_estimate,
    format_exchange,
    recommend_exchange,
)
from gridtrain.core.planning.local_steps_proposal import advise_local_steps
from gridtrain.core.planning.network_model import NetworkModel, uniform_network
from gridtrain.core.planning.rank_order import MIN_EXCHANGE_SPEEDUP, DEFAULT_LINK_Bps
from gridtrain.core.planning.rank_order_search import SIMULATED_MESSAGES, best_order
from gridtrain.core.planning.topology_choice import (
    USUAL_TOPOLOGY,
    Topology,
    choose_topology,
    may_be_direct,
)
from gridtrain.core.planning.workload import CpuCosts, ExchangeKind, Workload
from gridtrain.quantities import format_count, format_seconds

FIRST_STEP_FIGURE = "first_computed_s"
"""Name of a heartbeat metric: the compute time, in seconds, of the batch whose gradient waits for the
first choice."""

MAX_MEDIAN_RATIO = 4.0
"""Upper bound on the slowest member's compute time, as a multiple of the median, because workers report their
own compute times."""

MAX_ORDERED_MEMBERS = 32
"""The largest group in which each exchange is estimated with its best order of ranks.  In larger groups,
exchanges are compared with ranks in join order, because several searches would block the
coordinator."""

DEFAULT_ALPHA_S = 1e-3
DENSE_RETURN_RATIO = 1.05
"""The choice returns to a dense exchange, which leaves no gradients out, if a dense step takes at most this
many times as long as a step with the current exchange."""


@dataclass(slots=True)
class ExchangeChoice:
    """The choice of an exchange in one run.

    Attributes:
        chosen: the exchange chosen for `exchange="auto"`; None if no exchange has been chosen yet or the
            script specifies an exchange.
        topology: the current generation's topology for an exchange whose topology is open.
        reason: the reason for the choice, as text.
        rate_timeout_s: how long the first choice waits for a measured link, once all members have reported
            or `report_timeout_s` has passed.
        report_timeout_s: how long after the first report the choice waits for members that have not reported
            their first batch.  No round is open yet, so no deadline applies; without this limit, a member
            that hangs would block all members.
    """

    chosen: Exchange | None = None
    reason: str = ""
    topology: Topology = USUAL_TOPOLOGY
    rate_timeout_s: float = 2.0
    report_timeout_s: float = Deadlines().first_step_s
    _setup: Setup | None = None
    _named: Exchange | Auto | None = None  # by the script; parsed once, because every heartbeat needs it
    _local: LocalStepsFacts | None = None
    _parameters: int = 0  # 0: unknown
    _alternative_text: str = ""  # names an exchange that is faster, but not fast enough for a change
    _first_report_s: float | None = None  # when the first member reported its compute time
    _all_reported_s: float | None = None  # when all members had reported, or the wait for reports ended
    _is_chosen_alone: bool = False  # chosen when the run had only one worker

    def configure(self, setup: Setup | None, chosen: str = "", alone: bool = False) -> None:
        """Start with the run's setup and the exchange recorded in its journal, if any.

        Args:
            chosen: the exchange recorded in the journal; empty if there is none.
            alone: whether that exchange was chosen when the run had only one worker.
        """
        facts = dict(setup.facts) if setup is not None else {}
        self._setup, self._named, self._local = setup, exchange_of(facts), local_steps_of(facts)
        self._parameters = parameter_count(facts)
        self.chosen, is_direct = None, chosen in (DIRECT_DENSE, DIRECT_GTOPK)
        for each in self._candidates():
            direct = as_direct(each)
            if direct is not None and direct.describe() == chosen:
                self.chosen, is_direct = each, True
            elif each.describe() == chosen:
                self.chosen = each
        self.topology = Topology(True, "direct, as in the journal") if is_direct else USUAL_TOPOLOGY
        self.reason = f"{self.chosen_text}, as in the journal" if self.chosen else ""
        self._is_chosen_alone = alone and self.chosen is not None
        self._first_report_s = self._all_reported_s = None
        self._alternative_text = ""

    # -- current choice ----------------------------------------------------------------------------

    @property
    def is_auto(self) -> bool:
        return isinstance(self._named, Auto)

    @property
    def is_open(self) -> bool:
        """Whether the coordinator has to choose an exchange and has not chosen one yet."""
        return self.is_auto and self.chosen is None

    @property
    def unknown_text(self) -> str:
        """The text of the script's exchange if this exchange is unknown, in which case no round can be
        planned; otherwise empty."""
        facts = dict(self._setup.facts) if self._setup is not None else {}
        return facts.get("exchange", "") if self._named is None else ""

    @property
    def chosen_text(self) -> str:
        """The choice as shown and journalled; empty if nothing has been chosen."""
        return self.chosen.describe() if self.chosen is not None else ""

    @property
    def view_exchange(self) -> str:
        """The value of `MembershipView.exchange` for the current exchange and topology."""
        if not self.topology.is_direct:
            return self.chosen_text
        if (direct := as_direct(self.chosen)) is not None:
            return direct.describe()
        return direct_marker(self._named)

    @property
    def description(self) -> str:
        """The choice and its reason, as text; empty if the run's script specifies an exchange."""
        if not self.is_auto:
            return ""
        if self.chosen is None:
            return "not chosen yet"
        shown = self.reason
        if self.topology.is_direct:
            shown = name_direct(shown)
        return f"{shown}; {self._alternative_text}" if self._alternative_text else shown

    @property
    def effective_setup(self) -> Setup | None:
        """The setup with the exchange in use, as the status shows it."""
        is_direct = self.topology.is_direct
        if self._setup is None or not (self.chosen or is_direct):
            return self._setup
        chosen = self.view_exchange if self.chosen else ""
        return replace(self._setup, facts=replace_exchange(self._setup, chosen, direct=is_direct))

    @property
    def workload(self) -> Workload | None:
        """The workload of a round; None if it is unknown or no exchange has been chosen yet."""
        exchange = self.chosen or self._named
        if exchange is None or isinstance(exchange, Auto) or self._parameters < 1:
            return None
        if self.topology.is_direct:
            exchange = as_direct(exchange) or exchange
        return Workload.of(exchange, self._parameters)

    @property
    def is_sparse(self) -> bool:
        """Whether the exchange is known to be sparse; updates are then small, so newcomers can catch up."""
        load = self.workload
        return load is not None and load.kind.is_sparse

    @property
    def is_star(self) -> bool:
        """Whether all data of a round pass through rank 0."""
        load = self.workload
        return load is not None and load.kind.topology == "star"

    def _candidates(self) -> tuple[Exchange, ...]:
        """Return the exchanges that may be chosen; empty if the script specifies an exchange."""
        if not isinstance(self._named, Auto):
            return ()
        return self._named.exchanges(max(1, self._parameters), local_steps=self._local is not None)

    # -- topology of the exchange ------------------------------------------------------------------

    def choose_topology(
        self,
        size: int,
        network: NetworkModel | None,
        edges: bool,
        *,
        is_urgent: bool = False,
    ) -> None:
        """Choose the topology for a generation of `size` members.

        The usual topology is chosen if the script specifies a topology or divides the model into stages.

        Args:
            network, edges: see `topology_choice.choose_topology`.
            is_urgent: see `best_order`.
        """
        self.topology = USUAL_TOPOLOGY
        is_whole_model = self._setup is not None and self._setup.stages == 1
        if is_whole_model and as_direct(self.chosen or self._named) is not None:
            self.topology = choose_topology(self.workload, size, network, edges, is_urgent=is_urgent)

    def usual_topology_reason(self, size: int, network: NetworkModel) -> str:
        """Return the reason to change from a direct exchange to a ring or butterfly; "" if there is none."""
        if not self.topology.is_direct:
            return ""
        found = choose_topology(self.workload, size, network, True)
        is_worth_it = not found.is_direct and found.usual_speedup >= MIN_EXCHANGE_SPEEDUP
        return f"links have changed: {found.reason}" if is_worth_it else ""

    # -- choice of exchange ------------------------------------------------------------------------

    def choose_first(
        self,
        peers: Sequence[PeerId],
        reported_s: Mapping[PeerId, float],
        network: NetworkModel | None,
        now_s: float,
        *,
        edges: bool = False,
    ) -> str:
        """Make the first choice and return the reason for it.

        Returns "" if there is nothing to choose, or while reports or rates are awaited.

        Args:
            reported_s: `FIRST_STEP_FIGURE` of each member that has reported it, in seconds.
            network: the network of `peers`, in any order; None if no link has been measured yet.
            edges: see `topology_choice.choose_topology`.
        """
        if not self.is_open or not peers:
            return ""
        if len(peers) > 1 and self._is_waiting(peers, reported_s, network, now_s):
            return ""
        compute_s = _slowest_compute_s([reported_s[peer] for peer in peers if peer in reported_s])
        return self._choose(len(peers), network, compute_s, edges)

    def _is_waiting(
        self,
        peers: Sequence[PeerId],
        reported_s: Mapping[PeerId, float],
        network: NetworkModel | None,
        now_s: float,
    ) -> bool:
        """Start the time limits for missing reports and rates; return whether to keep waiting."""
        missing = [peer for peer in peers if peer not in reported_s]
        if len(missing) == len(peers):
            return True
        self._first_report_s = now_s if self._first_report_s is None else self._first_report_s
        if missing and now_s < self._first_report_s + self.report_timeout_s:
            return True
        self._all_reported_s = now_s if self._all_reported_s is None else self._all_reported_s
        return network is None and now_s < self._all_reported_s + self.rate_timeout_s

    def reconsider(
        self, size: int, network: NetworkModel | None, compute_s: Sequence[float], *, edges: bool = False
    ) -> str:
        """Change the choice if it is worthwhile; return the reason, or "" if the choice does not change.

        The desired share is the share of the time that workers should spend computing (`Auto.computing`).

        - A sparse exchange is replaced by a dense one if steps then take at most `DENSE_RETURN_RATIO` times
          as long.
        - Otherwise, if workers compute for at least the desired share, a denser exchange is chosen if workers
          then wait for at most half of the time that the desired share permits.
        - If they compute for a smaller share, another exchange is chosen if steps can become at least
          `MIN_EXCHANGE_SPEEDUP` times as fast.
        - A choice that was made when the run had only one worker is replaced once it has several; without
          measurements, it becomes open again.

        Args:
            compute_s: each member's compute time per step, in seconds; empty if unknown.
            edges: see `topology_choice.choose_topology`.
        """
        if self.chosen is None or size < 2:
            return ""
        if network is None or not compute_s:
            if not self._is_chosen_alone:
                return ""
            self.chosen, self.reason, self._is_chosen_alone = None, "", False
            return "the run no longer has only one worker"
        slowest_s = _slowest_compute_s(compute_s)
        if self._is_chosen_alone:
            return self._choose(size, network, slowest_s, edges)
        candidates, estimates = self._candidates(), self._estimates(size, network, slowest_s, edges)
        if self.chosen not in candidates or not estimates:
            return ""
        current, best = estimates[candidates.index(self.chosen)], self._best_of(estimates)
        dense = min((x for x in estimates if not x.load.kind.has_density), key=lambda x: x.step_s)
        self._alternative_text = ""
        is_lossy = current.load.kind.has_density
        if is_lossy and dense.step_s <= DENSE_RETURN_RATIO * current.step_s:
            return self._adopt(estimates, dense)
        if current.efficiency >= self._computing:
            permitted = (1.0 + self._computing) / 2  # leaves half of the permitted waiting time unused
            denser = [x for x in estimates if _density(x) > _density(current) and x.efficiency >= permitted]
            if denser:
                return self._adopt(estimates, self._best_of(denser))
        elif current.step_s >= MIN_EXCHANGE_SPEEDUP * fastest_estimate(estimates).step_s:
            return self._adopt(estimates, best)
        best = fastest_estimate(estimates)
        if best is current:
            return ""
        gain = current.step_s / best.step_s
        if gain > 1 + DENSE_PREFERENCE_MARGIN / 2:
            self._alternative_text = (
                f"{format_exchange(best)} would now make steps {gain - 1:.0%} faster; the exchange changes "
                f"if steps become at least {MIN_EXCHANGE_SPEEDUP - 1:.0%} faster"
            )
        return ""

    def _choose(self, size: int, network: NetworkModel | None, compute_s: float, edges: bool) -> str:
        self._is_chosen_alone, self._first_report_s, self._all_reported_s = size == 1, None, None
        estimates = self._estimates(size, network, compute_s, edges) if size > 1 else []
        if not estimates:
            self.chosen = self._candidates()[0]
            why = "the run has only one worker" if size == 1 else "the model's size is not known"
            self.reason = f"{self.chosen_text}: {why}"
            return self.reason
        return self._adopt(estimates, self._best_of(estimates), measured=network is not None)

    @property
    def _computing(self) -> float:
        assert isinstance(self._named, Auto)
        return self._named.computing

    def _best_of(self, estimates: Sequence[ExchangeEstimate]) -> ExchangeEstimate:
        """Return the densest exchange that lets workers spend the desired share of their time computing.

        A dense exchange that takes only slightly longer than the fastest is preferred to sparse exchanges.
        If no exchange reaches the desired share, the fastest is returned.
        """
        recommended = recommend_exchange(estimates).best
        reaching = [each for each in estimates if each.efficiency >= self._computing]
        if not recommended.load.kind.has_density or not reaching:
            return recommended
        density = max(map(_density, reaching))
        return fastest_estimate([each for each in reaching if _density(each) == density])

    def _adopt(
        self, estimates: Sequence[ExchangeEstimate], best: ExchangeEstimate, *, measured: bool = True
    ) -> str:
        self.chosen = self._candidates()[estimates.index(best)]
        self._alternative_text = ""
        self.reason = _choice_reason(self.chosen_text, estimates, best, self._computing)
        if not measured:
            self.reason += f"; no link has been measured; {DEFAULT_LINK_Bps * 8 / 1e6:.0f} Mbit/s are assumed"
        assert isinstance(self._named, Auto)
        self.reason += advise_local_steps(best, self._named, self._local)
        return self.reason

    def _estimates(
        self, size: int, network: NetworkModel | None, compute_s: float, edges: bool
    ) -> list[ExchangeEstimate]:
        """Estimate each candidate on this network; return [] if the model's size is unknown.

        In groups of at most `MAX_ORDERED_MEMBERS` members, each candidate is estimated with its best order of
        ranks.  If the topology of a candidate is open, the faster topology is used.
        """
        count, cpu = self._parameters, CpuCosts()
        assumed = network if network is not None else uniform_network(size, DEFAULT_ALPHA_S, DEFAULT_LINK_Bps)
        overlapped = self._local.overlapped / self._local.every if self._local is not None else 0.0
        estimates: list[ExchangeEstimate] = []
        orders: dict[ExchangeKind, Sequence[int]] = {}  # searched once for all densities of a kind
        for exchange in self._candidates() if count else ():
            load = Workload.of(exchange, count)
            if network is not None and 2 < size <= MAX_ORDERED_MEMBERS and load.kind not in orders:
                orders[load.kind] = best_order(load, network, cpu, range(size)).order
            order = orders.get(load.kind)
            found = estimate_exchange(
                load, assumed, cpu, compute_s, order=order, max_messages=SIMULATED_MESSAGES
            )
            if (direct := as_direct(exchange)) is not None and may_be_direct(load, size, network, edges):
                other = estimate_exchange(
                    Workload.of(direct, count), assumed, cpu, compute_s, max_messages=SIMULATED_MESSAGES
                )
                found = fastest_estimate([found, other])
            estimates.append(replace(found, overlapped=overlapped))
        return estimates


def _density(each: ExchangeEstimate) -> float:
    """Return the density of an exchange; 1.0 if it sends every element."""
    return each.load.density if each.load.kind.has_density else 1.0


def _slowest_compute_s(seconds: Sequence[float]) -> float:
    """Return the slowest member's compute time, limited to `MAX_MEDIAN_RATIO` times the median."""
    usual = median(seconds) if seconds else 0.0
    return min(max(max(seconds, default=0.0), 1e-6), MAX_MEDIAN_RATIO * max(usual, 1e-6), 1e6)


def _choice_reason(
    chosen: str, estimates: Sequence[ExchangeEstimate], best: ExchangeEstimate, computing: float
) -> str:
    text = (
        f"{chosen}: a step takes {format_seconds(best.step_s)} with "
        f"{format_count(best.world_size, 'worker')}, {format_seconds(best.compute_s)} of it computing"
    )
    others = sorted((each for each in estimates if each is not best), key=lambda each: each.step_s)
    if not others:
        return text
    text += "; " + ", ".join(f"{format_exchange(other)} {format_seconds(other.step_s)}" for other in others)
    slower = best.step_s / others[0].step_s
    if not best.load.kind.has_density and 1.0 < slower <= 1.0 + DENSE_PREFERENCE_MARGIN:
        text += "; a sparser exchange would gain too little to justify omitting gradients"
    elif slower > 1.0 and best.efficiency >= computing:
        text += f"; it is the densest exchange that leaves {computing:.0%} of the time for computing"
    return text
