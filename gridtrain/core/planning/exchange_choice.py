"""The exchange of a run whose script leaves it open (`exchange="auto"`), and the topology of a dense one.

The choice is made once for all members from measured links, measured computing and the model's size; it
travels in the MembershipView and is journalled with it.

    first generation: "" -----> all have computed a batch, links are known -----> a view with the choice
                                        |                                                |
                members compute, and wait before the exchange               they go on with the same gradient

    later: links, speeds or members change --> another choice, where steps get `MIN_SPEEDUP` times as fast

The first batch of a worker takes longest (kernels are compiled), so the first choice may be dense where later
ones are not: a dense step then costs little beside the computing.  A choice may change at any generation
without loss: a dense exchange keeps nothing back, sparse ones keep the same residual, and a dense step adds
it to what it sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from gridtrain.config import Auto, Deadlines, Dense, Exchange
from gridtrain.core.messages import PeerId, Setup
from gridtrain.core.planning.batch_shares import SAMPLES_FIGURE, SECONDS_FIGURE
from gridtrain.core.planning.exchange_comparison import (
    DENSE_PREFERENCE_MARGIN,
    LOSSLESS_KINDS,
    MAX_DIRECT_MEMBERS,
    RING_TOPOLOGY,
    DenseTopology,
    ExchangeEstimate,
    choose_dense_topology,
    estimate_exchange,
    fastest_estimate,
    format_exchange,
    format_seconds,
    recommend_exchange,
)
from gridtrain.core.planning.exchange_facts import (
    DIRECT_DENSE,
    OPEN_DENSE,
    exchange_of,
    parameter_count,
    replace_exchange,
)
from gridtrain.core.planning.local_steps_proposal import propose_local_steps
from gridtrain.core.planning.network_model import NetworkModel, uniform_network
from gridtrain.core.planning.rank_order import MIN_SPEEDUP, DEFAULT_LINK_Bps
from gridtrain.core.planning.rank_order_search import SIMULATED_MESSAGES, best_order
from gridtrain.core.planning.workload import CpuCosts, ExchangeKind, Workload

FIRST_STEP_FIGURE = "first_computed_s"
"""A figure of a heartbeat: seconds of the batch whose gradient waits for the first choice."""

MAX_MEDIAN_RATIO = 4.0
"""The slowest member's computing counts as at most so many times the median, as it is that worker's own
report."""

MAX_ORDERED_MEMBERS = 32
"""Members for which the best order of each exchange is searched; larger groups are compared in the order of
joining, as three searches would block the coordinator."""

DEFAULT_ALPHA_s = 1e-3
DENSE_RETURN_RATIO = 1.05
"""The choice returns to dense, which leaves nothing out, where its steps are at most so many times as
long."""

LOCAL_STEPS_COMPUTE_SHARE = 0.5
"""Where less than this share of a step is computing, local steps are mentioned."""

STAR_KINDS = (ExchangeKind.STAR, ExchangeKind.STAR_GTOPK)


def seconds_per_sample(figures: Mapping[str, float]) -> float:
    """Seconds for a sample since the worker joined, first batches left out; 0.0: unknown."""
    samples, seconds = figures.get(SAMPLES_FIGURE, 0.0), figures.get(SECONDS_FIGURE, 0.0)
    return seconds / samples if 0 < samples < math.inf and 0 < seconds < math.inf else 0.0


@dataclass(slots=True)
class ExchangeChoice:
    """The choice of one run.

    Attributes:
        chosen: by `exchange="auto"`; None: not chosen yet, or the script names an exchange.
        dense_topology: of a dense exchange whose topology is open, in the current generation.
        reason: of the choice, in words.
        rate_timeout_s: how long the first choice waits for a measured rate.
        report_timeout_s: how long it waits for members that have not reported their first batch, from the
            first
            report on: one that hangs must not hold up the others where no round with its deadlines is open.
    """

    chosen: Exchange | None = None
    reason: str = ""
    dense_topology: DenseTopology = RING_TOPOLOGY
    rate_timeout_s: float = 2.0
    report_timeout_s: float = Deadlines().first_step_s
    _setup: Setup | None = None
    _named: Exchange | Auto | None = None  # by the script; parsed once, as every heartbeat asks for it
    _alternative_text: str = ""  # another exchange that is faster, but not enough to change
    _first_report_s: float | None = None  # since when one member has computed
    _all_reported_s: float | None = None  # since when all have
    _is_chosen_alone: bool = False  # chosen by a worker that had nobody to exchange with

    def configure(self, setup: Setup | None, chosen: str = "", alone: bool = False) -> None:
        """The run is known.

        Args:
            chosen: the exchange that a journal names; empty: none.
            alone: a worker without others had chosen it.
        """
        is_direct = chosen == DIRECT_DENSE
        self.dense_topology = DenseTopology(True, "direct, as in the journal") if is_direct else RING_TOPOLOGY
        self._setup, self._named = setup, exchange_of(setup)
        text = OPEN_DENSE if is_direct else chosen
        self.chosen = next((each for each in self._candidates() if each.describe() == text), None)
        self.reason = f"{text}, as in the journal" if self.chosen else ""
        self._is_chosen_alone = alone and self.chosen is not None

    # -- what is known -----------------------------------------------------------------------------

    @property
    def is_auto(self) -> bool:
        return isinstance(self._named, Auto)

    @property
    def is_open(self) -> bool:
        """The coordinator has to choose, and has not yet."""
        return self.is_auto and self.chosen is None

    @property
    def chosen_text(self) -> str:
        """As it is shown and journalled; empty: nothing is chosen."""
        return self.chosen.describe() if self.chosen is not None else ""

    @property
    def view_exchange(self) -> str:
        """As `MembershipView.exchange`."""
        return DIRECT_DENSE if self.dense_topology.is_direct else self.chosen_text

    @property
    def description(self) -> str:
        """For people; empty: the run's script names an exchange."""
        if not self.is_auto:
            return ""
        if self.chosen is None:
            return "not chosen yet"
        shown = self.reason
        if self.dense_topology.is_direct:
            shown = shown.replace(OPEN_DENSE, DIRECT_DENSE, 1)
        return f"{shown}; {self._alternative_text}" if self._alternative_text else shown

    @property
    def effective_setup(self) -> Setup | None:
        """The set-up with the exchange that is in use, for the status."""
        is_direct = self.dense_topology.is_direct
        if self._setup is None or not (self.chosen or is_direct):
            return self._setup
        return replace(self._setup, facts=replace_exchange(self._setup, self.chosen_text, direct=is_direct))

    @property
    def workload(self) -> Workload | None:
        """What a round exchanges; None: unknown, or not chosen yet."""
        exchange, parameters = self.chosen or self._named, parameter_count(self._setup)
        if exchange is None or isinstance(exchange, Auto) or parameters < 1:
            return None
        if self.dense_topology.is_direct and exchange == Dense():
            exchange = Dense(topology="direct")
        return Workload.of(exchange, parameters)

    @property
    def is_sparse(self) -> bool:
        """Whether updates are small, so that newcomers may catch up with them."""
        load = self.workload
        return load is not None and load.kind.is_sparse

    @property
    def is_star(self) -> bool:
        """Whether everything passes rank 0."""
        load = self.workload
        return load is not None and load.kind in STAR_KINDS

    def _candidates(self) -> tuple[Exchange, ...]:
        """What may be chosen; empty: the script names an exchange."""
        named = self._named
        return named.exchanges(max(1, parameter_count(self._setup))) if isinstance(named, Auto) else ()

    # -- topology of a dense exchange --------------------------------------------------------------

    def choose_dense_topology(
        self, size: int, network: NetworkModel | None, edges: Callable[[], bool]
    ) -> None:
        """Choose it for a generation of that many members.

        Args:
            network, edges: see `exchange_comparison.choose_dense_topology`; `edges` is called where it
                matters.
        """
        self.dense_topology = RING_TOPOLOGY
        is_whole_model = self._setup is not None and self._setup.stages == 1
        if is_whole_model and (self.chosen or self._named) == Dense():
            has_edges = size <= MAX_DIRECT_MEMBERS and edges()
            self.dense_topology = choose_dense_topology(self.workload, size, network, has_edges)

    def ring_reason(self, size: int, network: NetworkModel) -> str:
        """Why members that exchange directly should use a ring now; empty: they should not."""
        if not self.dense_topology.is_direct:
            return ""
        found = choose_dense_topology(self.workload, size, network, True)
        is_worth_it = not found.is_direct and found.ring_speedup >= MIN_SPEEDUP
        return f"links have changed: {found.reason}" if is_worth_it else ""

    # -- which exchange ----------------------------------------------------------------------------

    def choose_first(
        self,
        peers: Sequence[PeerId],
        reported_s: Mapping[PeerId, float],
        network: NetworkModel | None,
        now_s: float,
    ) -> str:
        """Choose if that can be done now; the reason, empty: nothing is chosen.

        Args:
            reported_s: by member, `FIRST_STEP_FIGURE`.
            network: of `peers`, in any order; None: nothing is measured yet.
        """
        if not self.is_open or not peers:
            return ""
        if len(peers) > 1 and self._is_waiting(peers, reported_s, network, now_s):
            return ""
        compute_s = _slowest_compute_s([reported_s[peer] for peer in peers if peer in reported_s])
        return self._choose(len(peers), network, compute_s)

    def _is_waiting(
        self,
        peers: Sequence[PeerId],
        reported_s: Mapping[PeerId, float],
        network: NetworkModel | None,
        now_s: float,
    ) -> bool:
        """Whether reports or rates that are missing may still come."""
        missing = [peer for peer in peers if peer not in reported_s]
        if len(missing) == len(peers):
            return True
        self._first_report_s = now_s if self._first_report_s is None else self._first_report_s
        if missing and now_s < self._first_report_s + self.report_timeout_s:
            return True
        self._all_reported_s = now_s if self._all_reported_s is None else self._all_reported_s
        return network is None and now_s < self._all_reported_s + self.rate_timeout_s

    def reconsider(self, size: int, network: NetworkModel | None, compute_s: Sequence[float]) -> str:
        """Choose again where it is worth it; the reason, empty: the choice stays.

        What a worker alone has chosen is no choice for two: without measurements it is open again.

        Args:
            compute_s: of a step, by member; empty: unknown.
        """
        if self.chosen is None or size < 2:
            return ""
        if network is None or not compute_s:
            if not self._is_chosen_alone:
                return ""
            self.chosen, self.reason, self._is_chosen_alone = None, "", False
            return "a worker that was alone is no longer"
        slowest_s = _slowest_compute_s(compute_s)
        if self._is_chosen_alone:
            return self._choose(size, network, slowest_s)
        candidates, estimates = self._candidates(), self._estimates(size, network, slowest_s)
        if self.chosen not in candidates or not estimates:
            return ""
        current, best = estimates[candidates.index(self.chosen)], fastest_estimate(estimates)
        dense = min((x for x in estimates if x.load.kind in LOSSLESS_KINDS), key=lambda x: x.step_s)
        self._alternative_text = ""
        is_lossy = current.load.kind not in LOSSLESS_KINDS
        if is_lossy and dense.step_s <= DENSE_RETURN_RATIO * current.step_s:
            return self._adopt(estimates, dense)
        if best is current:
            return ""
        gain = current.step_s / best.step_s
        if gain >= MIN_SPEEDUP:
            return self._adopt(estimates, best)
        if gain > 1 + DENSE_PREFERENCE_MARGIN / 2:
            self._alternative_text = (
                f"{format_exchange(best)} would now make steps {gain - 1:.0%} faster, and is taken from "
                f"{MIN_SPEEDUP - 1:.0%} on"
            )
        return ""

    def _choose(self, size: int, network: NetworkModel | None, compute_s: float) -> str:
        self._is_chosen_alone, self._first_report_s, self._all_reported_s = size == 1, None, None
        estimates = self._estimates(size, network, compute_s) if size > 1 else []
        if not estimates:
            self.chosen = self._candidates()[0]
            why = "one worker has nobody to exchange with" if size == 1 else "the model's size is not known"
            self.reason = f"{self.chosen_text}: {why}"
            return self.reason
        return self._adopt(estimates, recommend_exchange(estimates).best, measured=network is not None)

    def _adopt(
        self, estimates: Sequence[ExchangeEstimate], best: ExchangeEstimate, *, measured: bool = True
    ) -> str:
        self.chosen = self._candidates()[estimates.index(best)]
        self._alternative_text = ""
        self.reason = _choice_reason(self.chosen_text, estimates, best)
        if not measured:
            self.reason += f"; no link is measured, each counts as {DEFAULT_LINK_Bps * 8 / 1e6:.0f} Mbit/s"
        assert isinstance(self._named, Auto)
        self.reason += _local_steps_advice(best, self._named)
        return self.reason

    def _estimates(self, size: int, network: NetworkModel | None, compute_s: float) -> list[ExchangeEstimate]:
        """Each candidate on this network, in its best order where that is found quickly; empty: the model's
        size is unknown."""
        count, cpu = parameter_count(self._setup), CpuCosts()
        assumed = network if network is not None else uniform_network(size, DEFAULT_ALPHA_s, DEFAULT_LINK_Bps)
        estimates = []
        for exchange in self._candidates() if count else ():
            load, order = Workload.of(exchange, count), None
            if network is not None and 2 < size <= MAX_ORDERED_MEMBERS:
                order = best_order(load, network, cpu, range(size)).order
            estimates.append(
                estimate_exchange(load, assumed, cpu, compute_s, order=order, max_messages=SIMULATED_MESSAGES)
            )
        return estimates


def _slowest_compute_s(seconds: Sequence[float]) -> float:
    """The slowest is waited for; its report counts up to a multiple of the median."""
    usual = median(seconds) if seconds else 0.0
    return min(max(max(seconds, default=0.0), 1e-6), MAX_MEDIAN_RATIO * max(usual, 1e-6), 1e6)


def _choice_reason(chosen: str, estimates: Sequence[ExchangeEstimate], best: ExchangeEstimate) -> str:
    text = (
        f"{chosen}: a step takes {format_seconds(best.step_s)} with {best.world_size} workers, "
        f"{format_seconds(best.compute_s)} of it computing"
    )
    others = sorted((each for each in estimates if each is not best), key=lambda each: each.step_s)
    if not others:
        return text
    text += "; " + ", ".join(f"{format_exchange(other)} {format_seconds(other.step_s)}" for other in others)
    if best.load.kind in LOSSLESS_KINDS and others[0].step_s < best.step_s:
        text += ": too little gained by leaving gradients out"
    return text


def _local_steps_advice(best: ExchangeEstimate, auto: Auto) -> str:
    """Only in words: local steps change what is optimized, which the script decides."""
    if best.efficiency >= LOCAL_STEPS_COMPUTE_SHARE:
        return ""
    proposed = propose_local_steps(best.compute_s, best.cost.exchange_s)
    what = "" if auto.sparse else ", and a sparse exchange inside learns behind this optimizer, too"
    then = best.compute_s / (best.compute_s + best.cost.exchange_s / proposed.every)
    return (
        f"; only {best.efficiency:.0%} of a step is computing: LocalSteps(every={proposed.every}) in the "
        f"script would make it {then:.0%}{what}"
    )
