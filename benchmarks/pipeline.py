"""What a pipeline costs: the bubble reached, slow links, memory of a stage, activations in fewer bits.

Decides nothing at run time; docs/pipeline.md quotes its tables.

    emulated   stages that wait instead of computing (10 ms forward, 20 ms backward a micro-batch), beside
               torch.distributed.pipelining with the same stages in the same minutes
    runtime    the same as it really runs: coordinator, agents, ZeroMQ, vote, a host for each worker with a
               shaped cable, and torch on such hosts (network namespaces: needs root)
    limit      a model whose training needs four times a worker's memory, on four that are held to it (root)
    memory     peak memory of one stage with and without re-materialisation
    wire       held-out loss of the demo's GPT on four stages with fp16, bf16 and int8 between them

Run:  python benchmarks/pipeline.py                      (about 3 minutes; waiting stages use no processor)
      python benchmarks/pipeline.py --part emulated --rounds 9
      python benchmarks/pipeline.py --part runtime --cases lan8 torch alone     (the others stay as they were)
      python benchmarks/pipeline.py --table              (the latest results as tables)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gridtrain.core.stages.schedule import ahead_for, fill_drain, one_forward_one_backward, timetable
from gridtrain.pipeline.executor import ScheduleFactory
from gridtrain.pipeline.wire_precision import WirePrecision
from stages import limit, memory, runtime, torch_side, wire_loss
from stages.emulated import BACKWARD_S, FAST, FORWARD_S, LAN, Link, Pipeline, sleep_exactly

RESULTS = Path(__file__).parent / "results" / "pipeline.json"
STAGES, PAYLOAD_BYTES = 4, 125_000  # 10 ms at 100 Mbit/s: as long as a forward
SEEDS = 3
PARTS = ("emulated", "runtime", "limit", "memory", "wire")


def ahead_on(link: Link) -> ScheduleFactory:
    ahead = ahead_for(FORWARD_S, BACKWARD_S, PAYLOAD_BYTES / link.bandwidth_Bps + link.latency_s)
    return lambda stages, micro_batches: one_forward_one_backward(stages, micro_batches, ahead=ahead)


@dataclass(frozen=True)
class Case:
    """One pipeline; `layers` in each of its stages."""

    name: str
    schedule: ScheduleFactory
    micro_batches: int
    link: Link = LAN
    stages: int = STAGES
    layers: int = 1

    @property
    def key(self) -> str:
        return f"{self.stages} stages, {self.name}, M = {self.micro_batches}, {self.link.name}"

    @property
    def ideal_s(self) -> float:
        """With nothing but the bubble: (M + S - 1) of a stage's forward and backward."""
        return (self.micro_batches + self.stages - 1) * self.layers * (FORWARD_S + BACKWARD_S)

    @property
    def predicted_s(self) -> float:
        """With the links too: what `protocol.schedule.timetable` says."""
        made = timetable(
            self.schedule(self.stages, self.micro_batches),
            self.layers * FORWARD_S,
            self.layers * BACKWARD_S,
            send_s=PAYLOAD_BYTES / self.link.bandwidth_Bps,
            latency_s=self.link.latency_s,
        )
        return made.makespan_s

    def pipeline(self) -> Pipeline:
        return Pipeline(
            self.stages,
            self.micro_batches,
            self.schedule,
            layers=self.layers,
            payload_bytes=PAYLOAD_BYTES,
            link=self.link,
        )


CASES = (
    Case("fill-drain", fill_drain, 8),
    Case("1F1B", one_forward_one_backward, 8),
    Case("1F1B, ahead", ahead_on(LAN), 8),
    Case("one stage", fill_drain, 24, stages=1, layers=STAGES),
    Case("fill-drain", fill_drain, 24),
    Case("1F1B", one_forward_one_backward, 24),
    Case("1F1B, ahead", ahead_on(LAN), 24),
    Case("one stage", fill_drain, 48, stages=1, layers=STAGES),
    Case("1F1B, ahead", ahead_on(LAN), 48),
    Case("fill-drain", fill_drain, 16),
    Case("1F1B", one_forward_one_backward, 16),
    Case("1F1B, ahead", ahead_on(LAN), 16),
    Case("fill-drain", fill_drain, 16, FAST),
    Case("1F1B", one_forward_one_backward, 16, FAST),
    Case("1F1B, ahead", ahead_on(FAST), 16, FAST),
)
RIVALS = [("GPipe", 8), ("1F1B", 8), ("GPipe", 24), ("1F1B", 24)]


def emulated(rounds: int) -> dict[str, Any]:
    sleep_exactly()
    pipelines = {case: case.pipeline() for case in CASES}
    times: dict[Case, list[float]] = {case: [] for case in CASES}
    theirs: dict[tuple[str, int], list[float]] = {case: [] for case in RIVALS}
    for pipeline in pipelines.values():
        pipeline.step_s()  # not counted: libraries are loaded in it
    for turn in range(rounds):
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
        for case, pipeline in pipelines.items():
            times[case].append(pipeline.step_s())
        for rival, found in torch_side.steps_s(STAGES, RIVALS, 1, PAYLOAD_BYTES).items():
            theirs[rival] += found
    rows: list[dict[str, Any]] = [
        {"key": c.key, "ideal_s": c.ideal_s, "predicted_s": c.predicted_s, "times_s": found}
        for c, found in times.items()
    ]
    for (name, micro_batches), found in theirs.items():
        ideal_s = (micro_batches + STAGES - 1) * (FORWARD_S + BACKWARD_S)
        key = f"{STAGES} stages, torch's {name}, M = {micro_batches}, gloo on loopback"
        rows.append({"key": key, "ideal_s": ideal_s, "predicted_s": None, "times_s": found})
    return {"rows": rows}


def times_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A row of each pipeline: what its schedule allows beside what its steps took."""
    lines = [
        "| pipeline | bubble only | with links | median | least | share of bubble only |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        median_s, least_s = statistics.median(row["times_s"]), min(row["times_s"])
        predicted = "" if row["predicted_s"] is None else f"{row['predicted_s'] * 1e3:.0f} ms"
        lines.append(
            f"| {row['key']} | {row['ideal_s'] * 1e3:.0f} ms | {predicted} | {median_s * 1e3:.1f} ms | "
            f"{least_s * 1e3:.1f} ms | {row['ideal_s'] / median_s:.1%} |"
        )
    return lines


def emulated_table(found: dict[str, Any]) -> str:
    return "\n".join([*times_table(found["rows"]), "", goals_table(found)])


def goals_table(found: dict[str, Any]) -> str:
    """What was wanted beside what was reached, by the medians and, on a busy machine, by the least times."""
    columns = []
    for statistic in (statistics.median, min):
        times_s = {row["key"]: statistic(row["times_s"]) for row in found["rows"]}
        columns.append(reached(times_s))
    lines = ["| goal | wanted | by medians | by least times |", "|---|---:|---:|---:|"]
    for (goal, wanted, one), (_, _, two) in zip(*columns, strict=True):
        lines.append(f"| {goal} | {wanted} | {one} | {two} |")
    return "\n".join(lines)


def reached(times_s: dict[str, float]) -> list[tuple[str, str, str]]:
    """The best of our schedules counts, and the better one of torch's."""

    def best(micro_batches: int, link: Link) -> float:
        ours = [c for c in CASES if (c.stages, c.micro_batches, c.link) == (STAGES, micro_batches, link)]
        return min(times_s[case.key] for case in ours)

    def torch_best(micro_batches: int) -> float:
        return min(value for key, value in times_s.items() if f"M = {micro_batches}, gloo" in key)

    ideal_s = (8 + STAGES - 1) * (FORWARD_S + BACKWARD_S)
    alone_s = {case.micro_batches: times_s[case.key] for case in CASES if case.stages == 1}
    waited_s = alone_s[24] / 24 / STAGES  # what a stage's forward and backward of a micro-batch really took
    return [
        ("M = 8, LAN: share of the bubble-only ideal", ">= 95 %", f"{ideal_s / best(8, LAN):.1%}"),
        (
            "M = 8, LAN: share of it, with the time that one stage's waiting really took",
            ">= 95 %",
            f"{(8 + STAGES - 1) * waited_s / best(8, LAN):.1%}",
        ),
        ("M = 8: torch's time over ours", ">= 1", f"{torch_best(8) / best(8, LAN):.3f}"),
        ("M = 24: torch's time over ours", ">= 1", f"{torch_best(24) / best(24, LAN):.3f}"),
        ("M = 24: 4 stages against 1", ">= 3.5x", f"{alone_s[24] / best(24, LAN):.2f}x"),
        ("M = 48: 4 stages against 1", ">= 3.5x", f"{alone_s[48] / best(48, LAN):.2f}x"),
        (f"M = 16: {FAST.name} against the LAN", ">= 85 %", f"{best(16, LAN) / best(16, FAST):.1%}"),
    ]


def runtime_table(found: dict[str, Any]) -> str:
    lines = [*times_table(found["rows"]), "", "| goal | wanted | by medians |", "|---|---:|---:|"]
    lines += [f"| {goal} | {wanted} | {got} |" for goal, wanted, got in runtime.goals(found["rows"])]
    return "\n".join(lines)


def limit_table(found: dict[str, Any]) -> str:
    limit_bytes = found["limit_bytes"]
    lines = ["| | allowed | peak | of the limit | loss, step by step |", "|---|---:|---:|---:|---|"]
    for row in found["rows"]:
        cap, peak = row["cap_bytes"], row["peak_bytes"]
        allowed = "no bound" if cap is None else f"{cap / 2**20:.0f} MiB"
        held = "refused" if peak is None else f"{peak / 2**20:.0f} MiB"
        share = "" if peak is None else f"{peak / limit_bytes:.2f}"
        losses = ", ".join(f"{loss:.3f}" for loss in row["losses"])
        lines.append(f"| {row['name']} | {allowed} | {held} | {share} | {losses} |")
    return "\n".join(lines)


def memory_table(found: dict[str, Any]) -> str:
    lines = [
        "| schedule | re-materialisation | micro-batches kept | peak above the weights and gradients |",
        "|---|---|---:|---:|",
    ]
    for row in found["rows"]:
        mib = row["peak_bytes"] / 2**20
        again = "yes" if row["rematerialise"] else "no"
        lines.append(f"| {row['schedule']} | {again} | {row['kept']} | {mib:.0f} MiB |")
    return "\n".join(lines)


def wire_table(found: dict[str, Any]) -> str:
    lines = [
        f"| between stages | held-out loss after {found['steps']} steps, by seed | mean | bytes a step |",
        "|---|---|---:|---:|",
    ]
    for row in found["rows"]:
        each = ", ".join(f"{value:.3f}" for value in row["held_out"])
        lines.append(
            f"| {row['wire']} | {each} | {statistics.mean(row['held_out']):.3f} | {row['sent_bytes']:,} |"
        )
    return "\n".join(lines)


TABLES = {
    "emulated": emulated_table,
    "runtime": runtime_table,
    "limit": limit_table,
    "memory": memory_table,
    "wire": wire_table,
}


def measured(part: str, options: argparse.Namespace, before: dict[str, Any]) -> dict[str, Any]:
    """`before`: what an earlier run of this part has found."""
    rounds, steps = options.rounds, options.steps
    match part:
        case "emulated":
            return emulated(rounds)
        case "runtime":
            rows = runtime.rows(rounds, options.cases)
            anew = {row["case"] for row in rows}
            return {"rows": [row for row in before.get("rows", []) if row["case"] not in anew] + rows}
        case "limit":
            return limit.all_cases()
        case "memory":
            return {"rows": [asdict(peak) for peak in memory.all_cases()]}
    return {"steps": steps, "rows": [asdict(wire_loss.learnt(wire, steps, SEEDS)) for wire in WirePrecision]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=200, help="of training, for the part wire")
    parser.add_argument("--cases", nargs="+", choices=runtime.NAMES, default=list(runtime.NAMES))
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the latest results only")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    parts = [] if options.table else options.part or PARTS
    torch.set_num_threads(1)
    for part in parts:
        results[part] = measured(part, options, results.get(part, {})) | {
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "torch": torch.__version__,
        }
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    for part in PARTS:
        if part in results:
            print(f"## {part}, {results[part]['date']}\n\n{TABLES[part](results[part])}\n")


if __name__ == "__main__":
    main()
