"""Measures wall time and bytes to the same held-out loss, with gridtrain and rivals over the same links.

    python -m accuracy --workloads gpt --rates 1000Mbit 100Mbit 20Mbit --world 4
    python -m accuracy --contenders gloo powersgd gtopk local-topk --out results.json
    python -m accuracy --rates none --contenders gloo --steps 600 --out steps.json            number of steps
    python -m accuracy --rates 20Mbit --contenders gloo --steps 30 --extrapolate steps.json   their duration

Contenders take turns at each rate, each in its own lab.  A run ends when the held-out loss has reached the
workload's target, after --steps, or after --limit seconds; then its last loss is reported.  With
--extrapolate a run ends after --steps, and the number of steps in the file is multiplied by their mean
duration, because the number does not depend on the link; such figures are marked.  A rival that is not
installed is left out with a message.  gridtrain does not encrypt, as its rivals do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import record
from accuracy.recorder import MEASURE_EVERY
from accuracy.train import Options, gathered, read, work
from accuracy.workloads import WORKLOADS, Workload
from lab.group import run_in_lab
from lab.net import Net
from lab.ns import LabError
from rivals.contract import TRAINERS
from rivals.environments import available
from rivals.hosts import run_ranks
from rivals.train import Training

OURS = {
    "dense": ("dense", "dense"),
    "dense-adamw": ("adamw", "dense"),
    "gtopk": ("sparse", "gtopk:density={density},momentum=0.9"),
    "local-topk": ("local", ""),
    "local-topk-sgd": ("local-sgd", ""),
}
"""Contender -> (family of settings, exchange).  The local steps and the density of local-topk are those of
the workload (`gathered`)."""

RIVALS = {
    "gloo": ("gloo", "dense"),
    "gloo-adamw": ("gloo", "adamw"),
    "powersgd": ("powersgd", "dense"),
    "hivemind-local": ("hivemind", "local"),
    "one-adamw": ("gloo", "adamw"),
}
"""Contender -> (trainer, family of settings).  one-adamw is one process with the batches of all workers, so
that gloo-adamw takes the same steps; hivemind-local averages the change of as many local steps as
local-topk."""

EARLY_STEPS = {"powersgd": 12}
"""Number of first steps that differ from later ones, if not two: PowerSGD begins with ten dense steps."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training run.

    Attributes:
        seconds, step, megabytes: when the target was reached; None if it was not.
        last_loss, last_s: the last held-out loss, and its time.
        step_s: median duration of a step.
        timed_steps: the number of steps from whose mean `seconds` was extrapolated; 0 if all steps were run.
        curve: (step, seconds, held-out loss) of each measurement.
        seed: the seed of the initial parameters.
    """

    workload: str
    rate: str
    contender: str
    seconds: float | None
    step: int | None
    megabytes: float | None
    last_loss: float | None
    last_s: float
    step_s: float
    timed_steps: int = 0
    curve: tuple[tuple[int, float, float], ...] = ()
    seed: int = 0


def summary(
    records: Sequence[dict[str, Any]], workload: str, rate: str, contender: str, target: float, seed: int = 0
) -> Run:
    measured = [r for r in records if r["held_out"] is not None]
    there = next((r for r in measured if r["held_out"] <= target), None)
    seconds = [r["seconds"] for r in records]
    steps_s = [b - a for a, b in pairwise(seconds)][2:]
    return Run(
        workload,
        rate,
        contender,
        None if there is None else there["seconds"],
        None if there is None else int(there["step"]),
        None if there is None or there["sent_bytes"] is None else there["sent_bytes"] / 1e6,
        measured[-1]["held_out"] if measured else None,
        seconds[-1] if seconds else 0.0,
        statistics.median(steps_s) if steps_s else 0.0,
        curve=tuple((int(r["step"]), round(r["seconds"], 3), r["held_out"]) for r in measured),
        seed=seed,
    )


def extrapolated(records: Sequence[dict[str, Any]], short: Run, needed: int) -> Run:
    """Extrapolate a short run to `needed` steps: the first steps as measured, the others with their mean."""
    early = EARLY_STEPS.get(short.contender, 2)
    if len(records) < early + 2:
        return short
    first, last = records[early - 1], records[-1]
    counted = len(records) - early

    def whole(name: str) -> float:
        return first[name] + (last[name] - first[name]) / counted * (needed - early)

    sent = None if last["sent_bytes"] is None else whole("sent_bytes") / 1e6
    return replace(short, seconds=whole("seconds"), step=needed, megabytes=sent, timed_steps=counted)


def steps_of(path: Path) -> dict[tuple[str, str], int]:
    """Return the steps to the target by workload and contender, from a file of `--out`."""
    runs = json.loads(path.read_text())["runs"]
    return {(r["workload"], r["contender"]): r["step"] for r in runs if r["step"] is not None}


def target_of(options: argparse.Namespace, workload: str) -> float:
    return WORKLOADS[workload].target if options.target is None else float(options.target)


def ours(options: argparse.Namespace, workload: type[Workload], contender: str) -> Options:
    """Return the options of a contender that is gridtrain."""
    family, exchange = OURS[contender]
    how: dict[str, Any] = {"exchange": exchange.format(density=options.density)}
    if not exchange:
        how = gathered(*(options.gathered or workload.gathered[family]))
    return Options(
        workload.name,
        family,
        **how,
        steps=options.steps,
        learning_rate=options.learning_rate,
        until_loss=target_of(options, workload.name),
    )


def run_rival(
    options: argparse.Namespace,
    workload: type[Workload],
    links: dict[str, Any],
    name: str,
    folder: Path,
    seed: int,
) -> None:
    trainer, family = RIVALS[name]
    world, every = options.world, 0
    if family == "local":
        every = int(str((options.gathered or workload.gathered["local"])[0]).partition("/")[0])
    one = name == "one-adamw"
    training = Training(
        trainer=trainer,
        workload=workload.name,
        settings=family,
        steps=options.steps,
        measure_every=every or MEASURE_EVERY,
        until_loss=target_of(options, workload.name),
        every=every or 1,
        compression=options.compression,
        learning_rate=options.learning_rate,
        batch_size=workload.batch_size * world if one else None,
        seed=seed,
    )
    with Net() as net:
        hosts = net.make_hosts([f"host-{rank}" for rank in range(1 if one else world)], **links)
        run_ranks(list(hosts.values()), TRAINERS[trainer], "rivals.train", training, folder, options.limit)


def run(options: argparse.Namespace, name: str, rate: str, contender: str, seed: int = 0) -> Run:
    workload = WORKLOADS[name]
    links = {"rate": "" if rate == "none" else rate, "delay_s": options.delay}
    with tempfile.TemporaryDirectory(prefix="accuracy-") as text:
        folder = Path(text)
        try:
            if contender in RIVALS:
                run_rival(options, workload, links, contender, folder, seed)
            else:
                chosen = asdict(replace(ours(options, workload, contender), seed=seed, folder=text))
                run_in_lab(work, chosen, options.world, options.limit, encrypted=False, **links)
        except LabError as error:
            print(f"   {contender}: {str(error).splitlines()[0]}", file=sys.stderr)
        records = read(folder / "steps.jsonl")
    found = summary(records, name, rate, contender, target_of(options, name), seed)
    if options.extrapolate is None or found.seconds is not None:
        return found
    known = steps_of(options.extrapolate)
    needed = known.get((name, contender))
    if needed is None and contender == "gloo-adamw":
        needed = known.get((name, "one-adamw"))
    return found if needed is None else extrapolated(records, found, needed)


def table(runs: Sequence[Run], baseline: str) -> str:
    rows = []
    for r in runs:
        same = (b for b in runs if (b.workload, b.rate, b.seed) == (r.workload, r.rate, r.seed))
        other = next((b for b in same if b.contender == baseline), None)
        named, step_ms = (r.workload, r.rate, r.contender), f"{1e3 * r.step_s:.0f}"
        if r.seconds is None:
            reached = "-" if r.last_loss is None else f"not in {r.last_s:.0f} s: {r.last_loss:.2f}"
            rows.append((*named, reached, "", "", "", step_ms))
            continue
        ratio = "" if other is None or other.seconds is None else f"{other.seconds / r.seconds:.1f}"
        size = "" if r.megabytes is None else f"{r.megabytes:.1f}"
        note = f" (of {r.timed_steps} steps)" if r.timed_steps else ""
        rows.append((*named, f"{r.seconds:.1f}{note}", str(r.step), size, ratio, step_ms))
    heads = ("workload", "link", "contender", "s to target", "steps", "MB sent by one", f"x {baseline}")
    return record.table((*heads, "ms a step"), rows)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = record.parser(__doc__)
    usual = ("gloo", "gloo-adamw", "powersgd", "dense", "gtopk", "local-topk")
    parser.add_argument("--workloads", nargs="+", default=["gpt"], choices=sorted(WORKLOADS))
    parser.add_argument("--rates", nargs="+", default=["1000Mbit", "100Mbit", "20Mbit"])
    parser.add_argument("--contenders", nargs="+", default=usual, choices=(*RIVALS, *OURS))
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--density", type=float, default=0.05, help="of gtopk")
    parser.add_argument("--steps", type=int, default=400, help="most steps of each worker")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds of one run, including its start")
    parser.add_argument("--target", type=float, metavar="NATS", help="instead of the workload's")
    parser.add_argument("--delay", type=float, default=0.0, metavar="SECONDS", help="of a packet, one way")
    parser.add_argument(
        "--extrapolate", type=Path, metavar="FILE", help="a file of --out with the numbers of steps"
    )
    parser.add_argument("--learning-rate", type=float, help="instead of the workload's")
    parser.add_argument(
        "--gathered", nargs=2, metavar=("EVERY", "DENSITY"), help="of local-topk; 8/2 means overlap=2"
    )
    parser.add_argument(
        "--compression", choices=("none", "float16", "int8"), default="float16", help="of hivemind-local"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the initial parameters")
    parser.add_argument("--baseline", default="gloo")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = options_of(arguments)
    missing = {name: reason for name, reason in available().items() if reason}
    runs: list[Run] = []
    for name, rate, seed, contender in product(
        options.workloads, options.rates, options.seeds, options.contenders
    ):
        if contender in RIVALS and (reason := missing.get(TRAINERS[RIVALS[contender][0]], "")):
            print(f"left out: {contender}: {reason}", file=sys.stderr)
            continue
        runs.append(run(options, name, rate, contender, seed))
        print(table(runs[-1:], "").splitlines()[-1], flush=True)
        targets = {workload: target_of(options, workload) for workload in options.workloads}
        whole = {"world": options.world, "targets": targets, "runs": [asdict(each) for each in runs]}
        record.write(options.out, arguments, **whole)  # so far, so that a run that is stopped leaves them
    print(table(runs, options.baseline))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
