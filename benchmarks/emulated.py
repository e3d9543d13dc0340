"""Measures training over shaped links: agents, sockets and links are real, computing is emulated.

    python emulated.py overlap --rates 1000Mbit 100Mbit --exchange dense gtopk     docs/overlap.md
    python emulated.py local-steps --n 1000000 --compute 0.1 --every 16            docs/local-steps.md
    python emulated.py paper --models vgg16 resnet20 --worlds 4 --out FILE         docs/benchmarks.md
    python emulated.py joiner --parameters 10e6 --rate 20Mbit --compute 0.5        docs/reliability.md
    python emulated.py joiner --workload lora-114m --rate 20Mbit                   LoRA: the base is not sent

It needs namespaces (root).  Gradients are random, and a backward pass waits as long as a GPU would compute,
because the workers share the cores, which execute selection, merges and the update of the parameters.

    overlap      the step with and without overlap in turn; steps with overlap count after the group has
                 decided whether overlap pays; --always overlaps in any case
    local-steps  share of computing: EVERY times the median of local steps that do not exchange, over the mean
                 duration of a turn, without the first two turns; with and without an overlapped exchange
    paper        the models of the gTop-k paper (`paper.py`): compute_s over the median step of the slowest
                 worker, beside gloo's all-reduce in the same lab, to which compute_s is added
    joiner       calm: steps per second | the joiner's script starts ... its first step | a few more steps
                 lost = 1 - (rate while it joins) / (rate before)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gridtrain
import record
from accuracy.workloads import WORKLOADS, trained_of
from gridtrain.tools.bench.exchange_names import parse_exchange
from gridtrain.training.overlap_trial import TRIAL_STEPS
from gridtrain.training.overlap_trial import WARM_UP_STEPS as BEFORE_TRIAL_STEPS
from lab.group import Group, run_in_lab, say
from lab.net import Net, why_not
from lab.ns import LabError
from paper import DATA, MODELS
from procfs import received_bytes
from rivals.contract import INTERFACE, Request
from rivals.hosts import measure as measure_rival

WORKERS, TIMEOUT_S = 4, 1800.0
BUCKETS, STEPS_WITHOUT = 8, 12  # of `overlap`: at most so many buckets; steps without overlap
PAPER_RATE, PAPER_DENSITY, GLOO_REPEATS = "1Gbit", 0.001, 2
WARM_UP_STEPS, WARM_UP_TURNS = 3, 2
DECIDED_STEPS = BEFORE_TRIAL_STEPS + TRIAL_STEPS + 2  # the step of the decision, and the first one after it
PARTS = ("computing_s", "waiting_s", "selecting_s", "communicating_s", "applying_s")
JOINER, STEPS_AFTERWARDS = "worker-late", 3


# -- one worker ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a worker.

    Attributes:
        n: number of parameters, in `tensors` equal layers.
        workload: trains this model's parameters instead.
        compute_s: duration of a backward pass.
        every, overlap: local steps of an exchange (0: none), and those that overlap with it.
        buckets: overlaps the exchange with backward in so many buckets of at least `least` elements; 0: no.
        always: overlaps even if it does not pay.
        gate: a FIFO; the worker waits until it has been written and closed.
    """

    n: int
    exchange: str
    compute_s: float
    steps: int
    tensors: int = 16
    workload: str = ""
    every: int = 0
    overlap: int = 0
    buckets: int = 0
    least: int | None = None
    always: bool = False
    momentum: float = 0.0
    gate: str = ""


class Layer(torch.autograd.Function):
    """The identity; its backward waits until a time after the step's begin, and sets a gradient."""

    begun_s = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, gradient: Tensor, until_s: float) -> Tensor:
        ctx.gradient, ctx.until_s = gradient, until_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gradient = ctx.gradient.clone()
        time.sleep(max(0.0, Layer.begun_s + ctx.until_s - time.perf_counter()))  # the emulated computation
        return gradients[0], gradient, None, None


def work(given: dict[str, Any]) -> None:
    """Train as one worker, which reports each step."""
    options = Options(**given)
    if options.gate:
        Path(options.gate).read_bytes()
    if options.workload:
        model: nn.Module = WORKLOADS[options.workload]().model(0)
    else:
        size = max(1, options.n // options.tensors)
        model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for _ in range(options.tensors)])
    trained = trained_of(model)
    own = torch.Generator().manual_seed(os.getpid())
    gradients = [torch.empty_like(parameter).normal_(generator=own) for parameter in trained]
    exchange: Any = parse_exchange(options.exchange)
    if options.every:
        exchange = gridtrain.LocalSteps(options.every, exchange, overlap=options.overlap)
    buckets = None
    if options.buckets:
        buckets = gridtrain.Overlap(options.buckets, options.least, adaptive=not options.always)
    before_bytes = received_bytes(INTERFACE) or 0
    with gridtrain.join() as grid:
        sgd = torch.optim.SGD(trained, lr=1e-9, momentum=options.momentum)
        optimizer = grid.optimizer(sgd, model, exchange=exchange, overlap=buckets, compare_every=0)
        x, began_s = torch.zeros(1, requires_grad=True), 0.0
        for _ in grid.batches([torch.zeros(1)] * 4096, batch_size=1, steps=options.steps):
            began_s = began_s or time.perf_counter()
            Layer.begun_s, out = began_s, x
            for number, (parameter, gradient) in enumerate(zip(trained, gradients, strict=True)):
                until_s = options.compute_s * (
                    1 - number / len(trained)
                )  # backward visits the last one first
                out = Layer.apply(out, parameter, gradient, until_s)  # type: ignore[no-untyped-call]
            out.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            ended_s = time.perf_counter()
            say(
                "step",
                took_s=ended_s - began_s,
                is_local=bool(getattr(optimizer, "local_calls", 0)),
                overlaps=bool(getattr(optimizer, "is_overlapping", False)),
                parts={name: optimizer.timings.get(name, 0.0) for name in PARTS},
                sent=grid.traffic.get("Data", (0, 0))[0],
                received=(received_bytes(INTERFACE) or 0) - before_bytes,
            )
            began_s = ended_s


Steps = list[dict[str, Any]]


def steps_of(group: Group, name: str) -> Steps:
    return group.workers[name].marked("step")


def run(options: Options, workers: int, **lab: Any) -> list[Steps]:
    """Train in the lab; return the steps of each worker."""
    found: dict[str, Steps] = {}

    def tick(group: Group) -> None:
        found.update((name, program.marked("step")) for name, program in group.workers.items())

    run_in_lab(work, asdict(options), workers, TIMEOUT_S, tick=tick, **lab)
    return list(found.values())


def median_of(steps: Steps, name: str) -> float:
    return statistics.median(
        float(step["parts"][name]) if name in PARTS else float(step[name]) for step in steps
    )


# -- overlap with backward -----------------------------------------------------------------------------


def overlap(options: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for rate, exchange in product(options.rates, options.exchanges):
        found: dict[bool, Steps] = {False: [], True: []}
        for overlaps in found:
            chosen = Options(
                options.n,
                exchange if exchange == "dense" else f"{exchange}:density=0.001",
                options.compute,
                options.steps if overlaps else STEPS_WITHOUT,
                buckets=BUCKETS if overlaps else 0,
                least=options.least,
                always=options.always,
            )
            steps = run(chosen, WORKERS, encrypted=False, rate=rate)[0]
            found[overlaps] += steps[DECIDED_STEPS if overlaps and not options.always else WARM_UP_STEPS :]
        without_s, with_s = (median_of(steps, "took_s") for steps in found.values())
        waited_s = sum(median_of(found[False], name) for name in ("waiting_s", "communicating_s"))
        rows.append(
            {
                "rate": rate,
                "exchange": exchange,
                "without_s": without_s,
                "with_s": with_s,
                "communication_s": waited_s,
                "hidden": (without_s - with_s) / waited_s,
                "overlaps": found[True][-1]["overlaps"],
                "without_parts_s": {name: median_of(found[False], name) for name in PARTS},
                "with_parts_s": {name: median_of(found[True], name) for name in PARTS},
                "all_s": {str(key): [step["took_s"] for step in steps] for key, steps in found.items()},
            }
        )
        print(
            f"{rate:9} {exchange:6} step {without_s:.3f} s without, {with_s:.3f} s with overlap "
            f"(at the end it is on: {rows[-1]['overlaps']}); communication {waited_s:.3f} s, "
            f"hidden {rows[-1]['hidden']:.0%}",
            flush=True,
        )
        whole = {"workers": WORKERS, "n": options.n, "compute_s": options.compute}
        record.write(options.out, **whole, rows=rows)


# -- local steps -----------------------------------------------------------------------------------------


def local_steps(options: argparse.Namespace) -> None:
    rows = []
    for overlaps in (False, True):
        chosen = Options(
            options.n,
            f"gtopk:density={options.density}",
            options.compute,
            options.turns,
            every=options.every,
            overlap=options.every * overlaps,
        )
        links = {"rate": options.rate, "delay_s": options.delay}
        steps = run(chosen, WORKERS, **links)[0]
        local_s = statistics.median(step["took_s"] for step in steps if step["is_local"])
        ends_s = [step["at_s"] for step in steps if not step["is_local"]]
        turns_s = [after - before for before, after in pairwise(ends_s)][WARM_UP_TURNS - 1 :]
        computing = options.every * local_s / statistics.mean(turns_s)
        row = {"overlap": overlaps, "turns_s": turns_s, "local_step_s": local_s, "computing": computing}
        rows.append(row | {"sent_bytes": steps[-1]["sent"] / len(ends_s)})
        print(
            f"overlap {overlaps!s:5}: turn {statistics.mean(turns_s):.1f} s, local step {local_s:.3f} s, "
            f"{computing:.1%} of the time computing, {rows[-1]['sent_bytes'] / 1e6:.1f} MB sent a turn",
            flush=True,
        )
    used = {name: getattr(options, name) for name in ("n", "compute", "every", "density", "rate", "delay")}
    record.write(options.out, **used, rows=rows)


# -- the models of the gTop-k paper ------------------------------------------------------------------------


def paper(options: argparse.Namespace) -> None:
    published = json.loads(DATA.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = []
    for world, model, contender in product(options.worlds, options.models, options.contenders):
        parameters_of, batch = MODELS[model]
        throughput = published["throughput"][model]
        compute_s, n = batch / throughput["P1"], round(published["parameters"][parameters_of])
        if contender == "gloo":
            exchange_s = gloo_s(world, n)
            found = {"step_s": compute_s + exchange_s, "communicating_s": exchange_s}
        else:
            exchange = "dense" if contender == "dense" else f"gtopk:density={PAPER_DENSITY}"
            chosen = Options(n, exchange, compute_s, WARM_UP_STEPS + options.steps)
            workers = run(chosen, world, encrypted=False, rate=PAPER_RATE)
            slowest = max((each[WARM_UP_STEPS:] for each in workers), key=lambda s: median_of(s, "took_s"))
            found = {"step_s": median_of(slowest, "took_s")}
            found |= {name: median_of(slowest, name) for name in PARTS[1:]}
        column = throughput["dense" if contender in ("gloo", "dense") else contender]
        row = {
            "model": model,
            "n": n,
            "workers": world,
            "contender": contender,
            "compute_s": compute_s,
            **found,
        }
        row |= {"efficiency": compute_s / found["step_s"], "paper": column[str(world)] / throughput["P1"]}
        rows.append(row)
        record.write(options.out, rate=PAPER_RATE, density=PAPER_DENSITY, steps=options.steps, rows=rows)
        print(
            "{model} P={workers} {contender}: {efficiency:.1%} (paper: {paper:.1%}), {step_s:.3f} s".format(
                **row
            ),
            {name: round(seconds, 3) for name, seconds in found.items() if name in PARTS},
            flush=True,
        )


def gloo_s(world: int, n: int) -> float:
    """Return the median duration of gloo's all-reduce."""
    with tempfile.TemporaryDirectory(prefix="paper-") as folder, Net() as net:
        hosts = net.make_hosts([f"host-{rank}" for rank in range(world)], PAPER_RATE)
        request = Request(op="all_reduce", n=n, repeats=GLOO_REPEATS)
        found = measure_rival(list(hosts.values()), "gloo", request, Path(folder), TIMEOUT_S)
    return statistics.median(found.seconds)


# -- a worker that joins -------------------------------------------------------------------------------------


class _EnoughError(Exception):
    """The measurement is complete."""


def joiner(options: argparse.Namespace) -> None:
    names = [*(f"worker-{number}" for number in range(1, WORKERS)), JOINER]
    first, late, opened_s = [], [], 0.0

    def tick(group: Group) -> None:
        nonlocal first, late, opened_s
        if len(group.workers) < len(names):
            return
        first, late = steps_of(group, names[0])[WARM_UP_STEPS:], steps_of(group, JOINER)
        if not opened_s and len(first) > options.calm:
            opened_s = time.monotonic()
            gate.write_text("go")
        if len(late) > STEPS_AFTERWARDS:
            raise _EnoughError

    with tempfile.TemporaryDirectory(prefix="joiner-") as folder, contextlib.suppress(_EnoughError):
        gate = Path(folder, "gate")
        os.mkfifo(gate)
        n, exchange = int(options.parameters), f"gtopk:density={options.density}"
        chosen = Options(n, exchange, options.compute, 10**6, workload=options.workload, momentum=0.9)
        own, lab = {JOINER: {"gate": str(gate)}}, {"late": 1, "rate": options.rate}
        run_in_lab(work, asdict(chosen), names, TIMEOUT_S, own=own, tick=tick, **lab)
    calm_s = [step["took_s"] for step in first if step["at_s"] < opened_s]
    took_s = late[0]["at_s"] - late[0]["took_s"] - opened_s
    during = [step for step in first if opened_s <= step["at_s"] <= opened_s + took_s]
    expected = took_s / statistics.mean(calm_s)
    figures = {
        "step_s": statistics.median(calm_s),
        "first_step_s": took_s,
        "steps": len(during),
        "expected_steps": expected,
        "lost_percent": 100 * (1 - len(during) / expected),
        "longest_s": max((step["took_s"] for step in during), default=took_s),
        "received_MB": late[0]["received"] / 1e6,
    }
    print("\n".join(f"{name:16} {value:10.3f}" for name, value in figures.items()))
    record.write(options.out, figures=figures)


# -- the program -----------------------------------------------------------------------------------------


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, measure: Any) -> Any:
        one = commands.add_parser(name)
        one.set_defaults(measure=measure)
        one.add_argument("--out", type=Path)
        return one.add_argument

    option = add("overlap", overlap)
    option("--n", type=int, default=2_560_000)
    option("--compute", type=float, default=0.5, help="seconds of one backward")
    option("--steps", type=int, default=24)
    option("--least", type=int, help="elements of a bucket (default: of the exchange)")
    option("--always", action="store_true", help="overlap even if it does not pay")
    option("--rates", nargs="+", default=["1000Mbit", "100Mbit", "20Mbit"])
    option("--exchange", dest="exchanges", nargs="+", default=["dense", "gtopk"], choices=("dense", "gtopk"))
    option = add("local-steps", local_steps)
    option("--n", type=int, default=100_000_000)
    option("--compute", type=float, default=1.0, help="seconds of a local step")
    option("--every", type=int, default=64)
    option("--turns", type=int, default=5)
    option("--density", type=float, default=0.01)
    option("--rate", default="20Mbit")
    option("--delay", type=float, default=0.02, help="seconds, one way")
    option = add("paper", paper)
    option("--models", nargs="+", choices=MODELS, default=list(MODELS))
    option("--worlds", nargs="+", type=int, choices=(4, 8), default=[4, 8])
    option("--contenders", nargs="+", choices=("gtopk", "dense", "gloo"), default=["gtopk", "gloo"])
    option("--steps", type=int, default=8, help="measured steps of each group")
    option = add("joiner", joiner)
    option("--parameters", type=float, default=100e6)
    option("--workload", default="", help="one of accuracy.workloads, instead of --parameters")
    option("--density", type=float, default=0.001)
    option("--compute", type=float, default=1.0, metavar="SECONDS", help="of a step")
    option("--rate", default="100Mbit", help="of each worker's link")
    option("--calm", type=int, default=15, metavar="STEPS", help="before it joins")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    try:
        if reason := why_not():
            raise LabError(f"the network lab is not available: {reason}")
        options.measure(options)
    except LabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
