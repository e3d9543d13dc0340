"""Compares predictions of the cost model with the measurements of `python -m bench`.

    cells with measured seconds --> predict(...) for each --> predicted / measured, and which are within 15 %

The lab runs all workers on one machine, so they share its cores (`--cores`).  The rate of a shaped link is
that of Ethernet frames, of which 1448 of 1514 bytes belong to messages (measured: 95.6 of 100 Mbit/s).  Cells
whose CPU use is at least 80 % of the cores are shown but not counted, because there the machine is measured.

Input: a file of the bench ({"cells": [{"cell": "gtopk P=4 n=25.6M rate=100Mbit", "samples": [...]}]}), or a
list of {"exchange", "world", "rate_Bps", "delay_s", "n", "density", "values", "encrypted", "seconds"}.

Run:  python benchmarks/predictions.py results.json [--cpu FILE] [--crowds FILE] [--cores 2]
FILE is the output of calibrate.py; without it the machine is measured first.  Members that share a core evict
each other's memory from its caches, so the lab is calibrated for each number of members: --crowds has
{"2": {"message_s": ...}, "4": ...} from `calibrate.py --messages --members 4`, which replace the figures in
--cpu.  Nothing is fitted to the cells: calibration uses links without a rate.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from calibrate import measure
from gridtrain.core.planning.cost_model import exchange_cost
from gridtrain.core.planning.exchange_comparison import choose_dense_topology
from gridtrain.core.planning.exchange_facts import parse_workload
from gridtrain.core.planning.network_model import NetworkModel, uniform_network
from gridtrain.core.planning.workload import CpuCosts, ExchangeKind, Workload
from gridtrain.errors import ConfigError
from gridtrain.network.transport.rate_limiter import parse_rate
from paper_table import read_cpu

FRAME_SHARE = 1448 / 1514
"""The share of a message's bytes in an Ethernet frame: TCP with timestamps over IPv4."""

WITHIN, BUSY = 0.15, 0.80
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell of the bench: an exchange, its network, and the measurement, if there is one.

    Attributes:
        exchange: for example "dense" or "gtopk:values=int8,topology=tree".
        rate_Bps: of each worker's link, in each direction, including frames; infinite without a limit.
        delay_s: one way.
        seconds: the measured duration; None: it is only predicted.
        cpu_s: of each process.
        machine_use: the used share of all cores, by all processes; None if unknown.
    """

    exchange: str
    world: int
    n: int
    rate_Bps: float = math.inf
    delay_s: float = 0.0
    density: float = 0.001
    values: str = "fp16"
    encrypted: bool = False
    seconds: float | None = None
    cpu_s: float | None = None
    machine_use: float | None = None


def load_of(cell: Measured) -> Workload:
    """Return the workload, for Dense() with the topology that the coordinator would choose.

    Raises `ConfigError` for exchanges that gridtrain does not have.
    """
    name, _, options = cell.exchange.partition(":")
    for word, value in (("density", cell.density), ("values", cell.values)):
        if f"{word}=" not in options and name != "dense":
            options = f"{options},{word}={value}"
    load = parse_workload(name, options, cell.n, cell.encrypted)
    if load is None:
        raise ConfigError(f'"{cell.exchange}" is no exchange of gridtrain')
    is_open = load.kind is ExchangeKind.DENSE and "topology=" not in options
    if is_open and choose_dense_topology(load, cell.world, network_of(cell), edges=True).is_direct:
        return replace(load, kind=ExchangeKind.DIRECT)
    return load


def network_of(cell: Measured) -> NetworkModel:
    rate_Bps = cell.rate_Bps * FRAME_SHARE if math.isfinite(cell.rate_Bps) else 1e12
    return uniform_network(cell.world, cell.delay_s, rate_Bps)


def predict(cell: Measured, cpu: CpuCosts, cores: int | None = None) -> float:
    """Predict the duration of the exchange and the vote, without selection and the first encoding.

    Args:
        cores: the cores that all workers share; None: each has its own machine.
    """
    found = exchange_cost(load_of(cell), network_of(cell), cpu, host_cores=cores)
    return found.exchange_s - _selection_s(found.select_s, cell.world, cores)


def _selection_s(select_s: float, world: int, cores: int | None) -> float:
    """Return the time until the last member begins to send; on shared cores members select in turns."""
    return select_s * (math.ceil(world / cores) if cores else 1)


def read(document: Any) -> Iterator[Measured]:
    """Yield the cells of gridtrain in the results of a bench."""
    if isinstance(document, list):
        yield from (Measured(**each) for each in document)
        return
    for each in document["cells"]:
        samples = each.get("samples", [])
        cell = parse(each["cell"])
        if samples and cell is not None:
            seconds = statistics.median(sample["seconds"] for sample in samples)
            cpu_s = statistics.median(sample["cpu_s"] for sample in samples)
            uses = [use for sample in samples if (use := sample.get("machine_use")) is not None]
            use = statistics.fmean(uses) if uses else None
            yield Measured(**cell, seconds=seconds, cpu_s=cpu_s, machine_use=use)


def parse(text: str) -> dict[str, Any] | None:
    """Parse the text of a cell; return None for rivals, and for losses, which the model does not know."""
    what, *parts = text.split()
    options = dict(part.partition("=")[::2] for part in parts if "=" in part)
    if "/" in what or "loss" in options:
        return None
    number = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([kMG]?)", options["n"])
    delay = re.fullmatch(r"([0-9.e-]+)(ms|s)", options.get("delay", "0s"))
    assert number and delay, text
    return {
        "exchange": what,
        "world": int(options["P"]),
        "n": round(float(number[1]) * _UNITS[number[2]]),
        "rate_Bps": parse_rate(options["rate"]) if "rate" in options else math.inf,
        "delay_s": float(delay[1]) * (1e-3 if delay[2] == "ms" else 1.0),
        "density": float(options.get("density", 0.001)),
        "encrypted": "curve" in parts,
    }


def crowded(cpu: CpuCosts, crowds: Mapping[int, Mapping[str, float]], members: int) -> CpuCosts:
    """Return `cpu` with the calibration for this number of members, or for the nearest smaller one."""
    known = [number for number in crowds if number <= members]
    return replace(cpu, **crowds[max(known)]) if known else cpu


def table(
    cells: list[Measured],
    cpu: CpuCosts,
    cores: int | None,
    crowds: Mapping[int, Mapping[str, float]] = MappingProxyType({}),
) -> tuple[str, int, int]:
    """Return a table in Markdown, the number of counted cells, and how many of them are within `WITHIN`."""
    lines = ["| cell | measured | predicted | off | CPU use |", "|---|---|---|---|---|"]
    counted = good = 0
    for cell in cells:
        predicted_s = predict(cell, crowded(cpu, crowds, cell.world), cores)
        rate = f"{cell.rate_Bps * 8 / 1e6:g} Mbit" if math.isfinite(cell.rate_Bps) else "no limit"
        sparse = f" density={cell.density:g}" if load_of(cell).kind.is_sparse else ""
        name = f"{cell.exchange} P={cell.world} n={cell.n / 1e6:g}M{sparse} {rate} {cell.delay_s * 1e3:g} ms"
        name += " curve" if cell.encrypted else ""
        if cell.seconds is None:
            lines.append(f"| {name} | - | {predicted_s:.4f} s | | |")
            continue
        off = predicted_s / cell.seconds - 1
        use = cell.cpu_s * cell.world / cell.seconds / cores if cores and cell.cpu_s is not None else None
        use = max(use, cell.machine_use) if use is not None and cell.machine_use is not None else use
        counts = use is None or use < BUSY
        counted, good = counted + counts, good + (counts and abs(off) <= WITHIN)
        shown = "" if use is None else f"{use:.0%}"
        lines.append(f"| {name} | {cell.seconds:.4f} s | {predicted_s:.4f} s | {off:+.0%} | {shown} |")
    return "\n".join(lines), counted, good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--cpu", type=Path, help="what calibrate.py printed, instead of measuring now")
    parser.add_argument(
        "--cores", type=int, default=os.cpu_count(), help="of the lab; 0: each worker its own"
    )
    parser.add_argument("--crowds", type=Path, help="what calibrate.py --messages printed, by members")
    options = parser.parse_args()
    crowds = json.loads(options.crowds.read_text(encoding="utf-8")) if options.crowds else {}
    cells = [cell for path in options.results for cell in read(json.loads(path.read_text(encoding="utf-8")))]
    cpu = read_cpu(options.cpu) if options.cpu else measure()
    by_members = {int(members): found for members, found in crowds.items()}
    text, counted, good = table(cells, cpu, options.cores or None, by_members)
    print(text)
    print(
        f"\n{good} of {counted} cells with a CPU use below {BUSY:.0%} are within {WITHIN:.0%} of the measured"
    )


if __name__ == "__main__":
    main()
