"""Counts what this worker has contributed, for the agent that supervises its script.

Counted are samples and steps that were committed, and bytes on the wire.  The agent reads a small file, which
is replaced as a whole at most once a second.

    step committed --> ContributionReporter --write--> GRIDTRAIN_CONTRIBUTION --read--> agent --> volunteer

A separate thread writes: replacing a file takes milliseconds on a good disk and any time on a bad one, which
would delay the step in the training thread, and votes and heartbeats in the I/O thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from queue import SimpleQueue

REPORT_INTERVAL_S = 1.0
MAX_FILE_BYTES = 4096
MAX_COUNT = 1 << 63


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one worker has contributed so far.

    Attributes:
        step: the run's next step.
        steps, samples: of this worker, committed.
        run_samples: of all workers since the run began.
        sent_bytes, received_bytes: on the wire, framing included.
        world_size: how many workers train now.
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
        """Part of all samples of the run so far; 0 .. 1."""
        return min(1.0, self.samples / self.run_samples) if self.run_samples else 0.0

    @classmethod
    def read(cls, path: Path) -> Contribution | None:
        """None: there is no file, or its content is not what `write` writes."""
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

    def write(self, path: Path) -> None:
        """Replace the file; errors are ignored, as training does not depend on it."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            partial.write_text(json.dumps(asdict(self)), encoding="ascii")
            os.replace(partial, path)


class ContributionReporter:
    """Counts, and writes at intervals.

    Args:
        path: of the file; None: nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._steps = self._samples = 0
        self._next_s = float("-inf")
        self._pending: SimpleQueue[Contribution | None] = SimpleQueue()  # None: no more
        self._writer: threading.Thread | None = None

    def step_committed(self, samples: int) -> None:
        """A step was committed in which this worker had so many samples."""
        self._steps += 1
        self._samples += samples

    def is_due(self, now_s: float) -> bool:
        return self.path is not None and now_s >= self._next_s

    def report(
        self,
        now_s: float,
        *,
        step: int,
        run_samples: int,
        sent_bytes: int,
        received_bytes: int,
        world_size: int,
        last: bool = False,
    ) -> None:
        """Have it written.  `last`: it is written when this returns."""
        self._next_s = now_s + REPORT_INTERVAL_S
        if self.path is None:
            return
        contribution = Contribution(
            step, self._steps, self._samples, run_samples, sent_bytes, received_bytes, world_size
        )
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
        """Of several that wait for a slow disk, only the latest is written."""
        newest = self._pending.get()
        while newest is not None and not self._pending.empty():
            newest = self._pending.get()
        return newest
