"""A coordinator, workers and attackers as processes on loopback, and what they use.

Decides what is typed and when an output is complete.  Never looks into a process: it reads what they print,
what `gridtrain members` says, and what the kernel counts (/proc).

    with Group(folder, workers=3) as group:     gridtrain coordinator --state FOLDER ...
        group.add("anna", steps=100)            gridtrain worker INVITATION -- python -m hostile.honest ...
        group.attack("mallory", ["garbage"])    gridtrain worker INVITATION -- python -m hostile.mallory ...
        group.wait("the end", lambda: ...)      woken by each line of anybody's output

Nothing polls; every wait ends at the group's deadline, or when a program fails, with the ends of all logs.
Leaving the `with` ends what was started, by its process id.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from lab.surroundings import environment

CLI = (sys.executable, "-m", "gridtrain.cli")
UNDEFENDED = (sys.executable, "-m", "hostile.undefended")
DEADLINE_S = 120.0
CLEANUP_S = 10.0
TAIL_LINES = 15
MIB = 2**20

_ADDRESS = re.compile(r"coordinated at (tcp://\S+:\d+)")

Line = dict[str, Any]


class GroupError(Exception):
    """Something that was waited for will not come; the text has the ends of all outputs."""


# -- what the kernel counts --------------------------------------------------------------------------


def rss_mib(pid: int, field: str = "VmRSS") -> float:
    """Resident memory; "VmHWM": the most since `forget_peak`.  0: there is no such process any more."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
    return 0.0


def peak_mib(pid: int) -> float:
    return rss_mib(pid, "VmHWM")


def forget_peak(pid: int) -> None:
    """From now on `peak_mib` is that of the time to come."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_s(pid: int) -> float:
    """Processor time that all threads of the process have used; 0: it is gone."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


# -- one process -----------------------------------------------------------------------------------


class Program:
    """A started process, and what it and its children have written to stdout and stderr so far.

    Attributes:
        lines: those that are JSON objects, parsed.
        text: the others.
        code: exit code, once it has ended and nobody holds its outputs open; None before.
    """

    def __init__(self, name: str, argv: Sequence[str], changed: threading.Condition, state: Path) -> None:
        self.name = name
        self.lines: list[Line] = []
        self.text: list[str] = []
        self.code: int | None = None
        self._changed = changed
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(state),
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self._errors = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._output = threading.Thread(target=self._read_all, args=(self.process.stdout,), daemon=True)
        self._errors.start()
        self._output.start()

    @property
    def pid(self) -> int:
        """Of the training script, once it has said it; of the program itself if it runs none."""
        return next((line["pid"] for line in self.lines if "pid" in line), self.process.pid)

    def marked(self, mark: str) -> list[Line]:
        """What the scripts of this package say; each line has a mark."""
        return [line for line in self.lines if line.get("mark") == mark]

    def said(self) -> str:
        return "\n".join(self.text)

    def tail(self) -> str:
        marks = [json.dumps(line)[:300] for line in self.lines[-TAIL_LINES:]]
        heading = f"--- {self.name}: exit code {self.code}"
        return "\n".join([heading, *marks, "... and as text:", *self.text[-TAIL_LINES:]])

    def end(self) -> None:
        """Two different signals: the agent kills its script at the second one."""
        for number in (signal.SIGTERM, signal.SIGINT):
            if self.process.poll() is None:
                self.process.send_signal(number)
        self._output.join(CLEANUP_S)
        if self.process.poll() is None:
            self.process.kill()  # of an agent: its watchdog then ends the script
        self.process.wait(CLEANUP_S)
        self._output.join(CLEANUP_S)

    def _read(self, pipe: IO[str]) -> None:
        with pipe:
            for text in pipe:
                line = _json_object(text)
                with self._changed:
                    if (
                        line is None or line.get("event") == "output"
                    ):  # a line of the script, as it is or as JSON
                        self.text.append(text.rstrip() if line is None else line["fields"]["text"])
                    else:
                        self.lines.append(line)
                    self._changed.notify_all()

    def _read_all(self, pipe: IO[str]) -> None:
        self._read(pipe)
        self._errors.join()
        code = self.process.wait()
        with self._changed:
            self.code = code
            self._changed.notify_all()


def _json_object(text: str) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


# -- a group ---------------------------------------------------------------------------------------


class Gate:
    """A FIFO that a script waits at.  We hold both ends, so that opening it never blocks."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._fd = os.open(path, os.O_RDWR)

    def open(self) -> None:
        os.write(self._fd, b"\n")

    def close(self) -> None:
        os.close(self._fd)


class Group:
    """See the module's text.

    Args:
        workers: training begins with so many.
        without: defences that the coordinator lacks.
        cap: the workers' upload and download limit; empty: none.
        descriptors: so many files and connections the coordinator may have open; 0: as many as we.
    """

    def __init__(
        self,
        folder: Path,
        *,
        workers: int,
        without: Sequence[str] = (),
        cap: str = "20Mbit",
        descriptors: int = 0,
    ) -> None:
        self.folder = folder
        self.workers: dict[str, Program] = {}
        self.attackers: dict[str, Program] = {}
        self._cap = cap
        self._changed = threading.Condition()
        self._until_s = time.monotonic() + DEADLINE_S
        self._gates: list[Gate] = []
        self._invitation = ""
        self._state = folder / "hub"
        argv = ("coordinator", "--listen", "tcp://127.0.0.1:0", "--state", str(self._state))
        ends = ("--min-workers", str(workers), "--exit-when-finished")
        cli = (*UNDEFENDED, ",".join(without), "gridtrain.cli") if without else CLI
        if descriptors:
            cli = ("sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *cli)
        self.coordinator = Program("coordinator", (*cli, *argv, *ends), self._changed, folder)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for program in (*self.attackers.values(), *self.workers.values(), self.coordinator):
            program.end()
        for gate in self._gates:
            gate.close()

    def extend(self, seconds: float) -> None:
        """The deadline is that much later."""
        self._until_s += seconds

    # -- who takes part ------------------------------------------------------------------------------

    def add(self, name: str, *, without: Sequence[str] = (), **options: Any) -> Program:
        """Start an honest worker; `options` are those of `honest.Options`."""
        self.workers[name] = self._worker(name, "hostile.honest", [json.dumps(options)], without, self._cap)
        return self.workers[name]

    def attack(
        self,
        name: str,
        attacks: Sequence[str],
        *,
        nice: int = 0,
        orders: dict[str, Any] | None = None,
        **options: Any,
    ) -> Program:
        """Start a hostile worker; `orders` are further ones of `mallory.Orders`.  No cap slows it down."""
        all_orders = {"attacks": list(attacks), "invitation": self.invitation(), **(orders or {})}
        arguments = [json.dumps(options), json.dumps(all_orders)]
        self.attackers[name] = self._worker(name, "hostile.mallory", arguments, (), "", nice)
        return self.attackers[name]

    def run(self, name: str, *argv: str, nice: int = 0) -> Program:
        """Start any attacker that is no worker."""
        politely = ("nice", "-n", str(nice)) if nice else ()
        self.attackers[name] = Program(name, (*politely, *argv), self._changed, self.folder)
        return self.attackers[name]

    def gate(self) -> Gate:
        gate = Gate(self.folder / f"gate-{len(self._gates)}")
        self._gates.append(gate)
        return gate

    def _worker(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        without: Sequence[str],
        cap: str,
        nice: int = 0,
    ) -> Program:
        options = ["--name", name, "--export-dir", str(self.folder)]
        options += ["--upload-limit", cap, "--download-limit", cap] if cap else []
        agent = (*CLI, "worker", self.invitation(), *options, "--")
        politely = ("nice", "-n", str(nice)) if nice else ()
        program = (*UNDEFENDED, ",".join(without), module) if without else (sys.executable, "-m", module)
        argv = (*agent, *politely, *program, *arguments)
        return Program(name, argv, self._changed, self.folder)

    # -- the coordinator's side ------------------------------------------------------------------------

    def invitation(self) -> str:
        """For everybody; made by the operator's command when the first one needs it."""
        if not self._invitation:
            self.address()  # it listens
            argv = (*CLI, "invite", "--state", str(self._state), "--uses", "100")
            done = subprocess.run(
                argv, check=True, capture_output=True, text=True, timeout=60, env=environment(self.folder)
            )
            self._invitation = done.stdout.strip()
        return self._invitation

    def address(self) -> str:
        """Where the coordinator's greeting says that it is."""
        self.wait("the coordinator's greeting", lambda: _ADDRESS.search(self.coordinator.said()) is not None)
        found = _ADDRESS.search(self.coordinator.said())
        assert found is not None
        return found[1]

    def key(self) -> bytes:
        """The coordinator's public key."""
        return bytes.fromhex(json.loads((self._state / "coordinator.json").read_text())["key"])

    def members(self) -> dict[str, Any]:
        """What `gridtrain members --json` says."""
        argv = (*CLI, "members", "--json", "--state", str(self._state))
        done = subprocess.run(
            argv, check=True, capture_output=True, text=True, timeout=60, env=environment(self.folder)
        )
        picture: dict[str, Any] = json.loads(done.stdout)
        return picture

    def kick(self, name: str) -> None:
        argv = (*CLI, "kick", name, "--state", str(self._state))
        subprocess.run(argv, check=True, capture_output=True, timeout=60, env=environment(self.folder))

    def events(self, event: str) -> list[Line]:
        """The fields of the coordinator's log lines of one kind."""
        return [line["fields"] for line in self.coordinator.lines if line.get("event") == event]

    # -- waiting ---------------------------------------------------------------------------------------

    def wait(self, what: str, true: Callable[[], bool]) -> None:
        """Until `true()`.  Raises `GroupError` at the deadline, or when an honest program fails."""
        with self._changed:
            while not true():
                honest = (*self.workers.values(), self.coordinator)
                if failed := [program.name for program in honest if program.code not in (None, 0)]:
                    raise GroupError(f"waiting for {what}: {', '.join(failed)} failed\n{self.tails()}")
                left_s = self._until_s - time.monotonic()
                if left_s <= 0:
                    raise GroupError(f"waiting for {what}: not in time\n{self.tails()}")
                self._changed.wait(left_s)

    def wait_until(self, at_s: float) -> None:
        """Until that time of the monotonic clock.  Raises `GroupError` when an honest program fails."""
        timer = threading.Timer(max(0.0, at_s - time.monotonic()), self._notify)
        timer.daemon = True
        timer.start()
        self.wait("the end of a measurement", lambda: time.monotonic() >= at_s)

    def wait_until_over(self, hostile: Program, attacks: int) -> None:
        """Until so many attacks of `hostile` are over.  Raises `GroupError` if she ends before."""
        what = f"the end of attack {attacks}"
        self.wait(what, lambda: hostile.code is not None or len(hostile.marked("over")) >= attacks)
        if len(hostile.marked("over")) < attacks:
            raise GroupError(f"{what}: {hostile.name} has ended\n{self.tails()}")

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def finish(self) -> list[Line]:
        """Wait until the honest and the coordinator have exited; what the workers said at their end."""
        programs = (*self.workers.values(), self.coordinator)
        self.wait("the end", lambda: all(program.code is not None for program in programs))
        return [end for program in self.workers.values() for end in program.marked("end")]

    def tails(self) -> str:
        programs = (self.coordinator, *self.workers.values(), *self.attackers.values())
        return "\n".join(program.tail() for program in programs)

    # -- what the honest saw ---------------------------------------------------------------------------

    def outcomes(self, name: str) -> list[Line]:
        """The attempts of this worker that have ended, in order."""
        return self.workers[name].marked("outcome")

    def steps(self, name: str) -> int:
        """How many steps this worker has applied."""
        return sum(line["committed"] for line in self.outcomes(name))

    def aborted(self, from_s: float = 0.0, to_s: float = math.inf) -> set[tuple[int, ...]]:
        """(generation, step, attempt) of those that the honest began and that did not commit."""
        ended = [line for name in self.workers for line in self.outcomes(name)]
        failed = [line for line in ended if not line["committed"] and from_s <= line["at_s"] <= to_s]
        return {tuple(line["round"]) for line in failed}

    def steps_between(self, from_s: float, to_s: float) -> int:
        """How many steps all the honest applied in that time (those of the slowest)."""
        return min(
            sum(line["committed"] and from_s <= line["at_s"] < to_s for line in self.outcomes(name))
            for name in self.workers
        )

    def digests(self) -> dict[int, set[str]]:
        """Of the honest workers' models after each step that all of them applied."""
        of: dict[int, list[str]] = {}
        for program in self.workers.values():
            for line in program.marked("model"):
                of.setdefault(line["step"], []).append(line["model"])
        return {step: set(found) for step, found in of.items() if len(found) == len(self.workers)}
