"""The coordinator dies: the run continues without a loss."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import sys
from pathlib import Path

import pytest

from gridtrain_coordinator.journal.backups import JOURNAL

pytestmark = pytest.mark.integration

KILLED = 128 + signal.SIGKILL
DYING_COORDINATOR = (sys.executable, str(Path(__file__).parent / "scripts" / "dying_coordinator.py"))
SAMPLES, GATED_STEP = 800, 12
JOB = {"exchange": "dense", "batch_size": 8, "epochs": 1, "samples": SAMPLES}


def one_digest(ends: list[dict]) -> bool:
    return len({(end["digest"], end["step"]) for end in ends}) == 1


def commits(group, *names: str) -> int:
    """The smallest number of committed attempts that one of these workers has reported."""
    outcomes = [group.workers[name].marked("outcome") for name in names or group.workers]
    return min(sum(line["committed"] for line in lines) for lines in outcomes)


def journal(folder: Path) -> list[tuple]:
    with sqlite3.connect(f"file:{folder / JOURNAL}?mode=ro", uri=True) as connection:
        return connection.execute(
            "SELECT term, generation, verdict FROM generations ORDER BY term, 2"
        ).fetchall()


def test_a_coordinator_killed_at_any_transaction_continues_the_run(new_group) -> None:
    """Before an entry is durable, after, and after its messages; in the first generation and later."""
    points = [(point, number) for number in (1, 2, 3) for point in ("before", "after", "sent")]
    with new_group(min_workers=3) as group:
        join, step = group.gate(), group.gate()
        for name in ("anna", "bert", "clara"):
            gated = {"gated_step": GATED_STEP, "step_gate": step.path} if name == "anna" else {}
            group.add(name, **JOB, **gated, join_gate=join.path)
        group.wait("all", lambda: all(p.marked("loaded") for p in group.workers.values()))
        group.kill_coordinator()
        for _ in group.workers:
            join.open()
        for point, number in points:
            group.start_coordinator(program=(*DYING_COORDINATOR, point, str(number)))
            group.await_death()
            assert group.coordinator.code == -signal.SIGKILL, (point, number)
        group.start_coordinator()
        group.wait("step 12 at anna", lambda: bool(group.workers["anna"].marked("at gate")))
        step.open()
        ends = group.finish()
        verdicts = journal(group.folder)

    assert len(ends) == 3 and one_digest(ends)
    group.assert_each_once(SAMPLES)
    terms = [fields["term"] for fields in group.events("started")]
    assert terms == sorted(set(terms)), "no term twice"
    assert len(verdicts) == len({row[1] for row in verdicts}), "no generation twice"


def test_without_a_coordinator_training_goes_on_until_a_member_fails(new_group) -> None:
    """A gate lets one member take a given number of steps, so that the test knows what happens meanwhile."""
    rng = random.Random(4)
    with new_group(min_workers=3, codes=frozenset({0, KILLED}), more_s=90.0) as group:
        pace = group.gate()

        def train_steps(steps: int) -> None:
            """Wait until all have reported this many more steps."""
            until = commits(group) + steps
            for _ in range(steps):
                pace.open()
            group.wait(f"commit {until}", lambda: commits(group) >= until)

        for name in ("anna", "bert", "clara"):
            gated = {"gated_from": 2, "step_gate": pace.path} if name == "anna" else {}
            group.add(name, **(JOB | {"global_batch_size": 20, "batch_size": None, "frozen": True}), **gated)
        group.wait("two steps", lambda: commits(group) == 2)
        for restart in range(1, 3):
            train_steps(rng.randrange(1, 4))
            group.kill_coordinator()
            train_steps(rng.randrange(2, 5))
            group.start_coordinator()
            group.wait("a generation", lambda: len(group.events("training")) > restart)  # noqa: B023
        train_steps(1)
        group.kill_coordinator()
        clara = group.workers.pop("clara")
        os.kill(script_of(clara), signal.SIGKILL)
        pace.open()
        group.wait("the reason", lambda: all("paused: " in p.said() for p in group.workers.values()))
        before = commits(group)
        group.start_coordinator()
        group.workers["clara"] = clara
        group.wait("the step", lambda: commits(group, "anna", "bert") == before + 1)
        for _ in range(SAMPLES // 20):
            pace.open()
        ends = group.finish()
    assert "only the coordinator can" in group.workers["anna"].said()
    assert len(ends) == 2 and one_digest(ends)
    assert len({end["parameters"] for end in ends}) == 1, "the frozen parameters, too"
    group.assert_each_once(SAMPLES)


def script_of(program) -> int:
    """The process id of an agent's script."""
    task = Path(f"/proc/{program.process.pid}/task/{program.process.pid}/children")
    for child in map(int, task.read_text().split()):
        if b"train.py" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise AssertionError("it has no script")
