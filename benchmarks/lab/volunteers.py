"""Measures steps of the demo model (`gridtrain demo`) among volunteers, with and without NAT and encryption.

    python -m lab.volunteers --nat none half all                    what NAT and the relay cost
    python -m lab.volunteers --encryption on off --cap 20Mbit       what CURVE costs
    python -m lab.volunteers --rate 20Mbit                          slow links instead of workers' limits

Runs of different settings take turns, so that a machine that slows down slows all of them.  The kernel counts
the bytes of each machine's link from the first measured step to the end, those of relays included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gridtrain.tools.demo.recipe import DENSITY, RECIPES, SIZES
from gridtrain.tools.demo.step_records import STEPS_FILE, RecordReader, StepRecord
from lab.group import NAT, Group, Plan, start
from lab.net import Host, Net, why_not
from lab.ns import LabError

WARM_UP_STEPS = 5
"""Steps that are not measured, because they are slower: memory is new and TCP's windows are small."""


@dataclass(frozen=True, slots=True)
class Setting:
    nat: str
    encryption: str
    exchange: str

    @property
    def label(self) -> str:
        return f"{self.exchange:5} NAT {self.nat:4} encryption {self.encryption:3}"


@dataclass(slots=True)
class Result:
    """The figures of all runs of one setting.

    Attributes:
        step_s: the duration of each step after the warm-up.
        runs_s: the median step of each run.
        compute_s, select_s, communicate_s, wait_s: of the first worker, mean of the steps of each run.
        worker_bytes: bytes that a worker sent per step, on the wire, for each worker and run.
        hub_bytes: bytes that the coordinator sent per step, for each run; it relays where no member can.
    """

    step_s: list[float] = field(default_factory=list)
    runs_s: list[float] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    select_s: list[float] = field(default_factory=list)
    communicate_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    worker_bytes: list[float] = field(default_factory=list)
    hub_bytes: list[float] = field(default_factory=list)


def sent_bytes(host: Host) -> int:
    """Return the bytes that the machine has sent over its link, with all headers."""
    text = host.inside(lambda: Path("/proc/thread-self/net/dev").read_text())
    line = next(line for line in text.splitlines() if line.strip().startswith(f"{host.interface}:"))
    return int(line.partition(":")[2].split()[8])


class Meter:
    """Counts the bytes that all machines send from the first step after the warm-up on."""

    def __init__(self, group: Group, metrics: Path) -> None:
        self._group, self._reader = group, RecordReader(metrics / STEPS_FILE)
        self.records: list[StepRecord] = []
        self._first_step = 0
        self._before: dict[str, int] = {}
        self._after: dict[str, int] = {}

    def tick(self) -> None:
        self.records += self._reader.new_records()
        if not self.records or self.records[-1].step < WARM_UP_STEPS:
            return
        now = {
            name: sent_bytes(host) for name, host in {**self._group.uplinks, "hub": self._group.hub}.items()
        }
        if not self._before:
            self._before, self._first_step = now, self.records[-1].step
        self._after = now

    def bytes_a_step(self) -> dict[str, float]:
        """Return the bytes per step of each machine.  Raises `LabError` if too few steps were counted."""
        steps, last = self.records[-1].step - self._first_step, self.records[-1].step
        if 2 * steps < last - WARM_UP_STEPS:
            raise LabError(f"bytes were counted only in the last {steps} of {last} steps: use more --steps")
        return {name: (self._after[name] - sent) / steps for name, sent in self._before.items()}


def measure(setting: Setting, options: argparse.Namespace, folder: Path, result: Result) -> None:
    """Measure one run.  Raises `LabError` with the ends of the logs."""
    plan = Plan(
        workers=options.workers,
        nat=setting.nat,
        encrypted=setting.encryption == "on",
        cap=options.cap,
        link_rate=options.rate,
        relay=options.relay,
    )
    metrics = folder / "metrics"
    metrics.mkdir(parents=True)
    train = [sys.executable, "-m", "gridtrain.tools.demo.demo_worker", "--exchange", setting.exchange]
    train += ["--steps", str(options.steps), "--measure-every", str(options.steps), "--model", options.model]
    train += ["--density", str(options.density), "--metrics", str(metrics)]
    with Net() as net:
        group = start(net, plan, folder, lambda name: train)
        meter = Meter(group, metrics)
        group.wait(options.timeout, meter.tick)
    collect(meter, options.steps, result)


def collect(meter: Meter, steps: int, result: Result) -> None:
    """Add the steps of a run to `result`.  Raises `LabError` if a step is missing."""
    records = meter.records
    if [record.step for record in records] != list(range(1, steps + 1)):
        raise LabError(f"{len(records)} steps were recorded, not {steps}")
    took_s = [b.seconds - a.seconds for a, b in itertools.pairwise(records[WARM_UP_STEPS:])]
    result.step_s += took_s
    result.runs_s.append(statistics.median(took_s))
    first, last = records[WARM_UP_STEPS].times, records[-1].times
    for name in ("compute", "select", "communicate", "wait"):
        mean_s = (getattr(last, name) - getattr(first, name)) / len(took_s)
        getattr(result, f"{name}_s").append(mean_s)
    sent = meter.bytes_a_step()
    result.hub_bytes.append(sent.pop("hub"))
    result.worker_bytes += sent.values()


def table(results: dict[Setting, Result]) -> str:
    """Return a table with times in milliseconds, and kB (1000 bytes) per step."""
    lines = [f"{'':30}  step      runs   p90 | compute select comm wait | worker kB    most  hub kB"]
    for setting, r in results.items():
        p90 = statistics.quantiles(r.step_s, n=10)[-1]
        runs = f"{1e3 * min(r.runs_s):.0f}-{1e3 * max(r.runs_s):.0f}"
        parts = (r.compute_s, r.select_s, r.communicate_s, r.wait_s)
        compute, select, communicate, wait = (1e3 * statistics.mean(part) for part in parts)
        worker_kB, most_kB = statistics.mean(r.worker_bytes) / 1e3, max(r.worker_bytes) / 1e3
        lines.append(
            f"{setting.label:30} {1e3 * statistics.median(r.step_s):5.0f} {runs:>9} {1e3 * p90:5.0f} | "
            f"{compute:7.0f} {select:6.0f} {communicate:4.0f} {wait:4.0f} | "
            f"{worker_kB:9.1f} {most_kB:7.1f} {statistics.mean(r.hub_bytes) / 1e3:7.1f}"
        )
    return "\n".join([*lines, *ratios(results)])


def ratios(results: dict[Setting, Result]) -> list[str]:
    """Compare the median step of each setting with that of the first setting of its exchange."""
    lines = []
    for setting, result in results.items():
        base = next(other for other in results if other.exchange == setting.exchange)
        if base != setting:
            change = statistics.median(result.step_s) / statistics.median(results[base].step_s) - 1
            lines.append(f"{setting.label:30} {change:+6.1%} against {base.label}".rstrip())
    return lines


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lab.volunteers", description=__doc__.splitlines()[0])
    parser.add_argument("--nat", nargs="+", choices=NAT, default=["none", "half", "all"])
    parser.add_argument("--encryption", nargs="+", choices=("on", "off"), default=["on"])
    parser.add_argument("--exchange", nargs="+", choices=sorted(RECIPES), default=["gtopk"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each setting, taking turns")
    parser.add_argument("--density", type=float, default=DENSITY)
    parser.add_argument("--model", choices=sorted(SIZES), default="small")
    parser.add_argument("--cap", default="20Mbit", help="each worker's own limits; '' for none")
    parser.add_argument("--rate", default="", help="of each worker's link; '' for no limit")
    parser.add_argument("--relay", choices=("members", "hub"), default="members", help="peers that may relay")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of each run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures")
    options = parser.parse_args(arguments)
    if options.steps < WARM_UP_STEPS + 3 or options.workers < 1 or options.repeats < 1:
        parser.error(f"--steps must be at least {WARM_UP_STEPS + 3}, --workers and --repeats at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if reason := why_not():
        print(f"the network lab is not available: {reason}", file=sys.stderr)
        return 1
    turns = [
        Setting(*values) for values in itertools.product(options.nat, options.encryption, options.exchange)
    ]
    results = {setting: Result() for setting in turns}
    with tempfile.TemporaryDirectory(prefix="gridtrain-lab-") as folder:
        for number, setting in itertools.product(range(options.repeats), turns):
            print(f"run {number + 1} of {options.repeats}: {setting.label}", file=sys.stderr, flush=True)
            place = Path(folder, f"{number}-{setting.exchange}-{setting.nat}-{setting.encryption}")
            try:
                measure(setting, options, place, results[setting])
            except LabError as error:
                print(f"{setting.label}: {error}", file=sys.stderr)
                return 1
    print(f"{options.workers} workers, model {options.model}, cap {options.cap or 'none'}, ", end="")
    print(f"links {options.rate or 'without limit'}, {options.steps} steps; milliseconds, kB a step")
    print(table(results))
    if options.json:
        rows = [asdict(setting) | asdict(result) for setting, result in results.items()]
        arguments_used = {key: str(value) for key, value in vars(options).items()}
        options.json.write_text(json.dumps({"options": arguments_used, "results": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
