"""Measures an operation in the same way for all rivals; imports only the standard library.

    warm-up runs, then for each repeat:
        prepare, descendants' CPU | barrier | bytes, own CPU, clock | operation | clock, CPU | barrier | bytes
        | finish

CPU time is that of this rank's process and of its live descendants (daemons, helpers).  Theirs is read before
the barrier, because reading /proc takes milliseconds that must not lie between barrier and operation.  Bytes
are counted by the kernel at this rank's interface, with all headers and retransmissions, and with the few of
the second barrier, because the last bytes of a rank may still be in its kernel when its operation ends.  If
ranks share an interface (loopback), their bytes are unknown.

An operation ends when each rank has the group's entries or sum.  `finish` adds entries to the model's vector
after the clock has stopped, as measurements of gridtrain's exchanges do not include this either.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rivals.contract import Request, Result

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_SENT_COLUMN = 8
_RECEIVED_COLUMN = 0


def _nothing() -> None: ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """One rank's operation.

    Attributes:
        operation: the measured function.
        payload_bytes: its input on this rank.
        prepare, finish: called before and after each run, outside the clock.  `finish` applies the result,
            and raises `ArithmeticError` if it is wrong.
    """

    operation: Callable[[], object]
    payload_bytes: int
    prepare: Callable[[], object] = _nothing
    finish: Callable[[], object] = _nothing


def measured(
    request: Request,
    rival: str,
    version: str,
    prepared: Prepared,
    barrier: Callable[[], object],
    note: str = "",
) -> Result:
    """Run the operation `warmup` + `repeats` times.

    Args:
        barrier: returns when all ranks have called it.
    """
    seconds: list[float] = []
    cpu_s: list[float] = []
    sent: list[int] = []
    for number in range(request.warmup + request.repeats):
        prepared.prepare()
        helpers_s = descendants_cpu_s()
        barrier()
        before_bytes, own_s = sent_bytes(request.interface), time.process_time()
        began_s = time.perf_counter()
        prepared.operation()
        took_s = time.perf_counter() - began_s
        own_s = time.process_time() - own_s
        helpers_s = descendants_cpu_s() - helpers_s
        barrier()
        bytes_now = sent_bytes(request.interface)
        prepared.finish()
        if number >= request.warmup:
            seconds.append(took_s)
            cpu_s.append(own_s + helpers_s)
            if bytes_now is not None and before_bytes is not None:
                sent.append(bytes_now - before_bytes)
    op, n, world, rank = request.op, request.n, request.world, request.rank
    return Result(rival, version, op, n, world, rank, seconds, cpu_s, sent, prepared.payload_bytes, note)


def sent_bytes(interface: str) -> int | None:
    """Return the bytes that the interface has sent; None if it is the loopback, which all ranks share."""
    return _counted(interface, _SENT_COLUMN)


def received_bytes(interface: str) -> int | None:
    """Return the bytes that the interface has received; None if it is the loopback."""
    return _counted(interface, _RECEIVED_COLUMN)


def _counted(interface: str, column: int) -> int | None:
    if interface == "lo":
        return None
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[column])
    return None


def descendants_cpu_s() -> float:
    """Return the CPU time of this process's live descendants, which the kernel counts in ticks of 10 ms."""
    children: dict[int, list[tuple[int, float]]] = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (found := _stat(path)):
            children.setdefault(found[0], []).append((int(path.name), found[1]))
    total_s, waiting = 0.0, [os.getpid()]
    while waiting:
        for pid, used_s in children.get(waiting.pop(), []):
            total_s += used_s
            waiting.append(pid)
    return total_s


def _stat(path: Path) -> tuple[int, float] | None:
    """Return the parent's pid and the CPU seconds of a process, or None if it has ended."""
    try:
        fields = (path / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[1]), (int(fields[11]) + int(fields[12])) * _TICK_S
