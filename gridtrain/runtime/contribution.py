"""Tracks this worker's contribution and reports it to the agent in a file.

The contribution consists of the steps that were committed, this worker's samples in them, and the bytes on
the wire.  The agent reads it from a small file, which is replaced atomically at most once a second.

    step committed --> ContributionReporter --write--> GRIDTRAIN_CONTRIBUTION --read--> agent --> volunteer

A separate thread writes the file, because writing takes milliseconds on a fast disk and may take much longer
on a slow one.  Writing would delay the step in the training thread, or votes and heartbeats in the I/O
thread.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from queue import SimpleQueue

REPORT_INTERVAL_S = 1.0
MAX_FILE_BYTES = 4096
MAX_COUNT = 1 << 63
MAX_REPEATED_STEPS = 10_000
"""Maximum number of steps by which a run can be set back without any step being counted twice."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """The contribution of one worker so far.

    Attributes:
        step: the run's next step.
        steps, samples: the number of committed steps in which this worker took part, and the number of this
            worker's samples in those steps.
        run_samples: the number of samples that all workers have processed since the run began.
        sent_bytes, received_bytes: the number of bytes on the wire, including framing.
        world_size: the number of workers that are currently training.
    """

    step: int = 0
    steps: int = 0
    samples: int = 0
    run_samples: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    world_size: int = 0

    @property
    def share(self) -> float:
        """The fraction of the run's samples so far that this worker has processed, 0 .. 1."""
        return min(1.0, self.samples / self.run_samples) if self.run_samples else 0.0

    @classmethod
    def read(cls, path: Path) -> Contribution | None:
        """Read a file that `write` has written; return None if the file is missing or invalid."""
        try:
            with path.open("rb") as file:
                body = json.loads(file.read(MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
        names = {known.name for known in fields(cls)}
        if not isinstance(body, dict) or set(body) != names:
            return None
        if not all(type(value) is int and 0 <= value < MAX_COUNT for value in body.values()):
            return None
        return cls(**body)

    def write(self, path: Path) -> bool:
        """Replace the file.  Training does not depend on it, so return False, not raise, if this fails."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            partial.write_text(json.dumps(asdict(self)), encoding="ascii")
            os.replace(partial, path)
        except OSError:
            return False
        return True


class ContributionReporter:
    """Counts the contribution and writes it at intervals.

    Args:
        path: the path of the file; None if no file is to be written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._counted: deque[tuple[int, int]] = deque(maxlen=MAX_REPEATED_STEPS)
        self._steps = self._samples = 0
        self._next_s = float("-inf")
        self._pending: SimpleQueue[Contribution | None] = SimpleQueue()  # None ends the writer's thread
        self._writer: threading.Thread | None = None

    def step_committed(self, step: int, samples: int) -> None:
        """Count a committed step in which this worker had `samples` samples.

        If this process has already counted this step or later ones, they were lost and are being repeated, so
        the earlier counts are removed.
        """
        while self._counted and self._counted[-1][0] >= step:
            self._steps -= 1
            self._samples -= self._counted.pop()[1]
        self._counted.append((step, samples))
        self._steps += 1
        self._samples += samples

    def is_due(self, now_s: float) -> bool:
        return self.path is not None and now_s >= self._next_s

    def report(self, now_s: float, run: Contribution, *, last: bool = False) -> None:
        """Pass the contribution to the writer's thread.

        Args:
            run: the contribution except for `steps` and `samples`, which this object has counted.
            last: whether to stop that thread, and to write the contribution in this call instead.
        """
        self._next_s = now_s + REPORT_INTERVAL_S
        if self.path is None:
            return
        contribution = replace(run, steps=self._steps, samples=self._samples)
        if last:
            self._end_writer()
            contribution.write(self.path)
            return
        if self._writer is None:
            self._writer = threading.Thread(
                target=self._write_pending, args=(self.path,), name="gridtrain-given", daemon=True
            )
            self._writer.start()
        self._pending.put(contribution)

    def _end_writer(self) -> None:
        if self._writer is not None:
            self._pending.put(None)
            self._writer.join()
            self._writer = None

    def _write_pending(self, path: Path) -> None:
        while (contribution := self._take_newest()) is not None:
            contribution.write(path)

    def _take_newest(self) -> Contribution | None:
        """Wait for a contribution and return the latest one; older contributions are dropped.

        Returns None when the writer's thread has to end.
        """
        newest = self._pending.get()
        while newest is not None and not self._pending.empty():
            newest = self._pending.get()
        return newest
