"""Which exchange a run uses whose script leaves that open (`exchange="auto"`), and why.

Decides, from measured links, measured computing and the model's size, once for all members: what is chosen
travels in the View and is journalled with it.  Never measures, never makes a generation (`generations`).

    first generation: "" -----> all have computed a batch, links are known -----> a View with the choice
                                        |                                                |
                members compute, and wait before the exchange               they go on with the same gradient

    later: links, speeds or members change --> another choice, where it makes steps `WORTH` times as fast

The first batch of a worker takes longest (kernels are compiled), so the first choice may be dense where
later ones are not: a dense step then costs little beside the computing.  A choice may change at any
generation without loss: dense keeps nothing back, sparse exchanges keep it in the same residual, and a dense
step takes along what lies in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from gridtrain.config import Auto, Deadlines
from gridtrain.core.messages import PeerId, Setup
from gridtrain.core.planning.batch_shares import SAMPLES_FIGURE, SECONDS_FIGURE
from gridtrain.core.planning.cost_model import ExchangeCost, exchange_cost
from gridtrain.core.planning.dense_topology import (
    DIRECT_DENSE,
    MAX_DIRECT_MEMBERS,
    OPEN_DENSE,
    RING_TOPOLOGY,
    DenseTopology,
    choose_dense_topology,
)
from gridtrain.core.planning.exchange_comparison import (
    DENSE_PREFERENCE_MARGIN,
    LOSSLESS_KINDS,
    ExchangeEstimate,
    fastest_estimate,
    format_exchange,
    format_seconds,
    recommend_exchange,
)
from gridtrain.core.planning.local_steps_proposal import propose_local_steps
from gridtrain.core.planning.network_model import NetworkModel, uniform_network
from gridtrain.core.planning.rank_order import MIN_SPEEDUP, DEFAULT_LINK_Bps, parse_workload, workload_of
from gridtrain.core.planning.rank_order_search import SIMULATED_MESSAGES, best_order
from gridtrain.core.planning.workload import CpuCosts, Workload
from gridtrain.errors import ConfigError

FIRST_STEP_FIGURE = "first_computed_s"
"""A figure of a Beat: seconds of the batch whose gradient waits for the first choice."""

MAX_MEDIAN_RATIO = 4.0
"""The slowest member's computing counts as so many times the median at most: it is that worker's own word."""

MAX_ORDERED_MEMBERS = 32
"""Members for which the best order of each exchange is looked for; above they are compared as they joined, as
three searches would hold up the coordinator."""

DEFAULT_ALPHA_s = 1e-3
DENSE_RETURN_RATIO = 1.05
"""Dense, which leaves nothing out, is gone back to where its steps are at most so many times as long."""

LOCAL_STEPS_COMPUTE_SHARE = 0.5
"""Where less than this part of a step is computing, local steps are mentioned."""

_EXCHANGE = re.compile(r"(Dense|TopK|GTopK)\(([^()]*)\)")


def parse_auto(setup: Setup | None) -> Auto | None:
    """What a run leaves to the coordinator; None: its script names an exchange."""
    return Auto.parse(dict(setup.facts).get("exchange", "")) if setup is not None else None


def seconds_per_sample(figures: Mapping[str, float]) -> float:
    """Seconds for a sample over a worker's whole stay, first batches left out; 0.0: not known."""
    samples, seconds = figures.get(SAMPLES_FIGURE, 0.0), figures.get(SECONDS_FIGURE, 0.0)
    return seconds / samples if 0 < samples < math.inf and 0 < seconds < math.inf else 0.0


def parameter_count(setup: Setup) -> int:
    """Of the model, by the facts; 0: they do not say."""
    found = re.match(r"(\d{1,18}) parameters", dict(setup.facts).get("model", ""))
    return int(found[1]) if found else 0


@dataclass(slots=True)
class ExchangeChoice:
    """The choice of one run.

    Attributes:
        chosen: out of several exchanges.
        road: of a dense exchange that is open to it, in the generation that is made.
        reason: of the choice, in words; with what another one would gain now, if that is known.
        rates_s: so long the first choice waits for a measured rate.
        patience_s: so long for members that have not told what their first batch took, since the first has
            told: one that hangs must not hold up the others where no round with its deadlines is open.
    """

    chosen: str = ""
    reason: str = ""
    dense_topology: DenseTopology = RING_TOPOLOGY
    rate_timeout_s: float = 2.0
    report_timeout_s: float = Deadlines().first_step_s
    _setup: Setup | None = None
    _auto: Auto | None = None
    _alternative_text: str = ""  # what another choice would bring that is not worth it
    _first_report_s: float | None = None  # since when one has computed
    _all_reported_s: float | None = None  # since when all have
    _is_chosen_alone: bool = False  # chosen by a worker that had nobody to exchange with

    def configure(self, setup: Setup | None, chosen: str = "", alone: bool = False) -> None:
        """The run is known; `chosen`: what a journal says, and whether a worker alone had chosen it."""
        self.dense_topology = (
            DenseTopology(True, "direct, as in the journal") if chosen == DIRECT_DENSE else RING_TOPOLOGY
        )
        chosen = OPEN_DENSE if self.dense_topology.is_direct else chosen
        self._setup, self._auto = setup, parse_auto(setup)
        self.chosen = chosen if self._auto is not None and chosen in self._candidate_texts() else ""
        self.reason = f"{self.chosen}, as in the journal" if self.chosen else ""
        self._is_chosen_alone = alone and bool(self.chosen)

    @property
    def is_open(self) -> bool:
        """The coordinator has to choose, and has not yet."""
        return self._auto is not None and not self.chosen

    @property
    def is_auto(self) -> bool:
        return self._auto is not None

    @property
    def description(self) -> str:
        """For people; empty: the run's script names an exchange."""
        if self._auto is None:
            return ""
        said = self._with_topology(self.reason)
        return (
            f"{said}{'; ' + self._alternative_text if self._alternative_text else ''}"
            if self.chosen
            else "not chosen yet"
        )

    @property
    def effective_setup(self) -> Setup | None:
        """As if the script had named what was chosen: for orders of ranks, and for status."""
        if self._setup is None or not (self.chosen or self.dense_topology.is_direct):
            return self._setup
        named = ((n, self.chosen or t if n == "exchange" else t) for n, t in self._setup.facts)
        facts = tuple((n, self._with_topology(t) if n == "exchange" else t) for n, t in named)
        return replace(self._setup, facts=facts)

    @property
    def view_exchange(self) -> str:
        """As `View.exchange`."""
        return DIRECT_DENSE if self.dense_topology.is_direct else self.chosen

    def choose_dense_topology(
        self, size: int, network: NetworkModel | None, edges: Callable[[], bool]
    ) -> None:
        """A generation of so many is made.

        Args:
            network: as in `roads.road_of`.
            edges: likewise; asked where that matters.
        """
        self.dense_topology = RING_TOPOLOGY
        setup = self.effective_setup
        if setup is not None and setup.stages == 1 and OPEN_DENSE in dict(setup.facts).get("exchange", ""):
            self.dense_topology = choose_dense_topology(
                workload_of(setup), size, network, size <= MAX_DIRECT_MEMBERS and edges()
            )

    def ring_reason(self, size: int, network: NetworkModel) -> str:
        """Why the members, who stand and exchange directly, want a ring now; empty: they do not."""
        load = self.workload
        found = (
            choose_dense_topology(load, size, network, True)
            if self.dense_topology.is_direct
            else RING_TOPOLOGY
        )
        if not self.dense_topology.is_direct or found.is_direct or found.ring_speedup < MIN_SPEEDUP:
            return ""
        return f"links have changed: {found.reason}"

    def _with_topology(self, text: str) -> str:
        return text.replace(OPEN_DENSE, DIRECT_DENSE, 1) if self.dense_topology.is_direct else text

    @property
    def workload(self) -> Workload | None:
        """What a round exchanges; None: not known."""
        return workload_of(self.effective_setup)

    @property
    def is_sparse(self) -> bool:
        """Updates are small: newcomers may follow them."""
        load = self.workload
        return load is not None and load.kind.is_sparse

    def _candidate_texts(self) -> tuple[str, ...]:
        assert self._auto is not None and self._setup is not None
        return tuple(each.describe() for each in self._auto.exchanges(max(1, parameter_count(self._setup))))

    # -- choices -----------------------------------------------------------------------------------

    def choose_first(
        self,
        peers: Sequence[PeerId],
        told: Mapping[PeerId, float],
        network: NetworkModel | None,
        now_s: float,
    ) -> str:
        """Choose if that can be done now; the reason, empty: nothing new is chosen.

        Args:
            told: by member, `FIRST_FIGURE`.
            network: of `peers`, in any order; None: nothing is measured yet.
        """
        if not self.is_open or not peers:
            return ""
        if len(peers) > 1:
            if not any(peer in told for peer in peers):
                return ""
            self._first_report_s = now_s if self._first_report_s is None else self._first_report_s
            if (
                any(peer not in told for peer in peers)
                and now_s < self._first_report_s + self.report_timeout_s
            ):
                return ""
            self._all_reported_s = now_s if self._all_reported_s is None else self._all_reported_s
            if network is None and now_s < self._all_reported_s + self.rate_timeout_s:
                return ""
        computing_s = _slowest_compute_s([told[peer] for peer in peers if peer in told])
        return self._choose(len(peers), network, computing_s)

    def reconsider(self, size: int, network: NetworkModel | None, computing_s: Sequence[float]) -> str:
        """Choose anew where it is worth it; the reason, empty: the choice stays.

        What a worker alone had chosen is no choice for two: without measurements it is open again.

        Args:
            computing_s: of a step, by member; empty: not known.
        """
        if not self.chosen or size < 2 or self._auto is None:
            return ""
        if self._is_chosen_alone and (network is None or not computing_s):
            self.chosen, self.reason, self._is_chosen_alone = "", "", False
            return "a worker that was alone is no longer"
        if network is None or not computing_s:
            return ""
        if self._is_chosen_alone:
            return self._choose(size, network, _slowest_compute_s(computing_s))
        looks = self._estimates(size, network, _slowest_compute_s(computing_s))
        at = next((index for index, text in enumerate(self._candidate_texts()) if text == self.chosen), None)
        if at is None or not looks:
            return ""
        here, best = looks[at], fastest_estimate(looks)
        dense = min((x for x in looks if x.load.kind in LOSSLESS_KINDS), key=lambda x: x.step_s)
        self._alternative_text = ""
        if here.load.kind not in LOSSLESS_KINDS and dense.step_s <= DENSE_RETURN_RATIO * here.step_s:
            return self._adopt(looks, dense)
        if best is here:
            return ""
        gain = here.step_s / best.step_s
        if gain >= MIN_SPEEDUP:
            return self._adopt(looks, best)
        if gain > 1 + DENSE_PREFERENCE_MARGIN / 2:
            self._alternative_text = (
                f"{format_exchange(best)} would now make steps {gain - 1:.0%} faster, and is taken from "
                f"{MIN_SPEEDUP - 1:.0%} on"
            )
        return ""

    def _choose(self, size: int, network: NetworkModel | None, computing_s: float) -> str:
        self._is_chosen_alone, self._first_report_s, self._all_reported_s = size == 1, None, None
        if size == 1:
            self.chosen = self._candidate_texts()[0]
            self.reason = f"{self.chosen}: one worker has nobody to exchange with"
            return self.reason
        looks = self._estimates(size, network, computing_s)
        if not looks:
            self.chosen = self._candidate_texts()[0]
            self.reason = f"{self.chosen}: the model's size is not known"
            return self.reason
        best, _ = recommend_exchange(looks)
        return self._adopt(looks, best, measured=network is not None)

    def _adopt(
        self, looks: Sequence[ExchangeEstimate], best: ExchangeEstimate, *, measured: bool = True
    ) -> str:
        self.chosen = self._candidate_texts()[looks.index(best)]
        self._alternative_text = ""
        self.reason = _choice_reason(self.chosen, looks, best)
        if not measured:
            self.reason += f"; no link is measured, each counts as {DEFAULT_LINK_Bps * 8 / 1e6:.0f} Mbit/s"
        assert self._auto is not None
        self.reason += _local_steps_advice(best, self._auto)
        return self.reason

    def _estimates(
        self, size: int, network: NetworkModel | None, computing_s: float
    ) -> list[ExchangeEstimate]:
        """Each choice on this network, in its best order where that can be looked for in a moment."""
        assert self._setup is not None
        count = parameter_count(self._setup)
        lines = network if network is not None else uniform_network(size, DEFAULT_ALPHA_s, DEFAULT_LINK_Bps)
        looks = []
        for text in self._candidate_texts() if count else ():
            found = _EXCHANGE.match(text)
            load = parse_workload(found[1], found[2], count) if found else None
            if load is None:
                raise ConfigError(f"{text!r} is no exchange", remedy="use gridtrain's own version")
            looks.append(
                ExchangeEstimate(load, size, _cost(load, lines, measured=network is not None), computing_s)
            )
        return looks


def _cost(load: Workload, lines: NetworkModel, *, measured: bool) -> ExchangeCost:
    order: Sequence[int] = range(lines.size)
    if measured and 2 < lines.size <= MAX_ORDERED_MEMBERS:
        order = best_order(load, lines, CpuCosts(), range(lines.size)).order
    return exchange_cost(load, lines.reordered(order), CpuCosts(), most_moves=SIMULATED_MESSAGES)


def _slowest_compute_s(seconds: Sequence[float]) -> float:
    """The slowest is waited for, whatever it says up to a bound."""
    usual = median(seconds) if seconds else 0.0
    return min(max(max(seconds, default=0.0), 1e-6), MAX_MEDIAN_RATIO * max(usual, 1e-6), 1e6)


def _choice_reason(chosen: str, looks: Sequence[ExchangeEstimate], best: ExchangeEstimate) -> str:
    text = (
        f"{chosen}: a step takes {format_seconds(best.step_s)} with {best.world_size} workers, "
        f"{format_seconds(best.compute_s)} of it computing"
    )
    others = sorted((look for look in looks if look is not best), key=lambda look: look.step_s)
    if not others:
        return text
    text += "; " + ", ".join(f"{format_exchange(other)} {format_seconds(other.step_s)}" for other in others)
    if best.load.kind in LOSSLESS_KINDS and others[0].step_s < best.step_s:
        text += ": too little gained by leaving gradients out"
    return text


def _local_steps_advice(best: ExchangeEstimate, auto: Auto) -> str:
    """Only in words: they change what is optimized, which is the script's business."""
    if best.efficiency >= LOCAL_STEPS_COMPUTE_SHARE:
        return ""
    proposed = propose_local_steps(best.compute_s, best.cost.exchange_s)
    what = "" if auto.sparse else ", and a sparse exchange inside learns behind this optimizer, too"
    then = best.compute_s / (best.compute_s + best.cost.exchange_s / proposed.every)
    return (
        f"; only {best.efficiency:.0%} of a step is computing: LocalSteps(every={proposed.every}) in the "
        f"script would make it {then:.0%}{what}"
    )
