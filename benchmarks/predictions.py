"""Compares predictions of the cost model with the measurements of `python -m bench`.

    cells with measured seconds --> predict(...) for each --> predicted / measured, and which are within 15 %

The lab runs all workers on one machine, so they share its cores (`--cores`), and the costs are those of as
many members (`calibrate.MEMBERS`), which fill the caches for each other.  The rate of a shaped link is
that of Ethernet frames, of which 1448 of 1514 bytes belong to messages (measured: 95.6 of 100 Mbit/s); after
a pause it passes the bytes of its token bucket at once.  Cells whose CPU use is at least 80 % of the cores
are shown but not counted, because there the machine is measured.

Run:  python benchmarks/predictions.py results/predictions.json [--cpu FILE] [--cores 2]

FILE is the output of calibrate.py on the machine of the cells.  Nothing is fitted to the cells: calibration
uses links without a rate.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import record
from bench.cells import Cell
from bench.results import CellResult, Results
from calibrate import CPU, read_by_members
from gridtrain.core.planning.cost_model import exchange_cost
from gridtrain.core.planning.exchange_facts import as_direct, make_exchange
from gridtrain.core.planning.network_model import LinkModel, NetworkModel, uniform_network
from gridtrain.core.planning.topology_choice import choose_topology
from gridtrain.core.planning.workload import (
    HEADER_BYTES,
    PACKET_BYTES,
    CpuCosts,
    Workload,
)
from lab.link import bucket_bytes
from shared_host import host_exchange_cost

FRAME_SHARE = 1448 / 1514
"""The share of a message's bytes in an Ethernet frame: TCP with timestamps over IPv4."""

INITIAL_SEGMENTS, BBR_START_GAIN = 10, 2.89
"""The initial window of Linux, and bbr's pacing in windows per round trip while a connection starts."""

WITHIN, BUSY = 0.15, 0.80


def load_of(cell: Cell) -> Workload:
    """Return the workload, with the topology that the coordinator would choose if it is open."""
    name, _, options = cell.exchange_text.partition(":")
    exchange = make_exchange(name, options)
    assert exchange is not None, f"{cell.what} is no exchange of gridtrain"
    load, direct = Workload.of(exchange, cell.n, cell.encrypted), as_direct(exchange)
    size, network = cell.link.workers, network_of(cell)
    if direct is not None and choose_topology(load, size, network, edges=True).is_direct:
        return Workload.of(direct, cell.n, cell.encrypted)
    return load


def network_of(cell: Cell) -> NetworkModel:
    rate_Bps = cell.link.bandwidth_Bps
    network = uniform_network(cell.link.workers, cell.link.delay_s, rate_Bps * FRAME_SHARE or 1e12)
    link = LinkModel(cell.link.delay_s, paced_Bps(cell))
    burst_bytes = bucket_bytes(rate_Bps) * FRAME_SHARE if rate_Bps else 0.0
    return replace(network, link=lambda src, dst: link, burst_bytes=burst_bytes)


def paced_Bps(cell: Cell) -> float:
    """Return the mean rate at which TCP sends a sparse payload that fits into its initial window.

    Linux's bbr sends two segments at once and the others at 2.89 initial windows in a round trip, until the
    connection has sent more than one window at once.  (Measured at 20 Mbit/s: 9 kB take 6.9 ms longer than
    the delay of 20 ms.  The time that larger payloads lose, 6.5 ms of 41 for 65 kB, is not counted.)
    """
    load = Workload.of(cell.exchange, cell.n, cell.encrypted)
    segments = math.ceil((load.unit_bytes + HEADER_BYTES) / PACKET_BYTES)
    if not (load.kind.is_sparse and cell.link.delay_s and 2 < segments <= INITIAL_SEGMENTS):
        return math.inf
    paced_s = (segments - 2) / INITIAL_SEGMENTS * 2 * cell.link.delay_s / BBR_START_GAIN
    return (load.unit_bytes + HEADER_BYTES) / paced_s


def predict(cell: Cell, cpu: CpuCosts, cores: int | None = None) -> float:
    """Predict the duration of the exchange and the vote, without selection and the first encoding.

    Args:
        cores: the cores that all workers share, where they select in turns; None: each has its own machine.
    """
    load, network = load_of(cell), network_of(cell)
    if cores is None:
        found = exchange_cost(load, network, cpu)
        return found.exchange_s - found.select_s
    found = host_exchange_cost(load, network, cpu, cores)
    return found.exchange_s - found.select_s * math.ceil(network.size / cores)


def is_predictable(result: CellResult) -> bool:
    """Return whether a cell was measured and is gridtrain's."""
    return bool(result.samples) and not result.cell.rival


def compare(
    results: Sequence[CellResult], costs: Mapping[int, CpuCosts], cores: int | None
) -> tuple[str, int, int]:
    """Return a table in Markdown, the number of counted cells, and how many of them are within `WITHIN`.

    Args:
        costs: the CPU costs by the number of members; a cell has those of the next larger number.
    """
    rows, counted, good = [], 0, 0
    for result in results:
        members = result.cell.link.workers
        cpu = costs[min((size for size in costs if size >= members), default=max(costs))]
        predicted_s, seconds = predict(result.cell, cpu, cores), result.median_s
        uses = [sample.machine_use for sample in result.samples if sample.machine_use is not None]
        use = result.cpu_s * members / seconds / cores if cores else None
        use = max(use, statistics.fmean(uses)) if use is not None and uses else use
        counts, off = use is None or use < BUSY, predicted_s / seconds - 1
        counted, good = counted + counts, good + (counts and abs(off) <= WITHIN)
        shown = "" if use is None else f"{use:.0%}"
        rows.append((result.cell.text, f"{seconds:.4f} s", f"{predicted_s:.4f} s", f"{off:+.0%}", shown))
    return record.table(("cell", "measured", "predicted", "off", "CPU use"), rows), counted, good


def main() -> None:
    parser = record.parser(__doc__, out="")
    parser.add_argument("results", type=Path, nargs="+", help="files of python -m bench")
    parser.add_argument("--cpu", type=Path, default=CPU, help="what calibrate.py printed")
    parser.add_argument(
        "--cores", type=int, default=os.cpu_count(), help="of the lab; 0: each worker its own"
    )
    options = parser.parse_args()
    files = [Results.from_json(path.read_text(encoding="utf-8")) for path in options.results]
    cells = [result for file in files for result in file.cells if is_predictable(result)]
    text, counted, good = compare(cells, read_by_members(options.cpu), options.cores or None)
    print(text)
    print(
        f"\n{good} of {counted} cells with a CPU use below {BUSY:.0%} are within {WITHIN:.0%} of the measured"
    )


if __name__ == "__main__":
    main()
