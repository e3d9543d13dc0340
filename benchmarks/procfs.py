"""Figures of processes, processors and interfaces that the kernel keeps in /proc.

It imports only the standard library, because the interpreters of other systems run it, too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_RECEIVED, _SENT = 0, 8
"""Columns of an interface's counters."""


def memory_bytes(field: str, pid: int | str = "self") -> int:
    """Return VmRSS, or VmHWM (the peak since `forget_peak`); 0 after the process's end."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def forget_peak(pid: int | str = "self") -> None:
    """Restart the measurement of VmHWM."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of the process; 0 if it has ended."""
    return found[1] if (found := _parent_and_cpu_s(Path(f"/proc/{pid}"))) else 0.0


def descendants_cpu_s() -> float:
    """Return the CPU time of this process's live descendants, which the kernel counts in ticks of 10 ms."""
    children: dict[int, list[tuple[int, float]]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (found := _parent_and_cpu_s(path)):
            children.setdefault(found[0], []).append((int(path.name), found[1]))
    total_s, waiting = 0.0, [os.getpid()]
    while waiting:
        for pid, used_s in children.get(waiting.pop(), []):
            total_s += used_s
            waiting.append(pid)
    return total_s


def _parent_and_cpu_s(path: Path) -> tuple[int, float] | None:
    try:
        fields = (path / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[1]), (int(fields[11]) + int(fields[12])) * _TICK_S


def machine_cpu_s() -> float:
    """Return the busy seconds of all cores, with those that the hypervisor took."""
    user, nice, system, _, _, irq, soft, steal = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    return sum(map(int, (user, nice, system, irq, soft, steal))) * _TICK_S


def sent_bytes(interface: str) -> int | None:
    """Return the bytes that the interface of this thread's namespace has sent, with all headers.

    None if it is the loopback, which several processes share.
    """
    return _counted(interface, _SENT)


def received_bytes(interface: str) -> int | None:
    return _counted(interface, _RECEIVED)


def _counted(interface: str, column: int) -> int | None:
    if interface == "lo":
        return None
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[column])
    return None


def in_own_process(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a new process, so that its memory is measured apart."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()
