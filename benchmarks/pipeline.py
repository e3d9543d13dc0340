"""Measures pipelines (docs/pipeline.md): steps on slow links, and the memory of stages.

    runtime    four stages that wait instead of computing (10 ms forward, 20 ms backward a micro-batch), each
               worker on a host with a shaped link; torch on such hosts; and one process alone (needs root)
    memory     peak memory of a stage with and without re-materialization

Run:  python benchmarks/pipeline.py
      python benchmarks/pipeline.py --part runtime --cases lan8 torch alone     (other results do not change)
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import record
from stages import memory, runtime


def runtime_table(found: dict[str, Any]) -> str:
    rows = []
    for row in found["rows"]:
        median_s, ideal_s = statistics.median(row["times_s"]), row["ideal_s"]
        times = (f"{seconds * 1e3:.1f} ms" for seconds in (ideal_s, median_s, min(row["times_s"])))
        rows.append((row["key"], *times, f"{ideal_s / median_s:.1%}"))
    return record.table(("pipeline", "bubble only", "median", "least", "share of bubble only"), rows)


def memory_table(found: dict[str, Any]) -> str:
    rows = [
        (row["schedule"], row["rematerialise"], row["kept"], f"{row['peak_bytes'] / 2**20:.0f} MiB")
        for row in found["rows"]
    ]
    heads = ("schedule", "re-materialization", "micro-batches kept", "peak above the weights and gradients")
    return record.table(heads, rows)


TABLES = {"runtime": runtime_table, "memory": memory_table}


def measured(part: str, options: argparse.Namespace, before: dict[str, Any]) -> dict[str, Any]:
    """Measure a part; `before` are its earlier results, of which those of other cases remain."""
    if part == "memory":
        return memory.stages()
    rows = runtime.measure(options.rounds, options.cases)
    fresh = {row["case"] for row in rows}
    return {"rows": [row for row in before.get("rows", []) if row["case"] not in fresh] + rows}


def main() -> None:
    parser = record.parser(__doc__, out="")
    parser.add_argument("--part", choices=list(TABLES), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", nargs="+", choices=runtime.NAMES, default=list(runtime.NAMES))
    parser.add_argument("--json", type=Path, default=record.RESULTS / "pipeline.json")
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    torch.set_num_threads(1)
    for part in options.part or list(TABLES):
        made = {"date": datetime.date.today().isoformat(), "machine": record.machine()}
        results[part] = measured(part, options, results.get(part, {})) | made
        record.replace(options.json, json.dumps(results, indent=1) + "\n")
    for part in TABLES:
        if part in results:
            print(f"## {part}, {results[part]['date']}\n\n{TABLES[part](results[part])}\n")


if __name__ == "__main__":
    main()
