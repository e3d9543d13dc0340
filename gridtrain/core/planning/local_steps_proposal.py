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
from dataclasses import dataclass

from gridtrain.errors import ConfigError

MAX_LOCAL_STEPS = 512
"""The maximum number to propose.  With more local steps, the replicas differ too much: DiLoCo (arXiv
2311.08105, section 3.1) was measured with up to 2,000 steps, and its loss increased from 500 steps on."""


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
