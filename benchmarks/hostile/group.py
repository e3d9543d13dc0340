"""A coordinator, honest workers and attackers as processes on loopback.

All information comes from what the processes print, from `gridtrain members` and from the kernel.

    with HostileGroup(folder, workers=3) as group:
        group.add_honest("anna")                gridtrain worker INVITATION -- python -m observed ...
        group.attack("mallory", ["garbage"])    gridtrain worker INVITATION -- python -m hostile.mallory ...
        group.wait_for("the end", lambda: ...)
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gridtrain.tools.bench.bench_group import LocalHost, start_process
from gridtrain.tools.child_processes import CLI_COMMAND
from lab.group import Group, Line, Program
from lab.ns import LabError
from procfs import forget_peak, memory_bytes

UNDEFENDED = (sys.executable, "-m", "hostile.undefended")
DEADLINE_S = 120.0


def memory_mib(pid: int, field: str = "VmRSS") -> float:
    return memory_bytes(field, pid) / 2**20


class Peaks:
    """The memory of processes from now on: in use at the beginning, and the largest since."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.before_mib = {name: memory_mib(pid) for name, pid in pids.items()}
        for pid in pids.values():
            forget_peak(pid)

    def growth_mib(self) -> dict[str, float]:
        peaks = {name: memory_mib(pid, "VmHWM") for name, pid in self._pids.items()}
        return {name: round(peak - self.before_mib[name], 1) for name, peak in peaks.items()}


class OneSession(LocalHost):
    """Starts all processes in this session: the kernel divides the processors among sessions first, so that
    an attacker with a session of its own would take a share that no `nice` value reduces."""

    def run(
        self, who: str, argv: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return start_process(argv, log, env, own_session=False)


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


class HostileGroup(Group):
    """A group with attackers, with one deadline for all waits.

    Args:
        workers: the number of workers with which training begins.
        without: functions that always return False in the coordinator, which then has one defence fewer.
        descriptors: the most files and connections that the coordinator may open; 0: this process's limit.
    """

    def __init__(
        self, folder: Path, *, workers: int, without: Sequence[str] = (), descriptors: int = 0
    ) -> None:
        cli: Sequence[str] = (*UNDEFENDED, ",".join(without), "gridtrain") if without else CLI_COMMAND
        if descriptors:
            cli = ("sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *cli)
        self._until_s = time.monotonic() + DEADLINE_S
        self._gates: list[Gate] = []
        super().__init__(OneSession("20Mbit"), folder, workers=workers, cli=cli)

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        for gate in self._gates:
            gate.close()

    def extend(self, seconds: float) -> None:
        """Move the deadline."""
        self._until_s += seconds

    # -- workers and attackers -----------------------------------------------------------------------

    def add_honest(self, name: str, **options: Any) -> Program:
        """Start an honest worker; `options` are those of `observed.Options`."""
        return self.add(name, (sys.executable, "-m", "observed", json.dumps(options)))

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
        script = ("nice", "-n", str(nice), sys.executable, "-m", "hostile.mallory")
        arguments = (json.dumps(options), json.dumps(all_orders))
        self.others[name] = self.add(name, (*script, *arguments), is_limited=False)
        return self.workers.pop(name)

    def run(self, name: str, *argv: str, nice: int = 0) -> Program:
        """Start an attacker that is not a worker."""
        self.others[name] = self.start(name, ["nice", "-n", str(nice), *argv])
        return self.others[name]

    def connect(self, name: str, kind: str, count: int, server: str = "") -> Program:
        """Start strangers; return when all of them have connected to a port, by default the coordinator's."""
        key = [self.key().hex()] if kind == "handshakes" else []
        argv = [sys.executable, "-m", "hostile.strangers", kind, str(count), server or self.server(), *key]
        attacker = self.run(name, *argv)
        self.wait_for(f"{count} {kind}", lambda: bool(attacker.marked("ready")))
        return attacker

    def gate(self) -> Gate:
        self._gates.append(Gate(self.folder / f"gate-{len(self._gates)}"))
        return self._gates[-1]

    # -- the coordinator's side ------------------------------------------------------------------------

    def server(self) -> str:
        """Return the coordinator's HOST:PORT, where it listens now."""
        self.invitation()
        return self.address.removeprefix("tcp://")

    def key(self) -> bytes:
        """Return the coordinator's public key."""
        self.invitation()
        return bytes.fromhex(json.loads((self.state("hub") / "coordinator.json").read_text())["key"])

    def members(self) -> dict[str, Any]:
        """Return the output of `gridtrain members --json`."""
        state: dict[str, Any] = json.loads(self.command("members", "--json"))
        return state

    def events(self, event: str) -> list[Line]:
        """Return the fields of the coordinator's log lines of one event."""
        return [line["fields"] for line in self.coordinator.lines if line.get("event") == event]

    # -- waiting ---------------------------------------------------------------------------------------

    def wait_for(self, what: str, true: Callable[[], bool]) -> None:
        """Wait until `true()`.  Raises `LabError` at the deadline, or when an honest program fails."""
        self.wait(what, true, max(0.0, self._until_s - time.monotonic()))

    def wait_until(self, at_s: float) -> None:
        """Wait until a time of the monotonic clock.  Raises `LabError` when an honest program fails."""
        self.wait_for("the end of a measurement", lambda: time.monotonic() >= at_s)

    def wait_until_over(self, hostile: Program, attacks: int) -> None:
        """Wait until so many attacks of `hostile` are over.  Raises `LabError` if it ends before."""
        what = f"the end of attack {attacks}"
        self.wait_for(what, lambda: hostile.code is not None or len(hostile.marked("over")) >= attacks)
        if len(hostile.marked("over")) < attacks:
            raise LabError(f"{what}: {hostile.name} has ended\n{self.tails()}")

    def warm(self, steps: int, mallory: Program) -> dict[str, int]:
        """Wait until all train and the attacker is ready; return the process ids of the others."""
        self.wait_for("the first steps", lambda: all(self.steps(name) >= steps for name in self.workers))
        self.wait_for("mallory", lambda: bool(mallory.marked("loaded")))
        return {"coordinator": self.coordinator.pid, **{n: each.pid for n, each in self.workers.items()}}

    # -- the progress of honest workers ----------------------------------------------------------------

    def outcomes(self, name: str) -> list[Line]:
        """Return the attempts of this worker that have ended, in order."""
        return self.workers[name].marked("outcome")

    def steps(self, name: str) -> int:
        """Return the number of steps that this worker has applied."""
        return sum(bool(line["committed"]) for line in self.outcomes(name))

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
        for worker in self.workers.values():
            for line in worker.marked("state"):
                of.setdefault(line["step"], []).append(line["digest"])
        return {step: set(found) for step, found in of.items() if len(found) == len(self.workers)}
