"""`make bench-quick`: finds what became slower, in under three minutes on two cores.

Each figure is a ratio to something that does not change with this project and is measured in the same minute:
gloo's dense all-reduce, or a copy of the memory.

    measured   {"select_ns": 18.1, "dense seconds": 1.02, ...}
    recorded   benchmarks/results/quick.json: {"figures": {"select_ns": 17.6, ...}}
    slower     ratio > recorded ratio * (1 + tolerance)        exit code 1, and a line for each
    better     ratio < recorded ratio / (1 + tolerance)        a warning, because the record detects less
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.measurement import Effort, measure_cells
from bench.results import CellResult
from bench.suites import SMALL_ELEMENTS, cells_of
from gridtrain.tools.bench.processor_bench import measure_processor
from lab.net import why_not
from record import RESULTS, write
from rivals.environments import available

RECORD = RESULTS / "quick.json"
PARAMETERS, DENSITY = 4_000_000, 0.01

LOCAL = {
    "select_ns": ("selection with the residual", 0.35),
    "encode_ns": ("encode", 0.35),
    "decode_ns": ("decode", 0.35),
    "merge_ns": ("merge", 0.35),
}
"""Ratios to a memory copy: their descriptions, and by which share they may rise."""

EXCHANGES = {
    "dense seconds": ("a dense exchange takes, of gloo's time,", 0.20),
    "dense CPU": ("a dense exchange costs, of gloo's CPU time,", 0.35),
    "gtopk seconds": ("a gTop-k exchange takes, of gloo's dense time,", 0.60),
    "gtopk CPU": ("a gTop-k exchange costs, of gloo's dense CPU time,", 0.40),
    "small dense CPU": ("a ring of four over 120,000 elements costs, of gloo's CPU time,", 0.25),
}
ALL = LOCAL | EXCHANGES


@dataclass(frozen=True, slots=True)
class Finding:
    """A figure beside the recorded one.  Either may be None; `why` is the reason why `now` is None."""

    name: str
    now: float | None
    recorded: float | None
    why: str = ""

    @property
    def tolerance(self) -> float:
        return ALL[self.name][1]

    @property
    def change(self) -> float:
        """The ratio over the recorded one; 1 if either is unknown."""
        return 1.0 if self.now is None or self.recorded is None else self.now / self.recorded

    @property
    def slower(self) -> bool:
        return self.change > 1 + self.tolerance

    @property
    def better(self) -> bool:
        """Whether it could become slower by the tolerance without being noticed."""
        return self.change < 1 / (1 + self.tolerance)

    def __str__(self) -> str:
        what, unit = ALL[self.name][0], " copies" if self.name in LOCAL else ""
        if self.now is None:
            return f"not measured  {what}: {self.why}"
        if self.recorded is None:
            return f"new           {what} {self.now:.3g}{unit}"
        word = "SLOWER        " if self.slower else "BETTER        " if self.better else "fine          "
        change = f"{self.change - 1:+.0%}, at most +{self.tolerance:.0%}"
        return f"{word}{what} {self.now:.3g}{unit} (recorded {self.recorded:.3g}, {change})"


def compare(now: Mapping[str, float], recorded: Mapping[str, float], why: Mapping[str, str]) -> list[Finding]:
    """Compare all measured or recorded figures, in a fixed order.  `why`: reasons of missing ones."""
    return [
        Finding(name, now.get(name), recorded.get(name), why.get(name, "nothing was measured"))
        for name in ALL
        if name in now or name in recorded or name in why
    ]


def local_ratios(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the time for a parameter or an entry, in copies of one parameter."""
    return {name: figures[name] / figures["copy_ns"] for name in LOCAL}


def exchange_ratios(results: list[CellResult]) -> tuple[dict[str, float], dict[str, str]]:
    """Return the ratios, and the reasons of missing ones.

    The minimum of all repeats is used, because other load only adds to it.  For the small exchange the
    median is used, because its CPU time depends on how many messages a process finds when it wakes up.
    """
    by_name = {_name(result): result for result in results}
    ratios: dict[str, float] = {}
    why: dict[str, str] = {}
    for own, gloo, names in (
        (by_name["dense"], by_name["gloo/all_reduce"], ("dense seconds", "dense CPU")),
        (by_name["gtopk"], by_name["gloo/all_reduce"], ("gtopk seconds", "gtopk CPU")),
        (by_name["small dense"], by_name["small gloo/all_reduce"], ("small dense CPU",)),
    ):
        if not (gloo.samples and own.samples):
            why |= dict.fromkeys(names, own.skipped or gloo.skipped)
        elif len(names) == 1:
            ratios[names[0]] = own.cpu_s / gloo.cpu_s
        else:
            ratios[names[0]] = own.least_s / gloo.least_s
            ratios[names[1]] = least_cpu_s(own) / least_cpu_s(gloo)
    return ratios, why


def _name(result: CellResult) -> str:
    size = "small " if result.cell.n == SMALL_ELEMENTS else ""
    return size + result.cell.what.partition(":")[0]


def least_cpu_s(result: CellResult) -> float:
    return min(sample.cpu_s for sample in result.clean)


def measured(log: Callable[[str], None]) -> tuple[dict[str, float], dict[str, str]]:
    """Measure all ratios on this machine; return them, and the reasons of missing ones."""
    log("selection, codec and merge beside a copy")
    ratios = local_ratios(measure_processor(PARAMETERS, DENSITY))
    effort = Effort(blocks=4, repeats=6, loopback=bool(why_not()))
    more, why = exchange_ratios(list(measure_cells(cells_of("quick"), effort, available(), log)))
    return ratios | more, why


def main(*, keep: bool) -> int:
    """Return 0 if nothing became slower, 1 if something did, 2 if there are no recorded figures."""
    if not keep and not RECORD.exists():
        missing = f"bench: there are no recorded figures ({RECORD.name}): write them with --keep"
        print(missing, file=sys.stderr)
        return 2
    now, why = measured(lambda text: print(text, file=sys.stderr, flush=True))
    if keep:
        write(RECORD, figures={name: round(ratio, 4) for name, ratio in now.items()})
        print(f"recorded {len(now)} figures in {RECORD.name}")
        return 0
    findings = compare(now, json.loads(RECORD.read_text())["figures"], why)
    print("\n".join(map(str, findings)))
    if better := [finding for finding in findings if finding.better]:
        print(
            f"{len(better)} of {len(findings)} figures are far better than the recorded "
            "ones, which detect less there: record new ones with --keep on an idle machine"
        )
    slower = [finding for finding in findings if finding.slower]
    if slower:
        print(f"{len(slower)} of {len(findings)} figures became slower; repeat this to rule out other load")
    return 1 if slower else 0
