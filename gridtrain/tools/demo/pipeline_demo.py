"""`gridtrain demo --pipeline`: trains a model too large for a worker's memory limit, and prints the results.

This module defines the runs, checks that none of the four stages exceeds the limit, and reports the results.

    not partitioned    1 worker, for comparison: more memory than the limit
    4 stages           4 workers: the same parameters, bit for bit, each worker below the limit
    2 stages x 2       4 workers: two replicas of each stage exchange gradients with gTop-k
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gridtrain.errors import GridtrainError
from gridtrain.quantities import format_count
from gridtrain.tools.demo.orchestrator import (
    coordinator_command,
    remove_old_files,
    supervise,
    worker_commands,
)
from gridtrain.tools.demo.step_records import StepRecord

MIB = 2**20


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """A run whose model has `stages` stages, each of them on `replicas` workers."""

    name: str
    label: str
    stages: int
    replicas: int
    exchange: str

    @property
    def workers(self) -> int:
        return self.stages * self.replicas


RUNS = (
    PipelineRun("one-piece", "not partitioned", 1, 1, "dense"),
    PipelineRun("four-stages", "4 stages", 4, 1, "dense"),
    PipelineRun("two-by-two", "2 stages x 2 replicas, gTop-k", 2, 2, "gtopk"),
)


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The results of a run.

    Attributes:
        workers: what each worker wrote with `pipeline_worker.write_results`, in rank order.
    """

    run: PipelineRun
    workers: list[dict[str, Any]]

    @property
    def losses(self) -> list[float]:
        return list(self.workers[0]["losses"])

    @property
    def seconds(self) -> float:
        return max(float(worker["seconds"]) for worker in self.workers)

    @property
    def held_bytes(self) -> list[int]:
        return [int(worker["held_bytes"]) for worker in self.workers]

    @property
    def sent_bytes_per_step(self) -> float:
        """The bytes that a worker sends in a step, on average."""
        total = sum(int(worker["sent_bytes"]) for worker in self.workers)
        return total / len(self.workers) / len(self.losses)


def run_pipeline_demo(out: Path, console: Console, *, steps: int, quick: bool) -> list[FinishedRun]:
    """Carry out all runs, print their results, and return them.

    Args:
        quick: whether to train a much smaller model, for which the memory limit is not checked.

    Raises:
        GridtrainError: a process failed, a step took too long, a worker wrote no results, or one of the four
            stages exceeds the memory limit.
    """
    from gridtrain.tools.demo.pipeline_model import MEMORY_LIMIT_BYTES

    limit_bytes = MEMORY_LIMIT_BYTES if not quick else None
    began_s = time.monotonic()
    ended = [_run(run, out / run.name, console, steps=steps, quick=quick) for run in RUNS]
    console.print()
    console.print(_table(ended))
    for sentence in summary_sentences(ended, out, limit_bytes):
        console.print(sentence, style="bold", highlight=False)
    console.print(
        f"Took {time.monotonic() - began_s:.0f} s in total. Logs and parameters: {out}", highlight=False
    )
    return ended


def _run(run: PipelineRun, folder: Path, console: Console, *, steps: int, quick: bool) -> FinishedRun:
    folder.mkdir(parents=True, exist_ok=True)
    remove_old_files(folder)
    train = [sys.executable, "-m", "gridtrain.tools.demo.pipeline_worker", "--stages", str(run.stages)]
    train += ["--exchange", run.exchange, "--steps", str(steps), "--metrics", str(folder)]
    train += ["--quick"] if quick else []
    size = f"{format_count(run.workers, 'worker')}, {format_count(steps, 'step')}"
    console.print(f"{run.label}: {size}", highlight=False)

    def show(record: StepRecord) -> None:
        if record.step % max(1, steps // 4) == 0:
            said = f"  step {record.step} of {steps}, loss {record.loss:.3f}, {record.seconds:.0f} s"
            console.print(said, highlight=False)

    workers = partial(worker_commands, run.workers, folder, train)
    supervise(coordinator_command(run.workers, folder), workers, folder, show)
    told = [json.loads(path.read_text()) for path in sorted(folder.glob("worker-*.json"))]
    if len(told) != run.workers:
        raise GridtrainError(
            f"only {len(told)} of {run.workers} workers wrote their results",
            remedy=f"see the logs in {folder}",
        )
    return FinishedRun(run, sorted(told, key=lambda worker: int(worker["rank"])))


def _table(ended: list[FinishedRun]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    headings = ("run", "first\nloss", "last\nloss", "seconds", "MiB sent by a\nworker per step")
    for heading in (*headings, "MiB held, by stage"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for one in ended:
        stages = one.held_bytes[:: one.run.replicas]
        table.add_row(
            one.run.label,
            f"{one.losses[0]:.3f}",
            f"{one.losses[-1]:.3f}",
            f"{one.seconds:.0f}",
            f"{one.sent_bytes_per_step / MIB:.2f}",
            "  ".join(f"{nbytes / MIB:.1f}" for nbytes in stages),
        )
    return table


def summary_sentences(ended: list[FinishedRun], out: Path, limit_bytes: int | None) -> list[str]:
    """Return sentences about the results.  Raises `GridtrainError` if one of the four stages exceeds the
    memory limit."""
    whole, cut, square = ended
    if limit_bytes is not None and max(cut.held_bytes) > limit_bytes:
        raise GridtrainError(
            f"a stage holds {max(cut.held_bytes) / MIB:.1f} MiB, but the limit is "
            f"{limit_bytes / MIB:.1f} MiB",
            remedy="change CUTS or MEMORY_LIMIT_BYTES in gridtrain/tools/demo/pipeline_model.py",
        )
    differs = largest_parameter_difference(out / whole.run.name, out / cut.run.name)
    limit = (
        "" if limit_bytes is None else f", and the declared limit is {limit_bytes / MIB:.1f} MiB per worker"
    )
    return [
        f"After {format_count(len(cut.losses), 'step')}, training in {cut.run.stages} stages differs from "
        f"training without stages by at most {differs:g} in a parameter and "
        f"{_apart(whole.losses, cut.losses):g} in a loss.",
        f"Without stages the model needs {whole.held_bytes[0] / MIB:.1f} MiB; the largest of the "
        f"{cut.run.stages} stages needs {max(cut.held_bytes) / MIB:.1f} MiB{limit}.",
        f"All {square.run.workers} workers of 2 stages x 2 replicas computed the same losses: "
        f"{'yes' if all(w['losses'] == square.losses for w in square.workers) else 'NO'}.",
    ]


def largest_parameter_difference(whole: Path, cut: Path) -> float:
    """Return the largest absolute difference between the final parameters in the folders of two runs, one
    without stages and one with them; infinite if their parameters do not have the same names."""
    import safetensors.torch

    one = safetensors.torch.load_file(whole / "final.safetensors")
    parts = [safetensors.torch.load_file(path) for path in sorted(cut.glob("final-*-of-*.safetensors"))]
    other = {name: tensor for part in parts for name, tensor in part.items()}
    if one.keys() != other.keys():
        return float("inf")
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def _apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
