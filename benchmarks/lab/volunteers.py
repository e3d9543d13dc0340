"""Measures steps of the demo model (`gridtrain demo`) among volunteers, with and without NAT and encryption.

    python -m lab.volunteers --nat none half all                    what NAT and the relay cost
    python -m lab.volunteers --encryption on off --cap 20Mbit       what CURVE costs

Runs of different settings take turns, so that a machine that slows down slows all of them.  The kernel counts
the bytes of each machine's link from the first measured step to the end, those of relays included.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import procfs
import record
from gridtrain.tools.demo.recipe import RECIPES, SIZES
from gridtrain.tools.demo.step_records import STEPS_FILE, RecordReader, StepRecord
from lab.group import NAT, Group, LabHosts, lab_group
from lab.net import Host, why_not
from lab.ns import LabError

WARM_UP_STEPS = 5
"""Steps that are not measured, because they are slower: memory is new and TCP's windows are small."""

Setting = tuple[str, str, str]
"""NAT, encryption ("on" or "off"), exchange."""


def sent_bytes(host: Host) -> int:
    """Return the bytes that the machine has sent over its link, with all headers."""
    return host.inside(lambda: procfs.sent_bytes(host.interface)) or 0


class Meter:
    """Reads the steps of a run and counts the bytes that all machines send after the warm-up."""

    def __init__(self, group: Group, metrics: Path) -> None:
        assert isinstance(group.hosts, LabHosts)
        self._hosts = {**group.hosts.uplinks, "hub": group.hosts.hub}
        self._reader = RecordReader(metrics / STEPS_FILE)
        self.records: list[StepRecord] = []
        self._first_step = 0
        self._before: dict[str, int] = {}
        self._after: dict[str, int] = {}

    def tick(self) -> None:
        self.records += self._reader.new_records()
        if self.records and self.records[-1].step >= WARM_UP_STEPS:
            self._after = {name: sent_bytes(host) for name, host in self._hosts.items()}
            if not self._before:
                self._before, self._first_step = self._after, self.records[-1].step

    def bytes_a_step(self) -> dict[str, float]:
        """Return the bytes per step of each machine.  Raises `LabError` if too few steps were counted."""
        steps, last = self.records[-1].step - self._first_step, self.records[-1].step
        if 2 * steps < last - WARM_UP_STEPS:
            raise LabError(f"bytes were counted only in the last {steps} of {last} steps: use more --steps")
        return {name: (self._after[name] - sent) / steps for name, sent in self._before.items()}


def measure(setting: Setting, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure one run.  Raises `LabError` with the ends of the logs."""
    nat, encryption, exchange = setting
    metrics = folder / "metrics"
    metrics.mkdir(parents=True)
    train = [sys.executable, "-m", "gridtrain.tools.demo.demo_worker", "--exchange", exchange]
    train += ["--steps", str(options.steps), "--measure-every", str(options.steps), "--model", options.model]
    train += ["--metrics", str(metrics)]
    names = [f"worker-{number}" for number in range(1, options.workers + 1)]
    is_encrypted = encryption == "on"
    with lab_group(names, folder, encrypted=is_encrypted, limit=options.cap, nat=nat) as group:
        for name in names:
            group.add(name, train)
        meter = Meter(group, metrics)
        group.finish(options.timeout, meter.tick)
    if [each.step for each in meter.records] != list(range(1, options.steps + 1)):
        raise LabError(f"{len(meter.records)} steps were recorded, not {options.steps}")
    sent = meter.bytes_a_step()
    took_s = [b.seconds - a.seconds for a, b in itertools.pairwise(meter.records[WARM_UP_STEPS:])]
    return {"step_s": took_s, "hub_bytes": sent.pop("hub"), "worker_bytes": list(sent.values())}


def table(runs: dict[Setting, list[dict[str, Any]]]) -> str:
    """Return a table of all runs of each setting: milliseconds, and kB (1000 bytes) a step."""
    rows = []
    for (nat, encryption, exchange), found in runs.items():
        medians_ms = [1e3 * statistics.median(run["step_s"]) for run in found]
        workers = [sent for run in found for sent in run["worker_bytes"]]
        rows.append(
            [
                f"{exchange}, NAT {nat}, encryption {encryption}",
                f"{1e3 * statistics.median(s for run in found for s in run['step_s']):.0f}",
                f"{min(medians_ms):.0f} to {max(medians_ms):.0f}",
                f"{statistics.mean(workers) / 1e3:.1f}",
                f"{max(workers) / 1e3:.1f}",
                f"{statistics.mean(run['hub_bytes'] for run in found) / 1e3:.1f}",
            ]
        )
    return record.table(("", "ms a step", "of the runs", "kB of a worker", "at most", "kB of the hub"), rows)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = record.parser(__doc__)
    parser.add_argument("--nat", nargs="+", choices=NAT, default=NAT)
    parser.add_argument("--encryption", nargs="+", choices=("on", "off"), default=["on"])
    parser.add_argument("--exchange", nargs="+", choices=sorted(RECIPES), default=["gtopk"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each setting, taking turns")
    parser.add_argument("--model", choices=sorted(SIZES), default="small")
    parser.add_argument("--cap", default="20Mbit", help="each worker's own limits; '' for none")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of each run")
    options = parser.parse_args(arguments)
    if options.steps < WARM_UP_STEPS + 3 or options.workers < 1 or options.repeats < 1:
        parser.error(f"--steps must be at least {WARM_UP_STEPS + 3}, --workers and --repeats at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if reason := why_not():
        print(f"the network lab is not available: {reason}", file=sys.stderr)
        return 1
    runs: dict[Setting, list[dict[str, Any]]] = {
        setting: [] for setting in itertools.product(options.nat, options.encryption, options.exchange)
    }
    with tempfile.TemporaryDirectory(prefix="gridtrain-lab-") as folder:
        for number, setting in itertools.product(range(options.repeats), runs):
            print(f"run {number + 1} of {options.repeats}: {', '.join(setting)}", file=sys.stderr, flush=True)
            try:
                runs[setting].append(measure(setting, options, Path(folder, f"{number}-{'-'.join(setting)}")))
            except LabError as error:
                print(f"{', '.join(setting)}: {error}", file=sys.stderr)
                return 1
    print(f"{options.workers} workers, model {options.model}, cap {options.cap or 'none'}, ", end="")
    print(f"{options.steps} steps\n{table(runs)}")
    results = [{"setting": setting, "runs": found} for setting, found in runs.items()]
    record.write(options.out, arguments, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
