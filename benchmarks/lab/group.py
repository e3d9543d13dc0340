"""A coordinator and its workers as processes, on hosts of the lab or on this machine.

    hub        gridtrain coordinator --state FOLDER/state-hub --listen ... --advertise tcp://10.77.0.2:7700
    hub        gridtrain invite --state FOLDER/state-hub                prints INVITE
    worker-1   gridtrain worker INVITE -- python train.py               behind its own router, or not
    ...

`run_in_lab` trains with a function of this package in each worker, and returns what each has returned.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gridtrain.tools.bench.bench_group import LocalHost
from gridtrain.tools.child_processes import CLI_COMMAND, end_processes, process_environment
from lab.net import Host, Net
from lab.ns import LabError
from record import program
from rivals.contract import leave

BENCHMARKS = Path(__file__).resolve().parents[1]
TESTS = BENCHMARKS.parent / "tests"
FIRST_PORT = 7700
HOME_SUBNET = "192.168.178"
INVITATION_S, TICK_S = 90.0, 0.02
END_S = (6.0, 3.0)
"""Times to wait after the first and the second SIGTERM, at which an agent kills its script."""

TAIL_LINES = 15
NAT = ("none", "half", "all")

Line = dict[str, Any]


def environment(state: Path, **more: str) -> dict[str, str]:
    """Return this process's variables without gridtrain's settings, with paths, the state folder and `more`.

    Scripts use one thread, because the workers share the cores, and can import the modules of benchmarks/.
    """
    path = [str(BENCHMARKS), str(TESTS / "common"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {**process_environment(state), "PYTHONPATH": os.pathsep.join(filter(None, path)), **more}


def free_port() -> int:
    """Return a free port of the loopback whose successor is free, too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, contextlib.suppress(OSError):
            port: int = first.getsockname()[1]
            socket.create_server(("127.0.0.1", port + 1)).close()
            return port


def say(mark: str, **fields: object) -> None:
    """Write a script's line to stdout with one system call, so that lines of two threads are not mixed."""
    line = {"mark": mark, "at_s": time.monotonic(), **fields}
    os.write(1, (json.dumps(line) + "\n").encode())


class LabHosts:
    """A host, as `LocalHost`, in the lab: a hub for coordinators, and a host for each worker.

    All homes have the same private addresses, as real homes often do: a connection to a member's private
    address never reaches another home.

    Args:
        rate, delay_s: of each worker's link (behind NAT, its router's); see `Host.shape`.
        hub_rate: of the hub's link; empty: no limit.
        nat: which workers are behind a router: "none", "half" (the first ones, rounded up) or "all".
        limit: the workers' own upload and download limit, such as "20Mbit"; empty: none.

    Attributes:
        uplinks: for each worker, the machine whose link leads to the internet: its host or its router.
    """

    interface = Host.interface

    def __init__(
        self,
        net: Net,
        names: Sequence[str],
        *,
        rate: str = "",
        delay_s: float = 0.0,
        hub_rate: str = "",
        nat: str = "none",
        limit: str = "",
    ) -> None:
        self.limit = limit
        self.hub = net.make_hosts(["hub"], hub_rate)["hub"]
        self.behind_nat = frozenset(
            names[: {"none": 0, "half": (len(names) + 1) // 2, "all": len(names)}[nat]]
        )
        self.workers: dict[str, Host] = {}
        self.uplinks: dict[str, Host] = {}
        self._ports = itertools.count(FIRST_PORT)
        for name in names:
            if name in self.behind_nat:
                router = net.router(f"home-of-{name}", subnet=HOME_SUBNET)
                self.workers[name], self.uplinks[name] = router.host(name), router
            else:
                self.workers[name] = self.uplinks[name] = net.host(name)
            self.uplinks[name].shape(up=rate, down=rate, delay_s=delay_s)

    def __getitem__(self, name: str) -> Host:
        return self.hub if name == "hub" else self.workers[name]

    def listen(self) -> tuple[str, str]:
        port = next(self._ports)
        return f"tcp://0.0.0.0:{port}", f"tcp://{self.hub.address}:{port}"

    def member_listen(self) -> str:
        return ""

    def run(
        self, who: str, argv: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return self[who].run(argv, log.parent, env=env, log=log.name, hostname=hostname(who))


def hostname(name: str) -> str:
    """Return the host name of a worker's machine."""
    return f"{name}s-laptop"


class Program:
    """A process, and what it and its children have written to its two files so far.

    Attributes:
        lines: the lines that are JSON objects, parsed.
        text: the other lines.
        code: the exit code, once all output has been read; None before.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name, self.process = name, process
        self.lines: list[Line] = []
        self.text: list[str] = []
        self.code: int | None = None
        self._read = {Path(f"{log}.{kind}"): (0, b"") for kind in ("out", "err")}

    @property
    def pid(self) -> int:
        """The process id of the training script that runs, once reported, else of the program."""
        return next((line["pid"] for line in reversed(self.lines) if "pid" in line), self.process.pid)

    def poll(self) -> None:
        """Read new output, and learn whether the process has ended."""
        code = self.process.poll()
        for path, (at, rest) in self._read.items():
            with path.open("rb") as file:
                file.seek(at)
                data = file.read()
            *whole, rest = (rest + data).split(b"\n")
            self._read[path] = at + len(data), rest
            for text in whole:
                self._add(text.decode(errors="replace"))
        self.code = code

    def _add(self, text: str) -> None:
        line: Any = None
        with contextlib.suppress(ValueError):
            line = json.loads(text) if text.startswith("{") else None
        if isinstance(line, dict) and line.get("event") != "output":
            self.lines.append(line)
        else:  # of the script, as it is or in an agent's log
            self.text.append(line["fields"]["text"] if line else text)

    def marked(self, mark: str) -> list[Line]:
        """Return the lines of a script with this mark."""
        return [line for line in self.lines if line.get("mark") == mark]

    def tail(self) -> str:
        marks = [json.dumps(line)[:300] for line in self.lines[-TAIL_LINES:]]
        texts = [text[:300] for text in self.text[-TAIL_LINES:]]
        return "\n".join([f"--- {self.name}, exit code {self.code}, the end of its output:", *marks, *texts])

    def end(self) -> None:
        end_processes([self.process], END_S)
        self.poll()


class Group:
    """A coordinator and workers that train; a context manager that ends all of them.

    Args:
        workers: the number of workers with which training begins.
        options: further options of the coordinator.
        cli: the command of `gridtrain` for the coordinator.
        env: further variables of all processes.
    """

    def __init__(
        self,
        hosts: Any,
        folder: Path,
        *,
        workers: int,
        options: Sequence[str] = ("--exit-when-finished",),
        encrypted: bool = True,
        cli: Sequence[str] = CLI_COMMAND,
        env: Mapping[str, str] = {},
    ) -> None:
        self.hosts, self.folder, self.encrypted, self._env = hosts, folder, encrypted, env
        folder.mkdir(parents=True, exist_ok=True)
        listen, advertised = hosts.listen()
        if not advertised:  # fixed here, so that a coordinator that is started again has the same address
            listen = advertised = f"tcp://127.0.0.1:{free_port()}"
        self.address = advertised
        self._argv = [*cli, "coordinator", "--state", str(self.state("hub")), "--listen", listen]
        self._argv += ["--advertise", advertised, "--min-workers", str(workers), *options]
        self._argv += [] if encrypted else ["--unencrypted", "--benchmark"]
        self.workers: dict[str, Program] = {}
        self.others: dict[str, Program] = {}
        self._invitation = ""
        self.coordinator_starts = 0
        self.start_coordinator()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc_info: object) -> None:
        programs = (self.coordinator, *self.workers.values(), *self.others.values())
        end_processes([program.process for program in programs], END_S)
        for each in programs:
            each.poll()

    def state(self, name: str) -> Path:
        """Return the state folder (XDG_STATE_HOME) of a worker, or with "hub" of the coordinator."""
        return self.folder / f"state-{name}"

    # -- starting --------------------------------------------------------------------------------------

    def start(
        self, name: str, argv: Sequence[str], *, host: str = "hub", env: Mapping[str, str] | None = None
    ) -> Program:
        """Start a program, with output in FOLDER/NAME.out and NAME.err."""
        log, whole = self.folder / name, environment(self.state(host), **self._env, **(env or {}))
        return Program(name, self.hosts.run(host, argv, log, whole), log)

    def start_coordinator(self) -> None:
        """Start the coordinator, for the first time or again."""
        self.coordinator_starts += 1
        again = f"-{self.coordinator_starts}" if self.coordinator_starts > 1 else ""
        self.coordinator = self.start(f"hub{again}", self._argv)

    def add(
        self,
        name: str,
        script: Sequence[str],
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        is_limited: bool = True,
    ) -> Program:
        """Start a worker with a training command."""
        limit = self.hosts.limit if is_limited else ""
        argv = [*CLI_COMMAND, "worker", self.invitation(), "--name", name, "--export-dir", str(self.folder)]
        argv += ["--upload-limit", limit, "--download-limit", limit] if limit else []
        argv += [] if self.encrypted else ["--unencrypted"]
        self.workers[name] = self.start(name, [*argv, *options, "--", *script], host=name, env=env)
        return self.workers[name]

    def invitation(self) -> str:
        """Return the invitation of all workers, which the first call creates."""
        if not self._invitation:
            self._invitation = self.command("invite", "--uses", "1000", "--wait", f"{INVITATION_S:g}s")
        return self._invitation

    def command(self, word: str, *arguments: str) -> str:
        """Run a command of `gridtrain` about this run; return its stdout.  Raises `LabError`."""
        argv = [*CLI_COMMAND, word, "--state", str(self.state("hub")), *arguments]
        done = self.start(word, argv)
        self.wait(f"gridtrain {word}", lambda: done.code is not None, 2 * INVITATION_S, [done])
        if done.code:
            raise LabError(f"gridtrain {word} failed\n{done.tail()}\n{self.tails()}")
        return (self.folder / f"{word}.out").read_text().strip()

    # -- waiting ---------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Read all output.  Raises `LabError` when the coordinator or a worker has failed."""
        for each in (self.coordinator, *self.workers.values(), *self.others.values()):
            each.poll()
        if failed := self.failed():
            raise LabError(f"{', '.join(each.name for each in failed)} failed\n{self.tails()}")

    def failed(self) -> list[Program]:
        """Return the programs whose end ends all waits."""
        return [each for each in (self.coordinator, *self.workers.values()) if each.code]

    def wait(
        self, what: str, true: Callable[[], bool], within_s: float, besides: Sequence[Program] = ()
    ) -> None:
        """Wait until `true()`.  Raises `LabError` with the ends of all outputs."""
        until_s = time.monotonic() + within_s
        while True:
            for each in besides:
                each.poll()
            self.poll()
            if true():
                return
            if time.monotonic() > until_s:
                raise LabError(f"waited {within_s:.0f} s for {what}\n{self.tails()}")
            time.sleep(TICK_S)

    def finish(
        self, within_s: float, tick: Callable[[], None] = lambda: None, *, with_coordinator: bool = True
    ) -> None:
        """Wait until all workers and the coordinator have ended with exit code 0; call `tick` meanwhile."""
        awaited = [*self.workers.values(), *([self.coordinator] if with_coordinator else [])]

        def is_over() -> bool:
            tick()
            return all(each.code == 0 for each in awaited)

        self.wait("the end of all workers", is_over, within_s)

    def tails(self) -> str:
        programs = (self.coordinator, *self.workers.values(), *self.others.values())
        return "\n".join(each.tail() for each in programs)


# -- a function in each worker -------------------------------------------------------------------------


@contextlib.contextmanager
def lab_group(
    names: Sequence[str],
    folder: Path,
    *,
    late: int = 0,
    encrypted: bool = True,
    loopback: bool = False,
    env: Mapping[str, str] = {},
    **hosts: Any,
) -> Iterator[Group]:
    """Start the coordinator of workers with these names in a lab of its own.

    Args:
        late: the number of workers for which training does not wait.
        loopback: whether to use this machine, where workers limit their own rate.
        hosts: arguments of `LabHosts`.
    """
    with contextlib.ExitStack() as stack:
        made: Any
        if loopback:
            made = LocalHost(hosts.get("rate", ""))
        else:
            made = LabHosts(stack.enter_context(Net()), names, **hosts)
        begin = len(names) - late
        yield stack.enter_context(Group(made, folder, workers=begin, encrypted=encrypted, env=env))


def run_in_lab(
    work: Callable[[Any], Any],
    options: Mapping[str, Any],
    workers: int | Sequence[str],
    timeout_s: float,
    *,
    own: Mapping[str, Mapping[str, Any]] = {},
    tick: Callable[[Group], None] = lambda group: None,
    **lab: Any,
) -> dict[str, Any]:
    """Call `work(options)` in each worker's script; return what each has returned, by the worker's name.

    Args:
        own: further options of some workers, by name.
        tick: is called while they train; what it raises ends the run.
        lab: arguments of `lab_group`.
    """
    names = [f"worker-{number}" for number in range(1, workers + 1)] if isinstance(workers, int) else workers
    module = work.__module__ if work.__module__ != "__main__" else program()[-1].removesuffix(".py")
    with (
        tempfile.TemporaryDirectory(prefix="gridtrain-lab-") as text,
        lab_group(names, Path(text), **lab) as group,
    ):
        paths = {name: Path(text) / f"{name}.json" for name in names}
        for name, path in paths.items():
            given = json.dumps({**options, **own.get(name, {})})
            script = [sys.executable, "-m", "lab.group", f"{module}:{work.__name__}", given, str(path)]
            group.add(name, script)
        group.finish(timeout_s, lambda: tick(group), with_coordinator=False)
        return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def main(function: str, options: str, result: str) -> None:
    """Be a worker of `run_in_lab`."""
    import torch

    torch.set_num_threads(1)
    module, _, name = function.partition(":")
    found = getattr(importlib.import_module(module), name)(json.loads(options))
    Path(result).write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
