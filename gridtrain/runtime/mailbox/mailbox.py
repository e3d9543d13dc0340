"""The mailbox between the training thread and the I/O thread: commands, snapshots, wake-ups, and their lock.

training thread                                        I/O thread
  submit, call   --- commands, in order ------------->   take_commands
  wait, read     <-- WorkerSnapshot, or an error -----   publish, fail
  finish_task    --- the task is done --------------->   recomputes the tasks
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from gridtrain.core.group import member_events as ev
from gridtrain.errors import GridtrainError
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot
from gridtrain.runtime.mailbox.worker_task import WorkerTask

Command = ev.MemberEvent | Callable[[], None]
"""An event for the core, or a function for the I/O thread to call."""

WaitCondition = Callable[[WorkerSnapshot], bool]
"""Returns whether the training thread's wait is over."""


class Mailbox:
    """Holds the commands, the latest snapshot, and the condition that guards all data that both threads use.

    Args:
        wake_loop: a thread-safe function that ends the I/O thread's wait for the network.
        should_interrupt: a function that returns whether the trainer has to stop waiting; it is called while
            the trainer waits.

    Attributes:
        condition: guards all data that both threads use, in the mailbox and in the parts of the I/O loop.
        snapshot: the latest snapshot.
        is_stale: whether the snapshot may be out of date.
        is_stopping: whether the trainer has requested that the loop end.
        error: the error that ended the loop, or None.
        progress: a counter that increases whenever this worker has made progress.
        is_trainer_waiting: whether the trainer is waiting in `wait`.
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
        self._wait_condition: WaitCondition | None = None  # of the waiting trainer

    # -- training thread -------------------------------------------------------------------------

    def wait(self, ready: WaitCondition, timeout_s: float = math.inf) -> WorkerSnapshot | None:
        """Wait until `ready(snapshot)` is true; return the snapshot, or None after `timeout_s`.

        Raises the error that ended the loop, or `GridtrainError` if the loop was stopped.
        """
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
                    self.condition.wait(min(left_s, 1.0))  # bounded, so that Ctrl-C is handled
                return self.snapshot
            finally:
                self.is_trainer_waiting, self._wait_condition = False, None
                self.progress += 1

    def read(self) -> WorkerSnapshot:
        """Return the latest snapshot.  Raises the error that ended the loop."""
        with self.condition:
            if self.error is not None:
                raise self.error
            return self.snapshot

    def submit(self, command: Command) -> None:
        """Make the I/O thread handle the event or call the function `command`, after all earlier commands."""
        with self.condition:
            self._commands.append(command)
        self.mark_stale()

    def submit_payload(self, event: ev.AddCollectives | ev.SubmitRound) -> None:
        """Submit a command that does not change the snapshot unless the round fails."""
        with self.condition:
            self._commands.append(event)
        self._wake_loop()

    def finish_task(self, task: WorkerTask) -> None:
        """Record that the trainer has performed a task and has submitted the resulting commands.

        The task is removed from the snapshot immediately.  It reappears if it is still due when the I/O loop
        builds the next snapshot.
        """
        with self.condition:
            self._finished.add(task)
            self.snapshot = self._without_finished(self.snapshot)
        self.mark_stale()

    def mark_stale(self) -> None:
        """Wake the I/O loop and make it rebuild the snapshot.  Thread-safe."""
        self.is_stale = True
        self._wake_loop()

    def stop(self) -> None:
        """Make the I/O loop end after it has handled all commands submitted so far."""
        with self.condition:
            self.is_stopping = True
        self.mark_stale()

    def count_progress(self, by: int = 1) -> None:
        """Increase the progress counter, which shows peers that this worker is not hung.  Thread-safe."""
        with self.condition:
            self.progress += by

    # -- I/O thread ------------------------------------------------------------------------------

    def take_stale(self) -> bool:
        """Return whether the snapshot may be out of date, and mark it as up to date."""
        if not self.is_stale:
            return False
        self.is_stale = False
        return True

    def take_commands(self) -> deque[Command]:
        """Return the commands that were submitted since the last call, in order."""
        if not self._commands and not self._finished:  # a command added after this check wakes the loop
            return deque()
        with self.condition:
            commands, self._commands = self._commands, deque()
            if self._finished:
                self._finished.clear()  # the commands contain the results of these tasks
                self.is_stale = True  # a finished task may be due again
        return commands

    def publish(self, snapshot: WorkerSnapshot, *, wake: bool = False) -> None:
        """Replace the snapshot; wake the trainer if the snapshot has changed or `wake` is true.

        Tasks that were finished since the last `take_commands` are removed from the snapshot first.
        """
        with self.condition:
            snapshot = self._without_finished(snapshot)
            if not wake and snapshot == self.snapshot:
                return
            self.snapshot = snapshot
            self.notify_trainer()

    def notify_trainer(self) -> None:
        """Wake the trainer unless it waits for a condition that is false.  The caller holds `condition`."""
        if self._wait_condition is None or self._wait_condition(self.snapshot):
            self.condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """Record the error that ended the loop.  The trainer's next call to `wait` or `read` raises it."""
        with self.condition:
            self.error = error
            self.condition.notify_all()

    def _without_finished(self, snapshot: WorkerSnapshot) -> WorkerSnapshot:
        if self._finished.isdisjoint(snapshot.tasks):
            return snapshot
        return replace(snapshot, tasks=tuple(task for task in snapshot.tasks if task not in self._finished))
