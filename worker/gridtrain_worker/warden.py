"""The agent's conscience: looks at rules, sensors and the day's bytes, and tells the script what is wanted.

Decides when the script is told to go and to come, and when it has had its time to obey.  The rules are
`controls`', bytes are `budget`'s, the socket is `control`'s; processes are the agent's.

    every `LOOK_S`:  sensors, clock, Budget --> Controls.decide --> a wish, pushed where it is another one
    set, show, pause, resume, stop  <------ the owner, over the same socket
    moved_bytes  <------------------------- the script, four times a second --> Budget, on the disk
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from datetime import date, datetime, timedelta
from pathlib import Path

from gridtrain.errors import ConfigError
from gridtrain.runtime.owner import SPENT
from gridtrain.testing.sensors import FileSensors
from gridtrain.transport.limits import parse_rate
from gridtrain_worker.budget import Budget
from gridtrain_worker.control import Body, Control
from gridtrain_worker.controls import SENSORS, Controls, Decision, Readings, Rules, seconds
from gridtrain_worker.kept import Kept
from gridtrain_worker.sensors import MachineSensors, Sensors

LOOK_S = 0.5
OBEY_S = 120.0
"""So long a script has to get to the end of its step; then it is sent SIGTERM, and started again later."""

LONGEST_PAUSE_S = 366 * 86_400.0


def sensors_of(path: str) -> Sensors:
    """Those in the file of that name; "": the machine's."""
    return FileSensors(Path(path)) if path else MachineSensors()


class Warden:
    """See the module's text.  A context manager; works in a thread of its own in between.

    Args:
        folder: of this worker: its rules, its budget, its socket.
        name: until the run calls this worker otherwise, as two want one name.
        run, key: how it can be told from others: see `control.the_worker`.
        given: from the command line; those that `set` has written there before hold beside them.
        now: local time, without a zone.

    Raises `ConfigError` where a rule cannot be kept on this machine.
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
        self._name, self._tell, self._now = name, _unfailing(tell), now
        self._sensors = sensors or sensors_of("")
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._pids: tuple[int, ...] = ()
        self._script: Body = {}
        self._moved_bytes = 0
        self._since_s: float | None = None
        self._greeted: set[int] = set()
        self._uncounted = ""  # why the day's bytes cannot be counted
        self._spent: tuple[date, int] | None = None  # the day, and the budget that the script found too small
        self._fault: BaseException | None = None
        self.stopping = False
        self.ended_it = False  # the agent has, since the script did not obey
        self._pushed: Body = {}
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._budget = Budget(folder)
        self._given, self._kept = given, Kept(folder)
        self._controls = Controls(Rules().changed(self._kept.rules(given)))
        self._take_up()
        self._readings = self._sensors.read((), self._controls.rules.sensors)
        self._refuse_unreadable(self._controls)
        self.decision = Decision(True)
        self._look()
        self._control = Control(folder, self._answer, self._greet, self._hear)
        self.path = self._control.path
        self._thread = threading.Thread(target=self._main, name="gridtrain-warden", daemon=True)

    def _take_up(self) -> None:
        """What its owner said while it ran before holds on, and is said."""
        until = self._kept.until
        if self._kept.paused and (until is None or until > self._now()):
            self._controls.pause(until)
            self._tell("its owner paused it before it ended; it goes on with: gridtrain worker resume")
        for key, text in self._kept.later(self._given).items():
            if key in self._given:
                self._tell(f"{key}={text}, as it was set later than {self._given[key]} of this start")

    def __enter__(self) -> Warden:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._control.close()

    # -- what the agent asks ---------------------------------------------------------------------

    def script_runs(self, pid: int) -> None:
        """It was started; `pid` 0: it has ended."""
        with self._lock:
            self._pids = (pid,) if pid else ()
            self._script, self._moved_bytes, self._since_s = {}, 0, None
            self.ended_it = self.ended_it and not pid

    @property
    def rules(self) -> Rules:
        with self._lock:
            return self._controls.rules

    def check(self) -> None:
        """Raises if nobody keeps the rules any more, by a fault of ours: then nothing may train."""
        if self._fault is not None:
            raise RuntimeError("this worker's rules are not kept any more") from self._fault

    @property
    def overdue(self) -> bool:
        """The script was told to rest, and has not obeyed for too long."""
        with self._lock:
            if self.decision.run or self._script.get("state") == "paused":
                self._since_s = None
                return False
            self._since_s = self._since_s or time.monotonic()
            return time.monotonic() - self._since_s >= OBEY_S

    # -- what the owner asks ---------------------------------------------------------------------

    def _answer(self, question: Body) -> Body:
        with self._lock:
            match question.get("ask"):
                case "show":
                    self._readings = self._sensed(SENSORS)
                case "set":
                    self._set({str(key): str(value) for key, value in dict(question["settings"]).items()})
                case "pause":
                    self._controls.pause(until := self._until(str(question.get("for", ""))))
                    self._remember(lambda: self._kept.pause(until))
                case "resume":
                    self._controls.resume()
                    self._remember(self._kept.resume)
                case "stop":
                    self.stopping = True
                    self._remember(self._kept.resume)  # who starts it again means it
                case other:
                    raise ConfigError(
                        f"a worker cannot be asked to {other!r}", remedy="see gridtrain worker --help"
                    )
            self._look()
            self._push()
            return self._shown()

    def _remember(self, write: Callable[[], None]) -> None:
        """The owner's word holds now, whatever becomes of it at the next start."""
        try:
            write()
        except ConfigError as error:
            self._tell(f"{error.reason}: a restart of this worker will not know of this")

    def _set(self, settings: dict[str, str]) -> None:
        changed = Controls(self._controls.rules.changed(settings))
        self._readings = self._sensed(changed.rules.sensors)
        self._refuse_unreadable(changed)
        self._kept.set(settings, self._given)
        self._controls.rules = changed.rules
        self._tell("its rules are now " + ", ".join(f"{k}={v}" for k, v in settings.items()))

    def _sensed(self, names: Collection[str]) -> Readings:
        """Where none of them can be read all are absent: what was read before says nothing of now."""
        try:
            return self._sensors.read(self._pids, names)
        except ConfigError as error:
            return Readings(absent=dict.fromkeys(SENSORS, error.reason))

    def _refuse_unreadable(self, controls: Controls) -> None:
        missing = controls.unreadable(self._readings)
        if missing:
            said = "; ".join(f"the sensor of {name} cannot be read: {why}" for name, why in missing.items())
            raise ConfigError(
                said,
                remedy="a rule that nobody can keep is not taken on: leave it out, or see to its sensor",
            )

    def _until(self, text: str) -> datetime | None:
        if not text:
            return None
        length_s = seconds(text)
        if length_s is None or not 0 < length_s <= LONGEST_PAUSE_S:
            raise ConfigError(f"{text!r} is no duration", remedy="write for instance 30m or 2h")
        return self._now() + timedelta(seconds=length_s)

    def _shown(self) -> Body:
        readings = self._readings
        return {
            "name": self._name,
            "run": self._run,
            "key": self._key,
            "state": "paused" if not self.decision.run else str(self._script.get("state", "starting")),
            "reason": self.decision.text(),
            "obeyed": self.decision.run or self._script.get("state") == "paused" or not self._pids,
            "stopping": self.stopping,
            "clock": f"{self._now():%H:%M} {time.strftime('%Z')}".rstrip(),
            "rules": self._controls.rules.texts(),
            "moved_today_bytes": self._budget.today_bytes(self._now().date()),
            "readings": {
                "battery": readings.on_battery,
                "gpu": readings.gpu_used,
                "idle": readings.idle_s,
                "temperature": readings.temperature_C,
            },
            "absent": dict(readings.absent),
        }

    # -- what the script says --------------------------------------------------------------------

    def _greet(self, pid: int) -> Body:
        with self._lock:
            if pid not in self._greeted:
                self._moved_bytes = 0  # a process that was started anew counts from nothing
            self._greeted = {pid}
            self._pids = tuple({*self._pids, pid})
            self._pushed = self._wish()
            return self._pushed

    def _hear(self, said: Body) -> None:
        moved_bytes = said.get("moved_bytes", 0)
        with self._lock:
            self._script = said
            self._is_called(str(said.get("name") or self._name))
            if said.get("state") == SPENT:
                self._spent = self._now().date(), self._controls.rules.budget_bytes
                self._look()
            if isinstance(moved_bytes, int) and moved_bytes > self._moved_bytes:
                more, self._moved_bytes = moved_bytes - self._moved_bytes, moved_bytes
                try:
                    self._budget.add(more, self._now().date(), sure=self._controls.rules.budget_bytes > 0)
                except ConfigError as error:
                    self._uncounted = error.reason
                self._push()

    def _is_called(self, name: str) -> None:
        if name != self._name:
            self._tell(f"{self._name} is called {name} in this run: gridtrain worker show --worker {name}")
            self._name = name

    # -- every half second -----------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._ended.wait(LOOK_S):
                with self._lock:
                    self._readings = self._sensed(self._controls.rules.sensors)
                    self._look()
                    self._push()
        except BaseException as fault:  # a bug: the agent learns of it, and ends the script
            self._fault = fault
            raise

    def _look(self) -> None:
        now = self._now()
        before = self.decision
        moved_bytes, budget_bytes = self._budget.today_bytes(now.date()), self._controls.rules.budget_bytes
        if self._spent == (now.date(), budget_bytes):
            moved_bytes = max(moved_bytes, budget_bytes)
        self.decision = self._controls.decide(self._readings, moved_bytes, now)
        if self._uncounted:
            self._count_again()
        if self._uncounted and self._controls.rules.budget_bytes:
            self.decision = Decision(False, (*self.decision.reasons, self._uncounted))
        if self.decision.text() != before.text():
            self._tell(f"paused: {self.decision.text()}" if not self.decision.run else "may train again")

    def _count_again(self) -> None:
        """There may be room now for what could not be counted."""
        with contextlib.suppress(ConfigError):
            self._budget.keep()
            self._uncounted = ""

    def _push(self) -> None:
        wish = self._wish()
        if wish != self._pushed:
            self._pushed = wish
            self._control.push(wish)

    def _wish(self) -> Body:
        rules, now = self._controls.rules, self._now()
        most: int | None = None
        if rules.budget_bytes:
            most = self._moved_bytes + rules.budget_bytes - self._budget.today_bytes(now.date())
        return {
            "run": self.decision.run,
            "reason": self.decision.text(),
            "stop": self.stopping,
            "most_bytes": most,
            "upload_Bps": parse_rate(rules.upload) if rules.upload else None,
            "download_Bps": parse_rate(rules.download) if rules.download else None,
            "spent_text": "the day's bytes are used up, until 00:00",
        }


def _unfailing(tell: Callable[[str], None]) -> Callable[[str], None]:
    """A line that cannot be written (a full disk, a closed terminal) costs the line, not the rules."""

    def told(line: str) -> None:
        with contextlib.suppress(OSError):
            tell(line)

    return told
