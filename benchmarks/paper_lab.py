"""Measures the table of the gTop-k paper in the lab, with the sizes and compute times of its five models.

    worker    gradient, n random values -> wait until compute_s have passed -> step(): selection, exchange
    gloo      all-reduce of n values in the same lab, to which compute_s is added

Sizes are in data/gtopk_icdcs2019.json (arXiv 1901.04359); compute times are batch / throughput of one worker,
as in paper_table.py.  Computing is waited, because the workers share the cores, unlike GPUs; selection and
the update of the parameters are executed on these cores.  Scaling efficiency is compute_s over the median
step of the slowest worker.

Run (root):  python paper_lab.py --models vgg16 resnet20 --worlds 4 --out FILE       (in benchmarks/)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.group import Plan, start
from lab.net import Net
from paper_table import DATA, MODELS
from rivals.hosts import Job, LinkSettings, hosts_of
from rivals.hosts import measure as measure_rival

WARM_UP_STEPS, TENSORS = 3, 16
PARTS = ("waiting_s", "selecting_s", "communicating_s", "applying_s")


# -- one worker ----------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    import torch
    from torch import nn

    import gridtrain

    torch.set_num_threads(1)
    grid = gridtrain.join()
    size = max(1, options.n // TENSORS)
    model = nn.Module()
    for number in range(TENSORS):
        model.register_parameter(f"tensor{number}", nn.Parameter(torch.zeros(size)))
    exchange = gridtrain.Dense() if options.exchange == "dense" else gridtrain.GTopK(density=options.density)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-9)
    optimizer = grid.optimizer(sgd, model, exchange=exchange, compare_every=0)
    random = torch.Generator().manual_seed(os.getpid())
    gradients = [torch.randn(size, generator=random) for _ in range(TENSORS)]
    steps: list[dict[str, float]] = []
    began_s = time.perf_counter()
    for _ in grid.batches([torch.zeros(1)] * 64, batch_size=1, steps=options.steps):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad.copy_(gradient)
        time.sleep(max(0.0, began_s + options.compute - time.perf_counter()))  # the emulated computation
        optimizer.step()
        ended_s = time.perf_counter()
        parts = {name: optimizer.timings.get(name, 0.0) for name in PARTS}
        steps.append({"step_s": ended_s - began_s, **parts})
        began_s = ended_s
    options.result.joinpath(f"{os.getpid()}.json").write_text(json.dumps(steps[WARM_UP_STEPS:]))


# -- the lab -------------------------------------------------------------------------------------------


def measure(
    options: argparse.Namespace, exchange: str, world: int, n: int, compute_s: float
) -> dict[str, Any]:
    """Return the medians of the steps of gridtrain's slowest worker."""
    folder = Path(tempfile.mkdtemp(prefix="paper-"))
    results = folder / "results"
    results.mkdir()
    script = [sys.executable, str(Path(__file__).resolve()), "work", "--result", str(results)]
    script += ["--exchange", exchange, "--n", str(n), "--compute", repr(compute_s)]
    script += ["--density", str(options.density), "--steps", str(WARM_UP_STEPS + options.steps)]
    with Net() as net:
        plan = Plan(workers=world, encrypted=False, link_rate=options.rate)
        start(net, plan, folder, lambda name: script).wait(options.timeout)
    workers = [json.loads(path.read_text()) for path in sorted(results.iterdir())]
    assert len(workers) == world, f"{len(workers)} of {world} workers wrote their steps"
    medians = [
        {name: statistics.median(step[name] for step in steps) for name in ("step_s", *PARTS)}
        for steps in workers
    ]
    return max(medians, key=lambda one: one["step_s"])


def measure_gloo(options: argparse.Namespace, world: int, n: int) -> float:
    """Return the median duration of an all-reduce."""
    with Net() as net:
        hosts = hosts_of(net, world, LinkSettings(options.rate))
        job = Job("gloo", "all_reduce", world, n, repeats=options.repeats, warmup=1)
        found = measure_rival(hosts, job, Path(tempfile.mkdtemp(prefix="paper-")) / "gloo", options.timeout)
    return statistics.median(found.seconds)


def lab(options: argparse.Namespace) -> list[dict[str, Any]]:
    paper = json.loads(DATA.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = []
    for world in options.worlds:
        for model in options.models:
            parameters_of, batch = MODELS[model]
            throughput = paper["throughput"][model]
            compute_s, n = batch / throughput["P1"], round(paper["parameters"][parameters_of])
            for contender in options.contenders:
                if contender == "gloo":
                    exchange_s = measure_gloo(options, world, n)
                    found = {"step_s": compute_s + exchange_s, "communicating_s": exchange_s}
                else:
                    found = measure(options, contender, world, n, compute_s)
                column = "dense" if contender in ("gloo", "dense") else contender
                published = throughput[column][str(world)] / throughput["P1"]
                row = {"model": model, "n": n, "workers": world, "contender": contender}
                row |= {"compute_s": compute_s, **found}
                rows.append(row | {"efficiency": compute_s / found["step_s"], "paper": published})
                print(line(rows[-1]), flush=True)
                write(options, rows)
    return rows


def line(row: dict[str, Any]) -> str:
    parts = ", ".join(f"{name[:-2]} {row[name]:.3f}" for name in PARTS if name in row)
    return "| {model} | {workers} | {contender} | {efficiency:.1%} | {paper:.1%} | {step_s:.3f} |".format(
        **row
    ) + (f" {parts} |")


def write(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    if options.out is None:
        return
    arguments = list(sys.argv[1:])
    at = arguments.index("--out")
    del arguments[at : at + 2]
    made = {
        "command": shlex.join(["python", "paper_lab.py", *arguments]),
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "rate": options.rate,
        "density": options.density,
        "steps": options.steps,
    }
    options.out.write_text(json.dumps({**made, "rows": rows}, indent=1) + "\n")


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("mode", nargs="?", choices=("lab", "work"), default="lab")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--worlds", nargs="+", type=int, choices=(4, 8), default=[4, 8])
    parser.add_argument(
        "--contenders", nargs="+", choices=("gtopk", "dense", "gloo"), default=["gtopk", "gloo"]
    )
    parser.add_argument("--rate", default="1Gbit")
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each group")
    parser.add_argument("--repeats", type=int, default=2, help="of gloo's all-reduce, after one warm-up")
    parser.add_argument("--timeout", type=float, default=180.0)
    parser.add_argument("--out", type=Path, help="write JSON here")
    for name, kind in (("exchange", str), ("n", int), ("compute", float), ("result", Path)):
        parser.add_argument(f"--{name}", type=kind, help="of `work`, set by the lab")
    return parser.parse_args(argv)


if __name__ == "__main__":
    chosen = parsed(sys.argv[1:])
    if chosen.mode == "work":
        work(chosen)
    else:
        print("| model | P | contender | efficiency | the paper's | step, s | of it |\n" + "|---" * 7 + "|")
        lab(chosen)
