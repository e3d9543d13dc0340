"""Measures how much communication overlaps with backward, and how selection in buckets affects learning.

    python overlap.py lab --rates 1000Mbit 100Mbit 20Mbit --exchange dense gtopk     (namespaces: needs root)
    python overlap.py loss --steps 250                              whole-model selection against buckets

`lab`: P workers, each on its own host, with a model of LAYERS equal layers whose backward takes COMPUTE
seconds (waited, because the workers share the cores, unlike volunteers' GPUs), with and without overlap in
turn.  The hidden share is (step without - step with) / (communication without).  Steps with overlap count
after the group has decided whether overlap pays; --always overlaps in any case.

`loss`: the demo's model with four workers in one process, without a network: k entries of the whole vector
against k entries that are divided among buckets by their lengths.
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
from torch import Tensor, nn

import gridtrain
from gridtrain.runtime.buffers.buckets import bucket_bounds
from gridtrain.training.overlap_trial import TRIAL_STEPS
from gridtrain.training.overlap_trial import WARM_UP_STEPS as BEFORE_TRIAL_STEPS
from lab.group import Plan, start
from lab.net import Net

LAYERS = 16
WARM_UP_STEPS = 3
DECIDED_STEPS = BEFORE_TRIAL_STEPS + TRIAL_STEPS + 2  # the step of the decision, and the first one after it
WAITED = ("waiting_s", "communicating_s")
PARTS = ("computing_s", "waiting_s", "selecting_s", "communicating_s", "applying_s")
EXCHANGES = {
    "dense": gridtrain.Dense(),
    "topk": gridtrain.TopK(density=0.001),
    "gtopk": gridtrain.GTopK(density=0.001),
}


# -- one worker ----------------------------------------------------------------------------------------


class SlowBackward(torch.autograd.Function):
    """The identity with a backward of `seconds`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)  # the emulated computation
        return gradients[0], None


class Layered(nn.Module):
    def __init__(self, n: int, compute_s: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        size = n // LAYERS
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(LAYERS)])
        self.directions = [torch.randn(size, generator=generator) for _ in range(LAYERS)]
        self._backward_s = compute_s / LAYERS

    def forward(self, x: Tensor) -> Tensor:
        for layer, direction in zip(self.layers, self.directions, strict=True):
            x = SlowBackward.apply(x + layer.dot(direction), self._backward_s)
        return x


def work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    grid = gridtrain.join()
    model = Layered(options.n, options.compute)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-9)
    overlap = None
    if options.overlap:
        overlap = gridtrain.Overlap(options.buckets, options.least, adaptive=not options.always)
    exchange = EXCHANGES[options.exchange]
    optimizer = grid.optimizer(sgd, model, exchange=exchange, overlap=overlap, compare_every=0)
    data = [torch.tensor(float(i)) for i in range(64)]
    ends_s, parts = [], []
    for batch in grid.batches(data, batch_size=1, steps=options.steps):
        model(batch.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        ends_s.append(time.perf_counter())
        parts.append([optimizer.timings.get(name, 0.0) for name in PARTS])
    if grid.is_first:
        adaptive = overlap is not None and not options.always
        before = DECIDED_STEPS if adaptive else WARM_UP_STEPS
        took_s = [b - a for a, b in pairwise(ends_s)]
        figures = {
            "step_s": took_s[before:],
            "parts_s": parts[before + 1 :],
            "overlaps": optimizer.is_overlapping,
            "all_s": took_s,
        }
        options.result.write_text(json.dumps(figures))


# -- the lab -------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, exchange: str, rate: str, overlap: bool) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="overlap-"))
    result = folder / "result.json"
    script = [sys.executable, str(Path(__file__).resolve()), "work", "--result", str(result)]
    script += ["--exchange", exchange, "--n", str(options.n), "--compute", str(options.compute)]
    steps = options.steps if overlap else options.without_steps
    script += ["--steps", str(steps), "--buckets", str(options.buckets)]
    script += ["--least", str(options.least)] if options.least is not None else []
    script += ["--overlap"] * overlap + ["--always"] * options.always
    plan = Plan(workers=options.workers, encrypted=options.encrypted, link_rate=rate)
    with Net() as net:
        start(net, plan, folder, lambda name: script).wait(options.timeout)
    figures: dict[str, Any] = json.loads(result.read_text())
    return figures


def summarize(runs: list[dict[str, Any]]) -> tuple[float, float, list[float]]:
    """Return of all steps the median, half the interquartile range, and the median of each part."""
    step_s = [each for run in runs for each in run["step_s"]]
    low_s, _, high_s = statistics.quantiles(step_s, n=4)
    parts_s = zip(*(each for run in runs for each in run["parts_s"]), strict=True)
    return statistics.median(step_s), (high_s - low_s) / 2, [statistics.median(part) for part in parts_s]


def lab(options: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for rate in options.rates:
        for exchange in options.exchanges:
            without, overlapped = [], []
            for _ in range(options.repeats):
                without.append(measure(options, exchange, rate, False))
                overlapped.append(measure(options, exchange, rate, True))
            without_s, without_spread_s, without_parts_s = summarize(without)
            with_s, with_spread_s, with_parts_s = summarize(overlapped)
            waited_s = sum(s for name, s in zip(PARTS, without_parts_s, strict=True) if name in WAITED)
            rows.append(
                {
                    "rate": rate,
                    "exchange": exchange,
                    "without_s": without_s,
                    "with_s": with_s,
                    "spread_s": max(without_spread_s, with_spread_s),
                    "communication_s": waited_s,
                    "hidden": (without_s - with_s) / waited_s,
                    "hideable": min(1.0, options.compute / waited_s),
                    "overlaps": [run["overlaps"] for run in overlapped],
                    "without_parts_s": dict(zip(PARTS, without_parts_s, strict=True)),
                    "with_parts_s": dict(zip(PARTS, with_parts_s, strict=True)),
                    "with_all_s": [run["all_s"] for run in overlapped],
                }
            )
            print(
                "{rate:9} {exchange:6} step {without_s:.3f} s without, {with_s:.3f} s with overlap "
                "(+- {spread_s:.3f}; at the end it is on: {overlaps}); "
                "communication {communication_s:.3f} s, hidden {hidden:.0%}, at most {hideable:.0%}".format(
                    **rows[-1]
                ),
                flush=True,
            )
    return {"workers": options.workers, "n": options.n, "compute_s": options.compute, "rows": rows}


# -- learning ------------------------------------------------------------------------------------------


def loss(options: argparse.Namespace) -> dict[str, Any]:
    from accuracy.butterfly import WORKERS, Butterfly
    from accuracy.tune import apply, flat_gradient_N
    from accuracy.workloads import Gpt

    torch.set_num_threads(1)
    workload, rows = Gpt(), []
    settings = workload.settings["sparse"]
    size = workload.batch_size
    for seed in range(options.repeats):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(workload.train), generator=generator).tolist()  # type: ignore[arg-type]
        for buckets in options.bucket_counts:
            model = workload.model(seed)
            bounds = bucket_bounds([p.numel() for p in model.parameters()], buckets, 1)
            parts = [Butterfly(b - a, options.density) for a, b in pairwise(bounds)]
            optimizer = settings.build(model, momentum=False)
            for step in range(options.steps):
                taken = [order[(WORKERS * step + w) * size :][:size] for w in range(WORKERS)]
                shares = [flat_gradient_N(workload, model, indices) / WORKERS for indices in taken]
                updates = [
                    part.exchange([share[a:b] for share in shares])
                    for part, (a, b) in zip(parts, pairwise(bounds), strict=True)
                ]
                apply(model, torch.cat(updates), optimizer, settings.clip_norm)
            rows.append({"seed": seed, "buckets": len(bounds) - 1, "held_out": workload.held_out(model)})
            print(
                "seed {seed}: {buckets} buckets, held-out loss {held_out:.4f}".format(**rows[-1]), flush=True
            )
    return {"steps": options.steps, "density": options.density, "rows": rows}


def parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    for name in ("lab", "work"):
        one = modes.add_parser(name)
        one.add_argument("--n", type=int, default=2_560_000)
        one.add_argument("--compute", type=float, default=0.5, help="seconds of one backward")
        one.add_argument("--steps", type=int, default=24)
        one.add_argument("--buckets", type=int, default=8)
        one.add_argument("--least", type=int, help="elements of a bucket (default: of the exchange)")
        one.add_argument("--always", action="store_true", help="overlap even if it does not pay")
    modes.choices["lab"].add_argument("--rates", nargs="+", default=["1000Mbit", "100Mbit", "20Mbit"])
    modes.choices["lab"].add_argument(
        "--exchange", dest="exchanges", nargs="+", default=["dense", "gtopk"], choices=EXCHANGES
    )
    modes.choices["lab"].add_argument("--without-steps", type=int, default=12)
    modes.choices["lab"].add_argument("--workers", type=int, default=4)
    modes.choices["lab"].add_argument("--repeats", type=int, default=1)
    modes.choices["lab"].add_argument("--timeout", type=float, default=300.0)
    modes.choices["lab"].add_argument("--encrypted", action="store_true")
    modes.choices["work"].add_argument("--exchange", choices=EXCHANGES, required=True)
    modes.choices["work"].add_argument("--overlap", action="store_true")
    modes.choices["work"].add_argument("--result", type=Path, required=True)
    learn = modes.add_parser("loss")
    learn.add_argument("--steps", type=int, default=250)
    learn.add_argument("--density", type=float, default=0.05)
    learn.add_argument("--bucket-counts", type=int, nargs="+", default=[1, 2, 4, 8])
    learn.add_argument("--repeats", type=int, default=3)
    for name in ("lab", "loss"):
        modes.choices[name].add_argument("--out", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    options = parsed(argv)
    if options.mode == "work":
        work(options)
        return
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    result = {"date": datetime.date.today().isoformat(), "machine": machine}
    result |= lab(options) if options.mode == "lab" else loss(options)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
