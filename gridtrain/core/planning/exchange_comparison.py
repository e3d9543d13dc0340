"""Compare exchanges on a network by the predicted time of a step, and choose one, with the reason in words.

    exchanges that are allowed, a network, seconds of computing --> each one's step --> the shortest

`recommend_exchange` chooses between exchanges that leave gradients out and those that do not: a dense
exchange is taken where it costs little.  `choose_dense_topology` chooses between ring and direct topology,
which end with the same bits.  `exchange_choice` keeps the choice of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from gridtrain.core.planning.cost_model import ExchangeCost, exchange_cost
from gridtrain.core.planning.network_model import NetworkModel
from gridtrain.core.planning.rank_order_search import SIMULATED_MESSAGES, best_order
from gridtrain.core.planning.workload import CpuCosts, ExchangeKind, Workload
from gridtrain.errors import ConfigError

DENSE_PREFERENCE_MARGIN = 0.10
"""Dense is preferred where its step takes no more than this share longer than the fastest one."""

LOSSLESS_KINDS = (ExchangeKind.DENSE, ExchangeKind.DIRECT, ExchangeKind.STAR)


@dataclass(frozen=True, slots=True)
class ExchangeEstimate:
    """One exchange on one network.

    Attributes:
        compute_s: of a step, from its batch to its gradient.
        local_steps: optimizer steps between two exchanges.
    """

    load: Workload
    world_size: int
    cost: ExchangeCost
    compute_s: float
    local_steps: int = 1

    @property
    def step_s(self) -> float:
        """Seconds of a step with its share of the exchange."""
        return self.compute_s + self.cost.exchange_s / self.local_steps

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: the share of a step that is computing."""
        return self.compute_s / self.step_s

    @property
    def speedup(self) -> float:
        """Samples per second, relative to one member alone."""
        return self.world_size * self.efficiency


def estimate_exchange(
    load: Workload,
    network: NetworkModel,
    cpu: CpuCosts,
    compute_s: float,
    *,
    local_steps: int = 1,
    order: Sequence[int] | None = None,
    max_messages: int = 20_000,
) -> ExchangeEstimate:
    """A step with this exchange; members in the given order of ranks, by default as they are."""
    if not compute_s > 0 or local_steps < 1:
        raise ConfigError(
            f"{compute_s} s of computing and {local_steps} local steps", remedy="both must be above 0"
        )
    ordered = network if order is None else network.reordered(order)
    found = exchange_cost(load, ordered, cpu, max_messages=max_messages)
    return ExchangeEstimate(load, network.size, found, compute_s, local_steps)


def estimate_best_order(
    load: Workload,
    network: NetworkModel,
    cpu: CpuCosts,
    compute_s: float,
    *,
    local_steps: int = 1,
    max_messages: int = 20_000,
) -> ExchangeEstimate:
    """The same in the best order that is found."""
    order = best_order(load, network, cpu, range(network.size)).order
    return estimate_exchange(
        load, network, cpu, compute_s, local_steps=local_steps, order=order, max_messages=max_messages
    )


# -- which exchange --------------------------------------------------------------------------------


class Recommendation(NamedTuple):
    """The exchange to take, and why in one sentence."""

    best: ExchangeEstimate
    reason: str


def recommend_exchange(estimates: Sequence[ExchangeEstimate]) -> Recommendation:
    """The exchange to take out of these, all on the same network.

    The fastest one, but a dense one where its exchange is short beside the computing, or its step hardly
    longer.

    Raises:
        ConfigError: there is none to choose from.
    """
    if not estimates:
        raise ConfigError("there is no exchange to choose from", remedy="allow at least one")
    fastest = fastest_estimate(estimates)
    lossless = [each for each in estimates if each.load.kind in LOSSLESS_KINDS]
    dense = min(lossless, key=lambda each: each.step_s, default=None)
    size = fastest.world_size
    if dense is not None:
        take = f"Take {format_exchange(dense)} with {size} workers"
        if dense.cost.exchange_s / dense.local_steps <= DENSE_PREFERENCE_MARGIN * dense.compute_s:
            exchange, compute = dense.cost.exchange_s, dense.compute_s * dense.local_steps
            return Recommendation(
                dense,
                f"{take}: its exchange takes {format_seconds(exchange)} beside {format_seconds(compute)} of "
                "computing, so there is little to gain from leaving gradients out.",
            )
        if dense is not fastest and dense.step_s <= (1 + DENSE_PREFERENCE_MARGIN) * fastest.step_s:
            return Recommendation(
                dense,
                f"{take}: a step takes {format_seconds(dense.step_s)}; {format_exchange(fastest)} would take "
                f"{format_seconds(fastest.step_s)}, too little gained by leaving gradients out.",
            )
    text = (
        f"Take {format_exchange(fastest)} with {size} workers: a step takes "
        f"{format_seconds(fastest.step_s)}, {fastest.efficiency:.0%} of it computing"
    )
    others = sorted((each for each in estimates if each is not fastest), key=lambda each: each.step_s)
    if others:
        text += f"; next is {format_exchange(others[0])} with {format_seconds(others[0].step_s)}"
    if dense is not None and dense is not fastest and (not others or dense is not others[0]):
        text += f", and {dense.load.kind} would take {format_seconds(dense.step_s)}"
    return Recommendation(fastest, text + ".")


def fastest_estimate(estimates: Sequence[ExchangeEstimate]) -> ExchangeEstimate:
    """With the shortest step; of equal ones the first."""
    return min(estimates, key=lambda each: each.step_s)


# -- which topology of a dense one -----------------------------------------------------------------

MAX_DIRECT_BYTES = 1 << 20
"""Of the vector.  With 4 MB a ring is faster: bytes count and not hops, and its retry resumes from what has
arrived."""

MAX_DIRECT_MEMBERS = 16
"""Each has a connection to each other one."""

MIN_LINK_SHARE = 0.25
"""A link that is slower than this share of its ends' upload and download may be one that others share."""


@dataclass(frozen=True, slots=True)
class DenseTopology:
    """The topology of a dense exchange.

    Attributes:
        is_direct: the direct exchange, not a ring.
        reason: in words; empty: there was nothing to choose.
        ring_speedup: how many times as fast a ring is, where one is predicted or known to be better.
    """

    is_direct: bool
    reason: str = ""
    ring_speedup: float = 1.0


RING_TOPOLOGY = DenseTopology(False)


def choose_dense_topology(
    load: Workload | None, size: int, network: NetworkModel | None, edges: bool
) -> DenseTopology:
    """How `size` members exchange a dense `load`: directly if it is small, links are even and it is faster.

    Args:
        load: None: unknown.
        network: of the members, in any order; None: not measured yet, then bytes and members decide.
        edges: any two of them can connect without a relay, as far as is known.
    """
    if (
        load is None
        or load.kind not in (ExchangeKind.DENSE, ExchangeKind.DIRECT)
        or size < 3
        or load.unit_bytes > MAX_DIRECT_BYTES
    ):
        return RING_TOPOLOGY
    if size > MAX_DIRECT_MEMBERS:
        return DenseTopology(False, f"round a ring, as {size} members are more than {MAX_DIRECT_MEMBERS}")
    if not edges:
        return DenseTopology(False, "round a ring, as not any two members have a connection of their own")
    if network is None:
        return DenseTopology(True, f"direct: {load.unit_bytes} bytes are few, and no link is measured")
    if (share := _slowest_link_share(network)) < MIN_LINK_SHARE:
        reason = f"round a ring, as a link has only {share:.0%} of the rate of its ends"
        return DenseTopology(False, reason, inf)
    ring, direct = (replace(load, kind=kind) for kind in (ExchangeKind.DENSE, ExchangeKind.DIRECT))
    ring_s = best_order(ring, network, CpuCosts(), range(size)).exchange_s
    direct_s = exchange_cost(direct, network, CpuCosts(), max_messages=SIMULATED_MESSAGES).exchange_s
    if direct_s < ring_s:
        return DenseTopology(True, f"direct: {direct_s * 1e3:.3g} ms, round a ring {ring_s * 1e3:.3g} ms")
    reason = f"round a ring: {ring_s * 1e3:.3g} ms, direct {direct_s * 1e3:.3g} ms"
    return DenseTopology(False, reason, direct_s / ring_s)


def _slowest_link_share(network: NetworkModel) -> float:
    """The rate of the slowest pair, relative to the upload and download of its ends; 1 at most."""
    ranks = range(network.size)
    pairs = [(src, dst) for src in ranks for dst in ranks if src != dst]
    shares = (network.path_Bps(a, b) / min(network.up_Bps[a], network.down_Bps[b]) for a, b in pairs)
    return min(shares, default=1.0)


# -- in words --------------------------------------------------------------------------------------


def format_exchange(each: ExchangeEstimate) -> str:
    """An exchange in words."""
    kind = str(each.load.kind)
    if each.load.kind.is_sparse:
        kind += f" at density {each.load.density:g}"
    return f"{kind} every {each.local_steps} steps" if each.local_steps > 1 else kind


def format_seconds(seconds: float) -> str:
    """A time for people."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
