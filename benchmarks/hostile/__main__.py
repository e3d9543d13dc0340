"""Measures what a hostile member costs the other members, and what strangers cost an honest join.

    python -m hostile                     all tables of docs/reliability.md, in about 6 minutes
    python -m hostile attacks|load|joins  one part; --json FILE writes the figures

Each comparison is made within one run (a quiet interval, the attack, a quiet interval), so that a machine
that slows down slows both.  All processes share one machine: the attacker runs with `nice -n 19` instead of
on another one, and `burner`, a process that only computes, shows how much the shared CPU costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.attacks import ATTACKS
from hostile.processes import Group, Program, cpu_s, forget_peak, peak_mib, rss_mib

HONEST = ("anna", "bert", "carl")
WARM_UP_STEPS = 10
QUIET_S, BURNER_S, ATTACK_S = 12.0, 10.0, 40.0
LOADS = ("garbage", "pings", "stale")
STRANGERS = (
    ("none", 0, "", 0),
    ("silent", 1500, "others", 300),
    ("silent", 1500, "here", 300),
    ("greeting", 1500, "others", 300),
    ("silent, again at once", 1500, "others", 0),
    ("silent, again at once", 1500, "here", 0),
    ("handshakes", 200, "others", 0),
)
JOINS = 4
BURNER = "while True: pass"


def start(group: Group, exchange: str) -> None:
    for name in HONEST:
        group.add(name, exchange=exchange)


def warm(group: Group, mallory: Program) -> dict[str, int]:
    """Wait until all train and the attacker is ready; return the process ids of the others."""
    group.wait("the first steps", lambda: all(group.steps(name) >= WARM_UP_STEPS for name in HONEST))
    group.wait("mallory", lambda: bool(mallory.marked("loaded")))
    return {"coordinator": group.coordinator.pid, **{name: group.workers[name].pid for name in HONEST}}


def start_peaks(pids: dict[str, int]) -> dict[str, float]:
    """Restart the measurement of memory peaks; return the memory in use."""
    before = {name: rss_mib(pid) for name, pid in pids.items()}
    for pid in pids.values():
        forget_peak(pid)
    return before


def growth_mib(before: dict[str, float], pids: dict[str, int]) -> dict[str, float]:
    return {name: round(peak_mib(pid) - before[name], 1) for name, pid in pids.items()}


# -- attacks: one after the other, each with its own key -----------------------------------------------


def attacks(folder: Path) -> list[dict[str, Any]]:
    """Measure the effects of each attack during one run."""
    names = list(ATTACKS)
    rows = []
    # One attacker with so many keys can make a member a suspect that alone can observe it (decision 0011).
    with Group(folder, workers=len(HONEST), without=["liar"]) as group:
        group.extend(300)
        start(group, "gtopk")
        gate = group.gate()
        orders = {
            "gates": [gate.path] * len(names),
            "memberships": dict.fromkeys(names, 5) | {"false-votes": 1, "no-votes": 1},
            "seconds": dict.fromkeys(names, 20.0) | {"crowd": 4.0, "flapping-everywhere": 4.0},
        }
        mallory = group.attack("mallory", names, orders=orders, exchange="gtopk")
        pids = warm(group, mallory)
        for number, name in enumerate(names, 1):
            before = start_peaks(pids)
            began_s = time.monotonic()
            gate.open()
            group.wait_until_over(mallory, number)
            group.wait_until(time.monotonic() + 1.0)
            rows.append(row_of(group, mallory, name, began_s) | {"memory_mib": growth_mib(before, pids)})
            print(attack_line(rows[-1]), flush=True)
        equal = all(len(models) == 1 for models in group.digests().values())
        members = group.members()["members"]
        violations = {line["name"]: line["strikes"] for line in members if line["name"] in HONEST}
        steps = len(group.digests())
        print(f"\nmodels equal after each of {steps} steps: {equal}; violations of the honest: {violations}")
        rows.append({"attack": "all", "equal": equal, "steps": steps, "honest": violations})
    return rows


def row_of(group: Group, mallory: Program, name: str, began_s: float) -> dict[str, Any]:
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


ATTACK_HEAD = (
    f"{'attack':20}{'joins':>6}{'kicked':>7}{'steps hit':>10}{'attempts':>9}{'pause s':>8}"
    f"{'worker MiB':>11}{'hub MiB':>8}  first reason"
)


def attack_line(row: dict[str, Any]) -> str:
    memory = row["memory_mib"]
    worker_mib = max(memory[name] for name in HONEST)
    return (
        f"{row['attack']:20}{row['memberships']:>6}{'yes' if row['kicked'] else 'no':>7}"
        f"{row['steps_hit']:>10}{row['aborted_attempts']:>9}{row['longest_pause_s']:>8}{worker_mib:>+11.0f}"
        f"{memory['coordinator']:>+8.0f}  {row['reason'][:60]}"
    )


# -- load: one attack for the whole run ----------------------------------------------------------------


def load(folder: Path, attack: str) -> dict[str, Any]:
    """Measure the rate of steps before, during and after an attack, and beside a process that computes."""
    with Group(folder, workers=len(HONEST)) as group:
        start(group, "dense")
        gate = group.gate()
        orders = {"gates": [gate.path], "forever": True}
        mallory = group.attack("mallory", [attack], nice=19, orders=orders)
        pids = warm(group, mallory)
        before = start_peaks(pids)
        quiet, cpu = during(group, {**pids, "mallory": mallory.pid}, QUIET_S)
        burner = group.run("burner", sys.executable, "-c", BURNER, nice=19)
        burning, _ = during(group, pids, BURNER_S)
        burner.end()
        gate.open()
        attacked, attacked_cpu = during(group, {**pids, "mallory": mallory.pid}, ATTACK_S)
        kicked = bool(mallory.marked("over"))
        memberships = len(mallory.marked("out"))
        group.attackers.pop("mallory").end()
        group.wait_until(time.monotonic() + 1.0)
        quiet_again, _ = during(group, pids, QUIET_S)
        baseline = (quiet + quiet_again) / 2
        return {
            "attack": attack,
            "quiet": quiet,
            "burner": burning,
            "attacked": attacked,
            "quiet_again": quiet_again,
            "loss": 1 - attacked / baseline,
            "burner_loss": 1 - burning / baseline,
            "kicked": kicked,
            "memberships": memberships,
            "cpu": cpu,
            "cpu_attacked": attacked_cpu,
            "memory_mib": growth_mib(before, pids),
            "equal": all(len(models) == 1 for models in group.digests().values()),
        }


def during(group: Group, pids: dict[str, int], seconds: float) -> tuple[float, dict[str, float]]:
    """Return the steps per second of the next `seconds`, and the share of a core that each process uses."""
    began_s, before = time.monotonic(), {name: cpu_s(pid) for name, pid in pids.items()}
    group.wait_until(began_s + seconds)
    now_s = time.monotonic()
    cpu = {name: round((cpu_s(pid) - before[name]) / (now_s - began_s), 2) for name, pid in pids.items()}
    return group.steps_between(began_s, now_s) / (now_s - began_s), cpu


LOAD_HEAD = (
    f"{'attack':10}{'before':>8}{'burner':>8}{'attacked':>9}{'after':>8}{'loss':>7}{'burner alone':>13}"
    f"{'worker MiB':>11}{'hub MiB':>8}  CPU quiet -> attacked (hub, a worker, mallory)"
)


def load_line(row: dict[str, Any]) -> str:
    def shares(cpu: dict[str, float]) -> str:
        worker = statistics.mean(cpu[name] for name in HONEST)
        return f"{cpu['coordinator']:.2f} {worker:.2f} {cpu['mallory']:.2f}"

    memory = row["memory_mib"]
    return (
        f"{row['attack']:10}{row['quiet']:>8.2f}{row['burner']:>8.2f}{row['attacked']:>9.2f}"
        f"{row['quiet_again']:>8.2f}{row['loss']:>7.1%}{row['burner_loss']:>13.1%}"
        f"{max(memory[name] for name in HONEST):>+11.0f}{memory['coordinator']:>+8.0f}"
        f"  {shares(row['cpu'])} -> {shares(row['cpu_attacked'])}"
    )


# -- joins: an honest newcomer beside strangers --------------------------------------------------------


def joins(folder: Path) -> list[dict[str, Any]]:
    """Measure joins while strangers connect to the coordinator's port."""
    rows = []
    with Group(folder, workers=1) as group:
        group.extend(180)
        for label, count, where, again in STRANGERS:
            strangers = connect(group, f"{label} {where}", label, count, group.address(), where, again)
            before = rss_mib(group.coordinator.pid)
            forget_peak(group.coordinator.pid)
            argv = (sys.executable, "-m", "hostile.newcomer", group.invitation(), str(JOINS))
            newcomer = group.run("newcomer", *argv)
            used_s = cpu_s(group.coordinator.pid)
            began_s = time.monotonic()
            group.wait("the newcomer", lambda p=newcomer: p.code is not None)
            busy = (cpu_s(group.coordinator.pid) - used_s) / (time.monotonic() - began_s)
            if strangers is not None:
                strangers.end()
            rows.append(
                {
                    "strangers": label,
                    "count": count,
                    "from": where,
                    "took_s": [round(line["took_s"], 2) for line in newcomer.marked("joined")],
                    "failed": len(newcomer.marked("failed")),
                    "hub_mib": round(peak_mib(group.coordinator.pid) - before, 1),
                    "hub_cpu": round(busy, 2),
                }
            )
            print(join_line(rows[-1]), flush=True)
    return rows


def connect(
    group: Group, name: str, kind: str, count: int, address: str, where: str, again: int
) -> Program | None:
    """Start strangers, and wait until all have connected; None if there are to be none."""
    if not count:
        return None
    kind = kind.partition(",")[0]
    key = [group.key().hex()] if kind == "handshakes" else []
    arguments = [
        kind,
        str(count),
        address.removeprefix("tcp://"),
        *key,
        "--from",
        where,
        "--again",
        str(again),
    ]
    attacker = group.run(name, sys.executable, "-m", "hostile.strangers", *arguments)
    group.wait(name, lambda: bool(attacker.marked("ready")))
    return attacker


def join_group(folder: Path, with_strangers: bool) -> dict[str, Any]:
    """Measure how a fourth worker joins, with or without 1,500 silent connections to each port."""
    with Group(folder, workers=len(HONEST)) as group:
        start(group, "dense")
        gate = group.gate()
        group.wait("the first steps", lambda: all(group.steps(name) >= WARM_UP_STEPS for name in HONEST))
        addresses = [group.address(), *(line["address"] for line in group.events("joined"))]
        dora = group.add("dora", exchange="dense", join_gate=gate.path)
        group.wait("dora", lambda: bool(dora.marked("loaded")))
        pids = {name: group.workers[name].pid for name in HONEST}
        before = start_peaks(pids)
        if with_strangers:
            for number, address in enumerate(addresses):
                connect(group, f"silent-{number}", "silent", 1500, address, "others", 300)
        gate.open()
        group.wait("dora's first step", lambda: bool(dora.marked("member")))
        return {
            "strangers": with_strangers,
            "joined_s": round(dora.marked("joined")[0]["took_s"], 2),
            "member_s": round(dora.marked("member")[0]["took_s"], 2),
            "memory_mib": growth_mib(before, pids),
        }


JOIN_HEAD = (
    f"{'strangers':24}{'count':>6}{'from':>8}{'joins (s)':>28}{'failed':>7}{'hub MiB':>8}{'hub CPU':>8}"
)


def join_line(row: dict[str, Any]) -> str:
    took = " ".join(f"{seconds:.2f}" for seconds in row["took_s"])
    return (
        f"{row['strangers']:24}{row['count']:>6}{row['from']:>8}{took:>28}{row['failed']:>7}"
        f"{row['hub_mib']:>+8.0f}{row['hub_cpu']:>8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="attacks|load|joins")
    parser.add_argument("--json", type=Path, help="file for the figures")
    chosen = parser.parse_args()
    wanted = chosen.tables or ["attacks", "load", "joins"]
    load_1min = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPU cores; load average before the start: {load_1min:.1f}\n")
    results: dict[str, Any] = {"cores": os.cpu_count(), "load_before": load_1min}
    with tempfile.TemporaryDirectory() as folder:
        fresh: Callable[[], Path] = lambda: Path(tempfile.mkdtemp(dir=folder))  # noqa: E731
        if "attacks" in wanted:
            print(ATTACK_HEAD)
            results["attacks"] = attacks(fresh())
        if "load" in wanted:
            print("\n" + LOAD_HEAD)
            results["load"] = []
            for name in LOADS:
                results["load"].append(load(fresh(), name))
                print(load_line(results["load"][-1]), flush=True)
        if "joins" in wanted:
            print("\n" + JOIN_HEAD)
            results["joins"] = joins(fresh())
            results["group_joins"] = [join_group(fresh(), with_strangers) for with_strangers in (False, True)]
            for row in results["group_joins"]:
                print(f"a fourth worker, 1,500 silent connections to each of 4 ports: {row}", flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
