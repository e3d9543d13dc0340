"""A coordinator and its workers as processes of this machine: started, followed, always cleaned up.

Decides which processes run and when a run has failed.  Never touches a gradient.

    for each exchange:
      gridtrain coordinator --min-workers P           one log file each
      gridtrain invite --uses P
      gridtrain worker INVITATION -- train.py  x P    all behind the cap
      follow steps.jsonl until every worker ended     a worker fails -> the tail of its log, all stopped
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from gridtrain.config import ENV_PREFIX
from gridtrain.errors import ConfigError, GridtrainError
from gridtrain.runtime.client.operator_client import CoordinatorEndpoint, OperatorClient
from gridtrain.tools.demo.demo_report import LossCurve, Measurement
from gridtrain.tools.demo.recipe import DENSITY, MEASURE_EVERY, label_for
from gridtrain.tools.demo.step_records import STEPS_FILE, RecordReader, StepRecord, mean_sent

POLL_S = 0.2
SHUTDOWN_TIMEOUTS_S = (6.0, 3.0)
"""After the first and after the second SIGTERM (at which an agent kills its script); then SIGKILL."""

NO_PROGRESS_TIMEOUT_S = 90.0
"""Without a new step for this long, a run has failed.  Longer than a step at any cap that makes sense."""

START_TIMEOUT_S = 120.0
"""Importing torch in all workers at once, on a slow machine."""

INVITATION_TIMEOUT_S = 3600.0
LOG_TAIL_LINES = 15
CLI = (sys.executable, "-c", "from gridtrain.cli import main; main()")


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What `gridtrain demo` was asked for.

    Attributes:
        runs: (exchange, steps), in order; the first is the baseline.
        cap: upload and download limit of each worker, such as "20Mbit".
        out: folder for logs, metrics and the report.
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
    """A process to start; its end with another exit code than 0 fails the run."""

    name: str
    argv: tuple[str, ...]


class ProgressView(Protocol):
    """Who is told how a run goes on (a terminal, a log, a test)."""

    def begin(self, label: str, steps: int) -> None: ...

    def update(self, record: StepRecord) -> None: ...

    def end(self) -> None: ...


def run_all(plan: DemoPlan, view: ProgressView) -> list[LossCurve]:
    """Run the exchanges one after the other.

    Raises:
        GridtrainError: a worker or the coordinator failed; the text holds the tail of its log.
    """
    curves: list[LossCurve] = []
    for exchange, steps in plan.runs:
        folder = plan.out / exchange
        _empty(folder)
        label = label_for(exchange, plan.density)
        view.begin(label, steps)
        workers = partial(worker_commands, plan, exchange, steps, folder)
        try:
            supervise(coordinator_command(plan, folder), workers, folder, view.update)
        finally:
            view.end()
        curves.append(read_curve(exchange, label, folder))
    return curves


def coordinator_command(plan: DemoPlan, folder: Path) -> ProcessCommand:
    argv = (*CLI, "coordinator", "--listen", "tcp://127.0.0.1:0", "--state", str(folder.resolve()))
    return ProcessCommand("coordinator", (*argv, "--min-workers", str(plan.workers)))


def worker_commands(plan: DemoPlan, exchange: str, steps: int, folder: Path) -> list[ProcessCommand] | None:
    """With an invitation from the coordinator whose state is in `folder`; None: it does not listen yet."""
    try:
        contact = CoordinatorEndpoint.find(state=folder.resolve())
    except ConfigError:
        return None
    with OperatorClient(contact) as operator:
        invitation = operator.invite(plan.workers, expires_s=INVITATION_TIMEOUT_S).text()
    train = [
        sys.executable,
        "-m",
        "gridtrain.tools.demo.demo_worker",
        "--exchange",
        exchange,
        "--steps",
        str(steps),
    ]
    train += ["--density", str(plan.density), "--model", plan.model, "--seed", str(plan.seed)]
    train += ["--measure-every", str(plan.measure_every), "--metrics", str(folder)]
    worker = (*CLI, "worker", invitation, "--upload-limit", plan.cap, "--download-limit", plan.cap)
    return [
        ProcessCommand(f"worker-{i}", (*worker, "--name", f"worker-{i}", "--", *train))
        for i in range(1, plan.workers + 1)
    ]


def supervise(
    coordinator: ProcessCommand,
    workers: Callable[[], Sequence[ProcessCommand] | None],
    folder: Path,
    on_record: Callable[[StepRecord], None],
    *,
    start_s: float = START_TIMEOUT_S,
    silence_s: float = NO_PROGRESS_TIMEOUT_S,
) -> None:
    """Run until every worker has ended with exit code 0; no process outlives this call.

    Args:
        workers: asked until it gives the workers' commands, as soon as the coordinator listens.

    Raises:
        GridtrainError: a process failed, or no step was made for too long.
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
                heard_s, patience_s = time.monotonic(), silence_s
            for process in processes:
                process.raise_if_failed()
            if ended:
                return
            if time.monotonic() - heard_s > patience_s:
                raise GridtrainError(
                    "\n".join([f"no step for {patience_s:.0f} s", *(p.tail() for p in processes[:2])]),
                    remedy=f"the complete logs are in {folder}",
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
        """The last lines of its log, with a heading."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"--- {self.command.name}, end of its log ---", *lines])

    def raise_if_failed(self) -> None:
        code = self.poll()
        if code:
            raise GridtrainError(
                f"{self.command.name} ended with exit code {code}\n{self.tail()}",
                remedy=f"the complete logs are in {self.log.parent}",
            )


@contextlib.contextmanager
def start_processes(commands: Sequence[ProcessCommand], folder: Path) -> Iterator[list[RunningProcess]]:
    """Start processes, each in its own session; end all of them and their children on leaving."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = _environment(folder)
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
                    start_new_session=True,  # Ctrl-C comes to us alone; we end the rest in order
                )
            running.append(RunningProcess(command, popen, log))
        yield running
    finally:
        _end(running)


def _environment(folder: Path) -> dict[str, str]:
    """Ours, without settings of another run; one thread per worker, the final model among the results."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    here = str(folder.resolve())  # keys too: a demo leaves nothing elsewhere
    ours = {"PYTHONUNBUFFERED": "1", f"{ENV_PREFIX}EXPORT_DIR": here, "XDG_STATE_HOME": here}
    return inherited | threads | ours


def _end(running: Sequence[RunningProcess]) -> None:
    """Ask everyone to end, workers first; ask again; kill what is left."""
    with _undisturbed():
        for grace_s in SHUTDOWN_TIMEOUTS_S:
            alive = [process for process in reversed(running) if process.poll() is None]
            for process in alive:
                _signal_group(process, signal.SIGTERM)
            until_s = time.monotonic() + grace_s
            for process in alive:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.popen.wait(max(0.0, until_s - time.monotonic()))
        for process in running:
            _signal_group(process, signal.SIGKILL)  # also children that outlived their parent
            process.popen.wait()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C or SIGTERM must not cut the clean-up short: it is bounded and soon over."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals come to the main thread alone
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _signal_group(process: RunningProcess, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.popen.pid, number)


def _empty(folder: Path) -> None:
    """Remove what an earlier demo left: only files that the demo itself makes."""
    for pattern in (
        STEPS_FILE,
        "sent-*.json",
        "*.log",
        "journal.sqlite*",
        "coordinator.*",
        "operator.key",
        "gridtrain/*/identities/*/worker-*",
        "final.safetensors",
    ):
        for path in folder.glob(pattern):
            path.unlink()


def read_curve(exchange: str, label: str, folder: Path) -> LossCurve:
    """A finished run's curve, from the files that its workers wrote.

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
            remedy=f"the logs are in {folder}",
        )
    last = records[-1]
    sent = mean_sent(folder) or {
        "data": float(last.sent.data),
        "votes": float(last.sent.votes),
        "control": float(last.sent.control),
    }
    times_s = {name: getattr(last.times, name) for name in ("compute", "select", "communicate", "wait")}
    return LossCurve(exchange, label, measurements, last.step, last.seconds, sent, times_s)
