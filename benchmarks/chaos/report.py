"""The report of a run under faults beside a calm run, as JSON and Markdown.

A stall is the longest time between two commits that a fault has caused.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from chaos.execution import InjectedFault, Plan, RunResult
from chaos.schedule import OF_COORDINATOR
from record import command, table

AFTER_S = 2.0
"""Latest begin of a fault's stall after the fault; later gaps come from a returning worker."""

BACK_S = 3.0
"""Time in which the members reconnect to a restarted coordinator."""

BEFORE_S = 0.5
"""A gap that began earlier than this before a fault was not caused by it."""


def summary(plan: Plan, result: RunResult) -> dict[str, Any]:
    """Return the figures of one run."""
    record, length_s = result.record, result.end_s - result.begin_s
    life_s = result.life_s()
    samples = record.samples_between(result.begin_s, result.end_s)
    gaps_s = [after - before for before, after in itertools.pairwise(record.commits_s())]
    inside = [at_s for at_s in record.commits_s() if result.begin_s <= at_s < result.end_s]
    return {
        "workers": plan.workers,
        "seconds": round(length_s, 1),
        "steps": record.steps_between(result.begin_s, result.end_s),
        "samples": samples,
        "life_s": round(life_s, 1),
        "samples_per_life_s": round(samples / life_s, 2) if life_s else 0.0,
        "usual_step_s": round(statistics.median(gaps_s), 4) if gaps_s else None,
        "longest_gap_s": round(max((b - a for a, b in itertools.pairwise(inside)), default=0.0), 2),
        "coordinator_starts": result.coordinator_starts,
        "script_starts": sum(len(lines) for lines in record.loaded.values()),
        "faults": dict(Counter(fault.kind for fault in result.injected)),
        "left_out": result.left_out,
        "by_kind": by_kind(result),
        "broken": result.broken,
    }


def by_kind(result: RunResult) -> dict[str, dict[str, Any]]:
    """Return, by kind of fault, all stalls of the survivors, with the median and the worst."""
    commits_s = result.record.commits_s()
    stalls: dict[str, list[float]] = defaultdict(list)
    ends_s = [fault.at_s for fault in result.injected[1:]] + [result.end_s]
    for fault, next_s in zip(result.injected, ends_s, strict=False):
        label = label_of(fault, result.injected)
        stalls[label].append(stall_s(commits_s, fault, next_s))
    return {
        kind: {
            "count": len(found),
            "stalls_s": [round(one_s, 3) for one_s in found],
            "stall_median_s": round(statistics.median(found), 3),
            "stall_worst_s": round(max(found), 3),
        }
        for kind, found in sorted(stalls.items())
    }


def label_of(fault: InjectedFault, everything: Sequence[InjectedFault]) -> str:
    """Return the kind of a fault, and whether the coordinator was down: then no member can be removed."""
    away = any(
        other.kind in OF_COORDINATOR and other.at_s < fault.at_s < other.until_s + BACK_S
        for other in everything
    )
    return f"{fault.kind}, no coordinator" if away and fault.kind not in OF_COORDINATOR else fault.kind


def stall_s(commits_s: Sequence[float], fault: InjectedFault, next_s: float) -> float:
    """Return the longest gap between two commits that contains the fault or begins shortly after it."""
    until_s = min(fault.at_s + AFTER_S, next_s)
    if fault.kind == "kill":
        until_s = min(until_s, fault.at_s + AFTER_S / 2)  # later gaps come from its return
    gaps = itertools.pairwise(commits_s)
    since_s = fault.at_s - BEFORE_S
    return max((b - a for a, b in gaps if b > fault.at_s and since_s <= a < until_s), default=0.0)


def whole(hosts: str, calm: dict[str, Any], chaos: dict[str, Any]) -> dict[str, Any]:
    kept = chaos["samples_per_life_s"] / calm["samples_per_life_s"] if calm["samples_per_life_s"] else 0.0
    return {"hosts": hosts, "kept": round(kept, 4), "calm": calm, "chaos": chaos}


def markdown(report: dict[str, Any]) -> str:
    calm, chaos = report["calm"], report["chaos"]
    names = ("seconds", "steps", "samples", "life_s", "samples_per_life_s", "usual_step_s", "longest_gap_s")
    compared = [
        (name, str(calm[name]), str(chaos[name])) for name in (*names, "script_starts", "coordinator_starts")
    ]
    by_kind = [
        (kind, row["count"], f"{row['stall_median_s']:.2f}", f"{row['stall_worst_s']:.2f}")
        for kind, row in chaos["by_kind"].items()
    ]
    heads = ("fault", "times", "stall, median s", "worst")
    parts = [
        f"# Chaos\n\n`{command()}`; {report['hosts']}.",
        table(("", "calm", "chaos"), compared),
        f"Kept: **{100 * report['kept']:.1f} %** of the calm run's samples per second of worker life.",
        table(heads, by_kind),
        f"Left out: {len(chaos['left_out'])} of the planned faults.",
        *(f"- VIOLATED: {text}" for text in (*calm["broken"], *chaos["broken"])),
    ]
    return "\n\n".join(parts) + "\n"
