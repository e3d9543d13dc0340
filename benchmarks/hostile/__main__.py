"""The tables: what a hostile member costs the others, and what strangers cost an honest join.

    python -m hostile                    all of them, in about 6 minutes
    python -m hostile attacks|load|door  one of them; --json FILE keeps the figures

Decides what is measured and how it is shown.  Each comparison is made within one run: a quiet time, the
attack, a quiet time; so that a machine that slows down slows both.  Everything is on one machine: the
attacker runs with `nice -n 19`, as a fair stand-in for another one, and `burner` shows what computing costs.
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
BESIEGERS = (
    ("nobody", 0, "", 0),
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
    """All train and she is ready; the process ids of the honest."""
    group.wait("the first steps", lambda: all(group.steps(name) >= WARM_UP_STEPS for name in HONEST))
    group.wait("mallory", lambda: bool(mallory.marked("loaded")))
    return {"coordinator": group.coordinator.pid, **{name: group.workers[name].pid for name in HONEST}}


def grown_mib(before: dict[str, float], pids: dict[str, int]) -> dict[str, float]:
    return {name: round(peak_mib(pid) - before[name], 1) for name, pid in pids.items()}


# -- attacks: one after the other, each with a key of its own ------------------------------------------


def attacks(folder: Path) -> list[dict[str, Any]]:
    names = list(ATTACKS)
    rows = []
    # One person with so many keys can make those suspects who alone can see what she does (decision 0011).
    with Group(folder, workers=len(HONEST), without=["liar"]) as group:
        group.extend(300)
        start(group, "gtopk")
        gate = group.gate()
        orders = {
            "gates": [gate.path] * len(names),
            "lives": dict.fromkeys(names, 5) | {"false-votes": 1, "no-votes": 1},
            "seconds": dict.fromkeys(names, 20.0) | {"crowd": 4.0, "flapping-everywhere": 4.0},
        }
        mallory = group.attack("mallory", names, orders=orders, exchange="gtopk")
        pids = warm(group, mallory)
        for number, name in enumerate(names, 1):
            before = {who: rss_mib(pid) for who, pid in pids.items()}
            for pid in pids.values():
                forget_peak(pid)
            began_s = time.monotonic()
            gate.open()
            group.wait_until_over(mallory, number)
            group.wait_until(time.monotonic() + 1.0)
            rows.append(row_of(group, mallory, name, began_s) | {"memory_mib": grown_mib(before, pids)})
            print(attack_line(rows[-1]), flush=True)
        equal = all(len(models) == 1 for models in group.digests().values())
        strikes = {who: line["strikes"] for who, line in strikes_of(group).items()}
        print(
            f"\nmodels equal after each of {len(group.digests())} steps: {equal}; honest strikes: {strikes}"
        )
        rows.append({"attack": "all", "equal": equal, "steps": len(group.digests()), "honest": strikes})
    return rows


def strikes_of(group: Group) -> dict[str, Any]:
    members = group.members()["members"]
    return {line["name"]: line for line in members if line["name"] in HONEST}


def row_of(group: Group, mallory: Program, name: str, began_s: float) -> dict[str, Any]:
    now_s = time.monotonic()
    lives = [line for line in mallory.marked("out") if line["attack"] == name]
    over = next(line for line in mallory.marked("over") if line["attack"] == name)
    commits_s = [
        line["at_s"] for line in group.outcomes("anna") if line["committed"] and line["at_s"] >= began_s
    ]
    pauses_s = [after - before for before, after in itertools.pairwise(commits_s)]
    aborted = group.aborted(began_s, now_s)
    return {
        "attack": name,
        "seconds": round(now_s - began_s, 1),
        "lives": sum(line["code"] != "denied" or line["sent"] > 0 for line in lives),
        "kicked": over["kicked"],
        "sent": sum(line["sent"] for line in lives),
        "aborted_attempts": len(aborted),
        "steps_hit": len({step for _, step, _ in aborted}),
        "generations": len({generation for generation, _, _ in aborted}),
        "steps": len(commits_s),
        "longest_pause_s": round(max(pauses_s, default=0.0), 2),
        "reason": lives[0]["reason"] if lives else "",
    }


ATTACK_HEAD = (
    f"{'attack':20}{'lives':>6}{'kicked':>7}{'steps hit':>10}{'attempts':>9}{'pause s':>8}"
    f"{'worker MiB':>11}{'hub MiB':>8}  first reason"
)


def attack_line(row: dict[str, Any]) -> str:
    memory = row["memory_mib"]
    worker_mib = max(memory[name] for name in HONEST)
    return (
        f"{row['attack']:20}{row['lives']:>6}{'yes' if row['kicked'] else 'no':>7}{row['steps_hit']:>10}"
        f"{row['aborted_attempts']:>9}{row['longest_pause_s']:>8}{worker_mib:>+11.0f}"
        f"{memory['coordinator']:>+8.0f}  {row['reason'][:60]}"
    )


# -- load: one attack for the whole run ----------------------------------------------------------------


def load(folder: Path, attack: str) -> dict[str, Any]:
    with Group(folder, workers=len(HONEST)) as group:
        start(group, "dense")
        gate = group.gate()
        orders = {"gates": [gate.path], "forever": True}
        mallory = group.attack("mallory", [attack], nice=19, orders=orders)
        pids = warm(group, mallory)
        before = {name: rss_mib(pid) for name, pid in pids.items()}
        for pid in pids.values():
            forget_peak(pid)
        quiet, cpu = during(group, {**pids, "mallory": mallory.pid}, QUIET_S)
        burner = group.run("burner", sys.executable, "-c", BURNER, nice=19)
        burning, _ = during(group, pids, BURNER_S)
        burner.end()
        gate.open()
        attacked, attacked_cpu = during(group, {**pids, "mallory": mallory.pid}, ATTACK_S)
        kicked = bool(mallory.marked("over"))
        lives = len(mallory.marked("out"))
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
            "lives": lives,
            "cpu": cpu,
            "cpu_attacked": attacked_cpu,
            "memory_mib": grown_mib(before, pids),
            "equal": all(len(models) == 1 for models in group.digests().values()),
        }


def during(group: Group, pids: dict[str, int], seconds: float) -> tuple[float, dict[str, float]]:
    """Steps a second in the time to come, and the share of a core that each process takes."""
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


# -- the door: strangers, and an honest newcomer -------------------------------------------------------


def door(folder: Path) -> list[dict[str, Any]]:
    """At the coordinator's port; then at those of all, when a worker joins a group that trains."""
    rows = []
    with Group(folder, workers=1) as group:
        group.extend(180)
        for label, count, where, again in BESIEGERS:
            with_them = besiege(group, f"{label} {where}", label, count, group.address(), where, again)
            before = rss_mib(group.coordinator.pid)
            forget_peak(group.coordinator.pid)
            argv = (sys.executable, "-m", "hostile.newcomer", group.invitation(), str(JOINS))
            newcomer = group.run("newcomer", *argv)
            used_s = cpu_s(group.coordinator.pid)
            began_s = time.monotonic()
            group.wait("the newcomer", lambda p=newcomer: p.code is not None)
            busy = (cpu_s(group.coordinator.pid) - used_s) / (time.monotonic() - began_s)
            if with_them is not None:
                with_them.end()
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
            print(door_line(rows[-1]), flush=True)
    return rows


def besiege(
    group: Group, name: str, kind: str, count: int, address: str, where: str, again: int
) -> Program | None:
    if not count:
        return None
    kind = kind.partition(",")[0]
    key = [group.key().hex()] if kind == "handshakes" else []
    words = [kind, str(count), address.removeprefix("tcp://"), *key, "--from", where, "--again", str(again)]
    attacker = group.run(name, sys.executable, "-m", "hostile.strangers", *words)
    group.wait(name, lambda: bool(attacker.marked("ready")))
    return attacker


def worker_door(folder: Path, besieged: bool) -> dict[str, Any]:
    """A fourth worker joins three that train, with or without 1,500 silent connections at each port."""
    with Group(folder, workers=len(HONEST)) as group:
        start(group, "dense")
        gate = group.gate()
        group.wait("the first steps", lambda: all(group.steps(name) >= WARM_UP_STEPS for name in HONEST))
        doors = [group.address(), *(line["address"] for line in group.events("joined"))]
        dora = group.add("dora", exchange="dense", join_gate=gate.path)
        group.wait("dora", lambda: bool(dora.marked("loaded")))
        pids = {name: group.workers[name].pid for name in HONEST}
        before = {name: rss_mib(pid) for name, pid in pids.items()}
        for pid in pids.values():
            forget_peak(pid)
        if besieged:
            for number, address in enumerate(doors):
                besiege(group, f"silent-{number}", "silent", 1500, address, "others", 300)
        gate.open()
        group.wait("dora's first step", lambda: bool(dora.marked("member")))
        return {
            "besieged": besieged,
            "joined_s": round(dora.marked("joined")[0]["took_s"], 2),
            "member_s": round(dora.marked("member")[0]["took_s"], 2),
            "memory_mib": grown_mib(before, pids),
        }


DOOR_HEAD = (
    f"{'strangers':24}{'count':>6}{'from':>8}{'joins (s)':>28}{'failed':>7}{'hub MiB':>8}{'hub CPU':>8}"
)


def door_line(row: dict[str, Any]) -> str:
    took = " ".join(f"{seconds:.2f}" for seconds in row["took_s"])
    return (
        f"{row['strangers']:24}{row['count']:>6}{row['from']:>8}{took:>28}{row['failed']:>7}"
        f"{row['hub_mib']:>+8.0f}{row['hub_cpu']:>8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="attacks|load|door")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    chosen = parser.parse_args()
    wanted = chosen.tables or ["attacks", "load", "door"]
    load_1min = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPU cores; load average before it began: {load_1min:.1f}\n")
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
        if "door" in wanted:
            print("\n" + DOOR_HEAD)
            results["door"] = door(fresh())
            results["worker_door"] = [worker_door(fresh(), besieged) for besieged in (False, True)]
            for row in results["worker_door"]:
                print(f"a fourth worker, 1,500 silent at each of 4 ports: {row}", flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
