"""Decides how much this worker's gradient counts in a step, by samples or by tokens (`grid.weigh`).

    samples   `begin_micro_batch` weights the micro-batches; the step's plan already counts samples
    tokens    `add` (grid.weigh) weights the micro-batches; `plan_by_counts` makes the plan count tokens

Gradients are scaled before the script can clip them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gridtrain.config import Auto, Exchange, LocalSteps, Overlap
from gridtrain.errors import ConfigError
from gridtrain.runtime.group_session import GroupSession
from gridtrain.runtime.mailbox.step_plan import StepPlan
from gridtrain.training.checkpoint.flat_gradient import FlatGradient

_MAX_COUNTED = 1 << 31  # tokens of a micro-batch; sums of all members' counts are exact in float64


class BatchWeights:
    """The weights of this worker's micro-batches in a turn, and of its batch in the group.

    Attributes:
        weigh_by: "samples" or "tokens".
    """

    def __init__(self, weigh_by: str, flat: FlatGradient, session: GroupSession) -> None:
        self.weigh_by, self._flat, self._session = weigh_by, flat, session
        self._counts: list[float] = []  # one per call to `add` since the latest call to `step`
        self._counted = 0.0  # in this turn, up to the latest call to `step`
        self._fraction = 1.0  # the weight of each sample of the current micro-batch

    def begin_turn(self) -> None:
        self._counts, self._counted = [], 0.0

    def begin_micro_batch(self, number: int, weights: Sequence[float]) -> None:
        """Begin a micro-batch: scale the accumulated gradient, so that each micro-batch has its weight.

        The script divides the loss of each micro-batch by the number of micro-batches.  The remaining factor
        is applied when `step` gathers the gradient.  It is at most 1 if the weights never increase, so that a
        clipped gradient stays clipped.  In a run whose steps are weighted by tokens, `add` scales the
        gradients instead.

        Args:
            number: the index of the micro-batch in its step.
            weights: the weights of all micro-batches of the step.
        """
        self._fraction = min(1.0, weights[number])  # below 1 for a sample that is in several micro-batches
        if self.weigh_by == "samples":
            self._flat.rescale(weights[number - 1] / weights[number] if number else 1.0)
            self._flat.scale = len(weights) * weights[-1] / math.fsum(weights)

    def add(self, count: int) -> int:
        """Weight this worker's batch, or its next micro-batch, by `count` instead of by the number of
        its samples; return the number of calls to `add` since the latest call to `step`.

        Raises:
            ConfigError: steps are weighted by samples, or `count` is not in the permitted range.
        """
        if self.weigh_by == "samples":
            raise ConfigError(
                "grid.weigh was called in a run whose steps are weighted by samples",
                remedy='pass grid.optimizer(..., weigh_by="tokens") on all workers',
            )
        if not 0 <= count <= _MAX_COUNTED:
            raise ConfigError(
                f"the weight of a batch is {count}; it must be from 0 to {_MAX_COUNTED}",
                remedy="pass the number of tokens over which the loss is averaged",
            )
        self._counts.append(count * self._fraction)
        # The gradient is the weighted mean after each backward pass, so that a loop can clip it.
        number, total = len(self._counts), sum(self._counts)
        share = self._counts[-1] / total if total else 0.0
        if number > 1:
            self._flat.rescale(number / (number - 1) * (1.0 - share))
        self._flat.scale_backward(number * share)
        return number

    def announce(self) -> None:
        """Send the sum of this worker's counts in this turn to the other members."""
        self._session.announce_weight(round(self._counted + sum(self._counts)))

    def take(self, has_samples: bool = True) -> None:
        """Add the counts since the latest call to `step` to the turn's counts.  Call this method in `step`.

        Args:
            has_samples: whether the batch has samples; the counts of a stand-in are dropped.

        Raises:
            ConfigError: steps are weighted by tokens, but no count was added since the latest call to `step`.
        """
        if self.weigh_by == "samples":
            return
        if not self._counts:
            error = ConfigError(
                "optimizer.step() was called for a batch without a weight",
                remedy="call grid.weigh(tokens) for each batch before optimizer.step(), as GridTrainer and "
                'GridSFTTrainer do, or use weigh_by="samples"',
            )
            self._session.close(error.reason)  # so that other workers do not wait for this script's end
            raise error
        self._counted += sum(self._counts) if has_samples else 0.0
        self._counts.clear()
        self._flat.scale_backward(1.0)

    def plan_by_counts(self, plan: StepPlan) -> StepPlan:
        """Wait for the other members' counts, and return the plan with counted tokens in place of samples.
        Returns `plan` itself if steps are weighted by samples, or if a member's count does not arrive in
        time."""
        if self.weigh_by == "samples":
            return plan
        count = round(self._counted) if plan.samples else 0
        total = self._session.total_weight(plan, count)
        return plan if total is None else replace(plan, samples=count, total_samples=total)

    def end_step(self) -> None:
        """Discard the turn's counts at the end of its step."""
        self._counted = 0.0


def check_weighting(
    weigh_by: str, exchange: Exchange | LocalSteps | Auto, overlap: Overlap | None, wait: str
) -> None:
    """Raise `ConfigError` if `weigh_by` is unknown, or cannot be combined with the other arguments."""
    if weigh_by not in ("samples", "tokens"):
        raise ConfigError(
            f"weigh_by is {weigh_by!r}; it must be 'samples' or 'tokens'", remedy='use weigh_by="samples"'
        )
    if weigh_by == "samples":
        return
    misfits = {
        "LocalSteps(overlap=...)": isinstance(exchange, LocalSteps) and exchange.overlap,
        "overlap=": overlap is not None,
        'wait="auto"': wait != "all",
    }
    for name, is_used in misfits.items():
        if is_used:
            raise ConfigError(
                f'weigh_by="tokens" was set with {name}, but weighting by '
                "tokens needs the counts of all workers before a gradient is sent",
                remedy=f'remove {name}, or use weigh_by="samples"',
            )
