"""How many optimizer steps a worker takes alone between two exchanges (`gridtrain.LocalSteps`).

Decides a number from measured seconds, and says why.  Measures nothing and sets nothing: all workers of a run
need the same number, so its owner writes it into the script.

    | step | step | ... | step | exchange |        share = exchange_s / (every * step_s + exchange_s)
    '------- every times ------'
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gridtrain.errors import ConfigError

MOST_LOCAL_STEPS = 512
"""Workers that train alone for longer drift apart: DiLoCo (arXiv 2311.08105, section 3.1) was measured up to
2,000 steps, and lost from 500 on."""


@dataclass(frozen=True, slots=True)
class LocalStepsProposal:
    """Attributes:
    every: for `LocalSteps(every=...)`.
    share: of the time that goes into exchanges then, 0 .. 1.
    reason: in words.
    """

    every: int
    share: float
    reason: str


def propose_local_steps(
    step_s: float, exchange_s: float, *, target_share: float = 0.1, most: int = MOST_LOCAL_STEPS
) -> LocalStepsProposal:
    """The fewest steps with which exchanges take at most `target_share` of the time: fewer learn better.

    Args:
        step_s: seconds of one optimizer step on the slowest worker (`optimizer.timings["computing_s"]`).
        exchange_s: seconds of one exchange on the slowest line, measured or predicted.
        target_share: 0 < target_share < 1.
        most: never more than this.

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
