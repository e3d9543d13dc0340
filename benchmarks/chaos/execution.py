"""One run, calm or under faults: starts the programs, injects the faults, and ends everything in order.

It knows the programs only by their output, and acts only on processes, links and disks (`infrastructure`).
A fault that would leave too few workers is left out or postponed.

    start .. first step of all workers | measured: length_s, faults | all back | stop file | all "end" | leave
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos import infrastructure
from chaos.record import Record
from chaos.schedule import OF_COORDINATOR, Fault
from lab.environment import environment

TICK_S = 0.02
START_S, BACK_S, END_S = 120.0, 90.0, 90.0
HANG_S = 60.0
RESTART_INTERVAL_S = 0.5
TAIL_LINES = 12
OWN_BUGS = ("gridtrain's I/O loop crashed", "LocalProtocolError", "Traceback (most recent call last)")


class ChaosError(Exception):
    """A guarantee was violated, or the run made no progress; the text has the ends of the logs."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a run.

    Attributes:
        length_s: duration of the measured part.
        planned: GRIDTRAIN_FAULTS of all workers (faults at chosen steps).
        waits: whether a fault that cannot be injected yet is postponed, with all later ones, or left out.
        least: number of workers that always remain without a fault.
    """

    workers: int
    length_s: float
    rate: str
    loopback: bool
    faults: Sequence[Fault] = ()
    exchange: str = "dense"
    compute_s: float = 0.02
    width: int = 256
    samples: int = 3000
    model: str = "mlp"
    planned: str = ""
    waits: bool = False

    @property
    def names(self) -> list[str]:
        return [f"worker-{number}" for number in range(self.workers)]

    @property
    def least(self) -> int:
        return max(1, (self.workers + 1) // 2)


@dataclass(slots=True)
class InjectedFault:
    """A fault that was injected, and when it began and ended."""

    kind: str
    target: str
    at_s: float
    until_s: float
    lasts_s: float


@dataclass(slots=True)
class RunResult:
    """The outcome of a run.

    Attributes:
        begin_s, end_s: begin and end of the measured part on the monotonic clock.
        lives: the intervals in which each worker's script ran with torch loaded.
        broken: the guarantees that were violated, in words.
        left_out: faults that could not be injected, and why.
    """

    record: Record
    begin_s: float = 0.0
    end_s: float = 0.0
    injected: list[InjectedFault] = field(default_factory=list)
    lives: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    coordinator_starts: int = 0
    broken: list[str] = field(default_factory=list)
    missing: str = ""

    def life_s(self) -> float:
        """Return the worker seconds of the measured part without freezes, stalls, cuts and holes."""
        return sum(self._overlap(begin, end) for spans in self.lives.values() for begin, end in spans) - sum(
            self._overlap(fault.at_s, fault.until_s)
            for fault in self.injected
            if fault.kind in ("stop", "stall", "cut", "hole")
        )

    def _overlap(self, begin_s: float, end_s: float) -> float:
        return max(0.0, min(end_s, self.end_s) - max(begin_s, self.begin_s))


class _Tail:
    """Reads the lines that are appended to a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def lines(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
            self._at += len(data)
            *whole, self._rest = (self._rest + data).split(b"\n")
            return [line for line in map(_parsed, whole) if line is not None]
        return []


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


class Execution:
    """The processes, files and active faults of one run; `execute` makes and runs it."""

    def __init__(
        self, plan: Plan, folder: Path, hosts: infrastructure.Infrastructure, log: Callable[[str], None]
    ) -> None:
        self._plan, self._folder, self._hosts, self._log = plan, folder, hosts, log
        self._stop = folder / "stop"
        self._record = Record()
        self._result = RunResult(self._record, missing=hosts.missing)
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._restart_s = 0.0
        self._tails = {name: _Tail(folder / f"{name}.out") for name in plan.names}
        self._active: list[tuple[InjectedFault, Callable[[], None]]] = []  # and how each is ended
        self._killed_s: dict[int, float] = {}  # when each script was killed, by process id

    # -- the phases of a run -------------------------------------------------------------------------

    def run(self) -> RunResult:
        try:
            self._start()
            self._until("the first step of all workers", START_S, self._all_work)
            self._measure()
            self._until("all workers to be back", BACK_S, self._all_work)
            self._finish()
        except ChaosError as error:
            self._result.broken.append(str(error))
        finally:
            for _, end_fault in self._active:
                end_fault()
            ended_s = time.monotonic()
            infrastructure.end_processes([*self._agents.values()])
            infrastructure.end_processes([self._coordinator] if self._coordinator is not None else [])
        self._read()
        self._result.lives = self._lives(ended_s)
        if not self._result.broken:
            self._result.broken = [
                *self._record.violations(self._plan.names, self._plan.samples),
                *self._bugs(),
            ]
        return self._result

    def _start(self) -> None:
        self._start_coordinator()
        invitation = self._invite()
        options = {
            "stop": str(self._stop),
            "exchange": self._plan.exchange,
            "model": self._plan.model,
            "compute_s": self._plan.compute_s,
            "width": self._plan.width,
            "samples": self._plan.samples,
        }
        for name in self._plan.names:
            own = json.dumps({**options, "stall": str(self._stall(name))})
            script = (sys.executable, "-m", "chaos.train", own)
            place = ["--name", name, "--export-dir", str(self._folder), *self._hosts.rate_options()]
            argv = [*infrastructure.CLI, "worker", invitation, *place, "--restarts", "100000", "--", *script]
            settings = {"GRIDTRAIN_CHECKPOINT_EVERY": "50", "GRIDTRAIN_FAULTS": self._plan.planned}
            env = environment(self._state(name), **settings)
            self._agents[name] = self._hosts.start(name, argv, self._folder / name, env)

    def _measure(self) -> None:
        result = self._result
        result.begin_s = time.monotonic()
        self._log(f"all {self._plan.workers} workers train; {self._plan.length_s:.0f} s are measured")
        late_s = 0.0
        for fault in self._plan.faults:
            due_s = result.begin_s + fault.at_s + late_s
            self._until_time(due_s)
            if self._plan.waits:  # how soon a killed worker returns depends on the machine
                self._until(f"a worker for {fault.kind}", BACK_S, lambda: self._can_inject(fault))  # noqa: B023
                late_s += time.monotonic() - due_s
            self._inject(fault)
        self._until_time(result.begin_s + self._plan.length_s + late_s)
        result.end_s = time.monotonic()

    def _finish(self) -> None:
        """Let all workers stop before the same step, shortly after the current one."""
        last = max(self._record.committed, default=0) + 100
        self._stop.with_suffix(".new").write_text(str(last))
        self._stop.with_suffix(".new").rename(self._stop)
        self._until("the end of all workers", END_S, lambda: len(self._record.ends) == self._plan.workers)

    def _all_work(self) -> bool:
        """Return whether all workers took part in the latest committed step, and no fault is active."""
        committed = self._record.committed
        latest = max(committed, default=None)
        if latest is None or self._active:
            return False
        return all(self._record.world_sizes[name] == self._plan.workers for name in committed[latest])

    # -- waiting -------------------------------------------------------------------------------------

    def _until(self, what: str, within_s: float, true: Callable[[], bool]) -> None:
        until_s = time.monotonic() + within_s
        while not true():
            if time.monotonic() > until_s:
                raise ChaosError(f"waited {within_s:.0f} s for {what}\n{self._ends_of_logs()}")
            self._poll()

    def _until_time(self, at_s: float) -> None:
        while time.monotonic() < at_s:
            self._poll()

    def _poll(self) -> None:
        """Read new output, end faults that are due, restart the coordinator, and detect a hang."""
        time.sleep(TICK_S)
        self._read()
        now_s = time.monotonic()
        for entry in [entry for entry in self._active if now_s >= entry[0].at_s + entry[0].lasts_s]:
            self._active.remove(entry)
            entry[1]()
            entry[0].until_s = time.monotonic()
        self._restart_coordinator(now_s)
        for name, agent in self._agents.items():
            if agent.poll() is not None:
                raise ChaosError(f"the agent of {name} ended with {agent.returncode}\n{self._ends_of_logs()}")
        latest_s = max(self._record.last_commit_s, self._result.begin_s)
        if self._result.begin_s and not self._record.ends and now_s - latest_s > HANG_S:
            raise ChaosError(f"no step was committed for {HANG_S:.0f} s\n{self._ends_of_logs()}")

    def _read(self) -> None:
        for name, tail in self._tails.items():
            for line in tail.lines():
                self._record.take(name, line)

    # -- the coordinator -----------------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        hosts = self._hosts
        argv = [*infrastructure.CLI, "coordinator", "--listen", hosts.listen, "--advertise", hosts.address]
        argv += ["--state", str(self._state("hub")), "--min-workers", str(self._plan.workers)]
        self._coordinator = hosts.start("hub", argv, self._folder / "hub", environment(self._folder))
        self._result.coordinator_starts += 1

    def _restart_coordinator(self, now_s: float) -> None:
        """Restart a coordinator that has ended, as a service manager would, unless a fault keeps it down."""
        down = any(active.kind == "coordinator" for active, _ in self._active)
        if self._coordinator is None or self._coordinator.poll() is None or down or now_s < self._restart_s:
            return
        self._restart_s = now_s + RESTART_INTERVAL_S
        self._start_coordinator()

    def _invite(self) -> str:
        state = str(self._state("hub"))
        argv = [*infrastructure.CLI, "invite", "--state", state, "--uses", "1000", "--wait", "60s"]
        process = self._hosts.start("hub", argv, self._folder / "invite", environment(self._folder))
        if process.wait(90.0):
            raise ChaosError(f"no invitation was made\n{self._ends_of_logs()}")
        return (self._folder / "invite.out").read_text().strip()

    # -- faults --------------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> None:
        target = self._choose(fault)
        if target is None:
            left = f"{fault.kind} at {fault.at_s:.0f} s: it would leave fewer than {self._plan.least} workers"
            self._result.left_out.append(left)
            return
        if self._has_fault(target):
            self._result.left_out.append(f"{fault.kind} at {fault.at_s:.0f} s: {target} has a fault already")
            return
        injected = InjectedFault(fault.kind, target, time.monotonic(), time.monotonic(), fault.lasts_s)
        end_fault = self._begin_fault(fault.kind, target)
        self._result.injected.append(injected)
        if end_fault is not None:
            self._active.append((injected, end_fault))
        lasts = f" for {fault.lasts_s:g} s" if end_fault is not None else ""
        step = max(self._record.committed, default=-1)
        self._log(
            f"{injected.at_s - self._result.begin_s:7.1f} s  step {step:6}  {fault.kind} {target}{lasts}"
        )

    def _can_inject(self, fault: Fault) -> bool:
        target = self._choose(fault)
        return target is not None and not self._has_fault(target)

    def _has_fault(self, target: str) -> bool:
        return any(active.target == target for active, _ in self._active)

    def _choose(self, fault: Fault) -> str | None:
        """Return the planned worker or the next one without a fault; None if too few would remain."""
        if fault.kind in OF_COORDINATOR:
            return "hub"
        now_s = time.monotonic()
        faulty = {active.target for active, _ in self._active}
        healthy = [
            name
            for name in self._plan.names
            if name not in faulty and now_s - self._record.latest_s.get(name, 0.0) < 3.0 and self._pid(name)
        ]
        continues = fault.kind == "disk-worker"  # a worker whose disk is full continues to train
        if not healthy or (len(healthy) - 1 < self._plan.least and not continues):
            return None
        order = self._plan.names[fault.worker :] + self._plan.names[: fault.worker]
        return next(name for name in order if name in healthy)

    def _begin_fault(self, kind: str, target: str) -> Callable[[], None] | None:
        """Inject a fault; return the function that ends it, or None if it has no end."""
        match kind:
            case "kill":
                pid = self._pid(target)
                self._killed_s[pid] = time.monotonic()
                self._signal(pid, signal.SIGKILL)
                return None
            case "stop":
                pid = self._pid(target)
                self._signal(pid, signal.SIGSTOP)
                return lambda: self._signal(pid, signal.SIGCONT)
            case "stall":
                self._stall(target).touch()
                return lambda: self._stall(target).unlink()
            case "cut":
                self._hosts.cut(target, True)
                return lambda: self._hosts.cut(target, False)
            case "hole":
                self._hosts.hole(target, True)
                return lambda: self._hosts.hole(target, False)
            case "coordinator":
                assert self._coordinator is not None
                self._signal(self._coordinator.pid, signal.SIGKILL, "coordinator")
                self._coordinator.wait()
                return lambda: None
            case "disk-coordinator" | "disk-worker":
                infrastructure.fill(self._state(target))
                return lambda: infrastructure.free_space(self._state(target))
        raise ValueError(f"there is no fault {kind!r}")

    def _signal(self, pid: int, number: int, word: str = "chaos.train") -> None:
        if infrastructure.is_running(pid, word):
            os.kill(pid, number)

    def _pid(self, name: str) -> int:
        """Return the process id of a worker's script; 0 if none runs with torch loaded."""
        lines = self._record.loaded[name]
        pid = lines[-1]["pid"] if lines else 0
        return pid if pid and infrastructure.is_running(pid, "chaos.train") else 0

    # -- after the run ----------------------------------------------------------------------------------

    def _lives(self, ended_s: float) -> dict[str, list[tuple[float, float]]]:
        """Return when each script ran: from its mark "loaded" until it was killed or the next one loaded."""
        lives: dict[str, list[tuple[float, float]]] = {}
        for name, lines in self._record.loaded.items():
            nexts = [line["at_s"] for line in lines[1:]] + [ended_s]
            lives[name] = [
                (line["at_s"], min(self._killed_s.get(line["pid"], after), after))
                for line, after in zip(lines, nexts, strict=True)
            ]
        return lives

    def _bugs(self) -> list[str]:
        """Return errors in the logs of gridtrain's programs that no fault explains."""
        found = []
        for path in sorted(self._folder.glob("*.err")):
            text = path.read_text(errors="replace")
            found += [f"{path.name} has {word!r}: {_around(text, word)}" for word in OWN_BUGS if word in text]
        return found

    def _ends_of_logs(self) -> str:
        texts = []
        for path in sorted(self._folder.glob("*.err")):
            lines = path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            texts.append("\n".join([f"--- {path.name}", *(line[:300] for line in lines)]))
        return "\n".join(texts)

    def _stall(self, name: str) -> Path:
        """Return the file while which exists the worker's training loop sleeps."""
        return self._folder / f"stall-{name}"

    def _state(self, name: str) -> Path:
        return self._folder / f"state-{name}"


def _around(text: str, word: str) -> str:
    return text[text.index(word) :][:1500]


def execute(plan: Plan, folder: Path, log: Callable[[str], None]) -> RunResult:
    """Run `plan` in `folder`, which is created, and return the outcome."""
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as resources:
        for name, size in [
            ("hub", infrastructure.COORDINATOR_DISK),
            *((name, infrastructure.WORKER_DISK) for name in plan.names),
        ]:
            resources.enter_context(infrastructure.small_disk(folder / f"state-{name}", size))
        hosts = infrastructure.prepare(plan.rate, plan.names, loopback=plan.loopback)
        resources.callback(hosts.close)
        return Execution(plan, folder, hosts, log).run()
