"""The clock and the file of a training run, one for ours and rivals alike.

Decides what counts as a run's seconds and bytes: all since the first batch, but for what happens while the
clock stands still.  It stands still from before the held-out loss is measured until everybody goes on, and
everybody else waits for that: nobody computes the next step, nor sends of it, while the clock stands.

    step | read() | standing_still: the first measures, the others wait for it | write() | next step

    {"step": 10, "seconds": 1.9, "loss": 4.1, "held_out": 3.9, "sent_bytes": 7400000}      one line a step
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rivals.measure import sent_bytes


class Reading(NamedTuple):
    """`sent_bytes`: since the first batch, headers included; None: others' bytes are counted there too."""

    seconds: float
    sent_bytes: int | None


class Recorder:
    """The clock runs from its making on.

    Args:
        path: of steps.jsonl.
        interface: whose bytes count.
    """

    def __init__(self, path: Path, interface: str) -> None:
        self._path, self._interface, self._sent = path, interface, sent_bytes(interface)
        self._began_s, self._stood_s = time.perf_counter(), 0.0

    def read(self) -> Reading:
        now, seconds = sent_bytes(self._interface), time.perf_counter() - self._began_s - self._stood_s
        return Reading(seconds, None if now is None or self._sent is None else now - self._sent)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._stood_s += time.perf_counter() - began_s

    def write(self, step: int, reading: Reading, loss: float, held_out: float | None) -> None:
        record = {"step": step, "seconds": reading.seconds, "loss": loss, "held_out": held_out}
        with self._path.open("a") as file:
            file.write(json.dumps(record | {"sent_bytes": reading.sent_bytes}) + "\n")
