"""The worker agent: it supervises a training script on a volunteer's machine.

Decides when the script is started, stopped and started again, and never leaves one behind.  Takes no
part in the training: the SDK inside the script talks to the coordinator and to the other workers.

    gridtrain worker INVITATION -- python train.py
      |-- lets the coordinator know this machine's key (the first time), and asks how the run stands
      |-- the script, leader of its own process group      <-- GRIDTRAIN_* variables, SIGINT, SIGTERM
      |     `-- whatever it starts (data loaders, ...)
      `-- watchdog: a pipe that closes when the agent is gone, even by SIGKILL: ends the group

The owner's rules hold all the time (`warden`): while they say pause, no script is started, and one that runs
leaves the group and waits; one that does not obey is ended, and started again when it may train.

A signal goes to the script, which leaves the run gracefully; after `grace_s`, or at a second signal,
the whole group is killed.  Ctrl-Z stops the script with the agent, and `fg` lets both go on.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any, TextIO

from gridtrain.config import ENV_PREFIX, Deadlines
from gridtrain.core.group.invitation import Invitation
from gridtrain.errors import ConfigError, JoinRefused
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.rate_limiter import parse_rate
from gridtrain.runtime.client.enrollment import Enrollment, enroll, is_still_admitted, revoked_error
from gridtrain.runtime.client.worker_naming import default_listen_address
from gridtrain.tools.options import PROGRAMS
from gridtrain_worker.bundle_consent import Ask, BundleOffer, fetch_offer, require_consent
from gridtrain_worker.console import Console, SilentConsole, TerminalConsole
from gridtrain_worker.contribution_stats import ContributionStats
from gridtrain_worker.machine_info import MachineInfo
from gridtrain_worker.policy_enforcer import LOOK_S, PolicyEnforcer, load_sensors
from gridtrain_worker.training_policy import Rules

Tell = Callable[[str], None]

KEY_DIGITS = 12  # as the coordinator shows it
_clock = time.monotonic  # a name of its own, for tests
TICK_S = 0.05
GROUP_EXIT_TIMEOUT_S = 3.0
"""What a script leaves running in its group gets so long to end after SIGTERM."""

ANSWER_S = 2.0
"""After a failure the coordinator gets so long to say whether it still lets this worker in."""

ACCESS_CHECK_S = 5.0
"""Refused for so long on end, this worker has been put out.  One refused handshake proves nothing about who
refused it: anybody on the way can, and so does a coordinator that is just being started anew."""

ACCESS_RETRY_S = 0.5

MAX_BACKOFF_S = 30.0
BACKOFF_RESET_S = 10.0
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
        command: (): what the run's bundle says, once somebody has accepted it.
        invitation: as the run's owner made it.
        folder: where the command runs; "": here.
        accept: the digest of a bundle that was accepted beforehand; "": ask.
        dry_run: do all but join.
        relay: pass on what members that cannot reach each other send one another.
        unencrypted: join a run that talks in the clear.
        state_dir, checkpoint_every, checkpoint_keep: of this worker's checkpoints; as `gridtrain.join`.
        restarts: how often a script that failed is started again.
        controls: the owner's rules, by key: see `controls.KEYS`.
        sensors: a file that speaks for this machine's sensors; "": they speak for themselves.
        prefix: begin each line of the script's output with the worker's name.
        grace_s: time for a graceful leave.
        backoff_s: pause before the first restart; it doubles with each early failure in a row.

    Raises:
        ConfigError: a malformed rate limit.
    """

    command: tuple[str, ...]
    invitation: Invitation
    folder: str = ""
    name: str = ""
    listen: str = ""
    advertise: str = ""
    upload_limit: str = ""
    download_limit: str = ""
    donate_limit: str = ""
    export_dir: str = ""
    state_dir: str = ""
    data_dir: str = ""
    checkpoint_every: int | None = None
    checkpoint_keep: int | None = None
    handover_mib: int | None = None
    relay: bool = True
    unencrypted: bool = False
    restarts: int = 0
    prefix: bool = False
    controls: tuple[tuple[str, str], ...] = ()
    sensors: str = ""
    accept: str = ""
    dry_run: bool = False
    grace_s: float = 20.0
    backoff_s: float = 1.0
    connect_s: float = Deadlines().connect_s

    def __post_init__(self) -> None:
        for name in ("upload_limit", "download_limit", "donate_limit"):
            try:
                if limit := getattr(self, name):
                    parse_rate(limit)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error.reason}", remedy=error.remedy) from None
        Rules().with_settings(self.rules)

    @property
    def rules(self) -> dict[str, str]:
        """Everything that the owner has said at the start, by key."""
        rates = {"upload": self.upload_limit, "download": self.download_limit}
        return {key: text for key, text in rates.items() if text} | dict(self.controls)

    def environment(
        self, machine: MachineInfo, entry: Enrollment, control: str = "", contribution: Path | None = None
    ) -> dict[str, str]:
        """What `gridtrain.join` reads in the script; nothing in it is secret."""
        variables = {
            **{name.upper(): value for name, value in entry.join_options().items()},
            "NAME": machine.name,
            "LISTEN": self.listen or default_listen_address(entry.coordinator),
            "ADVERTISE": self.advertise,
            "UPLOAD_LIMIT": self.upload_limit,
            "DOWNLOAD_LIMIT": self.download_limit,
            "EXPORT_DIR": self.export_dir,
            "DONATE_LIMIT": self.donate_limit,
            "STATE_DIR": self.state_dir,
            "DATA_DIR": self.data_dir,
            "CHECKPOINT_EVERY": "" if self.checkpoint_every is None else str(self.checkpoint_every),
            "CHECKPOINT_KEEP": "" if self.checkpoint_keep is None else str(self.checkpoint_keep),
            "HANDOVER_MIB": "" if self.handover_mib is None else str(self.handover_mib),
            "RELAY": "yes" if self.relay else "no",
            "CONTROL": control,
            "CONTRIBUTION": "" if contribution is None else str(contribution),
        }
        return {ENV_PREFIX + name: value for name, value in variables.items() if value}


def supervise(
    job: Job,
    tell: Tell = lambda line: print(line, file=sys.stderr, flush=True),
    *,
    voice: Console = SilentConsole(),  # noqa: B008  it has no state
    ask: Ask | None = None,
    show: Callable[[Job, BundleOffer | None], None] = lambda job, offer: None,
) -> int:
    """Run the script to its end; returns the exit code for this process.

    That is the script's own, 128 + signal if a signal killed it, 128 + SIGINT or SIGTERM if that is
    what stopped us.  To be called in the main thread.

    Args:
        voice: how the script's output and what this machine contributes are shown.
        ask: shows a bundle to a person, who accepts it or not; None: there is nobody.
        show: of a dry run: what would be run.

    Raises:
        CoordinatorUnreachable, JoinRefused: found out before the script is started.
        ConfigError: there is no such program, or the key files cannot be used.
        NotAccepted: the run's bundle is not run.
        JoinRefused: also later: the run's owner has put this worker out.
    """
    machine = MachineInfo.detect(job.name)
    with enroll(job.invitation, job.connect_s, unencrypted=job.unencrypted) as entry:
        check_joinable(entry)
        job = replace(job, name=machine.name)
        offer = None if job.command else fetch_offer(entry, job.data_dir, job.connect_s)
        if job.dry_run:
            show(job, offer)
            return 0
        if offer is not None:
            require_consent(offer, job.accept, ask)
            job = with_bundle(job, offer)
        giving = ContributionStats(entry.identity, voice)
        tell(
            f'{machine.name} ({machine.cpus} CPU cores) joins run "{entry.run}" at {entry.coordinator}: '
            f"{entry.status.get('reason')}"
        )
        sensors, folder = load_sensors(job.sensors), entry.identity.with_suffix("")
        try:
            key = Identity.read(entry.identity).public.hex()[:KEY_DIGITS]
            with PolicyEnforcer(
                folder, machine.name, job.rules, tell, run=entry.run, key=key, sensors=sensors
            ) as warden:
                return _run(job, machine, entry, warden, tell, voice, giving)
        finally:
            giving.finish()


def with_bundle(job: Job, offer: BundleOffer) -> Job:
    """With the bundle's command, in the bundle's folder; the volunteer's own folders stay where they are."""
    own = {
        name: os.path.abspath(path) for name in ("export_dir", "state_dir") if (path := getattr(job, name))
    }
    data = offer.folder if offer.data is None else offer.data.parent
    if offer.data is not None and offer.bundle.run.data is not None:
        data = Path(str(offer.data).removesuffix(offer.bundle.run.data.file))
    return replace(job, command=offer.command, folder=str(offer.folder), data_dir=str(data.absolute()), **own)


def check_joinable(entry: Enrollment) -> None:
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


def _run(
    job: Job,
    machine: MachineInfo,
    entry: Enrollment,
    warden: PolicyEnforcer,
    tell: Tell,
    voice: Console,
    giving: ContributionStats,
) -> int:
    """Start the script, again after a failure, until it ends well or a signal comes; its exit code."""
    with SignalWatcher() as signals:
        in_a_row = failures = 0
        while _await_permission(warden, signals):
            started_s = time.monotonic()
            rules = warden.rules  # of now: a cap holds from the first byte, not from when the script asks
            capped = replace(job, upload_limit=rules.upload, download_limit=rules.download)
            variables = capped.environment(machine, entry, warden.path, giving.path)
            code = _run_once(job, variables, machine, signals, warden, voice, giving)
            giving.script_ended()
            if signals.first:
                giving.finish()  # before why it stopped, which is to be the last line
                tell(f"{machine.name} stopped by {_signal_name(signals.first)}")
                return 128 + signals.first
            if warden.is_stopping or (code == 0 and not warden.has_ended_script):
                return code
            if warden.has_ended_script or not warden.decision.may_train:
                why = warden.decision.text() or "now"
                tell(f"the script has ended; it is started again when it may train ({why})")
                continue
            if failures == job.restarts:
                giving.finish()  # before what went wrong, likewise
            ran_s = time.monotonic() - started_s
            tell(_failure(job, code, ran_s))
            if _is_removed(entry, signals):
                giving.finish()
                identity = Identity.read(entry.identity)
                raise revoked_error(job.invitation, identity)  # to start it again would lead to the same
            in_a_row = 0 if ran_s >= BACKOFF_RESET_S else in_a_row + 1
            if failures == job.restarts:
                return code
            failures += 1
            pause_s = min(MAX_BACKOFF_S, job.backoff_s * 2 ** max(0, in_a_row - 1))
            tell(f"restart {failures} of {job.restarts} in {pause_s:g} s")
            if signals.wait(pause_s):
                return 128 + signals.first
        return 128 + signals.first if signals.first else 0


def _is_removed(entry: Enrollment, signals: SignalWatcher) -> bool:
    """False: somebody let this worker in, nobody answered, or a signal came before that was clear."""
    until_s = _clock() + ACCESS_CHECK_S
    while not is_still_admitted(entry, ANSWER_S):
        if _clock() >= until_s:
            return True
        if signals.wait(ACCESS_RETRY_S):
            return False
    return False


def _await_permission(warden: PolicyEnforcer, signals: SignalWatcher) -> bool:
    """Until the owner's rules let a script be started; False: it is to be none."""
    while not warden.is_stopping and not signals.count:
        warden.raise_fault()
        if warden.decision.may_train:
            return True
        signals.wait(LOOK_S)
    return False


class SignalWatcher:
    """SIGINT and SIGTERM, counted instead of obeyed, and SIGTSTP (Ctrl-Z), kept until somebody looks; a
    context manager that puts the old handlers back.

    Plain attributes: a handler must not wait for a lock that the interrupted code may hold.
    """

    def __init__(self) -> None:
        self.first = 0
        self.count = 0
        self._stop_requested = False
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> SignalWatcher:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous_handlers[number] = signal.signal(number, self._on_signal)
        self._previous_handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._on_stop)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        self.count += 1

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_requested = True

    def suspend_if_requested(self, group: int = 0) -> None:
        """If Ctrl-Z was pressed: stand still until SIGCONT.  So does the script's group, which the terminal
        knows nothing of: it would train on, and nobody would keep the rules."""
        if not self._stop_requested:
            return
        self._stop_requested = False
        if group:
            _signal_group(group, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        if group:
            _signal_group(group, signal.SIGCONT)

    def wait(self, pause_s: float) -> bool:
        """Pause, shorter if a signal comes; True if one did."""
        until_s = time.monotonic() + pause_s
        while not self.count and (left_s := until_s - time.monotonic()) > 0:
            self.suspend_if_requested()
            time.sleep(min(left_s, TICK_S))
        return self.count > 0


# -- one run of the script -----------------------------------------------------------------------


def _run_once(
    job: Job,
    variables: Mapping[str, str],
    machine: MachineInfo,
    signals: SignalWatcher,
    warden: PolicyEnforcer,
    voice: Console,
    giving: ContributionStats,
) -> int:
    """Exit code of the script; when this returns, nothing that it started is left."""
    with _watchdog(job.grace_s) as watch, _running_script(job, variables, machine, voice) as script:
        watch(script.pid)
        warden.set_script(script.pid)
        kill_at_s = math.inf
        while (code := _poll(script)) is None:
            signals.suspend_if_requested(script.pid)
            giving.update(time.monotonic())
            warden.raise_fault()
            if (signals.count or warden.is_overdue) and kill_at_s == math.inf:
                warden.has_ended_script = not signals.count
                script.send_signal(signals.first or signal.SIGTERM)
                kill_at_s = time.monotonic() + job.grace_s
            if signals.count > 1 or time.monotonic() >= kill_at_s:
                _signal_group(script.pid, signal.SIGKILL)
    warden.set_script(0)
    return 128 - code if code < 0 else code


def _poll(script: subprocess.Popen[bytes]) -> int | None:
    """Its exit code, or None after a while.  `Popen.wait(timeout)` would look 140 times a second."""
    try:
        handle = os.pidfd_open(script.pid)
    except (AttributeError, OSError):  # not Linux, or it has ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            return script.wait(TICK_S)
        return None
    try:
        ends = select.poll()
        ends.register(handle, select.POLLIN)
        ends.poll(1000 * TICK_S)
    finally:
        os.close(handle)
    return script.poll()


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
def _running_script(
    job: Job, variables: Mapping[str, str], machine: MachineInfo, voice: Console
) -> Iterator[subprocess.Popen[bytes]]:
    """The running script; on leaving, nothing of its process group is alive."""
    chosen = {one.variable for one in PROGRAMS["worker"]}  # the invitation among them, which is secret
    inherited = {name: value for name, value in os.environ.items() if name not in chosen}
    environment = {**inherited, **variables}
    piped = job.prefix or isinstance(voice, TerminalConsole)  # whose live line has to make room
    if piped:
        environment.setdefault("PYTHONUNBUFFERED", "1")  # a pipe would hold lines back
    output = subprocess.PIPE if piped else None
    try:
        script = subprocess.Popen(
            job.command,
            env=environment,
            cwd=job.folder or None,
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
        threading.Thread(
            target=_copy, args=(pipe, stream, machine.name if job.prefix else "", voice), daemon=True
        )
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
            copier.join(GROUP_EXIT_TIMEOUT_S)


def _end_group(script: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + GROUP_EXIT_TIMEOUT_S
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


def _copy(pipe: IO[bytes], stream: TextIO, name: str, voice: Console) -> None:
    """Line by line, each with the worker's name; without a name as it comes."""
    with pipe:
        if name:
            for line in pipe:
                voice.write_output(f"[{name}] {line.decode(errors='replace')}", stream)
            return
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while piece := os.read(pipe.fileno(), 1 << 16):
            voice.write_output(decoder.decode(piece), stream)


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
        "its own message is above" + ("" if job.restarts else "; with --restarts N it is started again")
    )


def _signal_name(number: int) -> str:
    return signal.Signals(number).name
