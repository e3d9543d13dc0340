"""Pipeline schedules (fill-drain, 1F1B): the order in which a stage computes its micro-batches.

Each stage executes its own list of actions, and waits if the payload of an action has not arrived.  Below, S
is the number of stages, M the number of micro-batches, and F2 the forward pass of micro-batch 2:

    fill-drain (GPipe, arXiv 1811.06965, figure 2c), S = 3, M = 4       time ->
    stage 0    F0  F1  F2  F3   .   .   .   .  B0  B1  B2  B3
    stage 1     .  F0  F1  F2  F3   .   .  B0  B1  B2  B3   .
    stage 2     .   .  F0  F1  F2  F3  B0  B1  B2  B3   .   .

    1F1B (PipeDream-Flush, arXiv 2006.09503, section 2.2): equally long; stage s keeps at most S - s
    stage 0    F0  F1  F2   .   .  B0  F3  B1   .  B2   .  B3
    stage 1     .  F0  F1   .  B0  F2  B1  F3  B2   .  B3   .
    stage 2     .   .  F0  B0  F1  B1  F2  B2  F3  B3   .   .

In both schedules, each stage runs its backward passes in ascending order.  A parameter's gradient is
therefore summed in the same order for every schedule and every number of stages (`docs/decisions/0026`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum

from gridtrain.core.messages import Channel
from gridtrain.errors import ConfigError
from gridtrain.quantities import format_count


class ActionKind(Enum):
    """The kind of an action: the forward or the backward pass of a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"


class PayloadKind(IntEnum):
    """Values of `Channel.kind` for payloads between stages; 0 stands for the exchange among replicas."""

    ACTIVATIONS = 1  # stage s to s + 1, index: the micro-batch
    GRADIENTS = 2  # stage s to s - 1, gradients of these activations, index: the micro-batch
    TIED_GRADIENTS = 3  # between the stages that hold a tied parameter, index: the tied parameter
    TIED_PARAMETERS = 4  # from the lowest of these stages to the others, index: the tied parameter


def activations_channel(micro_batch: int) -> Channel:
    return Channel(kind=PayloadKind.ACTIVATIONS, index=micro_batch)


def gradients_channel(micro_batch: int) -> Channel:
    return Channel(kind=PayloadKind.GRADIENTS, index=micro_batch)


def tied_gradients_channel(index: int) -> Channel:
    return Channel(kind=PayloadKind.TIED_GRADIENTS, index=index)


def tied_parameters_channel(index: int) -> Channel:
    return Channel(kind=PayloadKind.TIED_PARAMETERS, index=index)


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one micro-batch."""

    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}"


def divide_samples(samples: int, micro_batches: int) -> tuple[int, ...]:
    """Return the sizes of a mini-batch's micro-batches: as equal as possible, largest first, none empty.

    Seven samples in three micro-batches give (3, 2, 2).  If there are fewer samples than micro-batches, each
    sample forms a micro-batch; without samples, the result is ().

    Raises:
        ConfigError: `samples` is below 0, or `micro_batches` is below 1.
    """
    if samples < 0 or micro_batches < 1:
        raise ConfigError(
            f"{format_count(samples, 'sample')} cannot be divided into {micro_batches} micro-batches",
            remedy="use at least 1 micro-batch and at least 0 samples",
        )
    count = min(samples, micro_batches)
    return tuple(samples // count + (i < samples % count) for i in range(count))


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule; `actions[s]` contains the actions of stage s, in order."""

    name: str
    stages: int
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

    def max_in_flight(self, stage: int) -> int:
        """Return the maximum number of micro-batches whose activations this stage keeps at the same time."""
        now = most = 0
        for action in self.actions[stage]:
            now += 1 if action.kind is ActionKind.FORWARD else -1
            most = max(most, now)
        return most


def fill_drain(stages: int, micro_batches: int) -> Schedule:
    """Return the schedule of GPipe: all forward passes and then all backward passes, both in ascending order.

    Each stage keeps the activations of all micro-batches.
    """
    return _scheduled("fill-drain", stages, micro_batches, [micro_batches] * stages)


def one_forward_one_backward(stages: int, micro_batches: int, *, ahead: float = 0.0) -> Schedule:
    """Return the schedule of PipeDream-Flush, whose backward passes run as early as possible.

    Stage s keeps the activations of min(M, S - s) micro-batches if `ahead` is 0.

    Args:
        stages: S >= 1.
        micro_batches: M >= 0.
        ahead: the number of additional micro-batches in flight for each later stage.  Because a payload
            between machines takes time, the next-to-last stage would wait for each payload if `ahead` were 0
            (see `ahead_for`).  Infinity gives fill-drain.
    """
    warm_up = [
        min(micro_batches, math.ceil((stages - 1 - s) * (1 + ahead)) if s < stages - 1 else 0)
        for s in (range(stages) if not math.isinf(ahead) else ())
    ] or [micro_batches] * stages
    name = "1F1B" if not ahead else f"1F1B, {ahead:g} ahead"
    return _scheduled(name, stages, micro_batches, warm_up)


def ahead_for(forward_s: float, backward_s: float, hop_s: float) -> float:
    """Return the `ahead` that makes 1F1B as fast as fill-drain if a payload takes `hop_s` per hop.

    If h stages follow a stage, a micro-batch returns to it after (h + 1)(forward + backward) + 2 h hop
    seconds.  To have work for that time, the stage needs 2 hop / (forward + backward) additional
    micro-batches for each hop.  It needs one more for each hop, because forward and backward passes alternate
    strictly, regardless of which payload has arrived.  In a test with S <= 8, M <= 32 and hops of 0.03 to 5
    times (forward + backward), schedules without this last addition took up to 22 % longer than fill-drain;
    with the addition, they never took longer.
    """
    return 1 + 2 * hop_s / (forward_s + backward_s) if hop_s > 0 else 0.0


def _scheduled(name: str, stages: int, micro_batches: int, warm_up: Sequence[int]) -> Schedule:
    """Return a schedule in which stage s begins with `warm_up[s]` forward passes.

    Then forward and backward passes alternate until no forward pass is left; the remaining backward passes
    follow.

    Raises:
        ConfigError: `stages` is below 1, or `micro_batches` is below 0.
    """
    if stages < 1 or micro_batches < 0:
        raise ConfigError(
            f"there is no schedule for {stages} stages and {micro_batches} micro-batches",
            remedy="use at least 1 stage and at least 0 micro-batches",
        )
    everything = []
    for first in warm_up:
        actions = [Action(ActionKind.FORWARD, m) for m in range(first)]
        for m in range(first, micro_batches):
            actions += [Action(ActionKind.FORWARD, m), Action(ActionKind.BACKWARD, m - first)]
        actions += [Action(ActionKind.BACKWARD, m) for m in range(micro_batches - first, micro_batches)]
        everything.append(tuple(actions))
    return Schedule(name, stages, micro_batches, tuple(everything))
