"""Measures what a hostile member costs the other members, and what silent connections cost a join.

    python -m hostile                     all tables of docs/reliability.md, in about 6 minutes
    python -m hostile attacks|load|join   one part; --out FILE writes the figures

Each comparison is made within one run (a quiet interval, the attack, a quiet interval), so that a machine
that slows down slows both.  All processes share one machine: the attacker runs with `nice -n 19` instead of
on another one, and `burner`, a process that only computes, shows how much the shared CPU costs.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record
from hostile.attacks import ATTACKS
from hostile.group import HostileGroup, Peaks
from lab.group import Program
from procfs import cpu_s

HONEST = ("anna", "bert", "carl")
WARM_UP_STEPS = 10
QUIET_S, BURNER_S, ATTACK_S = 12.0, 10.0, 40.0
LOADS = ("garbage", "pings")
CONNECTIONS = 1500
BURNER = "while True: pass"
LINE = (
    "{attack:20} {memberships} memberships, refused: {kicked!s:5} {steps_hit} steps and {aborted_attempts} "
    "attempts aborted, pause {longest_pause_s} s, a worker {worker_mib:+.0f} MiB, coordinator "
    "{memory_mib[coordinator]:+.0f} MiB: {reason:.60}"
)


# -- attacks: one after the other, each with its own key -----------------------------------------------


def attacks(folder: Path) -> list[dict[str, Any]]:
    """Measure the effects of each attack during one run."""
    names = list(ATTACKS)
    rows: list[dict[str, Any]] = []
    # One attacker with so many keys can make a member a suspect that alone can observe it (decision 0011).
    without = ["gridtrain_coordinator.access.accusations.is_common_accuser"]
    with HostileGroup(folder, workers=len(HONEST), without=without) as group:
        group.extend(300)
        for name in HONEST:
            group.add_honest(name, exchange="gtopk")
        gate = group.gate()
        orders = {
            "gates": [gate.path] * len(names),
            "memberships": dict.fromkeys(names, 5) | {"false-votes": 1, "no-votes": 1},
            "seconds": dict.fromkeys(names, 20.0) | {"crowd": 4.0, "flapping-everywhere": 4.0},
        }
        mallory = group.attack("mallory", names, orders=orders, exchange="gtopk")
        pids = group.warm(WARM_UP_STEPS, mallory)
        for number, name in enumerate(names, 1):
            peaks, began_s = Peaks(pids), time.monotonic()
            gate.open()
            group.wait_until_over(mallory, number)
            group.wait_until(time.monotonic() + 1.0)
            rows.append(row_of(group, mallory, name, began_s) | {"memory_mib": peaks.growth_mib()})
            print(
                LINE.format(**rows[-1], worker_mib=max(rows[-1]["memory_mib"][n] for n in HONEST)), flush=True
            )
        equal = all(len(models) == 1 for models in group.digests().values())
        members = group.members()["members"]
        violations = {line["name"]: line["strikes"] for line in members if line["name"] in HONEST}
        steps = len(group.digests())
        print(f"models equal after each of {steps} steps: {equal}; violations of the honest: {violations}")
        rows.append({"attack": "all", "equal": equal, "steps": steps, "honest": violations})
    return rows


def row_of(group: HostileGroup, mallory: Program, name: str, began_s: float) -> dict[str, Any]:
    """Return the effects of an attack that has ended."""
    now_s = time.monotonic()
    ended = [line for line in mallory.marked("out") if line["attack"] == name]
    over = next(line for line in mallory.marked("over") if line["attack"] == name)
    commits_s = [
        line["at_s"] for line in group.outcomes("anna") if line["committed"] and line["at_s"] >= began_s
    ]
    pauses_s = [after - before for before, after in itertools.pairwise(commits_s)]
    aborted = group.aborted(began_s, now_s)
    return {
        "attack": name,
        "seconds": round(now_s - began_s, 1),
        "memberships": sum(line["code"] != "denied" or line["sent"] > 0 for line in ended),
        "kicked": over["kicked"],
        "sent": sum(line["sent"] for line in ended),
        "aborted_attempts": len(aborted),
        "steps_hit": len({step for _, step, _ in aborted}),
        "generations": len({generation for generation, _, _ in aborted}),
        "steps": len(commits_s),
        "longest_pause_s": round(max(pauses_s, default=0.0), 2),
        "reason": ended[0]["reason"] if ended else "",
    }


# -- load: one attack for the whole run ----------------------------------------------------------------


def load(folder: Path, attack: str) -> dict[str, Any]:
    """Measure the rate of steps before, during and after an attack, and beside a process that computes."""
    with HostileGroup(folder, workers=len(HONEST)) as group:
        for name in HONEST:
            group.add_honest(name)
        gate = group.gate()
        orders = {"gates": [gate.path], "forever": True}
        mallory = group.attack("mallory", [attack], nice=19, orders=orders)
        pids = group.warm(WARM_UP_STEPS, mallory)
        peaks = Peaks(pids)
        quiet, cpu = during(group, {**pids, "mallory": mallory.pid}, QUIET_S)
        burner = group.run("burner", sys.executable, "-c", BURNER, nice=19)
        burning, _ = during(group, pids, BURNER_S)
        burner.end()
        gate.open()
        attacked, attacked_cpu = during(group, {**pids, "mallory": mallory.pid}, ATTACK_S)
        found = {"kicked": bool(mallory.marked("over")), "memberships": len(mallory.marked("out"))}
        mallory.end()
        group.wait_until(time.monotonic() + 1.0)
        quiet_again, _ = during(group, pids, QUIET_S)
        baseline = (quiet + quiet_again) / 2
        rates = {"quiet": quiet, "burner": burning, "attacked": attacked, "quiet_again": quiet_again}
        equal = all(len(models) == 1 for models in group.digests().values())
        return {
            "attack": attack,
            **{name: round(rate, 2) for name, rate in rates.items()},
            "loss_percent": round(100 * (1 - attacked / baseline), 1),
            "burner_loss_percent": round(100 * (1 - burning / baseline), 1),
            **found,
            "cpu": cpu,
            "cpu_attacked": attacked_cpu,
            "memory_mib": peaks.growth_mib(),
            "equal": equal,
        }


def during(group: HostileGroup, pids: dict[str, int], seconds: float) -> tuple[float, dict[str, float]]:
    """Return the steps per second of the next `seconds`, and the share of a core that each process uses."""
    began_s, before = time.monotonic(), {name: cpu_s(pid) for name, pid in pids.items()}
    group.wait_until(began_s + seconds)
    now_s = time.monotonic()
    cpu = {name: round((cpu_s(pid) - before[name]) / (now_s - began_s), 2) for name, pid in pids.items()}
    return group.steps_between(began_s, now_s) / (now_s - began_s), cpu


# -- a join beside silent connections --------------------------------------------------------------------


def join(folder: Path, with_strangers: bool) -> dict[str, Any]:
    """Measure how a fourth worker joins, with or without 1,500 silent connections to each port."""
    with HostileGroup(folder, workers=len(HONEST)) as group:
        for name in HONEST:
            group.add_honest(name)
        gate = group.gate()
        group.wait_for("steps", lambda: all(group.steps(name) >= WARM_UP_STEPS for name in HONEST))
        ports = [group.server(), *(line["address"].removeprefix("tcp://") for line in group.events("joined"))]
        dora = group.add_honest("dora", join_gate=gate.path)
        group.wait_for("dora", lambda: bool(dora.marked("loaded")))
        peaks = Peaks({name: group.workers[name].pid for name in HONEST})
        for number, port in enumerate(ports if with_strangers else []):
            group.connect(f"silent-{number}", "silent", CONNECTIONS, port)
        gate.open()
        group.wait_for("dora's first step", lambda: bool(dora.marked("member")))
        return {
            "strangers": with_strangers,
            "joined_s": round(dora.marked("joined")[0]["took_s"], 2),
            "member_s": round(dora.marked("member")[0]["took_s"], 2),
            "memory_mib": peaks.growth_mib(),
        }


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="attacks|load|join", default=["attacks", "load", "join"])
    chosen = parser.parse_args()
    load_1min = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPU cores; load average before the start: {load_1min:.1f}\n")
    results: dict[str, Any] = {"load_before": load_1min}
    with tempfile.TemporaryDirectory() as folder:
        if "attacks" in chosen.parts:
            results["attacks"] = attacks(Path(folder, "attacks"))
        if "load" in chosen.parts:
            results["load"] = [load(Path(folder, name), name) for name in LOADS]
        if "join" in chosen.parts:
            results["join"] = [join(Path(folder, f"join-{each}"), each) for each in (False, True)]
    for row in (*results.get("load", []), *results.get("join", [])):
        print(row)
    record.write(chosen.out, **results)


if __name__ == "__main__":
    main()
