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

import time
from collections.abc import Callable
from dataclasses import dataclass

from procfs import descendants_cpu_s, sent_bytes
from rivals.contract import Request, Result


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
    sent: list[float] = []
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
