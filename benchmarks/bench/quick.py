"""`make bench-quick`: what got slower, in under three minutes on two cores.

Decides which ratios are taken and how far they may rise.  A ratio is to something that does not change with
this project and runs in the same minute: gloo's dense all-reduce, and a copy of the memory.

    measured   {"select": 18.1, "dense / gloo": 1.02, ...}
    kept       benchmarks/results/quick.json: {"figures": {"select": {"ratio": 17.6, "tolerance": 0.35}, ...}}
    slower     ratio > kept ratio * (1 + tolerance)        exit code 1, and each of them said in words
    better     ratio < kept ratio / (1 + tolerance)        a warning: the kept one guards nothing any more
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import rivals_side
from bench.play import Effort, play
from bench.results import CellResult, machine
from bench.suites import SMALL_ELEMENTS
from bench.suites import quick as quick_cells
from gridtrain.tools.bench.processor_bench import measure_processor
from lab.net import why_not

SCHEMA = 1
KEPT = Path(__file__).resolve().parents[1] / "results" / "quick.json"
PARAMETERS, DENSITY = 4_000_000, 0.01

LOCAL = {
    "select_ns": ("selection with the residual", 0.35),
    "encode_ns": ("encode", 0.35),
    "decode_ns": ("decode", 0.35),
    "merge_ns": ("merge", 0.35),
}
"""To a memory copy: what they are called, and by which share the ratio may rise."""

EXCHANGES = {
    "dense seconds": ("a dense exchange takes, of gloo's time,", 0.20),
    "dense CPU": ("a dense exchange costs, of gloo's CPU time,", 0.35),
    "gtopk seconds": ("a gTop-k exchange takes, of gloo's dense time,", 0.60),
    "gtopk CPU": ("a gTop-k exchange costs, of gloo's dense CPU time,", 0.40),
    "small dense CPU": ("a ring of four over 120,000 elements costs, of gloo's CPU time,", 0.25),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure beside the kept one.  `now` or `kept` is None: not there, `why` says it."""

    name: str
    now: float | None
    kept: float | None
    tolerance: float
    why: str = ""

    @property
    def slower(self) -> bool:
        return self.now is not None and self.kept is not None and self.now > self.kept * (1 + self.tolerance)

    @property
    def better(self) -> bool:
        """So much that it could get slower again by the tolerance, and nobody would be told."""
        return self.now is not None and self.kept is not None and self.now < self.kept / (1 + self.tolerance)

    def __str__(self) -> str:
        what = LOCAL[self.name][0] if self.name in LOCAL else EXCHANGES.get(self.name, (self.name, 0.0))[0]
        if self.now is None:
            return f"not measured  {what}: {self.why}"
        unit = " copies" if self.name in LOCAL else ""
        if self.kept is None:
            return f"new           {what} {self.now:.3g}{unit}"
        word = "SLOWER        " if self.slower else "BETTER        " if self.better else "fine          "
        change = f"kept {self.kept:.3g}, {self.now / self.kept - 1:+.0%}, at most +{self.tolerance:.0%}"
        return f"{word}{what} {self.now:.3g}{unit} ({change})"


def tolerance_of(name: str) -> float:
    return (LOCAL | EXCHANGES)[name][1]


def compare(
    now: Mapping[str, float], kept: Mapping[str, Mapping[str, float]], why: Mapping[str, str]
) -> list[Finding]:
    """All figures that are measured, kept or both, in a fixed order.  `why`: a figure was not measured."""
    names = [name for name in (*LOCAL, *EXCHANGES) if name in now or name in kept or name in why]
    return [
        Finding(
            name,
            now.get(name),
            kept[name]["ratio"] if name in kept else None,
            kept[name]["tolerance"] if name in kept else tolerance_of(name),
            why.get(name, "nothing was measured"),
        )
        for name in names
    ]


def local_ratios(figures: Mapping[str, float]) -> dict[str, float]:
    """A parameter or an entry, in copies of one parameter."""
    return {name: figures[name] / figures["copy_ns"] for name in LOCAL}


def exchange_ratios(results: list[CellResult]) -> tuple[dict[str, float], dict[str, str]]:
    """(ratios, why there are none).

    The least of all repeats counts, as the machine can only add to it; of the small exchange the median: its
    CPU time depends on how many messages a process finds when it wakes up.
    """
    by_name = {_name(result): result for result in results}
    ratios: dict[str, float] = {}
    why: dict[str, str] = {}
    for mine, gloo, names in (
        (by_name["dense"], by_name["gloo/all_reduce"], ("dense seconds", "dense CPU")),
        (by_name["gtopk"], by_name["gloo/all_reduce"], ("gtopk seconds", "gtopk CPU")),
        (by_name["small dense"], by_name["small gloo/all_reduce"], ("small dense CPU",)),
    ):
        if not (gloo.samples and mine.samples):
            why |= dict.fromkeys(names, mine.skipped or gloo.skipped)
        elif len(names) == 1:
            ratios[names[0]] = mine.cpu_s / gloo.cpu_s
        else:
            ratios[names[0]] = mine.least_s / gloo.least_s
            ratios[names[1]] = least_cpu_s(mine) / least_cpu_s(gloo)
    return ratios, why


def _name(result: CellResult) -> str:
    size = "small " if result.cell.n == SMALL_ELEMENTS else ""
    return size + result.cell.what.partition(":")[0]


def least_cpu_s(result: CellResult) -> float:
    return min(sample.cpu_s for sample in result.clean)


def measured(say: Any) -> tuple[dict[str, float], dict[str, str]]:
    """All ratios of this machine, and why others are missing."""
    say("selection, codec and merge beside a copy")
    ratios = local_ratios(measure_processor(PARAMETERS, DENSITY))
    effort = Effort(blocks=2, repeats=6, loopback=bool(why_not()))
    results = list(play(quick_cells(), effort, rivals_side.missing(), say))
    more, why = exchange_ratios(results)
    return ratios | more, why


def main(*, keep: bool, command: str, date: str) -> int:
    """0: nothing is slower.  1: something is, and was named.  2: there are no kept figures."""
    if not keep and not KEPT.exists():
        print(f"bench: there are no kept figures ({KEPT.name}): write them with --keep", file=sys.stderr)
        return 2
    now, why = measured(lambda text: print(text, file=sys.stderr, flush=True))
    if keep:
        figures = {name: {"ratio": round(r, 4), "tolerance": tolerance_of(name)} for name, r in now.items()}
        whole = {"schema": SCHEMA, "made": {"date": date, "command": command}, "machine": machine()}
        KEPT.write_text(json.dumps(whole | {"figures": figures}, indent=1) + "\n")
        print(f"kept {len(figures)} figures in {KEPT.name}")
        return 0
    findings = compare(now, json.loads(KEPT.read_text())["figures"], why)
    print("\n".join(map(str, findings)))
    if better := [finding for finding in findings if finding.better]:
        print(
            f"{len(better)} of {len(findings)} figures are far better than the kept ones, which guard "
            "nothing there: keep new ones with --keep, on a machine that has nothing else to do"
        )
    slower = [finding for finding in findings if finding.slower]
    if slower:
        print(f"{len(slower)} of {len(findings)} figures got slower; run it again to rule out a busy machine")
    return 1 if slower else 0
