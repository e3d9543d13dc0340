"""The speed goals with their numbers, and whether a run met them.

Goal("P = 4, 100 Mbit/s: gTop-k", cell, of="seconds", at_most=0.040)
  measured 0.038 -> met      0.052 -> not met, by 30 %      no samples -> not measured: the reason
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.cells import Cell, parse
from bench.results import CellResult, Results

DENSE = "n=25.6M"
SPARSE = "n=25.6M density=0.001 rate=100Mbit"


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal for one cell.

    Attributes:
        name: its name in the table.
        cell: what is measured; None for the local figure named `of`.
        of: "seconds", "x bound", "bytes an entry", or the name of a local figure.
        at_most: the number to reach, in the unit of `of`.
        beside: rivals to measure in the same run.
    """

    name: str
    cell: Cell | None
    of: str
    at_most: float
    beside: tuple[Cell, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a goal is met.  If `measured` is None, `why` has the reason."""

    goal: Goal
    measured: float | None
    why: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.measured is None else self.measured <= self.goal.at_most

    @property
    def word(self) -> str:
        if self.measured is None:
            return f"not measured: {self.why}"
        if self.met:
            return "met"
        return f"not met, {self.measured / self.goal.at_most - 1:.0%} above"


def _beside(where: str, *rivals: str) -> tuple[Cell, ...]:
    return tuple(parse(f"{rival} {where}") for rival in rivals)


def _dense(name: str, where: str, at_most: float, *, curve: bool = False) -> Goal:
    plain = f"P={where} {DENSE}"
    cell = parse(f"dense {plain}{' curve' if curve else ''}")
    return Goal(name, cell, "x bound", at_most, _beside(plain, "gloo/all_reduce", "mpi/all_reduce"))


def _gtopk(workers: int, at_most_s: float) -> Goal:
    where = f"P={workers} {SPARSE}"
    beside = _beside(where, "mpi/gtopk", "mpi/all_gather", "gloo/all_gather")
    return Goal(f"gTop-k, P = {workers}, 100 Mbit/s", parse(f"gtopk {where}"), "seconds", at_most_s, beside)


def goals() -> list[Goal]:
    """Return all goals that a bench can measure."""
    fp16 = parse(f"gtopk P=4 {SPARSE}")
    return [
        _gtopk(4, 0.040),
        _gtopk(8, 0.075),
        Goal("bytes an entry, fp16", fp16, "bytes an entry", 3.6),
        Goal("bytes an entry, int8", parse(f"gtopk:values=int8 P=4 {SPARSE}"), "bytes an entry", 2.6),
        Goal("selection, CPU, one thread, n = 25.6M", None, "select_ns", 1.5),
        _dense("dense, P = 4, 100 Mbit/s", "4 rate=100Mbit", 1.07),
        _dense("dense, P = 8, 100 Mbit/s", "8 rate=100Mbit", 1.07),
        _dense("dense, P = 4, 1 Gbit/s", "4 rate=1Gbit", 1.06),
        _dense("dense, P = 4, 1 Gbit/s, 20 ms", "4 rate=1Gbit delay=20ms", 1.15),
        _dense("dense, P = 4, 1 Gbit/s, CURVE", "4 rate=1Gbit", 1.30, curve=True),
    ]


def judge(goal: Goal, results: Results) -> Verdict:
    """Compare a goal with the medians of a run."""
    if goal.cell is None:
        measured = results.local.get(goal.of)
        return Verdict(goal, measured, "" if measured is not None else "no local figures in this run")
    result = results.of(goal.cell)
    if result is None:
        skipped = [entry.skipped for entry in results.cells if entry.cell == goal.cell and entry.skipped]
        return Verdict(goal, None, skipped[0] if skipped else "not in this run")
    measured = MEASURES[goal.of](result)
    return Verdict(goal, measured, "" if measured is not None else "the samples lack it")


def bytes_an_entry(result: CellResult) -> float | None:
    """Return the payload bytes for each entry, with payload headers, without the transport's framing."""
    size = result.median_of("payload_bytes")
    return None if size is None else size / result.cell.k


MEASURES: dict[str, Callable[[CellResult], float | None]] = {
    "seconds": lambda result: result.median_s,
    "x bound": lambda result: result.x_bound,
    "bytes an entry": bytes_an_entry,
}


def judged(results: Results, wanted: Sequence[Goal] | None = None) -> list[Verdict]:
    return [judge(goal, results) for goal in (goals() if wanted is None else wanted)]
