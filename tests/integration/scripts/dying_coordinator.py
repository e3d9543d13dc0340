"""A coordinator that kills itself by SIGKILL at an exact point.

    dying_coordinator.py before|after|sent N coordinator ...

`before`: when it is about to make its N-th journal transaction durable; `after`: when that is durable, and
nothing of it was sent yet; `sent`: when all messages of that turn were sent.  The rest is the real command.
"""

from __future__ import annotations

import os
import signal
import sys

from gridtrain.cli.main import main
from gridtrain_coordinator.daemon import Coordinator
from gridtrain_coordinator.journal.store import JournalStore

point, left = sys.argv[1], int(sys.argv[2])
append_all, carry_out = JournalStore.append_all, Coordinator._carry_out


def die(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


def append(store, entries):
    global left
    left -= 1
    die(left == 0 and point == "before")
    append_all(store, entries)
    die(left == 0 and point == "after")


def carry(coordinator, effects, failed):
    losses = carry_out(coordinator, effects, failed)
    die(left == 0 and point == "sent")
    return losses


JournalStore.append_all, Coordinator._carry_out = append, carry
main(sys.argv[3:])
