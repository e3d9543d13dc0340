"""Where a worker's two threads meet: the trainer's, and the loop's, which owns the transport and the core.

Decides who is woken, and when.  Never looks into a command, never touches the core, and of the transport
nothing but its bell.

    trainer's thread                                       the loop's thread
      command, bring --- commands, in order ------------->   commands()
      wait, look     <-- Picture, or what ended the loop --  show(picture), fail(error)
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

from gridtrain.core.group import member_events as io
from gridtrain.errors import GridtrainError
from gridtrain.runtime.mailbox.worker_snapshot import WorkerSnapshot


class Mailbox:
    """See the module's text.

    Args:
        ring: gets the loop's thread out of its wait for the network; called from any thread.

    Attributes:
        changed: guards all that both threads touch, here and in the parts of the driver.
        picture: the latest one.
        stale: the picture may have to change.
        stopping: the trainer wants the loop to end.
        error: what ended the loop.
        progress: grows when something has moved; `inside`: the trainer waits in one of our calls.
        wanted_elsewhere: whether the trainer is, asked while it waits.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self.condition = threading.Condition()
        self.snapshot = WorkerSnapshot()
        self.is_stale = True
        self.is_stopping = False
        self.error: BaseException | None = None
        self.progress = 0
        self.is_trainer_waiting = False
        self.should_interrupt: Callable[[], bool] = lambda: False
        self._wake_loop = ring
        self._commands: deque[io.MemberEvent] = deque()
        self._wait_condition: Callable[[WorkerSnapshot], bool] | None = (
            None  # the trainer sleeps until that is so
        )

    # -- the trainer's thread --------------------------------------------------------------------

    def wait(
        self, ready: Callable[[WorkerSnapshot], bool], timeout_s: float = math.inf
    ) -> WorkerSnapshot | None:
        """Block until `ready(picture)`; None on time-out.  Raises what stopped the loop."""
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
        """Raises what stopped the loop."""
        with self.condition:
            if self.error is not None:
                raise self.error
            return self.snapshot

    def submit(self, event: io.MemberEvent) -> None:
        """For the core."""
        with self.condition:
            self._commands.append(event)
        self.mark_stale()

    def submit_payload(self, event: io.AddCollectives | io.SubmitRound) -> None:
        """As `command`, with what changes no picture as long as the round goes its way."""
        with self.condition:
            self._commands.append(event)
        self._wake_loop()

    def mark_stale(self) -> None:
        """The picture has to change, or the loop has something to do; from any thread."""
        self.is_stale = True
        self._wake_loop()

    def stop(self) -> None:
        """The loop is to end, once it has done what was brought before."""
        with self.condition:
            self.is_stopping = True
        self.mark_stale()

    # -- the loop's thread -----------------------------------------------------------------------

    def take_commands(self) -> deque[io.MemberEvent]:
        """What was brought since, in order."""
        with self.condition:
            commands, self._commands = self._commands, deque()
        return commands

    def publish(self, picture: WorkerSnapshot, *, anyway: bool = False) -> None:
        """Wake the trainer if the picture is another one, or `anyway`."""
        with self.condition:
            if not anyway and picture == self.snapshot:
                return
            self.snapshot = picture
            self.notify_trainer()

    def notify_trainer(self) -> None:
        """Locked.  Not for what the trainer does not wait for, such as what it sent itself."""
        if self._wait_condition is None or self._wait_condition(self.snapshot):
            self.condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """The loop has ended with this; the trainer is told at its next call."""
        with self.condition:
            self.error = error
            self.condition.notify_all()
