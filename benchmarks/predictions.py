"""How well the cost model foretells what a bench run measured.

Decides how a cell of the bench becomes a network and a load.  Measures nothing itself but CPU constants.

    cells with measured seconds --> predict(...) for each --> predicted / measured, and who is within 15 %

The lab puts all workers on one machine, so they share its cores (`--cores`).  A shaped line's rate counts
Ethernet frames; 1448 of 1514 bytes of each are a message's (measured: 95.6 of 100 Mbit/s).  Cells whose CPU
use is 80 % of the cores or more are shown, and left out of the count: there the machine is measured.

Input: a file of the bench ({"cells": [{"cell": "gtopk P=4 n=25.6M rate=100Mbit", "samples": [...]}]}), or a
list of {"exchange", "world", "rate_Bps", "delay_s", "n", "density", "values", "encrypted", "seconds"}.

Run:  python benchmarks/predictions.py results.json [--cpu FILE] [--crowds FILE] [--cores 2]
FILE is what calibrate.py printed; without it the machine is measured first.  Members that share a core put
each other's memory out of its caches, so the lab is calibrated for each number of members: --crowds has
{"2": {"message_s": ...}, "4": ...} out of `calibrate.py --messages --members 4`, which take the place of the
numbers in --cpu.  Nothing is fitted to the cells: calibration exchanges go over lines that nothing limits.
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
"""Of an Ethernet frame's bytes, those of a message: TCP with timestamps over IPv4."""

WITHIN, BUSY = 0.15, 0.80
_WORDS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell: what was exchanged where, and how long it took (None: to be foretold only).

    Attributes:
        exchange: "dense", "gtopk:values=int8,topology=tree" or the like.
        rate_Bps: of each worker's line, both ways, frames included; infinite: nothing limits it.
        delay_s: one way.
        cpu_s: of each process.
        machine_use: of all cores, by whatever ran; None: not known.
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
    """Dense: on the road that the coordinator would take.  Raises `ConfigError` for no exchange of ours."""
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
    """Seconds of the exchange, the vote included, selection and the first encoding not.

    Args:
        cores: all workers share so many; None: each has its own machine.
    """
    found = exchange_cost(load_of(cell), network_of(cell), cpu, host_cores=cores)
    return found.exchange_s - _begun_s(found.select_s, cell.world, cores)


def _begun_s(select_s: float, world: int, cores: int | None) -> float:
    """Until the last member has begun to send: on shared cores they select in turns."""
    return select_s * (math.ceil(world / cores) if cores else 1)


def read(document: Any) -> Iterator[Measured]:
    """Our own cells of a bench's results."""
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
    """A cell as the bench writes it; None: a rival's, or one with losses, which the model does not know."""
    what, *words = text.split()
    said = dict(word.partition("=")[::2] for word in words if "=" in word)
    if "/" in what or "loss" in said:
        return None
    number = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([kMG]?)", said["n"])
    delay = re.fullmatch(r"([0-9.e-]+)(ms|s)", said.get("delay", "0s"))
    assert number and delay, text
    return {
        "exchange": what,
        "world": int(said["P"]),
        "n": round(float(number[1]) * _WORDS[number[2]]),
        "rate_Bps": parse_rate(said["rate"]) if "rate" in said else math.inf,
        "delay_s": float(delay[1]) * (1e-3 if delay[2] == "ms" else 1.0),
        "density": float(said.get("density", 0.001)),
        "encrypted": "curve" in words,
    }


def crowded(cpu: CpuCosts, crowds: Mapping[int, Mapping[str, float]], members: int) -> CpuCosts:
    """`cpu` with what was calibrated for so many members, or for the nearest smaller number."""
    known = [number for number in crowds if number <= members]
    return replace(cpu, **crowds[max(known)]) if known else cpu


def table(
    cells: list[Measured],
    cpu: CpuCosts,
    cores: int | None,
    crowds: Mapping[int, Mapping[str, float]] = MappingProxyType({}),
) -> tuple[str, int, int]:
    """Markdown, how many count, and how many of these are within `WITHIN`."""
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
