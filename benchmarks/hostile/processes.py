"""A coordinator, workers and attackers as processes on loopback, and their memory and CPU time.

All information comes from what the processes print, from `gridtrain members` and from the kernel (/proc).

    with Group(folder, workers=3) as group:     gridtrain coordinator --state FOLDER ...
        group.add("anna", steps=100)            gridtrain worker INVITATION -- python -m hostile.honest ...
        group.attack("mallory", ["garbage"])    gridtrain worker INVITATION -- python -m hostile.mallory ...
        group.wait("the end", lambda: ...)      evaluated again after each line of output

A wait ends with an error and the ends of all outputs at the group's deadline, or when a program fails.
Leaving the `with` block ends all processes by their ids.
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

from lab.environment import environment

CLI = (sys.executable, "-m", "gridtrain.cli")
UNDEFENDED = (sys.executable, "-m", "hostile.undefended")
DEADLINE_S = 120.0
CLEANUP_S = 10.0
TAIL_LINES = 15
MIB = 2**20

_ADDRESS = re.compile(r"coordinated at (tcp://\S+:\d+)")

Line = dict[str, Any]


class GroupError(Exception):
    """A wait failed; the text has the ends of all outputs."""


# -- figures of the kernel ---------------------------------------------------------------------------


def rss_mib(pid: int, field: str = "VmRSS") -> float:
    """Return the resident memory, or with "VmHWM" its peak since `forget_peak`; 0 after the process's end."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
    return 0.0


def peak_mib(pid: int) -> float:
    return rss_mib(pid, "VmHWM")


def forget_peak(pid: int) -> None:
    """Restart the measurement of `peak_mib`."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of the process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


# -- one process -----------------------------------------------------------------------------------


class Program:
    """A process, and what it and its children have written to stdout and stderr so far.

    Attributes:
        lines: the lines that are JSON objects, parsed.
        text: the other lines.
        code: the exit code, once the process has ended and its outputs are closed; None before.
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
        """The process id of the training script, once reported, or of the program."""
        return next((line["pid"] for line in self.lines if "pid" in line), self.process.pid)

    def marked(self, mark: str) -> list[Line]:
        """Return the lines of this package's scripts with this mark."""
        return [line for line in self.lines if line.get("mark") == mark]

    def output_text(self) -> str:
        return "\n".join(self.text)

    def tail(self) -> str:
        marks = [json.dumps(line)[:300] for line in self.lines[-TAIL_LINES:]]
        heading = f"--- {self.name}: exit code {self.code}"
        return "\n".join([heading, *marks, "... and as text:", *self.text[-TAIL_LINES:]])

    def end(self) -> None:
        """End the process: an agent stops its script at the first signal and kills it at the second."""
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
                    if line is None or line.get("event") == "output":  # the script's text, plain or as JSON
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
    """A FIFO at which a script waits.  Both ends are open here, so that opening it never blocks."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._fd = os.open(path, os.O_RDWR)

    def open(self) -> None:
        os.write(self._fd, b"\n")

    def close(self) -> None:
        os.close(self._fd)


class Group:
    """A coordinator and the workers and attackers that were added, with one deadline for all waits.

    Args:
        workers: the number of workers with which training begins.
        without: the defences that the coordinator lacks.
        cap: the workers' upload and download limit; empty: none.
        descriptors: the most files and connections that the coordinator may open; 0: this process's limit.
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
        """Move the deadline."""
        self._until_s += seconds

    # -- workers and attackers -----------------------------------------------------------------------

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
        """Start a hostile worker without a rate limit; `orders` are further fields of `mallory.Orders`."""
        all_orders = {"attacks": list(attacks), "invitation": self.invitation(), **(orders or {})}
        arguments = [json.dumps(options), json.dumps(all_orders)]
        self.attackers[name] = self._worker(name, "hostile.mallory", arguments, (), "", nice)
        return self.attackers[name]

    def run(self, name: str, *argv: str, nice: int = 0) -> Program:
        """Start an attacker that is not a worker."""
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
        """Return the invitation of all workers, which the first call creates with `gridtrain invite`."""
        if not self._invitation:
            self.address()  # waits until the coordinator listens
            argv = (*CLI, "invite", "--state", str(self._state), "--uses", "100")
            done = subprocess.run(
                argv, check=True, capture_output=True, text=True, timeout=60, env=environment(self.folder)
            )
            self._invitation = done.stdout.strip()
        return self._invitation

    def address(self) -> str:
        """Return the coordinator's address, which it prints when it listens."""
        self.wait(
            "the coordinator's greeting", lambda: _ADDRESS.search(self.coordinator.output_text()) is not None
        )
        found = _ADDRESS.search(self.coordinator.output_text())
        assert found is not None
        return found[1]

    def key(self) -> bytes:
        """Return the coordinator's public key."""
        return bytes.fromhex(json.loads((self._state / "coordinator.json").read_text())["key"])

    def members(self) -> dict[str, Any]:
        """Return the output of `gridtrain members --json`."""
        argv = (*CLI, "members", "--json", "--state", str(self._state))
        done = subprocess.run(
            argv, check=True, capture_output=True, text=True, timeout=60, env=environment(self.folder)
        )
        state: dict[str, Any] = json.loads(done.stdout)
        return state

    def kick(self, name: str) -> None:
        argv = (*CLI, "kick", name, "--state", str(self._state))
        subprocess.run(argv, check=True, capture_output=True, timeout=60, env=environment(self.folder))

    def events(self, event: str) -> list[Line]:
        """Return the fields of the coordinator's log lines of one event."""
        return [line["fields"] for line in self.coordinator.lines if line.get("event") == event]

    # -- waiting ---------------------------------------------------------------------------------------

    def wait(self, what: str, true: Callable[[], bool]) -> None:
        """Wait until `true()`.  Raises `GroupError` at the deadline, or when an honest program fails."""
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
        """Wait until a time of the monotonic clock.  Raises `GroupError` when an honest program fails."""
        timer = threading.Timer(max(0.0, at_s - time.monotonic()), self._notify)
        timer.daemon = True
        timer.start()
        self.wait("the end of a measurement", lambda: time.monotonic() >= at_s)

    def wait_until_over(self, hostile: Program, attacks: int) -> None:
        """Wait until so many attacks of `hostile` are over.  Raises `GroupError` if it ends before."""
        what = f"the end of attack {attacks}"
        self.wait(what, lambda: hostile.code is not None or len(hostile.marked("over")) >= attacks)
        if len(hostile.marked("over")) < attacks:
            raise GroupError(f"{what}: {hostile.name} has ended\n{self.tails()}")

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def tails(self) -> str:
        programs = (self.coordinator, *self.workers.values(), *self.attackers.values())
        return "\n".join(program.tail() for program in programs)

    # -- the progress of honest workers ----------------------------------------------------------------

    def outcomes(self, name: str) -> list[Line]:
        """Return the attempts of this worker that have ended, in order."""
        return self.workers[name].marked("outcome")

    def steps(self, name: str) -> int:
        """Return the number of steps that this worker has applied."""
        return sum(line["committed"] for line in self.outcomes(name))

    def aborted(self, from_s: float = 0.0, to_s: float = math.inf) -> set[tuple[int, ...]]:
        """Return (generation, step, attempt) of the honest workers' attempts that did not commit."""
        ended = [line for name in self.workers for line in self.outcomes(name)]
        failed = [line for line in ended if not line["committed"] and from_s <= line["at_s"] <= to_s]
        return {tuple(line["round"]) for line in failed}

    def steps_between(self, from_s: float, to_s: float) -> int:
        """Return the number of steps that the slowest honest worker applied in an interval."""
        return min(
            sum(line["committed"] and from_s <= line["at_s"] < to_s for line in self.outcomes(name))
            for name in self.workers
        )

    def digests(self) -> dict[int, set[str]]:
        """Return the digests of the honest workers' models after each step that all of them applied."""
        of: dict[int, list[str]] = {}
        for program in self.workers.values():
            for line in program.marked("model"):
                of.setdefault(line["step"], []).append(line["model"])
        return {step: set(found) for step, found in of.items() if len(found) == len(self.workers)}
