"""How many optimizer steps a worker takes alone between two exchanges (`gridtrain.LocalSteps`).

    | step | step | ... | step | exchange |        share = exchange_s / (every * step_s + exchange_s)
    '------- every times ------'

The number is a proposal: all workers of a run need the same, so the script sets it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gridtrain.errors import ConfigError

MOST_LOCAL_STEPS = 512
"""With more steps alone the replicas diverge: DiLoCo (arXiv 2311.08105, section 3.1) was measured up to 2,000
steps, and got worse from 500 on."""


@dataclass(frozen=True, slots=True)
class LocalStepsProposal:
    """A number of local steps.

    Attributes:
        every: for `LocalSteps(every=...)`.
        share: of the time that exchanges then take, 0 .. 1.
        reason: in words.
    """

    every: int
    share: float
    reason: str


def propose_local_steps(
    step_s: float, exchange_s: float, *, target_share: float = 0.1, most: int = MOST_LOCAL_STEPS
) -> LocalStepsProposal:
    """The fewest steps with which exchanges take at most `target_share` of the time: fewer steps learn
    better.

    Args:
        step_s: seconds of one optimizer step on the slowest worker (`optimizer.timings["computing_s"]`).
        exchange_s: seconds of one exchange on the slowest link, measured or predicted.
        target_share: 0 < target_share < 1.
        most: the largest number to propose.

    Raises:
        ConfigError: an argument is out of range.
    """
    for name, value, least in (("step_s", step_s, 1e-9), ("exchange_s", exchange_s, 0.0)):
        if not least <= value < math.inf:
            raise ConfigError(
                f"{name} is {value}; it must be a finite number of seconds, at least {least:g}",
                remedy="measure some steps of the run, in seconds",
            )
    if not 0.0 < target_share < 1.0:
        raise ConfigError(
            f"target_share is {target_share}; it must be > 0 and < 1", remedy="try target_share=0.1"
        )
    if most < 1:
        raise ConfigError(f"most is {most}; it must be >= 1", remedy=f"try most={MOST_LOCAL_STEPS}")
    wanted = exchange_s * (1.0 - target_share) / (target_share * step_s)
    every = min(max(1, math.ceil(wanted - 1e-9)), most)  # 4.000000000001 is 4
    share = exchange_s / (every * step_s + exchange_s)
    reason = f"a step takes {step_s:.3g} s and an exchange {exchange_s:.3g} s; with {every} "
    if every == 1:
        reason += f"the exchange takes {share:.1%} of the time, so there is nothing to save"
    elif wanted > most:
        reason += (
            f"steps between two exchanges, the most that is proposed, these still take {share:.1%} of the "
            f"time, and not {target_share:.1%}: a sparser exchange would help"
        )
    else:
        reason += (
            f"steps between two exchanges these take {share:.1%} of the time, at most {target_share:.1%}"
        )
    return LocalStepsProposal(every, share, reason)
