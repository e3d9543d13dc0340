"""The tasks that a waiting training thread performs for the group, such as loading a state.

Tasks are immutable values, so two equal tasks are the same task.  For each snapshot, the I/O thread
recomputes which tasks are due, in the order of priority that `snapshot_builder` defines.  The tasks are not
queued, so no outdated task can be performed.  Three effects of the core (`DiscardCheckpoints`,
`SaveCheckpoint`, `LoadCheckpoints`) are also tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as ev


@dataclass(frozen=True, slots=True)
class DoCatchUpWork:
    """Load the received snapshot of the state, or replay received updates (`CatchUpSession.take_work`)."""


@dataclass(frozen=True, slots=True)
class ApplyMissedSteps:
    """Apply the committed steps from which the trainer was absent (`StepRounds.take_missed`).

    `last_step` is the last of these steps, so that the task changes when another step is missed.
    """

    last_step: int


@dataclass(frozen=True, slots=True)
class AddResiduals:
    """Add the residuals of workers that have left (`ResidualMailbox.take_confirmed`)."""


@dataclass(frozen=True, slots=True)
class ReadCheckpoint:
    """Read a stage checkpoint from this worker's disk for members that will load it."""

    generation: int
    checkpoint: m.CheckpointInfo


@dataclass(frozen=True, slots=True)
class LoadState:
    """Load the state that the state source has sent (`StateReceiver.take_state`).

    Attributes:
        expected_digest: the digest of the state according to the membership view; empty if the view has none.
    """

    generation: int
    expected_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class CaptureState:
    """Capture this worker's state for members that need it.

    Attributes:
        is_whole: whether to capture the whole state rather than only its first part.
    """

    generation: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class CopyStateSnapshot:
    """Copy the state after the step `after_step`, or after a later step, for workers that catch up."""

    after_step: int


WorkerTask = (
    ApplyMissedSteps
    | DoCatchUpWork
    | AddResiduals
    | ev.DiscardCheckpoints
    | ev.SaveCheckpoint
    | ReadCheckpoint
    | ev.LoadCheckpoints
    | LoadState
    | CaptureState
    | CopyStateSnapshot
)
