"""The figures of a bench run as a file: what was measured, where, by which command.

Decides the format, and which numbers stand for a cell: the median, the least and the 90th percentile of all
its repeats.  Never names a machine, a user or a path.

    {"schema": 1, "made": {...}, "machine": {...}, "rivals": {...}, "cells": [{"cell": "gtopk P=4 ...",
     "samples": [{"seconds": ..., "cpu_s": ..., ...}], "bound_s": ..., "skipped": ""}], "local": {...}}

    schema            1; a reader refuses another number
    made              "date" (UTC), "command", "software", "blocks"
    machine           cores, memory_GiB, kernel, python, processor, gpu
    rivals            name -> why it is left out; "": it can run
    cells[].cell      as `bench.cells.parse` reads it
    cells[].samples   one for each repeat, see `Sample`; the warm-up is not among them
    cells[].bound_s   the least time that the link allows; null: no limit, or no formula
    cells[].skipped   why there are no samples; "": there are
    local             nanoseconds per parameter of selection, codec, merge, and of a memory copy
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.cells import Cell, parse

SCHEMA = 1


class ResultsError(ValueError):
    """A file that holds no results of this schema."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One repeat of a whole group.

    Attributes:
        seconds: until the last member had the result.
        cpu_s: CPU seconds, mean of the members' processes.
        sent_bytes: mean of the members; None: not known.
        payload_bytes: of one payload, mean; before the transport's own framing; ours alone.
        workspace_s: decode, merge, encode, seal within `seconds`; ours alone.
        prepare_s, prepare_cpu_s: selection and encoding before `seconds`; ours alone.
        aborts: attempts that did not commit; ours alone.
        block: which of the turns this repeat belongs to.
        note: the rival's version, its algorithm with the settings, and remarks.
        machine_use: of all cores, by whatever ran (the lab's delays, the kernel's share of a line), from the
            first member's start until all had settled; None: not known.
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
    """A cell and its repeats.  `skipped`: why there are none."""

    cell: Cell
    bound_s: float | None
    samples: list[Sample] = field(default_factory=list)
    skipped: str = ""

    @property
    def clean(self) -> list[Sample]:
        """Repeats without aborted attempts, which alone are one exchange's; all, if each had some."""
        return [sample for sample in self.samples if not sample.aborts] or self.samples

    @property
    def median_s(self) -> float:
        return statistics.median(sample.seconds for sample in self.clean)

    @property
    def least_s(self) -> float:
        return min(sample.seconds for sample in self.clean)

    @property
    def p90_s(self) -> float:
        return percentile([sample.seconds for sample in self.clean], 0.9)

    @property
    def cpu_s(self) -> float:
        """Of one member's process in one exchange, median."""
        return statistics.median(sample.cpu_s for sample in self.clean)

    @property
    def x_bound(self) -> float | None:
        return self.median_s / self.bound_s if self.bound_s else None

    def median_of(self, name: str) -> float | None:
        """Of the samples that know it."""
        known = [value for sample in self.clean if (value := getattr(sample, name)) is not None]
        return statistics.median(known) if known else None

    def cpu_s_per_GB(self) -> float:
        """Of one process, for each 1e9 bytes of the dense vector."""
        return self.cpu_s / (4e-9 * self.cell.n)


@dataclass(slots=True)
class Results:
    """A whole file."""

    made: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=dict)
    rivals: dict[str, str] = field(default_factory=dict)
    cells: list[CellResult] = field(default_factory=list)
    local: dict[str, float] = field(default_factory=dict)

    def of(self, cell: Cell) -> CellResult | None:
        """The result with samples for this cell."""
        return next((result for result in self.cells if result.cell == cell and result.samples), None)

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
        whole = {"schema": SCHEMA, "made": self.made, "machine": self.machine, "rivals": self.rivals}
        return json.dumps({**whole, "local": self.local, "cells": cells}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Raises `ResultsError`."""
        try:
            whole = json.loads(text)
            if whole["schema"] != SCHEMA:
                raise ResultsError(f"results of schema {whole['schema']}; this program reads {SCHEMA}")
            cells = [
                CellResult(
                    parse(entry["cell"]),
                    entry["bound_s"],
                    [Sample(**sample) for sample in entry["samples"]],
                    entry["skipped"],
                )
                for entry in whole["cells"]
            ]
            return cls(whole["made"], whole["machine"], whole["rivals"], cells, whole["local"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ResultsError(f"these are no results of a bench run: {error!r}") from None


def _short(sample: Sample) -> dict[str, Any]:
    """Without what is not known, and to a microsecond."""
    known = {name: value for name, value in asdict(sample).items() if value not in (None, "", 0)}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in known.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """Between the two neighbours in proportion, as numpy does."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def machine() -> dict[str, Any]:
    """What a figure depends on; nothing that names this machine."""
    info = {
        "cores": len(os.sched_getaffinity(0)),
        "memory_GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "processor": _processor(),
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "congestion": _read(Path("/proc/sys/net/ipv4/tcp_congestion_control")),
        "python": platform.python_version(),
        "gpu": _gpu(),
    }
    return {name: value for name, value in info.items() if value}


def _processor() -> str:
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _gpu() -> str:
    try:
        import torch
    except ImportError:
        return ""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
