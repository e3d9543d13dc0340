"""Lists of cells by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.cells import Cell, parse

SMALL_ELEMENTS = 120_000
"""Elements of a vector so small that messages cost more than bytes."""


def goals() -> Iterator[str]:
    """The comparisons of docs/benchmarks.md: an exchange beside those of rivals over the same link."""
    for workers in (4, 8):
        for what in ("gtopk", "mpi/gtopk", "mpi/all_gather", "gloo/all_gather"):
            yield f"{what} P={workers} n=25.6M density=0.001 rate=100Mbit"
    yield "gtopk:values=int8 P=4 n=25.6M density=0.001 rate=100Mbit"
    for where in ("P=4 rate=100Mbit", "P=8 rate=100Mbit", "P=4 rate=1Gbit", "P=4 rate=1Gbit delay=20ms"):
        for what in ("dense", "gloo/all_reduce", "mpi/all_reduce"):
            yield f"{what} n=25.6M {where}"
    yield "dense n=25.6M P=4 rate=1Gbit curve"


def quick() -> Iterator[str]:
    """Small cells on loopback or namespaces, for `make bench-quick`."""
    for what in ("dense", "gtopk:density=0.01", "gloo/all_reduce"):
        yield f"{what} P=2 n=2M rate=1Gbit"
    for what in ("dense:topology=ring", "gloo/all_reduce"):
        yield f"{what} P=4 n={SMALL_ELEMENTS} rate=1Gbit"


def predictions() -> Iterator[str]:
    """Exchanges of few and of many bytes over fast and slow, near and far links (`predictions.py`)."""
    for where in (
        *("P=2 rate=100Mbit", "P=2 rate=20Mbit delay=20ms"),
        *("P=4 rate=1Gbit", "P=4 rate=100Mbit", "P=4 rate=100Mbit delay=5ms"),
        *("P=4 rate=20Mbit", "P=4 rate=20Mbit delay=20ms"),
        *("P=8 rate=100Mbit delay=5ms", "P=8 rate=20Mbit delay=20ms"),
    ):
        for what in (
            *("gtopk n=2.56M", "topk n=2.56M", "gtopk n=2.56M density=0.01", "gtopk:topology=tree n=2.56M"),
            *("dense n=100k", "dense n=1M"),
        ):
            yield f"{what} {where}"


SUITES: dict[str, Callable[[], Iterator[str]]] = {"goals": goals, "quick": quick, "predictions": predictions}


def cells_of(suite: str) -> list[Cell]:
    return [parse(text) for text in SUITES[suite]()]
