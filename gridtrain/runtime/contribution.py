"""What this worker has given to the run, told to the agent that supervises its script.

Decides what is counted: samples and steps that committed, bytes on the wire.  Sends nothing to anybody; the
agent reads a small file, which is replaced as a whole, at most once a second.

    step committed --count--> Tally --write--> GRIDTRAIN_CONTRIBUTION --read--> agent --> the volunteer

A thread of its own writes: to replace a file takes milliseconds on a good disk, and on a bad one as long as
it likes.  The trainer would take them from its step, the loop from its votes and heartbeats.
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
    """Attributes:
    step: the run's, after the latest one.
    steps, samples: of this worker, committed.
    run_samples: of everybody since the run began.
    sent_bytes, received_bytes: on the wire, framing included.
    world_size: how many train now.
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
        """Of all samples of the run so far; 0 .. 1."""
        return min(1.0, self.samples / self.run_samples) if self.run_samples else 0.0

    @classmethod
    def read(cls, path: Path) -> Contribution | None:
        """None: there is none, or it has another form than `write` gives it."""
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
        """Replace the file; a full disk costs the news, not the training."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            partial.write_text(json.dumps(asdict(self)), encoding="ascii")
            os.replace(partial, path)


class ContributionReporter:
    """Counts, and writes now and then.

    Args:
        path: None: nobody asks, and nothing is written.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._steps = self._samples = 0
        self._next_s = float("-inf")
        self._pending: SimpleQueue[Contribution | None] = SimpleQueue()  # None: no more
        self._writer: threading.Thread | None = None

    def step_committed(self, samples: int) -> None:
        """One step of the run, in which this worker had so many samples; 0: it took part with none."""
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
        """Have it written.  `last`: it is written when this returns, and what was told before is, too."""
        self._next_s = now_s + REPORT_INTERVAL_S
        if self.path is None:
            return
        given = Contribution(
            step, self._steps, self._samples, run_samples, sent_bytes, received_bytes, world_size
        )
        if last:
            self._end_writer()
            given.write(self.path)
            return
        if self._writer is None:
            self._writer = threading.Thread(
                target=self._write_pending, args=(self.path,), name="gridtrain-given", daemon=True
            )
            self._writer.start()
        self._pending.put(given)

    def _end_writer(self) -> None:
        if self._writer is not None:
            self._pending.put(None)
            self._writer.join()
            self._writer = None

    def _write_pending(self, path: Path) -> None:
        while (given := self._take_newest()) is not None:
            given.write(path)

    def _take_newest(self) -> Contribution | None:
        """A slow disk gets only the latest of what it has missed."""
        newest = self._pending.get()
        while newest is not None and not self._pending.empty():
            newest = self._pending.get()
        return newest
