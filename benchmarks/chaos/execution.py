"""One run, calm or under faults: starts the programs, injects the faults, and ends everything in order.

It knows the programs only by their output (`observed`), and acts only on processes, links and disks.  A fault
that would leave too few workers is left out or postponed.

    start .. first step of all workers | measured: length_s, faults | all back | stop file | all "end" | leave

    namespaces   a host for the coordinator and for each worker, with shaped links; needs root
    loopback     processes on one host; the workers limit their own rates; neither cut nor hole
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.record import Record
from chaos.schedule import DISK, LASTS_S, NETWORK, OF_COORDINATOR, Fault
from gridtrain.tools.bench.bench_group import LocalHost
from lab import ns
from lab.group import Group, LabHosts, Program
from lab.net import Net, why_not
from lab.ns import LabError

RATE, COMPUTE_S, WIDTH, SAMPLES = "100Mbit", 0.02, 256, 3000
START_S, BACK_S, END_S = 120.0, 90.0, 90.0
HANG_S = 60.0
RESTART_INTERVAL_S = 0.5
MOUNT = ("mount", "-t", "tmpfs", "-o")
DISK_SIZE = "24m"
SCRIPT = "observed"
OWN_BUGS = ("gridtrain's I/O loop crashed", "LocalProtocolError", "Traceback (most recent call last)")


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
    loopback: bool
    faults: Sequence[Fault] = ()
    exchange: str = "dense"
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

    def life_s(self) -> float:
        """Return the worker seconds of the measured part without freezes, stalls, cuts and holes."""
        return sum(self._overlap(begin, end) for spans in self.lives.values() for begin, end in spans) - sum(
            self._overlap(fault.at_s, fault.until_s)
            for fault in self.injected
            if fault.kind in ("stop", "stall", "cut", "hole")
        )

    def _overlap(self, begin_s: float, end_s: float) -> float:
        return max(0.0, min(end_s, self.end_s) - max(begin_s, self.begin_s))


class Execution(Group):
    """The processes, files and active faults of one run; `execute` makes and runs it."""

    def __init__(self, plan: Plan, folder: Path, hosts: Any, log: Callable[[str], None]) -> None:
        self._plan, self._log, self._stop = plan, log, folder / "stop"
        self._record = Record()
        self._result = RunResult(self._record)
        self._restart_s = 0.0
        self._active: list[tuple[InjectedFault, Callable[[], None]]] = []  # and how each is ended
        self._killed_s: dict[int, float] = {}  # when each script was killed, by process id
        super().__init__(hosts, folder, workers=plan.workers, options=())

    # -- the phases of a run -------------------------------------------------------------------------

    def run(self) -> RunResult:
        result = self._result
        try:
            self._start()
            self.wait("the first step of all workers", self._all_work, START_S)
            self._measure()
            self.wait("all workers to be back", self._all_work, BACK_S)
            self._finish()
        except LabError as error:
            result.broken.append(str(error))
        finally:
            for _, end_fault in self._active:
                end_fault()
            ended_s = time.monotonic()
            self.__exit__()
        self._take_lines()
        result.lives, result.coordinator_starts = self._lives(ended_s), self.coordinator_starts
        if not result.broken:
            result.broken = [*self._record.violations(self._plan.names, SAMPLES), *self._bugs()]
        return result

    def _start(self) -> None:
        plan = self._plan
        options = {"exchange": plan.exchange, "wait": "auto", "stop": str(self._stop)}
        options |= {"compute_s": COMPUTE_S, "width": WIDTH, "samples": SAMPLES}
        settings = {"GRIDTRAIN_CHECKPOINT_EVERY": "50", "GRIDTRAIN_FAULTS": plan.planned}
        for name in plan.names:
            own = json.dumps({**options, "stall": str(self._stall(name))})
            self.add(name, (sys.executable, "-m", SCRIPT, own), ["--restarts", "100000"], settings)

    def _measure(self) -> None:
        result = self._result
        result.begin_s = time.monotonic()
        self._log(f"all {self._plan.workers} workers train; {self._plan.length_s:.0f} s are measured")
        late_s = 0.0
        for fault in self._plan.faults:
            due_s = result.begin_s + fault.at_s + late_s
            self._until_time(due_s)
            if self._plan.waits:  # how soon a killed worker returns depends on the machine
                self.wait(f"a worker for {fault.kind}", lambda: self._can_inject(fault), BACK_S)  # noqa: B023
                late_s += time.monotonic() - due_s
            self._inject(fault)
        self._until_time(result.begin_s + self._plan.length_s + late_s)
        result.end_s = time.monotonic()

    def _finish(self) -> None:
        """Let all workers stop before the same step, shortly after the current one."""
        last = max(self._record.committed, default=0) + 100
        self._stop.with_suffix(".new").write_text(str(last))
        self._stop.with_suffix(".new").rename(self._stop)
        self.wait("the end of all workers", lambda: len(self._record.ends) == self._plan.workers, END_S)

    def _all_work(self) -> bool:
        """Return whether all workers took part in the latest committed step, and no fault is active."""
        committed = self._record.committed
        latest = max(committed, default=None)
        if latest is None or self._active:
            return False
        return all(self._record.world_sizes[name] == self._plan.workers for name in committed[latest])

    def _until_time(self, at_s: float) -> None:
        self.wait("a time", lambda: time.monotonic() >= at_s, 2 * max(1.0, at_s - time.monotonic()))

    def poll(self) -> None:
        """Read new output, end faults that are due, restart the coordinator, and detect a hang."""
        super().poll()
        self._take_lines()
        now_s = time.monotonic()
        for entry in [entry for entry in self._active if now_s >= entry[0].at_s + entry[0].lasts_s]:
            self._active.remove(entry)
            entry[1]()
            entry[0].until_s = time.monotonic()
        down = any(active.kind == "coordinator" for active, _ in self._active)
        if self.coordinator.code is not None and not down and now_s >= self._restart_s:
            self._restart_s = now_s + RESTART_INTERVAL_S  # as a service manager would
            self.start_coordinator()
        latest_s = max(self._record.last_commit_s, self._result.begin_s)
        if self._result.begin_s and not self._record.ends and now_s - latest_s > HANG_S:
            raise LabError(f"no step was committed for {HANG_S:.0f} s\n{self.tails()}")

    def failed(self) -> list[Program]:
        """Return agents that have ended; a coordinator is started again."""
        return [agent for agent in self.workers.values() if agent.code is not None]

    def _take_lines(self) -> None:
        for name, agent in self.workers.items():
            lines, agent.lines = agent.lines, []
            for line in lines:
                self._record.take(name, line)

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
            case "cut" | "hole":
                assert isinstance(self.hosts, LabHosts)
                host = self.hosts[target]
                act = host.cut if kind == "cut" else host.drop_packets
                act(True)
                return lambda: act(False)
            case "links":
                assert isinstance(self.hosts, LabHosts)
                host, others = (
                    self.hosts[target],
                    [self.hosts[name] for name in self._plan.names if name != target],
                )
                host.drop_packets(True, others)
                return lambda: host.drop_packets(False, others)
            case "coordinator":
                self.coordinator.process.kill()
                self.coordinator.process.wait()
                return lambda: None
            case "disk-coordinator" | "disk-worker":
                fill(self.state(target))
                return lambda: free_space(self.state(target))
        raise ValueError(f"there is no fault {kind!r}")

    def _signal(self, pid: int, number: int) -> None:
        if is_running(pid, SCRIPT):
            os.kill(pid, number)

    def _pid(self, name: str) -> int:
        """Return the process id of a worker's script; 0 if none runs with torch loaded."""
        lines = self._record.loaded[name]
        pid: int = lines[-1]["pid"] if lines else 0
        return pid if pid and is_running(pid, SCRIPT) else 0

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
        for path in sorted(self.folder.glob("*.err")):
            text = path.read_text(errors="replace")
            bugs = (word for word in OWN_BUGS if word in text)
            found += [f"{path.name} has {word!r}: {text[text.index(word) :][:1500]}" for word in bugs]
        return found

    def _stall(self, name: str) -> Path:
        """Return the file while which exists the worker's training loop sleeps."""
        return self.folder / f"stall-{name}"


def execute(plan: Plan, folder: Path, log: Callable[[str], None]) -> RunResult:
    """Run `plan` in `folder`, which is created, and return the outcome."""
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as resources:
        for name in ("hub", *plan.names):
            resources.enter_context(small_disk(folder / f"state-{name}"))
        hosts: Any = LocalHost(RATE)
        if not plan.loopback:
            net = resources.enter_context(Net())
            hosts = LabHosts(net, plan.names, rate=RATE, hub_rate=RATE)
        return Execution(plan, folder, hosts, log).run()


def possible_kinds(loopback: bool) -> frozenset[str]:
    """Return the kinds of faults that can be injected on this machine."""
    impossible = (NETWORK if loopback or why_not() else frozenset()) | (frozenset() if may_mount() else DISK)
    return frozenset(LASTS_S) - impossible


# -- disks and processes ---------------------------------------------------------------------------


@functools.cache
def may_mount() -> bool:
    """Return whether this process may mount, by trying: the root user of a container often may not."""
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run([*MOUNT, "size=1m", "chaos", folder], capture_output=True)
        if tried.returncode == 0:
            subprocess.run(["umount", "--lazy", folder], check=True)
        return tried.returncode == 0


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small file system of its own on `folder`, if that is permitted."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not may_mount():
        yield
        return
    subprocess.run([*MOUNT, f"size={DISK_SIZE},mode=0700", "chaos", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Write files until the file system of `folder` is full."""
    for name, nbytes in (("filler", 65536), ("filler-last", 1)):
        with contextlib.suppress(OSError), (folder / name).open("wb", buffering=0) as file:
            while True:
                file.write(bytes(nbytes))


def free_space(folder: Path) -> None:
    """Remove the files of `fill`."""
    for name in ("filler", "filler-last"):
        (folder / name).unlink(missing_ok=True)


def is_running(pid: int, word: str) -> bool:
    """Return whether this process runs and has the word on its command line, because ids are reused."""
    with contextlib.suppress(OSError):
        return word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and ns.alive(pid)
    return False
