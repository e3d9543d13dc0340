"""Measures pipelines (docs/pipeline.md): steps on slow links, and the memory of stages.

    runtime    four stages that wait instead of computing (10 ms forward, 20 ms backward a micro-batch), each
               worker on a host with a shaped link; torch on such hosts; and one process alone (needs root)
    limit      a model that needs four times the memory limit of each of its four workers (needs root)
    memory     peak memory of a stage with and without re-materialization

Run:  python benchmarks/pipeline.py
      python benchmarks/pipeline.py --part runtime --cases lan8 torch alone     (other results do not change)
      python benchmarks/pipeline.py --table              (the latest results as tables)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from stages import limit, memory, runtime

RESULTS = Path(__file__).parent / "results" / "pipeline.json"


def times_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of each pipeline's predicted and measured durations of a step."""
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
        used = "refused" if peak is None else f"{peak / 2**20:.0f} MiB"
        share = "" if peak is None else f"{peak / limit_bytes:.2f}"
        losses = ", ".join(f"{loss:.3f}" for loss in row["losses"])
        lines.append(f"| {row['name']} | {allowed} | {used} | {share} | {losses} |")
    return "\n".join(lines)


def memory_table(found: dict[str, Any]) -> str:
    lines = [
        "| schedule | re-materialization | micro-batches kept | peak above the weights and gradients |",
        "|---|---|---:|---:|",
    ]
    for row in found["rows"]:
        mib = row["peak_bytes"] / 2**20
        again = "yes" if row["rematerialise"] else "no"
        lines.append(f"| {row['schedule']} | {again} | {row['kept']} | {mib:.0f} MiB |")
    return "\n".join(lines)


TABLES = {"runtime": runtime_table, "limit": limit_table, "memory": memory_table}


def measured(part: str, options: argparse.Namespace, before: dict[str, Any]) -> dict[str, Any]:
    """Measure a part; `before` are its earlier results, of which those of other cases remain."""
    match part:
        case "runtime":
            rows = runtime.rows(options.rounds, options.cases)
            fresh = {row["case"] for row in rows}
            return {"rows": [row for row in before.get("rows", []) if row["case"] not in fresh] + rows}
        case "limit":
            return limit.all_cases()
        case _:
            return {"rows": [asdict(peak) for peak in memory.all_cases()]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=list(TABLES), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=runtime.NAMES, default=list(runtime.NAMES))
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="only print the latest results")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    parts = [] if options.table else options.part or list(TABLES)
    torch.set_num_threads(1)
    for part in parts:
        results[part] = measured(part, options, results.get(part, {})) | {
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "torch": torch.__version__,
        }
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    for part in TABLES:
        if part in results:
            print(f"## {part}, {results[part]['date']}\n\n{TABLES[part](results[part])}\n")


if __name__ == "__main__":
    main()
