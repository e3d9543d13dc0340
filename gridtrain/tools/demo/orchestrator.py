"""Starts, watches and terminates the demo's processes, and decides when one of its runs has failed.

For each exchange, with P workers:

  start            gridtrain coordinator --min-workers P
  create           an invitation for P workers
  start P times    gridtrain worker INVITATION --upload-limit CAP --download-limit CAP -- ...demo_worker
  follow           steps.jsonl, until all workers have ended

Each process writes to its own log file.  If one fails, the others are terminated, and the error shows the end
of the failed one's log.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from gridtrain.errors import CoordinatorUnreachable, GridtrainError
from gridtrain.runtime.client.operator_client import CoordinatorEndpoint, OperatorClient
from gridtrain.tools.child_processes import CLI_COMMAND, end_processes, log_tail, process_environment
from gridtrain.tools.demo.demo_report import LossCurve, Measurement
from gridtrain.tools.demo.progress_view import LineView, TableView
from gridtrain.tools.demo.recipe import DENSITY, MEASURE_EVERY, label_for
from gridtrain.tools.demo.step_records import SENT_GLOB, STEPS_FILE, RecordReader, StepRecord, mean_sent

POLL_S = 0.2
SHUTDOWN_TIMEOUTS_S = (6.0, 3.0)
"""How long to wait after a first SIGTERM, and after a second one, which makes an agent kill its script.

Then the processes are killed with SIGKILL.
"""

NO_PROGRESS_TIMEOUT_S = 90.0
"""A run without a new step for this long has failed.  With any reasonable cap, a step takes less time."""

START_TIMEOUT_S = 120.0
"""How long a run may take to commit its first step.  It takes long, because all workers import torch at the
same time."""

INVITATION_TIMEOUT_S = 3600.0
LOG_TAIL_LINES = 15
OLD_FILES = (
    *(STEPS_FILE, SENT_GLOB, "worker-*.json", "final*.safetensors*", "*.log"),
    *("journal.sqlite*", "coordinator.*", "operator.key", "gridtrain/*/identities/*/worker-*"),
)


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The options of `gridtrain demo`.

    Attributes:
        runs: the pairs (exchange, steps), in order; the first is the baseline.
        cap: the upload and download limit of each worker, such as "20Mbit".
        out: the folder for logs, metrics and the report.
    """

    runs: tuple[tuple[str, int], ...]
    out: Path
    workers: int = 4
    cap: str = "20Mbit"
    density: float = DENSITY
    model: str = "small"
    seed: int = 0
    measure_every: int = MEASURE_EVERY


@dataclass(frozen=True, slots=True)
class ProcessCommand:
    """A process to start.  If it ends with an exit code other than 0, the run has failed."""

    name: str
    argv: tuple[str, ...]


def run_all(plan: DemoPlan, view: TableView | LineView) -> list[LossCurve]:
    """Run the exchanges one after the other; return their loss curves.

    Raises:
        GridtrainError: a process failed or a step took too long (the message has the last lines of logs), or
            a run ended without a held-out measurement.
    """
    curves: list[LossCurve] = []
    for exchange, steps in plan.runs:
        folder = plan.out / exchange
        remove_old_files(folder)
        label = label_for(exchange, plan.density)
        view.begin(label, steps)
        train = training_command(plan, exchange, steps, folder)
        limits = ("--upload-limit", plan.cap, "--download-limit", plan.cap)
        workers = partial(worker_commands, plan.workers, folder, train, limits)
        try:
            supervise(coordinator_command(plan.workers, folder), workers, folder, view.update)
        finally:
            view.end()
        curves.append(read_curve(exchange, label, folder))
    return curves


def coordinator_command(workers: int, folder: Path) -> ProcessCommand:
    argv = (*CLI_COMMAND, "coordinator", "--listen", "tcp://127.0.0.1:0", "--state", str(folder.resolve()))
    return ProcessCommand("coordinator", (*argv, "--min-workers", str(workers)))


def worker_commands(
    count: int, folder: Path, train: Sequence[str], options: Sequence[str] = ()
) -> list[ProcessCommand] | None:
    """Create an invitation, and return the commands of `count` workers that use it.

    Returns None if the coordinator whose state is in `folder` is not listening yet.

    Args:
        train: the training command of each worker.
        options: options of `gridtrain worker`.
    """
    try:
        contact = CoordinatorEndpoint.find(state=folder.resolve())
    except CoordinatorUnreachable:
        return None
    operator = OperatorClient(contact)
    invitation = operator.invite(count, expires_s=INVITATION_TIMEOUT_S).text()
    worker = (*CLI_COMMAND, "worker", invitation, *options)
    return [
        ProcessCommand(f"worker-{i}", (*worker, "--name", f"worker-{i}", "--", *train))
        for i in range(1, count + 1)
    ]


def training_command(plan: DemoPlan, exchange: str, steps: int, folder: Path) -> list[str]:
    """Return the training command of each worker of one run."""
    train = [sys.executable, "-m", "gridtrain.tools.demo.demo_worker", "--exchange", exchange]
    train += ["--steps", str(steps), "--density", str(plan.density), "--model", plan.model]
    train += ["--seed", str(plan.seed), "--measure-every", str(plan.measure_every)]
    return [*train, "--metrics", str(folder)]


def supervise(
    coordinator: ProcessCommand,
    workers: Callable[[], Sequence[ProcessCommand] | None],
    folder: Path,
    on_record: Callable[[StepRecord], None],
    *,
    start_s: float = START_TIMEOUT_S,
) -> None:
    """Run the coordinator and the workers until all workers have ended; no process outlives this call.

    Args:
        workers: a function that returns the workers' commands, or None if the coordinator is not listening
            yet; it is called until it returns commands.
        folder: the folder for the log files, in which the first worker writes its records.
        on_record: a function that is called with each new record in `folder`.
        start_s: the maximum time from the start to the first record.

    Raises:
        GridtrainError: a process failed, or a step took too long.
    """
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(start_processes([coordinator], folder))
        follower = RecordReader(folder / STEPS_FILE)
        heard_s, patience_s = time.monotonic(), start_s
        while True:
            if len(processes) == 1 and (commands := workers()) is not None:
                processes = processes + stack.enter_context(start_processes(commands, folder))
            ended = len(processes) > 1 and all(process.poll() is not None for process in processes[1:])
            for record in follower.new_records():
                on_record(record)
                heard_s, patience_s = time.monotonic(), NO_PROGRESS_TIMEOUT_S
            for process in processes:
                process.raise_if_failed()
            if ended:
                return
            if time.monotonic() - heard_s > patience_s:
                raise GridtrainError(
                    "\n".join(
                        [f"no step was committed for {patience_s:.0f} s", *(p.tail() for p in processes[:2])]
                    ),
                    remedy=f"see the complete logs in {folder}",
                )
            time.sleep(POLL_S)


@dataclass(slots=True)
class RunningProcess:
    """A started process with its log file."""

    command: ProcessCommand
    popen: subprocess.Popen[bytes]
    log: Path

    def poll(self) -> int | None:
        return self.popen.poll()

    def tail(self) -> str:
        return log_tail(self.command.name, [self.log], LOG_TAIL_LINES)

    def raise_if_failed(self) -> None:
        code = self.poll()
        if code:
            raise GridtrainError(
                f"{self.command.name} ended with exit code {code}\n{self.tail()}",
                remedy=f"see the complete logs in {self.log.parent}",
            )


@contextlib.contextmanager
def start_processes(commands: Sequence[ProcessCommand], folder: Path) -> Iterator[list[RunningProcess]]:
    """Start processes, each in its own session; on exit, terminate all of them and their children."""
    folder.mkdir(parents=True, exist_ok=True)
    here = folder.resolve()
    environment = process_environment(here, EXPORT_DIR=str(here))
    running: list[RunningProcess] = []
    try:
        for command in commands:
            log = folder / f"{command.name}.log"
            with log.open("wb") as output:
                popen = subprocess.Popen(
                    command.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches only the demo, which stops the others
                )
            running.append(RunningProcess(command, popen, log))
        yield running
    finally:
        end_processes([process.popen for process in running], SHUTDOWN_TIMEOUTS_S)


def remove_old_files(folder: Path) -> None:
    """Remove the files that an earlier demo created, and no other files."""
    for pattern in OLD_FILES:
        for path in folder.glob(pattern):
            if path.is_dir():  # the folder of a worker's identity
                shutil.rmtree(path)
            else:
                path.unlink()


def read_curve(exchange: str, label: str, folder: Path) -> LossCurve:
    """Read a finished run's curve from the files that its workers wrote.

    Raises:
        GridtrainError: the run left no held-out measurement.
    """
    records = RecordReader(folder / STEPS_FILE).new_records()
    measurements = tuple(
        Measurement(r.step, r.seconds, r.held_out, r.sent.data) for r in records if r.held_out is not None
    )
    if not measurements:
        raise GridtrainError(
            f"the run with {label} ended without a held-out measurement",
            remedy=f"see the logs in {folder}",
        )
    last = records[-1]
    sent, times_s = mean_sent(folder), asdict(last.times)
    return LossCurve(exchange, label, measurements, last.step, last.seconds, sent, times_s)
