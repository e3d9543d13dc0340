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

from gridtrain.errors import GridtrainError
from gridtrain.protocol import member_io as io
from gridtrain.runtime.picture import Picture


class Meeting:
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
        self.changed = threading.Condition()
        self.picture = Picture()
        self.stale = True
        self.stopping = False
        self.error: BaseException | None = None
        self.progress = 0
        self.inside = False
        self.wanted_elsewhere: Callable[[], bool] = lambda: False
        self._ring = ring
        self._commands: deque[io.Event] = deque()
        self._awaited: Callable[[Picture], bool] | None = None  # the trainer sleeps until that is so

    # -- the trainer's thread --------------------------------------------------------------------

    def wait(self, ready: Callable[[Picture], bool], timeout_s: float = math.inf) -> Picture | None:
        """Block until `ready(picture)`; None on time-out.  Raises what stopped the loop."""
        until_s = time.monotonic() + timeout_s
        with self.changed:
            self.inside = True
            self.progress += 1
            try:
                while not ready(self.picture):
                    if self.error is not None:
                        raise self.error
                    if self.stopping:
                        raise GridtrainError("this worker has left the run: its grid was closed")
                    left_s = until_s - time.monotonic()
                    if left_s <= 0:
                        return None
                    self._awaited = ready
                    self.changed.wait(min(left_s, 1.0))  # bounded, so that Ctrl-C is noticed
                return self.picture
            finally:
                self.inside, self._awaited = False, None
                self.progress += 1

    def look(self) -> Picture:
        """Raises what stopped the loop."""
        with self.changed:
            if self.error is not None:
                raise self.error
            return self.picture

    def command(self, event: io.Event) -> None:
        """For the core."""
        with self.changed:
            self._commands.append(event)
        self.stir()

    def bring(self, event: io.Extend | io.Submit) -> None:
        """As `command`, with what changes no picture as long as the round goes its way."""
        with self.changed:
            self._commands.append(event)
        self._ring()

    def stir(self) -> None:
        """The picture has to change, or the loop has something to do; from any thread."""
        self.stale = True
        self._ring()

    def stop(self) -> None:
        """The loop is to end, once it has done what was brought before."""
        with self.changed:
            self.stopping = True
        self.stir()

    # -- the loop's thread -----------------------------------------------------------------------

    def commands(self) -> deque[io.Event]:
        """What was brought since, in order."""
        with self.changed:
            commands, self._commands = self._commands, deque()
        return commands

    def show(self, picture: Picture, *, anyway: bool = False) -> None:
        """Wake the trainer if the picture is another one, or `anyway`."""
        with self.changed:
            if not anyway and picture == self.picture:
                return
            self.picture = picture
            self.wake()

    def wake(self) -> None:
        """Locked.  Not for what the trainer does not wait for, such as what it sent itself."""
        if self._awaited is None or self._awaited(self.picture):
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The loop has ended with this; the trainer is told at its next call."""
        with self.changed:
            self.error = error
            self.changed.notify_all()
