"""The result file of a bench run: what was measured, on which kind of machine, by which command.

{"made": {...}, "machine": {...}, "rivals": {...}, "cells": [{"cell": "gtopk P=4 ...",
 "samples": [{"seconds": ..., "cpu_s": ..., ...}], "bound_s": ..., "skipped": ""}]}

made              "date" (UTC), "command", "software", "blocks"
machine           see `record.machine`
rivals            name -> why it is left out; "" if it can run
cells[].cell      as `bench.cells.parse` reads it
cells[].samples   one for each repeat without the warm-up, see `Sample`
cells[].bound_s   lower bound; null if the link is unlimited or there is no formula
cells[].skipped   why there are no samples; "" if there are
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.cells import Cell, parse


@dataclass(frozen=True, slots=True)
class Sample:
    """One repeat of a whole group: the figures of an `ExchangeSample`, of which rivals have only the first
    two and, if known, the bytes sent.

    Attributes:
        block: the turn to which this repeat belongs.
        note: the rival's version, its algorithm with the settings, and remarks.
        machine_use: use of all cores by all processes and the kernel, from the first member's start until
            all were idle; None if unknown.
    """

    seconds: float
    cpu_s: float
    sent_bytes: float | None = None
    payload_bytes: float | None = None
    workspace_s: float | None = None
    prepare_s: float | None = None
    prepare_cpu_s: float | None = None
    aborts: int = 0
    block: int = 0
    note: str = ""
    machine_use: float | None = None


@dataclass(slots=True)
class CellResult:
    """A cell and its samples.  `skipped` is the reason if there are none."""

    cell: Cell
    bound_s: float | None
    samples: list[Sample] = field(default_factory=list)
    skipped: str = ""

    @property
    def clean(self) -> list[Sample]:
        """The samples without aborted attempts; all samples if each had some."""
        return [sample for sample in self.samples if not sample.aborts] or self.samples

    @property
    def median_s(self) -> float:
        return statistics.median(sample.seconds for sample in self.clean)

    @property
    def least_s(self) -> float:
        return min(sample.seconds for sample in self.clean)

    @property
    def cpu_s(self) -> float:
        """Median CPU seconds of one member's process in one exchange."""
        return statistics.median(sample.cpu_s for sample in self.clean)

    @property
    def x_bound(self) -> float | None:
        return self.median_s / self.bound_s if self.bound_s else None

    def median_of(self, name: str) -> float | None:
        """Return the median of a field over the samples that have it."""
        known = [value for sample in self.clean if (value := getattr(sample, name)) is not None]
        return statistics.median(known) if known else None

    def cpu_s_per_GB(self) -> float:
        """Return the CPU seconds of one process for 1e9 bytes of the dense vector."""
        return self.cpu_s / (4e-9 * self.cell.n)


@dataclass(slots=True)
class Results:
    """The content of a result file."""

    made: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=dict)
    rivals: dict[str, str] = field(default_factory=dict)
    cells: list[CellResult] = field(default_factory=list)

    def to_json(self) -> str:
        cells = [
            {
                "cell": result.cell.text,
                "bound_s": result.bound_s,
                "skipped": result.skipped,
                "samples": [_short(sample) for sample in result.samples],
            }
            for result in self.cells
        ]
        whole = {"made": self.made, "machine": self.machine, "rivals": self.rivals}
        return json.dumps({**whole, "cells": cells}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Parse a result file."""
        whole = json.loads(text)
        cells = [
            CellResult(
                parse(entry["cell"]),
                entry["bound_s"],
                [Sample(**sample) for sample in entry["samples"]],
                entry["skipped"],
            )
            for entry in whole["cells"]
        ]
        return cls(whole["made"], whole["machine"], whole["rivals"], cells)


def _short(sample: Sample) -> dict[str, Any]:
    """Return the known fields, rounded to a microsecond."""
    known = {name: value for name, value in asdict(sample).items() if value not in (None, "", 0)}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in known.items()}
