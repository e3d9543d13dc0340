"""The clock and the records of a training run, the same for gridtrain and rivals.

Seconds and bytes count from the first batch on, except while the held-out loss is measured.  Meanwhile all
other workers wait, and none computes or sends anything of the next step.

    step | read() | paused: the first worker measures, the others wait for it | write() | next step

    {"step": 10, "seconds": 1.9, "loss": 4.1, "held_out": 3.9, "sent_bytes": 7400000}      one line a step
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

MEASURE_EVERY = 10
"""Steps between two measurements of the held-out loss."""


class Reading(NamedTuple):
    """Time and bytes since the first batch; `sent_bytes` is None if they are unknown."""

    seconds: float
    sent_bytes: int | None


class Recorder:
    """A clock that starts at once, and the file of its records.

    Args:
        path: the file, steps.jsonl.
        count_sent: returns the bytes that have been sent; None if they are unknown.
    """

    def __init__(self, path: Path, count_sent: Callable[[], int | None]) -> None:
        self._path, self._count_sent, self._sent = path, count_sent, count_sent()
        self._began_s, self._paused_s = time.perf_counter(), 0.0

    def read(self) -> Reading:
        now, seconds = self._count_sent(), time.perf_counter() - self._began_s - self._paused_s
        return Reading(seconds, None if now is None or self._sent is None else now - self._sent)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - began_s

    def write(self, step: int, reading: Reading, loss: float, held_out: float | None) -> None:
        record = {"step": step, "seconds": reading.seconds, "loss": loss, "held_out": held_out}
        with self._path.open("a") as file:
            file.write(json.dumps(record | {"sent_bytes": reading.sent_bytes}) + "\n")
