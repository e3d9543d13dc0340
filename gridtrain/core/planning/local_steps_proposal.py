"""Proposes the number of local steps between two exchanges: the value of `LocalSteps(every=)`.

    | step | step | ... | step | exchange |        turn_s = every * step_s + exchange_s
    '------- every times ------'

    | select | step | step | ... | step |            turn_s = blocking_s + max(every * step_s, hidden_s)
             | send, receive, merge |                overlap=True, where exchange_s = blocking_s + hidden_s

    share = 1 - every * step_s / turn_s              the share of the time in which a worker does not compute

With overlap, `blocking_s` is the part of the exchange before the next local steps can begin, and `hidden_s`
the part that may overlap with them.  The number is only a proposal: all workers of a run need the same
number, so the script sets it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gridtrain.config import Auto
from gridtrain.core.planning.exchange_facts import LocalStepsFacts
from gridtrain.core.planning.exchange_recommendation import ExchangeEstimate, format_exchange
from gridtrain.core.planning.workload import Workload
from gridtrain.errors import ConfigError

MAX_LOCAL_STEPS = 512
"""The maximum number to propose.  With more local steps, the replicas differ too much: DiLoCo (arXiv
2311.08105, section 3.1) was measured with up to 2,000 steps, and its loss increased from 500 steps on."""

MAX_DENSE_LOCAL_STEPS = 32
"""Local steps with a dense exchange are recommended up to this number.  In docs/local-steps.md, `Dense()`
every 32 steps learns as well as `GTopK(density=0.03)` every 4 steps."""

LOCAL_STEPS_COMPUTE_SHARE = 0.5
"""If computation takes less than this share of a step, the coordinator's choice comes with the advice to use
local steps."""


@dataclass(frozen=True, slots=True)
class LocalStepsProposal:
    """A proposed number of local steps.

    Attributes:
        every: the number of steps for `LocalSteps(every=...)`.
        share: the share of the time in which the slowest worker does not compute, 0 .. 1.
        reason: the reason for the proposal, as text.
    """

    every: int
    share: float
    reason: str


def propose_local_steps(
    step_s: float,
    exchange_s: float,
    *,
    target_share: float = 0.1,
    most: int = MAX_LOCAL_STEPS,
    hidden_s: float = 0.0,
) -> LocalStepsProposal:
    """Propose the fewest steps for which exchanges take at most `target_share` of the time.

    A model learns better with fewer local steps.  If more than `most` steps
    would be needed, `most` is proposed.

    Args:
        step_s: time of one optimizer step on the slowest worker (`optimizer.timings["computing_s"]`).
        exchange_s: exchange time on the slowest link, measured or predicted, in seconds.
        target_share: the largest acceptable share of the time for exchanges, 0 < target_share < 1.
        most: the maximum number to propose.
        hidden_s: the part of `exchange_s` that may overlap with the next steps: 0 without overlap; with
            `LocalSteps(overlap=True)`, all of it except the time for selection.

    Raises:
        ConfigError: an argument is out of range.
    """
    for name, value, least in (("step_s", step_s, 1e-9), ("exchange_s", exchange_s, 0.0)):
        if not least <= value < math.inf:
            raise ConfigError(
                f"{name} is {value}; it must be a finite number of seconds and at least {least:g}",
                remedy="measure a few steps of the run and pass their mean time in seconds",
            )
    if not 0.0 <= hidden_s <= exchange_s:
        raise ConfigError(
            f"hidden_s is {hidden_s}; it must be between 0 and exchange_s, which is {exchange_s}",
            remedy="pass the part of exchange_s that overlaps with computing, 0.0 if none does",
        )
    if not 0.0 < target_share < 1.0:
        raise ConfigError(
            f"target_share is {target_share}; it must be > 0 and < 1", remedy="use target_share=0.1"
        )
    if most < 1:
        raise ConfigError(f"most is {most}; it must be >= 1", remedy=f"use most={MAX_LOCAL_STEPS}")
    blocking_s = exchange_s - hidden_s
    wanted = max(exchange_s, blocking_s / target_share) * (1.0 - target_share) / step_s
    every = min(max(1, math.ceil(wanted - 1e-9)), most)  # 4.000000000001 is 4
    turn_s = blocking_s + max(every * step_s, hidden_s)
    share = (turn_s - every * step_s) / turn_s
    hidden = f", of which {hidden_s:.3g} s may overlap with computing" if hidden_s else ""
    reason = f"a step takes {step_s:.3g} s and an exchange takes {exchange_s:.3g} s{hidden}; with {every} "
    if every == 1:
        reason += f"step between two exchanges, exchanges take only {share:.1%} of the time"
    elif wanted > most:
        reason += (
            f"steps between two exchanges, the largest number proposed, exchanges still take {share:.1%} of "
            f"the time instead of {target_share:.1%}; a sparser exchange would take less"
        )
    else:
        reason += (
            f"steps between two exchanges, exchanges take {share:.1%} of the time, at most {target_share:.1%}"
        )
    return LocalStepsProposal(every, share, reason)


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


def advise_local_steps(best: ExchangeEstimate, auto: Auto, local: LocalStepsFacts | None) -> str:
    """Return advice to use local steps, or more of them; "" if computation takes at least
    `LOCAL_STEPS_COMPUTE_SHARE` of a step of the run.

    Local steps are only recommended: they change what is optimized, so only the script may choose them.
    """
    if best.efficiency >= LOCAL_STEPS_COMPUTE_SHARE:
        return ""
    every, hidden_s = local.every if local is not None else 1, best.hideable_s if best.overlapped else 0.0
    proposed = propose_local_steps(
        best.compute_s / every, best.cost.exchange_s, target_share=1.0 - auto.computing, hidden_s=hidden_s
    )
    what = (
        "" if auto.sparse else "; with exchange=Auto() in LocalSteps, this optimizer can use sparse exchanges"
    )
    return (
        f"; only {best.efficiency:.0%} of a step is spent computing: "
        f"LocalSteps(every={proposed.every}{', overlap=True' if best.overlapped else ''}) "
        f"in the script would raise this to {1.0 - proposed.share:.0%}{what}"
    )
