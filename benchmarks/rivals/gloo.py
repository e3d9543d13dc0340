"""gloo of torch.distributed, the usual choice over plain sockets; it runs in the project's own environment.

all_reduce   n float32, summed in place
all_gather   TopK: all ranks' k indices and k values in one all-gather; summed by index after the clock
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from rivals.contract import Rank, Request, Result, leave
from rivals.measure import Prepared, measured
from rivals.sparse_gradient import check, check_sum, gathered, packed, scatter_add

TIMEOUT = datetime.timedelta(seconds=1800)


def all_reduce(request: Request) -> Prepared:
    gradient_N = torch.full((request.n,), 1.0)

    def prepare() -> None:
        gradient_N.fill_(request.rank + 1.0)

    def operation() -> None:
        dist.all_reduce(gradient_N)
        check_sum(gradient_N, request)

    return Prepared(operation, 4 * request.n, prepare)


def all_gather(request: Request) -> Prepared:
    """Send indices and values as one tensor of 2 k int32: 8 bytes an entry."""
    own = torch.from_numpy(packed(request))
    received = [torch.empty_like(own) for _ in range(request.world)]
    update_N = np.zeros(request.n, np.float32)
    expected = gathered(request)

    def prepare() -> None:
        for entries in received:
            entries.zero_()

    def operation() -> None:
        dist.all_gather(received, own)

    def finish() -> None:
        update_N.fill(0)
        for entries in received:
            scatter_add(update_N, entries.numpy())
        check(update_N, expected)

    return Prepared(operation, 8 * request.k, prepare, finish)


OPERATIONS: dict[str, Callable[[Request], Prepared]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
}


def join(own: Rank) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{own.master}",
        rank=own.rank,
        world_size=own.world,
        timeout=TIMEOUT,
    )


def run(request: Request) -> Result:
    join(request)
    prepared = OPERATIONS[request.op](request)
    result = measured(request, "gloo", f"torch {torch.__version__}", prepared, dist.barrier)
    dist.barrier()  # no rank leaves while another one still measures
    return result


if __name__ == "__main__":
    own_request = Request.from_argv()
    run(own_request).write(own_request.out)
    dist.destroy_process_group()
    leave()
