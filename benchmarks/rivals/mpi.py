"""Open MPI with mpi4py: dense Allreduce, TopK by two Allgathers, and gTop-k as published.

gTop-k (Shi et al., ICDCS 2019, section III and algorithm 3), for P = 4:

    rank   0       1       2       3
    t = 0  merge <--       merge <--        receive k entries, sum by index, keep the k largest
    t = 1  merge <----------                log2 P times
           broadcast of k entries to all    log2 P times

An entry is an int32 index and a float32 value.  Entries are selected before the clock starts, and added to
the vector after it has stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mpi4py
import numpy as np
from mpi4py import MPI

from rivals.contract import Request, Result
from rivals.measure import Prepared, measured
from rivals.sparse_gradient import (
    check,
    check_sum,
    drawn,
    gathered,
    merge,
    merged_by_tree,
    packed,
    scatter_add,
)


def all_reduce(comm: Any, request: Request) -> Prepared:
    gradient_N = np.empty(request.n, np.float32)

    def prepare() -> None:
        gradient_N.fill(request.rank + 1)

    def operation() -> None:
        comm.Allreduce(MPI.IN_PLACE, gradient_N)
        check_sum(gradient_N, request)

    return Prepared(operation, 4 * request.n, prepare)


def all_gather(comm: Any, request: Request) -> Prepared:
    indices_K, values_K = drawn(request)
    all_indices = np.empty((request.world, request.k), np.int32)
    all_values = np.empty((request.world, request.k), np.float32)
    update_N = np.zeros(request.n, np.float32)
    expected = gathered(request)

    def prepare() -> None:
        all_indices.fill(0)
        all_values.fill(0)

    def operation() -> None:
        comm.Allgather(indices_K, all_indices)
        comm.Allgather(values_K, all_values)

    def finish() -> None:
        update_N.fill(0)
        for indices, values in zip(all_indices, all_values, strict=True):
            update_N[indices] += values  # a rank's indices are different
        check(update_N, expected)

    return Prepared(operation, 8 * request.k, prepare, finish)


def gtopk(comm: Any, request: Request) -> Prepared:
    own = packed(request)
    received = np.empty_like(own)
    update_N = np.zeros(request.n, np.float32)
    expected = merged_by_tree(request)

    merged = own

    def operation() -> None:
        nonlocal merged
        merged, distance = own.copy(), 1
        while distance < request.world:
            if request.rank % (2 * distance):
                comm.Send(merged, request.rank - distance)
                break
            if request.rank + distance < request.world:
                comm.Recv(received, request.rank + distance)
                merged = merge(merged, received, request.k)
            distance *= 2
        comm.Bcast(merged, 0)

    def finish() -> None:
        update_N.fill(0)
        scatter_add(update_N, merged)
        check(update_N, expected)

    return Prepared(operation, 8 * request.k, finish=finish)


OPERATIONS: dict[str, Callable[[Any, Request], Prepared]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "gtopk": gtopk,
}


def run(request: Request) -> Result:
    """Measure as one rank of a started MPI job."""
    comm = MPI.COMM_WORLD
    prepared = OPERATIONS[request.op](comm, request)
    library = MPI.Get_library_version().partition(",")[0]
    version = f"{library}, mpi4py {mpi4py.__version__}"
    result = measured(request, "mpi", version, prepared, comm.Barrier)
    comm.Barrier()  # no rank leaves while another one still measures
    return result


if __name__ == "__main__":
    first = Request.from_argv()  # mpirun gives all ranks the arguments of rank 0
    own_rank = MPI.COMM_WORLD.Get_rank()
    own_request = replace(first, rank=own_rank, out=str(Path(first.out).with_name(f"rank-{own_rank}.json")))
    run(own_request).write(own_request.out)
