"""Compares exchanges by predicted step time, and prefers a dense one that is nearly as fast as the fastest.

    allowed exchanges, a network, compute time --> predicted step time with each --> the shortest

`recommend_exchange` chooses between dense exchanges and exchanges that omit gradients; it prefers a
dense exchange that takes little more time.  `recommend_local_steps` recommends a number of local steps that
lets workers compute for a desired share of the time.  `exchange_choice` holds a run's choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gridtrain.core.planning.cost_model import ExchangeCost, exchange_cost
from gridtrain.core.planning.local_steps_proposal import LocalStepsProposal, propose_local_steps
from gridtrain.core.planning.network_model import NetworkModel
from gridtrain.core.planning.rank_order_search import best_order
from gridtrain.core.planning.workload import CpuCosts, Workload
from gridtrain.errors import ConfigError
from gridtrain.quantities import format_seconds

DENSE_PREFERENCE_MARGIN = 0.10
"""A dense exchange is preferred if a step with it is longer than the fastest step by at most this share."""


@dataclass(frozen=True, slots=True)
class ExchangeEstimate:
    """The predicted cost of one exchange on one network.

    Attributes:
        compute_s: compute time per step, from the batch to the gradient, in seconds.
        local_steps: optimizer steps between two exchanges.
        overlapped: the share of the local steps with which the exchange may overlap (`LocalSteps(overlap=)`).
    """

    load: Workload
    world_size: int
    cost: ExchangeCost
    compute_s: float
    local_steps: int = 1
    overlapped: float = 0.0

    @property
    def step_s(self) -> float:
        """The mean time of an optimizer step in seconds, including its share of the exchange."""
        overlapped_s = self.overlapped * self.local_steps * self.compute_s
        hidden_s = min(self.hideable_s, overlapped_s)
        return self.compute_s + (self.cost.exchange_s - hidden_s) / self.local_steps

    @property
    def hideable_s(self) -> float:
        """The exchange time without the selection, in seconds: the part that may overlap with computation."""
        return max(0.0, self.cost.exchange_s - self.cost.select_s)

    @property
    def efficiency(self) -> float:
        """Scaling efficiency: the share of a step that is spent on computation."""
        return self.compute_s / self.step_s

    @property
    def speedup(self) -> float:
        """The group's samples per second, as a multiple of a single member's."""
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
    """Estimate a step with this exchange.

    Args:
        compute_s: the compute time of an optimizer step, in seconds.
        local_steps: the number of optimizer steps between two exchanges.
        order: `order[rank]` is the member of `network` with that rank; None to keep the order of `network`.
        max_messages: see `exchange_cost`.

    Raises:
        ConfigError: `compute_s` is not above 0, or `local_steps` is less than 1.
    """
    if not compute_s > 0 or local_steps < 1:
        raise ConfigError(
            f"compute_s is {compute_s} and local_steps is {local_steps}; both must be above 0",
            remedy="pass the measured compute time of a step and use at least one local step",
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
) -> ExchangeEstimate:
    """Estimate a step with this exchange and with the order of ranks that `best_order` finds."""
    order = best_order(load, network, cpu, range(network.size)).order
    return estimate_exchange(load, network, cpu, compute_s, local_steps=local_steps, order=order)


# -- choice of exchange ----------------------------------------------------------------------------


class Recommendation(NamedTuple):
    """The estimate of the recommended exchange and, in one sentence, the reason for recommending it."""

    best: ExchangeEstimate
    reason: str


def recommend_exchange(estimates: Sequence[ExchangeEstimate]) -> Recommendation:
    """Recommend one of these exchanges, which are all estimated on the same network.

    The fastest dense exchange is recommended if it is short compared with the compute time, or if a step with
    it takes little longer than the fastest step; otherwise the fastest exchange is recommended.

    Raises:
        ConfigError: `estimates` is empty.
    """
    if not estimates:
        raise ConfigError("there is no exchange to choose from", remedy="allow at least one exchange")
    fastest = fastest_estimate(estimates)
    lossless = [each for each in estimates if not each.load.kind.has_density]
    dense = min(lossless, key=lambda each: each.step_s, default=None)
    size = fastest.world_size
    if dense is not None:
        take = f"Use {format_exchange(dense)} with {size} workers"
        if dense.cost.exchange_s / dense.local_steps <= DENSE_PREFERENCE_MARGIN * dense.compute_s:
            exchange, compute = dense.cost.exchange_s, dense.compute_s * dense.local_steps
            return Recommendation(
                dense,
                f"{take}: its exchange takes {format_seconds(exchange)} and computing takes "
                f"{format_seconds(compute)}, so there is little to gain from omitting gradients.",
            )
        if dense is not fastest and dense.step_s <= (1 + DENSE_PREFERENCE_MARGIN) * fastest.step_s:
            return Recommendation(
                dense,
                f"{take}: a step takes {format_seconds(dense.step_s)}; {format_exchange(fastest)} would take "
                f"{format_seconds(fastest.step_s)}, and the gain is too small to justify omitting gradients.",
            )
    text = (
        f"Use {format_exchange(fastest)} with {size} workers: a step takes "
        f"{format_seconds(fastest.step_s)}, {fastest.efficiency:.0%} of it computing"
    )
    others = sorted((each for each in estimates if each is not fastest), key=lambda each: each.step_s)
    if others:
        text += f"; the next best is {format_exchange(others[0])} with {format_seconds(others[0].step_s)}"
    if dense is not None and dense is not fastest and (not others or dense is not others[0]):
        text += f", and {dense.load.kind} would take {format_seconds(dense.step_s)}"
    return Recommendation(fastest, text + ".")


def fastest_estimate(estimates: Sequence[ExchangeEstimate]) -> ExchangeEstimate:
    """Return the estimate with the shortest step time; if several tie, the first of them."""
    return min(estimates, key=lambda each: each.step_s)


# -- how many local steps --------------------------------------------------------------------------

MAX_DENSE_LOCAL_STEPS = 32
"""Local steps with a dense exchange are recommended up to this number.  In docs/local-steps.md, `Dense()`
every 32 steps learns as well as `GTopK(density=0.03)` every 4 steps."""


def propose_for(each: ExchangeEstimate, computing: float, *, overlap: bool) -> LocalStepsProposal:
    """Propose the fewest local steps that let workers compute for the share `computing` of the time.

    Args:
        computing: the desired share, 0 < computing < 1.
    """
    return propose_local_steps(
        each.compute_s,
        each.cost.exchange_s,
        target_share=1.0 - computing,
        hidden_s=each.hideable_s if overlap else 0.0,
    )


def recommend_local_steps(estimates: Sequence[ExchangeEstimate], computing: float) -> str:
    """Return a text that recommends an exchange and a number of local steps.

    With these, workers compute for the share `computing` of the time or, if no number suffices, for as much
    of it as possible.  A dense exchange is recommended if it needs at most `MAX_DENSE_LOCAL_STEPS` steps,
    otherwise the exchange that needs the fewest.  The exchange overlaps with the next local steps, unless one
    step is enough without overlap.

    Args:
        estimates: estimates of at least one exchange, all for the same network.
        computing: the desired share, 0 < computing < 1.

    Raises:
        ConfigError: `computing` is out of range.
    """
    proposals = [[propose_for(each, computing, overlap=on) for each in estimates] for on in (False, True)]
    waiting, overlapped = ([each.every for each in proposed] for proposed in proposals)
    texts = [[_every_text(each, computing) for each in proposed] for proposed in proposals]
    names = [format_exchange(replace(each, local_steps=1)) for each in estimates]
    shown = ", ".join(f"{name} {every} ({fewer})" for name, every, fewer in zip(names, *texts, strict=True))
    workers = estimates[0].world_size
    text = (
        f"Local steps for {computing:.0%} computing with {workers} workers (in brackets: with overlap=True): "
        f"{shown}."
    )

    def preference(at: int) -> tuple[bool, int]:
        is_lossless = not estimates[at].load.kind.has_density
        return not (is_lossless and overlapped[at] <= MAX_DENSE_LOCAL_STEPS), overlapped[at]

    best = min(range(len(estimates)), key=preference)
    overlaps, every = waiting[best] > 1, overlapped[best]
    if not overlaps and not estimates[best].load.kind.has_density:
        return f"{text} AdamW does not need them here: {names[best]} takes only a small part of each step."
    share = replace(estimates[best], local_steps=every, overlapped=float(overlaps)).efficiency
    options = f"every={every}, exchange={_as_call(estimates[best].load)}"
    options += ", overlap=True" if overlaps else ""
    missed = "" if share >= computing - 0.005 else f"; {computing:.0%} would take more than {every}"
    return (
        f"{text} For AdamW and similar optimizers use LocalSteps({options}): {share:.0%} computing{missed}."
    )


def _every_text(proposal: LocalStepsProposal, computing: float) -> str:
    suffices = proposal.share <= 1.0 - computing + 1e-6
    return f"{proposal.every}" if suffices else f"over {proposal.every}"


def _as_call(load: Workload) -> str:
    """Return the expression that creates this exchange in a script."""
    options = [f"density={load.density:g}", f'values="{load.values}"'] if load.kind.is_sparse else []
    if load.is_rounded:
        options.append(f'values="{load.dense_values}"')
    exchange = load.kind.exchange
    if load.kind is not Workload.of(exchange(), 1).kind:
        options.append(f'topology="{load.kind.topology}"')
    return f"{exchange.__name__}({', '.join(options)})"


# -- in words --------------------------------------------------------------------------------------


def format_exchange(each: ExchangeEstimate) -> str:
    """Return the name of an exchange as text, for example "topk at density 0.001"."""
    kind = each.load.name
    if each.load.kind.has_density:
        kind += f" at density {each.load.density:g}"
    return f"{kind} every {each.local_steps} steps" if each.local_steps > 1 else kind
