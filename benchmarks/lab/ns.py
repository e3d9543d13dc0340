"""Makes, enters and removes named network namespaces, also those of an owner that was killed.

Only namespaces with this module's names are changed.

    gtlab-1234.56789-1-anna
          |    |     | +--- host
          |    |     +----- the owner's lab number
          |    +----------- when the owner started, in the kernel's ticks, because pids are used again
          +---------------- the owner's pid
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

FOLDER = Path("/run/netns")
PREFIX = "gtlab-"
COMMAND_TIMEOUT_S = 20.0
KILLED_S = 5.0
CLONE_NEWNET = 0x40000000
_NAME = re.compile(PREFIX + r"(\d+)\.(\d+)-\d+-.*")

T = TypeVar("T")


class LabError(Exception):
    """The lab cannot be made or used; the text says which command failed and how."""


def command(*argv: str, stdin: str = "") -> str:
    """Run a short command to its end; returns its stdout.  Raises `LabError`."""
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise LabError(f"the command {argv[0]!r} is not installed") from None
    except subprocess.TimeoutExpired:
        raise LabError(f"{' '.join(argv)}: did not end within {COMMAND_TIMEOUT_S:g} s") from None
    if done.returncode:
        given = f" (input: {stdin.strip()})" if stdin else ""
        raise LabError(f"{' '.join(argv)}: exit code {done.returncode}: {done.stderr.strip()}{given}")
    return done.stdout


def ip_batch(namespace: str, lines: Iterable[str]) -> None:
    """Run `ip` commands inside a namespace, all in one process.  Raises `LabError`."""
    command("ip", "-n", namespace, "-batch", "-", stdin="\n".join(lines) + "\n")


# -- names ---------------------------------------------------------------------------------------


def owner_tag() -> str:
    """Return the prefix of the names of this process's namespaces."""
    return f"{PREFIX}{os.getpid()}.{_started_ticks(os.getpid())}"


def _started_ticks(pid: int) -> int:
    """Return when the process started; 0 if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(stat.rpartition(")")[2].split()[19])  # the process's name may hold spaces and brackets


def existing() -> set[str]:
    """Return all named namespaces of this machine."""
    return {path.name for path in FOLDER.iterdir()} if FOLDER.is_dir() else set()


def sweep() -> list[str]:
    """Remove namespaces whose owner is dead, and their processes; return their names."""
    left = []
    for name in sorted(existing()):
        if (found := _NAME.fullmatch(name)) and _started_ticks(int(found[1])) != int(found[2]):
            left.append(name)
    remove(left)
    return left


# -- making, entering, removing ------------------------------------------------------------------


def add(name: str) -> None:
    """Make a namespace with `lo` up, IPv6 off, and no firewall between the ports of a bridge.

    Raises `LabError`.
    """
    command("ip", "netns", "add", name)
    ip_batch(name, ["link set lo up"])
    write_sysctls(
        name,
        {
            "net/ipv6/conf/all/disable_ipv6": "1",  # else each interface waits a second for its address
            "net/ipv6/conf/default/disable_ipv6": "1",
            "net/bridge/bridge-nf-call-iptables": "0",  # else a router's FORWARD rules divide its own LAN
        },
    )


def write_sysctls(namespace: str, values: dict[str, str]) -> None:
    """Write the settings that this kernel has; /proc/sys/net is that of the thread's namespace."""

    def write() -> None:
        for name, value in values.items():
            with contextlib.suppress(FileNotFoundError):
                Path("/proc/sys", name).write_text(value)

    try:
        inside(namespace, write)
    except OSError as error:
        raise LabError(f"a setting of namespace {namespace} cannot be written: {error}") from None


def inside(namespace: str, action: Callable[[], T]) -> T:
    """Call `action` in a thread inside the namespace; sockets that it makes remain there.

    Raises what `action` raises, and `LabError` if the namespace cannot be entered.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            _enter(namespace)
            results.append(action())
        except BaseException as error:  # raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name=f"inside-{namespace}", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _enter(namespace: str) -> None:
    """Enter the namespace with the calling thread alone (`os.setns` exists from Python 3.12 on)."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        handle = os.open(FOLDER / namespace, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise LabError(f"namespace {namespace} cannot be entered: {error.strerror}") from None
    try:
        if libc.setns(handle, CLONE_NEWNET):
            raise LabError(f"namespace {namespace} cannot be entered: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(handle)


def remove(names: Sequence[str]) -> None:
    """Kill the processes in these namespaces, then remove those that still exist."""
    for name in names:
        _kill_inside(name)
    for name in names:
        with contextlib.suppress(LabError):
            command("ip", "netns", "del", name)
    if still := sorted(set(names) & existing()):
        raise LabError(f"these namespaces cannot be removed: {', '.join(still)}")


def _kill_inside(name: str) -> None:
    """Kill the processes in the namespace, which would keep it without a name."""
    until_s = time.monotonic() + KILLED_S
    pids: set[int] = set()
    # A dying process leaves the namespace a moment before it is dead.
    while pids := {*_pids_inside(name), *filter(alive, pids)}:
        if time.monotonic() > until_s:
            raise LabError(f"processes {sorted(pids)} in namespace {name} survive SIGKILL for {KILLED_S:g} s")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _pids_inside(name: str) -> list[int]:
    """Return the processes in the namespace, except this one, of which a thread may be in it."""
    try:
        listed = command("ip", "netns", "pids", name).split()
    except LabError:
        return []
    return [pid for pid in map(int, listed) if pid != os.getpid() and alive(pid)]


def alive(pid: int) -> bool:
    """Return whether the process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
