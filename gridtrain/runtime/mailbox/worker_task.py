"""Tasks that the training thread does for the group while it waits, in a `WorkerSnapshot`.

A task is a value: equal tasks are the same task.  The I/O thread recomputes the tasks that are due for each
snapshot, in the order of priority of `snapshot_builder`; there is no queue that could hold an outdated task.
Three effects of the core (`DiscardCheckpoints`, `SaveCheckpoint`, `LoadCheckpoints`) are tasks as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from gridtrain.core import messages as m
from gridtrain.core.group import member_events as io


@dataclass(frozen=True, slots=True)
class DoCatchUpWork:
    """Load the snapshot, or replay the updates, that have arrived (`CatchUpSession.take_work`)."""


@dataclass(frozen=True, slots=True)
class AddResiduals:
    """Add the residuals of workers that have left (`ResidualExchange.take_confirmed`)."""


@dataclass(frozen=True, slots=True)
class ReadCheckpoint:
    """Read a stage checkpoint from the disk for members that begin from it."""

    generation: int
    checkpoint: m.CheckpointInfo


@dataclass(frozen=True, slots=True)
class LoadState:
    """Load the state that the state source has sent (`StateReceiver.take_state`).

    Attributes:
        expected_digest: of the state, as the membership view has it; empty: not known.
    """

    generation: int
    expected_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class CaptureState:
    """Capture this worker's state for members that lack it: the whole, or its first part."""

    generation: int
    is_whole: bool


@dataclass(frozen=True, slots=True)
class CopySnapshot:
    """Copy the state after this step, or a later one, for workers that catch up."""

    after_step: int


WorkerTask = (
    DoCatchUpWork
    | AddResiduals
    | io.DiscardCheckpoints
    | io.SaveCheckpoint
    | ReadCheckpoint
    | io.LoadCheckpoints
    | LoadState
    | CaptureState
    | CopySnapshot
)
