"""Finds, signals and reaps all processes of a script, in all of its sessions.

torchrun and others start each process in a new session, which a signal to the script's process group does not
reach.  On Linux, all descendants are therefore found in /proc, by the ids of their parents.  While a script
runs, the agent is a subreaper: it adopts the descendants whose parent has ended.  It may also adopt other
processes, for example if it is the first process of a container; the script's processes are recognized by an
environment variable.  On other systems, only the process group is known.

The `watchdog` uses this file too, so it imports nothing that is slow to load or uses much memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterable

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
MAX_SEARCHES = 100
"""The maximum number of searches for processes that were started before a signal reached their parents."""

REAP_S = 1.0

Process = tuple[int, int]
"""A process id, and the time when that process started, because ids are reused."""

Found = dict[Process, tuple[int, int, str]]
"""The parent's id, the process group and the state of each process."""


class ScriptProcesses:
    """The script and its descendants, as seen by the agent, the script's parent.

    Create the object before the script is started, because the script may leave orphans at once.

    Args:
        watchdog: the process id of the watchdog, another child of the agent.
        mark: NAME=VALUE of an environment variable that only the script and its descendants have.
    """

    def __init__(self, watchdog: int, mark: str) -> None:
        self._watchdog, self._mark = watchdog, mark.encode()
        self._adopted_before = _adopts_orphans()
        _adopt_orphans(True)
        self._script = self._start = 0
        self._has_group = False
        self._next_reap_s = 0.0

    def begin(self, script: int) -> None:
        """Set the script's process id, which is also the id of its process group."""
        self._script, self._has_group = script, True
        process = read_process(script)
        self._start = process[0][1] if process else 0

    def close(self) -> None:
        """From now on, adopt orphans only if this process did so before this object was created."""
        _adopt_orphans(self._adopted_before)

    def signal(self, number: int) -> None:
        """Send signal `number` to all processes."""
        self._signal_group(number)
        signalled: set[Process] = set()
        for _ in range(MAX_SEARCHES):
            new = self._outside_group() - signalled
            if not new:
                return
            send(new, number)
            signalled |= new

    def are_alive(self) -> bool:
        """Return whether any process is running; reap those that have ended, except the script."""
        are_alive = self._signal_group(0) or bool(self._outside_group())
        self._reap()  # after the check, so that a process that ends meanwhile is reaped, too
        return are_alive

    def reap(self) -> None:
        """Reap the adopted processes that have ended, at most once every `REAP_S`."""
        now_s = time.monotonic()
        if now_s >= self._next_reap_s:
            self._next_reap_s = now_s + REAP_S
            self._reap()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return  # without a search
        found = read_processes()
        for process in self._adopted(found):
            if found[process][2] == "Z":
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process[0], os.WNOHANG)

    def _adopted(self, found: Found) -> set[Process]:
        """The agent's children that were started after the script, except those that the agent itself has
        started, which are in its own process group."""
        agent, own_group = os.getpid(), os.getpgrp()
        return {
            process
            for process, (parent, group, _) in found.items()
            if parent == agent
            and group != own_group
            and process[0] not in (self._script, self._watchdog)
            and process[1] >= self._start
        }

    def _signal_group(self, number: int) -> bool:
        """Send signal `number` to the group, unless it had ended before, because its id may be reused."""
        self._has_group = self._has_group and signal_group(self._script, number)
        return self._has_group

    def _outside_group(self) -> set[Process]:
        """The running processes that are not in the script's process group."""
        found = read_processes()
        orphans = {process for process in self._adopted(found) if self._mark in _environment(process[0])}
        everyone = with_descendants({(self._script, self._start), *orphans}, found)
        return {one for one in everyone if found[one][1] != self._script and found[one][2] not in "ZX"}


def read_processes() -> Found:
    """Return all processes; {} if /proc cannot be used."""
    with contextlib.suppress(OSError):
        if os.readlink("/proc/self") != str(os.getpid()):
            return {}  # it shows the ids of another namespace
        read = [read_process(int(name)) for name in os.listdir("/proc") if name.isdecimal()]
        return dict(one for one in read if one is not None)
    return {}


def read_process(pid: int) -> tuple[Process, tuple[int, int, str]] | None:
    """Return one process; None if it has ended, or /proc cannot be used."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()  # the name before them may contain anything
        return (pid, int(fields[19])), (int(fields[1]), int(fields[2]), fields[0].decode())
    except (OSError, IndexError, ValueError):  # the process has ended
        return None


def is_suspended(pid: int) -> bool:
    """Return whether a process is suspended, for example by Ctrl-Z; False if it has ended."""
    process = read_process(pid)
    return process is not None and process[1][2] == "T"


def is_from_script(pid: int, mark: str) -> bool:
    """Return whether a process, or one of its ancestors, was started with an environment variable that begins
    with `mark`, or is a descendant of this process; True if the process has already ended.

    If this process is the first process of a container, it also adopts what the container's owner has started
    there, so its descendants do not count.  Returns False if /proc cannot be used.
    """
    process, child = read_process(pid) if pid else None, 0
    if pid and process is None:
        return read_process(os.getpid()) is not None
    while process is not None:
        if (child and pid == os.getpid() != 1) or any(x.startswith(mark.encode()) for x in _environment(pid)):
            return True
        child, pid = pid, process[1][0]
        process = read_process(pid) if pid else None
    return False


def _environment(pid: int) -> list[bytes]:
    """Return the environment variables, NAME=VALUE, with which a process was started."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return []


def with_descendants(roots: Iterable[Process], found: Found) -> set[Process]:
    """Return those of `roots` that are in `found`, and all their descendants."""
    children: dict[int, list[Process]] = {}
    for process, (parent, _, _) in found.items():
        children.setdefault(parent, []).append(process)
    result: set[Process] = set()
    left = [process for process in roots if process in found]
    while left:
        process = left.pop()
        if process not in result:
            result.add(process)
            left += children.get(process[0], [])
    return result


def send(processes: Iterable[Process], number: int) -> None:
    """Send signal `number` to those processes that have not ended."""
    for process in processes:
        current = read_process(process[0])
        if current is not None and current[0] == process:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process[0], number)


def signal_group(group: int, number: int) -> bool:
    """Send signal `number` to the process group; return whether the group still exists."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # PermissionError: only zombies are left (macOS)
        return False
    return True


def _adopts_orphans() -> bool:
    """Return whether this process becomes the parent of descendants whose parent ends."""
    adopts = ctypes.c_int(0)
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    return bool(adopts.value)


def _adopt_orphans(adopts: bool) -> None:
    """Set whether this process becomes the parent of descendants whose parent ends."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def marked(found: Iterable[Process], mark: str) -> set[Process]:
    """Return the processes that were started with the environment variable `mark`, NAME=VALUE."""
    return {one for one in found if mark.encode() in _environment(one[0])}
