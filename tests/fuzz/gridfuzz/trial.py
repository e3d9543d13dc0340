"""Runs one input and checks it.

A finding is an exception that is not allowed, too much CPU time, too much memory, or no end.  An input that
takes too long is run twice more before it counts, because a garbage collection may happen during any input.

    run(data) -> accepted, refused, or Finding
"""

from __future__ import annotations

import mmap
import re
import resource
import signal
import time
import traceback
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from gridfuzz.targets.base import Target

HANG_S = 10.0
RSS_STEP_KIB = 16 << 10
MEASURED_EVERY = 32
"""Memory is measured exactly for one input in so many, and for each with which the process grows."""

PRODUCT = ("/gridtrain/", "/gridtrain_coordinator/", "/gridtrain_worker/")


class Hang(BaseException):
    """The input did not end in time.  A BaseException, so that the product does not catch it."""


@dataclass(frozen=True)
class Finding:
    """`signature` is equal for inputs that show the same fault: the exception, and where it was raised."""

    target: str
    signature: str
    data: bytes
    text: str


@dataclass
class Trial:
    """Runs the inputs of one target, counts them, and stores one finding of each signature."""

    target: Target
    current: Path | None = None  # the current input is written there, in case the process dies
    measured_every: int = MEASURED_EVERY
    inputs: int = 0
    accepted: int = 0
    findings: dict[str, Finding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._peak_kib = _peak_kib()
        self._slot: mmap.mmap | None = None
        if self.current is not None:
            self.current.write_bytes(bytes(8 + self.target.max_bytes))
            with self.current.open("r+b") as file:
                self._slot = mmap.mmap(file.fileno(), 0)
        # CPU time of this process, so that other processes cannot make an input a hang.
        signal.signal(signal.SIGVTALRM, _on_alarm)

    def one(self, data: bytes) -> Finding | None:
        data = data[: self.target.max_bytes]
        if self._slot is not None:
            self._slot[: 8 + len(data)] = len(data).to_bytes(8, "little") + data
        self.inputs += 1
        finding, accepted = self._watched(data)
        self.accepted += accepted
        if finding is not None:
            self.findings.setdefault(finding.signature, finding)
        return finding

    def _watched(self, data: bytes) -> tuple[Finding | None, bool]:
        accepted, error, took_s = self._timed(data)
        if error is not None:
            return self._raised(data, error), False
        limit_s = self.target.cpu_s
        if took_s > limit_s:
            took_s = min(took_s, *(self._timed(data)[2] for _ in range(2)))
            if took_s > limit_s:
                text = f"took {took_s * 1e3:.0f} ms of CPU time, {limit_s * 1e3:.0f} ms are allowed"
                return Finding(self.target.name, "too slow", data, text), accepted
        grown = (peak_kib := _peak_kib()) - self._peak_kib > RSS_STEP_KIB
        if grown:
            self._peak_kib = peak_kib
        if grown or self.inputs % self.measured_every == 0:
            used = self._measured(data)
            if used > self.target.memory_bytes:
                text = f"allocated {used >> 20} MiB, {self.target.memory_bytes >> 20} MiB are allowed"
                return Finding(self.target.name, "too much memory", data, text), accepted
        return None, accepted

    def _timed(self, data: bytes) -> tuple[bool, BaseException | None, float]:
        signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
        began_s = time.process_time()
        try:
            return self.target.run(data), None, time.process_time() - began_s
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # any exception is a finding
            return False, error, 0.0
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _raised(self, data: bytes, error: BaseException) -> Finding:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if any(part in f.filename for part in PRODUCT)] or frames
        where = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "?"
        what = f"{type(error).__name__} in {where}"
        if type(error).__name__ == "Broken":
            what = "Broken: " + re.sub(r"\d+", "0", str(error).split(":")[0])
        text = "".join(traceback.format_exception(error, limit=-12))
        return Finding(self.target.name, what, data, text)

    def _measured(self, data: bytes) -> int:
        tracemalloc.start()
        try:
            self._timed(data)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def interrupted(slot: Path) -> bytes:
    """The input during which a process died."""
    raw = slot.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return raw[8 : 8 + size]


def minimised(target: Target, finding: Finding, tries: int = 4000) -> Finding:
    """A shorter input with the same signature, by omitting pieces and then by simpler bytes."""
    trial, best = Trial(target, measured_every=1), finding

    def shows(data: bytes) -> bool:
        nonlocal best
        found = trial.one(data)
        if found is not None and found.signature == finding.signature:
            best = found
            return True
        return False

    size = max(1, len(best.data) // 2)
    while trial.inputs < tries:
        at, shrunk = 0, False
        while at < len(best.data) and trial.inputs < tries:
            if shows(best.data[:at] + best.data[at + size :]):
                shrunk = True
            else:
                at += size
        if size == 1 and not shrunk:
            break
        size = size if shrunk else max(1, size // 2)
    for at in range(len(best.data)):
        if trial.inputs < tries and best.data[at]:
            shows(best.data[:at] + b"\0" + best.data[at + 1 :])
    return best


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _on_alarm(number: int, frame: FrameType | None) -> Any:
    raise Hang(f"no end within {HANG_S:.0f} s of CPU time")
