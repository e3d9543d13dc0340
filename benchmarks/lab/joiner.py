"""Measures what a worker that joins a large run over a slow link costs the other workers.

Agents, sockets and links are real.  Computing is emulated: by constant gradients, and by a pause as long as a
GPU would compute.

    python -m lab.joiner                              100 M parameters, SGD with momentum, 100 Mbit/s, 3 + 1
    python -m lab.joiner --parameters 10e6 --rate 20Mbit --compute 0.5
    python -m lab.joiner --workload lora-114m --rate 20Mbit          LoRA: the frozen base is not sent

    workers 1..3  | calm: steps per second | the joiner's script starts ... its first step | a few more steps
    lost = 1 - (rate while it joins) / (rate before)
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accuracy.workloads import WORKLOADS, trained_of
from lab.group import Plan, start
from lab.net import Net, why_not
from lab.ns import LabError
from rivals.contract import INTERFACE
from rivals.measure import received_bytes

LAYERS = 16
WARM_UP_STEPS = 3
AFTERWARDS_STEPS = 3
LATE = "worker-late"


# -- the workers' script -------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """Train as one worker; write a line of JSON to --out for each batch."""
    import torch
    from torch import nn

    import gridtrain

    if options.gate:
        Path(options.gate).read_bytes()  # blocks until the gate has been written and closed
    torch.set_num_threads(1)
    torch.manual_seed(7)
    if options.workload:
        model: nn.Module = WORKLOADS[options.workload]().model(0)
    else:
        side = int((options.parameters / LAYERS) ** 0.5)
        model = nn.ModuleList([nn.Linear(side, side, bias=False) for _ in range(LAYERS)])
    trained = trained_of(model)
    noise = [torch.randn_like(parameter) * 1e-3 for parameter in trained]
    with open(options.out, "a", buffering=1) as out, gridtrain.join() as grid:
        before_bytes = received_bytes(INTERFACE) or 0
        optimizer = grid.optimizer(
            torch.optim.SGD(trained, lr=0.01, momentum=0.9),
            model,
            exchange=gridtrain.GTopK(density=options.density, momentum=0.0),
            compare_every=0,
        )
        for _ in grid.batches(range(10**5), batch_size=1, steps=10**6):
            line = {"step": grid.step, "at": time.monotonic(), "of": grid.world_size}
            print(json.dumps(line | {"received": (received_bytes(INTERFACE) or 0) - before_bytes}), file=out)
            time.sleep(options.compute)  # in the place of a GPU's computation
            for parameter, each in zip(trained, noise, strict=True):
                parameter.grad = each * (1 + grid.rank)
            optimizer.step()


# -- the measurement -----------------------------------------------------------------------------


class _EnoughError(Exception):
    """The measurement is complete."""


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the group and measure it.  Raises `LabError` with the ends of the logs."""
    names = (*(f"worker-{number}" for number in range(1, options.workers + 1)), LATE)
    plan = Plan(workers=len(names), link_rate=options.rate, names=names, late=1)
    gate = folder / "gate"
    os.mkfifo(gate)
    common = [sys.executable, "-m", "lab.joiner", "--train"]
    common += ["--parameters", str(options.parameters), "--density", str(options.density)]
    common += ["--compute", str(options.compute), "--workload", options.workload]

    def script(name: str) -> Sequence[str]:
        late = ["--gate", str(gate)] if name == LATE else []
        return [*common, "--out", str(folder / f"{name}.jsonl"), *late]

    first, late = folder / "worker-1.jsonl", folder / f"{LATE}.jsonl"
    opened_s = 0.0

    def tick() -> None:
        nonlocal opened_s
        steps = [line for line in lines(first) if "step" in line]
        if not opened_s and len(steps) > WARM_UP_STEPS + options.calm:
            opened_s = time.monotonic()
            gate.write_text("go")
        entered = [line for line in lines(late) if "step" in line]
        if len(entered) > AFTERWARDS_STEPS:
            raise _EnoughError

    with Net() as net:
        group = start(net, plan, folder, script)
        with contextlib.suppress(_EnoughError):
            group.wait(options.timeout, tick)
    return evaluate(lines(first), lines(late), opened_s)


def evaluate(first: list[dict[str, Any]], late: list[dict[str, Any]], opened_s: float) -> dict[str, Any]:
    steps = [line for line in first if "step" in line][WARM_UP_STEPS:]
    calm_s = [b["at"] - a["at"] for a, b in itertools.pairwise(steps) if b["at"] < opened_s]
    entered = next(line for line in late if "step" in line)
    during = [line for line in steps if opened_s <= line["at"] <= entered["at"]]
    took_s = entered["at"] - opened_s
    calm_Hz = len(calm_s) / sum(calm_s)
    longest_s = max((b["at"] - a["at"] for a, b in itertools.pairwise(during)), default=took_s)
    return {
        "calm_step_s": statistics.median(calm_s),
        "joining_s": took_s,
        "steps_meanwhile": len(during),
        "expected_steps": calm_Hz * took_s,
        "lost": 1 - len(during) / (calm_Hz * took_s),
        "longest_step_s": longest_s,
        "received_bytes": entered["received"],
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lab.joiner", description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--workload", default="", help="one of accuracy.workloads, instead of --parameters")
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--compute", type=float, default=1.0, metavar="SECONDS", help="emulated, of a step")
    parser.add_argument("--rate", default="100Mbit", help="of each worker's link")
    parser.add_argument("--workers", type=int, default=3, help="besides the one that joins")
    parser.add_argument("--calm", type=int, default=15, metavar="STEPS", help="before it joins")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    for name in ("--train",):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    for name in ("--out", "--gate"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.train:
        train(options)
        return 0
    if reason := why_not():
        print(f"no network lab here: {reason}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="gridtrain-lab-") as folder:
        try:
            figures = measure(options, Path(folder))
        except LabError as error:
            print(error, file=sys.stderr)
            return 1
    model = options.workload or f"{options.parameters / 1e6:.0f} M parameters"
    print(
        f"{model}, {options.rate} links, {options.workers} workers, "
        f"a step {figures['calm_step_s']:.2f} s: one joined in {figures['joining_s']:.1f} s; meanwhile "
        f"{figures['steps_meanwhile']} steps of {figures['expected_steps']:.1f}: {figures['lost']:.1%} lost; "
        f"the longest took {figures['longest_step_s']:.2f} s; "
        f"{figures['received_bytes'] / 1e6:.2f} MB received"
    )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
