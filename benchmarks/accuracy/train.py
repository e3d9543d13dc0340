"""A training run of a workload with gridtrain: an ordinary training loop over the SDK.

The first worker writes steps.jsonl with the same recorder as `rivals.train`, and measures the held-out loss
while all others wait at the same step; with local steps, only directly after an exchange.

    work                in the lab, as a worker's script
    train_in_process    four workers in this process, with connections in memory (`gridtrain.local`)
"""

from __future__ import annotations

import json
import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gridtrain
from accuracy.recorder import MEASURE_EVERY, Recorder
from accuracy.workloads import WORKLOADS
from gridtrain.sdk.grid import Grid
from gridtrain.tools.bench.exchange_names import parse_exchange
from gridtrain.training.local_sgd import LocalSGDOptimizer
from procfs import sent_bytes
from rivals.contract import INTERFACE

WORKERS = 4
"""Of a run in one process."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run, the same for all workers.

    Attributes:
        family: of the workload's settings.
        exchange: such as "gtopk:density=0.05,momentum=0.9".
        every: local steps of an exchange; 0: it exchanges gradients.
        overlap: local steps that overlap with an exchange.
        outer: learning rate and momentum of the outer optimizer.
        buckets: selects in so many parts of the vector, as `Overlap` does; 0: as a whole.
        steps: most steps of each worker.
        measure_every: steps; with local steps: the nearest exchanges.
        until_loss: the held-out loss at which the run ends.
        folder: of steps.jsonl.
    """

    workload: str
    family: str
    exchange: str
    every: int = 0
    overlap: int | bool = 0
    outer: tuple[float, float] = (1.0, 0.0)
    buckets: int = 0
    steps: int = 300
    measure_every: int = MEASURE_EVERY
    learning_rate: float | None = None
    until_loss: float | None = None
    seed: int = 0
    folder: str = ""

    def make_exchange(self) -> Any:
        exchange = parse_exchange(self.exchange)
        if not self.every:
            return exchange
        return gridtrain.LocalSteps(self.every, exchange, *self.outer, overlap=self.overlap)


def gathered(every: int | str, entries: float | str) -> dict[str, Any]:
    """Return the options of local steps with `TopK`.

    Args:
        every: local steps of an exchange; "8/2": 2 of them overlap with the previous one.
        entries: a density, sent as int8, or options such as "density=0.03,values=int2".
    """
    turn, _, overlapped = str(every).partition("/")
    details = str(entries) if "=" in str(entries) else f"density={entries},values=int8"
    return {"every": int(turn), "overlap": int(overlapped or 0), "exchange": f"topk:{details}"}


def train(options: Options, grid: Grid, count_sent: Callable[[], int | None] | None = None) -> None:
    """Train as one worker.

    Args:
        count_sent: returns the bytes that the first worker has sent; by default, its payloads.
    """
    workload = WORKLOADS[options.workload]()
    model = workload.model(options.seed)
    settings, every = workload.settings[options.family].at(options.learning_rate), options.every or 1
    more: dict[str, Any] = {} if options.every else {"clip_norm": settings.clip_norm}
    if options.buckets:
        more["overlap"] = gridtrain.Overlap(options.buckets, 1, adaptive=False)
    inner = settings.build(model, momentum=options.family != "sparse")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some settings are measured because they learn worse
        exchange = options.make_exchange()
        optimizer = grid.optimizer(inner, model, exchange=exchange, compare_every=0, **more)
    rounds, between = -(-options.steps // every), max(1, round(options.measure_every / every))
    count = count_sent or (lambda: grid.traffic.get("Data", (0, 0))[0])
    recorder: Recorder | None = None
    batches = grid.batches(workload.train, batch_size=workload.batch_size, steps=rounds)
    for step, (x, y) in enumerate(batches, 1):
        recorder = recorder or Recorder(Path(options.folder, "steps.jsonl"), count)
        loss = workload.loss(model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        if options.every:  # the optimizer's `clip_norm` clips exchanged gradients, not those of local steps
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        reading, held_out, is_reached = recorder.read(), None, False
        if are_common(optimizer) and (grid.step % between == 0 or grid.step == rounds):
            with recorder.paused():
                measure = partial(workload.held_out, model)
                held_out, is_reached = measure_on_first(grid, measure, options.until_loss)
        if grid.is_first:
            recorder.write(step, reading, loss.item(), held_out)
        if is_reached:
            return
    if options.overlap and grid.is_first and recorder is not None:
        with grid.evaluation():  # the last changes were exchanged after the last local step
            recorder.write(step, recorder.read(), loss.item(), workload.held_out(model))


def are_common(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all workers have the same parameters, as always but between two local steps."""
    return not (isinstance(optimizer, LocalSGDOptimizer) and optimizer.local_calls)


def measure_on_first(
    grid: Grid, measure: Callable[[], float], until: float | None = None
) -> tuple[float | None, bool]:
    """Measure on the first worker while the others wait, as rivals do in `Exchange.stop`.

    All workers must call it after the same step.  Returns the loss (None on the other workers), and on all
    workers whether it is at most `until`.
    """
    with grid.evaluation():
        found = measure() if grid.is_first else None
        is_reached = found is not None and found <= (-math.inf if until is None else until)
        return found, grid.mean(float(is_reached)) > 0


def work(options: dict[str, Any]) -> None:
    """Train as a worker in the lab."""
    with gridtrain.join() as grid:
        train(Options(**options), grid, lambda: sent_bytes(INTERFACE))


def train_in_process(options: Options) -> list[dict[str, Any]]:
    """Train with `WORKERS` workers in this process; return the records of the first one."""
    with tempfile.TemporaryDirectory(prefix="accuracy-") as folder:
        gridtrain.local(partial(train, replace(options, folder=folder)), workers=WORKERS)
        return read(Path(folder) / "steps.jsonl")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a run, which may still be writing its last one."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]
