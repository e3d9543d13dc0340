"""`gridtrain bench`: checks the memory, measures this machine, and prints tables and a summary.

processor    copy, selection, codec, merge: ns for each parameter or entry, ms for the whole model
exchange     dense and gTop-k in groups of local workers: ms, CPU time, bytes, and their time on a link
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.network.transport.rate_limiter import parse_rate
from gridtrain.tools.bench.bench_group import BenchSetting, ExchangeSample, LocalHost, start_group
from gridtrain.tools.bench.processor_bench import measure_processor

FIGURE_LABELS = {
    "copy_ns": ("copy of the gradient", "parameter"),
    "select_ns": ("select entries to send, one CPU thread", "parameter"),
    "encode_ns": ("encode a payload", "entry"),
    "decode_ns": ("decode a payload", "entry"),
    "merge_ns": ("merge two payloads", "entry"),
    "gpu_copy_ns": ("copy of the gradient on the GPU", "parameter"),
    "gpu_select_ns": ("select entries to send, GPU", "parameter"),
}
WARMUP = 1
MAX_PARAMETERS = 2**32
"""The maximum number of elements of a vector in a sparse payload (PROTOCOL.md, 5.2)."""
BYTES_PER_PARAMETER = 16
"""A worker's bytes per element: gradient, scaled copy, residual, and the residual's second buffer."""


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The measurements that `gridtrain bench` makes.

    Attributes:
        parameters: the number of parameters of the assumed model.
        density: the density of the sparse exchange, and of the payloads that the codec processes.
        workers: the sizes of the groups; if (), no exchange is measured.
        repeats: the number of measurements of each exchange.
        rate: the upload and download limit of each local worker; "" for none.
        line: the rate of a link, such as "20Mbit", for converting the bytes sent into seconds.
    """

    parameters: int
    density: float = 0.01
    workers: tuple[int, ...] = (2, 4)
    repeats: int = 5
    encrypted: bool = True
    rate: str = ""
    line: str = "20Mbit"


@dataclass(frozen=True, slots=True)
class ExchangeResult:
    """The medians of one group's exchanges.

    Attributes:
        cpu_s, sent_bytes: the figures of one worker, as a mean over the workers.
        repeats: the number of repeats whose first attempt was committed; only these are in the medians.
        left_out: the number of repeats with aborted attempts; their figures cover more than one exchange.
    """

    exchange: str
    workers: int
    seconds: float
    cpu_s: float
    sent_bytes: float
    repeats: int = 1
    left_out: int = 0


@dataclass(slots=True)
class BenchResult:
    """All results.

    Attributes:
        gpu: the name of the GPU; "" if there is none.
        local: the figures of `measure_processor`.
    """

    plan: BenchPlan
    cores: int
    gpu: str
    local: dict[str, float] = field(default_factory=dict)
    exchanges: list[ExchangeResult] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"schema": 1, "python": platform.python_version()}


def check_memory(plan: BenchPlan, memory_bytes: int | None = None) -> None:
    """Check that the machine has enough memory for the plan.

    Args:
        memory_bytes: the memory of the machine; None to measure it.

    Raises:
        ConfigError: the vectors of all workers do not fit into memory, or the model has more parameters than
            a payload can have elements.
    """
    if plan.parameters > MAX_PARAMETERS:
        raise ConfigError(
            f"--parameters is {plan.parameters:,}, but a payload has at most {MAX_PARAMETERS:,} elements",
            remedy="use a smaller number of parameters",
        )
    if memory_bytes is None:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    vectors = max(plan.workers, default=1)
    need_bytes = BYTES_PER_PARAMETER * plan.parameters * vectors
    if need_bytes > memory_bytes:
        fitting = memory_bytes // (BYTES_PER_PARAMETER * vectors)
        raise ConfigError(
            f"{plan.parameters:,} parameters for {vectors} local worker{'s' * (vectors > 1)} need about "
            f"{1e-9 * need_bytes:,.1f} GB of memory; this machine has {1e-9 * memory_bytes:,.1f} GB",
            remedy=f"use --parameters {fitting} or fewer, or smaller --workers",
        )


def run_bench(plan: BenchPlan, say: Callable[[str], None]) -> BenchResult:
    """Run the planned measurements.

    Args:
        say: a function that is called before each measurement with a short description of it.

    Raises:
        GridtrainError: a local worker failed (the message has the last lines of the logs), or every repeat of
            an exchange had aborted attempts.
    """
    found = BenchResult(plan, len(os.sched_getaffinity(0)), _gpu())
    say("selection, codec and merge")
    found.local = measure_processor(plan.parameters, plan.density)
    for workers in plan.workers:
        for exchange in ("dense", f"gtopk:density={plan.density!r}"):
            say(f"{exchange} among {workers} workers on this machine")
            setting = BenchSetting(exchange, workers, plan.parameters, plan.encrypted)
            with (
                tempfile.TemporaryDirectory(prefix="gridtrain-") as folder,
                start_group(setting, LocalHost(plan.rate), Path(folder, "g")) as group,
            ):
                repeats = [group.repeat() for _ in range(WARMUP + plan.repeats)][WARMUP:]
            found.exchanges.append(measure_exchange(setting, repeats))
    return found


def measure_exchange(setting: BenchSetting, repeats: Sequence[ExchangeSample]) -> ExchangeResult:
    """Return the medians of those repeats that had no aborted attempts.  Raises `GridtrainError` if there are
    none."""
    clean = [repeat for repeat in repeats if not repeat.aborts]
    left_out = len(repeats) - len(clean)
    if not clean:
        raise GridtrainError(
            f"{setting.exchange} among {setting.workers} workers: attempts were aborted in every repeat "
            f"({left_out}), so no exchange could be timed",
            remedy="close other programs, which may keep the machine too busy, or use fewer --workers",
        )
    return ExchangeResult(
        repeats=len(clean),
        left_out=left_out,
        exchange=setting.exchange,
        workers=setting.workers,
        seconds=statistics.median(repeat.seconds for repeat in clean),
        cpu_s=statistics.median(repeat.cpu_s for repeat in clean),
        sent_bytes=statistics.median(repeat.sent_bytes for repeat in clean),
    )


def print_result(found: BenchResult, console: Console) -> None:
    plan = found.plan
    console.print(
        f"{plan.parameters:,} parameters ({4e-6 * plan.parameters:.1f} MB of gradient), "
        f"density {plan.density:g}; {found.cores} CPU cores, {found.gpu or 'no GPU'}"
    )
    console.print(_processor_table(found))
    if found.exchanges:
        console.print(_exchange_table(found))
    for sentence in summary_sentences(found):
        console.print(sentence)


def _processor_table(found: BenchResult) -> Table:
    table = Table("what", "ns", "for each", "this model, ms", title="Processor", title_justify="left")
    entries = max(1, round(found.plan.density * found.plan.parameters))
    for name, ns in found.local.items():
        what, each = FIGURE_LABELS[name]
        count = found.plan.parameters if each == "parameter" else entries
        table.add_row(what, f"{ns:.2f}", each, f"{1e-6 * ns * count:.2f}")
    return table


def _exchange_table(found: BenchResult) -> Table:
    plan = found.plan
    title = f"Exchange on this machine, {'encrypted' if plan.encrypted else 'unencrypted'}"
    title += f", each worker at most {plan.rate}" if plan.rate else ""
    heads = (
        "exchange",
        "workers",
        "ms",
        "CPU ms per worker",
        "MB sent per worker",
        f"only the bytes at {plan.line}",
    )
    table = Table(*heads, title=title, title_justify="left")
    for row in found.exchanges:
        line_s = row.sent_bytes / parse_rate(plan.line)
        values = (f"{1e3 * row.seconds:.1f}", f"{1e3 * row.cpu_s:.1f}", f"{1e-6 * row.sent_bytes:.3f}")
        table.add_row(row.exchange.partition(":")[0], str(row.workers), *values, f"{line_s:.2f} s")
    return table


def summary_sentences(found: BenchResult) -> list[str]:
    """Return sentences that explain the tables."""
    plan, said = found.plan, []
    select_ms = 1e-6 * found.local["select_ns"] * plan.parameters
    times = found.local["select_ns"] / found.local["copy_ns"]
    said.append(
        f"Selecting takes {select_ms:.1f} ms per step on one CPU thread, {times:.1f} times as long as a copy."
    )
    if "gpu_select_ns" in found.local:
        gpu_ms = 1e-6 * found.local["gpu_select_ns"] * plan.parameters
        said.append(f"On the GPU it takes {gpu_ms:.1f} ms.")
    if found.exchanges:
        most = max(row.workers for row in found.exchanges)
        dense, sparse = (row for row in found.exchanges if row.workers == most)  # in the order of `run_bench`
        line_Bps = parse_rate(plan.line)
        said.append(
            f"On a link of {plan.line} a step among {most} workers takes at least "
            f"{dense.sent_bytes / line_Bps:.1f} s with dense and {sparse.sent_bytes / line_Bps:.2f} s with "
            "gTop-k, counting only the bytes."
        )
        crowd = most + 1  # and the coordinator
        if crowd > found.cores:
            said.append(
                f"{crowd} processes share {found.cores} cores here; on separate machines they are faster."
            )
    for row in found.exchanges:
        if row.left_out:
            said.append(
                f"{row.exchange.partition(':')[0]} among {row.workers} workers: {row.left_out} of "
                f"{row.repeats + row.left_out} repeats had aborted attempts and are left out."
            )
    return said


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
