"""Compares time and bytes of exchanges for P = 2 to 64 members in the collectives and in the cost model.

    collectives in virtual time --+
    core.planning.cost_model -----+--> results/scaling.json, docs/images/scaling.svg
    results/scaling_measured.json +    the model also for 1,000 members

The third is made by `python -m bench` (dots in the picture).  Its processes share two cores, so with many of
them the machine is measured.

The first two use the CPU costs that calibrate.py has measured (results/cpu.json).  The collectives of
`core/collectives` send their messages over simulated links, and each member has its own CPU.  The model
computes the messages in advance, and includes the work of senders; the time of the vote is the model's in
both.  All links are equal, and there are no stragglers.

Run:  PYTHONPATH=../tests python scaling.py [--out FILE] [--picture FILE]
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import record
from bench.results import Results
from calibrate import CPU, read_cpu
from gridtrain.core.planning.cost_model import exchange_cost
from gridtrain.core.planning.network_model import uniform_network
from gridtrain.core.planning.workload import (
    HEADER_BYTES,
    CpuCosts,
    ExchangeKind,
    Workload,
    cpu_s_per_byte,
    end_work_s,
    receive_work_s,
    slice_count,
    start_work_s,
)
from gridtrain.tools.demo.svg_chart import COLOURS, ChartLine, ChartPanel, draw_chart

SIZES, LARGE = (2, 4, 8, 16, 32, 64), 1000
ALPHA_S, BANDWIDTH_BPS = 0.01, 100e6 / 8
PARAMETERS, DENSITY = 10_000_000, 0.001
SHOWN = {
    ExchangeKind.DENSE: "ring",
    ExchangeKind.TOPK: "TopK",
    ExchangeKind.GTOPK: "GTopK",
    ExchangeKind.STAR_GTOPK: "GTopK, star",
}
MEASURED = {"dense": "ring", "topk": "TopK", "gtopk": "GTopK", "gtopk:topology=star": "GTopK, star"}
"""The names of the cells that `python -m bench` measured."""

NAMES = SHOWN | {
    ExchangeKind.DIRECT: "direct",
    ExchangeKind.STAR: "dense star",
    ExchangeKind.TREE: "GTopK, tree",
}


def load_of(kind: ExchangeKind) -> Workload:
    return Workload(kind, PARAMETERS, DENSITY)


def simulated(load: Workload, size: int, cpu: CpuCosts) -> tuple[float, float]:
    """Return the time until all members have the update, and the most bytes that a member sends."""
    from simulation.virtual_exchange import simulate_exchange  # in tests/

    slices = slice_count(load, size)
    parts = {ExchangeKind.DENSE: size * slices, ExchangeKind.DIRECT: size * slices, ExchangeKind.STAR: slices}
    count = parts.get(load.kind, 1)
    message_bytes = load.unit_bytes / count + HEADER_BYTES
    message_s = cpu.message_s + cpu.wake_s + message_bytes * cpu_s_per_byte(load, cpu)
    run = simulate_exchange(
        load,
        uniform_network(size, ALPHA_S, BANDWIDTH_BPS),
        lambda work: message_s + receive_work_s(work, load, 1 / count, cpu),
    )
    took_s = (
        cpu.begin_s + start_work_s(load, cpu) + max(run.complete_s.values()) + end_work_s(load, size, cpu)
    )
    return took_s, max(Counter(sender for sender, _ in run.sent).values()) * message_bytes


def measure(cpu: CpuCosts) -> list[dict[str, Any]]:
    """Return a row for each exchange and number of members."""
    rows = []
    for kind, name in NAMES.items():
        load = load_of(kind)
        for size in (*SIZES, LARGE):
            network = uniform_network(size, ALPHA_S, BANDWIDTH_BPS)
            cost = exchange_cost(load, network, cpu)
            vote_s = cost.exchange_s - exchange_cost(load, network, cpu, vote=False).exchange_s
            row = {
                "exchange": name,
                "members": size,
                "model_s": cost.exchange_s,
                "model_bytes": cost.sent_bytes,
            }
            if size != LARGE:
                took_s, row["simulated_bytes"] = simulated(load, size, cpu)
                row["simulated_s"] = took_s + vote_s
            rows.append(row)
    return rows


def measured() -> dict[str, list[tuple[float, float, float]]]:
    """Return (members, seconds with selection, MB that a member sends) of processes, by exchange."""
    text = (record.RESULTS / "scaling_measured.json").read_text(encoding="utf-8")
    found: dict[str, list[tuple[float, float, float]]] = {}
    for result in Results.from_json(text).cells:
        prepare_s = statistics.median(sample.prepare_s or 0.0 for sample in result.clean)
        sent_bytes = statistics.median(sample.sent_bytes or 0.0 for sample in result.clean)
        row = (float(result.cell.link.workers), result.median_s + prepare_s, sent_bytes / 1e6)
        found.setdefault(MEASURED[result.cell.what], []).append(row)
    return found


def chart(rows: Sequence[dict[str, Any]]) -> str:
    """Draw model, simulation and measurement of four exchanges as SVG."""
    dots = measured()

    def lines(what: str, factor: float) -> tuple[ChartLine, ...]:
        drawn = []
        for name, colour in zip(SHOWN.values(), COLOURS, strict=True):
            own = [row for row in rows if row["exchange"] == name and row["members"] in SIZES]
            spots = tuple((members, s if what == "s" else mb) for members, s, mb in dots[name])
            if what == "bytes" and name == SHOWN[ExchangeKind.STAR_GTOPK]:
                spots = ()  # the mean of a star's members is not what its busiest sends
            for source, label in (("simulated", ""), ("model", name)):
                points = tuple((float(row["members"]), factor * row[f"{source}_{what}"]) for row in own)
                shade = colour if label else PALE[colour]
                drawn.append(ChartLine(label, points, shade, dots=spots if label else ()))
        return tuple(drawn)

    return draw_chart(
        "One exchange, 2 to 64 members",
        f"{PARAMETERS // 10**6} M parameters, density {DENSITY}, {BANDWIDTH_BPS * 8 / 1e6:.0f} Mbit/s, "
        f"{ALPHA_S * 1e3:.0f} ms; dark: cost model, pale: the collectives in virtual time, "
        "dots: processes on two cores",
        [
            ChartPanel("Time", "members", "seconds", lines("s", 1.0), log_x=True, log_y=True),
            ChartPanel("Busiest sender", "members", "MB", lines("bytes", 1e-6), log_x=True, log_y=True),
        ],
    )


PALE = dict(zip(COLOURS, ("#7FB8D8", "#EAAE7F", "#7FBCAC", "#C4A7BE"), strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(arguments)
    cpu = read_cpu(CPU)
    rows = measure(cpu)
    for row in rows:
        simulation = f"{row['simulated_s']:8.3f} s" if "simulated_s" in row else ""
        print(f"{row['exchange']:12} P = {row['members']:5}: {row['model_s']:8.3f} s {simulation}")
    record.write(options.out, arguments, results=rows)
    if options.picture is not None:
        options.picture.write_text(chart(rows))


if __name__ == "__main__":
    main()
