"""hivemind's averaging, which volunteers use over the internet.

Its settings favour it: the size of the group is known, so matchmaking ends as soon as all are present.

    rank 0: DHT --address, by rendezvous--> the others: DHT with that first peer
    all:    DecentralizedAverager over n float32; one step = matchmaking + all-reduce

Its links are encrypted by default.  The averager and the network daemon are separate processes, whose CPU
time is counted with the rank's.
"""

from __future__ import annotations

import socket

import hivemind
import torch
from torch import Tensor

from rivals.contract import Rank, Request, Result, leave
from rivals.measure import Prepared, measured
from rivals.rendezvous import Rendezvous

MATCHMAKING_S = 2.0
"""How long a group waits for more members; it begins at once with `target_group_size` members."""

COMPRESSIONS = {
    "none": hivemind.compression.NoCompression,
    "float16": hivemind.compression.Float16Compression,
    "int8": hivemind.compression.Uniform8BitQuantization,
}

REQUEST_S = 1.0
STEP_S = 600.0


def own_address(own: Rank) -> str:
    """Return the address of this rank as the master's host sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((own.master_host, own.master_port))  # sends nothing
        return str(probe.getsockname()[0])


def start_dht(own: Rank, group: Rendezvous) -> hivemind.DHT:
    """Start rank 0's DHT, then those of the others with its addresses."""
    options = {
        "host_maddrs": [f"/ip4/{own_address(own)}/tcp/0"],
        "use_ipfs": False,
        "use_relay": False,
        "use_auto_relay": False,
        "auto_nat": False,
        "nat_port_map": False,
        "start": True,
    }
    dht = hivemind.DHT(**options) if own.rank == 0 else None
    addresses = group.exchange([str(address) for address in dht.get_visible_maddrs()] if dht else [])[0]
    return dht or hivemind.DHT(initial_peers=addresses, **options)


def start_averager(
    tensor_N: Tensor, dht: hivemind.DHT, world: int, compression: str = "none"
) -> hivemind.DecentralizedAverager:
    return hivemind.DecentralizedAverager(
        averaged_tensors=[tensor_N],
        dht=dht,
        prefix="rivals",
        target_group_size=world,
        min_group_size=world,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=REQUEST_S,
        compression=COMPRESSIONS[compression](),
        allow_state_sharing=False,
        start=True,
    )


def average(averager: hivemind.DecentralizedAverager, world: int) -> None:
    """Average with all members.  Raises `ArithmeticError` if some are missing."""
    members = averager.step(timeout=STEP_S, allow_retries=True)
    if members is None or len(members) < world:
        raise ArithmeticError(f"only {len(members or ())} of {world} members have averaged")


def run(request: Request) -> Result:
    torch.set_num_threads(1)
    with Rendezvous(request) as group:
        dht = start_dht(request, group)
        averager = start_averager(torch.empty(request.n), dht, request.world)

        def prepare() -> None:
            with averager.get_tensors() as (tensor_N,):
                tensor_N.fill_(request.rank + 1.0)

        def operation() -> None:
            average(averager, request.world)
            with averager.get_tensors() as (tensor_N,):
                mean, expected = float(tensor_N[-1]), (request.world + 1) / 2
            if abs(mean - expected) > 1e-4:
                raise ArithmeticError(f"the mean is {mean}, not {expected}")

        result = measured(
            request,
            "hivemind",
            f"hivemind {hivemind.__version__}",
            Prepared(operation, 4 * request.n, prepare),
            group.barrier,
            note="with matchmaking; encrypted by default",
        )
        group.barrier()  # no rank ends its averager while another one still averages
        averager.shutdown()
        dht.shutdown()
    return result


if __name__ == "__main__":
    own_request = Request.from_argv()
    run(own_request).write(own_request.out)
    leave()
