"""Groups of real processes on loopback: a coordinator, worker agents, and the training scripts in them.

    with new_group(min_workers=2) as group:       gridtrain coordinator --listen tcp://127.0.0.1:0 ...
                                                  gridtrain invite --uses 100
        group.add("anna", exchange="dense", ...)      gridtrain worker INVITATION -- python train.py ...
        group.add("bert", ...)
        group.wait("a step", lambda: ...)             until a line of output makes it true
        ended = group.finish()                        until all have exited

Nothing here sleeps: the next line, or the end of an output, wakes a waiting test (`look_every_s` is for
conditions that no output announces).  Every wait ends at the group's deadline, or when a program fails, with
the ends of all logs.  Leaving the `with` ends the started processes, by their ids.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

CLI = (sys.executable, "-m", "gridtrain")
SCRIPT = Path(__file__).parent / "scripts" / "train.py"
DEADLINE_S = 150.0
CLEANUP_S = 10.0
TAIL_LINES = 15

_ADDRESS = re.compile(r"coordinated at (tcp://\S+:\d+)")

Line = dict[str, Any]


def environment() -> dict[str, str]:
    """This process's without settings of another run; one thread for each worker, as they share the cores."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GRIDTRAIN_")}
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Program:
    """A started process, and what it and its children have written to stdout and stderr so far.

    Attributes:
        lines: those that are JSON objects, parsed.
        text: the others.
        code: exit code, once it has ended and no process holds its outputs open; None before.
    """

    def __init__(
        self, name: str, argv: tuple[str, ...], changed: threading.Condition, *, state: Path, **variables: str
    ) -> None:
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
            env=environment() | {"XDG_STATE_HOME": str(state)} | variables,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self._errors = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._output = threading.Thread(target=self._read_all, args=(self.process.stdout,), daemon=True)
        self._errors.start()
        self._output.start()

    def marked(self, mark: str, exchange: str = "") -> list[Line]:
        """The training script's lines of one kind, of all its runs or of one."""
        lines = [line for line in self.lines if line.get("mark") == mark]
        return [line for line in lines if exchange in ("", line.get("exchange"))]

    def said(self) -> str:
        return "\n".join(self.text)

    def tail(self) -> str:
        marks = [json.dumps(line)[:300] for line in self.lines[-TAIL_LINES:]]
        heading = f"--- {self.name}: exit code {self.code}"
        return "\n".join([heading, *marks, "... and as text:", *self.text[-TAIL_LINES:]])

    def end(self) -> None:
        """Send two different signals: the agent kills its script at the second one."""
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


class Gate:
    """A FIFO that a script waits at.  The test holds both ends, so that opening it never blocks."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._fd = os.open(path, os.O_RDWR)

    def open(self) -> None:
        os.write(self._fd, b"\n")

    def close(self) -> None:
        os.close(self._fd)


class Group:
    """A coordinator and its workers as processes, as the module shows.

    Attributes:
        codes: exit codes that workers may end with.
        flags: further flags of the coordinator.
        state: the coordinator's state folder, if it is not the group's.
        more_s: extends the deadline, for tests that wait long by design.
    """

    def __init__(
        self,
        folder: Path,
        *,
        min_workers: int,
        codes: frozenset[int] = frozenset({0}),
        flags: tuple[str, ...] = (),
        state: Path | None = None,
        more_s: float = 0.0,
    ) -> None:
        self.folder = folder
        self.workers: dict[str, Program] = {}
        self._codes = codes
        self._changed = threading.Condition()
        self._until_s = time.monotonic() + DEADLINE_S + more_s
        self._gates: list[Gate] = []
        self._invitation = ""
        self._ends = ("--min-workers", str(min_workers), "--exit-when-finished")
        self._away = False  # whether the test has killed the coordinator
        self.former: list[Program] = []  # coordinators that were killed
        place = ("--listen", "tcp://127.0.0.1:0", "--state", str(state or folder), *flags)
        self.state = state or folder
        self.coordinator = Program(
            "coordinator", (*CLI, "coordinator", *place, *self._ends), self._changed, state=folder
        )

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for program in (*self.workers.values(), self.coordinator, *self.former):
            program.end()
        for gate in self._gates:
            gate.close()

    def kill_coordinator(self) -> None:
        """Send SIGKILL, or wait for the coordinator to kill itself; its address stays free."""
        self.address()
        self._away = True
        self.coordinator.process.kill()
        self.await_death()

    def await_death(self) -> None:
        self._away = True
        self.wait("the coordinator's death", lambda: self.coordinator.code is not None)

    def start_coordinator(
        self, *flags: str, program: tuple[str, ...] = CLI, state: Path | None = None
    ) -> None:
        """Start a coordinator at the address of the previous one."""
        address = self.address()
        self.former.append(self.coordinator)
        self.state = state or self.state
        place = ("--listen", address, "--state", str(self.state), *self._ends, *flags)
        self.coordinator = Program(
            "coordinator", (*program, "coordinator", *place), self._changed, state=self.folder
        )
        self._away = False

    def add(
        self,
        name: str,
        *more_runs: dict[str, Any],
        shows: str = "",
        flags: tuple[str, ...] = (),
        script: Path = SCRIPT,
        hash_seed: str = "",
        **options: Any,
    ) -> Program:
        """Start a worker; `options` are those of `scripts/train.py`, `more_runs` those of further runs.

        `shows`: an invitation other than the group's; `flags`: further flags of `gridtrain worker`.
        `hash_seed`: one that differs from that of all forked programs, so that this worker is executed.
        """
        variables = {"PYTHONHASHSEED": hash_seed} if hash_seed else {}
        runs = [json.dumps(run) for run in (options, *more_runs)]
        agent = (*CLI, "worker", shows or self.invitation(), "--name", name, "--export-dir", str(self.folder))
        argv = (*agent, *flags, "--", sys.executable, str(script), *runs)
        self.workers[name] = Program(name, argv, self._changed, state=self.folder, **variables)
        return self.workers[name]

    def invitation(self) -> str:
        """The invitation for every worker; made by the operator's command when the first worker needs it."""
        if not self._invitation:
            self.address()  # wait until it listens
            self._invitation = self.operator("invite", "--uses", "100")
        return self._invitation

    def operator(self, *command: str) -> str:
        """Run a command of the run's owner; return its output."""
        argv = (*CLI, *command, "--state", str(self.state))
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60.0, env=environment())
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def address(self) -> str:
        """The address in the coordinator's greeting."""
        first = self.former[0] if self.former else self.coordinator
        self.wait("the coordinator's greeting", lambda: _ADDRESS.search(first.said()) is not None)
        found = _ADDRESS.search(first.said())
        assert found is not None
        return found[1]

    def gate(self) -> Gate:
        gate = Gate(self.folder / f"gate-{len(self._gates)}")
        self._gates.append(gate)
        return gate

    def events(self, event: str) -> list[Line]:
        """The fields of the log lines of one kind, of all coordinators."""
        lines = [line for program in (*self.former, self.coordinator) for line in program.lines]
        return [line["fields"] for line in lines if line.get("event") == event]

    def wait(self, what: str, true: Callable[[], bool], *, look_every_s: float = DEADLINE_S) -> None:
        """Wait until `true()`; fail at the deadline, or when a program failed.

        Checked at each line of output; `look_every_s` is for conditions without one, such as a file.
        """
        with self._changed:
            while not true():
                failed = [p.name for p in self.workers.values() if p.code not in {None, *self._codes}]
                if self.coordinator.code not in (None, 0) and not self._away:
                    failed.append("coordinator")
                if failed:
                    self.fail(f"waiting for {what}: {', '.join(failed)} failed")
                left_s = self._until_s - time.monotonic()
                if left_s <= 0:
                    self.fail(f"waiting for {what}: not within {DEADLINE_S:.0f} s")
                self._changed.wait(min(left_s, look_every_s))

    def finish(self) -> list[Line]:
        """Wait until all processes have exited, the coordinator with 0; the "end" lines of the workers."""
        programs = (*self.workers.values(), self.coordinator)
        self.wait("the end", lambda: all(program.code is not None for program in programs))
        codes = {program.name: program.code for program in programs}
        if self.coordinator.code != 0 or not {p.code for p in self.workers.values()} <= self._codes:
            self.fail(f"exit codes are {codes}")
        return [end for program in self.workers.values() for end in program.marked("end")]

    def fail(self, reason: str) -> None:
        tails = "\n".join(program.tail() for program in (self.coordinator, *self.workers.values()))
        pytest.fail(f"{reason}\n{tails}", pytrace=False)

    # -- what the scripts reported -------------------------------------------------------------------

    def committed(self) -> list[tuple[int, ...]]:
        """All committed attempts (generation, step, attempt), in order: those that any worker applied."""
        outcomes = [line for p in self.workers.values() for line in p.marked("outcome")]
        return sorted({tuple(line["round"]) for line in outcomes if line["committed"]})

    def samples_by_round(self) -> dict[tuple[int, ...], list[int]]:
        """The samples that went into each committed attempt, of all its workers."""
        taken: dict[tuple[int, ...], list[int]] = {name: [] for name in self.committed()}
        for program in self.workers.values():
            for line in program.marked("round"):
                if (name := tuple(line["round"])) in taken:
                    taken[name] += line["samples"]
        return taken

    def stalls_s(self, at_s: float) -> dict[str, float]:
        """Of each surviving worker: seconds from its last commit before `at_s` to its next one."""
        stalls_s: dict[str, float] = {}
        for name, program in self.workers.items():
            commits_s = [line["at_s"] for line in program.marked("outcome") if line["committed"]]
            for before_s, after_s in itertools.pairwise(commits_s):
                if before_s < at_s <= after_s:
                    stalls_s[name] = round(after_s - before_s, 2)
        return stalls_s


NewGroup = Callable[..., contextlib.AbstractContextManager[Group]]


@pytest.fixture(scope="session")
def new_group(tmp_path_factory: pytest.TempPathFactory) -> NewGroup:
    """`Group` in a folder of its own."""

    @contextlib.contextmanager
    def start(**options: Any) -> Iterator[Group]:
        with Group(tmp_path_factory.mktemp("group"), **options) as group:
            yield group

    return start
