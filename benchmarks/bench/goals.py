"""The speed goals with their numbers, whether a run met them, and lists of cells by name.

Goal("P = 4, 100 Mbit/s: gTop-k", cell, of="seconds", at_most=0.040)
  measured 0.038 -> met      0.052 -> not met, by 30 %      no samples -> not measured: the reason
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.cells import Cell, parse
from bench.results import CellResult, Results

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
        return "met" if self.met else f"not met, {self.measured / self.goal.at_most - 1:.0%} above"


def _dense(name: str, where: str, at_most: float, *, curve: bool = False) -> Goal:
    plain = f"{where} n=25.6M"
    beside = tuple(parse(f"{rival}/all_reduce {plain}") for rival in ("gloo", "mpi"))
    return Goal(name, parse(f"dense {plain}{' curve' if curve else ''}"), "x bound", at_most, beside)


def _gtopk(workers: int, at_most_s: float) -> Goal:
    where = f"P={workers} {SPARSE}"
    beside = tuple(parse(f"{rival} {where}") for rival in ("mpi/gtopk", "mpi/all_gather", "gloo/all_gather"))
    return Goal(f"gTop-k, P = {workers}, 100 Mbit/s", parse(f"gtopk {where}"), "seconds", at_most_s, beside)


def goals() -> list[Goal]:
    """Return all goals that a bench can measure."""
    fp16, int8 = (parse(f"{what} P=4 {SPARSE}") for what in ("gtopk", "gtopk:values=int8"))
    return [
        _gtopk(4, 0.040),
        _gtopk(8, 0.075),
        Goal("bytes an entry, fp16", fp16, "bytes an entry", 3.6),
        Goal("bytes an entry, int8", int8, "bytes an entry", 2.6),
        Goal("selection, CPU, one thread, n = 25.6M", None, "select_ns", 1.5),
        _dense("dense, P = 4, 100 Mbit/s", "P=4 rate=100Mbit", 1.07),
        _dense("dense, P = 8, 100 Mbit/s", "P=8 rate=100Mbit", 1.07),
        _dense("dense, P = 4, 1 Gbit/s", "P=4 rate=1Gbit", 1.06),
        _dense("dense, P = 4, 1 Gbit/s, 20 ms", "P=4 rate=1Gbit delay=20ms", 1.15),
        _dense("dense, P = 4, 1 Gbit/s, CURVE", "P=4 rate=1Gbit", 1.30, curve=True),
    ]


def bytes_an_entry(result: CellResult) -> float | None:
    """Return the payload bytes for each entry, with payload headers, without the transport's framing."""
    size = result.median_of("payload_bytes")
    return None if size is None else size / result.cell.k


MEASURES: dict[str, Callable[[CellResult], float | None]] = {
    "seconds": lambda result: result.median_s,
    "x bound": lambda result: result.x_bound,
    "bytes an entry": bytes_an_entry,
}


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


# -- suites ----------------------------------------------------------------------------------------

SMALL_ELEMENTS = 120_000
"""Elements of a vector so small that messages cost more than bytes."""


def of_goals() -> list[Cell]:
    """Return the cells of every goal, with rivals."""
    cells = [cell for goal in goals() if goal.cell is not None for cell in (goal.cell, *goal.beside)]
    return list(dict.fromkeys(cells))


def quick() -> list[Cell]:
    """Return small cells on loopback or namespaces, for `make bench-quick`."""
    dense, small = "P=2 n=2M rate=1Gbit", f"P=4 n={SMALL_ELEMENTS} rate=1Gbit"
    whole = [f"dense {dense}", f"gtopk {dense} density=0.01", f"gloo/all_reduce {dense}"]
    return [parse(text) for text in (*whole, f"dense:topology=ring {small}", f"gloo/all_reduce {small}")]


def predictions() -> list[Cell]:
    """Return exchanges of few and of many bytes over fast and slow, near and far links (`predictions.py`)."""
    links: tuple[str, ...] = (
        "P=2 rate=100Mbit",
        "P=2 rate=20Mbit delay=20ms",
        "P=4 rate=1Gbit",
        "P=4 rate=100Mbit",
    )
    links += ("P=4 rate=100Mbit delay=5ms", "P=4 rate=20Mbit", "P=4 rate=20Mbit delay=20ms")
    links += ("P=8 rate=100Mbit delay=5ms", "P=8 rate=20Mbit delay=20ms")
    whats: tuple[str, ...] = ("gtopk n=2.56M", "topk n=2.56M", "dense n=100k", "gtopk n=2.56M density=0.01")
    whats += ("gtopk:topology=tree n=2.56M", "dense n=1M")
    return [parse(f"{what} {where}") for where in links for what in whats]


SUITES: dict[str, Callable[[], list[Cell]]] = {"goals": of_goals, "quick": quick, "predictions": predictions}
