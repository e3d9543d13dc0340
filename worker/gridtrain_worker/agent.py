"""The worker agent: it supervises a training script on a volunteer's machine.

Decides when the script is started, stopped and started again, and never leaves one behind.  Takes no
part in the training: the SDK inside the script talks to the coordinator and to the other workers.

    gridtrain worker ADDRESS -- python train.py
      |-- asks the coordinator: is it there, is it the right run?
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
from gridtrain.runtime.client import coordinator_address, fetch_status
from gridtrain.transport.limits import parse_rate
from gridtrain_worker.session import Machine, listen_address

Tell = Callable[[str], None]

TICK_S = 0.05
LEFTOVER_S = 3.0
"""What a script leaves running in its group gets so long to end after SIGTERM."""

BACKOFF_MOST_S = 30.0

WATCHDOG = """
read -r done && exit
kill -s TERM -- "-$1" || exit
i=0
while [ "$i" -lt "$2" ] && kill -s 0 -- "-$1"; do sleep 1; i=$((i + 1)); done
kill -s KILL -- "-$1"
"""
"""POSIX shell: $1 the process group, $2 its grace in seconds.  A line on stdin: all is well."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to run, and for which run.  Texts as in `gridtrain.config.JoinConfig`.

    Attributes:
        restarts: how often a script that failed is started again.
        prefix: begin each line of the script's output with the worker's name.
        grace_s: time for a graceful leave.
        backoff_s: pause before the first restart; it doubles each time.

    Raises:
        ConfigError: no command, a malformed address or rate limit.
    """

    command: tuple[str, ...]
    coordinator: str
    run: str = "default"
    name: str = ""
    listen: str = ""
    advertise: str = ""
    upload_limit: str = ""
    download_limit: str = ""
    export_dir: str = ""
    restarts: int = 0
    prefix: bool = False
    grace_s: float = 20.0
    backoff_s: float = 1.0
    connect_s: float = Deadlines.connect_s

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError(
                "no training command was given",
                remedy="write it after two dashes: gridtrain worker ADDRESS -- python train.py",
            )
        object.__setattr__(self, "coordinator", coordinator_address(self.coordinator))
        for limit in (self.upload_limit, self.download_limit):
            if limit:
                parse_rate(limit)

    def environment(self, machine: Machine) -> dict[str, str]:
        """What `gridtrain.join` reads in the script."""
        variables = {
            "COORDINATOR": self.coordinator,
            "RUN": self.run,
            "NAME": machine.name,
            "LISTEN": self.listen or listen_address(self.coordinator),
            "ADVERTISE": self.advertise,
            "UPLOAD_LIMIT": self.upload_limit,
            "DOWNLOAD_LIMIT": self.download_limit,
            "EXPORT_DIR": self.export_dir,
        }
        return {ENV_PREFIX + name: value for name, value in variables.items() if value}


def supervise(job: Job, tell: Tell = lambda line: print(line, file=sys.stderr, flush=True)) -> int:
    """Run the script to its end; returns the exit code for this process.

    That is the script's own, 128 + signal if a signal killed it, 128 + SIGINT or SIGTERM if that is
    what stopped us.  To be called in the main thread.

    Raises:
        CoordinatorUnreachable, JoinRefused: found out before the script is started.
        ConfigError: there is no such program.
    """
    machine = Machine.here(job.name)
    with Signals() as signals:
        status = check(job)
        tell(
            f'{machine.name} ({machine.cpus} CPU cores) joins run "{job.run}" at {job.coordinator}: '
            f"{status.get('phase')}, {status.get('world_size')} workers, step {status.get('step')}"
        )
        for attempt in range(job.restarts + 1):
            started_s = time.monotonic()
            code = _run_once(job, machine, signals)
            if signals.first:
                tell(f"{machine.name} stopped by {_signal_name(signals.first)}")
                return 128 + signals.first
            if code == 0:
                return 0
            tell(_failure(job, code, time.monotonic() - started_s))
            if attempt < job.restarts:
                pause_s = min(BACKOFF_MOST_S, job.backoff_s * 2**attempt)
                tell(f"restart {attempt + 1} of {job.restarts} in {pause_s:g} s")
                if signals.wait(pause_s):
                    return 128 + signals.first
        return code


def check(job: Job) -> Mapping[str, Any]:
    """The coordinator's status.  Raises `CoordinatorUnreachable`, or `JoinRefused` if it serves another run."""
    status = fetch_status(job.coordinator, job.connect_s)
    if status.get("run") != job.run:
        raise JoinRefused(
            "wrong-run",
            f'the coordinator at {job.coordinator} serves the run "{status.get("run")}", not "{job.run}"',
            remedy=f"add --run {shlex.quote(str(status.get('run')))}, or ask for the other coordinator's address",
        )
    if status.get("finished"):
        raise JoinRefused(
            "finished", f'the run "{job.run}" is finished', remedy="ask its owner for the result"
        )
    return status


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


def _run_once(job: Job, machine: Machine, signals: Signals) -> int:
    """Exit code of the script; when this returns, nothing that it started is left."""
    if signals.count:
        return 128 + signals.first
    script = _start(job, machine)
    with _ended(script), _watched(script, job.grace_s), _prefixed(script, machine.name if job.prefix else ""):
        forwarded, kill_at_s = 0, math.inf
        while (code := _poll(script)) is None:
            if signals.count > forwarded:
                if forwarded == 0:
                    script.send_signal(signals.first)
                    kill_at_s = time.monotonic() + job.grace_s
                else:
                    kill_at_s = -math.inf
                forwarded = signals.count
            if time.monotonic() >= kill_at_s:
                _signal_group(script.pid, signal.SIGKILL)
    return 128 - code if code < 0 else code


def _start(job: Job, machine: Machine) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **job.environment(machine)}
    if job.prefix:
        environment.setdefault("PYTHONUNBUFFERED", "1")  # a pipe would hold lines back
    output = subprocess.PIPE if job.prefix else None
    try:
        return subprocess.Popen(
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


def _poll(script: subprocess.Popen[bytes]) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return script.wait(TICK_S)
    return None


@contextlib.contextmanager
def _ended(script: subprocess.Popen[bytes]) -> Iterator[None]:
    """On leaving nothing of the script's process group is alive."""
    try:
        yield
    finally:
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


@contextlib.contextmanager
def _watched(script: subprocess.Popen[bytes], grace_s: float) -> Iterator[None]:
    """A shell ends the script's group if this process dies: it alone holds the other end of a pipe."""
    watchdog = subprocess.Popen(
        ["/bin/sh", "-c", WATCHDOG, "gridtrain-watchdog", str(script.pid), str(math.ceil(grace_s))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):  # it was killed: nothing to call off
            watchdog.communicate(b"done\n")
        watchdog.wait()


@contextlib.contextmanager
def _prefixed(script: subprocess.Popen[bytes], name: str) -> Iterator[None]:
    """Copy the script's output line by line, each with the worker's name; nothing to do without pipes."""
    pairs = [(script.stdout, sys.stdout), (script.stderr, sys.stderr)]
    threads = [
        threading.Thread(target=_copy, args=(pipe, stream, name), daemon=True)
        for pipe, stream in pairs
        if pipe is not None
    ]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(LEFTOVER_S)


def _copy(pipe: IO[bytes], stream: IO[str], name: str) -> None:
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
        f"the script ended with exit code {code} after {ran_s:.1f} s ({command}) -> its own message is above; "
        "--restarts N starts it again, GRIDTRAIN_DEBUG=1 shows gridtrain's tracebacks"
    )


def _signal_name(number: int) -> str:
    return signal.Signals(number).name
