"""The worker agent: it supervises a training script on a volunteer's machine.

Decides when the script is started, stopped and started again, and never leaves one behind.  Takes no
part in the training: the SDK inside the script talks to the coordinator and to the other workers.

    gridtrain worker INVITATION -- python train.py
      |-- lets the coordinator know this machine's key (the first time), and asks how the run stands
      |-- the script, leader of its own process group      <-- GRIDTRAIN_* variables, SIGINT, SIGTERM
      |     `-- whatever it starts (data loaders, ...)
      `-- watchdog: a pipe that closes when the agent is gone, even by SIGKILL: ends the group

A signal goes to the script, which leaves the run gracefully; after `grace_s`, or at a second signal,
the whole group is killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from gridtrain.config import ENV_PREFIX, Deadlines
from gridtrain.errors import ConfigError, JoinRefused
from gridtrain.protocol.invitation import Invitation
from gridtrain.runtime.entry import Entry, enter
from gridtrain.runtime.naming import listen_address
from gridtrain.transport.limits import parse_rate
from gridtrain_worker.session import Machine

Tell = Callable[[str], None]

TICK_S = 0.05
LEFTOVER_S = 3.0
"""What a script leaves running in its group gets so long to end after SIGTERM."""

BACKOFF_MOST_S = 30.0
SOUND_S = 10.0
"""A script that ran so long was sound: the pause before its restart is the first one again."""

WATCHDOG = """
read -r group && ! read -r done && kill -s TERM -- "-$group" || exit
i=0
while [ "$i" -lt "$1" ] && kill -s 0 -- "-$group"; do sleep 1; i=$((i + 1)); done
kill -s KILL -- "-$group"
"""
"""POSIX shell; $1: seconds of grace.  It reads the process group, then "done" if all went well."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to run, and for which run.  Texts as in `gridtrain.config.JoinConfig`.

    Attributes:
        invitation: as the run's owner made it.
        relay: pass on what members that cannot reach each other send one another.
        unencrypted: join a run that talks in the clear.
        state_dir, checkpoint_every, checkpoint_keep: of this worker's checkpoints; as `gridtrain.join`.
        restarts: how often a script that failed is started again.
        prefix: begin each line of the script's output with the worker's name.
        grace_s: time for a graceful leave.
        backoff_s: pause before the first restart; it doubles with each early failure in a row.

    Raises:
        ConfigError: no command, a malformed rate limit.
    """

    command: tuple[str, ...]
    invitation: Invitation
    name: str = ""
    listen: str = ""
    advertise: str = ""
    upload_limit: str = ""
    download_limit: str = ""
    export_dir: str = ""
    state_dir: str = ""
    checkpoint_every: int | None = None
    checkpoint_keep: int | None = None
    relay: bool = True
    unencrypted: bool = False
    restarts: int = 0
    prefix: bool = False
    grace_s: float = 20.0
    backoff_s: float = 1.0
    connect_s: float = Deadlines().connect_s

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError(
                "no training command was given",
                remedy="write it after two dashes: gridtrain worker INVITATION -- python train.py",
            )
        for limit in (self.upload_limit, self.download_limit):
            if limit:
                parse_rate(limit)

    def environment(self, machine: Machine, entry: Entry) -> dict[str, str]:
        """What `gridtrain.join` reads in the script; nothing in it is secret."""
        variables = {
            **{name.upper(): value for name, value in entry.variables().items()},
            "NAME": machine.name,
            "LISTEN": self.listen or listen_address(entry.coordinator),
            "ADVERTISE": self.advertise,
            "UPLOAD_LIMIT": self.upload_limit,
            "DOWNLOAD_LIMIT": self.download_limit,
            "EXPORT_DIR": self.export_dir,
            "STATE_DIR": self.state_dir,
            "CHECKPOINT_EVERY": "" if self.checkpoint_every is None else str(self.checkpoint_every),
            "CHECKPOINT_KEEP": "" if self.checkpoint_keep is None else str(self.checkpoint_keep),
            "RELAY": "yes" if self.relay else "no",
        }
        return {ENV_PREFIX + name: value for name, value in variables.items() if value}


def supervise(job: Job, tell: Tell = lambda line: print(line, file=sys.stderr, flush=True)) -> int:
    """Run the script to its end; returns the exit code for this process.

    That is the script's own, 128 + signal if a signal killed it, 128 + SIGINT or SIGTERM if that is
    what stopped us.  To be called in the main thread.

    Raises:
        CoordinatorUnreachable, JoinRefused: found out before the script is started.
        ConfigError: there is no such program, or the key files cannot be used.
    """
    machine = Machine.here(job.name)
    with enter(job.invitation, job.connect_s, unencrypted=job.unencrypted) as entry:
        check(entry)
        tell(
            f'{machine.name} ({machine.cpus} CPU cores) joins run "{entry.run}" at {entry.coordinator}: '
            f"{entry.status.get('reason')}"
        )
        return _run(job, machine, entry, tell)


def check(entry: Entry) -> None:
    """Raises `JoinRefused` if there is nothing to join: another run, or a finished one."""
    served = str(entry.status.get("run"))
    if served != entry.run:
        raise JoinRefused(
            "wrong-run",
            f'the coordinator at {entry.coordinator} serves the run "{served}", not "{entry.run}"',
            remedy="ask the run's owner for a new invitation",
        )
    if entry.status.get("finished"):
        raise JoinRefused(
            "finished", f'the run "{entry.run}" is finished', remedy="ask its owner for the result"
        )


def _run(job: Job, machine: Machine, entry: Entry, tell: Tell) -> int:
    """Start the script, again after a failure, until it ends well or a signal comes; its exit code."""
    with Signals() as signals:
        in_a_row = 0
        for attempt in range(job.restarts + 1):
            started_s = time.monotonic()
            code = _run_once(job, job.environment(machine, entry), machine, signals)
            if signals.first:
                tell(f"{machine.name} stopped by {_signal_name(signals.first)}")
                return 128 + signals.first
            if code == 0:
                return 0
            ran_s = time.monotonic() - started_s
            tell(_failure(job, code, ran_s))
            in_a_row = 0 if ran_s >= SOUND_S else in_a_row + 1
            if attempt < job.restarts:
                pause_s = min(BACKOFF_MOST_S, job.backoff_s * 2 ** max(0, in_a_row - 1))
                tell(f"restart {attempt + 1} of {job.restarts} in {pause_s:g} s")
                if signals.wait(pause_s):
                    return 128 + signals.first
        return code


class Signals:
    """SIGINT and SIGTERM, counted instead of obeyed; a context manager that puts the old handlers back.

    Plain attributes: a handler must not wait for a lock that the interrupted code may hold.
    """

    def __init__(self) -> None:
        self.first = 0
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        self.count += 1

    def wait(self, pause_s: float) -> bool:
        """Pause, shorter if a signal comes; True if one did."""
        until_s = time.monotonic() + pause_s
        while not self.count and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, TICK_S))
        return self.count > 0


# -- one run of the script -----------------------------------------------------------------------


def _run_once(job: Job, variables: Mapping[str, str], machine: Machine, signals: Signals) -> int:
    """Exit code of the script; when this returns, nothing that it started is left."""
    with _watchdog(job.grace_s) as watch, _script(job, variables, machine) as script:
        watch(script.pid)
        kill_at_s = math.inf
        while (code := _poll(script)) is None:
            if signals.count and kill_at_s == math.inf:
                script.send_signal(signals.first)
                kill_at_s = time.monotonic() + job.grace_s
            if signals.count > 1 or time.monotonic() >= kill_at_s:
                _signal_group(script.pid, signal.SIGKILL)
    return 128 - code if code < 0 else code


def _poll(script: subprocess.Popen[bytes]) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return script.wait(TICK_S)
    return None


@contextlib.contextmanager
def _watchdog(grace_s: float) -> Iterator[Callable[[int], None]]:
    """A shell that ends a process group if this process dies: only we hold the pipe that it reads.

    Gives a function that names the group.
    """
    shell = subprocess.Popen(
        ["/bin/sh", "-c", WATCHDOG, "gridtrain-watchdog", str(math.ceil(grace_s))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert shell.stdin is not None
    pipe = shell.stdin

    def write(line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it was killed, and we cannot help that
            pipe.write(f"{line}\n".encode())
            pipe.flush()

    try:
        yield lambda group: write(str(group))
        write("done")
    finally:
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
        shell.wait()


@contextlib.contextmanager
def _script(job: Job, variables: Mapping[str, str], machine: Machine) -> Iterator[subprocess.Popen[bytes]]:
    """The running script; on leaving, nothing of its process group is alive."""
    environment = {**os.environ, **variables}
    if job.prefix:
        environment.setdefault("PYTHONUNBUFFERED", "1")  # a pipe would hold lines back
    output = subprocess.PIPE if job.prefix else None
    try:
        script = subprocess.Popen(
            job.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,  # Ctrl-C comes to us alone; data loaders end with the script
        )
    except OSError as error:
        raise ConfigError(
            f"cannot start {job.command[0]!r}: {error.strerror}",
            remedy="check the command after the two dashes, for instance: -- python train.py",
        ) from None
    copiers = [
        threading.Thread(target=_copy, args=(pipe, stream, machine.name), daemon=True)
        for pipe, stream in ((script.stdout, sys.stdout), (script.stderr, sys.stderr))
        if pipe is not None
    ]
    for copier in copiers:
        copier.start()
    try:
        yield script
    finally:
        _end_group(script)
        for copier in copiers:
            copier.join(LEFTOVER_S)


def _end_group(script: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + LEFTOVER_S
    alive = _signal_group(script.pid, signal.SIGTERM)
    while alive and time.monotonic() < until_s:
        time.sleep(TICK_S)
        with contextlib.suppress(ChildProcessError):  # as a container's first process we inherit them
            os.waitpid(-script.pid, os.WNOHANG)
        alive = _signal_group(script.pid, 0)
    _signal_group(script.pid, signal.SIGKILL)
    script.wait()


def _signal_group(group: int, number: int) -> bool:
    """False: nobody is left in it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # PermissionError: only zombies are left (macOS)
        return False
    return True


def _copy(pipe: IO[bytes], stream: IO[str], name: str) -> None:
    """Line by line, each with the worker's name."""
    with pipe:
        for line in pipe:
            stream.write(f"[{name}] {line.decode(errors='replace')}")
            stream.flush()


def _failure(job: Job, code: int, ran_s: float) -> str:
    command = shlex.join(job.command)
    if code > 128 and code - 128 in {*signal.Signals}:
        name = _signal_name(code - 128)
        hint = (
            "often a lack of memory: see the system's log"
            if name == "SIGKILL"
            else "its last lines are above"
        )
        return f"the script was killed by {name} after {ran_s:.1f} s ({command}) -> {hint}"
    return (
        f"the script ended with exit code {code} after {ran_s:.1f} s ({command}) -> "
        "its own message is above; with --restarts N it is started again"
    )


def _signal_name(number: int) -> str:
    return signal.Signals(number).name
