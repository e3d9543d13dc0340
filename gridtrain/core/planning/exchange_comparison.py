"""Which exchange fits a network, and why: what `gridtrain plan` says, and a run's owner may follow.

Decides a recommendation.  Which exchange a run uses is its owner's choice; nothing here changes it.

    exchanges that are allowed, a network, seconds of computing --> each one's step --> the shortest, in words

Dense leaves nothing out, so it is taken where it costs little (`LITTLE`); between sparse exchanges the
shortest step decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gridtrain.core.planning.cost_model import ExchangeCost, exchange_cost
from gridtrain.core.planning.network_model import NetworkModel
from gridtrain.core.planning.rank_order_search import best_order
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
        """A step, and its part of the exchange."""
        return self.compute_s + self.cost.exchange_s / self.local_steps

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: of all samples that the members could compute alone, those that they do."""
        return self.compute_s / self.step_s

    @property
    def speedup(self) -> float:
        """Over one member alone."""
        return self.world_size * self.efficiency


def estimate_exchange(
    load: Workload,
    network: NetworkModel,
    cpu: CpuCosts,
    compute_s: float,
    *,
    local_steps: int = 1,
    order: Sequence[int] | None = None,
    most_moves: int = 20_000,
) -> ExchangeEstimate:
    """A step with this exchange; members in the given order of ranks, by default as they are."""
    if not compute_s > 0 or local_steps < 1:
        raise ConfigError(
            f"{compute_s} s of computing and {local_steps} local steps", remedy="both must be above 0"
        )
    ordered = network if order is None else network.reordered(order)
    found = exchange_cost(load, ordered, cpu, most_moves=most_moves)
    return ExchangeEstimate(load, network.size, found, compute_s, local_steps)


def estimate_best_order(
    load: Workload,
    network: NetworkModel,
    cpu: CpuCosts,
    compute_s: float,
    *,
    local_steps: int = 1,
    most_moves: int = 20_000,
) -> ExchangeEstimate:
    """The same with the best order that is found."""
    order = best_order(load, network, cpu, range(network.size)).order
    return estimate_exchange(
        load, network, cpu, compute_s, local_steps=local_steps, order=order, most_moves=most_moves
    )


def recommend_exchange(outlooks: Sequence[ExchangeEstimate]) -> tuple[ExchangeEstimate, str]:
    """The one to take out of exchanges on the same network, and the reason in one sentence."""
    if not outlooks:
        raise ConfigError("there is no exchange to choose from", remedy="allow at least one")
    fastest = fastest_estimate(outlooks)
    lossless = [each for each in outlooks if each.load.kind in LOSSLESS_KINDS]
    dense = min(lossless, key=lambda each: each.step_s, default=None)
    size = fastest.world_size
    if (
        dense is not None
        and dense.cost.exchange_s / dense.local_steps <= DENSE_PREFERENCE_MARGIN * dense.compute_s
    ):
        return dense, (
            f"Take {format_exchange(dense)} with {size} workers: its exchange takes {format_seconds(dense.cost.exchange_s)} "
            f"beside {format_seconds(dense.compute_s * dense.local_steps)} of computing, so there is little to gain "
            "from leaving gradients out."
        )
    if (
        dense is not None
        and dense is not fastest
        and dense.step_s <= (1 + DENSE_PREFERENCE_MARGIN) * fastest.step_s
    ):
        return dense, (
            f"Take {format_exchange(dense)} with {size} workers: a step takes {format_seconds(dense.step_s)}; {format_exchange(fastest)} "
            f"would take {format_seconds(fastest.step_s)}, too little gained by leaving gradients out."
        )
    text = (
        f"Take {format_exchange(fastest)} with {size} workers: a step takes {format_seconds(fastest.step_s)}, "
        f"{fastest.efficiency:.0%} of it computing"
    )
    others = sorted((each for each in outlooks if each is not fastest), key=lambda each: each.step_s)
    if others:
        second = others[0]
        text += f"; next is {format_exchange(second)} with {format_seconds(second.step_s)}"
    if dense is not None and dense is not fastest and (not others or dense is not others[0]):
        text += f", and {dense.load.kind} would take {format_seconds(dense.step_s)}"
    return fastest, text + "."


def fastest_estimate(outlooks: Sequence[ExchangeEstimate]) -> ExchangeEstimate:
    """With the shortest step; of equal ones the first."""
    return min(outlooks, key=lambda each: each.step_s)


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
