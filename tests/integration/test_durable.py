"""The coordinator dies, its disk fills up, or a standby replaces it: the run continues without a loss."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import pytest

from gridtrain.training.checkpoint import checkpoint_store, nested_values, serialization
from gridtrain_coordinator.journal.backups import JOURNAL

pytestmark = pytest.mark.integration

KILLED, STOPPED = 128 + signal.SIGKILL, 128 + signal.SIGTERM
DYING_COORDINATOR = (sys.executable, str(Path(__file__).parent / "scripts" / "dying_coordinator.py"))
SAMPLES, GATED_STEP = 800, 12
JOB = {"exchange": "dense", "batch_size": 8, "epochs": 1, "samples": SAMPLES}


def one_digest(ends: list[dict]) -> bool:
    return len({(end["digest"], end["step"]) for end in ends}) == 1


def assert_every_sample_once(group) -> None:
    taken = sorted(chain(*group.samples_by_round().values()))
    assert taken == list(range(SAMPLES)), "each sample in exactly one committed step"


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
    assert_every_sample_once(group)
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
    assert_every_sample_once(group)


def script_of(program) -> int:
    """The process id of an agent's script."""
    task = Path(f"/proc/{program.process.pid}/task/{program.process.pid}/children")
    for child in map(int, task.read_text().split()):
        if b"train.py" in Path(f"/proc/{child}/cmdline").read_bytes():
            return child
    raise AssertionError("it has no script")


def test_a_standby_from_an_old_backup_takes_over(new_group, tmp_path: Path) -> None:
    """The backup knows generation 1 of two members; the run is in generation 2 of three, and a term later."""
    backups = tmp_path / "backups"
    with new_group(min_workers=2, flags=("--backup-to", str(backups), "--backup-every", "0.1")) as group:
        step, second = group.gate(), group.gate()
        # Enrolled before the backup is taken: a standby admits the workers of its backup.
        join = group.gate()
        group.add("anna", **JOB, gated_step=GATED_STEP, step_gate=step.path)
        group.add("bert", **JOB)
        clara = group.add("clara", **JOB, join_gate=join.path, gated_step=20, step_gate=second.path)
        group.wait(
            "step 12", lambda: bool(group.workers["anna"].marked("at gate") and clara.marked("loaded"))
        )
        group.wait("a backup of generation 1", lambda: journal_says(backups, 1), look_every_s=0.1)
        group.kill_coordinator()
        shutil.copytree(backups, tmp_path / "old")
        group.start_coordinator()
        join.open()
        group.wait("clara's joining", lambda: any(f["workers"] == 3 for f in group.events("generation")))
        step.open()
        group.wait("clara", lambda: any(f["workers"] == 3 for f in group.events("training")))
        group.wait("step 20", lambda: bool(clara.marked("at gate")))
        group.kill_coordinator()
        group.start_coordinator("--from-backup", str(tmp_path / "old"), state=tmp_path / "standby")
        group.wait("the members' reports", lambda: bool(group.events("recalled")))
        second.open()
        ends = group.finish()
        made = journal(tmp_path / "standby")

    (recalled,) = group.events("recalled")
    assert recalled["workers"] == 3 and recalled["generation"] > 1
    terms = [fields["term"] for fields in group.events("started")]
    assert terms == [1, 2, 2], "as in the backup"
    assert made[-1][0] == recalled["term"] == 3, "and then above the term that the members know"
    assert len(ends) == 3 and one_digest(ends)
    assert_every_sample_once(group)


def journal_says(backups: Path, generation: int) -> bool:
    paths = sorted(backups.glob("backup-*-*"))
    return bool(paths) and any(row[1] == generation for row in journal(paths[-1]))


@pytest.fixture
def small_disk(tmp_path: Path):
    """A separate file system of 2 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(("mount", "-t", "tmpfs", "-o", "size=2M", "tmpfs", str(folder))).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(("umount", "-l", str(folder)), check=True)


def test_a_full_disk_stops_only_decisions_and_checkpoints(new_group, small_disk: Path) -> None:
    (small_disk / "state").mkdir()
    with new_group(min_workers=2, state=small_disk / "state") as group:
        join, step = group.gate(), group.gate()
        checkpoints = small_disk / "checkpoints"
        flags = ("--state-dir", str(checkpoints), "--checkpoint-every", "10")
        anna = group.add("anna", **JOB, gated_from=GATED_STEP, step_gate=step.path, flags=flags)
        group.add("bert", **JOB)
        clara = group.add("clara", **JOB, join_gate=join.path)
        group.wait("step 12", lambda: bool(anna.marked("at gate") and clara.marked("loaded")))
        # A complete checkpoint: one that fails half-way would leave room.
        group.wait("a checkpoint", lambda: any(checkpoints.glob("step-*")), look_every_s=0.1)
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(1 << 12))
        before = commits(group, "anna", "bert")
        for _ in range(10):  # the next checkpoint is due at step 20
            step.open()
        group.wait("a checkpoint that fails", lambda: "cannot be written to" in anna.said())
        with pytest.raises(AssertionError, match="the disk is full"):  # until the journal's last page is full
            for _ in range(100):
                group.operator("invite")
        join.open()
        group.wait("a decision", lambda: "the disk is full" in group.operator("status", "--json"))
        assert group.events("no_room")
        status = group.operator("status", "--json")
        assert '"phase": "paused"' in status or '"phase":"paused"' in status
        assert "the disk is full" in status
        made = len(group.events("generation"))
        filler.unlink()
        group.wait("room", lambda: bool(group.events("room_again")))
        group.wait(
            "a generation of three", lambda: any(f["workers"] == 3 for f in group.events("generation"))
        )
        for _ in range(SAMPLES):
            step.open()
        ends = group.finish()
    assert made == 1 and len(ends) == 3 and one_digest(ends)
    assert commits(group, "anna") > before
    assert_every_sample_once(group)
    assert not group.former, "one coordinator all the time"


def test_a_run_resumes_with_another_number_of_workers(new_group) -> None:
    """They start from the exact bits of the checkpoint, and report the lost steps as a rollback.

    It is the first checkpoint: a later one could be skipped while the one before is still being written.
    """
    flags = ("--checkpoint-every", "20")
    job = JOB | {"exchange": "dense", "batch_size": None, "global_batch_size": 16}
    with new_group(min_workers=2, codes=frozenset({0, STOPPED})) as group:
        step = group.gate()
        stopped = [
            group.add(name, **job, gated_step=24, step_gate=step.path, flags=flags)
            for name in ("anna", "bert")
        ]
        group.wait("step 24", lambda: all(worker.marked("at gate") for worker in stopped))
        for _ in range(20):  # until both have reported their steps; each query starts a process
            if json.loads(group.operator("status", "--json"))["step"] == 24:
                break

        def written() -> list[Path]:
            return sorted(group.folder.glob("gridtrain/default/checkpoints/*/*/step-00000020"))

        group.wait("both checkpoints", lambda: len(written()) == 2, look_every_s=0.1)
        for worker in stopped:
            worker.process.terminate()
        group.wait("the end of both", lambda: all(worker.code == STOPPED for worker in stopped))
        paths = written()
        for path in paths:
            shutil.rmtree(path.with_name("step-00000024"))  # as if they had been killed
        group.wait("a new start", lambda: bool(group.events("waiting")))
        group.kill_coordinator()
        group.start_coordinator("--min-workers", "3")
        first, second = (checkpoint_store.read(path) for path in paths)
        stored = serialization.model_tensors(first.document, first.tensors)
        gate = group.gate()
        resumed = [
            group.add(name, **job, flags=flags, join_gate=gate.path) for name in ("clara", "dora", "emil")
        ]
        group.wait("all", lambda: all(worker.marked("loaded") for worker in resumed))
        for _ in resumed:
            gate.open()
        ends = group.finish()

    assert first.position == second.position
    begun = [worker.marked("begin")[0] for worker in resumed]
    assert {line["step"] for line in begun} == {20}
    bits = blake2b(b"".join(nested_values.tensor_bytes(x).tobytes() for x in stored.values()), digest_size=16)
    assert {line["parameters"] for line in begun} == {bits.hexdigest()}
    assert group.events("rollback") == [{"from": 24, "to": 20}]
    assert len(ends) == 3 and one_digest(ends) and ends[0]["step"] == SAMPLES // 16
    after = {name for name in group.samples_by_round() if name[0] > 1}
    taken = sorted(
        sample for name, samples in group.samples_by_round().items() if name in after for sample in samples
    )
    before = sorted(
        sample
        for name, samples in group.samples_by_round().items()
        if name not in after and name[1] < 20
        for sample in samples
    )
    assert sorted(before + taken) == list(range(SAMPLES)), "those before the checkpoint, and those after it"
