"""Processes of the demo: their records are read, failures are explained, and all are ended."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import pytest

from gridtrain.core.group.invitation import Invitation
from gridtrain.errors import GridtrainError
from gridtrain.network.transport.identity import Identity
from gridtrain.runtime.client.endpoint_file import OPERATOR_KEY, EndpointFile
from gridtrain.runtime.client.operator_client import CoordinatorEndpoint
from gridtrain.tools.demo.orchestrator import (
    DemoPlan,
    ProcessCommand,
    coordinator_command,
    read_curve,
    run_all,
    supervise,
    training_command,
    worker_commands,
)
from gridtrain.tools.demo.step_records import STEPS_FILE, SentBytes, StepRecord, StepTimes, write_sent

FOREVER = "import time; time.sleep(600)"


def python(name: str, code: str) -> ProcessCommand:
    return ProcessCommand(name, (sys.executable, "-c", textwrap.dedent(code)))


def record(step: int, held_out: float | None = None) -> StepRecord:
    return StepRecord(step, 0.5 * step, 3.0, held_out, SentBytes(100 * step), StepTimes())


def nothing(_: StepRecord) -> None:
    pass


class Lifeline:
    """A FIFO that processes hold open for writing: it reads as ended when the last of them is gone."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "alive"
        os.mkfifo(self.path)
        self._reader = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    @property
    def hold(self) -> str:
        return f"held = open({str(self.path)!r}, 'w'); held.write('.'); held.flush()\n"

    def read_to_end(self) -> bytes:
        """Block until no process holds it open."""
        os.set_blocking(self._reader, True)
        found = b""
        while piece := os.read(self._reader, 64):
            found += piece
        os.close(self._reader)
        return found


def test_records_come_in_order_and_the_coordinator_is_ended_with_the_workers(tmp_path: Path) -> None:
    lifeline = Lifeline(tmp_path)
    lines = [record(1), record(2, held_out=2.5), record(3)]
    code = f"open({str(tmp_path / STEPS_FILE)!r}, 'w').write({''.join(r.to_line() for r in lines)!r})"
    records_seen: list[StepRecord] = []

    supervise(
        python("coordinator", lifeline.hold + FOREVER),
        lambda: [python("worker-1", lifeline.hold + code), python("worker-2", lifeline.hold)],
        tmp_path,
        records_seen.append,
    )

    assert records_seen == lines
    assert lifeline.read_to_end() == b"..."


def test_a_failing_worker_shows_the_tail_of_its_log_and_ends_the_others(tmp_path: Path) -> None:
    lifeline = Lifeline(tmp_path)
    failing = "for i in range(100): print('line', i)\nraise SystemExit('CUDA is on fire')"

    with pytest.raises(GridtrainError) as caught:
        supervise(
            python("coordinator", lifeline.hold + FOREVER),
            lambda: [python("worker-1", lifeline.hold + FOREVER), python("worker-2", failing)],
            tmp_path,
            nothing,
        )

    text = str(caught.value)
    assert "worker-2 ended with exit code 1" in text
    assert "CUDA is on fire" in text and "line 99" in text and "line 50\n" not in text
    assert f"see the complete logs in {tmp_path}" in text
    lifeline.read_to_end()


def test_a_coordinator_that_cannot_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(GridtrainError, match=r"(?s)coordinator ended with exit code 1.*port 7700 is taken"):
        supervise(
            python("coordinator", "raise SystemExit('port 7700 is taken')"),
            lambda: [python("worker-1", FOREVER)],
            tmp_path,
            nothing,
        )


def test_a_run_without_steps_fails_after_its_limit(tmp_path: Path) -> None:
    with pytest.raises(GridtrainError, match=r"no step was committed for 0 s"):
        supervise(
            python("coordinator", FOREVER),
            lambda: [python("worker-1", FOREVER)],
            tmp_path,
            nothing,
            start_s=0.2,
        )


def test_ctrl_c_ends_all_processes_also_one_that_ignores_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gridtrain.tools.demo.orchestrator.SHUTDOWN_TIMEOUTS_S", (0.2, 0.1))
    lifeline = Lifeline(tmp_path)
    ready = f"open({str(tmp_path / STEPS_FILE)!r}, 'w').write({record(1).to_line()!r})\n"
    ignores_sigterm = (
        f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{lifeline.hold}{ready}{FOREVER}"
    )
    parent = f"""\
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", {ignores_sigterm!r}])
        {FOREVER}
    """

    def ctrl_c(_: StepRecord) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        supervise(python("coordinator", FOREVER), lambda: [python("worker-1", parent)], tmp_path, ctrl_c)

    assert lifeline.read_to_end() == b"."


def test_workers_are_started_when_the_coordinator_listens(tmp_path: Path) -> None:
    """It shows that by a file; an earlier worker would have no invitation."""
    (tmp_path / "asked").touch()
    listens = f"""\
        import pathlib, time
        asked = pathlib.Path({str(tmp_path / "asked")!r})
        while not asked.read_text():
            time.sleep(0.01)
        pathlib.Path({str(tmp_path / "listens")!r}).touch()
        {FOREVER}
    """

    def workers() -> list[ProcessCommand] | None:
        (tmp_path / "asked").write_text("yes")
        return [python("worker-1", "print('came')")] if (tmp_path / "listens").exists() else None

    supervise(python("coordinator", listens), workers, tmp_path, nothing)

    assert (tmp_path / "worker-1.log").read_text() == "came\n"


def test_a_coordinator_that_never_listens_fails_after_its_limit(tmp_path: Path) -> None:
    with pytest.raises(
        GridtrainError, match=r"(?s)no step was committed for 0 s.*coordinator, end of its log"
    ):
        supervise(python("coordinator", FOREVER), lambda: None, tmp_path, nothing, start_s=0.2)


def test_keys_of_an_earlier_demo_are_removed_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "dense"
    keys = folder / "gridtrain" / "default" / "identities" / "0a1b"
    for path in (keys / "worker-0.key", folder / "coordinator.key", folder / "operator.key"):
        Identity.generate().write(path)
    for name in ("worker-1.log", "journal.sqlite-wal", "coordinator.json", "mine.txt"):
        (folder / name).touch()
    with pytest.raises(StopIteration):  # instead of the run itself
        run_all(DemoPlan(runs=(("dense", 1),), out=tmp_path), NoView())
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["mine.txt"]


class NoView:
    def begin(self, label: str, steps: int) -> None:
        raise StopIteration

    def update(self, record: StepRecord) -> None: ...

    def end(self) -> None: ...


PLAN = {"runs": (("gtopk", 450),), "workers": 2, "cap": "20Mbit", "density": 0.05}


def test_the_coordinators_command_is_that_of_a_user(tmp_path: Path) -> None:
    command = coordinator_command(2, tmp_path)
    assert " ".join(command.argv[3:]) == (
        f"coordinator --listen tcp://127.0.0.1:0 --state {tmp_path} --min-workers 2"
    )


def test_the_workers_commands_are_those_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = DemoPlan(**PLAN, out=tmp_path)
    train = training_command(plan, "gtopk", 450, tmp_path)
    limits = ("--upload-limit", "20Mbit", "--download-limit", "20Mbit")
    assert worker_commands(2, tmp_path, train, limits) is None, "no coordinator listens yet"
    asked: list[tuple[CoordinatorEndpoint, int, float]] = []
    invitation = Invitation("tcp://127.0.0.1:7700", bytes(32), bytes(range(32)), "default")

    class Operator:
        def __init__(self, contact: CoordinatorEndpoint) -> None:
            self.contact = contact

        def invite(self, uses: int, expires_s: float) -> Invitation:
            asked.append((self.contact, uses, expires_s))
            return invitation

    monkeypatch.setattr("gridtrain.tools.demo.orchestrator.OperatorClient", Operator)
    Identity.generate().write(tmp_path / OPERATOR_KEY)
    EndpointFile("tcp://127.0.0.1:7700", "tcp://127.0.0.1:7700", bytes(32), "default", True).write(tmp_path)
    workers = worker_commands(2, tmp_path, train, limits)

    assert workers is not None and [worker.name for worker in workers] == ["worker-1", "worker-2"]
    ((contact, uses, _),) = asked
    assert (contact.file.here, uses) == ("tcp://127.0.0.1:7700", 2)
    assert " ".join(workers[0].argv[3:]) == (
        f"worker {invitation.text()} --upload-limit 20Mbit --download-limit 20Mbit --name worker-1 -- "
        f"{sys.executable} -m gridtrain.tools.demo.demo_worker --exchange gtopk --steps 450 --density 0.05 "
        f"--model small --seed 0 --measure-every 10 --metrics {tmp_path}"
    )


def test_a_curve_has_the_measured_steps(tmp_path: Path) -> None:
    records = [record(1), record(2, held_out=2.5), record(3), record(4, held_out=2.25)]
    (tmp_path / STEPS_FILE).write_text("".join(r.to_line() for r in records))
    write_sent(tmp_path, "101", SentBytes(400, 0, 0))

    curve = read_curve("gtopk", "gTop-k", tmp_path)

    assert [(m.step, m.held_out, m.data_bytes) for m in curve.measurements] == [(2, 2.5, 200), (4, 2.25, 400)]
    assert (curve.steps, curve.seconds, curve.sent_bytes["data"]) == (4, 2.0, 400.0)


def test_a_run_without_a_measurement_is_named(tmp_path: Path) -> None:
    with pytest.raises(GridtrainError, match="gTop-k ended without a held-out measurement"):
        read_curve("gtopk", "gTop-k", tmp_path)
