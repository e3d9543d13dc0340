"""Measures the share of computing time of local steps on slow links, with and without overlapped exchanges.

    python local_steps_lab.py                          (namespaces: needs root; about 15 minutes)
    python local_steps_lab.py --n 1000000 --compute 0.1 --every 16

P workers, each on its own host, train a vector of N parameters with SGD.  The forward and backward pass of a
local step take COMPUTE seconds (waited, because the workers share the cores, unlike volunteers' GPUs).  The
share of computing time is EVERY times the median duration of local steps that do not exchange, over the mean
duration of a turn, without the first two turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gridtrain
from lab.group import Plan, start
from lab.net import Net

WARM_UP_TURNS = 2


def work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    grid = gridtrain.join()
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(options.n))
    own = torch.Generator().manual_seed(os.getpid())
    gradient_N = torch.randn(options.n, generator=own)
    exchange = gridtrain.GTopK(density=options.density, values=options.values)
    local = gridtrain.LocalSteps(options.every, exchange, overlap=options.overlap)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = grid.optimizer(sgd, model, exchange=local, compare_every=0)
    data = [torch.tensor(float(i)) for i in range(4096)]
    begins_s, locals_s = [], []
    model.weight.grad = gradient_N
    for _ in grid.batches(data, batch_size=1, steps=options.turns):
        began_s = time.perf_counter()
        if optimizer.local_calls == 0:
            begins_s.append(began_s)
        time.sleep(options.compute)  # the emulated forward and backward pass
        optimizer.step()
        if optimizer.local_calls:
            locals_s.append(time.perf_counter() - began_s)
    if grid.is_first:
        turns_s = [b - a for a, b in pairwise(begins_s)][WARM_UP_TURNS:]
        figures = {
            "turns_s": turns_s,
            "local_step_s": statistics.median(locals_s),
            "computing": options.every * statistics.median(locals_s) / statistics.mean(turns_s),
            "sent_bytes": grid.traffic.get("Data", (0, 0))[0] / max(1, len(begins_s)),
        }
        options.result.write_text(json.dumps(figures))


def measure(options: argparse.Namespace, overlap: bool) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="local-steps-"))
    result = folder / "result.json"
    script = [sys.executable, str(Path(__file__).resolve()), "work", "--result", str(result)]
    for name in ("n", "compute", "every", "turns", "density", "values"):
        script += [f"--{name}", str(getattr(options, name))]
    script += ["--overlap", str((options.overlap or options.every) * overlap)]
    plan = Plan(workers=options.workers, link_rate=options.rate, delay_s=options.delay)
    with Net() as net:
        start(net, plan, folder, lambda name: script).wait(options.timeout)
    figures: dict[str, Any] = json.loads(result.read_text())
    return {"overlap": overlap} | figures


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", nargs="?", choices=("lab", "work"), default="lab")
    parser.add_argument("--n", type=int, default=100_000_000)
    parser.add_argument("--compute", type=float, default=1.0, help="seconds of a local step")
    parser.add_argument("--every", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--values", default="fp16")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", default="20Mbit")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds, one way")
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument(
        "--overlap", type=int, default=0, metavar="STEPS", help="default: EVERY; of `work`: 0, no overlap"
    )
    parser.add_argument("--result", type=Path, help="of `work`")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    options = parsed(argv)
    if options.mode == "work":
        work(options)
        return
    rows = []
    for overlap in (False, True):
        rows.append(measure(options, overlap))
        print(
            "overlap {overlap!s:5}: turn {turn_s:.1f} s, local step {local_step_s:.3f} s, "
            "{computing:.1%} of the time computing, {sent:.1f} MB sent a turn".format(
                turn_s=statistics.mean(rows[-1]["turns_s"]), sent=rows[-1]["sent_bytes"] / 1e6, **rows[-1]
            ),
            flush=True,
        )
    if options.out is not None:
        machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
        used = {
            name: getattr(options, name) for name in ("n", "compute", "every", "density", "rate", "delay")
        }
        result = {"date": datetime.date.today().isoformat(), "machine": machine} | used | {"rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
