"""The agent's watchdog: a process that ends the script if the agent is killed, and stops it with the agent.

It is started without site-packages (see `agent`), so that it starts in a few milliseconds and uses little
memory; of this package, it imports only `script_processes`.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time

if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from gridtrain_worker.script_processes import (
    MAX_SEARCHES,
    Process,
    is_suspended,
    marked,
    read_process,
    read_processes,
    send,
    signal_group,
    with_descendants,
)

START_SEARCHES = 4
"""The number of searches for the script of an agent that was killed while it was starting the script."""

WATCH_S = 0.5


def _find_started(mark: str) -> int:
    """Return the process id of the script that the agent had started, or was starting, when it was killed; 0
    if it had not begun to start one."""
    for _ in range(START_SEARCHES):
        if started := marked(read_processes(), mark):
            return min(started, key=lambda one: one[1])[0]  # the oldest; others are its descendants
        time.sleep(WATCH_S)  # until its program begins, it has the agent's environment
    return 0


def _follow_agent(script: set[Process], mark: str, is_stopped: bool) -> bool:
    """Until stdin is readable, stop the script while the agent is stopped and therefore enforces no rules.

    After Ctrl-Z, the agent has stopped the processes itself; SIGSTOP gives it no time to do so.

    Args:
        is_stopped: whether the script is stopped because the agent was.

    Returns the new value of `is_stopped`.
    """
    agent = os.getppid()
    while not select.select([sys.stdin], [], [], WATCH_S)[0]:
        was_stopped, is_stopped = is_stopped, is_suspended(agent)
        if is_stopped or was_stopped:  # on each pass: a process may have started another one meanwhile
            found = read_processes()
            everyone = with_descendants(script | marked(found, mark), found)
            send(everyone, signal.SIGSTOP if is_stopped else signal.SIGCONT)
    return is_stopped


def watch(grace_s: float, mark: str) -> None:
    """Read the script's process id from stdin, then "done" once all its processes have ended.

    If stdin ends before that, the agent was killed: end the processes.  Until then, stop them while the agent
    is stopped.

    Args:
        mark: the environment variable, NAME=VALUE, that only this script was started with.
    """
    is_stopped = _follow_agent(set(), mark, False)  # the agent may be stopped before it writes the id
    line = sys.stdin.readline()
    script = int(line) if line else _find_started(mark)
    first = read_process(script) if script else None
    if not script:
        return
    roots = {first[0]} if first else set()
    _follow_agent(roots, mark, is_stopped)
    if sys.stdin.readline():
        return
    # Descendants are recorded while their parents live, because this process does not adopt them.
    # If they were stopped, the agent's end has sent SIGHUP to the script, which may have ended.
    found = read_processes()
    known = with_descendants(roots | marked(found, mark), found)
    has_group = signal_group(script, signal.SIGTERM)
    send(known, signal.SIGCONT)  # so that stopped processes can end in an orderly way
    until_s = time.monotonic() + grace_s
    for _ in range(math.ceil(grace_s / WATCH_S) + MAX_SEARCHES):
        found = read_processes()
        known |= with_descendants(known, found)
        left = {one for one in known & found.keys() if found[one][2] not in "ZX"}
        is_late = time.monotonic() >= until_s
        has_group = has_group and signal_group(script, signal.SIGKILL if is_late else 0)
        if not left and (is_late or not has_group):
            return
        if is_late:
            send(left, signal.SIGKILL)
        time.sleep(WATCH_S)


if __name__ == "__main__":
    watch(float(sys.argv[1]), sys.argv[2])
