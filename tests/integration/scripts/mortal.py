"""A coordinator that SIGKILLs itself at an exact point: `mortal.py before|after N coordinator ...`.

`before`: when it is about to make its N-th journal transaction durable; `after`: when that is durable, and
nobody was told yet; `told`: when everything of that turn was sent.  All else is the real command.
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
    die(left == 0 and point == "told")
    return losses


JournalStore.append_all, Coordinator._carry_out = append, carry
main(sys.argv[3:])
