"""One run, calm or under faults: starts the programs, carries out the schedule, ends everything in order.

Decides when a planned fault cannot be done (too few workers would be left) and when the run hangs.
Never looks into a program: it reads what they write, and does with processes, cables and disks what `ground`
can.

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

from chaos import ground as g
from chaos.record import Record
from chaos.schedule import OF_COORDINATOR, Fault
from lab.surroundings import environment

TICK_S = 0.02
START_S, BACK_S, END_S = 120.0, 90.0, 90.0
HANG_S = 60.0
REVIVE_S = 0.5
TAIL_LINES = 12
OWN_BUGS = ("gridtrain's I/O loop crashed", "LocalProtocolError", "Traceback (most recent call last)")


class ChaosError(Exception):
    """A promise was broken; the text has the ends of the logs."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is like.

    Attributes:
        length_s: of the measured part.
        planned: GRIDTRAIN_FAULTS of all workers.
        waits: a fault that cannot be done yet comes later, and with it all that follows; else it is left out.
        least: so many workers stay untouched; a fault that would leave fewer cannot be done.
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
class Struck:
    """A fault that was done: when it began and ended."""

    kind: str
    target: str
    at_s: float
    until_s: float
    lasts_s: float


@dataclass(slots=True)
class Played:
    """What became of a run.

    Attributes:
        begin_s, end_s: the measured part, on the machine's monotonic clock.
        lives: of each worker, from when to when its script ran with torch loaded.
        left_out: faults that could not be done, and why.
    """

    record: Record
    begin_s: float = 0.0
    end_s: float = 0.0
    struck: list[Struck] = field(default_factory=list)
    lives: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    coordinator_starts: int = 0
    broken: list[str] = field(default_factory=list)
    missing: str = ""

    def life_s(self) -> float:
        """Seconds of the measured part in which workers could work: not frozen or stalled, not cut off."""
        return sum(self._overlap(begin, end) for spans in self.lives.values() for begin, end in spans) - sum(
            self._overlap(fault.at_s, fault.until_s)
            for fault in self.struck
            if fault.kind in ("stop", "stall", "cut", "hole")
        )

    def _overlap(self, begin_s: float, end_s: float) -> float:
        return max(0.0, min(end_s, self.end_s) - max(begin_s, self.begin_s))


class _Tail:
    """Reads a file that somebody adds lines to."""

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


class Play:
    """See the module's text; `play` runs it."""

    def __init__(self, plan: Plan, folder: Path, ground: g.Ground, tell: Callable[[str], None]) -> None:
        self._plan, self._folder, self._ground, self._tell = plan, folder, ground, tell
        self._stop = folder / "stop"
        self._record = Record()
        self._played = Played(self._record, missing=ground.missing)
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._revive_s = 0.0
        self._tails = {name: _Tail(folder / f"{name}.out") for name in plan.names}
        self._open: list[tuple[Struck, Callable[[], None]]] = []  # and how it is ended
        self._dead: dict[int, float] = {}  # scripts that we killed, and when

    # -- the order of things -------------------------------------------------------------------------

    def run(self) -> Played:
        try:
            self._start()
            self._until("the first step of all workers", START_S, self._all_work)
            self._measure()
            self._until("all workers to be back", BACK_S, self._all_work)
            self._finish()
        except ChaosError as error:
            self._played.broken.append(str(error))
        finally:
            for _, heal in self._open:
                heal()
            ended_s = time.monotonic()
            g.end([*self._agents.values()])
            g.end([self._coordinator] if self._coordinator is not None else [])
        self._read()
        self._played.lives = self._lives(ended_s)
        if not self._played.broken:
            self._played.broken = [*self._record.broken(self._plan.names, self._plan.samples), *self._bugs()]
        return self._played

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
            place = ["--name", name, "--export-dir", str(self._folder), *self._ground.cap()]
            argv = [*g.CLI, "worker", invitation, *place, "--restarts", "100000", "--", *script]
            settings = {"GRIDTRAIN_CHECKPOINT_EVERY": "50", "GRIDTRAIN_FAULTS": self._plan.planned}
            env = environment(self._state(name), **settings)
            self._agents[name] = self._ground.run(name, argv, self._folder / name, env)

    def _measure(self) -> None:
        played = self._played
        played.begin_s = time.monotonic()
        self._tell(f"all {self._plan.workers} workers train; {self._plan.length_s:.0f} s are measured")
        late_s = 0.0
        for fault in self._plan.faults:
            due_s = played.begin_s + fault.at_s + late_s
            self._until_time(due_s)
            if self._plan.waits:  # how soon who was killed is back depends on the machine
                self._until(f"a worker for {fault.kind}", BACK_S, lambda: self._can(fault))  # noqa: B023
                late_s += time.monotonic() - due_s
            self._strike(fault)
        self._until_time(played.begin_s + self._plan.length_s + late_s)
        played.end_s = time.monotonic()

    def _finish(self) -> None:
        """Everybody stops before the same step, a moment from now."""
        last = max(self._record.committed, default=0) + 100
        self._stop.with_suffix(".new").write_text(str(last))
        self._stop.with_suffix(".new").rename(self._stop)
        self._until("the end of all workers", END_S, lambda: len(self._record.ends) == self._plan.workers)

    def _all_work(self) -> bool:
        """The latest step was committed by all, and no fault lasts."""
        committed = self._record.committed
        latest = max(committed, default=None)
        if latest is None or self._open:
            return False
        return all(self._record.world_sizes[name] == self._plan.workers for name in committed[latest])

    # -- waiting -------------------------------------------------------------------------------------

    def _until(self, what: str, within_s: float, true: Callable[[], bool]) -> None:
        until_s = time.monotonic() + within_s
        while not true():
            if time.monotonic() > until_s:
                raise ChaosError(f"waited {within_s:.0f} s for {what}\n{self._ends_of_logs()}")
            self._turn()

    def _until_time(self, at_s: float) -> None:
        while time.monotonic() < at_s:
            self._turn()

    def _turn(self) -> None:
        """Read what was written, end faults that are over, start the coordinator again, notice a hang."""
        time.sleep(TICK_S)
        self._read()
        now_s = time.monotonic()
        for entry in [entry for entry in self._open if now_s >= entry[0].at_s + entry[0].lasts_s]:
            self._open.remove(entry)
            entry[1]()
            entry[0].until_s = time.monotonic()
        self._mind_coordinator(now_s)
        for name, agent in self._agents.items():
            if agent.poll() is not None:
                raise ChaosError(f"the agent of {name} ended with {agent.returncode}\n{self._ends_of_logs()}")
        latest_s = max(self._record.last_commit_s, self._played.begin_s)
        if self._played.begin_s and not self._record.ends and now_s - latest_s > HANG_S:
            raise ChaosError(f"no step was committed for {HANG_S:.0f} s\n{self._ends_of_logs()}")

    def _read(self) -> None:
        for name, tail in self._tails.items():
            for line in tail.lines():
                self._record.take(name, line)

    # -- the coordinator -----------------------------------------------------------------------------

    def _start_coordinator(self) -> None:
        ground = self._ground
        argv = [*g.CLI, "coordinator", "--listen", ground.listen, "--advertise", ground.address]
        argv += ["--state", str(self._state("hub")), "--min-workers", str(self._plan.workers)]
        self._coordinator = ground.run("hub", argv, self._folder / "hub", environment(self._folder))
        self._played.coordinator_starts += 1

    def _mind_coordinator(self, now_s: float) -> None:
        """As a service manager would: one that has ended is started again, unless it is to be down."""
        down = any(struck.kind == "coordinator" for struck, _ in self._open)
        if self._coordinator is None or self._coordinator.poll() is None or down or now_s < self._revive_s:
            return
        self._revive_s = now_s + REVIVE_S
        self._start_coordinator()

    def _invite(self) -> str:
        state = str(self._state("hub"))
        argv = [*g.CLI, "invite", "--state", state, "--uses", "1000", "--wait", "60s"]
        process = self._ground.run("hub", argv, self._folder / "invite", environment(self._folder))
        if process.wait(90.0):
            raise ChaosError(f"there is no invitation\n{self._ends_of_logs()}")
        return (self._folder / "invite.out").read_text().strip()

    # -- faults --------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        target = self._choose(fault)
        if target is None:
            left = f"{fault.kind} at {fault.at_s:.0f} s: it would leave fewer than {self._plan.least} workers"
            self._played.left_out.append(left)
            return
        if self._is_struck(target):
            self._played.left_out.append(f"{fault.kind} at {fault.at_s:.0f} s: {target} has a fault already")
            return
        struck = Struck(fault.kind, target, time.monotonic(), time.monotonic(), fault.lasts_s)
        heal = self._do(fault.kind, target)
        self._played.struck.append(struck)
        if heal is not None:
            self._open.append((struck, heal))
        lasts = f" for {fault.lasts_s:g} s" if heal is not None else ""
        step = max(self._record.committed, default=-1)
        self._tell(
            f"{struck.at_s - self._played.begin_s:7.1f} s  step {step:6}  {fault.kind} {target}{lasts}"
        )

    def _can(self, fault: Fault) -> bool:
        target = self._choose(fault)
        return target is not None and not self._is_struck(target)

    def _is_struck(self, target: str) -> bool:
        return any(struck.target == target for struck, _ in self._open)

    def _choose(self, fault: Fault) -> str | None:
        """The coordinator, the planned worker, or the next one that is well; None: too few would be left."""
        if fault.kind in OF_COORDINATOR:
            return "hub"
        now_s = time.monotonic()
        ill = {struck.target for struck, _ in self._open}
        well = [
            name
            for name in self._plan.names
            if name not in ill and now_s - self._record.latest_s.get(name, 0.0) < 3.0 and self._pid(name)
        ]
        spared = fault.kind == "disk-worker"  # it works on
        if not well or (len(well) - 1 < self._plan.least and not spared):
            return None
        order = self._plan.names[fault.worker :] + self._plan.names[: fault.worker]
        return next(name for name in order if name in well)

    def _do(self, kind: str, target: str) -> Callable[[], None] | None:
        """Strike; how the fault is ended, None: it needs no end."""
        match kind:
            case "kill":
                pid = self._pid(target)
                self._dead[pid] = time.monotonic()
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
                self._ground.cut(target, True)
                return lambda: self._ground.cut(target, False)
            case "hole":
                self._ground.hole(target, True)
                return lambda: self._ground.hole(target, False)
            case "coordinator":
                assert self._coordinator is not None
                self._signal(self._coordinator.pid, signal.SIGKILL, "coordinator")
                self._coordinator.wait()
                return lambda: None
            case "disk-coordinator" | "disk-worker":
                g.fill(self._state(target))
                return lambda: g.make_room(self._state(target))
        raise ValueError(f"there is no fault {kind!r}")

    def _signal(self, pid: int, number: int, word: str = "chaos.train") -> None:
        if g.is_ours(pid, word):
            os.kill(pid, number)

    def _pid(self, name: str) -> int:
        """Of its script; 0: none that has loaded torch and lives."""
        lines = self._record.loaded[name]
        pid = lines[-1]["pid"] if lines else 0
        return pid if pid and g.is_ours(pid, "chaos.train") else 0

    # -- afterwards ----------------------------------------------------------------------------------

    def _lives(self, ended_s: float) -> dict[str, list[tuple[float, float]]]:
        """From "loaded" until it was killed, or the next one was loaded."""
        lives: dict[str, list[tuple[float, float]]] = {}
        for name, lines in self._record.loaded.items():
            nexts = [line["at_s"] for line in lines[1:]] + [ended_s]
            lives[name] = [
                (line["at_s"], min(self._dead.get(line["pid"], after), after))
                for line, after in zip(lines, nexts, strict=True)
            ]
        return lives

    def _bugs(self) -> list[str]:
        """Our own bugs crash loudly: what a program of ours wrote that no fault explains."""
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
        """The file for which its training loop sleeps."""
        return self._folder / f"stall-{name}"

    def _state(self, name: str) -> Path:
        return self._folder / f"state-{name}"


def _around(text: str, word: str) -> str:
    return text[text.index(word) :][:1500]


def play(plan: Plan, folder: Path, tell: Callable[[str], None]) -> Played:
    """One run in `folder`, which is made."""
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as held:
        for name, size in [("hub", g.HUB_DISK), *((name, g.WORKER_DISK) for name in plan.names)]:
            held.enter_context(g.small_disk(folder / f"state-{name}", size))
        ground = g.prepare(plan.rate, plan.names, loopback=plan.loopback)
        held.callback(ground.close)
        return Play(plan, folder, ground, tell).run()
