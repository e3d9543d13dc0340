"""The script of gridtrain's workers: an ordinary training loop over the SDK.

    gridtrain worker INVITATION -- python -m accuracy.train --workload gpt --exchange gtopk --folder FOLDER

The first worker writes steps.jsonl with the same recorder as `rivals.train`, and measures the held-out loss
while all others wait at the same step; with local steps, only directly after an exchange.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import gridtrain
from accuracy.recorder import Recorder
from accuracy.workloads import WORKLOADS
from gridtrain.sdk.grid import Grid
from gridtrain.tools.bench.exchange_names import parse_exchange
from gridtrain.training.local_sgd import LocalSGDOptimizer
from rivals.contract import INTERFACE

EXCHANGES = (
    "dense",
    "dense-adamw",
    "topk",
    "gtopk",
    "gtopk-int8",
    "local",
    "local-int8",
    "local-topk",
    "local-topk-sgd",
)
"""Names of exchanges, each with an optimizer family.  The local steps and the density of local-topk are those
of the workload (`gathered`)."""


def exchange_of(options: argparse.Namespace) -> tuple[str, object]:
    """Return the family of settings and the exchange."""
    density, every = options.density, options.every
    match options.exchange:
        case "dense":
            return "dense", gridtrain.Dense()
        case "dense-adamw":
            return "adamw", gridtrain.Dense()
        case "topk":
            return "sparse", gridtrain.TopK(density=density, momentum=0.9)
        case "gtopk":
            return "sparse", gridtrain.GTopK(density=density, momentum=0.9)
        case "gtopk-int8":
            return "sparse", gridtrain.GTopK(density=density, momentum=0.9, values="int8")
        case "local":
            return "local", gridtrain.LocalSteps(every=every, exchange=gridtrain.GTopK(density=density))
        case "local-topk" | "local-topk-sgd" as name:
            family = "local-sgd" if name.endswith("sgd") else "local"
            turn, entries = options.gathered or WORKLOADS[options.workload].gathered[family]
            every, _, overlapped = str(turn).partition("/")
            details = str(entries) if "=" in str(entries) else f"density={entries},values=int8"
            gathered = parse_exchange(f"topk:{details}")
            return family, gridtrain.LocalSteps(int(every), gathered, overlap=int(overlapped or 0))
        case _:
            sparse = gridtrain.GTopK(density=density, values="int8")
            return "local", gridtrain.LocalSteps(every=every, exchange=sparse)


def train(options: argparse.Namespace, grid: Grid) -> None:
    """Train as one worker."""
    workload = WORKLOADS[options.workload]()
    model = workload.model(options.seed)
    family, exchange = exchange_of(options)
    settings = workload.settings[family].at(options.learning_rate)
    inner = settings.build(model, momentum=family != "sparse")
    local = family.startswith("local")
    clip = {} if local else {"clip_norm": settings.clip_norm}
    every = exchange.every if isinstance(exchange, gridtrain.LocalSteps) else 1
    optimizer = grid.optimizer(inner, model, exchange=exchange, compare_every=0, **clip)  # type: ignore[arg-type]
    recorder: Recorder | None = None
    rounds, between = options.steps, options.measure_every
    if local:
        rounds, between = -(-options.steps // every), max(1, round(between / every))
    batches = grid.batches(workload.train, batch_size=workload.batch_size, steps=rounds)
    for step, (x, y) in enumerate(batches, 1):
        recorder = recorder or Recorder(options.folder / "steps.jsonl", INTERFACE)
        loss = workload.loss(model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        if local:  # the optimizer's `clip_norm` clips exchanged gradients, not those of local steps
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
            break


def are_common(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all workers have the same parameters, as always but between two local steps."""
    return not (isinstance(optimizer, LocalSGDOptimizer) and optimizer.local_calls)


def measure_on_first(
    grid: Grid, measure: Callable[[], float], until: float = -math.inf
) -> tuple[float | None, bool]:
    """Measure on the first worker while the others wait, as rivals do in `Exchange.stop`.

    All workers must call it after the same step.  Returns the loss (None on the other workers), and on all
    workers whether it is at most `until`.
    """
    with grid.evaluation():
        found = measure() if grid.is_first else None
        is_reached = grid.mean(float(found is not None and found <= until)) > 0
    return found, is_reached


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="a worker of gridtrain in a run to a target")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), required=True)
    parser.add_argument("--exchange", choices=EXCHANGES, required=True)
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--every", type=int, default=16, help="local steps of one exchange")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--measure-every",
        type=int,
        default=10,
        metavar="STEPS",
        help="with local steps: the nearest exchanges",
    )
    parser.add_argument("--learning-rate", type=float, help="instead of the workload's")
    parser.add_argument("--until-loss", type=float, default=-math.inf, metavar="NATS")
    parser.add_argument(
        "--gathered",
        nargs=2,
        metavar=("EVERY", "DENSITY"),
        help="of local-topk, instead of the workload's; DENSITY may be like density=0.03,values=int2",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)  # several workers share this machine's cores
    train(parse(), gridtrain.join())
