"""The worker agent: starts, watches and restarts a volunteer's script, and ends it on Ctrl-C.

    gridtrain worker INVITATION -- python train.py
      |-- registers this machine's key with the coordinator (once) and requests the run's status
      |-- the script, leader of its own process group      <-- GRIDTRAIN_* variables, SIGINT, SIGTERM
      |     `-- its descendants (data loaders, processes of torchrun, ...)
      `-- watchdog: a process that ends them once the agent is gone, even after SIGKILL

The owner's rules always apply (`policy_enforcer`).  While they forbid training, no script is started, and a
running script leaves its generation and waits.  A script that does not leave in time is terminated, and
started again when training is allowed.

The agent passes a signal on to the script, SIGHUP as SIGTERM; the script then leaves the run.  An import,
for example that of torch, may swallow the exception that Ctrl-C raises, so the script is also asked to stop
after its step and, if it has not yet joined the run, terminated after `IMPORT_GRACE_S`.  After `grace_s`, or
on a second signal, the agent kills the script and all its descendants (`script_processes`).  Ctrl-Z stops
them together with the agent; `fg` resumes all.

The agent takes no part in the training: the SDK inside the script communicates with the coordinator and the
peers.
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
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import IO, Any, TextIO

from gridtrain.config import ENV_PREFIX, Deadlines
from gridtrain.core.group.invitation import Invitation
from gridtrain.errors import (
    VERSION,
    AddressTaken,
    BudgetSpent,
    ConfigError,
    CoordinatorUnreachable,
    JoinRefused,
)
from gridtrain.network.transport.identity import Identity
from gridtrain.network.transport.interface import ConnectionRole
from gridtrain.network.transport.rate_limiter import parse_rate
from gridtrain.network.transport.zmq.zeromq_transport import ZeroMQTransport
from gridtrain.quantities import format_age
from gridtrain.runtime.client.agent_link import CONTROL_VARIABLE
from gridtrain.runtime.client.coordinator_client import DENIED
from gridtrain.runtime.client.enrollment import Answer, Enrollment, ask_coordinator, enroll, revoked_error
from gridtrain.runtime.client.worker_defaults import export_folder, name_of_key
from gridtrain.tools.options import PROGRAMS
from gridtrain.training.data.shard_fetch import PROGRESS
from gridtrain.training.data.shard_files import DEFAULT_LIMIT_BYTES, ShardCache, parse_limit
from gridtrain_worker import watchdog as watchdog_program
from gridtrain_worker.bundle_consent import Ask, BundleOffer, fetch_data_file, fetch_offer, require_consent
from gridtrain_worker.console import Console, JsonConsole, TerminalConsole
from gridtrain_worker.contribution_stats import ContributionStats
from gridtrain_worker.policy_enforcer import LOOK_S, AgentMeter, PolicyEnforcer, load_sensors
from gridtrain_worker.script_processes import ScriptProcesses
from gridtrain_worker.training_policy import Rules

Tell = Callable[[str], None]

KEY_DIGITS = 12  # as many as the coordinator shows
_clock = time.monotonic  # replaced by tests
TICK_S = 0.05
PARTIAL_LINE_S = 0.1
"""How long an incomplete line from the script is held back to wait for its end, so that other output does not
split it: when `print` writes to a pipe, Python writes the newline separately."""
EXIT_TIMEOUT_S = 3.0
"""The time between SIGTERM and SIGKILL for processes that the script leaves behind."""

IMPORT_GRACE_S = 5.0
"""The longest time between Ctrl-C and SIGTERM for a script that has not joined the run, and so need not leave
it.  If the script joins after Ctrl-C, the signal was lost, and SIGTERM is sent at once."""

ANSWER_S = 2.0
"""How long to wait, after the script has ended, for an answer from the coordinator."""

ACCESS_CHECK_S = 5.0
"""A worker that is refused for this long is considered removed.  A single refused handshake proves nothing:
it may be caused by anyone on the network path, or by a coordinator that is restarting."""

ACCESS_RETRY_S = 0.5

MAX_BACKOFF_S, MAX_DOUBLINGS = 30.0, 16

STEADY_S = 60.0
"""If the script committed a step and ran for at least this long, earlier failures no longer count."""

USUALLY_FINAL_EXIT_CODES = (ConfigError.exit_code, JoinRefused.exit_code)
"""Exit codes after which `--restarts` is not suggested: the configuration is wrong, or the worker is refused.

`--restarts` applies to them nevertheless: anyone on the network path can cause a single refusal, and the
refusals "full" and "stale-model" may be temporary.  A worker that was removed, whose run has finished or
whose coordinator has another version is not restarted, whatever the code: torchrun does not pass on the codes
of its processes."""


@dataclass(frozen=True, slots=True)
class Job:
    """The command to execute, the run to join, and the settings for both.

    Attributes:
        command: the command with its arguments; empty to use that of the run's bundle.
        invitation: the invitation from the run's owner.
        folder: the command's working directory; empty for the current directory.
        name: the worker's name; empty for a random one, which is stored with its key.
        accept: the digest of a bundle that is accepted in advance; empty to ask the user.
        dry_run: whether only to show what would be run, without joining.
        settings: settings for the script, by name: fields of `gridtrain.config.JoinConfig`, "data_dir" and
            "cache_limit".
        unencrypted: whether to join a run without encryption.
        restarts: the maximum number of times in a row that a failed script is restarted.  The count starts
            again at 0 after a script that committed a step and ran for `STEADY_S`.
        controls: the owner's rules by key; see `training_policy.KEYS`.
        sensors: a file with sensor readings; empty to read this machine's sensors.
        prefix: whether to start each line of the script's output with the worker's name.
        grace_s: the time between a signal and SIGKILL, during which the script can leave the run.
        backoff_s: the pause before the first restart; it doubles with each further failure in a row, up to
            `MAX_BACKOFF_S`.
        connect_s: how long to wait for the coordinator if there are no restarts.
        paused_s: how long to wait for the coordinator if there are restarts.

    Raises:
        ConfigError: a limit or a rule is malformed.
    """

    command: tuple[str, ...]
    invitation: Invitation
    folder: str = ""
    name: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
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
    paused_s: float = Deadlines().paused_s

    def __post_init__(self) -> None:
        for name in ("upload_limit", "download_limit", "donate_limit"):
            if limit := self.settings.get(name):
                parse_rate(limit, name)
        Rules().with_settings(self.rules)
        self.cache_limit_bytes()

    def cache_limit_bytes(self) -> int:
        text = self.settings.get("cache_limit")
        return parse_limit("cache_limit", text) if text else DEFAULT_LIMIT_BYTES

    @property
    def rules(self) -> dict[str, str]:
        """All rules given when the agent was started, by key."""
        rates = {key: self.settings.get(f"{key}_limit", "") for key in ("upload", "download")}
        return {key: text for key, text in rates.items() if text} | dict(self.controls)

    def environment(
        self, entry: Enrollment, control: str = "", contribution: Path | None = None
    ) -> dict[str, str]:
        """Return the environment variables that `gridtrain.join` reads in the script; they are not secret."""
        variables = {
            **self.settings,
            **entry.join_options(),
            "name": self.name,
            "control": control,
            "contribution": "" if contribution is None else str(contribution),
        }
        return {ENV_PREFIX + name.upper(): value for name, value in variables.items() if value}


def supervise(
    job: Job,
    tell: Tell = lambda line: print(line, file=sys.stderr, flush=True),
    *,
    console: Console = Console(),  # noqa: B008  it has no state
    ask: Ask | None = None,
    show: Callable[[Job, BundleOffer | None], None] = lambda job, offer: None,
) -> int:
    """Run the script to its end; return the exit code for this process.

    The exit code is the script's; 128 + N if signal N killed the script, or if SIGINT, SIGTERM or SIGHUP with
    the number N stopped this process; or 0 after a dry run.  Must be called in the main thread.

    Args:
        console: shows the script's output and this machine's contribution.
        ask: asks the user to accept a bundle; None if there is no user to ask.
        show: shows the job and its bundle during a dry run.

    Raises:
        CoordinatorUnreachable: the coordinator does not answer within `Job.connect_s`, or within
            `Job.paused_s` if there are restarts.
        JoinRefused: the coordinator refuses this worker, or removes it while the script is running.
        ConfigError: the program does not exist, a package or the data set is missing, a key file cannot be
            used, a rule cannot be enforced, or the final model cannot be written.
        TransportError: this machine cannot listen on the chosen address.
        NotAccepted: the run's bundle was not accepted.
        DataError: the data set's file could not be fetched.
        RemoteProtocolError: the coordinator sent an invalid bundle.
        RuntimeError: the owner's rules are no longer enforced, because a background thread has failed.
    """
    if not job.dry_run:
        check_machine(job)
    wait_s = job.paused_s if job.restarts and not job.dry_run else job.connect_s
    enrolled = enroll(job.invitation, wait_s, unencrypted=job.unencrypted, tell=tell)
    with enrolled as entry, contextlib.ExitStack() as stack:
        check_joinable(entry)
        public = Identity.read(entry.identity).public
        job = replace(job, name=job.name or name_of_key(public))
        offer = None if job.command else fetch_offer(entry, job.settings.get("data_dir", ""), job.connect_s)
        console.flush()  # before a question to the user
        if job.dry_run:
            show(job, offer)
        if offer is not None and offer.missing is not None:
            raise offer.missing
        if job.dry_run:
            return 0
        if offer is not None:
            require_consent(offer, job.accept, ask)
        stats = ContributionStats(entry.identity, console)
        sensors, folder = load_sensors(job.sensors), entry.identity.with_suffix("")
        try:
            key = public.hex()[:KEY_DIGITS]
            with PolicyEnforcer(
                folder, job.name, job.rules, tell, run=entry.run, key=key, sensors=sensors
            ) as enforcer:
                if offer is not None:
                    say = None if isinstance(console, TerminalConsole) else tell
                    code, fetched = _fetch_data(job, offer, enforcer, stack, tell, say)
                    if fetched is None:
                        return code
                    job = with_bundle(job, fetched)
                tell(f'{job.name} is joining the run "{entry.run}" at {entry.coordinator}')
                return _run(job, entry, enforcer, tell, console, stats)
        finally:
            stats.finish()


def _fetch_data(
    job: Job,
    offer: BundleOffer,
    enforcer: PolicyEnforcer,
    stack: contextlib.ExitStack,
    tell: Tell,
    say: Tell | None,
) -> tuple[int, BundleOffer | None]:
    """Fetch the data set's file while the rules allow it; return (0, the offer with its path), or (exit code,
    None) if the worker is stopped first."""
    cache = ShardCache(limit_bytes=job.cache_limit_bytes(), meter=AgentMeter(enforcer))
    while True:
        with SignalWatcher() as signals:
            if not _await_permission(enforcer, signals):
                return (128 + signals.first if signals.first else 0), None
        try:
            return 0, stack.enter_context(fetch_data_file(offer, cache, say))
        except BudgetSpent as error:
            tell(f"fetching the data set's file is paused: {error.reason}")


def with_bundle(job: Job, offer: BundleOffer) -> Job:
    """Return the job with the bundle's command and folder; the volunteer's folders become absolute paths."""
    settings = dict(job.settings)
    for name in settings.keys() & {"export_dir", "state_dir"}:
        settings[name] = os.path.abspath(settings[name])
    data = Path(settings.get("data_dir") or offer.folder) if offer.index is not None else offer.folder
    if offer.data is not None and offer.bundle.run.data is not None:
        data = Path(str(offer.data).removesuffix(offer.bundle.run.data.file))
    settings["data_dir"] = str(data.absolute())
    return replace(job, command=offer.command, folder=str(offer.folder), settings=settings)


def check_machine(job: Job) -> None:
    """Check that this machine can write the final model and listen on the chosen address.

    If it cannot, raise the error that the script would raise later, after the invitation has been used and
    torch has been imported.
    """
    if folder := job.settings.get("export_dir"):
        export_folder(job.invitation.run, folder)
    if address := job.settings.get("listen"):
        identity = Identity.generate()
        transport = ZeroMQTransport(identity, "gridtrain", gate=lambda key: ConnectionRole.STRANGER)
        try:
            with contextlib.closing(transport):
                transport.listen(address)
        except AddressTaken as error:
            script = f"the script of a killed worker may use it for another {job.grace_s:g} s"
            raise AddressTaken(error.reason, remedy=f"{error.remedy}; {script}") from None


def check_joinable(entry: Enrollment) -> None:
    """Raise `JoinRefused` if the coordinator serves a different run, or if the run is finished."""
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
    entry: Enrollment,
    enforcer: PolicyEnforcer,
    tell: Tell,
    console: Console,
    stats: ContributionStats,
) -> int:
    """Run the script until it succeeds or is stopped, or no restart is left; return this process's exit code.

    Raises:
        CoordinatorUnreachable: the coordinator has not answered for `Job.paused_s` since the script failed.
        JoinRefused: the coordinator has removed this worker.
    """
    with SignalWatcher() as signals:
        failures = 0  # in a row
        while _await_permission(enforcer, signals, stats):
            started_s = time.monotonic()
            rules = enforcer.rules  # so that the current rate limits apply from the script's first byte
            limits = {"upload_limit": rules.upload, "download_limit": rules.download}
            capped = replace(job, settings={**job.settings, **limits})
            variables = capped.environment(entry, enforcer.path, stats.path)
            code = _run_once(job, variables, signals, enforcer, console, stats)
            ran_s = time.monotonic() - started_s
            if stats.script_ended() and ran_s >= STEADY_S:
                failures = 0
            if signals.first:
                stats.finish()  # before the message, so that the reason for stopping is the last line
                tell(f"{job.name} stopped by {_signal_name(signals.first)}")
                return 128 + signals.first
            if enforcer.is_stopping or (code == 0 and not enforcer.has_ended_script):
                if code == 0 and (text := _describe_early_end(entry, enforcer, stats)):
                    tell(text)
                return code
            if enforcer.has_ended_script or not enforcer.decision.may_train:
                why = enforcer.decision.text()
                when = f"when training is allowed (not now: {why})" if why else "now"
                tell(f"the script has ended; it will be started again {when}")
                continue
            answer = _ask_after_failure(entry, signals)
            is_removed = answer.refusal == DENIED
            if is_removed and code == JoinRefused.exit_code:  # the script reported why, but not as an error
                console.report_error(str(revoked_error(job.invitation, Identity.read(entry.identity))), code)
                return code
            is_final = answer.is_finished or answer.refusal == VERSION
            may_restart = not is_removed and not is_final
            failure = _failure(job, code, ran_s, suggest_restarts=may_restart and job.restarts == 0)
            if answer.is_finished:
                failure += f'; the run "{entry.run}" has finished'
            is_away = job.restarts > 0 and answer.is_away
            is_counted = not (is_away and code == CoordinatorUnreachable.exit_code)
            is_last = is_final or (failures == job.restarts and is_counted and not is_removed)
            if not (is_last and console.report_error(failure, code)):
                tell(failure)
            if is_removed:
                raise revoked_error(job.invitation, Identity.read(entry.identity))
            if is_last:
                return code
            failures += is_counted
            if is_away:
                _await_coordinator(job, entry, enforcer, signals, tell, restart=failures if is_counted else 0)
                continue
            pause_s = min(MAX_BACKOFF_S, job.backoff_s * 2 ** min(failures - 1, MAX_DOUBLINGS))
            tell(f"restart {failures} of {job.restarts} in {pause_s:g} s")
            if signals.wait(pause_s):
                return 128 + signals.first
        return 128 + signals.first if signals.first else 0


def _describe_early_end(entry: Enrollment, enforcer: PolicyEnforcer, stats: ContributionStats) -> str:
    """Return a message that explains why a script may have ended early without an error; "" if it did not."""
    if enforcer.is_stopping or ask_coordinator(entry, ANSWER_S).is_finished is not False:
        return ""
    if stats.is_empty:
        return (
            "the script ended without a step: no step was left for it, or it does not call gridtrain.join()"
        )
    return (
        f"the script ended after step {stats.step}, before the end of the run; start this worker again to "
        "contribute more"
    )


def _await_coordinator(
    job: Job, entry: Enrollment, enforcer: PolicyEnforcer, signals: SignalWatcher, tell: Tell, *, restart: int
) -> None:
    """Wait until the coordinator answers, or this worker is stopped.

    Without this wait, each restarted script would load its libraries and its model, and end after
    `Deadlines.connect_s`.

    Args:
        restart: the number of the next restart; 0 if it does not count as one.

    Raises:
        CoordinatorUnreachable: the coordinator has not answered for `Job.paused_s`.
    """
    pause_s, until_s = job.backoff_s, _clock() + job.paused_s
    what = f"restart {restart} of {job.restarts}" if restart else "the script will be started again"
    until = datetime.now() + timedelta(seconds=job.paused_s)  # local time, as in the rule "hours"
    tell(f"{what} once the coordinator at {entry.coordinator} answers; waiting for it until {until:%H:%M}")
    while not enforcer.is_stopping and not signals.wait(pause_s) and ask_coordinator(entry, ANSWER_S).is_away:
        if _clock() >= until_s:
            raise CoordinatorUnreachable(
                f"the coordinator at {entry.coordinator} has not answered for {format_age(job.paused_s)}",
                remedy="ask the run's owner whether the run continues, and start this worker again",
            )
        pause_s = min(MAX_BACKOFF_S, 2 * pause_s)


def _ask_after_failure(entry: Enrollment, signals: SignalWatcher) -> Answer:
    """Return the coordinator's answer; a refusal of this worker's key only if it lasts `ACCESS_CHECK_S`."""
    until_s = _clock() + ACCESS_CHECK_S
    while (answer := ask_coordinator(entry, ANSWER_S)).refusal == DENIED and _clock() < until_s:
        if signals.wait(ACCESS_RETRY_S):
            return Answer()
    return answer


def _await_permission(
    enforcer: PolicyEnforcer, signals: SignalWatcher, stats: ContributionStats | None = None
) -> bool:
    """Wait until the owner's rules allow training; return False if the worker is stopping."""
    while not enforcer.is_stopping and not signals.count:
        enforcer.raise_fault()
        if enforcer.decision.may_train:
            return True
        if stats is not None:
            stats.update(time.monotonic(), enforcer.untrained_text)
        signals.wait(LOOK_S)
    return False


class SignalWatcher:
    """Records SIGINT, SIGTERM, SIGHUP (the terminal was closed) and SIGTSTP (Ctrl-Z); a context manager that
    restores the previous handlers.  Under nohup, SIGHUP stays ignored.

    It uses no lock, because a handler must not wait for a lock that the interrupted code may hold.

    Attributes:
        first: the number of the first SIGINT, SIGTERM or SIGHUP; 0 if none has arrived.
        count: the number of these signals received.  SIGHUP counts only if it is the first one, and the next
            SIGINT or SIGTERM replaces it: when a session ends, kernel, shell and logind each send a signal.
    """

    def __init__(self) -> None:
        self.first = 0
        self.count = 0
        self._stop_requested = False
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> SignalWatcher:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous_handlers[number] = signal.signal(number, self._on_signal)
        self._previous_handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._on_stop)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.first in (0, signal.SIGHUP):
            self.first, self.count = number, 1
        else:
            self.count += number != signal.SIGHUP

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop_requested = True

    def suspend_if_requested(self, processes: ScriptProcesses | None = None) -> None:
        """After Ctrl-Z, stop this process and the script's processes until SIGCONT.

        The terminal does not stop the script, which would otherwise train while no agent enforced the rules.
        """
        if not self._stop_requested:
            return
        self._stop_requested = False
        if processes:
            processes.signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        if processes:
            processes.signal(signal.SIGCONT)

    def wait(self, pause_s: float) -> bool:
        """Wait at most `pause_s` for a signal that stops this process; return whether one has arrived."""
        until_s = time.monotonic() + pause_s
        while not self.count and (left_s := until_s - time.monotonic()) > 0:
            self.suspend_if_requested()
            time.sleep(min(left_s, TICK_S))
        return self.count > 0


# -- one run of the script -----------------------------------------------------------------------


def _run_once(
    job: Job,
    variables: Mapping[str, str],
    signals: SignalWatcher,
    enforcer: PolicyEnforcer,
    console: Console,
    stats: ContributionStats,
) -> int:
    """Run the script once, until it and all its descendants have ended; return its exit code."""
    mark = f"{CONTROL_VARIABLE}={variables.get(CONTROL_VARIABLE, '')}"
    with (
        _watchdog(job.grace_s, mark) as watchdog,
        _running_script(job, variables, console, watchdog, mark) as (script, processes),
    ):
        enforcer.set_script(script.pid)
        kill_at_s = terminate_at_s = math.inf
        while (code := script.poll()) is None:
            time.sleep(TICK_S)
            signals.suspend_if_requested(processes)
            processes.reap()
            stats.update(time.monotonic(), enforcer.untrained_text)
            enforcer.raise_fault()
            if (signals.count or enforcer.is_overdue) and kill_at_s == math.inf:
                if not signals.count:
                    enforcer.note_script_ended()
                script.send_signal(signal.SIGINT if signals.first == signal.SIGINT else signal.SIGTERM)
                now_s = time.monotonic()
                kill_at_s = now_s + job.grace_s
                if signals.first == signal.SIGINT and not enforcer.has_script_joined:
                    terminate_at_s = now_s + IMPORT_GRACE_S
                if signals.count:
                    enforcer.stop()
            is_late = time.monotonic() >= terminate_at_s
            if is_late or (terminate_at_s < math.inf and enforcer.has_script_joined):
                script.terminate()
                terminate_at_s = math.inf
            if signals.count > 1 or time.monotonic() >= kill_at_s:
                processes.signal(signal.SIGKILL)
    enforcer.set_script(0)
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _watchdog(grace_s: float, mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that ends the script's processes if this process dies and so closes the pipe to it.

    The caller writes the script's process id to it (0 if the script could not be started), and "done" once
    all of the script's processes have ended.

    Args:
        mark: the environment variable, NAME=VALUE, that only this script is started with.
    """
    watchdog = subprocess.Popen(
        # -I -S: with the standard library alone, it starts in a few milliseconds
        [sys.executable, "-I", "-S", watchdog_program.__file__, str(grace_s), mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert watchdog.stdin is not None
    try:
        yield watchdog
    finally:
        with contextlib.suppress(BrokenPipeError):
            watchdog.stdin.close()
        watchdog.wait()


def _write(watchdog: subprocess.Popen[bytes], line: str) -> None:
    assert watchdog.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the watchdog was killed
        watchdog.stdin.write(f"{line}\n".encode())
        watchdog.stdin.flush()


@contextlib.contextmanager
def _running_script(
    job: Job, variables: Mapping[str, str], console: Console, watchdog: subprocess.Popen[bytes], mark: str
) -> Iterator[tuple[subprocess.Popen[bytes], ScriptProcesses]]:
    """Start the script and yield it with its processes; on exit, terminate all processes that are left."""
    chosen = {one.variable for one in PROGRAMS["worker"]}  # one of them is the secret invitation
    inherited = {name: value for name, value in os.environ.items() if name not in chosen}
    environment = {**inherited, **variables}
    processes = ScriptProcesses(watchdog.pid, mark)
    piped = job.prefix or isinstance(console, TerminalConsole)  # the live line is cleared before output
    if piped:
        environment.setdefault("PYTHONUNBUFFERED", "1")  # otherwise, output to a pipe is buffered
    if isinstance(console, TerminalConsole) and not job.prefix:
        environment[PROGRESS] = "terminal"
    is_wrapped = isinstance(console, JsonConsole)  # the lines of stderr become JSON
    try:
        script = subprocess.Popen(
            job.command,
            env=environment,
            cwd=job.folder or None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else None,
            stderr=subprocess.PIPE if piped or is_wrapped else None,
            process_group=0,  # so that Ctrl-C reaches only the agent
        )
    except OSError as error:
        processes.close()
        _write(watchdog, "0")
        raise ConfigError(
            f"cannot start {job.command[0]!r}: {error.strerror}",
            remedy="check the command after the two dashes, for instance: -- python train.py",
        ) from None
    _write(watchdog, str(script.pid))
    processes.begin(script.pid)
    label, copiers = job.name if job.prefix else "", []
    for pipe, stream in ((script.stdout, sys.stdout), (script.stderr, sys.stderr)):
        if pipe is not None:
            copiers.append(threading.Thread(target=_copy, args=(pipe, stream, label, console), daemon=True))
            copiers[-1].start()
    try:
        yield script, processes
    finally:
        _end(script, processes)
        _write(watchdog, "done")
        for copier in copiers:
            copier.join(EXIT_TIMEOUT_S)
        console.end_output()


def _end(script: subprocess.Popen[bytes], processes: ScriptProcesses) -> None:
    """Terminate the processes that the script has left behind, or all of them if it is still running."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        processes.signal(number)
        until_s = time.monotonic() + EXIT_TIMEOUT_S
        while (is_alive := script.poll() is None or processes.are_alive()) and time.monotonic() < until_s:
            time.sleep(TICK_S)
        if not is_alive:
            break
    processes.close()
    script.wait()


def _copy(pipe: IO[bytes], stream: TextIO, name: str, console: Console) -> None:
    """Copy the script's output: each line with the worker's name before it, or unchanged if there is no name.

    Without a name, an incomplete line is copied after `PARTIAL_LINE_S`, because it may be a prompt.
    """
    with pipe:
        if name:
            for line in pipe:
                console.write_output(f"[{name}] {line.decode(errors='replace')}", stream)
            return
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        partial, until_s = "", math.inf
        while True:
            left_s = max(0.0, until_s - time.monotonic()) if partial else None
            is_late = not select.select([pipe], [], [], left_s)[0]
            piece = b"" if is_late else os.read(pipe.fileno(), 1 << 16)
            text = partial + decoder.decode(piece)
            shown = text[: text.rfind("\n") + 1] if piece and len(text) < 1 << 17 else text
            if shown or not partial:
                until_s = time.monotonic() + PARTIAL_LINE_S
            partial = text[len(shown) :]
            if shown:
                console.write_output(shown, stream)
            if not piece and not is_late:
                return


def _failure(job: Job, code: int, ran_s: float, *, suggest_restarts: bool) -> str:
    """Return a sentence that says how the script failed and what to do next."""
    command = shlex.join(job.command)
    if code > 128 and code - 128 in {*signal.Signals}:
        name = _signal_name(code - 128)
        hint = "its last lines are above"
        if name == "SIGKILL":
            hint = "the cause is often a lack of memory; see the system's log"
        return f"the script was killed by {name} after {ran_s:.1f} s ({command}) -> {hint}"
    hint = "see its output above"
    if suggest_restarts and code not in USUALLY_FINAL_EXIT_CODES:
        hint += "; if it may succeed next time, --restarts N starts it again"
    return f"the script ended with exit code {code} after {ran_s:.1f} s ({command}) -> {hint}"


def _signal_name(number: int) -> str:
    return signal.Signals(number).name
