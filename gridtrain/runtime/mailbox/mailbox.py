"""What the training thread and the I/O thread share: commands one way, snapshots the other, and one lock.

training thread                                        I/O thread
  submit, call   --- commands, in order ------------->   take_commands
  wait, read     <-- WorkerSnapshot, or an error -----   publish, fail
  finish_task    --- the task is done --------------->   (recomputes the tasks)
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from gridtrain.core.group import member_events as io
from gridtrain.errors import GridtrainError
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.mailbox.worker_task import WorkerTask

Command = io.MemberEvent | Callable[[], None]
"""An event for the core, or something that the I/O thread is to call."""


class Mailbox:
    """Commands, the latest snapshot, and the condition that guards what both threads touch.

    Args:
        wake_loop: ends the I/O thread's wait for the network; called from any thread.
        should_interrupt: whether the trainer is needed elsewhere; called while it waits.

    Attributes:
        condition: guards all that both threads touch, here and in the parts of the I/O loop.
        snapshot: the latest one.
        is_stale: the snapshot may have to change.
        is_stopping: the trainer wants the loop to end.
        error: what ended the loop.
        progress: grows when something has moved.
        is_trainer_waiting: the trainer waits in `wait`.
    """

    def __init__(
        self, wake_loop: Callable[[], None], should_interrupt: Callable[[], bool] = lambda: False
    ) -> None:
        self.condition = threading.Condition()
        self.snapshot = WorkerSnapshot()
        self.is_stale = True
        self.is_stopping = False
        self.error: BaseException | None = None
        self.progress = 0
        self.is_trainer_waiting = False
        self.should_interrupt = should_interrupt
        self._wake_loop = wake_loop
        self._commands: deque[Command] = deque()
        self._finished: set[WorkerTask] = set()  # since the loop last took commands
        self._wait_condition: Callable[[WorkerSnapshot], bool] | None = None  # of the trainer that waits

    # -- training thread -------------------------------------------------------------------------

    def wait(
        self, ready: Callable[[WorkerSnapshot], bool], timeout_s: float = math.inf
    ) -> WorkerSnapshot | None:
        """Block until `ready(snapshot)`; None on time-out.  Raises what stopped the loop."""
        until_s = time.monotonic() + timeout_s
        with self.condition:
            self.is_trainer_waiting = True
            self.progress += 1
            try:
                while not ready(self.snapshot):
                    if self.error is not None:
                        raise self.error
                    if self.is_stopping:
                        raise GridtrainError("this worker has left the run: its grid was closed")
                    left_s = until_s - time.monotonic()
                    if left_s <= 0:
                        return None
                    self._wait_condition = ready
                    self.condition.wait(min(left_s, 1.0))  # bounded, so that Ctrl-C is noticed
                return self.snapshot
            finally:
                self.is_trainer_waiting, self._wait_condition = False, None
                self.progress += 1

    def read(self) -> WorkerSnapshot:
        """The latest snapshot.  Raises what stopped the loop."""
        with self.condition:
            if self.error is not None:
                raise self.error
            return self.snapshot

    def submit(self, command: Command) -> None:
        """Have the I/O thread handle an event, or call a function, after all commands before it."""
        with self.condition:
            self._commands.append(command)
        self.mark_stale()

    def submit_payload(self, event: io.AddCollectives | io.SubmitRound) -> None:
        """As `submit`, for what changes no snapshot as long as the round succeeds."""
        with self.condition:
            self._commands.append(event)
        self._wake_loop()

    def finish_task(self, task: WorkerTask) -> None:
        """The trainer has done it, and has submitted what follows from it.

        The task is withdrawn at once; it returns if the loop finds that it is due again.
        """
        with self.condition:
            self._finished.add(task)
            self.snapshot = self._without_finished(self.snapshot)
        self.mark_stale()

    def mark_stale(self) -> None:
        """The snapshot has to change, or the loop has something to do; from any thread."""
        self.is_stale = True
        self._wake_loop()

    def stop(self) -> None:
        """The loop is to end, after the commands that were submitted before."""
        with self.condition:
            self.is_stopping = True
        self.mark_stale()

    def count_progress(self, by: int = 1) -> None:
        """Something has moved: this worker is not hung; from any thread."""
        with self.condition:
            self.progress += by

    # -- I/O thread ------------------------------------------------------------------------------

    def take_stale(self) -> bool:
        """Whether the snapshot had to change; what others change from now on counts for the next call."""
        if not self.is_stale:
            return False
        self.is_stale = False
        return True

    def take_commands(self) -> deque[Command]:
        """What was submitted since the last call, in order."""
        with self.condition:
            commands, self._commands = self._commands, deque()
            if self._finished:
                self._finished.clear()  # the commands tell the loop of what followed from them
                self.is_stale = True  # one of them may be due again
        return commands

    def publish(self, snapshot: WorkerSnapshot, *, wake: bool = False) -> None:
        """Replace the snapshot; wake the trainer if it has changed, or if `wake`.

        The snapshot was computed after the last `take_commands`: a task that was finished since then may be
        in it by mistake, and is left out.
        """
        with self.condition:
            snapshot = self._without_finished(snapshot)
            if not wake and snapshot == self.snapshot:
                return
            self.snapshot = snapshot
            self.notify_trainer()

    def notify_trainer(self) -> None:
        """Wake the trainer, unless it waits for something else.  The condition is held."""
        if self._wait_condition is None or self._wait_condition(self.snapshot):
            self.condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """The loop has ended with this; it is raised in the trainer's next call."""
        with self.condition:
            self.error = error
            self.condition.notify_all()

    def _without_finished(self, snapshot: WorkerSnapshot) -> WorkerSnapshot:
        if self._finished.isdisjoint(snapshot.tasks):
            return snapshot
        return replace(snapshot, tasks=tuple(task for task in snapshot.tasks if task not in self._finished))
