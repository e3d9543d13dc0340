"""What a chaos run says: figures beside those of a calm run, as JSON and Markdown.

Decides which numbers are shown.  A stall is the longest time between two commits that a fault has caused;
time lost is all that the gaps until the next fault have above the usual one.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from chaos.play import Plan, Played, Struck
from chaos.schedule import OF_COORDINATOR

AFTER_S = 2.0
"""A fault's stall begins at most so long after it; what comes later is somebody's return."""

BACK_S = 3.0
"""Until the members have come back to a coordinator that was started again."""

BEFORE_S = 0.5
"""A gap that has begun so long before a fault is another one's."""


def summary(plan: Plan, played: Played) -> dict[str, Any]:
    """Of one run."""
    record, length_s = played.record, played.end_s - played.begin_s
    life_s = played.life_s()
    samples = record.samples_between(played.begin_s, played.end_s)
    gaps_s = [after - before for before, after in itertools.pairwise(record.commits_s())]
    inside = [at_s for at_s in record.commits_s() if played.begin_s <= at_s < played.end_s]
    return {
        "workers": plan.workers,
        "seconds": round(length_s, 1),
        "steps": record.steps_between(played.begin_s, played.end_s),
        "samples": samples,
        "life_s": round(life_s, 1),
        "samples_per_life_s": round(samples / life_s, 2) if life_s else 0.0,
        "usual_step_s": round(statistics.median(gaps_s), 4) if gaps_s else None,
        "longest_gap_s": round(max((b - a for a, b in itertools.pairwise(inside)), default=0.0), 2),
        "coordinator_starts": played.coordinator_starts,
        "script_starts": sum(len(lines) for lines in record.loaded.values()),
        "faults": dict(Counter(struck.kind for struck in played.struck)),
        "left_out": played.left_out,
        "by_kind": by_kind(played, statistics.median(gaps_s) if gaps_s else 0.0),
        "broken": played.broken,
    }


def by_kind(played: Played, usual_s: float) -> dict[str, dict[str, Any]]:
    """The survivors' stalls in order, their median and the worst, and time lost until the next fault."""
    commits_s = played.record.commits_s()
    stalls: dict[str, list[float]] = defaultdict(list)
    lost: dict[str, list[float]] = defaultdict(list)
    ends_s = [struck.at_s for struck in played.struck[1:]] + [played.end_s]
    for struck, next_s in zip(played.struck, ends_s, strict=False):
        label = label_of(struck, played.struck)
        stalls[label].append(stall_s(commits_s, struck, next_s))
        lost[label].append(lost_s(commits_s, struck.at_s, next_s, usual_s))
    return {
        kind: {
            "count": len(found),
            "stalls_s": [round(one_s, 3) for one_s in found],
            "stall_median_s": round(statistics.median(found), 3),
            "stall_worst_s": round(max(found), 3),
            "lost_median_s": round(statistics.median(lost[kind]), 3),
            "lost_worst_s": round(max(lost[kind]), 3),
        }
        for kind, found in sorted(stalls.items())
    }


def label_of(struck: Struck, everything: Sequence[Struck]) -> str:
    """Its kind, and whether the coordinator was away: without it nobody can be left behind (rule 10)."""
    away = any(
        other.kind in OF_COORDINATOR and other.at_s < struck.at_s < other.until_s + BACK_S
        for other in everything
    )
    return f"{struck.kind}, no coordinator" if away and struck.kind not in OF_COORDINATOR else struck.kind


def stall_s(commits_s: Sequence[float], struck: Struck, next_s: float) -> float:
    """The longest gap between two commits that begins shortly after the fault, or contains it."""
    until_s = min(struck.at_s + AFTER_S, next_s)
    if struck.kind == "kill":
        until_s = min(until_s, struck.at_s + AFTER_S / 2)  # later it is its return that costs time
    gaps = itertools.pairwise(commits_s)
    since_s = struck.at_s - BEFORE_S
    return max((b - a for a, b in gaps if b > struck.at_s and since_s <= a < until_s), default=0.0)


def lost_s(commits_s: Sequence[float], at_s: float, next_s: float, usual_s: float) -> float:
    """What the long gaps between two faults have above a usual one."""
    gaps = (b - a for a, b in itertools.pairwise(commits_s) if at_s <= (a + b) / 2 < next_s)
    return sum(gap - usual_s for gap in gaps if gap > 3 * usual_s)


def whole(arguments: dict[str, Any], calm: dict[str, Any], chaos: dict[str, Any]) -> dict[str, Any]:
    kept = chaos["samples_per_life_s"] / calm["samples_per_life_s"] if calm["samples_per_life_s"] else 0.0
    return {"arguments": arguments, "kept": round(kept, 4), "calm": calm, "chaos": chaos}


def markdown(report: dict[str, Any]) -> str:
    arguments, calm, chaos = report["arguments"], report["calm"], report["chaos"]
    rows = [
        f"| {kind} | {row['count']} | {row['stall_median_s']:.2f} | {row['stall_worst_s']:.2f} "
        f"| {row['lost_median_s']:.2f} | {row['lost_worst_s']:.2f} |"
        for kind, row in chaos["by_kind"].items()
    ]
    names = ("seconds", "steps", "samples", "life_s", "samples_per_life_s", "usual_step_s", "longest_gap_s")
    lines = [
        "# Chaos",
        "",
        f"`{arguments['command']}`; {arguments['ground']}.",
        "",
        "| | calm | chaos |",
        "|---|---|---|",
        *(
            f"| {name} | {calm[name]} | {chaos[name]} |"
            for name in (*names, "script_starts", "coordinator_starts")
        ),
        "",
        f"Kept: **{100 * report['kept']:.1f} %** of the calm run's "
        "committed samples per second of worker life.",
        "",
        "| fault | times | stall, median s | worst | time lost, median s | worst |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
        f"Left out: {len(chaos['left_out'])} of the planned faults.",
        "",
        *(f"- BROKEN: {text}" for text in (*calm["broken"], *chaos["broken"])),
    ]
    return "\n".join(lines).rstrip() + "\n"
