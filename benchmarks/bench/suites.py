"""Lists of cells by name.

    goals      every goal, with rivals
    first      dense and gTop-k, P = 4, 100 Mbit/s, two sizes, beside gloo
    quick      small cells on loopback or namespaces, for `make bench-quick`
    scaling    P = 2 to 32 at 100 Mbit/s: CPU seconds and time, sparse and dense
    rates      1000, 100 and 20 Mbit/s, 0 to 40 ms
    predictions  cells with which the planner's cost model is compared: see `predictions`
    sparse     every topology and kind of values, P = 4 and 8, beside rivals' sparse exchanges

An unknown exchange is left out with a message.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

from bench.cells import Cell, parse
from bench.goals import goals
from gridtrain.errors import ConfigError


def of_goals() -> list[Cell]:
    cells: list[Cell] = []
    for goal in goals():
        cells += [] if goal.cell is None else [goal.cell, *goal.beside]
    return list(dict.fromkeys(cells))


def first() -> list[Cell]:
    words = [f"{what} P=4 n={n} rate=100Mbit" for n in ("2.56M", "25.6M") for what in ("dense", "gtopk")]
    words += [
        f"gloo/{op} P=4 n={n} rate=100Mbit" for n in ("2.56M", "25.6M") for op in ("all_reduce", "all_gather")
    ]
    return [parse(text) for text in words]


SMALL_ELEMENTS = 120_000
"""Elements of a vector so small that messages cost more than bytes."""


def quick() -> list[Cell]:
    dense = "P=2 n=2M rate=1Gbit"
    sparse = "P=2 n=2M rate=1Gbit density=0.01"
    small = f"P=4 n={SMALL_ELEMENTS} rate=1Gbit"
    whole = [f"dense {dense}", f"gtopk {sparse}", f"gloo/all_reduce {dense}"]
    return [parse(text) for text in (*whole, f"dense:topology=ring {small}", f"gloo/all_reduce {small}")]


def scaling() -> list[Cell]:
    cells = []
    for workers in (2, 4, 8, 16, 32):
        where = f"P={workers} n=2.56M rate=100Mbit density=0.001"
        cells += [parse(f"{what} {where}") for what in ("dense", "topk", "gtopk", "gloo/all_reduce")]
    return cells


def sparse() -> list[Cell]:
    whats = ["topk", "gtopk", "gtopk:topology=tree", "gtopk:topology=star"]
    whats += [f"gtopk:values={kind}" for kind in ("fp32", "bf16", "int8")]
    whats += ["gloo/all_gather", "mpi/all_gather", "mpi/gtopk"]
    return known(f"{what} P={P} n=25.6M rate=100Mbit density=0.001" for P in (4, 8) for what in whats)


def known(texts: Iterable[str]) -> list[Cell]:
    cells = []
    for text in texts:
        try:
            cells.append(parse(text))
        except ConfigError as error:
            print(f"left out: {text}: {error}", file=sys.stderr)
    return cells


def rates() -> list[Cell]:
    cells = []
    for link in (
        "rate=1Gbit",
        "rate=100Mbit",
        "rate=20Mbit",
        "rate=100Mbit delay=10ms",
        "rate=20Mbit delay=40ms",
    ):
        where = f"P=4 n=2.56M density=0.001 {link}"
        whats = ("dense", "topk", "gtopk", "gloo/all_reduce", "gloo/all_gather")
        cells += [parse(f"{what} {where}") for what in whats]
    return cells


PREDICTED_LINKS = (
    "P=2 rate=100Mbit",
    "P=2 rate=20Mbit delay=20ms",
    "P=4 rate=1Gbit",
    "P=4 rate=100Mbit",
    "P=4 rate=100Mbit delay=5ms",
    "P=4 rate=20Mbit",
    "P=4 rate=20Mbit delay=20ms",
    "P=8 rate=100Mbit delay=5ms",
    "P=8 rate=20Mbit delay=20ms",
)


def predictions() -> list[Cell]:
    """Exchanges of few and of many bytes over fast and slow, near and far links."""
    whats = ("gtopk n=2.56M", "topk n=2.56M", "dense n=100k", "gtopk n=2.56M density=0.01")
    whats += ("gtopk:topology=tree n=2.56M", "dense n=1M")
    return [parse(f"{what} {where}") for where in PREDICTED_LINKS for what in whats]


SUITES: dict[str, Callable[[], list[Cell]]] = {
    "goals": of_goals,
    "first": first,
    "quick": quick,
    "scaling": scaling,
    "sparse": sparse,
    "rates": rates,
    "predictions": predictions,
}
