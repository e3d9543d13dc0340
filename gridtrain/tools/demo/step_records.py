"""The files (JSON lines) in which the demo's workers record steps, losses, times and bytes.

<folder>/steps.jsonl       StepRecord, StepRecord, ...      the first worker
<folder>/sent-<id>.json    SentBytes                        every worker, at its end
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gridtrain.errors import GridtrainError

STEPS_FILE = "steps.jsonl"
SENT_GLOB = "sent-*.json"


@dataclass(frozen=True, slots=True)
class SentBytes:
    """The bytes that one worker has written to its sockets so far, framing included.

    Attributes:
        data: the bytes of the exchanges' payloads.
        votes: the bytes of votes and of the root's decisions.
        control: all other bytes: heartbeats, progress, membership, the state for a newcomer.
    """

    data: int = 0
    votes: int = 0
    control: int = 0

    @classmethod
    def of_traffic(cls, sent_bytes: Mapping[str, int]) -> SentBytes:
        """Add up a transport's counters of sent bytes, which are given by message type."""
        data = sent_bytes.get("Data", 0)
        votes = sent_bytes.get("Vote", 0) + sent_bytes.get("Decision", 0)
        return cls(data, votes, sum(sent_bytes.values()) - data - votes)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The seconds that the first worker has so far spent on computing, selecting, communicating, and waiting
    for votes and workers."""

    compute: float = 0.0
    select: float = 0.0
    communicate: float = 0.0
    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The state after a committed step.  `sent` and `times` count from the run's start.

    Attributes:
        step: the number of steps committed so far.
        seconds: the wall-clock time since the first batch, excluding held-out evaluations.
        loss: the running mean of the first worker's training loss, in nats per byte.
        held_out: the loss on the fixed held-out subset; None on the steps where it is not measured.
    """

    step: int
    seconds: float
    loss: float
    held_out: float | None
    sent: SentBytes
    times: StepTimes

    def to_line(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"

    @classmethod
    def from_line(cls, line: str) -> StepRecord:
        """Parse a line of the file.  Raises `GridtrainError` if it is not a record."""
        try:
            values: dict[str, Any] = json.loads(line)
            values["sent"], values["times"] = SentBytes(**values["sent"]), StepTimes(**values["times"])
            return cls(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise GridtrainError(
                f"the line {line[:80]!r} is not a step record: {error}",
                remedy="delete the demo's output folder and run the demo again",
            ) from error


class RecordReader:
    """Reads the records in a growing file, each of them once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_records(self) -> list[StepRecord]:
        """Return the records that have been added since the last call.

        A line that is still being written is returned by a later call.
        """
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            added = file.read()
        complete = added[: added.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [StepRecord.from_line(line) for line in complete.decode().splitlines()]


def write_sent(folder: Path, worker: str, sent: SentBytes) -> None:
    (folder / f"sent-{worker}.json").write_text(json.dumps(asdict(sent)))


def mean_sent(folder: Path) -> dict[str, float]:
    """Return the bytes sent by a worker, as a mean over the workers, for each field of `SentBytes`."""
    totals = [json.loads(path.read_text()) for path in sorted(folder.glob(SENT_GLOB))]
    return {field.name: sum(t[field.name] for t in totals) / len(totals) for field in fields(SentBytes)}
