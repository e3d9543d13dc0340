"""Applies the owner's rules to a script: decides at intervals, sends limits, and notices disobedience.

every `LOOK_S` s: sensors, clock, Budget --> TrainingPolicy.decide --> a directive, sent to the script
set, show, pause, resume, stop <-------- the owner, over the control socket
moved_bytes <--------------------------- the script, four times a second --> Budget, on disk
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection
from datetime import date, datetime, timedelta
from pathlib import Path

from gridtrain.core.group.sensor_readings import SensorReadings
from gridtrain.errors import BudgetSpent, ConfigError
from gridtrain.network.transport.identity import make_private_folder
from gridtrain.network.transport.rate_limiter import parse_rate
from gridtrain.quantities import parse_duration_s
from gridtrain.runtime.client.agent_link import BUDGET_EXHAUSTED, DAY_BYTES
from gridtrain.testing.fake_sensors import FileSensors
from gridtrain.training.data.fetch_meter import FIELDS, FetchMeter
from gridtrain_worker.budget import Budget
from gridtrain_worker.control_socket import Body, ControlSocket
from gridtrain_worker.saved_settings import SavedSettings
from gridtrain_worker.sensors import MachineSensors, Sensors
from gridtrain_worker.training_policy import SENSORS, PolicyDecision, Rules, TrainingPolicy

LOOK_S = 0.5
OBEY_TIMEOUT_S = 120.0
"""How long a script may take to finish its step after a pause or stop command before SIGTERM is sent."""

MAX_PAUSE_S = 366 * 86_400.0


def load_sensors(path: str) -> Sensors:
    """Return sensors that read the file `path`, or this machine's sensors if `path` is empty."""
    return FileSensors(Path(path)) if path else MachineSensors()


class PolicyEnforcer:
    """Enforces one worker's rules from a background thread; a context manager.

    Args:
        folder: the folder for this worker's rules, budget and socket.
        name: the worker's name, until the run assigns another one.
        given: the rules from the command line, by key; rules that were saved earlier also apply.
        tell: shows a message to the owner.
        run, key: identify the worker together with its name; see `control_socket.find_worker`.
        sensors: the sensors to read; by default this machine's.
        now: returns local time without a time zone.

    Attributes:
        decision: the latest decision.
        is_stopping: whether the script is to stop for good.
        has_ended_script: whether the agent has terminated the latest script for not obeying in time.

    Raises:
        ConfigError: a rule is malformed or cannot be enforced on this machine, or a file or the socket in
            `folder` cannot be read or created.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        given: dict[str, str],
        tell: Callable[[str], None],
        *,
        run: str = "",
        key: str = "",
        sensors: Sensors | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._run, self._key = run, key
        self._name, self._tell, self._now = name, _ignore_write_errors(tell), now
        self._sensors = sensors or load_sensors("")
        self._lock = threading.RLock()
        self._stop_event = threading.Event()
        self._pids: tuple[int, ...] = ()
        self._script_status: Body = {}
        self._moved_bytes = 0
        self._knows_day_bytes = False  # whether the script knows `DAY_BYTES`, unlike older scripts
        self._disobeyed_since_s: float | None = None
        self._counted_pid = 0  # the process that `_moved_bytes` belongs to
        self._budget_error = ""  # the reason why traffic cannot be counted
        # The day, and the budget that the script found insufficient for another step.
        self._spent_budget: tuple[date, int] | None = None
        self._fault: BaseException | None = None
        self.is_stopping = False
        self.has_ended_script = False
        self._last_pushed: Body = {}
        make_private_folder(folder)
        self._budget = Budget(folder)
        self._start_settings, self._saved_settings = given, SavedSettings(folder)
        self._policy = TrainingPolicy(Rules().with_settings(self._saved_settings.effective_rules(given)))
        self._restore()
        self._readings = self._sensors.read((), self._policy.rules.sensors)
        self._check_readable(self._policy)
        self.decision = PolicyDecision(True)
        self._decide()
        self._control_socket = ControlSocket(
            folder, self._answer, self._on_script_connected, self._on_script_status
        )
        self.path = self._control_socket.path
        self._thread = threading.Thread(target=self._main, name="gridtrain-policy", daemon=True)

    def _restore(self) -> None:
        """Apply and report the pause and the rules that the owner set before this start."""
        until = self._saved_settings.until
        if self._saved_settings.is_paused and (until is None or until > self._now()):
            self._policy.pause(until)
            self._tell(
                "still paused, because this worker's owner paused it before the restart; to continue, run "
                "gridtrain worker resume"
            )
        saved = self._saved_settings.later_rules(self._start_settings)
        for key, text in saved.items():
            if key in self._start_settings:
                self._tell(
                    f"{key}={text} applies instead of {self._start_settings[key]}, because it was set later"
                )
        kept = [
            f"{key}={text}"
            for key, text in saved.items()
            if key not in self._start_settings and Rules().with_settings({key: text}) != Rules()
        ]
        if kept:
            self._tell(
                f"saved rules of this worker's key apply: {' '.join(kept)} (change them with gridtrain "
                "worker set)"
            )

    def __enter__(self) -> PolicyEnforcer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_event.set()
        self._thread.join()
        self._control_socket.close()
        with self._lock, contextlib.suppress(ConfigError):
            self._budget.keep()

    # -- called by the agent ---------------------------------------------------------------------

    def set_script(self, pid: int) -> None:
        """Record the process id of the script that has started, or 0 once it has ended."""
        with self._lock:
            self._pids = (pid,) if pid else ()
            self._script_status, self._disobeyed_since_s = {}, None
            if pid and pid == self._counted_pid:
                self._moved_bytes = 0  # the id has been reused, or the script has already connected
            self.has_ended_script = self.has_ended_script and not pid

    @property
    def has_script_joined(self) -> bool:
        """Whether the script has called `gridtrain.join`."""
        with self._lock:
            return bool(self._script_status)

    def stop(self) -> None:
        """Make the script stop after its step."""
        with self._lock:
            self.is_stopping = True
            self._push()

    @property
    def rules(self) -> Rules:
        with self._lock:
            return self._policy.rules

    def raise_fault(self) -> None:
        """Raise `RuntimeError` if the background thread has failed; no script may train without it."""
        if self._fault is not None:
            raise RuntimeError("this worker's rules are no longer enforced") from self._fault

    def allow_fetch(self) -> tuple[float | None, float]:
        """Return the download limit in bytes per second (None if there is none), and the number of bytes left
        in the day's budget (infinite if there is none).

        Raises:
            BudgetSpent: the rules do not currently allow training, or this worker is stopping.
            RuntimeError: the background thread has failed.
        """
        self.raise_fault()
        with self._lock:
            self._decide()
            if self.is_stopping or not self.decision.may_train:
                raise BudgetSpent(self.decision.text() or "stopped by its owner", remedy="wait")
            rules = self._policy.rules
            left_bytes = math.inf
            if rules.budget_bytes:
                left_bytes = rules.budget_bytes - self._budget.today_bytes(self._now().date())
            return parse_rate(rules.download) if rules.download else None, left_bytes

    def count_fetched(self, nbytes: int) -> None:
        """Count bytes that the agent has fetched."""
        with self._lock:
            self._count(nbytes)

    def _count(self, nbytes: int) -> None:
        """Count `nbytes`, which may be 0, and write the counts if a write is due.  The lock must be held."""
        try:
            self._budget.add(nbytes, self._now().date(), sure=self._policy.rules.budget_bytes > 0)
        except ConfigError as error:
            self._budget_error = error.reason

    @property
    def is_overdue(self) -> bool:
        """Whether the script has not obeyed a request to pause or stop within `OBEY_TIMEOUT_S`."""
        with self._lock:
            if self._is_obeyed and not self.is_stopping:
                self._disobeyed_since_s = None
                return False
            self._disobeyed_since_s = self._disobeyed_since_s or time.monotonic()
            return time.monotonic() - self._disobeyed_since_s >= OBEY_TIMEOUT_S

    @property
    def _is_obeyed(self) -> bool:
        """Whether the script may train or has paused."""
        return self.decision.may_train or self._script_status.get("state") == "paused"

    @property
    def untrained_text(self) -> str:
        """What the script is doing instead of training, and why ("paused: battery"); "" if it is training."""
        with self._lock:
            state = self._state()
            reason = self._reason(state)
            return "" if state == "training" else f"{state}: {reason}" if reason else state

    def note_script_ended(self) -> None:
        """Record, until the next script starts, that the agent is terminating an overdue script."""
        self.has_ended_script = True
        what = "stop" if self.is_stopping else "pause"
        self._tell(f"the script did not {what} within {OBEY_TIMEOUT_S:g} s; terminating it with SIGTERM")

    # -- called over the socket, by the owner ----------------------------------------------------

    def _answer(self, question: Body) -> Body:
        with self._lock:
            match question.get("ask"):
                case "show":
                    self._readings = self._read_sensors(SENSORS)
                case "set":
                    settings = dict(question["settings"])
                    self._change_rules({str(key): str(value) for key, value in settings.items()})
                case "pause":
                    self._policy.pause(until := self._until(str(question.get("for", ""))))
                    self._save(lambda: self._saved_settings.pause(until))
                case "resume":
                    self._policy.resume()
                    self._save(self._saved_settings.resume)
                case "stop":
                    self.is_stopping = True
                    self._save(self._saved_settings.resume)  # a new start is not paused
                case other:
                    raise ConfigError(f"unknown request {other!r}", remedy="see gridtrain worker --help")
            self._decide()
            self._push()
            return self._status()

    def _save(self, write: Callable[[], None]) -> None:
        """Save the owner's command; if saving fails, the command still applies until the next start."""
        try:
            write()
        except ConfigError as error:
            self._tell(f"{error.reason}; therefore this command will not apply after a restart")

    def _change_rules(self, settings: dict[str, str]) -> None:
        changed = TrainingPolicy(self._policy.rules.with_settings(settings))
        self._readings = self._read_sensors(changed.rules.sensors)
        self._check_readable(changed)
        self._policy.rules = changed.rules
        self._save(lambda: self._saved_settings.save_rules(settings, self._start_settings))
        self._tell("this worker's rules are now " + ", ".join(f"{k}={v}" for k, v in settings.items()))

    def _read_sensors(self, names: Collection[str]) -> SensorReadings:
        """Return the current readings; if reading raises an error, all are absent."""
        try:
            return self._sensors.read(self._pids, names)
        except ConfigError as error:
            return SensorReadings(absent=dict.fromkeys(SENSORS, error.reason))

    def _check_readable(self, policy: TrainingPolicy) -> None:
        missing = policy.unreadable(self._readings)
        if missing:
            said = "; ".join(f'the "{name}" sensor cannot be read: {why}' for name, why in missing.items())
            raise ConfigError(said, remedy="remove the rule, or make its sensor readable")

    def _until(self, text: str) -> datetime | None:
        if not text:
            return None
        length_s = parse_duration_s(text)
        if length_s is None or not 0 < length_s <= MAX_PAUSE_S:
            raise ConfigError(
                f"{text!r} is not a duration of at most a year", remedy="use a duration such as 30m or 2h"
            )
        return self._now() + timedelta(seconds=length_s)

    def _status(self) -> Body:
        readings = self._readings
        return {
            "name": self._name,
            "run": self._run,
            "key": self._key,
            "state": (state := self._state()),
            "reason": self._reason(state),
            "obeyed": self._is_obeyed or not self._pids,
            "stopping": self.is_stopping,
            "clock": f"{self._now():%H:%M} {time.strftime('%Z')}".rstrip(),
            "rules": self._policy.rules.texts(),
            "moved_today_bytes": self._budget.today_bytes(self._now().date()),
            "readings": {
                "battery": readings.on_battery,
                "gpu": readings.gpu_used,
                "idle": readings.idle_s,
                "temperature": readings.temperature_C,
            },
            "absent": dict(readings.absent),
        }

    def _state(self) -> str:
        """Return the script's state, or the state that it will have once the decision has taken effect."""
        if not self.decision.may_train:
            return "paused"
        state = str(self._script_status.get("state", "starting"))
        if state == "paused":
            return "resuming"
        return "waiting" if self._why_waiting else state

    def _reason(self, state: str) -> str:
        return self._why_waiting if state == "waiting" else self.decision.text()

    @property
    def _why_waiting(self) -> str:
        """Why no worker of the run is training, as reported by the script; "" if it reports no reason."""
        return str(self._script_status.get("why_waiting") or "")

    # -- called over the socket, by the script ---------------------------------------------------

    def _on_script_connected(self, hello: Body) -> Body:
        pid, known = int(hello["pid"]), hello.get("knows")
        with self._lock:
            self._knows_day_bytes = isinstance(known, list) and DAY_BYTES in known
            if pid != self._counted_pid:
                self._counted_pid, self._moved_bytes = pid, 0  # a new process counts from 0
            self._pids = tuple({*self._pids, pid})
            self._last_pushed = self._wanted_state()
            return self._last_pushed

    def _on_script_status(self, pid: int, said: Body) -> None:
        moved_bytes = said.get("moved_bytes", 0)
        with self._lock:
            if pid != self._counted_pid:
                return  # read only after the next process had connected
            self._script_status = said
            self._update_name(str(said.get("name") or self._name))
            now = self._now()
            # The script pauses before all bytes are used.
            has_paused = said.get("state") == "paused" and said.get("reason") == self._spent_text(now)
            if said.get("state") == BUDGET_EXHAUSTED or has_paused:
                self._spent_budget = now.date(), self._policy.rules.budget_bytes
                self._decide()
            if isinstance(moved_bytes, int) and moved_bytes > self._moved_bytes:
                more, self._moved_bytes = moved_bytes - self._moved_bytes, moved_bytes
                self._count(more)
                self._push()

    def _update_name(self, name: str) -> None:
        if name != self._name:
            self._tell(f"{self._name} is named {name} in this run; use --worker {name} in commands")
            self._name = name

    # -- the background thread -------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._stop_event.wait(LOOK_S):
                with self._lock:
                    self._readings = self._read_sensors(self._policy.rules.sensors)
                    self._count(0)
                    self._decide()
                    self._push()
        except BaseException as fault:  # a bug: `raise_fault` reports it, and the agent stops the script
            self._fault = fault
            raise

    def _decide(self) -> None:
        now = self._now()
        before = self.decision
        moved_bytes, budget_bytes = self._budget.today_bytes(now.date()), self._policy.rules.budget_bytes
        if self._spent_budget == (now.date(), budget_bytes):
            moved_bytes = max(moved_bytes, budget_bytes)
        self.decision = self._policy.decide(self._readings, moved_bytes, now)
        if self._budget_error:
            with contextlib.suppress(ConfigError):  # another attempt to write the counts
                self._budget.keep()
                self._budget_error = ""
        if self._budget_error and self._policy.rules.budget_bytes:
            self.decision = PolicyDecision(False, (*self.decision.reasons, self._budget_error))
        if self.decision.text() != before.text():
            paused = f"paused: {self.decision.text()}"
            self._tell("training is allowed again" if self.decision.may_train else paused)

    def _push(self) -> None:
        directive = self._wanted_state()
        if directive != self._last_pushed:
            self._last_pushed = directive
            self._control_socket.push(directive)

    def _spent_text(self, now: datetime) -> str:
        """Return why the script pauses once the budget is used up; different for each day and budget."""
        budget = self._policy.rules.texts()["budget"]
        return f"the traffic budget of {now:%d %B}, {budget}, is used up, until 00:00"

    def _wanted_state(self) -> Body:
        rules, now = self._policy.rules, self._now()
        max_bytes: int | None = None
        if rules.budget_bytes:
            max_bytes = self._moved_bytes + rules.budget_bytes - self._budget.today_bytes(now.date())
        return {
            "run": self.decision.may_train,
            "reason": self.decision.text(),
            "stop": self.is_stopping,
            "most_bytes": max_bytes,
            "upload_Bps": parse_rate(rules.upload) if rules.upload else None,
            "download_Bps": parse_rate(rules.download) if rules.download else None,
            "spent_text": self._spent_text(now),
            **({DAY_BYTES: rules.budget_bytes or None} if self._knows_day_bytes else {}),
        }


class AgentMeter(FetchMeter):
    """Counts and limits the bytes that the agent itself fetches; while the rules forbid training, requests
    raise `BudgetSpent`."""

    def __init__(self, enforcer: PolicyEnforcer) -> None:
        super().__init__(fields=[0.0] * FIELDS)
        self._enforcer = enforcer

    def _follow_limit(self) -> None:
        download_Bps, left_bytes = self._enforcer.allow_fetch()
        day_bytes = self._enforcer.rules.budget_bytes or math.inf
        self.limit(download_Bps, self.fetched_bytes + left_bytes, day_bytes)
        super()._follow_limit()

    def count(self, nbytes: int) -> None:
        super().count(nbytes)
        self._enforcer.count_fetched(nbytes)


def _ignore_write_errors(tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return a `tell` that drops a line that cannot be written (full disk, closed terminal)."""

    def tell_if_possible(line: str) -> None:
        with contextlib.suppress(OSError):
            tell(line)

    return tell_if_possible
